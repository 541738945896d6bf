"""Frames, messages, the router's manners with strangers, and CURVE."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.control import router as router_module
from orchestrator.control.control_socket import Arrival, check_bind_address
from orchestrator.control.router import ControlRouter
from orchestrator.errors import ConfigError, NodeLost, ProtocolError
from orchestrator.protocol import frames as frames_module
from orchestrator.protocol import node_link
from orchestrator.protocol.curve import peer_keys
from orchestrator.protocol.frames import PIECE_BYTES, OtherProtocolVersion, decode, encode
from orchestrator.protocol.messages import (
    ANY_MESSAGE,
    PROTOCOL_VERSION,
    AbortSend,
    Completed,
    GetStatus,
    Heartbeat,
    Hello,
    Manifest,
    NodeEnded,
    Progress,
    Ready,
    ReleaseMemory,
    SaveCheckpoint,
    SubmitJob,
    TensorSpec,
    TrainMerged,
    batch_specs,
)
from orchestrator.protocol.node_link import NodeLink
from tests.orchestrator.raw import VERSION, raw_peer

TOKEN = "t" * 32


def hello(**kwargs):
    return Hello(
        **{
            "role": "client",
            "node_id": "c1",
            "incarnation": uuid.uuid4().hex,
            "run_token": TOKEN,
            **kwargs,
        }
    )


def test_round_trip_with_buffers():
    specs = batch_specs(num_sequences=2, num_tokens=5)
    message = SubmitJob(job_id="j", job=TrainMerged(tensors=specs))
    buffers = [bytes(range(s.nbytes % 256)) if s.nbytes < 256 else bytes(s.nbytes) for s in specs]
    envelope = decode([bytes(f) for f in encode(message, buffers)])
    assert envelope.message == message and list(envelope.buffers) == buffers


def test_a_buffer_of_the_wrong_size_is_refused_on_both_sides():
    specs = (TensorSpec(name="x", dtype="float32", shape=(3,)),)
    message = Completed(request_id="r", tensors=specs)
    with pytest.raises(ProtocolError, match="12"):
        encode(message, [b"123"])
    frames = [bytes(f) for f in encode(message, [bytes(12)])]
    with pytest.raises(ProtocolError):
        decode([*frames[:3], b"short"])


def test_unknown_fields_and_kinds_are_refused():
    with pytest.raises(ValidationError):
        ANY_MESSAGE.validate_python({"kind": "Heartbeat", "node_id": "a", "extra": 1})
    version = encode(Heartbeat(node_id="a"))[0]
    with pytest.raises(ProtocolError, match="kind"):
        decode([version, b"Nonsense", msgpack.packb({"kind": "Nonsense"})])
    with pytest.raises(OtherProtocolVersion, match="splice/999"):
        decode([b"splice/999", b"Heartbeat", msgpack.packb({"kind": "Heartbeat", "node_id": "a"})])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=5), st.booleans())
def test_garbage_never_raises_anything_else(frames, with_version):
    if with_version:
        frames = [b"splice/%d" % PROTOCOL_VERSION, *frames]
    try:
        decode(frames)
    except ProtocolError:
        pass


def test_manifest_names_are_unique():
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(2, 3))
    assert spec.nbytes == 12
    with pytest.raises(ValidationError, match="unique"):
        Manifest(tensors=(spec, spec))


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5555", "tcp://192.168.1.4:0", "ipc:///tmp/x", "127.0.0.1:5"]
)
def test_off_loopback_needs_keys(endpoint):
    with pytest.raises(ConfigError):
        check_bind_address(endpoint, has_keys=False)
    check_bind_address("tcp://127.0.0.1:0", has_keys=False)
    check_bind_address("tcp://0.0.0.0:0", has_keys=True)


def with_router(test, **kwargs):
    """Run `test(router, received)` in a loop with a bound router; `received` collects what clients
    sent.
    """

    async def go():
        received = []

        async def on_client(peer, envelope):
            received.append(envelope.message)

        router = ControlRouter(
            endpoint="tcp://127.0.0.1:0", run_token=TOKEN, on_client=on_client, **kwargs
        )
        await router.start()
        try:
            await asyncio.wait_for(test(router, received), 30)
        finally:
            await router.close()

    asyncio.run(go())


def test_garbage_of_a_key_holder_does_no_harm():
    async def test(router, received):
        with raw_peer(router.endpoint, token=TOKEN) as raw:
            for frames in (
                [b"x"],
                [VERSION, b"Hello", b"b"],
                [VERSION, b"Hello", b"\x91\x05", b"short"],
                [b""] * 9,
            ):
                raw.send_frames(*frames)
            raw.send(hello(run_token="other"))
            raw.send_frames(b"splice/999", b"Hello", b"")
            answers = [(await asyncio.to_thread(raw.recv)).message for _ in range(2)]
            assert [m.kind for m in answers] == ["Rejected", "Rejected"]
            assert "token" in answers[0].reason and VERSION.decode() in answers[1].reason
            raw.send(GetStatus())
            assert (await asyncio.to_thread(raw.recv)).message.kind == "Hello", (
                "a stranger is asked who it is"
            )
            link = await asyncio.to_thread(NodeLink(endpoint=router.endpoint, hello=hello()).start)
            link.send(GetStatus())
            while not received:
                await asyncio.sleep(0.01)
            assert router.dropped == {"strangers": 6}
            await asyncio.to_thread(link.close)

    with_router(test)


def test_a_flood_leaves_other_tasks_their_turns():
    async def test(router, _):
        first, turns = router._socket.receive, 0

        async def flooded():
            if router.dropped["strangers"] >= 1000:
                return await first()
            return Arrival(address=b"flood", key=b"", parts=[b"x"])

        router._socket.receive = flooded
        with raw_peer(router.endpoint, token=TOKEN) as raw:
            raw.send_frames(b"x")  # ends the `_receive` under way
            while router.dropped["strangers"] < 1000:
                turns += router.dropped["strangers"] > 0
                await asyncio.sleep(0)
        assert turns >= 1000 // router_module.READ_AT_ONCE - 1

    with_router(test)


def test_without_the_token_nothing_reaches_the_orchestrator():
    async def test(router, _):
        arrived = []
        router._on_stranger = arrived.append
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(router.endpoint)
            plain.send_multipart([VERSION, b"Hello", b"b"])
            with pytest.raises(NodeLost, match="SPLICE_RUN_TOKEN"):
                await asyncio.to_thread(
                    NodeLink(endpoint=router.endpoint, hello=hello(run_token="no")).start,
                    timeout_s=1.0,
                )
        assert not arrived and not router.dropped

    with_router(test)


def test_a_link_that_was_never_opened_says_so():
    with pytest.raises(ConfigError, match="never opened: enter it by `with`"):
        NodeLink(endpoint="tcp://127.0.0.1:9", hello=hello()).recv(timeout_s=0.01)


def test_a_stranger_cannot_make_the_orchestrator_hold_more_than_one_piece():
    """A frame that is announced as large is refused by its first bytes, before the handshake is
    done.
    """

    async def test(router, _):
        host, port = router.endpoint.removeprefix("tcp://").split(":")
        greeting = (
            b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        )
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(greeting)
            while len(came := await asyncio.to_thread(stranger.recv, 64, socket.MSG_PEEK)) < 64:
                assert came
            stranger.recv(64)
            stranger.sendall(b"\x06" + (PIECE_BYTES + 4096).to_bytes(8, "big"))
            assert await asyncio.to_thread(stranger.recv, 64) == b"", (
                "the connection was not closed"
            )

    with_router(test)


def test_a_node_whose_link_is_stuck_gives_up():
    """It beats no more, so it is lost to the orchestrator; its launcher is to start another."""
    go_on = threading.Event()

    async def test(router, _):
        urgent = {"AbortSend": lambda _: go_on.wait(25)}
        node = NodeLink(
            endpoint=router.endpoint,
            hello=hello(role="trainer", node_id="stuck"),
            urgent=urgent,
            lost_after_s=2.0,
        )
        link = await asyncio.to_thread(node.start)
        await router.send("stuck", AbortSend(reason="the test says so"))

        def wait() -> None:
            while True:
                link.recv(timeout_s=0.1)

        with pytest.raises(NodeLost, match="silent"):
            await asyncio.wait_for(asyncio.to_thread(wait), 10)
        go_on.set()
        await asyncio.to_thread(link.close)

    with_router(test)


def make_keys(folder, *options) -> int:
    from typer.testing import CliRunner

    from splice.cli import app

    return CliRunner().invoke(app, ["keys", str(folder), *options]).exit_code


def test_a_peer_that_reads_nothing_is_not_waited_for():
    """Ctrl-Z at a client that watches a run must not stop the run."""

    async def test(router, _):
        with raw_peer(router.endpoint, token=TOKEN, hello=hello(node_id="suspended")):
            while not router.is_connected("client:suspended"):
                await asyncio.sleep(0.01)

            async def fill() -> None:
                while True:
                    await router.send(
                        "client:suspended", Progress(request_id="j", sequence=0, phase="x" * 60_000)
                    )

            with pytest.raises(NodeLost, match="reads nothing"):
                await fill()

    with_router(test)


def test_a_request_that_cannot_be_sent_to_a_living_node_fails_at_once():
    """Nothing would send it again: only a node without a connection says Hello."""

    async def test(router, _):
        link = await joined(router, **TRAINER)
        send = router._socket.send
        router._socket.send = lambda *_: (_ for _ in ()).throw(zmq.Again())
        with pytest.raises(NodeLost, match="reads nothing"):
            await asyncio.wait_for(
                router.request(
                    "trainer", ReleaseMemory(request_id="r", deadline_s=20), phase="testing"
                ),
                2,
            )
        assert not router._open
        router._socket.send = send
        await asyncio.to_thread(link.close)

    with_router(test)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_port_in_use_is_said_plainly(has_keys, tmp_path):
    if has_keys:
        assert make_keys(tmp_path / "keys") == 0

    async def test(router, _):
        async def nobody(peer, envelope): ...

        keys = tmp_path / "keys" / "orchestrator" if has_keys else None
        second = ControlRouter(
            endpoint=router.endpoint, run_token=TOKEN, on_client=nobody, curve_dir=keys
        )
        with pytest.raises(ConfigError, match="another port"):
            await second.start()

    with_router(test)


@pytest.mark.parametrize(
    "options",
    [
        ("--client", "trainer"),
        ("--client", "orchestrator"),
        ("--inference", "trainer-launcher-0"),
        ("--client", "inference-0"),
        ("--inference", "a", "--inference", "a"),
        ("--inference", "a b/../../x"),
        ("--client", "me@host"),
    ],
)
def test_no_two_folders_of_keys_have_one_name(options, tmp_path):
    assert make_keys(tmp_path / "keys", *options) == 2
    assert not (tmp_path / "keys").exists()


def test_keys_are_for_one_node_each(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    assert make_keys(keys) == 0
    assert make_keys(keys) == 2  # never overwritten
    assert {oct(p.stat().st_mode & 0o777) for p in [keys, *keys.rglob("*")]} == {"0o600", "0o700"}

    async def test(router, _):
        async def start(folder, *, key_of=None, timeout_s=10.0, **who):
            if folder is None:
                monkeypatch.delenv("SPLICE_CURVE_DIR", raising=False)
            else:
                monkeypatch.setenv("SPLICE_CURVE_DIR", str(keys / folder))
            curve = None if key_of is None else peer_keys(TOKEN, **key_of)
            link = NodeLink(endpoint=router.endpoint, hello=hello(**who), curve=curve)
            await asyncio.to_thread(link.start, timeout_s=timeout_s)
            await asyncio.to_thread(link.close)

        trainer = {"role": "trainer", "node_id": "trainer"}
        with pytest.raises(NodeLost, match="keys of one set"):
            await start(None, timeout_s=1.0, **trainer)
        await start("trainer", **trainer)
        await start("client", node_id="anything")
        with pytest.raises(ConfigError, match=r"has no trainer\.trainer"):
            await start("client", **trainer)
        with pytest.raises(ConfigError, match="this key is for client"):
            await start("client", key_of={"role": "client", "node_id": ""}, **trainer)
        with pytest.raises(ConfigError, match="this key is for trainer trainer, not for inference"):
            await start("trainer", key_of=trainer, role="inference", node_id="inference-0")
        assert set(router.peers) == {"trainer", "client:anything"}

    with_router(test, curve_dir=keys / "orchestrator")


def joined(router, **who):
    """A link that has said Hello, on its own thread."""
    return asyncio.to_thread(
        NodeLink(endpoint=router.endpoint, hello=hello(**who)).start, timeout_s=5.0
    )


TRAINER = {"role": "trainer", "node_id": "trainer"}


def test_a_second_living_process_never_displaces_the_first():
    async def test(router, _):
        first = await joined(router, **TRAINER)
        second = NodeLink(endpoint=router.endpoint, hello=hello(**TRAINER))
        with pytest.raises(NodeLost, match="is trainer and is alive"):
            await asyncio.to_thread(second.start, timeout_s=2.5)
        assert router.peers["trainer"].hello == first._hello
        await router.send("trainer", ReleaseMemory(request_id="reaches the first", deadline_s=5))
        assert (await asyncio.to_thread(first.recv, timeout_s=5)).message.kind == "ReleaseMemory"
        await asyncio.to_thread(first.close)
        third = await joined(router, **TRAINER)  # at once: the first one's connection is gone
        assert router.peers["trainer"].hello == third._hello
        await asyncio.to_thread(third.close)

    with_router(test)


def test_an_answer_counts_only_from_whom_it_was_asked_of():
    async def test(router, _):
        trainer, other = (
            await joined(router, **TRAINER),
            await joined(router, role="inference", node_id="other"),
        )
        with raw_peer(router.endpoint, token=TOKEN, hello=hello(node_id="client")) as client:
            asked = asyncio.ensure_future(
                router.request(
                    "trainer", ReleaseMemory(request_id="r", deadline_s=20), phase="testing"
                )
            )
            assert (await asyncio.to_thread(trainer.recv, timeout_s=5)).message.request_id == "r"
            client.send(Completed(request_id="r", result={"by": "a client"}))
            client.send(NodeEnded(node_id="trainer", code=1))
            client.send(Ready(node_id="trainer"))
            other.complete("r", result={"by": "another node"})
            other.send(NodeEnded(node_id="trainer", code=1))
            while sum(router.dropped.values()) < 5:
                await asyncio.sleep(0.01)
            assert not asked.done() and router.is_connected("trainer")
            trainer.complete("r", result={"by": "the trainer"})
            assert (await asked)[0].result == {"by": "the trainer"}
        for link in (trainer, other):
            await asyncio.to_thread(link.close)

    with_router(test)


def test_a_cut_connection_is_dialled_anew(monkeypatch):
    """Nothing comes over it any more, in either direction, and neither end is told."""
    monkeypatch.setattr(node_link, "REDIAL_AFTER_S", 2.0)

    async def test(router, _):
        link = await joined(router, **TRAINER)
        before = router.peers["trainer"].address
        del router._table._ids[before]
        router.peers["trainer"].state = "lost"
        router._on_stranger_before, deaf_until = router._on_stranger, time.monotonic() + 4

        async def deaf(arrival):
            if time.monotonic() > deaf_until:
                await router._on_stranger_before(arrival)

        router._on_stranger = deaf
        while router.peers["trainer"].state == "lost":
            await asyncio.sleep(0.05)
        assert router.peers["trainer"].address != before
        await asyncio.to_thread(link.close)

    with_router(test)


def test_a_replica_of_another_name_is_refused():
    async def test(router, _):
        link = await joined(router, role="inference", node_id="inference-0")
        link.send(Ready(node_id="inference-0", detail={"base_url": "http://h", "name": "tiny"}))
        while link._rejected is None:
            await asyncio.sleep(0.01)
        with pytest.raises(ConfigError, match="serves 'tiny', this run publishes 'other'"):
            await asyncio.to_thread(link.recv, timeout_s=0.1)
        await asyncio.sleep(2.0)
        assert "inference-0" not in router.peers, "it was taken in again"
        await asyncio.to_thread(link.close)

    with_router(test, name="other")


def test_a_ready_that_is_none_is_dropped():
    async def test(router, _):
        link = await joined(router, role="inference", node_id="inference-0")
        for detail in (
            {"base_url": "http://h", "workers": "many"},
            {"base_url": "http://h", "workers": 0},
            {},
        ):
            link.send(Ready(node_id="inference-0", detail=detail))
        while router.dropped["inference-0"] < 3:
            await asyncio.sleep(0.01)
        assert router.peers["inference-0"].state == "connected"
        link.send(Ready(node_id="inference-0", detail={"base_url": "http://h"}))
        await router.wait_ready(["inference-0"], timeout_s=5)
        await asyncio.to_thread(link.close)

    with_router(test)


def test_of_forgotten_peers_only_the_total_is_kept():
    async def test(router, _):
        for n in range(3):
            with raw_peer(router.endpoint, token=TOKEN, hello=hello(node_id=f"c{n}")) as raw:
                raw.send(Ready(node_id=f"c{n}"))
                while router.dropped[f"client:c{n}"] < 1:
                    await asyncio.sleep(0.01)
                router.forget(f"client:c{n}")
        assert router.dropped == {"forgotten": 3} and not router._table._next_log_s
        router.forget("nobody")

    with_router(test)


def test_an_odd_incarnation_blocks_nobody():
    async def test(router, _):
        with raw_peer(router.endpoint, token=TOKEN, hello=hello(**TRAINER, incarnation="\u00e9")):
            while not router.is_connected("trainer"):
                await asyncio.sleep(0.01)
        link = await joined(router, **TRAINER)
        assert router.peers["trainer"].hello == link._hello
        await asyncio.to_thread(link.close)

    with_router(test)


def test_a_peer_that_is_forgotten_while_another_is_found_lost_ends_nothing(monkeypatch):
    monkeypatch.setattr(router_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(router_module, "LOST_AFTER_S", 0.0)

    async def test(router, _):
        async with router._table.changed:  # whoever loses a node waits here
            links = [
                await joined(router, role="inference", node_id=f"inference-{n}") for n in range(2)
            ]
            while all(peer.state != "lost" for peer in router.peers.values()):
                await asyncio.sleep(0.01)
            for peer_id in [i for i, peer in router.peers.items() if peer.state != "lost"]:
                router.forget(peer_id)
        ended = asyncio.ensure_future(router.fail())
        await asyncio.wait([ended], timeout=0.5)
        assert not ended.done(), ended.exception()
        ended.cancel()
        for link in links:
            await asyncio.to_thread(link.close)

    with_router(test)


def test_lost_peers_take_nobodys_place(monkeypatch):
    monkeypatch.setattr(router_module, "MAX_PEERS", 2)

    async def test(router, _):
        links = [await joined(router, role="inference", node_id=f"inference-{n}") for n in range(2)]
        with pytest.raises(NodeLost, match="2 peers are connected"):
            await asyncio.to_thread(
                NodeLink(endpoint=router.endpoint, hello=hello()).start, timeout_s=1.5
            )
        await router._lose("inference-1", "the test says so")
        await asyncio.to_thread(links[1].close)
        links.append(await joined(router))
        assert "inference-1" not in router.peers
        for link in links:
            await asyncio.to_thread(link.close)

    with_router(test)


@pytest.mark.parametrize("body", [{"kind": "StopRun"}, {}, [1], 7])
def test_a_body_of_another_kind_than_its_frame_is_not_decoded(body, monkeypatch):
    monkeypatch.setattr(frames_module, "ANY_MESSAGE", None)
    with pytest.raises(ProtocolError, match="not of the kind 'Hello'"):
        decode([b"splice/%d" % PROTOCOL_VERSION, b"Hello", msgpack.packb(body)])


def test_a_body_with_more_keys_or_values_than_it_may_have_is_refused_at_once():
    keys = {f"{n:x}": 0 for n in range(2**16 + 1)}
    with pytest.raises(ProtocolError, match="max_map_len"):
        decode(
            [
                b"splice/%d" % PROTOCOL_VERSION,
                b"SubmitJob",
                msgpack.packb({"kind": "SubmitJob", **keys}),
            ]
        )
    for state in (keys, {"a": [0] * 2**20}, {"a": [{}] * 2**20}):
        with pytest.raises(ValidationError, match="client_state"):
            SaveCheckpoint(checkpoint_dir="/x", client_state=state)


@pytest.mark.parametrize("field", [{"request_id": "mine"}, {"deadline_s": 60.0}])
def test_a_client_cannot_say_what_the_orchestrator_adds_to_a_job(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        SubmitJob.model_validate({"job_id": "j", "job": {"kind": "OptimStep", **field}})
