"""An orchestrator on a thread with fake nodes, and the smallest batch and job for it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from orchestrator.config import OrchestratorConfig
from orchestrator.protocol.messages import TensorSpec, TrainMerged, batch_specs
from orchestrator.publication.config import PublicationConfig
from orchestrator.server import Orchestrator
from splice.client.clients import SpliceClient
from tests.orchestrator.fake_nodes import FakeReplica, FakeTrainer

TOKEN = "t" * 32
BATCH = batch_specs(num_sequences=1, num_tokens=2)
BUFFERS = [bytes(s.nbytes) for s in BATCH]
JOB = TrainMerged(tensors=BATCH)


class Run:
    """An orchestrator on its own thread, with fake nodes."""

    def __init__(self, tmp_path, *, replicas=1, **publication):
        self.dir = tmp_path / "run"
        settings = {"transport": "tcp", "recovery_timeout_s": 20.0, **publication}
        self.config = OrchestratorConfig(
            run_dir=self.dir,
            run_token=TOKEN,
            name="m",
            publication=PublicationConfig(**settings),
            replicas=replicas,
            ready_timeout_s=20,
            keep_versions=0,
        )
        self.loop = asyncio.new_event_loop()
        self.error = None
        self.nodes = []

    def __enter__(self):
        self._start()
        while not (self.dir / "endpoint").exists():
            time.sleep(0.01)
        self.endpoint = (self.dir / "endpoint").read_text()
        self.client = SpliceClient(endpoint=self.endpoint, run_token=TOKEN).__enter__()
        return self

    def resume(self):
        """Another orchestrator takes this one's place; nodes and client live on."""
        self.loop.call_soon_threadsafe(self.orchestrator.leave)
        self.thread.join(20)
        assert not self.thread.is_alive() and self.error is None, self.error
        self.loop.close()
        self.loop = asyncio.new_event_loop()
        bound = (self.dir / "bound").read_text()
        self.config = self.config.model_copy(update={"resume": True, "endpoint": bound})
        self._start()

    def _start(self):
        started = threading.Event()

        def go():
            asyncio.set_event_loop(self.loop)
            self.orchestrator = Orchestrator(self.config)
            started.set()
            try:
                self.loop.run_until_complete(self.orchestrator.serve())
            except Exception as error:  # noqa: BLE001 - `__exit__` looks at it
                self.error = error

        self.thread = threading.Thread(target=go, daemon=True)
        self.thread.start()
        started.wait(10)

    def trainer(self, *, before=lambda node: None, **kwargs):
        """`before` may script it: a request can come as soon as it has started."""
        node = FakeTrainer(endpoint=self.endpoint, node_id="trainer", token=TOKEN, **kwargs)
        before(node)
        self.nodes.append(node.start())
        return node

    def replica(self, trainer, index=0):
        node = FakeReplica(
            source=lambda: trainer().weights if callable(trainer) else trainer.weights,
            endpoint=self.endpoint,
            node_id=f"inference-{index}",
            token=TOKEN,
        ).start()
        node.changes = lambda: trainer().changes if callable(trainer) else trainer.changes
        self.nodes.append(node)
        return node

    def states(self):
        """State of every node that the orchestrator knows, by its id."""
        return {n.node_id: n.state for n in self.client.status().nodes}

    def lose(self, node_id):
        """As after fifteen seconds without a word of it."""
        lost = self.orchestrator._router._lose(node_id, "silent")
        asyncio.run_coroutine_threadsafe(lost, self.loop).result(10)

    def __exit__(self, *_):
        if self.thread.is_alive():
            self.client.stop_run()
        self.client.__exit__()  # while somebody is there who takes its last words
        self.thread.join(20)
        for node in self.nodes:
            node.stop()
        assert not self.thread.is_alive() and self.error is None, self.error
        self.loop.close()


@dataclass(frozen=True)
class SmallBatch:
    specs: tuple[TensorSpec, ...] = BATCH
    buffers: tuple[bytes, ...] = tuple(BUFFERS)
