"""`splice dashboard`: what it serves over HTTP while a loop runs, and what a browser shows."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from splice.cli import app
from splice.client.run_file import RUN_JSON
from splice.dashboard import Dashboard
from tests.rl.measured import SECRET, Measured
from tests.rl.stood_in import run_loop

TIMEOUT_S = 60.0
MEASURE = """<script>
const boxes = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect());
document.title = [boxes.length, boxes.filter(b => b.width > 200 && b.height > 50).length,
  document.documentElement.scrollWidth, innerWidth].join(" ");
</script></body></html>
"""


def looped(folder: Path, *, steps: int, on_step=None, run: Measured | None = None) -> None:
    async def note(step, replicas, loop) -> None:
        loop.note(accuracy=step.number / 10)
        if on_step is not None:
            await on_step(step)

    def reward(row, completion) -> float:
        object.__setattr__(completion, "text", f"{SECRET} is group {row['name']}")
        return float(sum(completion.answer_ids))

    run = run or Measured()
    asyncio.run(run_loop(run, folder, steps=steps, on_step=note, reward=reward))


def get(board: Dashboard, path: str, **more) -> httpx.Response:
    return httpx.get(f"{board.url}{path}", timeout=TIMEOUT_S, trust_env=False, **more)


def titles(text: str) -> set[str]:
    return set(re.findall(r"<figure><h3>([^<]+)</h3><svg", text))


def test_it_follows_a_loop_while_it_runs(tmp_path):
    with Dashboard([tmp_path / "a"]) as board:
        assert "No step has been trained yet" in get(board, "/").text
        seen = []

        async def on_step(step) -> None:
            answer = await asyncio.to_thread(get, board, "/body")
            assert answer.status_code == 200 and "<small>running</small>" in answer.text
            seen.append(re.search(r"<b>(\d+)</b><span>steps</span>", answer.text)[1])

        run = Measured()
        looped(tmp_path / "a", steps=3, on_step=on_step, run=run)
        assert seen == ["1", "2", "3"]
        page = get(board, "/")
        assert {"Reward", "Loss", "accuracy (evaluation)", "Time of a step (s)"} <= titles(
            page.text
        )
        assert "not running" in page.text and "Samples of step 3" in page.text
        assert "Both sides, last 3 steps" in page.text
        assert SECRET not in page.text and "is group" in page.text, "answers are text"
        body = get(board, "/body")
        same = get(board, "/body", params={"tag": body.headers["ETag"]})
        assert same.status_code == 204 and not same.content, "nothing is drawn or sent again"
        looped(tmp_path / "a", steps=4, run=run)
        changed = get(board, "/body", params={"tag": body.headers["ETag"]})
        assert changed.status_code == 200 and changed.headers["ETag"] != body.headers["ETag"]


def test_several_loops_are_compared(tmp_path):
    for name in ("first", "second"):
        looped(tmp_path / name / "loop", steps=2)
    with Dashboard([tmp_path / n / "loop" for n in ("first", "second", "third")]) as board:
        text = get(board, "/").text
        assert {"Reward", "accuracy (evaluation)", "Loss"} <= titles(text)
        assert text.count("No step has been trained yet") == 1
        assert '<a href="/loop/1">first</a>' in text
        reward = text[text.index("<h3>Reward</h3>") :]
        legend = reward[: reward.index("</svg>")]
        assert ">first<" in legend and ">second<" in legend
        one = get(board, "/loop/2").text
        assert "Samples of step 2" in one and "all loops" in one
        assert get(board, "/body/loop/2").status_code == 200
        for missing in ("/loop/4", "/loop/0", "/loop/x", "/../etc/passwd", "/favicon.ico"):
            assert get(board, missing).status_code == 404, missing


def test_the_title_is_the_runs_folder_and_name(tmp_path):
    loop = tmp_path / "mine" / "run" / "loop"
    loop.mkdir(parents=True)
    (loop.parent / RUN_JSON).write_text('{"name": "policy"}')
    with Dashboard([loop]) as board:
        assert "<title>splice: mine (policy)</title>" in get(board, "/").text
    with Dashboard([loop, tmp_path / "mine" / "run"]) as board:  # the same folder, once shortened
        assert get(board, "/").text.count('<a href="/loop/') == 2


def test_another_sites_script_reads_nothing(tmp_path):
    with Dashboard([tmp_path / "a"]) as board:
        assert get(board, "/", headers={"Host": "evil.example"}).status_code == 403
        assert get(board, "/", headers={"Host": "localhost:1"}).status_code == 200
        policy = get(board, "/").headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'nonce-")
        nonce = re.search(r"'nonce-([^']+)'", policy)[1]
        assert get(board, "/").text.count(f'<script nonce="{nonce}">') == 1
        assert not re.findall(r"(?:src|href)\s*=\s*[\"']http", get(board, "/").text)


def test_the_command_serves_until_it_is_ended(tmp_path):
    looped(tmp_path, steps=1)
    argv = [sys.executable, "-m", "splice", "dashboard", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[0]
        found = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
        assert found.status_code == 200 and "<h3>Reward</h3>" in found.text
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()


def test_what_is_wrong_is_said(tmp_path):
    looped(tmp_path, steps=1)
    with Dashboard([tmp_path]) as board:
        port = board.url.rpartition(":")[2]
        taken = CliRunner().invoke(app, ["dashboard", str(tmp_path), "--port", port])
        assert taken.exit_code == 2 and "set another --port" in " ".join(taken.output.split())
    twice = CliRunner().invoke(app, ["dashboard", str(tmp_path), str(tmp_path)])
    assert twice.exit_code == 2 and "named twice" in " ".join(twice.output.split())


@pytest.mark.parametrize("width", [1200, 420])
def test_a_browser_shows_it(tmp_path, width):
    """Chromium draws every plot, nothing is wider than a desk's or a phone's window, and the page
    asks again by itself."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    looped(tmp_path / "a", steps=3)
    with Dashboard([tmp_path / "a"]) as board:
        page = tmp_path / "page.html"  # a copy whose script measures
        text = get(board, "/").text
        page.write_text(text[: text.index("<script")] + MEASURE)
        argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu"]
        argv += [f"--window-size={width},2000", f"--user-data-dir={tmp_path / 'profile'}"]
        argv += ["--hide-scrollbars", "--virtual-time-budget=8000"]
        dom, measured = (
            subprocess.run([*argv, "--dump-dom", of], capture_output=True, text=True, timeout=120)
            for of in (board.url, page.as_uri())
        )
        shot = tmp_path / "page.png"
        argv += [f"--screenshot={shot}", board.url]
        subprocess.run(argv, capture_output=True, timeout=120, check=True)
    assert "seen " in dom.stdout, "its script has asked again"
    sizes = re.search(r"<title>([\d ]+)</title>", measured.stdout)
    assert sizes is not None, measured.stdout[:500]
    plots, visible, content, window = map(int, sizes[1].split())
    assert plots == visible == dom.stdout.count("<svg") >= 10
    assert content <= window <= max(width, 500), "nothing is wider than the window"
    from PIL import Image

    colors = Image.open(shot).convert("RGB").getcolors(2**24)
    shown = {color for count, color in colors if count > 50}
    assert (42, 111, 187) in shown, "the lines are drawn"
