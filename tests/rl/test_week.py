"""A week in an hour: nothing may grow, in memory or on the disk, and a start stays as quick.

`SPLICE_WEEK_STEPS` says how many steps (20,000: a step every 30 s). The trainer and vLLM are
stand-ins; orchestrator, router, loop and Tinker server are the product's, each a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
import psutil
import pytest

from orchestrator.processes import child
from orchestrator.processes.launch import Launcher, NodeProcess
from orchestrator.protocol.messages import InitialSync
from splice.client.clients import SpliceClient
from splice.rl import checker, decisions
from splice.tinker.server import KEY_FILE, URL_FILE
from splice.tinker.training import FOLDER
from tests.orchestrator.fake_nodes import soon
from tests.rl import week
from tests.rl.stand_in import NAME
from tests.tinker.messages import sft

STEPS = int(os.environ.get("SPLICE_WEEK_STEPS", "20000"))
TENTHS = 10
TINKER_STEPS = max(TENTHS, STEPS // 10)
"""A step has six requests there."""
pytestmark = pytest.mark.timeout(5400)
MOST_BYTES, STEP_BYTES = 6 * 2**20, 100
"""Growth that a process may show: what allocators and caches do, and some numbers for each step."""
SLOWER_S = 1.5
"""How much longer the last start may take than the first, on a busy machine."""


def node(role: str, run_dir: Path) -> NodeProcess:
    return NodeProcess(
        name=role,
        argv=[sys.executable, "-m", "tests.rl.week", role, str(run_dir)],
        env={"SPLICE_RUN_TOKEN": week.TOKEN},
        log_file=run_dir / "logs" / f"{role}.log",
    )


@contextlib.contextmanager
def loop(run_dir: Path, *, until: int) -> Iterator[tuple[psutil.Process, Iterator[dict]]]:
    """A loop's process and what it says; its last step is `until`."""
    argv = [sys.executable, "-m", "tests.rl.week", "loop", str(run_dir), str(until)]
    with (
        (run_dir / "logs" / "loop.log").open("ab") as err,
        Popen(argv, stdout=PIPE, stderr=err) as one,
    ):
        assert one.stdout is not None
        try:
            yield psutil.Process(one.pid), map(json.loads, one.stdout)
            assert one.wait(60) == 0, (run_dir / "logs" / "loop.log").read_text()[-4000:]
        finally:
            one.kill()


def measured(processes: dict[str, psutil.Process], run_dir: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, process in processes.items():
        with process.oneshot():
            found |= {
                f"{name} bytes": process.memory_full_info().uss,
                f"{name} descriptors": process.num_fds(),
                f"{name} threads": process.num_threads(),
            }
    sizes = []
    for path in run_dir.rglob("*"):
        # The record of the run grows: compressed decisions, and numbers for the plots.
        if path.suffix != ".gz" and "tensorboard" not in path.parts:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
    return found | {"files": len(sizes), "run folder bytes": sum(sizes)}


def grown(values: list[float]) -> float:
    """From the second and third sample to the last two."""
    return statistics.fmean(values[-2:]) - statistics.fmean(values[1:3])


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[tuple[Launcher, Path]]:
    """An orchestrator and its nodes, which serve the first version, and the run's folder."""
    monkeypatch.setattr(child, "LOG_BYTES", 2**18)
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    with Launcher() as launcher:
        launcher.start(node("orchestrator", run_dir))
        assert soon(lambda: (run_dir / "endpoint").exists())
        launcher.start(node("nodes", run_dir))
        with SpliceClient.of_run(run_dir) as client:
            client.run(InitialSync(), timeout_s=60)
        yield launcher, run_dir


def living(launcher: Launcher, *names: str) -> dict[str, psutil.Process]:
    launcher.check()
    return {name: psutil.Process(launcher.nodes[name].pid) for name in names}


def judge(samples: list[dict[str, float]], *, kept_bytes: float = 0.0) -> None:
    """Args: kept_bytes: what a step may leave in the run's folder."""
    found = {name: [sample[name] for sample in samples] for name in samples[0]}
    print(json.dumps(found))
    for name, values in found.items():
        each = kept_bytes if name == "run folder bytes" else STEP_BYTES
        most = MOST_BYTES + each * STEPS if name.endswith("bytes") else 2
        if name.endswith("threads"):  # asyncio's pool starts its last ones under load only
            most = min(32, (os.cpu_count() or 1) + 4)
        assert grown(values) <= most, (name, values)


def test_nothing_grows(cluster):
    launcher, run_dir = cluster
    samples: list[dict[str, float]] = []
    launcher.start(node("router", run_dir))
    assert soon(lambda: (run_dir / "router").exists())
    one, first, last = launcher.nodes["orchestrator"], STEPS // TENTHS, STEPS - 1
    with loop(run_dir, until=first) as (_, said):
        assert list(said)[-1] == {"step": first}
    before_s = restarted_s(one, run_dir)
    url = (run_dir / "router").read_text().strip()
    with loop(run_dir, until=last) as (process, said), httpx.Client(trust_env=False) as http:
        entered_s = [next(said)["entered_s"]]
        for line in said:
            if line["step"] % 10 == 0:
                ask(http, url)
            if line["step"] % first == 0:
                others = living(launcher, "orchestrator", "router")
                samples.append(measured({"loop": process, **others}, run_dir))
    assert line == {"step": last}
    after_s = restarted_s(one, run_dir)
    with loop(run_dir, until=STEPS) as (_, said):
        entered_s.append(next(said)["entered_s"])
        assert next(said) == {"step": STEPS}
    judge(samples)
    print(f"starts of the orchestrator {before_s:.1f} s, {after_s:.1f} s; of the loop {entered_s}")
    assert after_s < before_s + SLOWER_S and entered_s[1] < entered_s[0] + SLOWER_S
    proof = checker.check(decisions.read(run_dir / "loop" / decisions.LOG))
    assert (proof.violations, proof.steps) == ([], STEPS)


def test_nothing_grows_behind_tinker(cluster):
    """Its books keep a row for each request, so that none runs twice."""
    launcher, run_dir = cluster
    samples: list[dict[str, float]] = []
    launcher.start(node("tinker", run_dir))
    assert soon(lambda: (run_dir / FOLDER / URL_FILE).exists())
    headers = {"x-api-key": (run_dir / FOLDER / KEY_FILE).read_text().strip()}
    url = (run_dir / FOLDER / URL_FILE).read_text().strip()
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
        session = post(http, "create_session", tags=[], user_metadata={}, sdk_version="0.38.0")
        asked = {"session_id": session["session_id"], "base_model": NAME}
        lora = {"rank": 4}
        made = post(http, "create_model", **asked, model_seq_id=0, lora_config=lora)
        model = made["model_id"]
        result(http, made)
        for step in range(1, TINKER_STEPS + 1):
            train(http, model, step)
            if step % (TINKER_STEPS // TENTHS) == 0:
                samples.append(measured(living(launcher, "orchestrator", "tinker"), run_dir))
    judge(samples, kept_bytes=4 * 500.0)


def train(http: httpx.Client, model: str, step: int) -> None:
    """One step and its publication, as the SDK asks for them."""
    first = 3 * step - 2
    body = sft(model_id=model, seq_id=first)
    futures = [http.post("/api/v1/forward_backward", content=body).json()]
    adam = {"learning_rate": 0.1}
    futures.append(post(http, "optim_step", adam_params=adam, model_id=model, seq_id=first + 1))
    body = {"model_id": model, "sampling_session_seq_id": step, "seq_id": first + 2}
    futures.append(post(http, "save_weights_for_sampler", **body))
    for future in futures:
        result(http, future)


def post(http: httpx.Client, path: str, **body: object) -> dict:
    answer = http.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def result(http: httpx.Client, future: dict) -> None:
    while True:
        answer = http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]})
        assert answer.status_code == 200, answer.text
        is_json = "json" in answer.headers["content-type"]
        if not is_json or answer.json().get("type") != "try_again":
            assert not is_json or "error" not in answer.json(), answer.text
            return


def ask(http: httpx.Client, url: str) -> None:
    """A request through the router."""
    body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 2, "stream": True}
    assert http.post(f"{url}/v1/completions", json=body).status_code == 200


def restarted_s(one: NodeProcess, run_dir: Path) -> float:
    """How long an orchestrator needs to answer again."""
    assert one.pid is not None
    os.kill(one.pid, signal.SIGTERM)
    assert soon(lambda: one.exit_code is not None)
    began_s = time.monotonic()
    one.start()
    with SpliceClient.of_run(run_dir) as client:
        while True:
            try:
                client.status(timeout_s=1.0)
                return time.monotonic() - began_s
            except TimeoutError:
                assert time.monotonic() < began_s + 60
