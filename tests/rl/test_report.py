"""`splice report`: what the page holds, and what a browser shows of it without a network."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splice.cli import app
from splice.report import phases_of, read
from tests.rl.measured import SECRET, Measured
from tests.rl.stood_in import run_loop


def page_of(folder: Path, *, steps: int = 4) -> Path:
    async def on_step(step, replicas, loop) -> None:
        loop.note(accuracy=step.number / 10)

    def reward(row, completion) -> float:
        object.__setattr__(completion, "text", f"{SECRET} is group {row['name']}")
        return float(sum(completion.answer_ids))

    run = Measured(train_s=0.05, token_s=0.01)
    asyncio.run(run_loop(run, folder, steps=steps, on_step=on_step, reward=reward))
    out = folder / "report.html"
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(out)])
    assert done.exit_code == 0, done.output
    return out


def test_the_page_has_every_plot_and_asks_for_nothing(tmp_path):
    text = page_of(tmp_path).read_text()
    titles = re.findall(r"<figure><h3>([^<]+)</h3><svg", text)
    wanted = ["Reward", "Loss", "Entropy (nats)", "KL (nats)", "Staleness (versions)"]
    wanted += ["accuracy (evaluation)", "Time of a step (s)", "Pause of generation (s)"]
    wanted.append("Log-prob gap, sampler to trainer (nats)")
    assert set(wanted) <= set(titles)
    said = re.findall(r"</svg>\s*<figcaption>([^<]+)</figcaption>", text)
    assert len(said) == len(titles), "a sentence on each plot"
    assert "0.4 at last; a trend needs 6 steps." in said
    assert f"splice {importlib.metadata.version('splice')}" in text
    assert "Gradient norm" not in titles, "no plot without numbers"
    assert "Both sides, last 4 steps" in text and "requests in flight" in text
    assert "Samples of step 4" in text and "Samples of step 1" in text
    assert "is group" in text and SECRET not in text, "answers are text"
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)", text), "nothing to fetch"
    assert "<script" not in text and "@import" not in text
    assert not re.findall(r"url\((?!#)", text)


def test_the_balance_is_that_of_the_last_starts_warm_steps(tmp_path):
    log = tmp_path / "decisions.jsonl"

    def start() -> list[dict]:
        return [{"event": "start", "config": {"max_staleness": 1}, "at": 1.0}]

    def steps(first: int, waits: list[float]) -> list[dict]:
        return [
            {
                "event": "trained",
                "step": first + n,
                "version": first + n,
                "metrics": {},
                "seconds": {"step": 10.0, "trainer_waits": seconds},
            }
            for n, seconds in enumerate(waits)
        ]

    lines = [*start(), *steps(1, [9.0, 8.0, 8.0]), *start(), *steps(4, [7.0, 2.0, 1.0])]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [seconds["trainer_waits"] for seconds in read(log).warm] == [2.0, 1.0]
    lines += [*start(), *steps(7, [6.0])]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(log).warm == [], "no balance yet"


def test_a_step_is_what_the_trainer_does_in_it():
    step = {"step": 10.0, "training": 7.0, "trainer_waits": 2.0, "body": 1.0}
    job = {"job.train": 4.0, "job.save": 2.5, "job.ahead": 2.0}
    found = phases_of(step | job)
    assert found == {
        "training": 6.0,  # two seconds of it while a save was running
        "saving": 0.5,
        "publishing": 0.5,
        "waiting": 2.0,
        "loop's body": 1.0,
    }
    assert sum(found.values()) == step["step"]
    assert phases_of(step)["training"] == 7.0, "of a job without seconds"


@pytest.mark.parametrize("missing", ["loop", "step", "matplotlib"])
def test_what_is_missing_is_said(tmp_path, monkeypatch, missing):
    if missing == "matplotlib":
        page_of(tmp_path).unlink()
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    if missing == "step":
        line = '{"event": "start", "at": 1.0, "loop": "x", "version": 0, "config": {}}\n'
        (tmp_path / "decisions.jsonl").write_text(line)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    said = {"loop": "neither", "step": "no trained step yet", "matplotlib": "install matplotlib"}
    assert done.exit_code == 2 and said[missing] in " ".join(done.output.split())
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("width", [1200, 420])
def test_a_browser_shows_it(tmp_path, width):
    """Chromium lays the page out: every plot is visible, its texts are large enough on a phone, and
    nothing is wider than the window."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    page = page_of(tmp_path)
    probe = (
        "<script>const boxes = [...document.querySelectorAll('svg')].map(s =>"
        " s.getBoundingClientRect());"
        "const texts = [...document.querySelectorAll('svg text')].map(t =>"
        " t.getBoundingClientRect().height);"
        "document.title = [boxes.length, boxes.filter(b => b.width > 300 && b.height > 100).length,"
        " document.documentElement.scrollWidth, innerWidth, Math.floor(Math.min(...texts)),"
        " performance.getEntriesByType('resource').length].join(' ')</script>"
    )
    text = page.read_text()
    policy = re.search(r"<meta http-equiv[^>]*>", text)
    assert policy is not None and "default-src 'none'" in policy[0]
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace(policy[0], "").replace("</body>", f"{probe}</body>"))
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000"]
    argv += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    dom = subprocess.run(
        [*argv, "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=120
    ).stdout
    title = re.search(r"<title>([\d ]+)</title>", dom)
    assert title is not None, dom[:500]
    plots, visible, content, window, smallest, fetched = map(int, title[1].split())
    assert plots == visible == text.count("<svg") >= 10
    assert content <= window <= max(width, 500) and fetched == 0
    assert smallest >= 9, "pixels"
    shot = tmp_path / "page.png"
    argv += ["--hide-scrollbars", f"--screenshot={shot}", page.as_uri()]
    subprocess.run(argv, capture_output=True, timeout=120, check=True)
    from PIL import Image

    colors = Image.open(shot).convert("RGB").getcolors(2**24)
    shown = {color for count, color in colors if count > 50}
    assert {(42, 111, 187), (214, 69, 69)} <= shown, "the lines of both sides are drawn"
