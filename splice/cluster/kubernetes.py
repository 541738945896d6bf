"""`splice up --on k8s --dry-run`: a JobSet manifest from a run.toml, as JSON, which kubectl reads.

    Secret NAME-token (made once, by hand)  ->  SPLICE_RUN_TOKEN in every container
    replicated jobs: orchestrator, trainer, inference-0 ...; each pod is reached by JobSet's DNS

The run's folder is a volume that all pods share. The token is never in the manifest.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from splice.client.run_file import RunFile
from splice.cluster.roles import (
    Role,
    check_several_hosts,
    numbered_from_0,
    refuse_many_hosts,
    roles_of,
)

FILE = "/etc/splice/run.json"
SMALL_CPUS, SMALL_GIB = 2, 8
"""What a pod without GPUs requests: the orchestrator holds up to 4 GiB of batches."""


def manifest(
    run: RunFile,
    *,
    trainer_image: str,
    inference_image: str,
    claim: str,
    cpus_per_gpu: int = 8,
    memory_per_gpu: int = 64,
    data_folder: Path | None = None,
) -> str:
    """Return a Kubernetes `List`: a ConfigMap with the run's file, and a JobSet.

    Args:
        claim: PersistentVolumeClaim mounted at the run's folder in every pod, ReadWriteMany.
        cpus_per_gpu, memory_per_gpu: what a pod requests for each of its GPUs; memory in GiB.
        data_folder: folder of the loop's data, as in `roles_of`. The JobSet ends with the loop.

    Raises:
        ConfigError: the settings cannot work on several hosts, or no image is named.
    """
    if not trainer_image or not inference_image:
        raise ConfigError("name both images: --trainer-image and --inference-image")
    port = check_several_hosts(run)
    roles = roles_of(run, FILE, is_spread=True, data_folder=data_folder)
    refuse_many_hosts(roles, launcher="k8s")
    name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:30] or "run"
    head = f"{name}-orchestrator-0-0.{name}"
    values = json.loads(numbered_from_0(run))
    values["trainer"]["python"] = values["inference"]["python"] = "python"
    jobs = [
        _job(
            role,
            image=inference_image if role.kind == "inference" else trainer_image,
            name=name,
            claim=claim,
            run_dir=str(run.run_dir),
            endpoint=f"tcp://{head}:{port}",
            requests={
                "cpu": str(cpus_per_gpu * role.gpus or SMALL_CPUS),
                "memory": f"{memory_per_gpu * role.gpus or SMALL_GIB}Gi",
            },
        )
        for role in roles
    ]
    file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-file"},
        "data": {"run.json": json.dumps(values)},
    }
    last = "orchestrator" if data_folder is None else roles[-1].name
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "successPolicy": {
                "operator": "All",
                "targetReplicatedJobs": [last],
            },
            "replicatedJobs": jobs,
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [file, jobset]}, indent=1)


def _job(
    role: Role,
    *,
    image: str,
    name: str,
    claim: str,
    run_dir: str,
    endpoint: str,
    requests: dict[str, str],
) -> dict[str, Any]:
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    command = f"exec splice {shlex.join(role.command)}"
    if role.kind == "trainer":
        command += " --set trainer.host=$(hostname -i)"
    variables = role.environment | {"SPLICE_ENDPOINT": endpoint}
    container = {
        "name": role.name,
        "image": image,
        "command": ["bash", "-c", command],
        "env": [
            {"name": "SPLICE_RUN_TOKEN", "valueFrom": token},
            *({"name": key, "value": value} for key, value in variables.items()),
        ],
        "resources": {"requests": requests}
        | ({"limits": {"nvidia.com/gpu": role.gpus}} if role.gpus else {}),
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
    return {"name": role.name, "replicas": 1, "template": {"spec": job}}
