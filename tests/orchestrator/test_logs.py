"""The log of a process, as text and as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = (
    "import logging\n"
    "from orchestrator.processes.logs import log_to_stderr\n"
    "log_to_stderr('trainer')\n"
    "logging.getLogger('splice.rl').warning('step %d', 7)\n"
    "try:\n"
    "    1 / 0\n"
    "except ZeroDivisionError:\n"
    "    logging.getLogger('splice.rl').exception('it failed')\n"
)


def logged(**env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr


def test_json_lines():
    first, second = map(json.loads, logged(SPLICE_LOG_FORMAT="json").splitlines())
    assert first["message"] == "step 7" and first["level"] == "WARNING"
    assert first["logger"] == "splice.rl" and first["who"] == "trainer"
    assert "ZeroDivisionError" in second["traceback"]


def test_text_unless_asked():
    line = logged(SPLICE_LOG_FORMAT="").splitlines()[0]
    assert line.endswith("trainer WARNING splice.rl: step 7")
