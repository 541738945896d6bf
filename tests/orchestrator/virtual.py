"""Nodes in memory and a clock that jumps: what a Publisher needs of the world, without sockets,
threads or waiting.

Every wait is on the loop's clock, so a run depends on nothing but its inputs. A loop on which
everything waits for something that has no deadline fails at once.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.control.router import Peer
from orchestrator.errors import JobFailed, NodeLost
from orchestrator.protocol.messages import (
    Completed,
    Hello,
    Manifest,
    Progress,
    Rendezvous,
    TensorSpec,
)
from tests.orchestrator.fake_nodes import asked, whole_layout

TENSORS, CHANGED = 4, (0, 2)
LATENCY_S, LOST_S = 0.01, 15.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only where nobody has anything to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(scheduled)._scheduled = False
        if not self._ready:  # type: ignore[attr-defined]
            assert scheduled, "everything waits, and nothing has a deadline"
            self.now = max(self.now, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


@dataclass(slots=True)
class MemoryJournal:
    """What a Publisher writes down."""

    steps: list[tuple[int, str]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    folders: dict[int, str] = field(default_factory=dict)
    die_in: int | None = None
    """After this many steps the orchestrator is gone."""
    on_death: Callable[[], object] = bool
    is_dead: bool = False
    depth: int = 0
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fact(self, key: str) -> dict[str, Any]:
        return self.facts.get(key, {})

    def set_facts(self, facts: dict[str, dict[str, Any]]) -> None:
        if not self.is_dead:
            self.facts |= facts

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All of it is written before the orchestrator is gone."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
        if self.depth == 0 and self.die_in is not None and self.die_in <= 0:
            self.die_in, self.is_dead = None, True
            self.on_death()

    def record_publication(
        self, *, version: int, state: str, checkpoint_dir: str | None = None, **_: Any
    ) -> None:
        if self.is_dead:
            return
        with self.together():
            if checkpoint_dir is not None:
                self.folders[version] = checkpoint_dir
            self.steps.append((version, state))
            self.die_in = None if self.die_in is None else self.die_in - 1

    def set_digest(self, version: int, digest: str) -> None:
        if not self.is_dead:
            self.digests[version] = digest

    def digest(self, version: int) -> str | None:
        return self.digests.get(version)

    def checkpoint_dir(self, version: int) -> str | None:
        return self.folders.get(version)


class Node:
    """One process; `up` is whether messages reach it."""

    role: Any

    def __init__(self, world: World, node_id: str) -> None:
        self.world, self.id, self.up, self.lives, self.starts = world, node_id, True, 1, 1
        self.peer: Peer
        self.start()

    def start(self) -> None:
        """A new process."""
        hello = Hello(
            role=self.role, node_id=self.id, incarnation=f"{self.id}{self.lives}", run_token=""
        )
        self.peer = Peer(
            hello=hello,
            address=b"",
            key=b"",
            last_seen_s=0.0,
            state="ready",
            detail={"workers": 1, "base_url": ""},
            times_ready=1,
        )
        self.lives += 1
        self.reset()

    def reset(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


class Trainer(Node):
    """Its weights are numbers made of its state."""

    role = "trainer"

    def reset(self) -> None:
        self.state, self.part, self.transfer = 0, (), None
        self.remembered: tuple[int, int] | None = None
        self.encoded: list[int] = []

    def abort(self) -> None:
        if self.transfer is not None and not self.transfer.done():
            self.transfer.set_exception(
                JobFailed(
                    code="transfer_aborted", node=self.id, phase="", message="aborted", remedy=""
                )
            )

    async def on_OpenTransferGroup(self, message: Any, say: Callable[..., None]) -> Completed:
        point = Rendezvous(transport="tcp", host="h", port=1, world_size=2).model_dump()
        say("listening", rendezvous=dict.fromkeys(message.replicas, point))
        return Completed(request_id="")

    async def on_PlanPublication(self, *_: Any) -> Completed:
        specs = tuple(TensorSpec(name=f"w{i}", dtype="float32", shape=(1,)) for i in range(TENSORS))
        return Completed(
            request_id="",
            result=Manifest(
                tensors=specs, changed=CHANGED if self.world.changed_only else None
            ).model_dump(),
        )

    async def on_UseLayout(self, message: Any, _: Any) -> Completed:
        self.part = message.part or ()
        return Completed(request_id="", result={"why_not": None})

    async def on_LoadCheckpoint(self, message: Any, _: Any) -> Completed:
        self.state = self.world.disk[message.checkpoint_dir]
        return Completed(request_id="")

    async def on_Forward(self, message: Any, _: Any) -> tuple[Completed, tuple[bytes, ...]]:
        return Completed(request_id=""), (
            logprobs(self.world.weights(self.state), message.tensors[0].numel),
            b"",
        )

    async def on_EncodeChanges(self, message: Any, _: Any) -> tuple[Completed, tuple[bytes, ...]]:
        is_here = self.remembered is not None and self.remembered[0] == message.base_version
        state = self.remembered[1] if is_here else self.world.disk[message.base_dir]
        old, new = (self.world.weights(s) for s in (state, self.state))
        which = self.part if message.changed_only else range(TENSORS)
        self.encoded = [new[i] - old[i] for i in which]
        found = Completed(request_id="", result={"nbytes": 1, "elements": len(self.encoded)})
        is_proved = message.prove or not is_here
        return found, ((packed([old[i] for i in which]),) if is_proved else ())

    async def on_SendWeights(self, message: Any, _: Any) -> tuple[Completed, tuple[bytes, ...]]:
        weights = self.world.weights(self.state)
        sent = [weights[i] for i in (self.part if message.changed_only else range(TENSORS))]
        self.transfer = self.world.wire = asyncio.get_running_loop().create_future()
        await asyncio.sleep(LATENCY_S)
        self.remembered = None
        if not self.transfer.done():
            self.transfer.set_result(self.encoded if message.elements else sent)
        await self.transfer
        if message.remember:
            self.remembered = message.version, self.state
        return Completed(request_id=""), (packed(sent),)


class Replica(Node):
    """As `inference_node.node.node`; what it shows is looked at whenever it changes."""

    role = "inference"

    def reset(self) -> None:
        self.live, self.served, self.poisoned, self.standing = [0] * TENSORS, None, False, False
        self.received: int | None = None
        self.shadow: tuple[int, dict[int, int]] | None = None
        self.unconfirmed: int | None = None
        self.busy = False
        self.flips = False
        self.aborted = False
        self.part: tuple[int, ...] = ()

    @property
    def shown(self) -> int | None:
        """The version that it answers with now."""
        return None if self.poisoned or self.standing else self.served

    def look(self) -> None:
        if self.shown is not None:
            self.world.on_shown(self)

    def abort(self) -> None:
        """What is under way ends; what was received and not committed is given up."""
        if self.busy:
            self.aborted = True
            wire = self.world.wire
            if wire is not None and not wire.done():
                wire.set_exception(
                    JobFailed(
                        code="transfer_aborted",
                        node=self.id,
                        phase="",
                        message="aborted",
                        remedy="",
                    )
                )
            return
        self.shadow = None
        if self.received is not None or self.unconfirmed is not None:
            self.poison()

    def poison(self) -> None:
        self.poisoned, self.standing, self.received, self.unconfirmed = True, False, None, None

    def refuse(self, code: str) -> JobFailed:
        return JobFailed(code=code, node=self.id, phase="", message="refused", remedy="")

    async def on_PrepareUpdate(self, message: Any, _: Any) -> Completed:
        self.part = message.manifest.changed or ()
        changed = (
            {"tensors": self.part, "layout": whole_layout(len(self.part))} if self.part else None
        )
        is_decided = self.received is None and self.shadow is None and self.unconfirmed is None
        serves = self.shown if is_decided else None
        return Completed(
            request_id="",
            result={"layout": whole_layout(TENSORS), "changed": changed, "serves": serves},
        )

    async def on_PrepareShadow(self, message: Any, _: Any) -> Completed:
        return Completed(
            request_id="",
            result={
                "why_not": "nothing is served" if self.served is None or self.poisoned else None
            },
        )

    async def on_ReceiveWeights(
        self, message: Any, say: Callable[..., None]
    ) -> tuple[Completed, tuple[bytes, ...]]:
        base = message.base_version
        if base is not None and (
            base != self.served or self.poisoned or not (self.part or message.whole)
        ):
            raise self.refuse("base_missing")
        self.received, self.shadow, self.busy, self.aborted = None, None, True, False
        which = list(self.part) if message.is_part else list(range(TENSORS))
        is_shadow = message.mode == "shadow"
        try:
            if not is_shadow:
                self.stand(say)
            came = await self.arrive(message.deadline_s)
            if message.elements:
                came = [self.live[i] + step for i, step in zip(which, came, strict=True)]
        except JobFailed:
            self.standing = False
            self.look()
            raise
        finally:
            self.busy = False
        if is_shadow:
            self.shadow = (message.version, dict(zip(which, came, strict=True)))
            return self.digests(came)
        for index, value in zip(which, came, strict=True):
            self.live[index] = value
        self.received = message.version
        if self.aborted:
            self.poison()
            raise self.refuse("transfer_aborted")
        return self.digests([self.live[i] for i in which])

    def stand(self, say: Callable[..., None]) -> None:
        self.standing = True
        say("paused")
        say("applying")

    async def arrive(self, deadline_s: float) -> list[int]:
        until = self.world.loop.now + deadline_s
        while self.world.wire is None:
            if self.aborted or self.world.loop.now > until:
                raise self.refuse("transfer_aborted")
            await asyncio.sleep(LATENCY_S / 2)
        try:
            came = list(await asyncio.wait_for(asyncio.shield(self.world.wire), deadline_s))
            came[0] ^= self.flips
            self.flips = False
            return came
        except TimeoutError:
            raise self.refuse("transfer_timeout") from None

    def digests(self, values: list[int], **more: Any) -> tuple[Completed, tuple[bytes, ...]]:
        return Completed(request_id="", result={"seconds": {}, **more}), (packed(values),)

    async def on_SwapWeights(
        self, message: Any, say: Callable[..., None]
    ) -> tuple[Completed, tuple[bytes, ...]]:
        if self.shadow is None or self.shadow[0] != message.version:
            raise self.refuse("not_ready")
        came, self.shadow = self.shadow[1], None
        self.stand(say)
        for index, value in came.items():
            self.live[index] = value
        is_committed = packed([self.live[i] for i in came]) == message.commit_if
        if is_committed:
            self.unconfirmed = message.version
            self.commit(message.version)
        else:
            self.received = message.version
        return self.digests([self.live[i] for i in came], committed=is_committed)

    def commit(self, version: int) -> None:
        self.served, self.poisoned, self.standing, self.received = version, False, False, None
        self.look()

    async def on_CheckCanary(self, message: Any, _: Any) -> Any:
        if self.received != message.version:
            raise self.refuse("not_ready")
        if self.served is not None and not self.poisoned:
            return Completed(request_id="", result={"skipped": "serving"})
        return Completed(request_id=""), (logprobs(self.live, len(message.tokens)),)

    async def on_CommitUpdate(self, message: Any, _: Any) -> Completed:
        if self.received == message.version:
            self.commit(message.version)
        elif self.served != message.version or self.poisoned:
            raise self.refuse("not_ready")
        self.unconfirmed = None
        return Completed(request_id="")

    async def on_LeaveAlias(self, _message: Any, _: Any) -> Completed:
        self.poisoned = True
        self.standing, self.received, self.unconfirmed = False, None, None
        return Completed(request_id="")


def packed(values: Sequence[int]) -> bytes:
    return array.array("q", values).tobytes()


def logprobs(values: Sequence[int], count: int) -> bytes:
    return array.array("f", [-float(sum(values) % 97) - n for n in range(count)]).tobytes()


@dataclass(slots=True)
class World:
    """The nodes, the disk, and the router between them and the Publisher. `faults`: (node, kind) ->
    what happens to the next such request.
    """

    loop: VirtualLoop
    on_shown: Callable[[Replica], None]
    changed_only: bool = False
    members: dict[str, Node] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    wire: asyncio.Future[list[int]] | None = None
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    broken: list[BaseException] = field(default_factory=list)
    """What went wrong in a node: a promise that was broken there."""

    def weights(self, state: int) -> list[int]:
        return [
            1000 * state + i if not self.changed_only or i in CHANGED else i for i in range(TENSORS)
        ]

    # -------------------------------------------------------- the router's methods

    @property
    def peers(self) -> dict[str, Peer]:
        return {i: n.peer for i, n in self.members.items()}

    def nodes(self, role: str) -> list[str]:
        return sorted(
            i for i, n in self.members.items() if n.role == role and n.peer.state == "ready"
        )

    def is_connected(self, peer_id: str) -> bool:
        return self.members[peer_id].peer.state != "lost"

    async def wait_heard(self, peer_ids: Sequence[str], *, since_s: float) -> None:
        await asyncio.sleep(LOST_S)
        for peer_id in peer_ids:
            self.notice(peer_id)

    def notice(self, peer_id: str) -> None:
        node = self.members[peer_id]
        node.peer.state = "ready" if node.up else "lost"

    async def wait_ready(
        self,
        peer_ids: Sequence[str],
        *,
        timeout_s: float,
        one_is_enough: bool = False,
        report: Any = None,
    ) -> None:
        until = self.loop.now + timeout_s
        while True:
            missing = [p for p in peer_ids if self.members[p].peer.state != "ready"]
            if not missing or (one_is_enough and len(missing) < len(peer_ids)):
                return
            if self.loop.now >= until:
                raise NodeLost(f"not ready: {missing}")
            await asyncio.sleep(1.0)

    async def send(self, peer_id: str, message: Any, buffers: Any = ()) -> None:
        """Arrives after a moment; what it is answered is not waited for."""
        node, message = self.members[peer_id], asked(message)
        if node.peer.state == "lost":
            raise NodeLost(f"{peer_id} is not connected")
        self._in_background(self._deliver(node, message))

    def _in_background(self, what: Any) -> asyncio.Task[Any]:
        """A node continues whether or not the orchestrator still waits for it."""
        task = asyncio.ensure_future(what)
        self.background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, JobFailed):
            self.broken.append(error)

    async def _deliver(self, node: Node, message: Any) -> None:
        incarnation = node.peer.hello.incarnation
        await asyncio.sleep(LATENCY_S)
        if not node.up or node.peer.hello.incarnation != incarnation:
            return
        if message.kind in ("AbortSend", "AbortUpdate"):
            node.abort()
        else:
            await self._handle(node, message, lambda *_a, **_k: None)

    async def request(
        self, peer_id: str, message: Any, buffers: Any = (), *, phase: str, on_progress: Any = None
    ) -> tuple[Completed, tuple[bytes, ...]]:
        node, message = self.members[peer_id], asked(message)
        if node.peer.state == "lost":
            raise NodeLost(f"{peer_id} is not connected")
        fault = self.faults.pop((peer_id, message.kind), "")
        if message.kind == "ReceiveWeights" or message.kind == "SendWeights":
            self.wire = None if self.wire is not None and self.wire.done() else self.wire
        counted = iter(range(99))

        def say(phase: str, **detail: Any) -> None:
            if on_progress is not None and fault != "mute":
                on_progress(
                    peer_id,
                    Progress(
                        request_id=message.request_id,
                        sequence=next(counted),
                        phase=phase,
                        detail=detail,
                    ),
                )

        await asyncio.sleep(LATENCY_S)
        if fault == "refuse":
            raise JobFailed(
                code="internal", node=peer_id, phase=phase, message="told to", remedy=""
            )
        if fault in ("dies", "gone") or not node.up:
            return await self._lost(node, comes_back=fault != "gone")
        if fault == "restarts":
            node.start()
            raise NodeLost(f"{peer_id} was restarted")
        if fault == "hangs":
            await asyncio.sleep(message.deadline_s + LOST_S)
            raise JobFailed(
                code="transfer_timeout",
                node=peer_id,
                phase=phase,
                message="stuck",
                remedy="",
                is_answer=False,
            )
        if fault == "flips" and isinstance(node, Replica) and message.kind == "ReceiveWeights":
            node.flips = True
        answer = await asyncio.shield(self._in_background(self._handle(node, message, say)))
        if fault == "answers and dies":
            return await self._lost(node, comes_back=True)
        if fault == "answer lost":
            await asyncio.sleep(message.deadline_s + LOST_S)
            raise JobFailed(
                code="transfer_timeout",
                node=peer_id,
                phase=phase,
                message="silent",
                remedy="",
                is_answer=False,
            )
        if fault == "nonsense":
            return Completed(
                request_id="",
                result={"seconds": "many", "layout": 5, "unverified": 5, "tensors": ()},
            ), (b"1",)
        return answer

    async def _handle(
        self, node: Node, message: Any, say: Any
    ) -> tuple[Completed, tuple[bytes, ...]]:
        handler = getattr(node, f"on_{message.kind}", None)
        answer = Completed(request_id="") if handler is None else await handler(message, say)
        return answer if isinstance(answer, tuple) else (answer, ())

    async def _lost(self, node: Node, *, comes_back: bool) -> Any:
        """Silent until it is noticed; a new process may be there by then."""
        node.abort()
        node.up = False
        if isinstance(node, Replica):
            node.reset()
        await asyncio.sleep(LOST_S)
        node.peer.state = "lost"
        if comes_back:
            node.up = True
            node.start()
        raise NodeLost(f"{node.id} was lost")
