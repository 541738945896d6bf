"""Writes a version of a run as an HF checkpoint, without the run.

    versions/N + the base model -> one rank builds the model and merges -> FOLDER

The bytes are those that the version was served with. A checkpoint is only read, unless the run
trains all parameters: then a crash's leftovers are repaired first.

    python -m trainer_node.tools.export_version --config trainer.json --version versions/N --out
    FOLDER [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from orchestrator.protocol.messages.mistakes import read_json
from trainer_node.hf.hub import with_local_model

SHARD_BYTES = 5 * 10**9


class Exporting:
    """A trainer of one rank that has a version's weights, and can take those of later ones.

    Args:
        config: the run's, for any number of ranks.

    Raises:
        ConfigError: the version is not a checkpoint of this model.
    """

    def __init__(self, config: TrainerConfig, version: Path, *, device: str) -> None:
        meta = _meta_of(version)
        single = {"device": device, "parallel": {}, "transport": "tcp", "numerics": "adapters"}
        more: dict[str, Any] = {**single, "memory": "resident", "adapter": None}
        more |= {"finetuning_type": meta["finetuning_type"], "loss_modules": ()}
        more["value_head"] = meta.get("value_head", False)
        if meta["finetuning_type"] == "lora":
            more |= {"lora": meta["lora"], "adapter": str(version / "adapter")}
        own = with_local_model(
            TrainerConfig.model_validate(config.model_dump() | {"compile": False} | more)
        )
        from trainer_node.training.start import start

        self._trainer = start(own)
        self._round(version, meta)

    def _round(self, version: Path, meta: dict[str, Any]) -> None:
        # Late, because on a CPU Megatron can be imported only after `start`.
        from trainer_node.state import loading

        trainer = self._trainer
        if meta["finetuning_type"] == "lora":
            loading.check_base(version, meta, trainer.model)
            trainer.model.adapters.rounding = loading.rounding_of(trainer.model, meta)
        else:
            loading.load(trainer, version, with_moments=False)

    def take(self, version: Path) -> None:
        """Take another version of the same run, whose adapters, if any, are of the same kind.

        Raises:
            ConfigError: its adapters are of another kind.
        """
        meta, config = _meta_of(version), self._trainer.model.config
        is_lora = meta["finetuning_type"] == "lora"
        if is_lora and LoraConfig(**meta["lora"]) != config.lora:
            raise ConfigError(f"{version} has other adapters than the version before; start again")
        if is_lora:
            self._trainer.load_adapter(version / "adapter")
        self._round(version, meta)

    def write(self, out: Path) -> list[str]:
        """Write the checkpoint; returns its files.

        Raises:
            ConfigError: `out` cannot be written.
        """
        from trainer_node.export.hf_export import export_hf
        from trainer_node.export.merged import Exporter

        model = self._trainer.model
        return export_hf(model, Exporter(model), out, shard_bytes=SHARD_BYTES)


def _meta_of(version: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((version / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{version} is not a version's checkpoint: {error}") from error
    return meta


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.tools.export_version",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--config", type=Path, required=True, help="TrainerConfig as JSON")
    parser.add_argument("--version", type=Path, required=True, help="folder versions/N of a run")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(argv)
    try:
        config = read_json(given.config, TrainerConfig)
        files = Exporting(config, given.version, device=given.device).write(given.out)
    except SpliceError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{len(files)} files in {given.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
