"""The processes of a week in an hour: `python -m tests.rl.week ROLE RUN_DIR [STEPS]`.

orchestrator    the product's, with limits small enough to be reached
router          the product's
tinker          the product's `splice tinker`
nodes           a fake trainer and two fake replicas with stand-ins of vLLM
loop            the product's, for this many steps in all; prints a JSON line at its start and after
                each step
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections import deque
from pathlib import Path

from orchestrator.config import OrchestratorConfig
from orchestrator.processes.logs import log_to_stderr
from orchestrator.publication.config import PublicationConfig
from orchestrator.server import Orchestrator
from orchestrator.storage import journal
from splice import replica_router
from splice.cli import _old_endpoint, app
from splice.rl import Loop, LoopConfig, SamplingConfig, decisions
from splice.tinker import books
from tests.orchestrator.fake_nodes import FakeReplica, FakeTrainer
from tests.rl.stand_in import NAME, Server, StandIn
from tests.rl.stood_in import ROWS, reward

TOKEN = "w" * 32
REPLICAS = 2
SEGMENT_BYTES, JOBS_KEPT, VERSIONS_KEPT, RESULTS_KEPT = 2**18, 100, 100, 30
"""A week's steps reach the product's limits many times over; a short run reaches these."""


def orchestrator(run_dir: Path) -> None:
    log_to_stderr()
    journal.JOBS_KEPT, journal.VERSIONS_KEPT = JOBS_KEPT, VERSIONS_KEPT
    config = OrchestratorConfig(
        run_dir=run_dir,
        run_token=TOKEN,
        name=NAME,
        endpoint=_old_endpoint(run_dir, "tcp://127.0.0.1:0", resume=True),
        publication=PublicationConfig(transport="tcp"),
        replicas=REPLICAS,
        resume=True,
        keep_versions=2,
    )

    async def serve() -> None:
        one = Orchestrator(config)
        asyncio.get_running_loop().add_signal_handler(15, one.leave)
        await one.serve()

    asyncio.run(serve())


def router(run_dir: Path) -> None:
    asyncio.run(replica_router.serve(run_dir, host="127.0.0.1", port=0, max_body_bytes=2**20))


def tinker(run_dir: Path) -> None:
    settings = {"model": "/models/tiny", "lora": {"rank": 4}}
    (run_dir / "trainer.json").write_text(json.dumps(settings))
    books.RESULTS_KEPT = RESULTS_KEPT
    app(["tinker", str(run_dir), "--port", "0"])


class Trainer(FakeTrainer):
    """A trainer that deletes old versions, as the real one does."""

    def _write(self, message) -> None:
        super()._write(message)
        for folder in message.delete_after:
            shutil.rmtree(folder, ignore_errors=True)


class Replica(FakeReplica):
    """A replica whose server shows what was committed last."""

    def __init__(self, server: Server, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.detail = {"workers": 1, "base_url": server.url, "name": NAME}
        self.server, self.server.answers = server, 503

    def on_CommitUpdate(self, message) -> None:
        self.server.shows, self.server.answers = message.version, None
        super().on_CommitUpdate(message)


async def nodes(run_dir: Path) -> None:
    """Until the process is ended. What the fakes note for tests stays short."""
    stand_in = StandIn()
    servers = [await Server(stand_in).start() for _ in range(REPLICAS)]
    where = {"endpoint": (run_dir / "endpoint").read_text(), "token": TOKEN}
    trainer = Trainer(node_id="trainer", **where)
    fakes = [trainer]
    for index, server in enumerate(servers):
        one = Replica(server, source=lambda: trainer.weights, node_id=f"inference-{index}", **where)
        fakes.append(one)
    for thing in (*fakes, *servers):
        for name, value in vars(thing).items():
            if isinstance(value, list) and name not in ("weights", "live"):
                setattr(thing, name, deque(value, maxlen=20))
    for fake in fakes:
        fake.start()
    await asyncio.Event().wait()


async def loop(run_dir: Path, steps: int) -> None:
    decisions.SEGMENT_BYTES = SEGMENT_BYTES
    config = LoopConfig(
        group_size=2,
        groups_per_step=1,
        steps=steps,
        sampling=SamplingConfig(max_tokens=4, seed=1),
        keep_samples=20,
    )
    began_s = time.monotonic()
    async with Loop.of_run(run_dir, prompts=ROWS, reward=reward, config=config) as running:
        print(json.dumps({"entered_s": time.monotonic() - began_s}), flush=True)
        async for step in running:
            running.note(seen=step.number)
            print(json.dumps({"step": step.number}), flush=True)


if __name__ == "__main__":
    os.environ["SPLICE_RUN_TOKEN"] = TOKEN
    role, run_dir = sys.argv[1], Path(sys.argv[2])
    if role == "orchestrator":
        orchestrator(run_dir)
    elif role == "router":
        router(run_dir)
    elif role == "tinker":
        tinker(run_dir)
    elif role == "nodes":
        asyncio.run(nodes(run_dir))
    else:
        asyncio.run(loop(run_dir, int(sys.argv[3])))
