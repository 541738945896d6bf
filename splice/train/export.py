"""Takes a version out of a run, whether it is up or stopped: as an adapter or a whole HF model."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.processes.python import python_command, python_environment
from orchestrator.storage.journal import committed_in
from splice.client.clients import SpliceClient
from splice.client.run_file import FILE_NAME, RUN_JSON, RunFile, load
from splice.cluster import up
from splice.rl import evaluations

_FILES = (RUN_JSON, "slurm.json", "ray.json")
"""What `splice up` and the launchers write into a run's folder."""
_PUSH = """
import sys
from huggingface_hub import HfApi
folder, repo, private = sys.argv[1:]
api = HfApi()
try:
    api.create_repo(repo, private=private == "True", exist_ok=True)
    print(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by splice"))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}".partition("\\n")[0])
"""


def run_of(path: Path) -> RunFile:
    """Return the run that the user means: by its run.toml, that one's folder, or its own folder.

    Raises:
        ConfigError: it names no run.
    """
    if path.is_file() or (path / FILE_NAME).is_file():
        return load(path)
    for name in _FILES:
        if (path / name).is_file():
            return load(path / name)
    raise ConfigError(f"{path} is neither a {FILE_NAME}, nor holds one, nor is a run's folder")


def version_of(run_dir: Path, wanted: str) -> int:
    """Return the number of a version on disk.

    Args:
        wanted: a number, "best" (by the run's evaluations) or "latest".

    Raises:
        ConfigError: there is none; says which there are.
    """
    folders = (run_dir / "versions").glob("[0-9]*")
    found = sorted(int(path.name) for path in folders if (path / "COMPLETE").exists())
    if not found:
        raise ConfigError(f"no version is on disk in {run_dir / 'versions'}")
    if wanted == "latest":
        return found[-1]
    if wanted == "best":
        if (best := evaluations.best(run_dir)) is None:
            raise ConfigError(
                f"no version that is on disk in {run_dir / 'versions'} was evaluated; set "
                "eval.keep_best, or name a version"
            )
        return best.version
    if not wanted.isdigit() or int(wanted) not in found:
        raise ConfigError(
            f"--version {wanted}: on disk are {', '.join(map(str, found))}; or say best or latest. "
            "orchestrator.keep_versions and eval.keep_best keep more"
        )
    return int(wanted)


@contextlib.contextmanager
def config_file(run: RunFile, **changes: object) -> Iterator[str]:
    """A file with the trainer's settings, for a tool in its environment."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(run.trainer_config().model_copy(update=changes).model_dump_json())
        file.flush()
        yield file.name


def adapter(run: RunFile, version: int, out: Path) -> None:
    """Copy a version's adapter, in PEFT's files, into a new folder.

    Raises:
        ConfigError: the folder exists, or the run trains all parameters.
    """
    source = run.run_dir / "versions" / str(version) / "adapter"
    if not source.is_dir():
        raise ConfigError(f"version {version} has no adapter: the run trains all weights; use --hf")
    _refuse(out)
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    part.replace(out)


def model(run: RunFile, version: int, out: Path, *, device: str) -> None:
    """Write a version as a whole HF model into a new folder. A run that serves the version writes
    it itself. For any other, one rank starts in the trainer's environment.

    Raises:
        ConfigError: the folder exists, or the version is of another model; says why.
    """
    _refuse(out)
    if _is_served(run, version):
        with SpliceClient.of_run(run.run_dir) as client:
            client.export_hf(str(out.absolute()))
        return
    with config_file(run) as file:
        folder = run.run_dir / "versions" / str(version)
        argv = ["--config", file, "--version", str(folder), "--out", str(out.absolute())]
        module = "trainer_node.tools.export_version"
        command = python_command(run.trainer.python, "-m", module, *argv, "--device", device)
        _in_trainer(command, what=f"version {version} cannot be exported")


def push(run: RunFile, folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder to the Hub; returns the URL.

    Raises:
        ConfigError: the Hub refuses; says why.
    """
    return _in_trainer(
        python_command(run.trainer.python, "-c", _PUSH, str(folder), repo, str(private)),
        what=f"{folder} is written, but could not be pushed to {repo}",
        remedy="; set HF_TOKEN to a token that may write there (`hf auth login`)",
    )


def mirror(
    run: RunFile, url: str, key: Path, options: Mapping[str, object], *, poll_s: float | None
) -> int:
    """Write a run's versions to a store, in the trainer's environment. Returns the exit code.

    Args:
        poll_s: seconds between two looks. None: write the newest version and end.
    """
    with config_file(run) as file:
        argv = ["--config", file, "--run-dir", run.run_dir, "--name", run.name, "--store", url]
        argv += ["--key", key]
        argv += [word for name, value in options.items() for word in (f"--{name}", value)]
        module = "trainer_node.tools.mirror"
        with subprocess.Popen(
            python_command(run.trainer.python, "-m", module, *map(str, argv)),
            env=python_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdin is not None
            assert writer.stdout is not None
            typer.echo(writer.stdout.readline().strip())  # the public key
            with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
                while writer.poll() is None:
                    if (version := committed_in(run.run_dir / "journal.sqlite")) is not None:
                        writer.stdin.write(f"{version}\n")
                        writer.stdin.flush()
                        writer.stdout.readline()
                    if poll_s is None:
                        break
                    time.sleep(poll_s)
            with contextlib.suppress(BrokenPipeError):
                writer.stdin.close()
            return writer.wait()


def _refuse(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists; choose a new folder")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {out.absolute().parent}")


def _is_served(run: RunFile, version: int) -> bool:
    """Whether a living trainer has the version, and nothing newer."""
    if not up.is_alive(up.read_state(run.run_dir)):
        return False
    try:
        with SpliceClient.of_run(run.run_dir) as client:
            status = client.status()
    except (SpliceError, TimeoutError):
        return False
    return status.version == version and not status.apart


def _in_trainer(command: list[str], *, what: str, remedy: str = "") -> str:
    done = subprocess.run(
        command,
        env=python_environment(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [""]
    if done.returncode:
        raise ConfigError(f"{what}: {said[-1]}{remedy}")
    return said[-1]
