"""Loads a checkpoint whose moments were lost, because the trainer ended while it wrote them.

    its base (the last complete checkpoint) -> the step again, from the request that the checkpoint
    holds -> its weights, compared bit for bit with the durable ones -> the moments are written

The weights that were durable always count; they may have been served. A difference is told in
`Loaded.notes`, and in the moments' marker for later loads. If the step cannot be made again, the
moments are those of the base, or new ones, and a note says so. Nothing is then written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from orchestrator.errors import SpliceError, without_frames
from orchestrator.protocol.frames import unpacked
from orchestrator.protocol.messages import RunJob, TrainMerged
from trainer_node.files.generations import CheckpointError
from trainer_node.ranks import gpu, objects
from trainer_node.ranks.lockstep import Failure, agree
from trainer_node.state import checkpoint, contents, loading
from trainer_node.state.loading import Loaded, Lost
from trainer_node.training import steps
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")


class StepFailed(SpliceError, RuntimeError):
    """The lost step could not be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Between the weights of the repeated step and the durable ones, over all ranks."""

    elements: int
    largest: float

    def __str__(self) -> str:
        return f"{self.elements} elements, by at most {self.largest:.3g}"


def load(trainer: Trainer, folder: Path) -> Loaded:
    """`loading.load`, which makes the last step again if its moments were lost. A collective.

    Raises:
        CheckpointError: as `loading.load`.
    """
    checkpoint.settle(trainer)
    lost = loading.lost_moments(trainer, folder)
    if lost is None:
        return loading.load(trainer, folder)
    log.warning("the moments of %s are lost; making its step again from %s", folder, lost.base)
    dropped, present = trainer.drop_pending(), trainer.model.config.lora
    with trainer.changing():
        try:
            _make_again(trainer, folder, lost)
        except (CheckpointError, StepFailed) as error:
            freed = gpu.without_frames(error, trainer.model.device)
            loaded, note = _without(trainer, folder, lost, str(freed))
        else:
            loaded, note = _compared(trainer, folder, lost)
    log.warning("%s", note)
    switched = loading.switch_note(folder, present, trainer.model.config.lora)
    notes = (note, switched) if switched else (note,)
    return replace(loaded, dropped_batches=dropped, notes=notes, adapter_changed=bool(switched))


def _make_again(trainer: Trainer, folder: Path, lost: Lost) -> None:
    """Have the trainer hold the state after the repeated step.

    Raises:
        CheckpointError, StepFailed: on every rank, if it cannot.
    """
    loading.load(trainer, lost.base, only_save=lost.base_save)
    make_step(trainer, folder)


def make_step(trainer: Trainer, folder: Path) -> None:
    """Take the step that made the checkpoint, from its base's state. A collective.

    Raises:
        StepFailed: on every rank, if it cannot.
    """

    def as_error(failures: Sequence[Failure], _: Exception | None) -> StepFailed:
        return StepFailed(f"rank {failures[0].rank} {failures[0]}")

    with agree(trainer.model.control_group, as_error):
        request = unpacked(np.fromfile(folder / contents.REMAKE, np.uint8).data)
        assert isinstance(request.message, RunJob)
        job = request.message.job
        assert isinstance(job, TrainMerged)
        batch = steps.batch_of(trainer, job, request.buffers)
        steps.train(trainer, batch, job, on_step=lambda step, count: None)


def _compared(trainer: Trainer, folder: Path, lost: Lost) -> tuple[Loaded, str]:
    """Put the durable weights in the place of the repeated step's, and write the moments."""
    loaded, found = take_durable(trainer, folder)
    begin = (
        f"The optimizer's moments of {folder} were lost with the trainer. Step {lost.steps} was "
        f"made again from {lost.base}"
    )
    if found.elements:
        note = (
            f"{begin}, and its weights differ from the durable ones in {found}. The durable "
            "weights count. The moments are the repeated step's."
        )
    else:
        note = f"{begin}; its weights equal the durable ones bit for bit."
    try:
        checkpoint.complete(trainer, folder, note=note if found.elements else "")
    except CheckpointError as error:
        note = f"{note} They could not be written ({error})."
    return loaded, note


def take_durable(trainer: Trainer, folder: Path) -> tuple[Loaded, Difference]:
    """Put the checkpoint's weights in the place of the trainer's, which keeps its moments, and say
    how they differed. A collective.

    Raises:
        CheckpointError: as `loading.load`.
    """
    made = [master.detach().to("cpu", copy=True) for _, master in trainer.optimizer.masters]
    loaded = loading.load(trainer, folder, with_moments=False)
    return loaded, _difference(trainer, made)


def _difference(trainer: Trainer, made: Sequence[torch.Tensor]) -> Difference:
    """A collective."""
    elements, largest = 0, 0.0
    for (_, master), other in zip(trainer.optimizer.masters, made, strict=True):
        durable = master.detach().cpu()
        differs = durable.view(torch.int32) != other.view(torch.int32)
        if count := int(differs.sum()):
            elements += count
            largest = max(largest, float((durable - other).abs().max()))
    found = objects.all_gather([elements, largest], group=trainer.model.control_group)
    return Difference(elements=sum(e for e, _ in found), largest=max(m for _, m in found))


def _without(trainer: Trainer, folder: Path, lost: Lost, why: str) -> tuple[Loaded, str]:
    """Load the durable weights with the base's moments, or with new ones."""
    moments = "The optimizer starts afresh."
    trainer.optimizer.state.clear()
    try:
        loading.load(trainer, lost.base, only_save=lost.base_save)
        moments = f"The moments are those of {lost.base}, from before that step."
    except CheckpointError as error:
        without_frames(error)
    loaded = loading.load(trainer, folder, with_moments=False)
    return loaded, (
        f"The optimizer's moments of {folder} were lost with the trainer, and step {lost.steps} "
        f"could not be made again from {lost.base} ({why}). The durable weights count. {moments}"
    )
