"""What the node does with requests and aborts, with a vLLM that is played; no process,
no socket.
"""

from types import SimpleNamespace
from typing import Any

from inference_node.node.aborts import ABORTS_KEPT, Aborts
from inference_node.node.node import InferenceNode
from inference_node.node.served import Served
from inference_node.node.vllm_process import CallFailed
from orchestrator.processes.restarts import RestartBudget
from orchestrator.protocol import messages as m

SERVING = Served().planned(has_part=True).begun().arrived(4).committed(4)
DONE = {"digests": "AAAAAAAAAAA=", "unverified": {}, "phases": {}, "committed": True}


class Played:
    """Plays vLLM, the link and the workers' watchdogs of one node."""

    def __init__(self, served: Served = SERVING) -> None:
        self.calls: list[str] = []
        self.sent: list[tuple[str, str]] = []
        self.failed: list[tuple[Any, str]] = []
        self.answers: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.is_running = True
        self.node = object.__new__(InferenceNode)
        self.node._vllm = self.node._link = self  # type: ignore[assignment]
        self.node._config = SimpleNamespace(name="m")  # type: ignore[assignment]
        self.node._served = served
        self.node._newest, self.node._restarts = 4, RestartBudget(1)
        sender = SimpleNamespace(abort=lambda update_id, reason: self.aborted.append(update_id))
        self.node._aborts = Aborts(sender)  # type: ignore[arg-type]

    def request(self, message: Any, *, on_progress: Any = None, **_: Any) -> dict[str, Any]:
        return self.call(type(message).__name__, on_progress=on_progress)

    def call(self, action: str, *, on_progress: Any = None, **_: Any) -> dict[str, Any]:
        self.calls.append(action)
        if on_progress is not None:
            on_progress({"progress": "paused", "seconds": 0.5})
        answer = self.answers.get(action, DONE)
        answer = answer() if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def insist(self, action: str, **_: Any) -> None:
        self.call(action)

    def progress(self, request_id: str, phase: str, **_: Any) -> None:
        self.sent.append((request_id, phase))

    def complete(self, request_id: str, **_: Any) -> None:
        self.sent.append((request_id, "completed"))

    def fail(self, request_id: str, *, code: Any, phase: str, message: str, remedy: str) -> None:
        self.sent.append((request_id, "failed"))
        self.failed.append((code, message))

    def ask(self, message: Any) -> str:
        """How the request ended."""
        self.node._dispatch(message)
        return self.sent[-1][1]

    def abort(self, request_id: str | None) -> None:
        self.node._abort_update(m.AbortUpdate(reason="the test says so", request_id=request_id))


def receive(request_id: str = "r", **fields: Any) -> m.ReceiveWeights:
    return m.ReceiveWeights(request_id=request_id, deadline_s=5.0, version=5, **fields)


def commit(version: int = 5) -> m.CommitUpdate:
    return m.CommitUpdate(request_id="c", deadline_s=5.0, version=version)


def swap() -> m.SwapWeights:
    return m.SwapWeights(request_id="s", deadline_s=5.0, version=5)


def broken(tensors: int) -> CallFailed:
    return CallFailed(
        action="ReceiveWeights", code="apply_failed", message="x", answer={"tensors": tensors}
    )


def test_an_update_is_received_then_committed_once() -> None:
    played = Played()
    assert played.ask(commit()) == "failed" and played.failed[-1][0] == "not_ready"
    assert played.ask(receive()) == "completed"
    phases = [phase for request, phase in played.sent if request == "r"]
    assert phases == ["pausing", "paused", "applying", "completed"]
    assert played.ask(commit()) == played.ask(commit()) == "completed"
    assert played.calls == ["ReceiveWeights", "CommitUpdate"]
    assert played.node._served.is_committed(5)


def test_crashes_before_a_new_version_count_no_more() -> None:
    played = Played()
    budget = played.node._restarts
    assert budget.take(0.0) and not budget.has_left(1.0)
    played.ask(receive()), played.ask(commit())
    assert budget.take(2.0)
    played.ask(receive("again")), played.ask(commit())
    assert not budget.has_left(3.0), "the same version again is no progress"


def test_a_failure_poisons_only_if_something_was_written() -> None:
    for tensors, last in ((0, "resume"), (3, "poison")):
        played = Played()
        played.answers["ReceiveWeights"] = broken(tensors)
        assert played.ask(receive()) == "failed"
        assert played.calls == ["ReceiveWeights", "reset", last]
        assert played.node._served.is_serving is (tensors == 0)


def test_an_abort_ends_the_update_that_it_names() -> None:
    played = Played()
    played.answers["ReceiveWeights"] = lambda: (
        played.abort("other"),
        played.abort("r"),
        broken(0),
    )[-1]
    assert played.ask(receive()) == "failed" and played.aborted == ["r"]
    played.node._take_idle_aborts()
    assert played.ask(receive("other")) == "failed" and played.calls[-2:] == ["reset", "resume"]
    assert "the test says so" in played.failed[-1][1]
    del played.answers["ReceiveWeights"]
    assert played.ask(receive("other")) == "completed"  # it ends one update, once


def test_an_abort_before_the_commit_gives_the_version_up() -> None:
    played = Played()
    played.ask(receive())
    played.abort("r")
    played.node._take_idle_aborts()
    assert played.calls[-1] == "poison" and not played.node._served.is_serving
    assert played.ask(commit()) == "failed"


def test_an_abort_after_the_commit_changes_nothing() -> None:
    played = Played()
    played.ask(receive())
    played.ask(commit())
    played.abort("r")
    played.node._take_idle_aborts()
    assert played.node._served.is_committed(5) and "poison" not in played.calls
    for n in range(2 * ABORTS_KEPT):
        played.abort(str(n))
    assert len(played.node._aborts._early) == ABORTS_KEPT


def test_a_swap_that_commits_is_given_up_until_it_is_confirmed() -> None:
    for is_confirmed in (False, True):
        played = Played()
        assert played.ask(swap()) == "failed"  # nothing is in shadow memory
        assert played.ask(receive(mode="shadow", base_version=4)) == "completed"
        assert played.node._served.is_committed(4)
        assert played.ask(swap()) == "completed" and played.node._served.is_committed(5)
        if is_confirmed:
            assert played.ask(commit()) == "completed" and "CommitUpdate" not in played.calls
        played.node._on_forgotten(m.Hello.model_construct())
        played.node._take_idle_aborts()
        assert played.node._served.is_serving is is_confirmed


def test_a_partial_update_on_another_base_is_refused_before_any_pause() -> None:
    played = Played()
    assert played.ask(receive(base_version=3)) == "failed" and played.calls == []
    expected = "this partial update requires version 3; the replica serves 4"
    assert played.failed == [("base_missing", expected)]


def test_a_replica_that_is_left_out_serves_nothing() -> None:
    played = Played()
    leave = m.LeaveAlias(request_id="l", deadline_s=5.0, reason="it failed")
    assert played.ask(leave) == "completed" and played.calls == ["poison"]
    assert played.ask(leave) == "completed" and played.calls == ["poison"]
    assert not played.node._served.is_serving
