"""A fake trainer or replica as a process: the real protocol, a real TCP connection for the weights,
a hash instead of a model.

The trainer's state is a hash chain over the batches it was trained on, so that two histories never
look alike. A replica follows the rules of `inference_node.node.node`: what was not committed is
given up on an abort, and what may be half written serves nothing.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import socket
import struct
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import NodeLost
from orchestrator.processes.restarts import EXIT_AFRESH
from orchestrator.protocol import node_link
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import ErrorCode, Hello, Manifest, Ready, Rendezvous, TensorSpec
from orchestrator.protocol.node_link import NodeLink
from tests.chaos.clocks import stepped_clocks
from tests.chaos.history import History
from tests.chaos.traps import Traps
from tests.orchestrator.fake_nodes import asked, digests, whole_layout

TENSORS = 6
CHANGED = (0, 2, 4)
PAD_BYTES = 16 * 1024
"""Between two numbers on the wire, so that there is a middle to be cut in."""
BASE = "0" * 16
MODEL = "model"
"""The base weights, a file in the run's folder, whose content is the first state."""
POISON, LONG = 1, 2
"""Second token of a batch that ends the trainer, and of one that does not fit into its memory."""
JOB_IN_ID = re.compile(r"job-[0-9a-f]{12}")


def state_after(state: str, batches: list[str]) -> str:
    """One optimizer step."""
    return hashlib.sha256(f"{state} {' '.join(batches)}".encode()).hexdigest()[:16]


def values_of(state: str, changed: tuple[int, ...] | None) -> list[int]:
    """The weights: int64 [TENSORS]; those that are never trained are the same in every state."""

    def value(index: int) -> int:
        of = state if changed is None or index in changed else "base"
        return int.from_bytes(hashlib.sha256(f"{of} {index}".encode()).digest()[:7], "big")

    return [value(index) for index in range(TENSORS)]


def content_of(values: list[int]) -> str:
    """A name for these weights."""
    return hashlib.sha256(array.array("q", values).tobytes()).hexdigest()[:16]


def logprobs_of(values: list[int], count: int) -> bytes:
    """What this model says of any prompt."""
    return array.array("f", [-(sum(values) % 997) / 100 - n for n in range(count)]).tobytes()


class Refused(Exception):
    """The request is answered `Failed`."""

    def __init__(self, code: ErrorCode, why: str, *, steps_taken: int = 0) -> None:
        super().__init__(why)
        self.code, self.steps_taken = code, steps_taken


class OutOfMemory(Exception):
    """An allocation failed."""


class NoisyLink(NodeLink):
    """Now and then a message, sent or received, is doubled, held back, or overtaken by the next
    one.
    """

    def __init__(
        self, *, noise: float, dice: random.Random, on_end: Callable[[Any], None], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._noise, self._dice, self._on_end = noise, dice, on_end
        self._late_out: deque[tuple[float, list[Any]]] = deque()
        self._late_in: deque[tuple[float, list[bytes]]] = deque()

    def send(self, message: Any, buffers: Any = ()) -> None:
        if message.kind in ("Completed", "Failed"):
            self._on_end(message)
        super().send(message, buffers)

    def _disturbed(self, late: deque[Any], frames: Any, then: Callable[[Any], Any]) -> Any:
        while late and late[0][0] < time.monotonic():
            then(late.popleft()[1])
        chance = self._dice.random()
        if chance < self._noise / 2:
            late.append((time.monotonic() + self._dice.uniform(0.0, 0.5), frames))
            return True
        if chance < self._noise:
            then(frames)
        return then(frames)

    def _send_frames(self, socket: Any, frames: list[Any]) -> bool:  # type: ignore[override]
        return self._disturbed(self._late_out, frames, lambda f: NodeLink._send_frames(socket, f))

    def _on_frames(self, socket: Any, frames: list[bytes]) -> None:
        self._disturbed(self._late_in, frames, lambda f: NodeLink._on_frames(self, socket, f))


class Node:
    """Answers requests by `on_<Kind>`, one at a time."""

    role: Any = ""
    detail: dict[str, object] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.id = given, given.node_id
        self.life = uuid.uuid4().hex[:8]
        self.history = History(given.folder / "history", f"{self.id}-{self.life}")
        self.dice = random.Random(f"{given.seed} {self.id} {given.life}")
        self.aborted_ids: set[str] = set()
        """Of requests that were aborted, perhaps before they were begun here."""
        self.more_traps: dict[str, Callable[[list[str]], None]] = {
            "clock": stepped_clocks(),
            "starve": self.starve,
        }
        self.traps = Traps(self.more_traps)
        self.memory_for: int | None = None
        """Allocations that succeed before one fails; None: all do."""
        self.is_spoilt = False
        """Nobody knows what it holds: it ends after its answer."""
        hello = Hello(
            role=self.role,
            node_id=self.id,
            incarnation=uuid.uuid4().hex,
            run_token=os.environ["SPLICE_RUN_TOKEN"],
            pid=os.getpid(),
        )
        urgent = {
            "AbortSend": self.on_abort,
            "AbortUpdate": self.on_abort,
            "Hello": self.on_forgotten,
        }
        self.link = NoisyLink(
            endpoint=given.endpoint,
            hello=hello,
            urgent=urgent,
            lost_after_s=60.0 / given.pace,
            noise=given.noise,
            dice=self.dice,
            on_end=self.on_end,
        )

    def run(self) -> int:
        """Until Shutdown (0), until the orchestrator has been silent for too long (3), or until a
        failure has spoilt it."""
        try:
            self.link.start(timeout_s=60)
            self.link.send(Ready(node_id=self.id, detail=self.detail))
            while True:
                envelope = self.link.recv(timeout_s=0.05)
                self.idle()
                if envelope is not None and envelope.message.kind == "Shutdown":
                    return 0
                if envelope is not None:
                    self.answer(envelope)
                if self.is_spoilt:
                    return EXIT_AFRESH
        except NodeLost as error:
            print(f"{self.id}: {error}", file=sys.stderr)
            return 3
        finally:
            self.link.close()

    def answer(self, envelope: Envelope) -> None:
        message = asked(envelope.message)
        self.traps.reach(f"{message.kind} before")
        time.sleep(self.dice.uniform(0.0, self.given.work_s))
        try:
            getattr(self, f"on_{message.kind}", self.done)(message, envelope.buffers)
        except Refused as why:
            self.link.fail(
                message.request_id,
                code=why.code,
                phase="chaos",
                message=str(why),
                remedy="nothing",
                steps_taken=why.steps_taken,
            )
        except OutOfMemory:
            self.link.fail(
                message.request_id,
                code=self.after_starving(message),
                phase="chaos",
                message="CUDA out of memory",
                remedy="nothing",
            )
        self.traps.reach(f"{message.kind} after")

    def done(self, message: Any, _buffers: Any = ()) -> None:
        self.link.complete(message.request_id)

    def starve(self, words: list[str]) -> None:
        """Have one of the next allocations fail."""
        self.memory_for = int(words[0])

    def allocate(self) -> None:
        """Where a real node takes memory on the GPU."""
        if self.memory_for is None:
            return
        left, self.memory_for = self.memory_for, self.memory_for - 1
        if left <= 0:
            self.memory_for = None
            raise OutOfMemory

    def after_starving(self, message: Any) -> ErrorCode:
        """Clean up after a request that had no memory. Returns the code of its failure."""
        raise NotImplementedError

    def idle(self) -> None:
        """Between two requests."""

    def on_end(self, message: Any) -> None:
        """Before an answer is sent."""

    def on_abort(self, message: Any) -> None:
        """On the link's thread."""

    def on_forgotten(self, message: Any) -> None:
        """On the link's thread."""


# ------------------------------------------------------------ the trainer


class Trainer(Node):
    """Its state, what is pending, and the sockets of the transfer groups."""

    role = "trainer"
    detail = {"memory": "resident"}  # noqa: RUF012

    def __init__(self, given: argparse.Namespace) -> None:
        self.model = (given.folder / MODEL).read_text()
        self.state, self.pending = self.model, list[str]()
        self.changed = CHANGED if given.changed_only else None
        self.part: tuple[int, ...] = ()
        self.remembered: tuple[int, list[int]] | None = None
        self.encoded: list[int] = []
        self.groups: dict[str, socket.socket] = {}
        self.under_way = ""
        self.answering: tuple[Any, list[str]] | None = None
        self.server = socket.create_server(("127.0.0.1", given.data_port))
        self.server.settimeout(0.02)
        self.given = given
        super().__init__(given)

    @property
    def values(self) -> list[int]:
        return values_of(self.state, self.changed)

    def answer(self, envelope: Envelope) -> None:
        """Note what the trainer held before the request."""
        self.answering = (asked(envelope.message), [self.state, *self.pending])
        super().answer(envelope)

    def on_end(self, message: Any) -> None:
        """What the request did, written down before anybody can hear of it."""
        if self.answering is None:  # refused unread
            return
        (request, before), self.answering = self.answering, None
        job = JOB_IN_ID.search(request.request_id)
        self.history.note(
            "ran",
            request=request.request_id,
            kind=request.kind,
            job=job and job[0],
            life=self.life,
            ended=message.kind,
            before=before,
            after=[self.state, *self.pending],
        )

    def batch(self, message: Any, buffers: Any) -> str:
        """Its number, which the client put into the tokens, if it may be trained on."""
        number, kind = struct.unpack_from("<ii", buffers[0])
        if kind == LONG:
            raise Refused(ErrorCode.TOO_LONG, "a sequence does not fit")
        self.link.progress(message.request_id, "training")
        if kind == POISON:
            time.sleep(0.2)  # until the progress has left
            os.kill(os.getpid(), signal.SIGKILL)
        self.allocate()
        return f"b{number}"

    def step(self, more: list[str]) -> None:
        self.allocate()
        after = state_after(self.state, self.pending + more)
        self.is_spoilt = True  # between the first weight and the last
        self.allocate()
        self.is_spoilt = False
        self.state, self.pending = after, []

    def after_starving(self, message: Any) -> ErrorCode:
        if message.kind == "SendWeights":
            self.leave()
            return ErrorCode.TRANSFER_FAILED
        if message.kind in ("Forward", "PlanPublication"):
            return ErrorCode.INTERNAL
        self.pending = []
        return ErrorCode.TRAINING_FAILED

    def save(self, message: Any, *, steps_taken: int = 0) -> None:
        """Durable in its folder: the file, then the rename."""
        folder, part = Path(message.checkpoint_dir), Path(f"{message.checkpoint_dir}.part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            (part / "state").write_text(self.state)
            (part / MODEL).write_text(self.model)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        except OSError as error:
            raise Refused(
                ErrorCode.CHECKPOINT_FAILED, str(error), steps_taken=steps_taken
            ) from error
        for old in message.delete_after:
            shutil.rmtree(old, ignore_errors=True)
        self.history.note(
            "made",
            folder=str(folder),
            version=message.version,
            state=self.state,
            content=content_of(self.values),
        )

    def on_SaveCheckpoint(self, message: Any, _: Any) -> None:
        self.save(message)
        self.link.complete(message.request_id, result={"version": message.version})

    def on_TrainMerged(self, message: Any, buffers: Any) -> None:
        self.step([self.batch(message, buffers)])
        self.save(message, steps_taken=1)
        self.link.complete(
            message.request_id, result={"metrics": {"loss": 1.0}, "seconds": {"train": 0.1}}
        )

    def on_TrainLora(self, message: Any, buffers: Any) -> None:
        self.step([self.batch(message, buffers)])
        self.link.complete(message.request_id, result={"metrics": {"loss": 1.0}})

    def on_ForwardBackward(self, message: Any, buffers: Any) -> None:
        self.pending.append(self.batch(message, buffers))
        self.link.complete(
            message.request_id, result={"metrics": {}, "pending_batches": len(self.pending)}
        )

    def on_OptimStep(self, message: Any, _: Any) -> None:
        if not self.pending:
            raise Refused(ErrorCode.BAD_INPUT, "no gradients are pending")
        self.step([])
        self.link.complete(message.request_id, result={"metrics": {}})

    def on_Forward(self, message: Any, buffers: Any) -> None:
        self.batch(message, buffers)
        count = message.tensors[0].numel
        specs = tuple(
            TensorSpec(name=n, dtype="float32", shape=(count,)) for n in ("logprobs", "entropy")
        )
        self.link.complete(
            message.request_id,
            result={"seconds": {}},
            tensors=specs,
            buffers=[logprobs_of(self.values, count), bytes(4 * count)],
        )

    def on_LoadCheckpoint(self, message: Any, _: Any) -> None:
        try:
            state = (Path(message.checkpoint_dir) / "state").read_text()
            if (Path(message.checkpoint_dir) / MODEL).read_text() != self.model:
                raise Refused(ErrorCode.CHECKPOINT_FAILED, "made on other base weights")
        except (OSError, ValueError) as error:
            raise Refused(ErrorCode.BAD_INPUT, f"{message.checkpoint_dir}: {error}") from error
        dropped, self.pending, self.state = len(self.pending), [], state
        self.link.complete(
            message.request_id,
            result={"version": 0, "client_state": {}, "dropped_batches": dropped},
        )

    # -------------------------------------------------------- publication

    def on_PlanPublication(self, message: Any, _: Any) -> None:
        self.allocate()
        tensors = tuple(
            TensorSpec(name=f"w{i}", dtype="float32", shape=(4, 2)) for i in range(TENSORS)
        )
        self.link.complete(
            message.request_id, result=Manifest(tensors=tensors, changed=self.changed).model_dump()
        )

    def on_UseLayout(self, message: Any, _: Any) -> None:
        self.part = message.part or ()
        self.link.complete(message.request_id, result={"why_not": None})

    def on_OpenTransferGroup(self, message: Any, _: Any) -> None:
        self.leave()
        self.under_way, tag = message.request_id, uuid.uuid4().hex.encode()
        rendezvous = Rendezvous(
            transport=message.transport, host="127.0.0.1", port=0, nccl_unique_id=tag, world_size=2
        )
        where = {
            r: rendezvous.model_copy(update={"port": self.given.data_via[r]}).model_dump()
            for r in message.replicas
        }
        self.link.progress(message.request_id, "listening", rendezvous=where)
        until = time.monotonic() + message.deadline_s
        while message.replicas.keys() - self.groups.keys():
            if (
                self.under_way != message.request_id
                or message.request_id in self.aborted_ids
                or time.monotonic() > until
            ):
                self.leave()
                raise Refused(ErrorCode.TRANSFER_ABORTED, "aborted, or nobody came")
            self.accept(tag, message.replicas)
        self.under_way = ""
        self.done(message)

    def accept(self, tag: bytes, replicas: Any) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.server.accept()
            connection.settimeout(1.0)
            said, _, replica = connection.recv(128).partition(b" ")
            if said == tag and replica.decode() in replicas:
                connection.sendall(b"+")
                self.groups[replica.decode()] = connection
            else:
                connection.close()

    def leave(self) -> None:
        for connection in self.groups.values():
            connection.close()
        self.groups = {}

    def on_LeaveTransferGroup(self, message: Any, _: Any) -> None:
        self.leave()
        self.done(message)

    def on_EncodeChanges(self, message: Any, _: Any) -> None:
        which, proof = self.part if message.changed_only else range(TENSORS), dict[str, Any]()
        is_here = self.remembered is not None and self.remembered[0] == message.base_version
        if self.remembered is not None and is_here:
            olds = self.remembered[1]
        else:
            try:
                state = (Path(message.base_dir) / "state").read_text()
            except (OSError, TypeError) as error:
                self.link.complete(message.request_id, result={"why_not": str(error)})
                return
            olds = values_of(state, self.changed)
        if message.prove or not is_here:
            proof = digests([olds[i] for i in which])
        self.encoded = [self.values[i] - olds[i] for i in which]
        result = {"nbytes": 1, "elements": len(self.encoded)}
        self.link.complete(message.request_id, result=result, **proof)

    def on_SendWeights(self, message: Any, _: Any) -> None:
        self.under_way = message.request_id
        if message.request_id in self.aborted_ids:
            self.leave()
        values = [self.values[i] for i in self.part] if message.changed_only else self.values
        self.remembered, travelling = None, self.encoded if message.elements else values
        try:
            for connection in self.groups.values():
                connection.settimeout(message.deadline_s)
                for value in travelling:
                    self.allocate()
                    connection.sendall(struct.pack("<q", value) + bytes(PAD_BYTES))
            if not self.groups:
                raise OSError("no group is open")
        except OSError as error:
            self.leave()
            raise Refused(ErrorCode.TRANSFER_FAILED, str(error)) from error
        finally:
            self.under_way = ""
        if message.remember:
            self.remembered = message.version, list(self.values)
        digests = TensorSpec(name="digests", dtype="int64", shape=(len(values),))
        self.link.complete(
            message.request_id, tensors=(digests,), buffers=[array.array("q", values).tobytes()]
        )

    def on_abort(self, message: Any) -> None:
        self.aborted_ids.add(message.request_id)
        if message.request_id in (None, self.under_way):
            self.under_way = ""
            for connection in list(self.groups.values()):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------ a replica


class Replica(Node):
    """What is live, under which name, and what was received for the next one."""

    role = "inference"
    detail = {"workers": 1, "base_url": "http://none", "name": "m"}  # noqa: RUF012

    def __init__(self, given: argparse.Namespace) -> None:
        self.live, self.group = [0] * TENSORS, None
        self.served: int | None = None
        self.poisoned = False
        self.is_standing = False
        self.received: int | None = None
        self.shadow: tuple[int, dict[int, int]] | None = None
        self.unconfirmed: int | None = None
        self.part: tuple[int, ...] = ()
        self.under_way, self.held_id = "", ""
        self.aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: Any = None
        super().__init__(given)
        self.more_traps["restart"] = lambda _words: self.aborts.put("restart")
        self.restarts = 0

    def say_what_is_served(self) -> None:
        """Whoever asks now gets this content under this name, or nothing."""
        shown = (
            None
            if self.served is None or self.poisoned or self.is_standing
            else (self.served, content_of(self.live))
        )
        if shown == self.said:
            return
        self.said = shown
        if shown is None:
            self.history.note(
                "silent", node=self.id, why="poisoned" if self.poisoned else "standing"
            )
        else:
            self.history.note("serves", node=self.id, version=shown[0], content=shown[1])

    def idle(self) -> None:
        reason = ""
        with contextlib.suppress(queue.Empty):
            while True:
                reason = self.aborts.get_nowait()
        if reason == "restart":
            self.restart()
        elif reason:
            self.shadow = None
            if self.received is not None or self.unconfirmed is not None:
                self.poison()
        self.say_what_is_served()

    def restart(self) -> None:
        """The server behind this node was started again."""
        self.live, self.served, self.poisoned, self.received, self.shadow, self.unconfirmed = (
            [0] * TENSORS,
            None,
            False,
            None,
            None,
            None,
        )
        self.part, self.is_standing, self.restarts = (), False, self.restarts + 1
        self.leave()
        self.link.send(Ready(node_id=self.id, detail={**self.detail, "restarted": self.restarts}))

    def poison(self) -> None:
        self.poisoned, self.received, self.unconfirmed, self.is_standing = True, None, None, False
        self.say_what_is_served()

    def on_abort(self, message: Any) -> None:
        self.aborted_ids.add(message.request_id)
        if message.request_id in (None, self.under_way, self.held_id):
            self.abort("aborted")

    def on_forgotten(self, _: Any) -> None:
        if self.under_way or (self.received, self.shadow, self.unconfirmed) != (None, None, None):
            self.abort("forgotten")

    def abort(self, reason: str) -> None:
        self.aborts.put(reason)
        if self.under_way and self.group is not None:
            with contextlib.suppress(OSError):
                self.group.shutdown(socket.SHUT_RDWR)

    def after_starving(self, message: Any) -> ErrorCode:
        """What may be half written serves nothing."""
        if message.kind in ("ReceiveWeights", "SwapWeights"):
            self.after_failure(is_written=self.is_standing)
        return ErrorCode.APPLY_FAILED

    # -------------------------------------------------------- requests

    def on_JoinTransferGroup(self, message: Any, _: Any) -> None:
        self.leave()
        try:
            self.group = socket.create_connection(
                ("127.0.0.1", message.rendezvous.port), timeout=message.deadline_s
            )
            self.group.sendall(message.rendezvous.nccl_unique_id + b" " + self.id.encode())
            if self.group.recv(1) != b"+":
                raise OSError("another group")
        except OSError as error:
            self.leave()
            raise Refused(ErrorCode.TRANSFER_FAILED, str(error)) from error
        self.done(message)

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

    def on_LeaveTransferGroup(self, message: Any, _: Any) -> None:
        self.leave()
        self.done(message)

    def on_PrepareUpdate(self, message: Any, _: Any) -> None:
        self.allocate()
        self.part = message.manifest.changed or ()
        changed = (
            {"tensors": self.part, "layout": whole_layout(len(self.part))} if self.part else None
        )
        waits = (self.received, self.shadow, self.unconfirmed) != (None, None, None)
        self.link.complete(
            message.request_id,
            result={
                "layout": whole_layout(TENSORS),
                "changed": changed,
                "serves": None if self.poisoned or waits else self.served,
            },
        )

    def on_PrepareShadow(self, message: Any, _: Any) -> None:
        why = (
            "nothing is served"
            if self.served is None or self.poisoned
            else self.why_no_base(message)
        )
        self.link.complete(message.request_id, result={"why_not": why})

    def why_no_base(self, message: Any) -> str | None:
        base, has_plan = message.base_version, self.part or message.whole
        return (
            None
            if base is None or (base == self.served and not self.poisoned and has_plan)
            else f"{base} is not served here"
        )

    def on_ReceiveWeights(self, message: Any, _: Any) -> None:
        why = self.why_no_base(message)
        if why is not None:
            raise Refused(ErrorCode.BASE_MISSING, why)
        self.received = self.shadow = None
        self.begin(message)
        which = list(self.part) if message.is_part else list(range(TENSORS))
        was = [self.live[i] if message.elements else 0 for i in which]
        if message.mode == "shadow":
            steps = self.receive(len(which), message, lambda _n, _v: None)
            new = [old + step for old, step in zip(was, steps, strict=True)]
            came = dict(zip(which, new, strict=True))
            self.under_way, self.shadow = "", (message.version, came)
            self.complete_with(message, list(came.values()))
            return
        self.stand_still(message)

        def write(number: int, value: int) -> None:
            self.live[which[number]] = was[number] + value

        self.receive(len(which), message, write)
        self.under_way, self.received = "", message.version
        self.complete_with(message, [self.live[i] for i in which])

    def begin(self, message: Any) -> None:
        self.under_way = self.held_id = message.request_id
        if not self.aborts.empty() or message.request_id in self.aborted_ids:
            while not self.aborts.empty():
                self.aborts.get()
            self.under_way = ""
            raise Refused(ErrorCode.TRANSFER_ABORTED, "aborted")

    def stand_still(self, message: Any) -> None:
        self.link.progress(message.request_id, "pausing")
        self.is_standing = True
        self.say_what_is_served()
        for phase in ("paused", "applying"):
            self.link.progress(message.request_id, phase)
            self.traps.reach(f"{phase} said")

    def receive(self, count: int, message: Any, write: Callable[[int, int], None]) -> list[int]:
        """Numbers as they come; `write` makes each of them live."""
        came: list[int] = []
        try:
            if self.group is None:
                raise OSError("in no group")
            self.group.settimeout(message.deadline_s)
            for number in range(count):
                self.allocate()
                data = self.group.recv(8 + PAD_BYTES, socket.MSG_WAITALL)
                if len(data) != 8 + PAD_BYTES:
                    raise OSError("the connection ended in the middle")
                came.append(struct.unpack_from("<q", data)[0])
                write(number, came[-1])
        except OSError as error:
            self.after_failure(is_written=bool(came) and message.mode == "in_place")
            raise Refused(ErrorCode.TRANSFER_FAILED, str(error)) from error
        return came

    def after_failure(self, *, is_written: bool) -> None:
        self.leave()
        self.under_way = ""
        while not self.aborts.empty():
            self.aborts.get()
        if is_written:
            self.poison()
        self.is_standing = False
        self.say_what_is_served()

    def complete_with(self, message: Any, values: list[int], **more: bool) -> None:
        spec = TensorSpec(name="digests", dtype="int64", shape=(len(values),))
        result = {"seconds": {"apply": 0.01}, **more}
        self.link.complete(
            message.request_id,
            result=result,
            tensors=(spec,),
            buffers=[array.array("q", values).tobytes()],
        )

    def on_SwapWeights(self, message: Any, _: Any) -> None:
        if self.shadow is None or self.shadow[0] != message.version:
            raise Refused(ErrorCode.NOT_READY, "nothing came beside the live tensors")
        came, self.shadow = self.shadow[1], None
        self.begin(message)
        self.stand_still(message)
        for index, value in came.items():
            self.allocate()
            self.live[index] = value
        self.under_way = ""
        live = [self.live[i] for i in came]
        is_committed = array.array("q", live).tobytes() == message.commit_if
        if is_committed:
            self.serve(message.version)
            self.unconfirmed = message.version
        else:
            self.received = message.version
        self.complete_with(message, live, committed=is_committed)

    def serve(self, version: int) -> None:
        self.served, self.poisoned, self.received, self.is_standing = version, False, None, False
        self.say_what_is_served()

    def on_CheckCanary(self, message: Any, _: Any) -> None:
        if self.received != message.version:
            raise Refused(ErrorCode.NOT_READY, "not received here")
        self.allocate()
        if self.served is not None and not self.poisoned:
            self.link.complete(message.request_id, result={"skipped": "it was serving"})
            return
        spec = TensorSpec(name="logprobs", dtype="float32", shape=(len(message.tokens),))
        self.link.complete(
            message.request_id,
            tensors=(spec,),
            buffers=[logprobs_of(self.live, len(message.tokens))],
        )

    def on_CommitUpdate(self, message: Any, _: Any) -> None:
        if self.received == message.version:
            self.serve(message.version)
        elif self.served != message.version or self.poisoned:
            raise Refused(ErrorCode.NOT_READY, f"{message.version} was not received here")
        self.unconfirmed = None
        self.done(message)

    def on_LeaveAlias(self, message: Any, _: Any) -> None:
        if self.served is not None and not self.poisoned:
            self.poison()
        self.done(message)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("trainer", "inference"))
    parser.add_argument("--folder", type=Path, required=True)
    for name, kind in (
        ("endpoint", str),
        ("node-id", str),
        ("seed", str),
        ("life", int),
        ("noise", float),
        ("pace", float),
        ("work-s", float),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--changed-only", action="store_true")
    parser.add_argument("--data-port", type=int, default=0)
    parser.add_argument("--data-via", type=json.loads, default={})
    given = parser.parse_args()
    node_link.REDIAL_AFTER_S /= given.pace
    return (Trainer if given.role == "trainer" else Replica)(given).run()


if __name__ == "__main__":
    sys.exit(main())
