"""What would grow for as long as a run lives: logs, and the disk."""

from __future__ import annotations

import sys
import time

from orchestrator.processes import child
from orchestrator.processes.launch import Launcher, NodeProcess
from splice import run_cli
from splice.cluster.disk import LOOK_EVERY_S, DiskForecast, warning

LINES = 4000
WRITES = f"""
import time
for n in range({LINES}):
    print(n, "x" * 60, flush=True)
    time.sleep(0.001)
time.sleep(600)
"""


def test_a_log_begins_anew_and_keeps_its_newest_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "LOG_BYTES", 40_000)
    path = tmp_path / "node.log"
    with Launcher() as launcher:
        launcher.start(
            NodeProcess(name="node", argv=[sys.executable, "-c", WRITES], env={}, log_file=path)
        )
        deadline_s = time.monotonic() + 60
        while f"{LINES - 1} x" not in path.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
            # Its own watch looks once a second.
            launcher.nodes["node"].rotate_log()
    parts = [path.with_name(f"node.log.{n}") for n in (3, 2, 1)]
    assert all(part.exists() for part in parts) and not path.with_name("node.log.4").exists()
    words = [line.split()[0] for p in (*parts, path) for line in p.read_text().splitlines()]
    found = [int(word) for word in words if word.isdigit()]  # a cut may part a line
    assert len(words) - len(found) <= len(parts)
    assert found == sorted(found) and found[-1] == LINES - 1
    assert len(found) > 0.9 * (LINES - found[0]), "a cut loses some lines at most"
    assert path.stat().st_size < 100_000


def test_who_follows_a_log_sees_what_comes_after_it_began_anew(tmp_path):
    path = tmp_path / "node.log"
    path.write_text("old line\n" * 100)
    lines = run_cli._lines([path], last=1, follow=True)
    assert next(lines) == "old line"
    path.write_text("new line\n")
    assert next(lines) == "new line"


def forecast(tmp_path, *seen: tuple[float, int]) -> dict[str, float]:
    found = DiskForecast(tmp_path)
    for at_s, free_bytes in seen:
        found.note(at_s, free_bytes)
    return found.found()


def test_a_disk_that_will_be_full_within_a_day_is_warned_of(tmp_path):
    gib = 2**30
    found = forecast(tmp_path, (0.0, 20 * gib), (3600.0, 18 * gib))
    assert found == {"free_bytes": 18.0 * gib, "full_in_s": 9 * 3600.0}
    said = warning(found)
    assert said is not None and "full in 9.0 hours (18.0 GiB" in said
    assert warning(forecast(tmp_path, (0.0, 20 * gib), (3600.0, 20 * gib - 1000))) is None
    assert warning(forecast(tmp_path, (0.0, 20 * gib), (3600.0, 21 * gib))) is None
    assert warning(forecast(tmp_path, (0.0, 20 * gib), (60.0, 18 * gib))) is None, "too short"
    hours = [(3600.0 * n, (100 - 12 * max(0, n - 10)) * gib) for n in range(14)]
    said = warning(forecast(tmp_path, *hours))
    assert said is not None and "in 10.7 hours" in said, "the last six hours count"
    assert warning({}) is None


def test_the_disk_is_looked_at_now_and_then(tmp_path):
    found = DiskForecast(tmp_path)
    assert found.look(0.0) and not found.look(LOOK_EVERY_S / 2) and found.look(LOOK_EVERY_S + 1)
    assert found.found()["free_bytes"] > 0
