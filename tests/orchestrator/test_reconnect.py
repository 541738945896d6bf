"""A connection that breaks takes what was on its way along, without a word to either side; no
process ends.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import pytest

from orchestrator.control import control_socket
from orchestrator.errors import JobFailed, LinkLost
from orchestrator.protocol import node_link
from orchestrator.protocol.frames import to_wire
from orchestrator.protocol.messages import GetStatus, Hello, InitialSync, OptimStep, Ready
from orchestrator.protocol.node_link import NodeLink
from splice.client.clients import SpliceClient
from tests.chaos.links import Links
from tests.orchestrator.fake_nodes import FakeTrainer, soon
from tests.orchestrator.run import BUFFERS, JOB, TOKEN, Run


class Breaking:
    """Passes bytes on to a port. Whoever sends a message of the kind `cut` says so by `note`; what
    comes next is lost, once, with its connection.
    """

    def __init__(self, port: int) -> None:
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut: bytes | None = None
        self._is_sent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(
                    target=self._pass_on, args=(self._listener.accept()[0],), daemon=True
                ).start()

    def note(self, frames) -> list[bytes | memoryview]:
        if self.cut is not None and frames[1] == self.cut:
            self._is_sent = True
        return to_wire(frames)

    def _pass_on(self, near: socket.socket) -> None:
        with (
            near,
            socket.create_connection(("127.0.0.1", self._port)) as far,
            contextlib.suppress(OSError),
        ):
            while True:
                for side in select.select([near, far], [], [])[0]:
                    came = side.recv(2**20)
                    if self._is_sent:
                        self.cut, self._is_sent = None, False
                        return
                    if not came:
                        return
                    (far if side is near else near).sendall(came)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    with Run(tmp_path) as run:
        run.line = Breaking(int(run.endpoint.rsplit(":", 1)[1]))
        for module in (control_socket, node_link):
            monkeypatch.setattr(module, "to_wire", run.line.note)
        yield run
        run.line.close()


@pytest.mark.parametrize("lost", ["RunJob", "Completed"])
def test_a_request_or_its_answer_is_sent_again(run, lost):
    trainer = FakeTrainer(endpoint=run.line.endpoint, node_id="trainer", token=TOKEN).start()
    run.nodes.append(trainer)
    replica = run.replica(trainer)
    run.client.run(InitialSync())
    run.line.cut = lost.encode()
    assert run.client.run(JOB, buffers=BUFFERS, timeout_s=30).version == 1
    assert run.line.cut is None, "nothing was lost"
    assert replica.served[-1] == (1, [11, 21, 31]) and trainer.log.count("TrainMerged") == 1


def test_a_word_that_a_node_is_ready_is_sent_again(run):
    run.line.cut = b"Ready"
    trainer = FakeTrainer(endpoint=run.line.endpoint, node_id="trainer", token=TOKEN).start()
    run.nodes.append(trainer)
    assert run.client.optim_step(timeout_s=15).metrics == {"loss": 1.0} and run.line.cut is None


@pytest.mark.parametrize("lost", ["SubmitJob", "Completed"])
def test_a_job_or_its_outcome_is_sent_again(run, lost):
    trainer = run.trainer()
    with SpliceClient(endpoint=run.line.endpoint, run_token=TOKEN) as client:
        run.line.cut = lost.encode()
        assert client.optim_step(timeout_s=15).metrics == {"loss": 1.0}
    assert run.line.cut is None and trainer.log.count("OptimStep") == 1


def test_a_status_is_not_an_answer_that_came_before_it_was_asked_for(run):
    """A client that reconnects asks again, and gets several answers."""
    with SpliceClient(endpoint=run.endpoint, run_token=TOKEN) as client:
        for _ in range(3):
            client._link.send(GetStatus())
        assert soon(lambda: client._link._inbox.qsize() == 3)
        run.trainer()
        assert [n.role for n in client.status().nodes if n.state == "ready"] == ["trainer"]


def test_a_client_follows_its_run_to_a_new_endpoint(run, tmp_path, monkeypatch):
    """As after `splice stop` and `splice up --resume`."""
    monkeypatch.setattr(node_link, "REDIAL_AFTER_S", 1.0)
    trainer, file = run.trainer(), tmp_path / "endpoint_of_the_run"
    file.write_text(f"{run.line.endpoint}\n")
    with SpliceClient(endpoint="tcp://x:1", run_token=TOKEN, endpoint_file=file) as client:
        run.line.close()
        file.unlink()
        threading.Timer(2.0, lambda: file.write_text(run.endpoint)).start()
        run.line.cut = b"SubmitJob"
        assert client.optim_step(timeout_s=30).metrics == {"loss": 1.0}
    assert run.line.cut is None and trainer.log.count("OptimStep") == 1


WAITS = """
import sys
from orchestrator.protocol import node_link, silence
from orchestrator.protocol.messages import Hello
silence.SUSPENDED_S = 1.5
hello = Hello(role="launcher", node_id="waits", incarnation="1", run_token=sys.argv[2])
with node_link.NodeLink(endpoint=sys.argv[1], hello=hello, lost_after_s=2.5) as link:
    print("here", flush=True)
    while True:
        link.recv(timeout_s=0.01)
"""


def test_a_node_that_was_suspended_has_not_missed_the_orchestrator(run):
    node = subprocess.Popen(
        [sys.executable, "-c", WAITS, run.endpoint, TOKEN], stdout=subprocess.PIPE
    )
    try:
        assert node.stdout.readline() == b"here\n"
        node.send_signal(signal.SIGSTOP)
        time.sleep(4)
        node.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            node.wait(2)
        run.client.stop_run()
        assert node.wait(30) == 1, "nobody is there any more"
    finally:
        node.kill()
        node.wait(10)


def test_a_request_to_a_node_whose_connection_is_just_gone_waits_for_the_next_one(run):
    """The node lives and dials again: that is not a failure of what it is asked."""
    links = Links()
    link = links.add("trainer", int(run.endpoint.rsplit(":", 1)[1]))
    trainer = FakeTrainer(
        endpoint=f"tcp://127.0.0.1:{link.port}", node_id="trainer", token=TOKEN
    ).start()
    run.nodes.append(trainer)
    replica = run.replica(trainer)

    def prepare_without_the_trainer(message) -> None:
        link.reset()
        time.sleep(0.02)
        replica.on_PrepareUpdate(message)

    replica.script["PrepareUpdate"] = (
        prepare_without_the_trainer  # next the trainer is asked to UseLayout
    )
    try:
        assert run.client.run(InitialSync(), timeout_s=60).attempts == 1
        assert replica.served == [(0, [10, 20, 30])] and trainer.log.count("UseLayout") == 1
    finally:
        links.close()


def listen(link, *, seconds):
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        link.recv(timeout_s=0.2)


def test_a_displaced_node_asks_quietly_and_notices_that_it_is_lost(run):
    """Another process took its id while it was silent. It is refused from then on; a refusal is not
    sign of life for it.
    """

    def link():
        hello = Hello(
            role="inference", node_id="inference-0", incarnation=uuid.uuid4().hex, run_token=TOKEN
        )
        node = NodeLink(endpoint=run.endpoint, hello=hello, lost_after_s=3.0).start()
        node.send(Ready(node_id="inference-0", detail={"base_url": "http://a"}))
        return node

    with link() as displaced:
        assert soon(lambda: run.states().get("inference-0") == "ready")
        run.lose("inference-0")
        with link():
            assert soon(lambda: run.states().get("inference-0") == "ready")
            refused = run.orchestrator._router.dropped
            before, began_s = refused.total(), time.monotonic()
            with pytest.raises(LinkLost, match="silent"):
                listen(displaced, seconds=10.0)
            assert refused.total() - before < 4 * (time.monotonic() - began_s + 1.0), (
                "they talked without pause"
            )
        # Its place is free again.
        assert soon(lambda: run.states().get("inference-0") == "ready", timeout_s=40.0)


def test_a_large_batch_silences_the_orchestrator_for_nobody(run, monkeypatch):
    """While the disk takes it, heartbeats and other clients' questions are answered."""
    taken, keep_batch = threading.Event(), run.orchestrator._journal.keep_batch

    def slow_disk(job_id, buffers):
        assert taken.wait(20)
        keep_batch(job_id, buffers)

    monkeypatch.setattr(run.orchestrator._journal, "keep_batch", slow_disk)
    trainer = run.trainer()
    with SpliceClient(endpoint=run.endpoint, run_token=TOKEN) as client:
        first = client.submit(JOB, buffers=BUFFERS)
        second = client.submit(OptimStep())
        assert run.client.status(timeout_s=5.0).queued_jobs == 0, "it is a job once it is on disk"
        taken.set()
        with pytest.raises(JobFailed, match="InitialSync"):
            client.wait(first, timeout_s=20)
        client.wait(second, timeout_s=20)
    assert trainer.log.count("OptimStep") == 1
