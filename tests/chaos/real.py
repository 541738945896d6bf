"""The same with real Megatron and real vLLM: processes killed and stopped at random moments of
training, transfer and commit, while requests run.

What a version's content is, is here what vLLM says: log-probs of a fixed prompt, under the name
that the answer's header gives. The orchestrator's own points and the links belong to the fake
nodes' runs; here every process of the cluster is a target, and the moment is drawn over the whole
job.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil

from orchestrator.errors import JobFailed, NodeLost
from orchestrator.processes.child import descendants
from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    OptimParams,
    TrainMerged,
    batch_specs,
    new_id,
)
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from tests.chaos import history
from tests.chaos.history import Event, History
from tests.chaos.processes import ROOT

PROMPT, ANSWER = [5, 17, 33, 101, 7, 9, 44, 12], [3, 4, 5, 6]
TOPOLOGIES: dict[str, tuple[str, dict[str, int], int, int]] = {
    "1-1": ("qwen3", {}, 1, 1),
    "tp2-rep2": ("qwen3", {"tensor": 2}, 1, 2),
    "ep2-tp2": ("qwen3_moe", {"expert": 2}, 2, 1),
    "tp2-chain2": ("qwen3", {"tensor": 2}, 1, 2),
    "1-chain3": ("qwen3", {}, 1, 3),
}
"""Name -> architecture, the trainer's parallel sizes, workers of a replica, replicas. In a chain,
replicas pass on what they receive."""
SAME_NATS = 1e-4
"""Two answers of one version differ by less; those of two versions by more, with this learning
rate.
"""
JOB_S = 300.0
BACK_S = 300.0
"""Seconds in which all replicas serve the newest version again. vLLM may have to start."""
LOSSES = {
    "cross_entropy": 10,
    "ends_the_process": 1,
    "spoils_the_step": 1,
    "finds_no_memory": 1,
}
"""Loss of a job -> how often, relatively; the harmful ones are in
`tests/trainer_node/launcher/poison.py`."""


def batch(dice: random.Random) -> tuple[Any, list[bytes]]:
    """One sequence, whose answer carries the loss."""
    ids = [*PROMPT, *(dice.randrange(3, 100) for _ in ANSWER)]
    rows = [
        array.array("i", ids),
        array.array("i", [len(ids)]),
        array.array("f", [0.0] * len(PROMPT) + [1.0] * len(ANSWER)),
        *(array.array("f", [0.0] * len(ids)),) * 2,
    ]
    return batch_specs(num_sequences=1, num_tokens=len(ids)), [row.tobytes() for row in rows]


class Asking(threading.Thread):
    """Asks all the time, and writes down what each answer says under which name."""

    def __init__(self, url: str, notes: History) -> None:
        super().__init__(daemon=True)
        self.url, self.notes, self.stop, self.count = url, notes, threading.Event(), 0
        self.last: str | None = None
        """The name in the latest answer's header."""

    def sees(self, version: int | None, *, until_s: float) -> bool:
        """Whether an answer names this version before `time.monotonic()` is `until_s`."""
        while self.last != str(version) and time.monotonic() < until_s:
            time.sleep(0.1)
        return self.last == str(version)

    def run(self) -> None:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        while not self.stop.is_set():
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                answer = httpx.post(
                    f"{self.url}/v1/completions", json=body, timeout=60.0, trust_env=False
                )
                if answer.status_code == 200:
                    rows = answer.json()["choices"][0]["prompt_logprobs"][1:]
                    said = [next(iter(row.values()))["logprob"] for row in rows]
                    self.last = answer.headers.get("x-splice-version")
                    self.notes.note("answered", header=self.last, logprobs=said)
                    self.count += 1
            time.sleep(0.05)


def apart(events: Iterable[Event]) -> list[str]:
    """Answers that are not what their name's other answers are; a span of versions speaks for
    itself.
    """
    first: dict[str, list[float]] = {}
    found = []
    for event in events:
        name = event.get("header")
        if event["what"] != "answered" or (name is not None and not name.isdigit()):
            continue
        if name is None:
            found.append("an answer names no version")
            continue
        nats = statistics.median(
            abs(a - b)
            for a, b in zip(
                first.setdefault(name, event["logprobs"]), event["logprobs"], strict=True
            )
        )
        if nats > SAME_NATS:
            found.append(f"two answers under @{name} are {nats:.3g} nats apart")
    return found


def run_real(seed: str, minutes: float, folder: Path, topology: str | None = None) -> list[str]:
    """What was violated. Without a topology the seed draws one."""
    dice, notes = random.Random(f"{seed} real"), History(folder / "history", "real")
    model, drawn = folder / "model", dice.choice(sorted(TOPOLOGIES))
    arch, parallel, workers, replicas = TOPOLOGIES[topology or drawn]
    print(f"  {topology or drawn}", flush=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "trainer_node.tools.make_checkpoint",
            "--arch",
            arch,
            "--out",
            str(model),
        ],
        check=True,
        timeout=180,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    python = Path(os.environ.get("SPLICE_INFERENCE_PYTHON", ROOT / ".venv-inference/bin/python"))
    run = RunFile(
        name="tiny",
        model=model,
        run_dir=folder / "run",
        orchestrator={"keep_versions": 3},
        publication={
            "mode": dice.choice(("in_place", "shadow")),
            "chain": "chain" in (topology or drawn),
        },
        trainer={
            "max_restarts": 1000,
            "loss_modules": ("tests.trainer_node.launcher.poison",),
            "parallel": parallel,
        },
        inference={
            "python": python,
            "max_model_len": 256,
            "cpu_kv_cache_gb": 0.1,
            "max_restarts": 1000,
            "tensor_parallel": workers,
            "replicas": replicas,
        },
    )
    problems: list[str] = []
    with Cluster(run, orchestrator_restarts=1000) as cluster:
        cluster.client.run(InitialSync(), timeout_s=JOB_S)
        everyone = [Asking(url, notes) for url in cluster.base_urls]
        for asking in everyone:
            asking.start()
        problems += _rage(cluster, dice, notes, until_s=time.monotonic() + 60 * minutes)
        began = time.monotonic()
        last, problem = _job(cluster, dice, loss="cross_entropy")
        problems += problem
        if last is None:
            problems.append("an ordinary job failed after the last fault")
        problems += [
            f"{asking.url} does not serve @{last} {BACK_S:.0f} s after the last fault"
            for asking in everyone
            if not asking.sees(last, until_s=began + BACK_S)
        ]
        healthy_s, answers = time.monotonic() - began, [asking.count for asking in everyone]
        print(f"  {answers} answers; @{last} {healthy_s:.1f} s after the last fault", flush=True)
        for asking in everyone:
            asking.stop.set()
            asking.join(60)
        pids = [p for n in cluster.launcher.nodes for p in _processes(cluster, n)]
    time.sleep(1.0)
    problems += [
        f"the process {p.pid} is left"
        for p in pids
        if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    ]
    notes.close()
    return problems + apart(history.read(folder / "history"))


def _rage(cluster: Cluster, dice: random.Random, notes: History, *, until_s: float) -> list[str]:
    """Jobs, and a fault in each but the first: (which process, what, when) are drawn before it
    starts.
    """
    problems, seconds, before = list[str](), 1.0, 0
    while time.monotonic() < until_s:
        node, fault, after_s = (
            dice.choice(sorted(cluster.launcher.nodes)),
            dice.choice(("kill", "kill", "stop")),
            dice.uniform(0.0, 1.2 * seconds),
        )
        victims = dice.random()
        timer = threading.Timer(after_s, _strike, (cluster, node, fault, victims, notes))
        timer.start()
        began = time.monotonic()
        loss = dice.choices(list(LOSSES), weights=list(LOSSES.values()))[0]
        version, problem = _job(cluster, dice, loss=loss)
        timer.join()
        problems += problem
        if version is not None and version <= before:
            problems.append(f"@{version} was made after @{before}")
        before = before if version is None else version
        seconds = min(seconds, time.monotonic() - began) if version is not None else seconds
        print(
            f"  {fault} {node} after {after_s:.2f} s, {loss}: @{version} in "
            f"{time.monotonic() - began:.1f} s",
            flush=True,
        )
    return problems


def _job(cluster: Cluster, dice: random.Random, *, loss: str) -> tuple[int | None, list[str]]:
    specs, buffers = batch(dice)
    job = TrainMerged(loss=LossSpec(name=loss), optim=OptimParams(lr=5e-3), tensors=specs)
    job_id, until = new_id("job"), time.monotonic() + JOB_S
    while time.monotonic() < until:
        try:
            return int(
                cluster.client.run(job, buffers=buffers, job_id=job_id, timeout_s=JOB_S).version
            ), []
        except JobFailed as error:
            print(f"  the job failed: {error.code}: {error.message[:200]}", flush=True)
            return None, []
        except NodeLost:
            continue
        except TimeoutError:
            break
    return None, [f"{job_id} has no outcome after {JOB_S:.0f} s"]


def _processes(cluster: Cluster, node: str) -> list[psutil.Process]:
    pid = cluster.launcher.nodes[node].pid
    return [] if pid is None else descendants(pid, and_self=True)


def _strike(cluster: Cluster, node: str, fault: str, which: float, notes: History) -> None:
    """One process of the node. Never the launcher or the inference node itself: it is what a
    cluster manager restarts.
    """
    processes = [
        p
        for p in _processes(cluster, node)
        if node == "orchestrator" or p.pid != cluster.launcher.nodes[node].pid
    ]
    if not processes:
        return
    victim = processes[int(which * len(processes))]
    with contextlib.suppress(psutil.Error):
        notes.note("fault", kind=fault, target=node, command=json.dumps(victim.cmdline()[:6]))
        if fault == "kill":
            victim.kill()
        else:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            victim.send_signal(signal.SIGCONT)
