"""Makes a run's versions again, and compares each with the one on disk, bit for bit.

    versions/FROM -> the trainer's state -> the step of each later version, from the request that it
    holds (`remake.bin`) -> its weights, next to the durable ones

What was published is a function of these weights, the base and the run's rounding, so it comes out
equal too. After a difference the durable version counts, with its moments: each step is judged by
itself. The run's folder is only read, unless a crash left something to repair.

    torchrun ... -m trainer_node.tools.replay --config trainer.json --versions RUN/versions
    --numbers 40 41 42
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import SpliceError
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages.mistakes import read_json
from trainer_node.hf.hub import with_local_model
from trainer_node.training.start import start

if TYPE_CHECKING:
    from trainer_node.training.trainer import Trainer


def replay(trainer: Trainer, folders: Sequence[Path]) -> Iterator[dict[str, object]]:
    """Load the first version and make the others again, in order. A collective.

    Yields: of each version made: its number, the elements that differ, the largest difference, and
    seconds.

    Raises:
        SpliceError: a checkpoint cannot be loaded, or its step cannot be made again.
    """
    # Late, because on a CPU Megatron can be imported only after `start`.
    from trainer_node.state import remake

    remake.load(trainer, folders[0])
    for folder in folders[1:]:
        started = time.monotonic()
        remake.make_step(trainer, folder)
        loaded, found = remake.take_durable(trainer, folder)
        if found.elements:
            remake.load(trainer, folder)
        yield {
            "version": loaded.version,
            "elements": found.elements,
            "largest": found.largest,
            "seconds": round(time.monotonic() - started, 3),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Rank 0 writes a line of JSON for each version."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.tools.replay", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="TrainerConfig as JSON")
    parser.add_argument("--versions", type=Path, required=True, help="folder of a run's versions")
    parser.add_argument("--numbers", type=int, nargs="+", required=True, help="in order")
    given = parser.parse_args(argv)
    speaks = os.environ.get("RANK", "0") == "0"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Megatron prints
    try:
        config = read_json(given.config, TrainerConfig)
        trainer = start(with_local_model(config))
        for made in replay(trainer, [given.versions / str(n) for n in given.numbers]):
            if speaks:
                answers.write(f"{json.dumps(made)}\n")
        trainer.model.close()
    except SpliceError as error:
        if speaks:
            sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
