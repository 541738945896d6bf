"""A node whose requests fail: at chosen operations in every handler, by refusal, on one rank.

    torchrun ... -m tests.trainer_node.failed_requests OUT MODEL WHAT

Storages are watched by weak references, and no garbage collection comes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.errors import ErrorCode
from orchestrator.processes.restarts import EXIT_AFRESH
from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    ExportHf,
    Forward,
    ForwardBackward,
    LoadAdapter,
    LoadCheckpoint,
    Manifest,
    NewAdapter,
    OptimParams,
    OptimStep,
    ReleaseMemory,
    SaveCheckpoint,
    TrainLora,
    TrainMerged,
    UseLayout,
    WireChunk,
    WireLayout,
    batch_specs,
)
from tests.trainer_node.data import arrays, asked, training
from trainer_node import aftermath
from trainer_node.node import Node
from trainer_node.ranks.lockstep import Failure
from trainer_node.request import Outcome
from trainer_node.training.batch import TooLong
from trainer_node.training.memory_model import MemoryModel, RankMemory

POINTS, STEP_POINTS = 4, 50
"""Operations of each handler, and of a first step, that fail one after the other."""
CONSTANT_BYTES = 16
"""Caches of constants hold no more in a tensor."""


class Allocations(TorchDispatchMode):
    """Counts operations and notes the storages that they make; memory is out at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.fail_at, self.count = fail_at, 0
        self.made: list[tuple[StorageWeakRef, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.fail_at:
            raise torch.OutOfMemoryError(f"a test said so at operation {self.fail_at}")
        result = func(*args, **(kwargs or {}))
        given = {s._cdata for s in storages((args, kwargs))}
        self.made += [
            (StorageWeakRef(s), f"{func} of {s.nbytes()} bytes")
            for s in storages(result)
            if s._cdata not in given and s.nbytes() > CONSTANT_BYTES
        ]
        return result


def storages(values: Any) -> list[torch.UntypedStorage]:
    return [v.untyped_storage() for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


class Bench:
    """A node of one rank, without an orchestrator."""

    def __init__(self, out: Path, model: Path) -> None:
        config = TrainerConfig(
            model=model,
            lora=LoraConfig(rank=4, alpha=8),
            parallel=ParallelConfig(world_size=int(os.environ.get("WORLD_SIZE", "1"))),
            micro_batch_tokens=16,
            admission="skip",
        )
        self.node, self.out, self.count = Node(config, None), out, 0
        self.failures: list[Failure] = []
        compare = self.node.lockstep.compare

        def noted(error: BaseException | None) -> list[Failure]:
            self.failures = compare(error)
            return self.failures

        self.node.lockstep.compare = noted  # type: ignore[method-assign]
        dispatch = self.node._dispatch

        def watched(request: Any) -> Any:
            with self.watch or contextlib.nullcontext():
                self.result = dispatch(request).result
            return Outcome(result=self.result)

        self.node._dispatch = watched  # type: ignore[method-assign]
        self.watch: Allocations | None = None
        """For only the next request."""
        self.result: dict[str, Any] = {}
        gc.disable()

    def ask(self, kind: type, buffers: Any = (), **fields: Any) -> int | None:
        """Returns the code with which the node would exit."""
        self.count += 1
        message = asked(kind, request_id=f"r{self.count}", **fields)
        envelope = Envelope(message=message, buffers=tuple(buffers))
        try:
            return self.node._handle(envelope, time.monotonic())
        finally:
            self.watch = None

    def ok(self, kind: type, buffers: Any = (), **fields: Any) -> None:
        assert self.ask(kind, buffers, **fields) is None
        assert not self.failures, self.failures[0]

    def weights(self) -> list[torch.Tensor]:
        return [p.param.detach().clone() for p in self.node.trainer.model.params]

    def train(self, version: int, folder: Path) -> None:
        """One step, saved to a folder of this version."""
        fields, buffers = training(arrays(version), name="cross_entropy")
        self.ok(TrainMerged, buffers, version=version, checkpoint_dir=str(folder), **fields)
        assert self.node.trainer.behind.wait(timeout_s=30)

    def held(self) -> set[int]:
        """Storages of what the trainer keeps between requests."""
        return {t.untyped_storage()._cdata for t in self.node.trainer._held_tensors()}


Ask = Callable[[Allocations], int | None]


def requests(bench: Bench) -> dict[str, Ask]:
    """Each handler's request, which is watched."""
    fields, buffers = training(name="cross_entropy")
    batch = {"loss": fields["loss"], "tensors": fields["tensors"]}
    values = arrays()
    sizes = {"num_sequences": len(values["sequence_lengths"]), "num_tokens": len(values["tokens"])}
    names = ("tokens", "sequence_lengths")
    specs = tuple(s for s in batch_specs(**sizes) if s.name in names)
    scoring = [values[s.name].tobytes() for s in specs]
    manifest = Manifest.model_validate(
        bench.node._jobs._exporter.manifest().model_dump(mode="python")
    )
    chunk = WireChunk(kind="reload", tensors=tuple(range(len(manifest.tensors))))
    layout = WireLayout(chunks=(chunk,)).model_dump(mode="python")

    def watched(kind: type, buffers: Any = (), place: str = "", **given: Any) -> Ask:
        def ask(watch: Allocations) -> int | None:
            if kind is OptimStep:
                bench.ok(ForwardBackward, buffers, **batch)
            bench.watch = watch
            more = {place: str(bench.out / f"{bench.count}")} if place else {}
            return bench.ask(kind, () if kind is OptimStep else buffers, **given, **more)

        return ask

    merged = {"version": 1, "place": "checkpoint_dir"}
    return {
        "ForwardBackward": watched(ForwardBackward, buffers, **batch),
        "OptimStep": watched(OptimStep, buffers, optim=OptimParams(lr=1e-2)),
        "Forward": watched(Forward, scoring, tensors=specs),
        "TrainMerged": watched(TrainMerged, buffers, **merged, **fields),
        "TrainLora": watched(TrainLora, buffers, place="output_dir", **fields),
        "SaveCheckpoint": watched(SaveCheckpoint, **merged),
        "LoadCheckpoint": watched(LoadCheckpoint, checkpoint_dir=str(bench.out / "0")),
        "LoadAdapter": watched(LoadAdapter, adapter_dir=str(bench.out / "0" / "adapter")),
        "NewAdapter": watched(NewAdapter, rank=4, seed=3),
        "ExportHf": watched(ExportHf, place="output_dir"),
        "UseLayout": watched(UseLayout, layout=layout),
        "ReleaseMemory": watched(ReleaseMemory),
    }


def check_every_handler(bench: Bench) -> None:
    """What a failed request allocated is free at its end."""
    bench.ok(SaveCheckpoint, version=0, checkpoint_dir=str(bench.out / "0"))
    chance = random.Random(47)
    collect = gc.collect
    for name, ask in requests(bench).items():
        # Half-made adapters and plans are cycles. Nothing else may depend on the node's collection.
        is_cyclic = name in ("NewAdapter", "UseLayout")
        gc.collect = collect if is_cyclic else lambda *_: 0  # type: ignore[assignment]
        for _ in range(2):  # the second time all caches are there
            whole = Allocations()
            assert ask(whole) is None and not bench.failures, (name, bench.failures)
            bench.ok(LoadCheckpoint, checkpoint_dir=str(bench.out / "0"))
        last = whole.count - 1
        points = sorted({0, last, *(chance.randint(0, last) for _ in range(POINTS - 2))})
        for point in points:
            seen = Allocations(point)
            code = ask(seen)
            held = bench.held()
            left = [what for ref, what in seen.made if not ref.expired() and ref.cdata not in held]
            assert not left, f"{name} keeps {left} after operation {point} failed"
            assert code in (None, EXIT_AFRESH)
            assert (code is not None) == bench.node.trainer.is_unknown
            bench.ok(LoadCheckpoint, checkpoint_dir=str(bench.out / "0"))
            assert not bench.node.trainer.is_unknown
        print(name, last + 1, "operations;", points, "failed", flush=True)


def check_first_step(bench: Bench) -> None:
    """Whichever operation of the first step fails: the state is the one before it, or the node
    ends."""
    bench.ok(SaveCheckpoint, version=0, checkpoint_dir=str(bench.out / "0"))
    trainer = bench.node.trainer
    fields, buffers = training(name="cross_entropy")
    batch = {"loss": fields["loss"], "tensors": fields["tensors"]}

    def step(watch: Allocations | None = None) -> int | None:
        bench.watch = watch
        return bench.ask(OptimStep, optim=OptimParams(lr=1e-2, weight_decay=0.1))

    before = bench.weights()
    bench.ok(ForwardBackward, buffers, **batch)
    whole = Allocations()
    assert step(whole) is None
    after = bench.weights()
    ended = set()
    for point in sorted(random.Random(48).sample(range(whole.count), STEP_POINTS)):
        bench.ok(LoadCheckpoint, checkpoint_dir=str(bench.out / "0"))
        assert not trainer.optimizer.state
        bench.ok(ForwardBackward, buffers, **batch)
        code = step(Allocations(point))
        assert bench.failures, f"operation {point} did not fail"
        ended.add(code)
        if code is None:
            now = bench.weights()
            assert trainer.num_steps == 0 and all(map(torch.equal, now, before)), point
            bench.ok(ForwardBackward, buffers, **batch)
            assert step() is None and not bench.failures, (point, bench.failures)
            assert all(map(torch.equal, bench.weights(), after)), point
    assert ended == {None, EXIT_AFRESH}, "some allocations come before the first update"


def check_refused_checkpoints(bench: Bench) -> None:
    """A checkpoint of another adapter that is refused, however late, changes nothing. One whose
    moments are made again says that the adapter has changed."""
    trainer, out = bench.node.trainer, bench.out
    bench.ok(NewAdapter, rank=2, seed=3)
    bench.ok(SaveCheckpoint, version=0, checkpoint_dir=str(out / "narrow0"))
    for version in (1, 2):
        bench.train(version, out / f"narrow{version}")
    bench.ok(NewAdapter, rank=4, seed=3)
    bench.ok(SaveCheckpoint, version=0, checkpoint_dir=str(out / "wide0"))
    bench.train(1, out / "wide1")
    before = bench.weights()
    mixed = out / "mixed"
    shutil.copytree(out / "narrow2", mixed)
    shutil.rmtree(mixed / "state")
    shutil.copytree(out / "narrow1" / "state", mixed / "state")
    assert bench.ask(LoadCheckpoint, checkpoint_dir=str(mixed)) is None
    assert "belongs to another checkpoint" in bench.failures[0].text
    assert trainer.model.config.lora.rank == 4
    assert all(map(torch.equal, bench.weights(), before))
    assert trainer.optimizer.state and trainer.on_disk is not None
    assert trainer.on_disk.folder == out / "wide1"

    shutil.rmtree(out / "narrow2" / "state")
    bench.ok(LoadCheckpoint, checkpoint_dir=str(out / "narrow2"))
    assert bench.result["adapter_changed"] and trainer.model.config.lora.rank == 2
    again, switched = bench.result["warnings"]
    assert "bit for bit" in again and "the adapter is now that of" in switched
    bench.ok(LoadCheckpoint, checkpoint_dir=str(out / "narrow1"))
    assert not bench.result["adapter_changed"]


def check_ranks_end_together(bench: Bench) -> None:
    """What one rank has lost ends all of them, with one code."""
    node, own = bench.node, dist.get_rank() == 1
    missing = {"adapter_dir": str(bench.out / "missing")}
    assert bench.ask(LoadAdapter, **missing) is None and bench.failures
    node.trainer.is_unknown = own
    assert bench.ask(LoadAdapter, **missing) == EXIT_AFRESH
    node.trainer.is_unknown = False
    # A CPU's memory has no limit and no measure that a test could foresee.
    used = aftermath.used_bytes
    node._aftermath._allowed = lambda: 1e9  # type: ignore[method-assign]
    for leak, code in ((0, None), (2 * 10**9, EXIT_AFRESH)):
        aftermath.used_bytes = lambda device, n=leak * own: used(device) + n
        assert bench.ask(LoadAdapter, **missing) == code
    aftermath.used_bytes = used


def check_too_long(bench: Bench) -> None:
    """A sequence that does not fit is refused by name. Nothing runs, and what is pending stays."""
    fields, buffers = training(name="cross_entropy")
    batch = {"loss": fields["loss"], "tensors": fields["tensors"]}
    trainer = bench.node.trainer
    assert not trainer.memory, "on a CPU nothing is measured"
    bench.ok(ForwardBackward, buffers, **batch)

    def holding(trained: int, scored: int) -> tuple[RankMemory, ...]:
        ends = (MemoryModel(fixed_bytes=0.0, bytes_per_token=60 / n) for n in (trained, scored))
        recomputed, forward = ends
        kept = MemoryModel(fixed_bytes=0.0, bytes_per_token=60.0)
        return (
            RankMemory(
                kept=kept, recomputed=recomputed, scored=forward, room_bytes=50.0, margin_bytes=10.0
            ),
        )

    scoring = (Forward, {"tensors": fields["tensors"][:2]}, buffers[:2], "without a backward pass")
    how = "with recompute = 'full'"
    for kind, given, carried, way in (
        scoring,
        (ForwardBackward, batch, buffers, how),
        (
            TrainMerged,
            {"version": 1, "checkpoint_dir": str(bench.out / "1"), **fields},
            buffers,
            how,
        ),
    ):
        trainer.memory = holding(*((12, 11) if kind is Forward else (11, 12)))
        assert bench.ask(kind, carried, **given) is None
        (failure,) = bench.failures
        assert failure.kind == "TooLong" and TooLong.code == ErrorCode.TOO_LONG
        holds = f"sequence 2 has 12 tokens; this trainer holds 11 {way}; raise parallel.context"
        assert holds in failure.text
        assert trainer.first_forward_s == 0 and trainer.pending.num_batches == 1
    for host_tokens, more in ((50, ""), (11, " in this host's memory")):
        # Eleven tokens fit with offload, on the GPU or on the host, and four without.
        (one,) = holding(4, 12)
        line = MemoryModel(fixed_bytes=0.0, bytes_per_token=60 / (11 if not more else 50))
        trainer.memory = (replace(one, offloaded=line, host_tokens=host_tokens),)
        assert bench.ask(ForwardBackward, buffers, **batch) is None
        (failure,) = bench.failures
        assert f"holds 11 with recompute = 'offload'{more}; raise" in failure.text
    (one,) = holding(11, 12)
    trainer.memory = (replace(one, offloaded=line, host_tokens=10),)
    assert bench.ask(ForwardBackward, buffers, **batch) is None
    assert how in bench.failures[-1].text, "the host holds fewer"
    trainer.memory = holding(12, 11)
    bench.ok(ForwardBackward, buffers, **batch)
    trainer.memory = holding(11, 12)
    bench.ok(scoring[0], scoring[2], **scoring[1])


def check_peaks(bench: Bench) -> None:
    """The peak of memory begins with each request that trains, and with no other one."""
    bench.ok(SaveCheckpoint, version=0, checkpoint_dir=str(bench.out / "0"))
    begun: list[str] = []
    expected = {"ForwardBackward": 1, "OptimStep": 2, "TrainMerged": 1, "TrainLora": 1}
    for name, ask in requests(bench).items():
        bench.node.trainer.begin_peak = lambda name=name: begun.append(name)  # type: ignore[method-assign]
        assert ask(Allocations()) is None and not bench.failures
        assert begun.count(name) == expected.get(name, 0), name


def main() -> None:
    """See the module's docstring."""
    out, model, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    bench = Bench(out, model)
    checks = {
        "handlers": check_every_handler,
        "step": check_first_step,
        "checkpoints": check_refused_checkpoints,
        "too_long": check_too_long,
        "peaks": check_peaks,
        "ranks": check_ranks_end_together,
    }
    checks[what](bench)
    assert bench.node.close()


if __name__ == "__main__":
    main()
