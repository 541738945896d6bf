"""Two workers with tensor parallelism: their parts add up to the trainer's digests, replicas count once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference_node import placement, verify
from tests.inference_node import tiny
from weight_transfer.digest import tensor_digest

WORKER = """
import pickle, sys, torch
from tests.inference_node import vllm_models, tiny
from pathlib import Path
from inference_node import placement, verify
rank, port, folder, kind = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
vllm_models.start_distributed(rank=rank, world_size=2, port=port)
model, config = vllm_models.load(folder, tensor_parallel=2)
base = tiny.state_dict(kind)
manifest = tiny.manifest_of(base)
plan = placement.record(model, manifest)
tensors = {n: t * 1.5 for n, t in base.items()}
vllm_models.update(model, config, tensors)
with torch.no_grad():
    found = placement.local_findings(plan, manifest), verify.read_back(model, plan, {})
(folder / f"found{rank}").write_bytes(pickle.dumps(found))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_two_ranks_together_cover_every_tensor(tmp_path: Path, kind: str) -> None:
    import pickle

    base = tiny.write_checkpoint(tmp_path, kind)
    with socket.socket() as probe:  # the store's port; nobody else binds in between on a test's loopback
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-c", WORKER]
    env = {**os.environ, "VLLM_DIST_IDENT": str(port), "OMP_NUM_THREADS": "1"}  # vLLM names its shared memory by it
    ranks = [
        subprocess.Popen(
            [*argv, str(r), str(port), str(tmp_path), kind], cwd=Path(__file__).parents[2], env=env, start_new_session=True
        )
        for r in (0, 1)
    ]
    try:
        assert [p.wait(100.0) for p in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    found = [pickle.loads((tmp_path / f"found{r}").read_bytes()) for r in (0, 1)]
    manifest = tiny.manifest_of(base)
    placement.judge(manifest, [f[0] for f in found])
    digests, unverified = verify.combine(manifest, [f[1] for f in found])
    assert unverified == {}
    assert digests == [int(tensor_digest(t * 1.5)) for t in base.values()]
    with torch.no_grad(), pytest.raises(Exception, match=r"\d+ of \d+ elements"):
        verify.combine(manifest, [found[0][1]])
