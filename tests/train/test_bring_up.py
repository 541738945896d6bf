"""`splice train` and a run that somebody else has started."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from splice.cluster import up
from splice.train.command import bring_up
from splice.train.sections import TrainFile

STARTS = """
import sys, time
from pathlib import Path
from splice.cluster.up import _State
state = _State(Path(sys.argv[1]))
state.write("starting", "publishing m@0")
time.sleep(2)
state.write("up", "serving")
time.sleep(60)
"""


def test_a_run_that_starts_is_waited_for(tmp_path: Path) -> None:
    run = TrainFile.model_validate(
        {"name": "m", "model": "m", "data": {"path": "d"}, "loop": {"reward": "r"}}
        | {"run_dir": tmp_path}
    )
    said: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)])
    try:
        deadline_s = time.monotonic() + 60
        while not up.read_state(tmp_path) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        bring_up(run, timeout_s=60, say=said.append)
        assert up.read_state(tmp_path)["phase"] == "up"
        assert said[0].endswith("is starting") and "publishing m@0" in said
        said.clear()
        bring_up(run, timeout_s=60, say=said.append)
        assert len(said) == 1 and said[0].endswith("is up; it continues")
    finally:
        process.kill()
        process.wait(60)
