"""Checks that an interpreter's environment has what its role runs, and says how to install more."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment
from splice.client.run_file import RunFile
from splice.cluster import doctor
from splice.cluster.doctor import NodeRole

_FIND = """
import importlib.util, sys
def is_there(name):
    try: return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError: return False
print(*(name for name in sys.argv[1:] if not is_there(name)))
"""


def install(extra: str) -> str:
    """Return the command that installs an extra from where this splice came from.

    Without a clone or a URL that is its index; the public one has another project of this name.
    """
    clone, url = Path(__file__).parents[2], ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # only on PYTHONPATH
        text = importlib.metadata.distribution("splice").read_text("direct_url.json")
        found = json.loads(text or "{}")
        vcs = f"{found['vcs_info']['vcs']}+" if "vcs_info" in found else ""
        url = "" if "dir_info" in found else vcs + found.get("url", "")
    if (clone / "pyproject.toml").is_file():
        return f'pip install -e "{clone}[{extra}]"'
    return f'pip install "splice[{extra}]{url and " @ "}{url}"'


def check_environments(run: RunFile) -> None:
    """Check that both interpreters have their role's packages, and that losses can be imported.

    Raises:
        ConfigError: names interpreter and package.
    """
    for role, section in ((NodeRole.TRAINER, run.trainer), (NodeRole.INFERENCE, run.inference)):
        python = Path(shutil.which(section.python) or section.python)
        installed = doctor.ask(python)
        on_gpus = section.device == "cuda"
        missing = [
            finding.package
            for finding in doctor.examine(role, installed, on_gpus=on_gpus)
            if finding.installed == "-" and not finding.ok
        ]
        if missing:
            raise ConfigError(
                f"{role}.python: {python} has no {', '.join(missing)}; name the interpreter of the "
                f"{role} environment (`make envs` makes it), or install what "
                f"`splice doctor --role {role} --python {python}` shows"
            )
    _check_losses(run.trainer.python, run.trainer.loss_modules)


def _check_losses(python: Path, modules: Sequence[str]) -> None:
    if not modules:
        return
    done = subprocess.run(
        python_command(python, "-c", _FIND, *modules),
        env=python_environment(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or (missing := done.stdout.split()):
        what = done.stderr.strip().splitlines()[-1] if done.returncode else ", ".join(missing)
        raise ConfigError(
            f"trainer.loss_modules: {python} does not find {what}; put the module's folder on "
            "PYTHONPATH, or install it there"
        )
