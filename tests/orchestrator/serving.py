"""`splice serve` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import TOKEN

REPO = Path(__file__).resolve().parents[2]


def start_serve(
    run_dir: Path,
    *options: str,
    log: IO[Any] | None = None,
    module: str = "splice",
    **environment: str,
) -> subprocess.Popen[bytes]:
    """One that resumes what is in `run_dir`. `module` is started in splice's place."""
    argv = [sys.executable, "-m", module, "serve", "--run-dir", str(run_dir), "--name", "m"]
    return subprocess.Popen(
        [*argv, "--resume", *options],
        cwd=REPO,
        env={**os.environ, "SPLICE_RUN_TOKEN": TOKEN, "PYTHONPATH": str(REPO), **environment},
        stdout=log,
        stderr=log,
    )


def endpoint_in(run_dir: Path) -> str:
    """Where the one that was started there listens."""
    assert soon((run_dir / "endpoint").exists), "it does not listen"
    return (run_dir / "endpoint").read_text()
