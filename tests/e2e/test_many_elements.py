"""Hundreds of publications of changed elements, with failures between and during them.

In the end a real vLLM holds what one full publication of a real Megatron would have brought, byte
for byte. `SPLICE_ELEMENTS_STEPS` says how many steps, at least 16. `SPLICE_ELEMENTS_SEED` draws all
that is random.
"""

from __future__ import annotations

import array
import contextlib
import os
import random
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from orchestrator.errors import NodeLost
from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    Manifest,
    OptimParams,
    Progress,
    Resync,
    TensorSpec,
    TrainMerged,
    batch_specs,
    new_id,
)
from orchestrator.publication.content import Content
from splice.cluster import Cluster
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.commands import splice
from tests.e2e.elements import run_file
from tests.e2e.servers import rank_of_trainer, scored, server_of
from weight_transfer.digest import tensor_digest

STEPS = int(os.environ.get("SPLICE_ELEMENTS_STEPS", "200"))
SEED = os.environ.get("SPLICE_ELEMENTS_SEED", "1")
FAILURES = ("send", "trainer", "orchestrator", "resync", "replica")
"""The trainer dies in a send; one of three processes is killed; everything is sent again."""
EACH = 3
"""Failures of each kind."""
PHASES = ("planned", "durable", "shadowed", "paused", "applying", "verified")
"""A process is killed when the publication reports this, or a moment later."""
JOB_S = 240.0
RESUMES = (STEPS // 3, 2 * STEPS // 3)
"""Steps before which the whole run is stopped and resumed: in order, and not."""
TOKEN = "the-token-of-this-run"


def failures(dice: random.Random) -> dict[int, str]:
    """Step -> what happens in it."""
    kinds = [kind for kind in FAILURES for _ in range(EACH)]
    dice.shuffle(kinds)
    return dict(zip(dice.sample(range(1, STEPS), len(kinds)), kinds, strict=True))


@dataclass(slots=True)
class Run:
    """A cluster, its jobs and its failures."""

    cluster: Cluster
    order: Path
    """File that has the trainer kill itself; see `struck_trainer`."""
    dice: random.Random
    sent: Counter[str] = field(default_factory=Counter)
    killed: list[psutil.Process] = field(default_factory=list)

    def train(self, failure: str | None = None) -> Any:
        """One step on other tokens, and its publication, through a failure."""
        answer = [self.dice.randrange(3, 100) for _ in range(4)]
        specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + len(answer))
        loss, optim = LossSpec(name="cross_entropy"), OptimParams(lr=1e-4)
        job = TrainMerged(loss=loss, optim=optim, tensors=specs)
        phase, after_s = self.dice.choice(PHASES), self.dice.choice((0.0, 0.01, 0.1))
        pieces, number = self.dice.randrange(2), len(self.killed)
        if failure == "resync":
            self.do(Resync())
        elif failure == "send":
            self.order.write_text(str(pieces))

        def look(progress: Progress) -> None:
            if progress.phase == phase and len(self.killed) == number:
                time.sleep(after_s)
                self.kill(failure)

        kills = failure in ("trainer", "orchestrator", "replica")
        result = self.do(job, as_batch(answer), on_progress=look if kills else None)
        assert not self.order.exists(), "nothing was sent"
        if kills and len(self.killed) == number:  # elements pass other phases than whole tensors
            self.kill(failure)
        self.sent[result.sent] += 1
        assert result.num_verified == result.num_tensors and not result.unverified
        if failure is not None:
            print(f"  @{result.version}: {failure} at {phase}, {result.sent}", flush=True)
        return result

    def do(self, job: Any, buffers: Any = (), **options: Any) -> Any:
        """A job's result. A new orchestrator is asked for the same job."""
        job_id, until_s, client = new_id("job"), time.monotonic() + JOB_S, self.cluster.client
        while True:
            try:
                return client.run(job, buffers=buffers, job_id=job_id, timeout_s=JOB_S, **options)
            except NodeLost:
                assert time.monotonic() < until_s, f"{job_id} has no outcome"

    def kill(self, what: str | None) -> None:
        """Kill a process, and wait until it has ended. The launcher waits for its own."""
        if what == "trainer":
            process = rank_of_trainer(self.cluster)
        elif what == "replica":
            process = server_of(self.cluster, "inference-0")
        else:
            process = psutil.Process(self.cluster.launcher.nodes["orchestrator"].pid)
        self.killed.append(process)
        process.kill()
        if what != "orchestrator":
            process.wait(60.0)


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_after_many_steps_and_failures_every_byte_is_that_of_a_full_publication(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is resumed twice, so every process dies before and after a resume. The last step
    follows a restart of the trainer, so its elements are of all tensors, and the replica's digest
    of each is compared with the trainer's."""
    order, dice = tmp_path / "strike", random.Random(SEED)
    monkeypatch.setenv("SPLICE_TEST_STRIKE", str(order))
    file = run_file(tmp_path, models["qwen3"], mode="shadow", max_restarts=1000)
    options = {"trainer_module": "tests.e2e.struck_trainer", "orchestrator_restarts": 1000}
    with contextlib.ExitStack() as life:
        cluster = life.enter_context(Cluster(file, run_token=TOKEN, **options))
        run, planned = Run(cluster, order, dice), failures(dice)
        first = run.do(InitialSync())
        for step in range(STEPS):
            if step in RESUMES:
                stop(life, orderly=step == RESUMES[0])
                resumed = Cluster(file, file=file.run_dir / "run.json", run_token=TOKEN, **options)
                run.cluster = life.enter_context(resumed)
            run.train(planned.get(step))
        run.kill("trainer")
        last = run.train()
        url, found = run.cluster.base_urls[0], content_of(file.run_dir, last.version)
        before = scored(url, "tiny")
        run.cluster.client.export_hf(str(tmp_path / "exported"))
        again = run.do(Resync())
        assert scored(url, "tiny") == before
    print(f"  {dict(run.sent)}", flush=True)
    assert last.version == STEPS + 1 and len(run.killed) == 3 * EACH + 1
    assert run.sent["elements"] >= STEPS - 4 * len(planned)
    assert last.sent == "elements" and last.num_verified == first.num_tensors
    assert again.sent == "full" and again.num_verified == first.num_tensors
    assert content_of(file.run_dir, last.version - 1) != found
    assert content_of(file.run_dir, last.version) == found
    splice("export", file.run_dir, "--hf", tmp_path / "merged", "--version", last.version)
    assert content_on_disk(tmp_path / "exported") == found, "the trainer's own export"
    assert content_on_disk(tmp_path / "merged") == found, "a merge by another process"


def stop(life: contextlib.ExitStack, *, orderly: bool) -> None:
    """End every process of the cluster."""
    if orderly:
        life.close()
    else:
        with contextlib.suppress(_Crash), life.pop_all():
            raise _Crash


class _Crash(Exception):
    """Of the process that started the cluster."""


def content_of(run_dir: Path, version: int) -> str:
    """The digest of all tensors of a version, as the orchestrator journaled it."""
    uri = f"file:{run_dir}/journal.sqlite?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as journal:
        rows = journal.execute("SELECT digest FROM digests WHERE version = ?", (version,))
        return str(rows.fetchone()[0])


def content_on_disk(folder: Path) -> str:
    """The same of a Hugging Face checkpoint."""
    specs, digests_N = list[TensorSpec](), array.array("q")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                one = tensors.get_tensor(name)
                dtype = str(one.dtype).removeprefix("torch.")
                specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(one.shape)))
                digests_N.append(int(tensor_digest(one)))
    return Content(Manifest(tensors=tuple(specs))).take(digests_N.tobytes(), None)
