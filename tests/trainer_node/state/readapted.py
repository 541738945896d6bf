"""One rank of a check of NewAdapter: a trainer that changed its adapter against one that began
with it.

    ... -m tests.trainer_node.state.readapted OUT MODEL TENSOR PIPELINE EXPERT [from_the_start]
"""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import LOSS, OPTIM, make_trainer
from trainer_node.export.merged import Exporter
from trainer_node.ranks import heap
from trainer_node.state import checkpoint, loading
from trainer_node.training.trainer import Trainer

WIDE = LoraConfig(rank=4, alpha=8)
NARROW = LoraConfig(rank=6, alpha=3, targets=("q_proj", "down_proj"))


def states(trainer: Trainer) -> list[torch.Tensor]:
    """Weights and moments, copied."""
    found = [p.param.detach().clone() for p in trainer.model.params]
    for values in trainer.optimizer.state.values():
        found += [v.clone() for v in values.values()]
    return found


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def exported(exporter: Exporter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in exporter.merged_tensors()}


def main() -> None:
    """See the module's docstring. The first launch leaves for the second what it saw."""
    out, model, sizes = Path(sys.argv[1]), Path(sys.argv[2]), [*map(int, sys.argv[3:6])]
    is_first = "from_the_start" in sys.argv
    trainer = make_trainer(model, *sizes, lora=NARROW if is_first else WIDE)
    seen = out / f"narrow_{dist.get_rank()}.pt"
    if is_first:
        metrics = [trainer.train_step(make_batch(), LOSS, OPTIM) for _ in range(2)]
        torch.save([metrics, states(trainer), exported(Exporter(trainer.model))], seen)
    else:
        check(trainer, out, *torch.load(seen, weights_only=True))
    trainer.model.close()


def check(
    trainer: Trainer,
    out: Path,
    metrics: list[dict[str, float]],
    narrow: list[torch.Tensor],
    narrow_export: dict[str, torch.Tensor],
) -> None:
    """Wide, then narrow by a job, then both by their checkpoints."""
    batch = make_batch()
    exporter = Exporter(trainer.model)
    trainer.when_adapted = exporter.forget
    base = dict(exporter.base_tensors())
    trainer.train_step(batch, LOSS, OPTIM)
    checkpoint.save(trainer, out / "wide", version=1)
    wide, wide_part = states(trainer), exporter.manifest().changed
    went_on = trainer.train_step(batch, LOSS, OPTIM)["loss"]
    check_refused(trainer)

    trainer.num_steps = 0
    heap.freeze()  # as the node does
    replaced = [weakref.ref(adapter) for adapter in trainer.model.adapters.adapters]
    assert trainer.use_adapter(trainer.plan_adapter(NARROW)) == 1, "what was pending is dropped"
    assert not any(ref() for ref in replaced), "the old adapter's memory is free"
    assert len(gc.get_objects()) < gc.get_freeze_count() // 10
    fresh = exported(exporter)
    assert all(torch.equal(fresh[name], base[name]) for name in base), "it changes nothing yet"
    assert exporter.manifest().changed == wide_part, "a part takes the old deltas away"
    again = [trainer.train_step(batch, LOSS, OPTIM) for _ in range(2)]
    for name in ("loss", "grad_norm", "clip_fraction"):
        assert [m[name] for m in again] == [m[name] for m in metrics], name
    assert same(states(trainer), narrow)
    assert same([*exported(exporter).values()], [*narrow_export.values()])
    checkpoint.save(trainer, out / "narrow", version=2)

    loaded = loading.load(trainer, out / "wide")
    assert loaded.adapter_changed and "the adapter is now that of" in loaded.notes[0]
    assert trainer.model.config.lora == WIDE and same(states(trainer), wide)
    assert trainer.train_step(batch, LOSS, OPTIM)["loss"] == went_on
    assert not loading.load(trainer, out / "wide").adapter_changed
    assert loading.load(trainer, out / "narrow").adapter_changed
    assert same(states(trainer), narrow)


def check_refused(trainer: Trainer) -> None:
    """An adapter that does not fit changes nothing."""
    batch = make_batch()
    trainer.forward_backward(batch, LOSS)
    before, scores = states(trainer), trainer.forward(batch)
    for targets, why in ((("nothing",), "matches nothing"), (("q_proj", "nowhere"), "'nowhere'")):
        with pytest.raises(ConfigError, match=why):
            trainer.plan_adapter(LoraConfig(rank=2, targets=targets))
    assert trainer.pending.num_batches == 1 and trainer.model.config.lora == WIDE
    assert same(before, states(trainer))
    assert all(map(torch.equal, scores, trainer.forward(batch)))


if __name__ == "__main__":
    main()
