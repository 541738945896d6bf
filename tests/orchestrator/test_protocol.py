"""Frames, messages, the router's manners with strangers, and CURVE."""

from __future__ import annotations

import asyncio
import threading
import uuid

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.errors import ConfigError, NodeLost, ProtocolError
from orchestrator.protocol.frames import OtherProtocolVersion, decode, encode
from orchestrator.protocol.messages import (
    ANY_MESSAGE,
    PROTOCOL_VERSION,
    AbortSend,
    Completed,
    GetStatus,
    Heartbeat,
    Hello,
    Manifest,
    Progress,
    SubmitJob,
    TensorSpec,
    TrainMergedJob,
    batch_specs,
)
from orchestrator.protocol.node_link import NodeLink
from orchestrator.router import ControlRouter, check_bind_address

TOKEN = "t" * 32


def hello(**kwargs):
    return Hello(**{"role": "client", "node_id": "c1", "incarnation": uuid.uuid4().hex, "run_token": TOKEN, **kwargs})


def test_round_trip_with_buffers():
    specs = batch_specs(num_sequences=2, num_tokens=5)
    message = SubmitJob(job_id="j", job=TrainMergedJob(tensors=specs))
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


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://192.168.1.4:0", "ipc:///tmp/x", "127.0.0.1:5"])
def test_off_loopback_needs_keys(endpoint):
    with pytest.raises(ConfigError):
        check_bind_address(endpoint, has_keys=False)
    check_bind_address("tcp://127.0.0.1:0", has_keys=False)
    check_bind_address("tcp://0.0.0.0:0", has_keys=True)


def with_router(test, **kwargs):
    """Run `test(router, received)` in a loop with a bound router; `received` collects what clients sent."""

    async def go():
        received = []

        async def on_client(peer, envelope):
            received.append(envelope.message)

        router = ControlRouter(endpoint="tcp://127.0.0.1:0", run_token=TOKEN, on_client=on_client, **kwargs)
        await router.start()
        try:
            await asyncio.wait_for(test(router, received), 30)
        finally:
            await router.close()

    asyncio.run(go())


def test_a_stranger_and_garbage_do_no_harm():
    async def test(router, received):
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.RCVTIMEO, 20_000)  # a thread that waits for ever would hold up the end of the loop
        raw.connect(router.endpoint)
        for frames in ([b"x"], [b"splice/%d" % PROTOCOL_VERSION, b"a", b"b"], [b""] * 9, encode(hello(run_token="other"))):
            raw.send_multipart(frames)
        raw.send_multipart([b"splice/999", b"Hello", b""])
        kinds = []
        for _ in range(2):
            frames = await asyncio.to_thread(raw.recv_multipart)
            kinds.append(decode(frames).message)
        assert [m.kind for m in kinds] == ["Rejected", "Rejected"]
        assert "token" in kinds[0].reason and "splice/3" in kinds[1].reason
        link = await asyncio.to_thread(NodeLink(endpoint=router.endpoint, hello=hello()).start)
        link.send(GetStatus())
        while not received:
            await asyncio.sleep(0.01)
        assert sum(router.dropped.values()) == 4 and len(router.dropped) == 1
        await asyncio.to_thread(link.close)
        context.destroy(linger=0)

    with_router(test)


def test_a_wrong_token_is_told_why():
    async def test(router, _):
        with pytest.raises(ConfigError, match="token"):
            await asyncio.to_thread(NodeLink(endpoint=router.endpoint, hello=hello(run_token="no")).start)

    with_router(test)


def test_a_node_whose_link_is_stuck_gives_up():
    """It beats no more, so it is lost to the orchestrator; its launcher is to start another."""
    go_on = threading.Event()

    async def test(router, _):
        urgent = {"AbortSend": lambda _: go_on.wait(25)}
        node = NodeLink(endpoint=router.endpoint, hello=hello(role="trainer", node_id="stuck"), urgent=urgent, lost_after_s=2.0)
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


def make_keys(folder) -> int:
    from typer.testing import CliRunner

    from orchestrator.cli import app

    return CliRunner().invoke(app, ["keys", str(folder)]).exit_code


def test_a_peer_that_reads_nothing_is_not_waited_for():
    """Ctrl-Z at a client that watches a run must not stop the run."""

    async def test(router, _):
        with zmq.Context() as context, context.socket(zmq.DEALER) as suspended:
            suspended.identity, suspended.linger, suspended.rcvhwm = b"suspended", 0, 1
            suspended.connect(router.endpoint)
            suspended.send_multipart(encode(hello(node_id="suspended")))
            while not router.is_connected("suspended"):
                await asyncio.sleep(0.01)

            async def fill() -> None:
                while True:
                    await router.send("suspended", Progress(request_id="j", sequence=0, phase="x" * 60_000))

            with pytest.raises(NodeLost, match="reads nothing"):
                await fill()

    with_router(test)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_port_in_use_is_said_plainly(has_keys, tmp_path):
    if has_keys:
        assert make_keys(tmp_path / "keys") == 0

    async def test(router, _):
        async def nobody(peer, envelope): ...

        keys = tmp_path / "keys" if has_keys else None
        second = ControlRouter(endpoint=router.endpoint, run_token=TOKEN, on_client=nobody, curve_dir=keys)
        with pytest.raises(ConfigError, match="another port"):
            await second.start()

    with_router(test)


def test_curve_lets_in_only_those_with_a_key(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    assert make_keys(keys) == 0
    assert make_keys(keys) == 2  # never overwritten

    async def test(router, received):
        plain = NodeLink(endpoint=router.endpoint, hello=hello(node_id="plain"))
        with pytest.raises(NodeLost):
            await asyncio.to_thread(plain.start, timeout_s=1.5)
        monkeypatch.setenv("SPLICE_CURVE_DIR", str(keys))
        link = await asyncio.to_thread(NodeLink(endpoint=router.endpoint, hello=hello(node_id="keyed")).start)
        await asyncio.to_thread(link.close)
        assert set(router.peers) == {"keyed"}

    with_router(test, curve_dir=keys)
