"""`splice up --on k8s --dry-run`: a JobSet manifest from a run.toml, as JSON, which kubectl reads.

    Secret NAME-token (made once, by hand)  ->  SPLICE_RUN_TOKEN in every container
    replicated jobs: orchestrator, trainer, inference-0 ...; each pod is reached by JobSet's DNS

The run's folder is a volume that all pods share. The token is never in the manifest.
"""

from __future__ import annotations

import json
import re
from typing import Any

from orchestrator.errors import ConfigError
from splice.hosts import CLIENT, check_several_hosts, keys_of, numbered_from_0
from splice.run_file import RunFile

FILE = "/etc/splice/run.json"


def manifest(run: RunFile, *, trainer_image: str, inference_image: str, claim: str) -> str:
    """Return a List of a ConfigMap with the run's file and a JobSet.

    Args:
        claim: PersistentVolumeClaim mounted at the run's folder in every pod, ReadWriteMany.

    Raises:
        ConfigError: the settings cannot work on several hosts, or no image is named.
    """
    if not trainer_image or not inference_image:
        raise ConfigError("name both images: --trainer-image and --inference-image")
    port = check_several_hosts(run)
    if run.trainer.gpus and run.trainer.parallel.world_size > len(run.trainer.gpus):
        raise ConfigError("a trainer on several hosts has no manifest yet; use --on slurm")
    name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:30] or "run"
    head = f"{name}-orchestrator-0-0.{name}"
    values = json.loads(numbered_from_0(run))
    each = run.inference.tensor_parallel if run.inference.device == "cuda" else 0
    values["trainer"]["python"] = values["inference"]["python"] = "python"
    common = {"name": name, "claim": claim, "run_dir": str(run.run_dir),
              "endpoint": f"tcp://{head}:{port}"}  # fmt: skip
    serve = f"exec splice serve {FILE} --resume"
    train = f"exec splice trainer {FILE} --set trainer.host=$(hostname -i)"
    jobs = [
        _job("orchestrator", serve, image=trainer_image, gpus=0, **common),
        _job(
            "trainer",
            train,
            image=trainer_image,
            gpus=len(run.trainer.gpus),
            curve_dir=str(keys_of(run, "trainer")),
            **common,
        ),
    ]
    for i in range(run.inference.replicas):
        role = f"inference-{i}"
        command = f"exec splice inference {FILE} --index {i} --set inference.host=0.0.0.0"
        jobs.append(
            _job(
                role,
                command,
                image=inference_image,
                gpus=each,
                curve_dir=str(keys_of(run, role)),
                **common,
            )
        )
    if run.has_router:
        route = f"exec splice router {FILE} --set router.host=0.0.0.0"
        jobs.append(
            _job(
                "router",
                route,
                image=trainer_image,
                gpus=0,
                curve_dir=str(keys_of(run, CLIENT)),
                **common,
            )
        )
    file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-file"},
        "data": {"run.json": json.dumps(values)},
    }
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["orchestrator"]},
            "replicatedJobs": jobs,
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [file, jobset]}, indent=1)


def _job(
    role: str, command: str, *, image: str, gpus: int, name: str, claim: str, run_dir: str,
    endpoint: str, curve_dir: str = "",
) -> dict[str, Any]:  # fmt: skip
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    container = {
        "name": role,
        "image": image,
        "command": ["bash", "-c", command],
        "env": [
            {"name": "SPLICE_RUN_TOKEN", "valueFrom": token},
            {"name": "SPLICE_ENDPOINT", "value": endpoint},
            *([{"name": "SPLICE_CURVE_DIR", "value": curve_dir}] if curve_dir else []),
        ],
        "resources": {"limits": {"nvidia.com/gpu": gpus}} if gpus else {},
        "volumeMounts": [
            {"name": "run", "mountPath": run_dir},
            {"name": "file", "mountPath": "/etc/splice"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "file", "configMap": {"name": f"{name}-file"}},
            # A pod has 64 MiB, and vLLM's processes share 160 MiB.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {"parallelism": 1, "completions": 1, "template": {"spec": pod}}
    return {"name": role, "replicas": 1, "template": {"spec": job}}
