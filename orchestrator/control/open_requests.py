"""Requests that nodes have not answered yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.control.liveness import stalled
from orchestrator.errors import ErrorCode, JobFailed, JournalError, NodeLost, ProtocolError
from orchestrator.protocol.messages import AnyMessage, Completed, Failed, Progress

log = logging.getLogger("splice.orchestrator")
OnProgress = Callable[[str, Progress], None]
Answer = tuple[Completed, tuple[bytes, ...]]
STALL_AFTER_S = 600.0
DEADLINE_GRACE_S = 15.0
"""Beyond a request's deadline, because the node should end the request itself."""


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """A request without a terminal message."""

    peer_id: str
    incarnation: str
    phase: str
    message: AnyMessage
    buffers: Sequence[bytes | memoryview]
    done: asyncio.Future[Answer]
    on_progress: OnProgress | None
    started_s: float
    deadline_s: float
    """Seconds from `started_s`, as the node has it."""
    last_progress_s: float
    next_sequence: int = 0

    @property
    def work(self) -> str:
        """The kind of the message, or of the job that a `RunJob` has."""
        return getattr(self.message, "job", self.message).kind  # type: ignore[no-any-return]

    def fail(self, *, code: str, message: str, remedy: str, is_answer: bool = True) -> None:
        """End the request with a `JobFailed` of the orchestrator's own."""
        self.done.set_exception(
            JobFailed(
                code=code,
                node=self.peer_id,
                phase=self.phase,
                message=message,
                remedy=remedy,
                is_answer=is_answer,
            )
        )


class OpenRequests:
    """Owns the open requests, and matches answers to them."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self,
        message: AnyMessage,
        buffers: Sequence[bytes | memoryview],
        *,
        peer_id: str,
        incarnation: str,
        phase: str,
        on_progress: OnProgress | None,
    ) -> OpenRequest:
        """Register a request that is about to be sent."""
        started_s = time.monotonic()
        entry = OpenRequest(
            peer_id=peer_id,
            incarnation=incarnation,
            phase=phase,
            message=message,
            buffers=buffers,
            done=asyncio.get_running_loop().create_future(),
            on_progress=on_progress,
            started_s=started_s,
            deadline_s=message.deadline_s,  # type: ignore[union-attr]
            last_progress_s=started_s,
        )
        self._open[message.request_id] = entry  # type: ignore[union-attr, index]
        return entry

    def remove(self, entry: OpenRequest) -> None:
        """Forget a request."""
        del self._open[entry.message.request_id]  # type: ignore[union-attr, arg-type]

    def of_peer(self, peer_id: str) -> list[OpenRequest]:
        """Return the peer's requests that wait for an answer."""
        return [e for e in self._open.values() if e.peer_id == peer_id and not e.done.done()]

    def cause_at(self, peer_id: str, *, incarnation: str) -> tuple[str, str]:
        """Return the request that a process works on, under the same name for each process that it
        is sent to, and its kind if it has begun. Empty: it works on none, or has not begun."""
        for entry in self.of_peer(peer_id):
            if entry.incarnation == incarnation:
                request_id = str(entry.message.request_id)  # type: ignore[union-attr]
                kind = entry.work if entry.next_sequence else ""
                return request_id.removesuffix(f"-{incarnation[:12]}"), kind
        return "", ""

    def on_progress(self, peer_id: str, message: Progress) -> None:
        """Give a `Progress` to whoever made the request."""
        entry = self._asked(peer_id, message.request_id)
        if entry is None or message.sequence < entry.next_sequence:
            return
        entry.next_sequence = message.sequence + 1  # a broken connection may have lost some
        entry.last_progress_s = time.monotonic()
        if entry.on_progress is None:
            return
        try:
            entry.on_progress(entry.peer_id, message)
        except (JournalError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.warning(
                "the progress %r of %s cannot be used", message.phase, peer_id, exc_info=error
            )
            entry.fail(
                code=ErrorCode.PROTOCOL,
                message=f"its progress {message.phase!r:.80} cannot be used: {error}",
                remedy="Install the same splice on both sides, then restart the node.",
            )

    def on_terminal(
        self, peer_id: str, message: Completed | Failed, buffers: tuple[bytes, ...]
    ) -> str:
        """End the request that the peer was asked. Returns its kind if it is completed."""
        entry = self._asked(peer_id, message.request_id)
        if entry is None:
            return ""
        if isinstance(message, Completed):
            entry.done.set_result((message, buffers))
            return entry.work
        entry.done.set_exception(message.as_error(node=peer_id))
        return ""

    def _asked(self, peer_id: str, request_id: str) -> OpenRequest | None:
        """Return the open request that this peer was asked, or None.

        Raises:
            ProtocolError: another peer was asked.
        """
        entry = self._open.get(request_id)
        if entry is None or entry.done.done():
            return None
        if entry.peer_id != peer_id:
            raise ProtocolError(
                f"it answers the request {request_id[:128]}, which {entry.peer_id} was asked"
            )
        return entry

    def lose(
        self, peer_id: str, why: str, *, incarnation: str, error: type[NodeLost] = NodeLost
    ) -> None:
        """End the requests to a process that is gone."""
        for entry in self.of_peer(peer_id):
            if entry.incarnation == incarnation:
                entry.done.set_exception(error(f"{peer_id} was lost while {entry.phase}: {why}"))

    def give_up_stalled(self, now_s: float) -> None:
        """End requests whose node is stuck. A working node keeps the deadline itself."""
        for entry in self._open.values():
            why = stalled(
                started_s=entry.started_s,
                last_progress_s=entry.last_progress_s,
                now_s=now_s,
                deadline_s=entry.deadline_s + DEADLINE_GRACE_S,
                stall_after_s=max(STALL_AFTER_S, entry.deadline_s),
            )
            if why is not None and not entry.done.done():
                entry.fail(
                    code=ErrorCode.TRANSFER_TIMEOUT,
                    message=why,
                    remedy="The node counts as stuck. Read its log, then restart it.",
                    is_answer=False,
                )
