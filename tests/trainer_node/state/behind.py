"""Saves whose moments are written behind, on real Megatron: faults before every operation on the
disk, lost moments, failed writes, mixtures.

    torchrun ... -m tests.trainer_node.state.behind OUT MODEL TENSOR PIPELINE EXPERT WHAT...

A crash is simulated within the process: from one operation on, nothing reaches the disk. Then
everything that the trainer holds is overwritten, and it loads what the disk has.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import SpliceError
from orchestrator.protocol.messages import (
    KlSpec,
    LoadCheckpoint,
    OptimStep,
    SaveCheckpoint,
    TrainMerged,
    ValueSpec,
)
from tests.trainer_node.data import arrays, asked, training
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.export.merged import Exporter
from trainer_node.files import behind, generations
from trainer_node.files.behind import Behind
from trainer_node.files.bulk_files import BulkWriter
from trainer_node.files.generations import CheckpointError
from trainer_node.jobs import Jobs
from trainer_node.ranks.lockstep import Lockstep
from trainer_node.request import Request
from trainer_node.state import checkpoint, contents, loading, remake
from trainer_node.tools.replay import replay
from trainer_node.training import steps
from trainer_node.training.trainer import Trainer


class Crash(BaseException):
    """The process ends here."""


@dataclass(slots=True)
class Faults:
    """Counts the operations that change a folder below `root`, and stops before one of them.

    `seen` has all of them. `stop_at`: the number of the operation; from there on all fail.
    `full`: a part of a path; operations on such paths find the disk full.
    """

    root: str = "-"
    stop_at: int | None = None
    full: str = ""
    count: int = 0
    dead: bool = False

    def start(self, root: Path, *, stop_at: int | None = None, full: str = "") -> None:
        self.root, self.stop_at, self.full = str(root), stop_at, full
        self.count, self.dead = 0, False

    def stop(self) -> None:
        self.start(Path("-"))

    def at(self, path: object, *, needs_room: bool = False) -> None:
        if not str(path).startswith(self.root):
            return
        if needs_room and self.full and self.full in str(path):
            raise OSError(28, "No space left on device", str(path))
        self.dead = self.dead or self.count == self.stop_at
        self.count += 1
        if self.dead:
            raise Crash

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: it can fail any operation before it happens."""
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            if int(args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.at(os.fsdecode(args[0]), needs_room=True)
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            self.at(os.fsdecode(args[0]) if not isinstance(args[0], int) else "")


FAULTS = Faults()
PUT, FLUSH = BulkWriter._put, generations.Disk.flush


def put(handle: int, data: memoryview, span: Any) -> None:
    """The bytes of large files: half of them are there after a crash."""
    path = os.readlink(f"/proc/self/fd/{handle}")
    try:
        FAULTS.at(path, needs_room=True)
    except Crash:
        os.pwrite(handle, data[: span.nbytes // 2], span.offset)
        raise
    PUT(handle, data, span)


def flush(self: generations.Disk, path: Path) -> None:
    FAULTS.at(path)
    FLUSH(self, path)


class Bench:
    """A trainer, its handlers, and the folders of a run."""

    def __init__(self, trainer: Trainer, out: Path) -> None:
        self.trainer, self.out = trainer, out
        self.jobs = Jobs(trainer, Exporter(trainer.model), Lockstep(trainer.model.control_group))

    def ask(self, kind: type, buffers: Any = (), **fields: Any) -> dict[str, Any]:
        sent = asked(kind, **fields)
        request = Request(sent=sent, buffers=buffers, received_s=0, link=None, aborts={})
        return self.jobs.handlers[kind](request).result

    def save(self, version: int, *, folder: Path | None = None) -> dict[str, Any]:
        folder = (folder or self.out) / str(version)
        return self.ask(SaveCheckpoint, version=version, checkpoint_dir=str(folder))

    def train(
        self, version: int, *, folder: Path | None = None, loss: dict[str, Any] | None = None
    ) -> list[str]:
        """Each version has its own batch. Returns the warnings about saves."""
        values, loss = arrays(version), loss or {}
        if self.trainer.model.config.value_head:
            values, loss = values | {"rewards": values["loss_mask"]}, loss | {"value": ValueSpec()}
        fields, buffers = training(values, **loss)
        folder = (folder or self.out) / str(version)
        result = self.ask(
            TrainMerged,
            buffers,
            version=version,
            checkpoint_dir=str(folder),
            mini_batch_sequences=3,
            epochs=1,
            **fields,
        )
        return [text for text in result["warnings"] if "moments" in text]

    def load(self, version: int, *, folder: Path | None = None) -> list[str]:
        """Returns the warnings."""
        folder = (folder or self.out) / str(version)
        return list(self.ask(LoadCheckpoint, checkpoint_dir=str(folder))["warnings"])

    def settled(self) -> bool:
        return checkpoint.settle(self.trainer)

    def restart(self) -> None:
        """Forget what a process that ends forgets."""
        trainer = self.trainer
        assert trainer.behind.wait(timeout_s=60)
        trainer.behind, trainer.on_disk, trainer.notes = Behind(), None, []
        trainer.drop_pending()
        if not trainer.model.trains_all:
            random_adapters(trainer)
        for _, found in trainer.optimizer.tensors():
            for tensor in found.values():
                tensor.detach().fill_(0.125)
        trainer.num_steps = trainer.num_skipped_steps = 77
        torch.manual_seed(99)

    def state(self) -> list[Any]:
        """Whatever the next step depends on."""
        trainer = self.trainer
        found: list[Any] = [trainer.num_steps, trainer.num_skipped_steps, torch.get_rng_state()]
        found += [p.param.detach().clone() for p in trainer.model.params]
        found += [master.detach().clone() for _, master in trainer.optimizer.masters]
        for _, tensors in trainer.optimizer.tensors():
            found += [t.detach().clone() for kind, t in tensors.items() if kind != "weight"]
        steps_seen = {float(s["step"]) for s in trainer.optimizer.state.values()}
        return [*found, sorted(steps_seen)]

    @property
    def num_weights(self) -> int:
        """What precedes the moments in `state`."""
        return 3 + len(self.trainer.model.params) + len(self.trainer.optimizer.masters)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def references(bench: Bench) -> list[list[Any]]:
    """The state of versions 0 to 3 without faults; 0 to 2 stay on the disk, complete."""
    bench.save(0)
    found = [bench.state()]
    for version in (1, 2, 3):
        assert bench.train(version) == []
        found.append(bench.state())
        assert bench.trainer.behind.is_writing, "every version after @0 is written behind"
        assert bench.settled()
    shutil.rmtree(bench.out / "3") if dist.get_rank() == 0 else None
    return found


def lose_moments(folder: Path) -> None:
    """As a trainer leaves it that ends before its thread."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder / contents.STATE)
    dist.barrier()


# ---------------------------------------------------------------- crashes


def check_crashes(bench: Bench, known: list[list[Any]]) -> None:
    """A crash before each operation of a version's save, in the foreground and in the thread."""
    operations = _operations(bench, known)
    outcomes = []
    for stop_at in range(operations):
        folder = _two_versions(bench, f"crash-{stop_at}")
        assert bench.load(1, folder=folder) == []
        FAULTS.start(folder, stop_at=stop_at)
        try:
            bench.train(2, folder=folder)
            is_served = True
        except Crash:
            is_served = False
        bench.trainer.behind.wait(timeout_s=60)
        FAULTS.stop()
        bench.restart()
        # The orchestrator has heard of version 2, or it repeats the job.
        warnings = bench.load(2 if is_served else 1, folder=folder)
        if not is_served:
            assert warnings == [] and same(bench.state(), known[1])
            bench.train(2, folder=folder)
        elif warnings:
            assert "equal the durable ones bit for bit" in warnings[0], warnings
        assert same(bench.state(), known[2]), stop_at
        bench.train(3, folder=folder)
        assert same(bench.state(), known[3])
        assert bench.settled()
        bench.restart()
        assert bench.load(3, folder=folder) == [] and same(bench.state(), known[3])
        outcomes.append("again" if not is_served else "remade" if warnings else "complete")
        shutil.rmtree(folder)
    print({what: outcomes.count(what) for what in set(outcomes)}, "of", operations)
    assert set(outcomes) == {"again", "remade", "complete"}, outcomes
    ranks = ["again", "remade", "complete"]
    assert outcomes == sorted(outcomes, key=ranks.index), "once it is found, it stays found"


def _operations(bench: Bench, known: list[list[Any]]) -> int:
    folder = _two_versions(bench, "counted")
    bench.load(1, folder=folder)
    FAULTS.start(folder)
    bench.train(2, folder=folder)
    assert bench.settled()
    count = FAULTS.count
    FAULTS.stop()
    assert count > 40 and same(bench.state(), known[2])
    return count


def _two_versions(bench: Bench, name: str) -> Path:
    folder = bench.out / name
    for version in ("0", "1"):
        shutil.copytree(bench.out / version, folder / version)
    return folder


def check_crashes_while_remade(bench: Bench, known: list[list[Any]]) -> None:
    """A second crash, while the lost moments are written."""
    count, stop_at = 1, 0
    while stop_at < count:
        folder = _two_versions(bench, f"again-{stop_at}")
        shutil.copytree(bench.out / "2", folder / "2")
        lose_moments(folder / "2")
        bench.restart()
        FAULTS.start(folder, stop_at=stop_at)
        try:
            bench.load(2, folder=folder)
        except Crash:
            count = max(count, stop_at + 2)
        FAULTS.stop()
        bench.restart()
        warnings = bench.load(2, folder=folder)
        assert same(bench.state(), known[2]) and (not warnings or "bit for bit" in warnings[0])
        bench.restart()
        assert bench.load(2, folder=folder) == [], "it is complete now"
        shutil.rmtree(folder)
        stop_at += 1
    assert stop_at > 10


# ---------------------------------------------------------------- failures that are not a crash


def check_lost_moments(bench: Bench, known: list[list[Any]]) -> None:
    """The step is made again; a difference is told; without a base the weights are there still."""
    folder = bench.out
    lose_moments(folder / "2")
    with pytest.raises(CheckpointError, match="has no moments"):
        loading.load(bench.trainer, folder / "2")
    bench.restart()
    (told,) = bench.load(2)
    assert "Step 4 was made again from" in told and "bit for bit" in told
    assert same(bench.state(), known[2])
    bench.restart()
    assert bench.load(2) == [] and same(bench.state(), known[2]), "the moments were written"
    bench.train(3)
    assert same(bench.state(), known[3]) and bench.settled()

    def other(trainer: Trainer, batch: Any, message: Any, **rest: Any) -> Any:
        optim = message.optim.model_copy(update={"lr": 2e-2})
        return TRAIN(trainer, batch, message.model_copy(update={"optim": optim}), **rest)

    lose_moments(folder / "2")
    bench.restart()
    with replaced(steps, "train", other):
        (told,) = bench.load(2)
    assert "differ from the durable ones in" in told and "The durable weights count" in told
    weights = bench.num_weights
    assert same(bench.state()[:weights], known[2][:weights]), "the served weights"
    bench.restart()
    assert bench.load(2) == [told], "whoever loads it is told"


TRAIN = steps.train


def check_no_base(bench: Bench, known: list[list[Any]]) -> None:
    """The step cannot be made again: its base is gone, another one, or the step fails."""
    weights = bench.num_weights

    def failing(*_: Any, **__: Any) -> Any:
        raise SpliceError("told to")

    for what in ("fails", "other", "gone"):
        lose_moments(bench.out / "2") if (bench.out / "2" / contents.STATE).exists() else None
        if what == "other":
            bench.load(0)
            bench.save(1)
        elif what == "gone" and dist.get_rank() == 0:
            shutil.rmtree(bench.out / "1")
        dist.barrier()
        bench.restart()
        with replaced(steps, "train", failing if what == "fails" else TRAIN):
            (told,) = bench.load(2)
        assert "could not be made again" in told and "The durable weights count" in told, told
        assert same(bench.state()[:weights], known[2][:weights])
        if what == "fails":
            assert "told to" in told and "moments are those of" in told
            assert same(bench.state()[weights:], known[1][weights:])
        else:
            assert "starts afresh" in told and not bench.trainer.optimizer.state
        assert not (bench.out / "2" / contents.STATE).exists(), "nothing false is written"
    bench.train(3)
    assert not bench.trainer.behind.is_writing, "saved as a whole: no base has this state"
    bench.restart()
    assert bench.load(3) == []


def check_full_disk(bench: Bench, known: list[list[Any]]) -> None:
    """The thread finds the disk full: the next job tells, and is saved as a whole."""
    bench.load(1)
    if dist.get_rank() in (0, dist.get_world_size() - 1):
        FAULTS.start(bench.out, full=f"/.{contents.STATE}.new/")
    assert bench.train(2) == []
    bench.trainer.behind.wait(timeout_s=60)
    assert not (bench.out / "2" / contents.STATE).exists()
    (told,) = bench.train(3)
    assert not bench.trainer.behind.is_writing
    assert "moments of" in told and "No space left on device" in told and "saved as a whole" in told
    assert same(bench.state(), known[3])
    FAULTS.stop()
    assert {p.name for p in (bench.out / "2").iterdir()} & {".state.new", ".state.old"} == set()
    bench.restart()
    assert bench.load(3) == [] and same(bench.state(), known[3])
    (told,) = bench.load(2)
    assert "bit for bit" in told and same(bench.state(), known[2])
    shutil.rmtree(bench.out / "3") if dist.get_rank() == 0 else None
    dist.barrier()


def check_a_disk_that_stays_full(bench: Bench, known: list[list[Any]]) -> None:
    """The job after that fails and says so; the version before it is found."""
    bench.load(1)
    FAULTS.start(bench.out, full=".new/")
    FAULTS.full = f"/.{contents.STATE}.new/"
    bench.train(2)
    bench.trainer.behind.wait(timeout_s=60)
    FAULTS.full = ".new/"
    with pytest.raises(CheckpointError, match="No space left"):
        bench.train(3)
    FAULTS.stop()
    assert "could not be written" in bench.trainer.notes[0], "kept for the next result"
    assert not (bench.out / "3").exists()
    bench.restart()
    (told,) = bench.load(2)
    assert "bit for bit" in told and same(bench.state(), known[2])


def check_mixtures(bench: Bench, known: list[list[Any]]) -> None:
    """Parts of two saves are refused, whatever they are, and change nothing."""
    mixed = bench.out / "mixed"
    before = bench.state()

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            remake.load(bench.trainer, mixed)
        assert same(bench.state(), before)
        shutil.rmtree(mixed)

    for part in ("state", "adapter", "meta.json", "remake.bin"):
        shutil.copytree(bench.out / "2", mixed)
        source, target = bench.out / "1" / part, mixed / part
        if target.is_dir():
            shutil.rmtree(target)
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        refused("belongs to another checkpoint.*a mixture is not loaded" if part == "state" else "")
    shutil.copytree(bench.out / "2", mixed)
    (mixed / "state" / "more").touch()
    refused("was not written with this checkpoint")
    shutil.copytree(bench.out / "2", mixed)
    file = mixed / "state" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    refused("should have")


# ---------------------------------------------------------------- who waits for what


def check_waits(bench: Bench, known: list[list[Any]]) -> None:
    """A step waits only for the copy, or without a copy for the save; a save for the save before;
    a release for the save.
    """
    go = threading.Event()
    original = checkpoint._write_state

    def slow(*args: Any, **kwargs: Any) -> None:
        assert go.wait(60)
        original(*args, **kwargs)

    with replaced(checkpoint, "_write_state", slow):
        bench.load(1)
        bench.train(2)
        _steps(bench)  # the copy is taken
        assert bench.trainer.behind.is_writing and not go.is_set()
        _after(0.3, go)
        bench.save(9)
        assert go.is_set(), "the next save waits for the one before"
    assert bench.load(2) == [] and same(bench.state(), known[2]), "the copy has the earlier step"

    go.clear()
    with replaced(checkpoint, "_write_state", slow), replaced(behind, "_is_room", lambda _: False):
        bench.load(1)
        bench.train(2)
        _after(0.3, go)
        _steps(bench)
        assert go.is_set(), "without a copy the step waits for the save"
        assert bench.trainer.behind.step_waited_s > 0.1
    assert bench.settled()
    assert bench.load(2) == [] and same(bench.state(), known[2])

    go.clear()
    taken, copies = threading.Event(), Behind._copies

    def late(self: Behind, *args: Any) -> Any:
        assert go.wait(60)
        return copies(self, *args)

    with replaced(Behind, "_copies", late):
        bench.load(1)
        bench.train(2)
        _after(0.3, go)
        _steps(bench)
        taken.set()
        assert go.is_set(), "the step waits for the copy"
    assert bench.settled()
    assert bench.load(2) == [] and same(bench.state(), known[2])


def _after(seconds: float, event: threading.Event) -> None:
    timer = threading.Timer(seconds, event.set)
    timer.daemon = True
    timer.start()


def _steps(bench: Bench) -> None:
    """A step that overwrites the moments."""
    fields, buffers = training(arrays(5))
    batch = steps.batch_of(bench.trainer, _message(fields), buffers)
    bench.trainer.train_step(batch, fields["loss"], fields["optim"])


def _message(fields: dict[str, Any]) -> TrainMerged:
    return TrainMerged(**fields)


def check_what_has_no_base(bench: Bench, known: list[list[Any]]) -> None:
    """Pending gradients, other steps and a loaded adapter are in no checkpoint: all is saved."""
    fields, buffers = training(arrays(5))
    batch = steps.batch_of(bench.trainer, _message(fields), buffers)
    for what in ("pending", "step", "adapter", "exit", "itself", "itself, relative"):
        bench.load(1)
        if what == "pending":
            bench.trainer.forward_backward(batch, fields["loss"])
        elif what == "step":
            bench.trainer.forward_backward(batch, fields["loss"])
            bench.ask(OptimStep, optim=fields["optim"])
        elif what == "adapter":
            bench.trainer.load_adapter(bench.out / "1" / "adapter")
        model = bench.trainer.model
        if what == "exit":
            config = model.config.model_copy(update={"memory": "exit"})
            bench.jobs._model = replace(model, config=config)
        folder = bench.out / "whole"
        if "relative" in what:
            folder = Path(os.path.relpath(folder))
        if "itself" in what:
            bench.save(4, folder=folder)
        bench.train(4, folder=folder)
        bench.jobs._model = model
        assert not bench.trainer.behind.is_writing, what
        assert not (folder / "4" / contents.REMAKE).exists()
        state = bench.state()
        bench.restart()
        assert bench.load(4, folder=folder) == [] and same(bench.state(), state)
        shutil.rmtree(folder)


def check_kl_reference_is_gone(bench: Bench, known: list[list[Any]]) -> None:
    """What the step needs in addition to the checkpoint can be gone: that is told too."""
    adapter = bench.out / "reference"
    checkpoint.save_adapter(bench.trainer.model, adapter)
    bench.load(1)
    kl = KlSpec(coefficient=0.1, reference="adapter", adapter_dir=str(adapter))
    bench.train(2, folder=bench.out / "kl", loss={"kl": kl})
    assert bench.settled()
    state = bench.state()
    lose_moments(bench.out / "kl" / "2")
    bench.restart()
    assert "bit for bit" in bench.load(2, folder=bench.out / "kl")[0]
    assert same(bench.state(), state)
    lose_moments(bench.out / "kl" / "2")
    bench.restart()
    shutil.rmtree(adapter)
    bench.trainer.references = type(bench.trainer.references)(bench.trainer.model)
    (told,) = bench.load(2, folder=bench.out / "kl")
    assert "could not be made again" in told and str(adapter) in told
    shutil.rmtree(bench.out / "kl")


def check_replayed(bench: Bench, known: list[list[Any]]) -> None:
    """A run's versions come out again; another step is found in its own version only."""
    bench.load(2)
    bench.train(3)
    assert bench.settled()
    folders = [bench.out / str(version) for version in range(4)]
    bench.restart()
    made = list(replay(bench.trainer, folders))
    assert [(m["version"], m["elements"]) for m in made] == [(1, 0), (2, 0), (3, 0)]
    assert same(bench.state(), known[3]), "with its moments"

    rates = iter([2e-2])

    def once_other(trainer: Trainer, batch: Any, message: Any, **rest: Any) -> Any:
        optim = message.optim
        optim = optim.model_copy(update={"lr": next(rates, optim.lr)})
        return TRAIN(trainer, batch, message.model_copy(update={"optim": optim}), **rest)

    bench.restart()
    with replaced(steps, "train", once_other):
        first, *rest = replay(bench.trainer, folders)
    assert int(str(first["elements"])) > 0 and float(str(first["largest"])) > 0
    assert [m["elements"] for m in rest] == [0, 0], "each step is judged by itself"
    assert same(bench.state(), known[3])
    dist.barrier()
    shutil.rmtree(folders[3]) if dist.get_rank() == 0 else None
    dist.barrier()


CHECKS: dict[str, tuple[Callable[[Bench, list[list[Any]]], None], ...]] = {
    "crashes": (check_crashes,),
    "again": (check_crashes_while_remade,),
    "lost": (check_lost_moments, check_no_base),
    "replayed": (check_replayed,),
    "full_disk": (check_full_disk,),
    "stays_full": (check_a_disk_that_stays_full,),
    "mixtures": (check_mixtures,),
    "waits": (check_waits,),
    "no_base": (check_what_has_no_base, check_kl_reference_is_gone),
}


def main() -> None:
    """Run the checks that the arguments name."""
    out, model, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[6:]
    sys.addaudithook(FAULTS.hook)
    BulkWriter._put = staticmethod(put)  # type: ignore[method-assign,assignment]
    generations.Disk.flush = flush  # type: ignore[method-assign]
    options: dict[str, Any] = {"finetuning_type": "full"} if "full" in what else {}
    options |= {"value_head": True} if "valued" in what else {}
    trainer = make_trainer(model, *map(int, sys.argv[3:6]), **options)
    if not trainer.model.trains_all:
        random_adapters(trainer)
    bench = Bench(trainer, out)
    known = references(bench)
    dist.barrier()
    for name in (w for w in what if w not in ("full", "valued")):
        for check in CHECKS[name]:
            check(bench, known)
    trainer.model.close()


if __name__ == "__main__":
    main()
