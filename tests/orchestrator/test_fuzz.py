"""Messages of every kind, made from their own schemas and then spoilt: a decoder raises
ProtocolError or nothing, and no peer ends an orchestrator.

SPLICE_FUZZ_EXAMPLES says how many, for each test (a few hundred by default; a hundred thousand
takes an hour).
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import resource
import threading
import time
import uuid
from typing import Any, get_args

import msgpack
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from orchestrator.control.router import MAY_SEND
from orchestrator.errors import JobFailed, ProtocolError
from orchestrator.protocol import messages
from orchestrator.protocol.frames import (
    _LARGER_BODIES,
    MAX_BODY_BYTES,
    decode,
    encode,
    from_wire,
    to_wire,
)
from orchestrator.protocol.messages import ANY_MESSAGE, AnyMessage, Hello, InitialSync
from splice.client.clients import SpliceClient
from tests.forked import Forked
from tests.orchestrator.fake_nodes import FakeReplica, FakeTrainer
from tests.orchestrator.raw import VERSION, raw_peer
from tests.orchestrator.run import BUFFERS, JOB, TOKEN
from tests.orchestrator.serving import endpoint_in, start_serve

EXAMPLES = int(os.environ.get("SPLICE_FUZZ_EXAMPLES", "400"))
KINDS: dict[str, type[BaseModel]] = {kind.__name__: kind for kind in get_args(AnyMessage)}
MANY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
RSS_BYTES = 200 * 2**20
"""An orchestrator may grow by this much, whatever it is sent: a few bodies of the largest kind, and
what the allocator keeps.
"""

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)


def nested(depth: int) -> Any:
    """Lists and dicts in turn."""
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


NASTY = st.one_of(
    PLAIN,
    st.builds(nested, st.sampled_from([1, 31, 32, 33, 300])),
    st.sampled_from(
        [
            math.nan,
            math.inf,
            -math.inf,
            -0.0,
            2**63,
            2**64 - 1,
            -(2**63),
            "",
            "\x00",
            "\ud7ff",
            "a" * 5000,
            b"\xff" * 5000,
        ]
    ),
    st.builds(lambda n: [0] * n, st.sampled_from([0, 1, 17, 100_000])),
    st.builds(lambda n: {str(i): i for i in range(n)}, st.sampled_from([0, 1, 65, 10_000])),
    st.recursive(
        PLAIN,
        lambda one: (
            st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=5), one, max_size=4)
        ),
        max_leaves=10,
    ),
)


def valid(schema: dict[str, Any], defs: dict[str, Any], dice: random.Random, depth: int = 0) -> Any:
    """A value that a JSON schema allows, as far as it says."""
    if "$ref" in schema:
        return valid(defs[schema["$ref"].rpartition("/")[2]], defs, dice, depth + 1)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return valid(dice.choice(schema[several]), defs, dice, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return dice.choice(schema["enum"])
    low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
    make = {
        "string": lambda: dice.choice(["a", "trainer", "x" * schema.get("maxLength", 9)])[
            : schema.get("maxLength", 99)
        ],
        "integer": lambda: int(low) + dice.choice([0, 1, 2, 100]),
        "number": lambda: float(low) + dice.choice([0.5, 1.0, 1e9]),
        "boolean": lambda: dice.random() < 0.5,
        "null": lambda: None,
        "array": lambda: [
            valid(schema.get("items", {}) or {}, defs, dice, depth + 1)
            for _ in range(max(schema.get("minItems", 0), dice.choice([0, 1, 3])))
        ],
        "object": lambda: {
            name: valid(one, defs, dice, depth + 1)
            for name, one in schema.get("properties", {}).items()
            if name in schema.get("required", ()) or name == "kind" or dice.random() < 0.6
        },
    }
    return make.get(schema.get("type", "null"), lambda: dice.choice([0, "a", None, {}]))()


SCHEMAS = {name: kind.model_json_schema() for name, kind in KINDS.items()}


def places(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside, six levels down at most."""
    if len(where) > 6:
        return [where]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [where, *(path for key, one in items for path in places(one, (*where, key)))]


def spoil(body: Any, dice: random.Random, nasty: Any) -> Any:
    """Something else at one place, or one thing missing, or one too many."""
    path = dice.choice(places(body))
    if not path:
        return nasty if dice.random() < 0.1 else {**body, "more": nasty}
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    if isinstance(parent, dict) and dice.random() < 0.2:
        del parent[path[-1]]
    else:
        parent[path[-1]] = nasty
    return body


@st.composite
def bodies(draw: Any, kinds: tuple[str, ...] = tuple(sorted(KINDS))) -> tuple[str, Any]:
    """(kind, body): valid, or spoilt once or twice."""
    kind, dice = draw(st.sampled_from(kinds)), random.Random(draw(st.integers(0, 2**32)))
    body = valid(SCHEMAS[kind], SCHEMAS[kind].get("$defs", {}), dice)
    for _ in range(draw(st.integers(0, 2))):
        if isinstance(body, dict):
            body = spoil(body, dice, draw(NASTY))
    return kind, body


def packed(body: Any) -> bytes:
    """As msgpack, integers too long for it as text."""
    return msgpack.packb(body, use_bin_type=True, default=str, strict_types=False)


def opened(frames: list[bytes], **kinds: Any) -> AnyMessage | None:
    """What came of it; any other exception than ProtocolError fails the test."""
    try:
        return decode(from_wire(frames, **kinds)).message
    except ProtocolError as error:
        said = str(error)
    assert len(said) < 2000, "an error as long as what was sent"
    return None


# ------------------------------------------------------------ decoders


def test_what_is_made_from_the_schemas_is_mostly_valid():
    """Else the tests below would knock at the front door only."""
    seen = dict.fromkeys(KINDS, 0)
    for kind, schema in SCHEMAS.items():
        for seed in range(60):
            body = valid(schema, schema.get("$defs", {}), random.Random(seed))
            try:
                ANY_MESSAGE.validate_python(body)
            except ValueError:
                continue
            seen[kind] += 1
    assert [kind for kind, count in seen.items() if not count] == []


@MANY
@given(bodies(), st.lists(st.binary(max_size=64), max_size=3))
def test_a_spoilt_message_is_refused_or_understood(kind_and_body, buffers):
    kind, body = kind_and_body
    message = opened([bytes(f) for f in to_wire([VERSION, kind.encode(), packed(body), *buffers])])
    if message is not None:  # what is understood can be passed on
        assert (
            decode(from_wire([bytes(f) for f in to_wire(encode(message, buffers))])).message.kind
            == kind
        )


@MANY
@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(0, 2))
def test_any_frames(frames, headed):
    heads = [[], [VERSION], [VERSION, b"SubmitJob"]][headed]
    opened([*heads, *frames])


@MANY
@given(bodies(), st.lists(NASTY, max_size=4), st.integers(-3, 3))
def test_lengths_that_lie(kind_and_body, lengths, off_by):
    kind, body = kind_and_body
    data = packed(body)
    for said in (lengths, [len(data) + off_by], [len(data), 2**62], nested(300)):
        opened([VERSION, kind.encode(), packed(said), data])


@MANY
@given(bodies(), st.integers(0, 2**16), st.integers(0, 255))
def test_a_flipped_byte(kind_and_body, at, value):
    kind, body = kind_and_body
    data = bytearray(packed(body))
    data[at % len(data)] = value
    opened([bytes(f) for f in to_wire([VERSION, kind.encode(), bytes(data)])])


@pytest.mark.parametrize("length", [2**31 - 1, 2**32 - 1])
def test_enormous_arrays_that_are_only_announced(length):
    """A few bytes that promise billions of elements are not a reason to make room for them."""
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"):
        assert (
            opened([VERSION, b"Hello", msgpack.packb([5]), head + length.to_bytes(4, "big")])
            is None
        )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 50 * 1024


@pytest.mark.parametrize("depth", [40, 511, 512, 1100, 30_000])
@pytest.mark.parametrize("one", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
def test_a_body_that_is_only_depth(one, depth):
    deep = one * depth + b"\xc0"
    for where in (deep, b"\x82\xa4kind\xa5Ready\xa6detail" + deep):
        assert opened([bytes(f) for f in to_wire([VERSION, b"Ready", where])]) is None


# ------------------------------------------------------------ peers that are let in


class Bad(threading.Thread):
    """A peer of one role that says valid-ish things until it is told to stop."""

    def __init__(self, endpoint: str, role: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.role, self.dice, self.stop, self.sent = (
            endpoint,
            role,
            random.Random(seed),
            threading.Event(),
            0,
        )
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.visit()
        except zmq.Again:
            pass  # it reads no more from us: that is its right
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.problem = error

    def visit(self) -> None:
        """One connection: a Hello, then what its role may send, other roles' messages and what
        answers to others' requests look like.
        """
        dice, node_id = self.dice, f"bad-{self.role}-{self.dice.randrange(3)}"
        hello = Hello(
            role=self.role, node_id=node_id, incarnation=uuid.uuid4().hex, run_token=TOKEN
        )
        kinds = [*sorted(MAY_SEND[self.role]), *dice.sample(sorted(KINDS), 3)]
        with raw_peer(self.endpoint, token=TOKEN, hello=hello) as peer:
            for _ in range(dice.randrange(5, 60)):
                if self.stop.is_set():
                    return
                kind = dice.choice([k for k in kinds if k != "StopRun"])
                body = valid(SCHEMAS[kind], SCHEMAS[kind].get("$defs", {}), dice)
                if dice.random() < 0.5:
                    body = spoil(
                        body,
                        dice,
                        dice.choice(
                            [
                                nested(400),
                                2**63,
                                math.nan,
                                "a" * 3000,
                                [0] * 5000,
                                None,
                                -1,
                                {},
                                b"\x00",
                            ]
                        ),
                    )
                if isinstance(body, dict) and body.get("kind") == "SubmitJob":
                    body["job_id"] = (
                        f"bad-{uuid.uuid4().hex[:8]}"  # or it would be one outcome for all
                    )
                    body["job"] = dice.choice(
                        [
                            {"kind": "OptimStep"},
                            {"kind": "Publish"},
                            {"kind": "SaveCheckpoint"},
                            5,
                        ]
                    )
                peer.send_body(kind, packed(body))
                self.sent += 1


@dataclasses.dataclass
class Served:
    process: Forked
    endpoint: str

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@pytest.fixture
def served(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = start_serve(tmp_path / "run", log=log)
    try:
        yield Served(process, endpoint_in(tmp_path / "run"))
        assert "Traceback" not in (tmp_path / "log").read_text(), "a defect was met, and survived"
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("role", ["client", "trainer", "inference", "launcher"])
def test_a_peer_that_says_anything_harms_nobody_else(served, role):
    """The orchestrator lives, its memory is bounded, and a client next to it gets its jobs done by
    nodes that behave.
    """
    began = served.rss
    trainer = FakeTrainer(endpoint=served.endpoint, node_id="trainer", token=TOKEN).start()
    replica = FakeReplica(
        source=lambda: trainer.weights, endpoint=served.endpoint, node_id="inference-0", token=TOKEN
    ).start()
    bad = [Bad(served.endpoint, role, seed) for seed in range(2)]
    try:
        with SpliceClient(endpoint=served.endpoint, run_token=TOKEN) as client:
            client.run(InitialSync(), timeout_s=60)
            for peer in bad:
                peer.start()
            until, done, blamed = time.monotonic() + EXAMPLES / 150, 0, list[str]()
            while time.monotonic() < until or done < 3:
                try:
                    client.run(JOB, buffers=BUFFERS, timeout_s=60)
                    done += 1
                except JobFailed as error:
                    # A bad replica that says Ready is one: the publication fails by it, and names
                    # it.
                    blamed.append(f"{role} {error.node}")
                if role == "inference":
                    break
            assert all(who.startswith("inference ") and "trainer" not in who for who in blamed), (
                blamed
            )
            for peer in bad:
                peer.stop.set()
            for peer in bad:
                peer.join(30)
            assert served.process.poll() is None, "it ended"
            assert client.status(timeout_s=30).name == "m"
        assert [peer.problem for peer in bad] == [None, None] and sum(
            peer.sent for peer in bad
        ) > 20
        assert served.rss - began < RSS_BYTES
    finally:
        for node in (trainer, replica):
            node.die()


def test_every_kind_has_a_limit():
    assert (
        set(_LARGER_BODIES) <= set(KINDS)
        and max(_LARGER_BODIES.values()) <= 32 * 2**20
        and MAX_BODY_BYTES <= 2**16
    )
    assert {name for kinds in MAY_SEND.values() for name in kinds} <= set(
        KINDS
    ) and messages.MAX_DEPTH <= 64
