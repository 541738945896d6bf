"""The JobSet manifest of a run, against the fields that its schema requires.

The schema is a part of v1alpha2's, by hand:
https://github.com/kubernetes-sigs/jobset/blob/main/api/jobset/v1alpha2/jobset_types.go
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from splice.client.run_file import load
from splice.cluster.kubernetes import manifest
from tests import forked
from tests.splice.hosts_file import FILE

JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {"spec": {"template": {"spec": {"containers": [
                    {"name": str, "image": str, "env": [{"name": str}]}
                ], "restartPolicy": str}}}},
            }
        ],
    },
}  # fmt: skip
FOLDERS = {"router": "client", **{n: n for n in ("trainer", *(f"inference-{i}" for i in range(3)))}}
TOKEN = "not-to-be-seen-anywhere-0123"


def check(value, schema, path="$"):
    """Fail at the first field that is absent or of another type."""
    if isinstance(schema, dict):
        for key, inner in schema.items():
            assert key in value, f"{path}.{key} is required"
            check(value[key], inner, f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, f"{path} is a list"
        for i, item in enumerate(value):
            check(item, schema[0], f"{path}[{i}]")
    else:
        assert isinstance(value, schema), f"{path} is {type(value)}"


def test_a_jobset_that_trains_ends_with_its_loop(tmp_path):
    (tmp_path / "run.toml").write_text(FILE.replace("world_size = 4", "world_size = 2"))
    images = {"trainer_image": "t:1", "inference_image": "i:1", "claim": "c"}
    text = manifest(load(tmp_path / "run.toml"), **images, data_folder=tmp_path)
    _, jobset = json.loads(text)["items"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["loop"]
    loop = jobset["spec"]["replicatedJobs"][-1]
    (container,) = loop["template"]["spec"]["template"]["spec"]["containers"]
    assert loop["name"] == "loop" and container["image"] == "t:1"
    assert f"--join --data-folder {tmp_path}" in container["command"][-1]


def test_the_manifest_has_what_a_jobset_needs_and_no_token(tmp_path):
    text = FILE.replace("world_size = 4", "world_size = 2")
    (tmp_path / "run.toml").write_text(text)
    argv = ["up", tmp_path / "run.toml", "--on", "k8s", "--dry-run", "--json"]
    argv += ["--trainer-image", "t:1", "--inference-image", "i:1"]
    done = forked.run(*argv, env={**os.environ, "SPLICE_RUN_TOKEN": TOKEN})
    assert done.returncode == 0, done.stderr
    written = Path(json.loads(done.stdout)["manifest"]).read_text()
    assert TOKEN not in written + done.stdout
    file, jobset = json.loads(written)["items"]
    assert file["kind"] == "ConfigMap"
    check(jobset, JOBSET)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    jobs = jobset["spec"]["replicatedJobs"]
    containers = {
        j["name"]: j["template"]["spec"]["template"]["spec"]["containers"][0] for j in jobs
    }
    gpus = {
        n: c["resources"].get("limits", {}).get("nvidia.com/gpu", 0) for n, c in containers.items()
    }
    replicas = {f"inference-{i}": 2 for i in range(3)}
    assert gpus == {"orchestrator": 0, "trainer": 2, **replicas, "router": 0}
    assert {c["image"] for n, c in containers.items() if n in replicas} == {"i:1"}
    for container in containers.values():
        env = {e["name"]: e for e in container["env"]}
        keys = env.get("SPLICE_CURVE_DIR", {}).get("value", "")
        assert keys == (f"{tmp_path}/keys/{FOLDERS[container['name']]}" if keys else "")
        assert bool(keys) == (container["name"] != "orchestrator")
        secret = env["SPLICE_RUN_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "tiny-token", "key": "token"}
    requests = {n: c["resources"]["requests"] for n, c in containers.items()}
    assert requests["trainer"] == {"cpu": "16", "memory": "128Gi"}
    assert requests["orchestrator"] == {"cpu": "2", "memory": "8Gi"}
    for job in jobs:
        pod = job["template"]["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {m["mountPath"]: volumes[m["name"]] for m in pod["containers"][0]["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
