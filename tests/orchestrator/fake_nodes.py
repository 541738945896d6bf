"""Nodes that speak the real protocol over real sockets and hold three numbers instead of a model.

They stand in for GPUs only where the orchestrator itself is under test; real nodes are in
tests/e2e.
"""

from __future__ import annotations

import array
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.errors import NodeLost
from orchestrator.protocol.messages import (
    ErrorCode,
    Hello,
    Manifest,
    Ready,
    Rendezvous,
    RunJob,
    TensorSpec,
    WireChunk,
    WireLayout,
)
from orchestrator.protocol.node_link import NodeLink

MANIFEST = Manifest(
    tensors=tuple(TensorSpec(name=f"w{i}", dtype="float32", shape=(4, 2)) for i in range(3))
)


def digests(values: list[int]) -> dict[str, object]:
    """A terminal message's tensors and buffers."""
    spec = TensorSpec(name="digests", dtype="int64", shape=(len(values),))
    return {"tensors": (spec,), "buffers": [array.array("q", values).tobytes()]}


def whole_layout(count: int) -> dict[str, object]:
    """As a node answers: manifest order, in one chunk."""
    return WireLayout(chunks=(WireChunk(kind="reload", tensors=tuple(range(count))),)).model_dump()


def soon(what: Callable[[], bool], timeout_s: float = 40) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def asked(message: Any) -> Any:
    """What a node is asked; the fields of a `RunJob` and of its job in one."""
    if not isinstance(message, RunJob):
        return message
    return SimpleNamespace(**{**vars(message), **vars(message.job)})


class FakeNode:
    """Answers requests by `on_<Kind>` methods on a thread; `script[kind]` replaces one answer,
    once.
    """

    role = "trainer"
    detail: dict[str, object] = {"workers": 1, "base_url": "http://none"}  # noqa: RUF012 - replaced, never changed
    packages: dict[str, str] = {}  # noqa: RUF012 - the same

    def __init__(self, *, endpoint: str, node_id: str, token: str, start_id: str = "") -> None:
        self.log: list[str] = []
        self.script: dict[str, Callable[[object], None]] = {}
        self.aborted = threading.Event()
        hello = Hello(
            role=self.role,
            node_id=node_id,
            incarnation=uuid.uuid4().hex,
            run_token=token,
            start_id=start_id,  # type: ignore[arg-type]
            packages=self.packages,
        )
        urgent = {
            "AbortSend": self._on_abort,
            "AbortUpdate": self._on_abort,
            "Hello": self._on_forgotten,
        }
        self.times_forgotten = 0
        self.link = NodeLink(endpoint=endpoint, hello=hello, urgent=urgent, lost_after_s=60)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> FakeNode:
        self.link.start(timeout_s=60)
        self.link.send(Ready(node_id=self.link.node_id, detail=self.detail))
        self._thread.start()
        return self

    def die(self) -> None:
        """Vanish without a word, as after SIGKILL. What it has sent may still leave."""
        self._stop.set()
        self._thread.join(timeout=5)
        self.link.close(flush_s=0.2)

    stop = die

    def _on_abort(self, message: object) -> None:
        self.log.append(type(message).__name__)
        self.aborted.set()

    def _on_forgotten(self, _: object) -> None:
        self.times_forgotten += 1

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                envelope = self.link.recv(timeout_s=0.05)
            except NodeLost:  # closed by a test
                return
            if envelope is None:
                continue
            message = asked(envelope.message)
            kind = message.kind
            self.log.append(kind)
            if kind == "Shutdown":
                return
            handler = self.script.pop(kind, None) or getattr(self, f"on_{kind}", self._done)
            handler(message)

    def _done(self, message: object, **result: object) -> None:
        self.link.complete(message.request_id, result=result)  # type: ignore[attr-defined]

    def refuse(self, message: object, *, code: ErrorCode = ErrorCode.PLAN_REFUSED) -> None:
        """Answer Failed."""
        self.link.fail(
            message.request_id, code=code, phase="test", message="told to", remedy="nothing"
        )  # type: ignore[attr-defined]


class FakeLauncher(FakeNode):
    """`splice trainer` in memory mode exit: starts and ends a fake trainer."""

    role = "launcher"
    detail: dict[str, object] = {"memory": "exit"}  # noqa: RUF012

    def __init__(self, *, make: Callable[[], FakeTrainer], **kwargs: str) -> None:
        super().__init__(**kwargs)
        self.make, self.trainer = make, None
        self.causes: list[str] = []
        self.counted: list[bool] = []
        """What the trainer did when it ended, as the orchestrator says."""

    def on_EndedDuring(self, message) -> None:
        self.causes.append(message.cause)
        self.counted.append(message.is_counted)

    def on_StartTrainer(self, message) -> None:
        self.trainer = self.trainer or self.make()
        self._done(message)

    def on_StopTrainer(self, message) -> None:
        if self.trainer is not None:
            if message.grace_s:  # its Shutdown comes by another socket than this
                self.trainer._thread.join(5)
            self.trainer.die()
        self.trainer = None
        self._done(message)


class FakeTrainer(FakeNode):
    """`weights` are the digests it sends; a training step adds 1 to each."""

    role = "trainer"

    def __init__(self, **kwargs: str) -> None:
        super().__init__(**kwargs)
        self.weights = [10, 20, 30]
        self.saved: dict[str, list[int]] = {}
        self.pending = 0
        self.messages: list[object] = []
        self.manifest = MANIFEST
        self.part: tuple[int, ...] = ()
        self.layouts: list[WireLayout] = []
        self.remembered: tuple[int, list[int]] | None = None
        self.changes: list[int] = []
        """What `EncodeChanges` found: a replica adds it to what it has."""
        self.code_bytes = 8
        self.recalls = False
        """Whether it reads what another process has sent."""
        self.why_no_edges: str | None = None
        self.why_not: str | None = None
        """Why it cannot send in another order than the manifest's."""
        """What it was asked to send in."""

    def on_SaveCheckpoint(self, message) -> None:
        self.saved[message.checkpoint_dir] = list(self.weights)
        self._write(message)
        self._done(message, version=message.version)

    def _write(self, message) -> None:
        self.messages.append(message)
        Path(message.checkpoint_dir).mkdir(parents=True, exist_ok=True)
        (Path(message.checkpoint_dir) / "weights").write_text(" ".join(map(str, self.weights)))

    def on_Forward(self, message) -> None:
        self.messages.append(message)
        count = message.tensors[0].numel
        values = array.array("f", range(count)).tobytes()
        self.link.complete(
            message.request_id,
            result={"seconds": {"forward": 0.1}},
            tensors=tuple(
                TensorSpec(name=n, dtype="float32", shape=(count,)) for n in ("logprobs", "entropy")
            ),
            buffers=[values, bytes(4 * count)],
        )

    def on_ForwardBackward(self, message) -> None:
        self.messages.append(message)
        self.pending += 1
        result = {"metrics": {"loss": 1.0}, "pending_batches": self.pending}
        if not message.returns_logprobs:
            self.link.complete(message.request_id, result=result)
            return
        count = message.tensors[0].numel
        self.link.complete(
            message.request_id,
            result=result,
            tensors=(TensorSpec(name="logprobs", dtype="float32", shape=(count,)),),
            buffers=[array.array("f", range(count)).tobytes()],
        )

    def on_OptimStep(self, message) -> None:
        self.messages.append(message)
        self._step(self.pending)
        self.link.complete(message.request_id, result={"metrics": {"loss": 1.0}})

    def _step(self, count: int) -> None:
        """Only what has an adapter is ever written."""
        changed = range(3) if self.manifest.changed is None else self.manifest.changed
        self.weights = [w + count * (i in changed) for i, w in enumerate(self.weights)]
        self.pending = 0

    def on_ExportHf(self, message) -> None:
        self.messages.append(message)
        self.link.complete(
            message.request_id,
            result={"output_dir": message.output_dir, "files": ["model.safetensors"]},
        )

    def on_TrainMerged(self, message) -> None:
        self._step(1 + self.pending)
        self._write(message)
        self.link.progress(message.request_id, "training")
        self.link.complete(
            message.request_id, result={"metrics": {"loss": 1.0}, "seconds": {"train": 0.5}}
        )

    def _load(self, message) -> int:
        file = Path(message.checkpoint_dir) / "weights"
        self.weights = list(map(int, file.read_text().split())) if file.exists() else [10, 20, 30]
        dropped, self.pending = self.pending, 0
        return dropped

    def on_LoadCheckpoint(self, message) -> None:
        dropped = self._load(message)
        self.link.complete(
            message.request_id,
            result={"version": 0, "client_state": {}, "dropped_batches": dropped},
        )

    def on_NewAdapter(self, message) -> None:
        self.messages.append(message)
        dropped, self.pending = self.pending, 0
        result = {"rank": message.rank, "adapter_changed": True, "dropped_batches": dropped}
        self.link.complete(message.request_id, result=result)

    def on_PlanPublication(self, message) -> None:
        self.link.complete(message.request_id, result=self.manifest.model_dump())

    def on_UseLayout(self, message) -> None:
        self.part = message.part or ()
        self.layouts.append(message.layout)
        is_manifest_order = message.layout.model_dump() == whole_layout(len(self.part) or 3)
        result: dict[str, Any] = {"why_not": None if is_manifest_order else self.why_not}
        if message.keeps is not None:
            result |= {"why_not": self.why_no_edges, "tables": [f"to {k}" for k in message.keeps]}
        self.link.complete(message.request_id, result=result)

    def on_OpenTransferGroup(self, message) -> None:
        where = {
            node: Rendezvous(transport="tcp", host="127.0.0.1", port=1, world_size=2).model_dump()
            for node in message.replicas
        }
        self.link.progress(message.request_id, "listening", rendezvous=where)
        self._done(message)

    def on_EncodeChanges(self, message) -> None:
        self.messages.append(message)
        came = self.part if message.changed_only else range(3)
        number, olds = self.remembered or (message.base_version, [])
        is_recalled = not olds and self.recalls
        if is_recalled:
            olds = list(map(int, (Path(message.base_dir) / "weights").read_text().split()))
        proof = digests([olds[i] for i in came]) if olds and (is_recalled or message.prove) else {}
        if not olds or number != message.base_version:
            self._done(message, why_not=f"version {message.base_version} is not remembered")
            return
        self.changes = [new - old for new, old in zip(self.weights, olds, strict=True)]
        count = sum(self.changes[i] != 0 for i in came)
        why = None if self.code_bytes <= message.most_bytes else "too many bytes"
        result = {"why_not": why, "nbytes": self.code_bytes, "elements": count}
        self.link.complete(message.request_id, result=result, **proof)

    def on_SendWeights(self, message) -> None:
        self.messages.append(message)
        sent = [self.weights[i] for i in self.part] if message.changed_only else self.weights
        self.remembered = (message.version, list(self.weights)) if message.remember else None
        self.link.complete(message.request_id, result={"seconds": {"wire": 0.1}}, **digests(sent))


class FakeReplica(FakeNode):
    """`live` are the digests it reads back; `source` is where they come from (the trainer's
    weights).
    """

    role = "inference"

    def __init__(self, *, source: Callable[[], list[int]], **kwargs: str) -> None:
        super().__init__(**kwargs)
        self.changes: Callable[[], list[int]] = list
        """The trainer's changes."""
        self.source, self.served, self.live = source, [], [0, 0, 0]
        self.flip, self.restarts = False, 0
        self.pause_s = 0.0
        self.left_alias = False
        self.part: tuple[int, ...] | None = None
        """What it completes the changed tensors to; None: it does not take a part."""
        self.layout: dict[str, object] = whole_layout(3)
        """The order in which it wants everything."""
        self.part_layout: dict[str, object] | None = None
        """Of the part; None: the manifest's order."""
        self.shared: dict[str, object] | None = None
        """The layout in order "shared". None: its own."""
        self.keeps: list[str] | None = None
        """What each worker keeps, in order "edges"."""
        self.tables: list[tuple[bool, tuple[str, ...]]] = []
        """What `UseEdges` brought."""
        self.joins: list[tuple[int, list[int], bool]] = []
        """Ports of the trainer and of the replica before, and whether it passes on."""
        self.orders: list[str] = []
        """That were asked for."""
        self.bases: list[int | None] = []
        self.drains: list[float] = []
        """How long requests for the old version may continue, in each pause."""
        self.why_not: str | None = None
        """Why nothing can be received next to the live numbers."""
        self.shadow: dict[int, int] = {}
        self.flip_swap = False
        self.serves: int | None = None
        """The version that it says it serves."""
        self.committed_by_itself: list[int] = []
        self.unconfirmed: int | None = None
        self.canary: list[float] | None = None
        """Log-probs that it answers a canary with; None: it was serving."""

    def restarted(self) -> None:
        """Say that the server behind it was started again."""
        self.restarts += 1
        self.serves = None
        self.link.send(
            Ready(node_id=self.link.node_id, detail={**self.detail, "restarted": self.restarts})
        )

    def stand_still(self, message) -> None:
        """Say all that is said before the first tensor is written."""
        for phase in ("pausing", "paused", "applying"):
            self.link.progress(message.request_id, phase)

    def fail_transfers(self) -> None:
        """Refuse every transfer once tensors are written, until the script is cleared."""

        def fail(message) -> None:
            self.script["ReceiveWeights"] = fail
            self.stand_still(message)
            self.refuse(message, code=ErrorCode.TRANSFER_FAILED)

        self.script["ReceiveWeights"] = fail

    def on_PrepareUpdate(self, message) -> None:
        self.orders.append(message.order)
        own = self.layout, self.part_layout
        shared = own if self.shared is None else (self.shared, None)
        in_order = whole_layout(3), None
        orders = {"edges": shared, "own": own, "shared": shared, "manifest": in_order}
        (layout, part_layout), changed = orders[message.order], None
        if self.part is not None:
            changed = {"tensors": self.part, "layout": part_layout or whole_layout(len(self.part))}
        result = {"layout": layout, "changed": changed, "serves": self.serves}
        if message.order == "edges":
            result["keeps"] = self.keeps
        self.link.complete(message.request_id, result=result)

    def on_OpenRelay(self, message) -> None:
        port = 10 + int(self.link.node_id.rpartition("-")[2])
        place = Rendezvous(transport="tcp", host=message.towards, port=port, world_size=2)
        self.link.complete(message.request_id, result={"rendezvous": [place.model_dump_json()]})

    def on_JoinTransferGroup(self, message) -> None:
        self.joins.append(
            (message.rendezvous.port, [r.port for r in message.before], message.relays)
        )
        self.link.complete(message.request_id)

    def on_UseEdges(self, message) -> None:
        self.tables.append((message.changed_only, message.tables))
        self.link.complete(message.request_id)

    def on_PrepareShadow(self, message) -> None:
        why = self.why_not if self.served else "nothing is served"
        self.link.complete(message.request_id, result={"why_not": why})

    def on_SwapWeights(self, message) -> None:
        self.stand_still(message)
        self.drains.append(message.drain_s)
        for i, value in self.shadow.items():
            self.live[i] = value ^ self.flip_swap
        self.flip_swap = False
        live = digests([self.live[i] for i in self.shadow])
        is_committed = live["buffers"] == [message.commit_if]
        if is_committed:
            self.committed_by_itself.append(message.version)
            self.unconfirmed = self.serves = message.version
            self.served.append((message.version, list(self.live)))
        self.link.complete(
            message.request_id,
            result={"seconds": {"apply": 0.01}, "committed": is_committed},
            **live,
        )

    def on_ReceiveWeights(self, message) -> None:
        if message.mode == "shadow":
            self._receive_beside(message)
            return
        self.stand_still(message)
        self.drains.append(message.drain_s)
        self.bases.append(message.base_version)
        came = (self.part or ()) if message.is_part else range(3)
        for i in came:
            self.live[i] = self._new(message, i)
        if self.flip:
            self.live[1] ^= 1
            self.flip = False
        live = digests([self.live[i] for i in came])
        seconds = {"apply": 0.2, "pause": self.pause_s}
        self.link.complete(message.request_id, result={"seconds": seconds}, **live)

    def _new(self, message, i) -> int:
        return self.live[i] + self.changes()[i] if message.elements else self.source()[i]

    def _receive_beside(self, message) -> None:
        self.bases.append(message.base_version)
        came = (self.part or ()) if message.is_part else range(3)
        self.shadow = {i: self._new(message, i) ^ (self.flip and i == 1) for i in came}
        self.flip = False
        self.link.complete(
            message.request_id,
            result={"seconds": {"wire": 0.2}},
            **digests(list(self.shadow.values())),
        )

    def on_LeaveAlias(self, message) -> None:
        self.left_alias, self.serves = True, None
        self._done(message)

    def on_CheckCanary(self, message) -> None:
        if self.canary is None:
            self.link.complete(message.request_id, result={"skipped": "it was serving"})
            return
        spec = TensorSpec(name="logprobs", dtype="float32", shape=(len(self.canary),))
        self.link.complete(
            message.request_id, tensors=(spec,), buffers=[array.array("f", self.canary).tobytes()]
        )

    def on_CommitUpdate(self, message) -> None:
        self.left_alias = False
        if self.unconfirmed != message.version:
            self.served.append((message.version, list(self.live)))
        self.unconfirmed, self.serves = None, message.version
        self._done(message)
