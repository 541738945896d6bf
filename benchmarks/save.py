"""Durable saves: seconds of a whole checkpoint and of only an adapter, against `torch.save` of the
same tensors to one file, flushed.

LoRA of rank 16 on all linear layers with its AdamW moments, fp32. `30b-a3b` needs a GPU (37,248
adapter matrices, 3.3 GB, 10 GB with the moments); on a
CPU two shapes of it: `many-experts` has as many matrices, but small ones, so that the time is
Python's, and `large-experts` few large ones (rank 256), so that it is the disk's. Every save goes
to a new folder; the disk is idle before (`sync`) and what was written is on it after.
SPLICE_BENCH_DIR chooses the disk (the temporary folder's).

`behind` measures a step whose moments are written while the next one trains. A round has such a
step, then one during which its moments are written (`behind`), one that saves only the adapter and
one that saves the whole. There are no rollouts between them, so the trainer never idles and the
disk has the least time. Of each job, `wait_s` is what the step waits for: the save itself, and the
copy before the optimizer step. `step_s` is the whole job. `moments_share` is the part of the step
that the moments cost, beyond the step of the same round that saves only the adapter.
`announced` is a step during whose save the next one's passes begin; `wait_s` is without them.
SPLICE_BENCH_TOKENS sets the step, SPLICE_BENCH_ROLLOUT_S a pause before each,
SPLICE_BENCH_ROUNDS (SPLICE_BENCH_SAMPLES) the rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.harness import Case

if TYPE_CHECKING:
    from orchestrator.protocol.messages import TrainLora, TrainMerged

RANK = 16
Step = tuple[float, float]
"""Seconds of the step, and those that it waited for saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a model with experts."""

    layers: int
    experts: int
    hidden: int
    inner: int
    rank: int = RANK


SIZES = {
    "tiny": Size(layers=2, experts=8, hidden=64, inner=32),
    "many-experts": Size(layers=48, experts=128, hidden=64, inner=32),
    "large-experts": Size(layers=6, experts=128, hidden=256, inner=128, rank=256),
}


def run(*, device: str, small: bool) -> list[Case]:
    """One process, one rank."""
    samples = int(os.environ.get("SPLICE_BENCH_SAMPLES", "2" if small else "5"))
    names = (
        ["tiny"]
        if small
        else ["30b-a3b"]
        if device == "cuda"
        else ["many-experts", "large-experts"]
    )
    cases = []
    for name in names:
        with tempfile.TemporaryDirectory(dir=os.environ.get("SPLICE_BENCH_DIR")) as folder:
            cases += _cases(name, Path(folder), device=device, samples=samples)
    return cases


def _cases(name: str, folder: Path, *, device: str, samples: int) -> list[Case]:
    trainer = _trainer(name, folder / "model", device)
    # On a CPU, Megatron can be imported only after the shims.
    from trainer_node.state import checkpoint

    tensors = [
        t
        for p, found in trainer.optimizer.tensors()
        for t in (p.param.detach(), *list(found.values())[1:])
    ]
    nbytes = 4 * sum(t.numel() for t in tensors)
    matrices = sum(m.tensor.numel() > 0 for m in trainer.model.adapters.local_matrices())
    whole = _times(samples, folder, lambda out: checkpoint.save(trainer, out, version=1))
    adapter = _times(samples, folder, lambda out: checkpoint.save_adapter(trainer.model, out))
    peer = _times(samples, folder, lambda out: _plain(tensors, out))
    behind = _behind(trainer, folder, name, device=device, samples=samples)
    trainer.model.close()
    settings = {"bytes": nbytes, "matrices": matrices, "disk": str(folder.parent)}
    label = "torch.save of the same tensors, fsync"

    def rates(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(nbytes / s for s in seconds)

    return [
        Case(
            name=f"save/{name}/checkpoint",
            metric="save_s",
            unit="s",
            samples=whole,
            peer=label,
            peer_samples=peer,
            settings=settings,
        ),
        Case(
            name=f"save/{name}/checkpoint",
            metric="bytes_per_s",
            unit="B/s",
            samples=rates(whole),
            peer=label,
            peer_samples=rates(peer),
        ),
        Case(name=f"save/{name}/adapter", metric="save_s", unit="s", samples=adapter),
        *behind,
    ]


def _behind(trainer: Any, folder: Path, name: str, *, device: str, samples: int) -> list[Case]:
    """The same steps with the moments behind, with a whole save, and with only the adapter."""
    steps = _Steps(trainer, folder, device=device)
    rounds = int(os.environ.get("SPLICE_BENCH_ROUNDS", samples))
    # The first round is not counted: it makes buffers, and warms caches up.
    taken = [steps.round(number) for number in range(rounds + 1)][1:]
    ways = ("whole", "behind", "adapter", "announced")
    whole, behind, adapter, announced = ([one[way] for one in taken] for way in ways)
    settings = {
        "tokens": steps.num_tokens,
        "rollout_s": steps.rollout_s,
        "adapter_step_s": [step_s for step_s, _ in adapter],
        "adapter_wait_s": [wait_s for _, wait_s in adapter],
    }
    label = "the same step, saved as a whole before it ends"

    def case(metric: str, unit: str, of: Callable[[Step, Step], float]) -> Case:
        return Case(
            name=f"save/{name}/behind",
            metric=metric,
            unit=unit,
            samples=tuple(map(of, behind, adapter)),
            peer=label,
            peer_samples=tuple(map(of, whole, adapter)),
            settings=settings,
        )

    return [
        case("wait_s", "s", lambda one, alone: one[1]),
        case("step_s", "s", lambda one, alone: one[0]),
        case("moments_share", "of the step", lambda one, alone: (one[0] - alone[0]) / one[0]),
        Case(
            name=f"save/{name}/announced",
            metric="wait_s",
            unit="s",
            samples=tuple(wait_s for _, wait_s in announced),
            peer="the same step without the next batch",
            peer_samples=tuple(wait_s for _, wait_s in behind),
            settings=settings,
        ),
    ]


class _Steps:
    """Jobs of one trainer, as its node runs them."""

    def __init__(self, trainer: Any, folder: Path, *, device: str) -> None:
        from orchestrator.protocol.messages import LossSpec, OptimParams, batch_specs
        from trainer_node.export.merged import Exporter
        from trainer_node.jobs import Jobs
        from trainer_node.ranks.lockstep import Lockstep

        self.num_tokens = int(
            os.environ.get("SPLICE_BENCH_TOKENS", "65536" if device == "cuda" else "512")
        )
        self.rollout_s = float(os.environ.get("SPLICE_BENCH_ROLLOUT_S", "0"))
        self._trainer, self._folder, self._version = trainer, folder / "versions", 0
        self._jobs = Jobs(trainer, Exporter(trainer.model), Lockstep(trainer.model.control_group))
        self._link: Any = None
        self._length = min(512, trainer.model.max_length, self.num_tokens)
        specs = batch_specs(
            num_sequences=self.num_tokens // self._length, num_tokens=self.num_tokens
        )
        self._fields = {
            "loss": LossSpec(name="cross_entropy"),
            "optim": OptimParams(lr=1e-5),
            "tensors": specs,
        }
        self._buffers = [self._array(spec.name).tobytes() for spec in specs]

    def _array(self, name: str) -> np.ndarray:
        numbers = np.arange(self.num_tokens)
        is_marked = (numbers % self._length > 0).astype(np.float32)
        if name == "tokens":
            return (numbers * 7919 % self._trainer.model.vocab_size).astype(np.int32)
        if name == "sequence_lengths":
            return np.full(self.num_tokens // self._length, self._length, np.int32)
        return -is_marked if name == "sampler_logprobs" else is_marked

    def round(self, number: int) -> dict[str, Step]:
        """A step of each way. The last two change places from round to round."""
        self.run(self.behind)
        ways = [self.adapter, self.whole]
        ways = [self.behind, *(ways if number % 2 else reversed(ways))]
        return {way.__name__: self.run(way) for way in [*ways, self.announced]}

    def run(self, way: Callable[[], dict[str, float]]) -> Step:
        """One job. Returns the seconds of the step, and those that it waited for saves."""
        time.sleep(self.rollout_s)
        self._version += 1
        seconds = way()
        waited_s = self._trainer.behind.step_waited_s - seconds.get("ahead", 0.0)
        return seconds["train"] + seconds["save"], seconds["save"] + waited_s

    def behind(self) -> dict[str, float]:
        """The moments are written after the job."""
        return self._merged()

    def announced(self) -> dict[str, float]:
        """As `behind`, with the next batch there: the same one, which the next round takes."""
        from orchestrator.protocol.frames import Envelope
        from orchestrator.protocol.messages import NextBatch, TrainMerged

        told = Envelope(
            message=NextBatch(job=TrainMerged(**self._fields)), buffers=tuple(self._buffers)
        )
        self._link = SimpleNamespace(next_batch=told, progress=lambda *_, **__: None)
        try:
            return self._merged()
        finally:
            self._link = None

    def whole(self) -> dict[str, float]:
        """Everything is on the disk at the end of the job."""
        self._trainer.on_disk = None  # so the step has no checkpoint to be made again from
        return self._merged()

    def _merged(self) -> dict[str, float]:
        from orchestrator.protocol.messages import TrainMerged

        out = self._folder / str(self._version)
        job = TrainMerged(**self._fields)
        seconds = self._ask(job, version=self._version, checkpoint_dir=str(out))
        shutil.rmtree(self._folder / str(self._version - 2), ignore_errors=True)
        return seconds

    def adapter(self) -> dict[str, float]:
        """Only the adapter is saved."""
        from orchestrator.protocol.messages import TrainLora
        from trainer_node.state import checkpoint

        checkpoint.settle(self._trainer)
        self._trainer.behind.step_waited_s = 0.0
        return self._ask(TrainLora(output_dir=str(self._folder / "adapter"), **self._fields))

    def _ask(self, job: TrainMerged | TrainLora, **saves: Any) -> dict[str, float]:
        from orchestrator.protocol.messages import RunJob
        from trainer_node.request import Request

        request: Request[Any] = Request(
            sent=RunJob(request_id="benchmark", deadline_s=3600, job=job, **saves),
            buffers=self._buffers,
            received_s=time.monotonic(),
            link=self._link,
            aborts={},
        )
        result: dict[str, float] = self._jobs.handlers[type(job)](request).result["seconds"]
        return result


def _times(samples: int, folder: Path, save: Callable[[Path], object]) -> tuple[float, ...]:
    """Seconds of each, after one that is not counted."""
    found = []
    for number in range(samples + 1):
        os.sync()
        started = time.perf_counter()
        save(folder / "saved")
        if number:
            found.append(time.perf_counter() - started)
        shutil.rmtree(folder / "saved")
    return tuple(found)


def _plain(tensors: list[torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    with (folder / "all.pt").open("wb") as file:
        torch.save([t.cpu() for t in tensors], file)
        file.flush()
        os.fsync(file.fileno())


def _trainer(name: str, folder: Path, device: str) -> Any:
    """With moments, as after a first step."""
    from benchmarks.clusters import make_model
    from orchestrator.protocol.config import LoraConfig, TrainerConfig
    from orchestrator.protocol.messages import OptimParams
    from trainer_node.tools import make_checkpoint
    from trainer_node.training.start import start

    rank = SIZES[name].rank if name in SIZES else RANK
    if name in SIZES:
        size = SIZES[name]
        shape = replace(
            make_checkpoint.TINY_SHAPES["qwen3_moe"],
            layers=size.layers,
            num_experts=size.experts,
            hidden=size.hidden,
            moe_intermediate=size.inner,
        )
        folder.mkdir()
        config = make_checkpoint.hf_config(shape, dtype="float32", end_id=0, pad_id=1)
        (folder / "config.json").write_text(json.dumps(config))
    else:
        make_model(name, folder)
    trainer = start(
        TrainerConfig(
            model=folder,
            init="random",
            device=device,
            dtype="bfloat16" if device == "cuda" else "float32",  # type: ignore[arg-type]
            lora=LoraConfig(rank=rank, alpha=2.0 * rank),
        )
    )
    for p in trainer.model.params:
        p.grad.normal_()
    trainer.optimizer.step(OptimParams(lr=1e-3), factor=None)
    trainer.drop_pending()
    return trainer
