"""Makes the versions of a stopped run again, and says which of them come out bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment
from orchestrator.storage.run_folder import RunFolder
from splice.client.run_file import RunFile, stop_command
from splice.train.export import config_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A version that was made again.

    Attributes:
        elements: of its weights that differ, in fp32.
        largest: difference.
        seconds: for the step and the comparison.
    """

    version: int
    elements: int
    largest: float
    seconds: float


def plan(versions: Path, first: int, last: int) -> list[int]:
    """Return the versions from `first` to `last`, each made from the one before it.

    Raises:
        ConfigError: one of them is not on disk, or was made in another way; says which and why.
    """
    if last <= first:
        raise ConfigError(f"--to {last} is not after --from {first}")
    _meta_of(versions / str(first))
    for number in range(first + 1, last + 1):
        _check(versions / str(number), after=number - 1)
    return list(range(first, last + 1))


def _meta_of(folder: Path) -> dict[str, Any]:
    try:
        (folder / "COMPLETE").stat()
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"{folder} is no whole version. orchestrator.keep_versions says how many stay on "
            "disk; 0 keeps all"
        ) from None
    return meta


def _check(folder: Path, *, after: int) -> None:
    remake = _meta_of(folder).get("remake")
    if remake is None or not (folder / "remake.bin").exists():
        raise ConfigError(
            f"{folder} does not hold the job that made it: only what train_merged makes does "
            "(as every step of a loop), without pending gradients and not in trainer.memory exit"
        )
    base = Path(os.path.normpath(folder / remake["base"]))
    if base != folder.parent / str(after):
        raise ConfigError(
            f"{folder} was made from {base}, not from version {after}; replay up to {after}"
        )


def numbers_of(run: RunFile, first: int, last: int) -> list[int]:
    """`plan` of a run that is stopped.

    Raises:
        ConfigError: as `plan`, or the run is up.
    """
    numbers = plan(run.run_dir.absolute() / "versions", first, last)
    if RunFolder.is_in_use(run.run_dir):
        raise ConfigError(f"the run in {run.run_dir} is up: `{stop_command(run.run_dir)}` first")
    return numbers


def replay(run: RunFile, first: int, last: int) -> Iterator[Made]:
    """Make the versions again, by the run's trainer settings, and yield each.

    Raises:
        ConfigError: as `numbers_of`, or a step cannot be made again; says why.
    """
    numbers = numbers_of(run, first, last)
    versions = run.run_dir.absolute() / "versions"
    ranks = run.trainer.parallel.world_size
    with config_file(run, adapter=None) as file:
        words = ["--config", file, "--versions", versions, "--numbers", *numbers]
        argv = ["trainer_node.tools.replay", *map(str, words)]
        if ranks > 1:
            launch = ("--standalone", f"--nproc-per-node={ranks}", "--module")
            argv = ["torch.distributed.run", *launch, *argv]
        env = python_environment(os.environ)
        if run.trainer.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, run.trainer.gpus))
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(
                python_command(run.trainer.python, "-m", *argv),
                env=env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield Made(**json.loads(line))
            except BaseException:
                process.terminate()
                raise
            if process.wait() != 0:
                log.seek(0)
                said = log.read().strip().splitlines()[-30:] or ["no word"]
                raise ConfigError("the versions cannot be made again:\n" + "\n".join(said))
