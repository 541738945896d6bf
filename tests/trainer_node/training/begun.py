"""The next job's batch, begun while a checkpoint is written, on real Megatron.

    torchrun ... -m tests.trainer_node.training.begun OUT MODEL TENSOR PIPELINE EXPERT [full]

Whatever happens to what was begun, the next job's state is, bit for bit, that of a trainer without.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    ForwardBackward,
    NewAdapter,
    NextBatch,
    OptimStep,
    TrainLora,
    TrainMerged,
)
from tests.trainer_node.data import arrays, asked, training
from tests.trainer_node.state.behind import Bench, replaced, same
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.files import bulk_files
from trainer_node.request import Request
from trainer_node.training import passes
from trainer_node.training.trainer import NothingPending

NEVER = 1e9


class Link:
    """What a rank 0's link has of the next batch."""

    def __init__(self) -> None:
        self.next_batch: Envelope | None = None

    def progress(self, *_: Any, **__: Any) -> None:
        """Nobody listens."""

    def announce(self, values: dict[str, np.ndarray], **fields: Any) -> None:
        made, buffers = training(values)
        message = NextBatch(job=TrainMerged(**(made | {"optim": {"lr": 7.0}} | fields)))
        self.next_batch = Envelope(message=message, buffers=tuple(buffers))


class Ahead(Bench):
    """A bench whose checkpoints take as long as a test says."""

    def __init__(self, trainer: Any, out: Path) -> None:
        super().__init__(trainer, out)
        self.link = Link() if dist.get_rank() == 0 else None
        self.left: Callable[[], float | None] = lambda: 0.0

    def ask(self, kind: type, buffers: Any = (), **fields: Any) -> dict[str, Any]:
        """With a link, and with `left` in place of the write's own estimate."""
        sent = asked(kind, **fields)
        request: Request[Any] = Request(
            sent=sent,
            buffers=buffers,
            received_s=time.monotonic(),
            link=self.link,  # type: ignore[arg-type]
            aborts={},
        )
        ahead = self.jobs.ahead
        whole = ahead.while_writing
        with replaced(ahead, "while_writing", lambda link, _: whole(link, self.left)):
            return self.jobs.handlers[kind](request).result

    def step(self, version: int) -> dict[str, Any]:
        """Train on the version's batch in one step."""
        fields, buffers = training(arrays(version))
        folder = str(self.out / str(version))
        return self.ask(TrainMerged, buffers, version=version, checkpoint_dir=folder, **fields)


def times(count: int) -> Callable[[], float]:
    """The write continues for `count` packs."""
    left = iter([NEVER] * (count + 1))  # one for the beginning
    return lambda: next(left, 0.0)


def again(bench: Ahead) -> None:
    """From version 0, step 1 without anything announced."""
    bench.settled()
    bench.load(0)
    bench.left = lambda: 0.0
    if bench.link is not None:
        bench.link.next_batch = None


def begun(bench: Ahead, *, packs: int, values: Any = None, **fields: Any) -> dict[str, Any]:
    """Step 1, with `packs` packs of the announced batch, which is step 2's if no other is given."""
    again(bench)
    bench.left = times(packs)
    if bench.link is not None:
        bench.link.announce(arrays(2) if values is None else values, **fields)
    return bench.step(1)


def check_whole_and_part(bench: Ahead, known: list[Any], metrics: dict[str, float]) -> None:
    trainer = bench.trainer
    total = len(trainer._cut(bench_batch(bench)))
    assert total > 1, "several packs"
    for packs in sorted({1, total - 1, total, total + 5}):
        result = begun(bench, packs=packs)
        assert result["seconds"]["ahead"] > 0
        assert trainer.begun is not None
        assert len(trainer.begun.reports) == min(packs, total)
        bench.left = lambda: 0.0
        result = bench.step(2)
        assert trainer.begun is None
        assert result["seconds"]["ahead"] == 0 < result["seconds"]["begun"]
        assert result["seconds"]["to_first_forward"] >= 0
        assert result["metrics"]["loss"] == metrics["loss"]
        assert result["metrics"]["grad_norm"] == metrics["grad_norm"]
        assert same(bench.state(), known[1]), packs


def bench_batch(bench: Ahead) -> Any:
    from trainer_node.training import steps

    fields, buffers = training(arrays(2))
    return steps.batch_of(bench.trainer, TrainMerged(**fields), buffers)


def check_another_batch_or_loss(bench: Ahead, known: list[Any], _: Any) -> None:
    changed: list[tuple[Any, dict[str, Any]]] = [
        (arrays(3), {}),
        (None, {"loss": {"entropy_bonus": 0.5}}),
        (None, {"epochs": 2}),
        (arrays(2) | {"tokens": arrays(2)["tokens"] + 10**6}, {}),  # refused, and not by the job
    ]
    for at, (values, fields) in enumerate(changed):
        begun(bench, packs=2, values=values, **fields)
        assert (bench.trainer.begun is not None) == (at < 3)
        bench.left = lambda: 0.0
        assert bench.step(2)["seconds"]["begun"] == 0
        assert same(bench.state(), known[1]), fields


def check_batches_that_are_not_begun(bench: Ahead, _: list[Any], __: Any) -> None:
    fitting: list[dict[str, Any]] = [
        {"mini_batch_sequences": 3},
        {"loss": {"kl": {"coefficient": 0.1, "reference": "base"}}},
    ]
    for fields in fitting:
        begun(bench, packs=2, **fields)
        assert bench.trainer.begun is None, fields


def check_a_failing_pack(bench: Ahead, known: list[Any], _: Any) -> None:
    """The job that saves must not fail for the next one, and no tensor of the pack stays."""
    ranks, of_packs = dist.get_world_size(), passes.run
    alone = bench.trainer.model.config.parallel
    failing = [range(ranks)]
    if ranks > 1 and alone.tensor == alone.expert == 1:  # no other rank waits for the one
        failing.append(range(1, 2))
    for which in failing:
        count, left = 0, []

        def fails(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3 and dist.get_rank() in which:  # noqa: B023  - step 1, a pack, and this
                activations = torch.zeros(3)
                left.append(weakref.ref(activations))  # noqa: B023
                raise torch.OutOfMemoryError("a test says so")
            return of_packs(*args, **kwargs)

        with replaced(passes, "run", fails):
            result = begun(bench, packs=3)
        ahead = bench.jobs.ahead
        assert bench.trainer.begun is None and result["version"] == 1 and count == 3
        assert all(one() is None for one in left)
        # The node ends after this job. What it would have done is the job without the packs.
        assert ahead.has_diverged == (ranks > 1)
        bench.left = lambda: 0.0
        bench.step(2)
        assert same(bench.state(), known[1])
        result = begun(bench, packs=3)
        assert result["seconds"]["ahead"] == 0, "the next packs may fail too"
        ahead.has_diverged, ahead._may = False, True


def check_other_requests(bench: Ahead, known: list[Any], _: Any) -> None:
    """No other request uses what was begun."""
    fields, buffers = training(arrays(2))
    optim = fields.pop("optim")
    begun(bench, packs=2)
    with pytest.raises(NothingPending):
        bench.ask(OptimStep, optim=optim)
    begun(bench, packs=2)
    bench.ask(ForwardBackward, buffers, **fields)
    bench.ask(OptimStep, optim=optim)
    assert same(bench.state(), known[1])
    begun(bench, packs=2)
    lora = bench.ask(TrainLora, buffers, output_dir=str(bench.out / "lora"), optim=optim, **fields)
    assert lora["metrics"]["num_batches"] == 1
    assert same(bench.state(), known[1])
    states = []
    for packs in (2, 0):  # the same batch, but on other weights than those of its first packs
        begun(bench, packs=packs)
        bench.settled()
        bench.load(0)
        bench.left = lambda: 0.0
        bench.step(2)
        states.append(bench.state())
    assert same(*states)


def check_a_late_announcement(bench: Ahead, known: list[Any], _: Any) -> None:
    """Of the batch whose job has come: it is not begun a second time."""
    again(bench)
    bench.step(1)
    if bench.link is not None:
        bench.link.announce(arrays(2))
    bench.left = times(3)
    result = bench.step(2)
    assert bench.trainer.begun is None and result["seconds"]["ahead"] == 0
    assert same(bench.state(), known[1])


def check_that_packs_fit(bench: Ahead, _: list[Any], __: Any) -> None:
    """A pack begins only if half of it fits into the rest of the write; before its rate is known,
    none does."""
    again(bench)
    bench.step(1)
    ahead, trainer = bench.jobs.ahead, bench.trainer
    if bench.link is None:
        return
    bench.link.announce(arrays(2))
    link: Any = bench.link
    pack_s = ahead._pack_s(trainer.micro_batch_tokens, link.next_batch.message.job)
    assert 0 < pack_s < trainer.used.seconds
    ahead._begin_s = pack_s
    order, orders = ahead._order, []
    for left in (1.6 * pack_s, 1.4 * pack_s, 0.0):
        unknown = iter([None, left, left])
        orders.append(order(link, lambda: next(unknown)))  # noqa: B023
    assert orders == [2, 0, 0], "it also takes time to begin"
    link.announce(arrays(2), mini_batch_sequences=3)
    assert order(link, lambda: NEVER) == 0
    link.announce(arrays(2))
    envelope, link.next_batch = link.next_batch, None
    ahead._begin(envelope)
    pack_s = ahead._pack_s(trainer.begun.next_tokens)
    orders = []
    for left in (0.6 * pack_s, 0.4 * pack_s, 0.0):
        unknown = iter([None, left, left])
        orders.append(order(link, lambda: next(unknown)))  # noqa: B023
    assert orders == [1, 0, 0]
    ahead.drop()


def check_the_estimate(bench: Ahead, _: list[Any], __: Any) -> None:
    """Of a file's own writing, with a slow disk."""
    if dist.get_world_size() > 1:  # the ranks make no difference
        return
    from trainer_node.state.checkpoint import _left

    put = bulk_files.BulkWriter._put

    def slowly(handle: int, data: memoryview, span: Any) -> None:
        time.sleep(0.3)
        put(handle, data, span)

    span_bytes = 1 << 16
    data = torch.zeros(40 * span_bytes // 4)
    extent = bulk_files.Extent(offset=0, nbytes=data.nbytes, source=lambda: data)
    with (
        pytest.MonkeyPatch.context() as patch,
        bulk_files.bulk_writer(torch.device("cpu")) as writer,
    ):
        patch.setattr(bulk_files.hashing, "SPAN_BYTES", span_bytes)
        patch.setattr(bulk_files.BulkWriter, "_put", staticmethod(slowly))
        left_s = _left([writing := writer.start(bench.out / "slow", [extent])])
        began, told = time.monotonic(), []
        while (left := left_s()) != 0:
            told.append((time.monotonic() - began, left))
            time.sleep(0.01)
        took = time.monotonic() - began
        writing.wait()
    assert told[0][1] is None
    middle = [t + left for t, left in told if left is not None and 0.3 < t / took < 0.9]
    assert middle and all(0.5 * took < end < 2 * took for end in middle), (took, told)


def check_a_new_adapter(bench: Ahead, _: list[Any], __: Any) -> None:
    """Last, because the checks' checkpoints have another."""
    begun(bench, packs=2)
    bench.ask(NewAdapter, rank=2)
    assert bench.trainer.begun is None


CHECKS = (
    check_whole_and_part,
    check_another_batch_or_loss,
    check_batches_that_are_not_begun,
    check_a_failing_pack,
    check_other_requests,
    check_a_late_announcement,
    check_that_packs_fit,
    check_the_estimate,
    check_a_new_adapter,
)
OF_ADAPTERS = (check_other_requests, check_a_new_adapter)


def main() -> None:
    """Run every check; with pipeline stages, see that nothing is begun."""
    out, model = Path(sys.argv[1]), Path(sys.argv[2])
    options = {"finetuning_type": "full"} if "full" in sys.argv else {}
    trainer = make_trainer(model, *map(int, sys.argv[3:6]), **options)
    if not options:
        random_adapters(trainer)
    trainer.micro_batch_tokens = 12
    bench = Ahead(trainer, out)
    bench.save(0)
    known, metrics = [], {}
    for version in (1, 2):
        metrics = bench.step(version)["metrics"]
        known.append(bench.state())
    assert not same(*known)
    if int(sys.argv[4]) > 1:
        begun(bench, packs=2)
        assert trainer.begun is None
    else:
        for check in CHECKS:
            if not options or check not in OF_ADAPTERS:
                check(bench, known, metrics)
    trainer.model.close()


if __name__ == "__main__":
    main()
