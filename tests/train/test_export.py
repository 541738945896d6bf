"""What `splice export` refuses and pushes; tests/e2e/test_train.py exports from a run."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splice.cli import app
from splice.rl import decisions, evaluations
from splice.rl.evaluations import Evaluation


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as an upload of small files asks for."""

    asked: list[str]
    commits: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.asked.append(self.path)
        url = "https://huggingface.co/me/tiny"
        answer: dict[str, Any] = {"url": url, "id": "me/tiny", "name": "me/tiny"}
        if "preupload" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": f, "uploadMode": "regular"} for f in files]}
            answer["files"] = [f | {"shouldIgnore": False, "oid": None} for f in answer["files"]]
        elif "/commit/" in self.path:
            self.commits.append(body)
            answer = {"commitUrl": f"{url}/commit/1", "commitOid": "1", "hookOutput": ""}
        self._reply(answer)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self._reply({"id": "me/tiny", "sha": "0" * 40, "siblings": []})

    def _reply(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.asked, Hub.commits = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        yield Hub
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A stopped run with versions 2 and 5, of which 2 is the best."""
    (tmp_path / "model").mkdir()
    text = f'name = "tiny"\nmodel = "model"\n[trainer]\npython = "{sys.executable}"\n[inference]\n'
    (tmp_path / "run.toml").write_text(text)
    for version in (2, 5):
        adapter = tmp_path / "run" / "versions" / str(version) / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text(f'{{"of": {version}}}')
        (adapter.parent / "COMPLETE").touch()
    loop = tmp_path / "run" / decisions.LOOP_DIR
    loop.mkdir()
    for version, value in ((2, 0.9), (5, 0.1)):
        metrics = {evaluations.REWARD: value}
        evaluations.add(loop, Evaluation(step=version, version=version, metrics=metrics))
    return tmp_path


def export(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(("version", "expected"), [("best", 2), ("latest", 5), ("2", 2)])
def test_an_adapter_by_version(run: Path, version: str, expected: int) -> None:
    said = export(run, "--adapter", run / "out", "--version", version)
    assert said == f"tiny@{expected}: {run / 'out'}"
    assert json.loads((run / "out" / "adapter_config.json").read_text()) == {"of": expected}


def test_it_is_pushed(run: Path, hub: type[Hub]) -> None:
    said = export(run, "--adapter", run / "out", "--push", "me/tiny")
    assert "https://huggingface.co/me/tiny" in said
    (commit,) = hub.commits
    assert "adapter_config.json" in commit


def test_a_push_that_fails_leaves_the_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said = export(run, "--adapter", run / "out", "--push", "me/tiny", code=2)
    assert "is written, but could not be pushed to me/tiny" in said and "HF_TOKEN" in said
    assert (run / "out").is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of --hf FOLDER and --adapter FOLDER"),
        (["--adapter", "a", "--hf", "b"], "one of --hf FOLDER and --adapter FOLDER"),
        (["--adapter", "/nowhere/at/all"], "there is no folder /nowhere/at"),
        (["--adapter", "{run}"], "choose a new folder"),
        (["--adapter", "{run}/a", "--version", "7"], "on disk are 2, 5; or say best or latest"),
        (["--hf", "{run}/a"], "version 5 cannot be exported: .*meta.json"),
    ],
)
def test_what_cannot_be_exported(run: Path, arguments: list[str], said: str) -> None:
    found = export(run, *(a.format(run=run) for a in arguments), code=2)
    assert re.search(said, found), found
