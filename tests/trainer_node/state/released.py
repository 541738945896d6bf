"""One rank that saves a small checkpoint, or loads one that an earlier version saved.

... -m tests.trainer_node.state.released FOLDER MODEL save|load|refuse
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.protocol.config import LoraConfig
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import LOSS, OPTIM, make_trainer
from trainer_node.files.generations import CheckpointError
from trainer_node.state import checkpoint, loading


def main() -> None:
    """See the module's docstring."""
    folder, model, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    lora = LoraConfig(rank=1, alpha=2, targets=("q_proj",))
    trainer = make_trainer(model, 1, 1, 1, lora=lora, init="random")
    if what == "save":
        trainer.train_step(make_batch(), LOSS, OPTIM)
        checkpoint.save(trainer, folder, version=1, client_state={"data": 7})
    elif what == "load":
        found = loading.load(trainer, folder)
        assert (found.version, found.client_state, trainer.num_steps) == (1, {"data": 7}, 1)
        assert found.rng_restored and not found.notes
        assert any(m.abs().sum() > 0 for s in trainer.optimizer.state.values() for m in s.values())
        trainer.train_step(make_batch(), LOSS, OPTIM)
    else:
        with pytest.raises(CheckpointError, match=r"written by splice 9\.0 in layout 99.*Use spl"):
            loading.load(trainer, folder)
    trainer.model.close()


if __name__ == "__main__":
    main()
