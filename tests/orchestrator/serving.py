"""`splice serve` as a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from tests.forked import Forked
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import TOKEN

REPO = Path(__file__).resolve().parents[2]


def run_file(run_dir: Path, **tables: Any) -> Path:
    """A file next to the run's folder, for an orchestrator of fake nodes."""
    path = run_dir.with_suffix(".json")
    roles: dict[str, Any] = {"trainer": {}, "inference": {}}
    values = {"name": "m", "model": "model", "run_dir": str(run_dir), **roles, **tables}
    path.write_text(json.dumps(values))
    return path


def start_serve(
    run_dir: Path,
    *options: str,
    log: IO[Any] | None = None,
    module: str = "splice",
    **environment: str,
) -> Forked:
    """One that resumes what is in `run_dir`. `module` is started in splice's place."""
    return Forked(
        *("serve", run_file(run_dir), "--resume", *options),
        module=module,
        env={**os.environ, "SPLICE_RUN_TOKEN": TOKEN, **environment},
        out=os.devnull if log is None else log.name,
    )


def endpoint_in(run_dir: Path) -> str:
    """Where the one that was started there listens."""
    assert soon((run_dir / "endpoint").exists), "it does not listen"
    return (run_dir / "endpoint").read_text()
