"""Admits a model to training: the first start on it runs `tools.check_model` once.

A report that says yes is kept in the user's cache, under a hash of config.json, of the packages
that build the model, and of this one's sources. A model that fails is refused, and checked again at
the next start. The check runs on the CPU: it says nothing of a GPU's kernels or of several ranks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.config import TrainerConfig
from trainer_node.ranks import objects, rendezvous

log = logging.getLogger("splice.trainer")
SAYS = "splice check: "
"""What the check's own errors begin with; before it stand other packages' lines."""
TIMEOUT_S = 900.0
PACKAGES = ("megatron-core", "megatron-bridge", "transformers", "torch")
RANKS = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the environment's names that make a process a rank."""
AT_MOST = 1500
"""Characters of what the check says when it cannot be made."""
SKIP = 'trainer.admission = "skip" starts without the check'


def cache() -> Path:
    """The folder of the kept reports."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "splice" / "checks"


def require_once(config: TrainerConfig) -> None:
    """`require` on rank 0, while the others wait. A collective.

    Raises:
        ConfigError: on every rank, as `require` does.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        require(config.model)
        return
    why = ""
    timeout_s = TIMEOUT_S + config.collective_timeout_s
    with rendezvous.patient_group(config, timeout_s=timeout_s) as group:
        if os.environ["RANK"] == "0":
            try:
                require(config.model)
            except ConfigError as error:
                why = str(error)
        why, *_ = objects.all_gather(why, group=group)
    if why:
        raise ConfigError(why)


def require(model: Path) -> None:
    """Check a model's folder, unless a report on it is there.

    Raises:
        ConfigError: the model failed, or could not be checked; says what and how to continue.
    """
    kept = _kept(model)
    if kept.is_file() and kept.stat().st_size:
        return
    log.info("checking %s against transformers on the CPU, once, for half a minute or so", model)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        done = _run(model, out)
        if not out.is_file():
            _, has_sentence, said = done.stderr.rpartition(SAYS)
            said = said[:AT_MOST] if has_sentence else said[-AT_MOST:]
            why = said.strip() or f"its process ended with code {done.returncode}"
            raise ConfigError(f"{model} cannot be checked: {why}\n{SKIP}")
        found = json.loads(out.read_text())
    if not found["ok"]:
        wrong = "; ".join(f"{r['name']}: {r['text']}" for r in found["rows"] if not r["ok"])
        raise ConfigError(
            f"{model} ({found['architecture']}) is not trained as transformers computes it. "
            f"{wrong}. `splice check {model}` shows the whole table. {SKIP}"
        )


def keep(model: Path, report: str) -> None:
    """Keep a report that says yes, for the next starts on this model."""
    kept = _kept(model)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(report)
        partial.replace(kept)
    except OSError as error:
        log.warning(
            "the report on %s is not kept, so the next start checks again: %s", model, error
        )


def _kept(model: Path) -> Path:
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for name in PACKAGES:
        digest.update(f"{name}=={importlib.metadata.version(name)}".encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return cache() / f"{digest.hexdigest()[:32]}.json"


def _run(model: Path, out: Path) -> subprocess.CompletedProcess[str]:
    argv = python_command(sys.executable, "-m", "trainer_node.tools.check_model")
    argv += ["--model", str(model), "--out", str(out)]
    # Its own process, not a rank of this one's group.
    env = {k: v for k, v in os.environ.items() if not k.startswith(RANKS)}
    env = python_environment({**env, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"})
    try:
        return subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"checking {model} took more than {TIMEOUT_S:.0f} s. {SKIP}") from error
