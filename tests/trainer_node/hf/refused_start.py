"""Starts a trainer on a folder; the refusal, or a warning in its log, must match a pattern. Without
one, nothing may be refused or left unread, on this many expert-parallel ranks.

python -m tests.trainer_node.hf.refused_start FOLDER PATTERN | RANKS
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from trainer_node.training.start import start


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    """See the module's docstring."""
    folder, pattern, *dtype = sys.argv[1:]
    ranks = int(pattern) if pattern.isdigit() else 1
    parallel = ParallelConfig(world_size=ranks, expert=ranks)
    said = _Texts()
    logging.getLogger("splice.trainer").addHandler(said)
    try:
        config = {"model": Path(folder), "finetuning_type": "full", "parallel": parallel}
        start(TrainerConfig(**config, dtype=dtype[0] if dtype else "float32"))
    except ConfigError as error:
        if pattern.isdigit():
            raise
        said.texts.append(str(error))
    if pattern.isdigit():
        assert not any("not read" in text or "lacks" in text for text in said.texts), said.texts
    else:
        assert any(re.search(pattern, text) for text in said.texts), said.texts


if __name__ == "__main__":
    main()
