"""Shadow mode on a real vLLM: it generates while an update arrives in shadow memory, and
continues with @N whatever happens before the swap.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference_node.server import dialect, output_gate
from inference_node.server.output_gate import OutputGate
from inference_node.worker import shadow
from orchestrator.protocol import messages as m
from tests.inference_node.harness import TAU, Node, moved, new
from tests.inference_node.long_requests import LONG, Request
from tests.inference_node.partial_updates import (
    is_attention,
    is_norm_and_query,
    is_one_expert,
    plan,
    with_part,
)
from tests.inference_node.shadow_updates import Transfer, open_shadow, phases, swap_and_commit


def begin(node: Node, request: m.ReceiveWeights, transfer: Transfer) -> None:
    """Send the request and wait until the trainer stalls in the middle."""
    node.router.send(request)
    assert transfer.stalled.wait(20.0)


def served(node: Node) -> tuple[int, dict[str, torch.Tensor], torch.Tensor]:
    """Publish moved weights in place: (version, tensors, log-probs)."""
    version = 0 if node.version is None else node.version + 1
    tensors = moved(node.base, 60)
    node.join()
    node.publish(version, tensors)
    return version, tensors, node.prompt_logprobs(f"tiny@{version}")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_tokens_come_while_the_update_does_and_the_swap_serves_it(
    kind: str, request: pytest.FixtureRequest
) -> None:
    node: Node = request.getfixturevalue(kind)
    version, tensors, logprobs = served(node)
    cases = (
        {is_attention: 61, is_norm_and_query: 62}
        if kind == "dense"
        else {is_attention: 61, is_one_expert: 62}
    )
    for is_changed, seed in cases.items():
        part = plan(node, version + 1, is_changed)
        names = {node.manifest.tensors[i].name for i in part.tensors}
        update = with_part(tensors, moved(node.base, seed), names)
        receive = open_shadow(node, part, version + 1)
        assert node.why_not is None  # type: ignore[attr-defined]
        with Transfer(node, part, update) as transfer:
            begin(node, receive, transfer)
            stream = Request(
                node, "tiny", stream=True, max_tokens=60
            )  # from the first to the last token within the transfer
            stream.join(20.0)
            assert stream.done and {e["model"] for e in stream.events} == {f"tiny@{version}"}
            assert torch.equal(node.prompt_logprobs(f"tiny@{version}"), logprobs)
            transfer.go.set()
            envelope = node.router.outcome(receive.request_id)
        assert envelope.message.kind == "Completed", envelope.message
        assert phases(node, receive) == []  # nothing was paused
        came_N = torch.frombuffer(bytearray(envelope.buffers[0]), dtype=torch.int64)
        assert torch.equal(came_N, transfer.reports[0].digests_N)
        assert torch.equal(node.prompt_logprobs(f"tiny@{version}"), logprobs)
        version += 1
        swap_and_commit(node, version, transfer.reports, at_once=seed == 62)
        logprobs, tensors = node.prompt_logprobs(f"tiny@{version}"), update
        assert (logprobs - node.expected(tensors)).abs().max() < TAU
    node.join()  # the sender is the part's


def test_the_swap_waits_behind_the_step_under_way_and_no_token_goes_under_the_wrong_name(
    dense: Node,
) -> None:
    """Each token's log-prob tells which weights made it; stale keys and values of the old ones stay
    (`keep_kv`), so only those before the swap are known.
    """
    spanned, scored = False, {"temperature": 0.0, "logprobs": 0}
    for attempt in range(6):  # a fast machine may end the stream before the swap
        version, tensors, _ = served(dense)
        part = plan(dense, version + 1, is_attention)
        update = with_part(
            tensors,
            moved(dense.base, 70 + attempt),
            {dense.manifest.tensors[i].name for i in part.tensors},
        )
        wanted = dense.post("/v1/completions", {**LONG, **scored, "model": "tiny"}).json()[
            "choices"
        ][0]["logprobs"]
        receive = open_shadow(dense, part, version + 1)
        with Transfer(dense, part, update) as transfer:
            begin(dense, receive, transfer)
            stream = Request(dense, "tiny", stream=True, **scored)
            assert stream.first.wait(20.0)
            transfer.go.set()
            assert dense.router.outcome(receive.request_id).message.kind == "Completed"
        swap_and_commit(dense, version + 1, transfer.reports, at_once=True)
        stream.join(60.0)
        before = [
            e["choices"][0]["logprobs"]
            for e in stream.events
            if e["model"] == f"tiny@{version}" and e["choices"]
        ]
        ids, values = (
            [x for row in before for x in row[key]] for key in ("tokens", "token_logprobs")
        )
        assert ids == wanted["tokens"][: len(ids)] and values
        assert torch.allclose(
            torch.tensor(values), torch.tensor(wanted["token_logprobs"][: len(values)]), atol=1e-4
        )
        after = [
            e["choices"][0]["logprobs"]
            for e in stream.events
            if e["model"] == f"tiny@{version + 1}" and e["choices"]
        ]
        if after:
            spanned = True
            made = torch.tensor([x for row in after for x in row["token_logprobs"]])
            rest = torch.tensor(wanted["token_logprobs"][len(values) :])
            assert len(made) == len(rest) and (made - rest).abs()[0] > 2e-4
            break
    dense.join()  # the sender is the part's
    assert spanned


def test_pause_and_swap_are_sent_in_their_order_and_awaited_together() -> None:
    sent: list[str] = []

    async def pause_scheduler_async(*, mode: str, clear_cache: bool) -> None:
        sent.append(f"pause {mode} {clear_cache}")
        await asyncio.sleep(0.05)
        sent.append("stands")

    async def collective_rpc(method: str, args: tuple[int, ...]) -> list[int]:
        sent.append(method)
        return list(args)

    async def clear_mm_cache_async() -> None:
        await asyncio.sleep(0.01)
        sent.append("cleared")

    core, renderer = (
        SimpleNamespace(pause_scheduler_async=pause_scheduler_async),
        SimpleNamespace(clear_mm_cache_async=clear_mm_cache_async),
    )
    parallel = SimpleNamespace(data_parallel_size=1, distributed_executor_backend="uni")
    engine = SimpleNamespace(
        engine_core=core,
        renderer=renderer,
        collective_rpc=collective_rpc,
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )
    gate = SimpleNamespace(
        hold_at=lambda answer: answer.add_done_callback(lambda _: sent.append("held"))
    )
    asked = dialect.pause_and_call(
        engine,
        clear_cache=True,
        method="swap",
        args=(7,),
        gate=gate,
        on_send=lambda: sent.append("now"),  # type: ignore[arg-type]
    )
    assert asyncio.run(asked) == [7]
    assert sent == ["cleared", "now", "pause keep True", "swap", "held", "stands"]
    assert dialect.keeps_order(engine)
    parallel.distributed_executor_backend = (
        "ray"  # steps and calls reach its workers by different ways
    )
    assert not dialect.keeps_order(engine)
    parallel.distributed_executor_backend = "mp"
    assert dialect.keeps_order(engine)
    parallel.data_parallel_size = 2  # a step of theirs may need this one's experts
    assert not dialect.keeps_order(engine) and not dialect.keeps_order(SimpleNamespace())


def test_the_last_tokens_are_held_though_they_come_with_the_answer_ahead_of_them() -> None:
    """vLLM's client, when it was kept busy, reads both in one turn of the event loop: it sets the
    answer's future and queues the tokens.
    """

    async def test() -> None:
        engine, answer, stands = Engine(), asyncio.Future[list[int]](), asyncio.Future[None]()

        async def pause_scheduler_async(*, mode: str, clear_cache: bool) -> None:
            await stands

        async def collective_rpc(method: str, args: tuple[int, ...]) -> list[int]:
            return await answer

        engine.pause_scheduler_async, engine.collective_rpc = pause_scheduler_async, collective_rpc  # type: ignore[attr-defined]
        gate = OutputGate(engine)
        task = asyncio.ensure_future(engine.hand_out())
        asked = asyncio.ensure_future(
            dialect.pause_and_call(
                engine, clear_cache=False, method="swap", args=(), gate=gate, on_send=lambda: None
            )
        )
        await asyncio.sleep(0.01)
        engine.outputs_queue.put_nowait(
            1
        )  # of a step before: it goes out while the workers are being waited for
        await asyncio.sleep(0.01)
        assert engine.handed_out == [1] and not asked.done()
        answer.set_result([7])
        engine.outputs_queue.put_nowait(2)
        stands.set_result(None)
        assert await asked == [7]
        await asyncio.sleep(0.01)
        assert engine.handed_out == [1] and gate.waiting == 1
        gate.open()
        await asyncio.sleep(0.01)
        assert engine.handed_out == [1, 2]

        late = asyncio.Future[list[int]]()  # given up, and the gate opened, before it came
        gate.hold_at(late)
        gate.open()
        late.set_result([])
        engine.outputs_queue.put_nowait(3)
        await asyncio.sleep(0.01)
        assert engine.handed_out == [1, 2, 3]
        task.cancel()

    asyncio.run(test())


def test_what_was_committed_with_its_swap_and_given_up_before_anybody_knew_is_not_served(
    dense: Node,
) -> None:
    version, tensors, _ = served(dense)
    part = plan(dense, version + 1, is_attention)
    update = with_part(
        tensors, moved(dense.base, 64), {dense.manifest.tensors[i].name for i in part.tensors}
    )
    receive = open_shadow(dense, part, version + 1)
    with Transfer(dense, part, update) as transfer:
        begin(dense, receive, transfer)
        transfer.go.set()
        assert dense.router.outcome(receive.request_id).message.kind == "Completed"
    digests = transfer.reports[0].digests_N.numpy().tobytes()
    swapped = dense.router.request(
        new(m.SwapWeights, version=version + 1, pause_mode="keep_kv", commit_if=digests)
    ).message
    assert swapped.kind == "Completed" and swapped.result["committed"]
    assert dense.prompt_logprobs(f"tiny@{version + 1}").isfinite().all()
    dense.router.send(m.AbortUpdate(reason="the orchestrator was restarted"))
    deadline = time.monotonic() + 40
    while (
        refused := dense.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1})
    ).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "then given up: the orchestrator was restarted" in refused.text
    assert dense.commit(version + 1).kind == "Failed"
    dense.leave()
    dense.join()
    dense.publish(version + 2, dense.base)


def test_whatever_fails_before_the_swap_leaves_the_version_served(dense: Node) -> None:
    version, tensors, logprobs = served(dense)

    def goes_on() -> bool:
        return torch.equal(dense.prompt_logprobs(f"tiny@{version}"), logprobs)

    part = plan(dense, version + 1, is_attention)
    names = {dense.manifest.tensors[i].name for i in part.tensors}
    update = with_part(tensors, moved(dense.base, 63), names)

    open_shadow(dense, part, version + 1, budget_bytes=1000)
    assert "more than the 1,000 that shadow mode may use" in dense.why_not  # type: ignore[attr-defined]

    for how in ("abort", "dead trainer", "deadline"):
        receive = open_shadow(dense, part, version + 1)
        if how == "deadline":
            receive = receive.model_copy(update={"deadline_s": 5.0})
        with Transfer(dense, part, update) as transfer:
            begin(dense, receive, transfer)
            began = time.monotonic()
            if how == "abort":
                dense.router.send(m.AbortUpdate(reason="the test says so"))
            elif how == "dead trainer":
                dense.leave()
            failed = dense.router.outcome(receive.request_id, 20.0).message
            assert failed.kind == "Failed" and failed.phase == "receiving into shadow memory", (
                failed
            )
            wanted = {"abort": "transfer_aborted", "dead trainer": "transfer_failed"}.get(how)
            assert failed.code == wanted or (
                wanted is None and failed.code in ("transfer_timeout", "transfer_aborted")
            )
            assert (
                time.monotonic() - began < 15.0
                and f"tiny@{version} is still served" in failed.remedy
            )
            assert goes_on() and phases(dense, receive) == []
        dense.leave()
        dense.join()
        assert plan(dense, version + 1, is_attention) == part

    # Received whole, then the orchestrator says no, as after a digest that differs: nothing to
    # swap, and nothing was poisoned.
    receive = open_shadow(dense, part, version + 1)
    with Transfer(dense, part, update) as transfer:
        begin(dense, receive, transfer)
        transfer.go.set()
        assert dense.router.outcome(receive.request_id).message.kind == "Completed"
    dense.router.send(m.AbortUpdate(reason="the digests differ"))
    refused = dense.router.request(new(m.SwapWeights, version=version + 1)).message
    assert refused.kind == "Failed" and refused.code in (
        "not_ready",
        "transfer_aborted",
    )  # heard before the swap, or as it began
    assert goes_on()
    refused = dense.router.request(new(m.SwapWeights, version=version + 1)).message
    assert (
        refused.kind == "Failed"
        and refused.code == "not_ready"
        and "is not in shadow memory" in refused.message
    )

    dense.leave()
    dense.join()
    receive = open_shadow(dense, part, version + 1)
    with Transfer(dense, part, update) as transfer:
        begin(dense, receive, transfer)
        transfer.go.set()
        assert dense.router.outcome(receive.request_id).message.kind == "Completed"
    swap_and_commit(dense, version + 1, transfer.reports)
    assert (dense.prompt_logprobs(f"tiny@{version + 1}") - dense.expected(update)).abs().max() < TAU
    dense.join()


def test_room_is_asked_for_before_anything_moves() -> None:
    assert shadow.why_not(100, free_bytes=100 + shadow.RESERVE_BYTES, budget_bytes=100) is None
    assert "may use" in (shadow.why_not(101, free_bytes=2**40, budget_bytes=100) or "")
    assert "free" in (
        shadow.why_not(100, free_bytes=99 + shadow.RESERVE_BYTES, budget_bytes=100) or ""
    )


class Engine:
    """The parts of vLLM's engine client that tokens pass through: the socket's queue, the task that
    empties it, one collector for each request.
    """

    def __init__(self, requests: int = 1) -> None:
        self.outputs_queue: asyncio.Queue[int] = asyncio.Queue()
        self.get_output_async = self.outputs_queue.get
        self.collectors = [SimpleNamespace(output=None) for _ in range(requests)]
        states = {n: SimpleNamespace(queue=c) for n, c in enumerate(self.collectors)} | {
            "pooled": SimpleNamespace(queue=None)
        }
        self.engine_core, self.output_processor = self, SimpleNamespace(request_states=states)
        self.handed_out: list[int] = []
        self.resources = SimpleNamespace(engine_dead=False)

    async def hand_out(self) -> None:
        while True:
            output = await self.engine_core.get_output_async()
            self.handed_out.append(output)
            await asyncio.sleep(0)


async def settled_after_s(engine: Any, gate: OutputGate | None = None) -> float:
    began = time.monotonic()
    await dialect.settle(engine, gate=gate)
    return time.monotonic() - began


def test_the_alias_waits_for_tokens_that_are_under_way_and_no_longer() -> None:
    async def under_way() -> tuple[float, bool]:
        engine, sent = Engine(requests=8), asyncio.Event()
        engine.outputs_queue.put_nowait(1)
        for collector in engine.collectors:
            collector.output = "tokens"

        async def pass_on() -> None:
            for collector in (
                engine.collectors
            ):  # one turn of the loop is longer than SETTLE_S, but something leaves in each
                time.sleep(1.5 * dialect.SETTLE_S)
                collector.output = None
                await asyncio.sleep(0)
            engine.outputs_queue.get_nowait()
            for _ in range(
                dialect.QUIET_TURNS - 2
            ):  # the request's own task, on its way to the client
                await asyncio.sleep(0)
            sent.set()

        task = asyncio.ensure_future(pass_on())
        took_s = await settled_after_s(engine)
        was_sent = sent.is_set()
        await task
        return took_s, was_sent

    took_s, was_sent = asyncio.run(under_way())
    assert was_sent and 12 * dialect.SETTLE_S <= took_s < 4.0

    async def others() -> tuple[float, float, float]:
        unseen = await settled_after_s(SimpleNamespace(engine_core=SimpleNamespace()))
        engine = Engine()
        idle = await settled_after_s(engine)
        engine.collectors[0].output = "a slow client"
        return unseen, idle, await settled_after_s(engine)

    unseen, idle, stuck = asyncio.run(others())
    assert unseen >= dialect.SETTLE_S and idle < 4.0 and dialect.SETTLE_S <= stuck < 4.0


def test_the_gate_lets_through_what_was_made_before_and_holds_the_rest() -> None:
    async def test() -> None:
        engine = Engine()
        task = asyncio.ensure_future(engine.hand_out())
        await asyncio.sleep(0)
        gate = OutputGate(engine)
        assert not gate.is_sure  # the task may be waiting at the client itself still
        engine.outputs_queue.put_nowait(0)
        await asyncio.sleep(0.01)
        assert gate.is_sure and engine.handed_out == [0]

        gate.hold()
        for old in (1, 2):
            engine.outputs_queue.put_nowait(old)
            await asyncio.sleep(0.01)
        assert engine.handed_out == [0] and gate.waiting == 2
        made = gate.waiting
        engine.outputs_queue.put_nowait(3)  # of the new weights
        gate.pass_on(made)
        assert gate.left > 0
        await settled_after_s(engine, gate=gate)
        assert engine.handed_out == [0, 1, 2] and gate.left == 0
        await asyncio.sleep(0.01)
        assert engine.handed_out == [0, 1, 2] and gate.waiting == 1
        gate.open()
        engine.outputs_queue.put_nowait(4)
        await asyncio.sleep(0.01)
        assert engine.handed_out == [0, 1, 2, 3, 4] and gate.waiting == 0

        gate.hold()
        engine.outputs_queue.put_nowait(5)
        await asyncio.sleep(0.01)
        assert engine.handed_out[-1] == 4
        engine.resources.engine_dead = True  # the output that says so comes later
        await asyncio.sleep(2 * output_gate.DEATH_POLL_S)
        assert engine.handed_out[-1] == 5
        task.cancel()

    asyncio.run(test())
    with pytest.raises(AttributeError):
        OutputGate(SimpleNamespace())
    with pytest.raises(AttributeError, match="list"):
        OutputGate(SimpleNamespace(outputs_queue=[], get_output_async=None))
