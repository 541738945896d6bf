"""The order of training requests, and their futures.

Requests of a model run by `seq_id`, in whatever order they arrive. All of them go through one lane,
because the trainer has one state. A request is durable from `accept` on: a restarted server runs
what has no result yet, under the same job ids, and the orchestrator runs no job twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.errors import ErrorCode, JobFailed, NodeLost, SpliceError
from splice.tinker.books import Books, Request, Result, defect, failure
from splice.tinker.config import TinkerConfig
from splice.tinker.refused import BUSY, Refused, malformed
from splice.tinker.wire import parsed_pass

log = logging.getLogger("splice.tinker")
AGAIN_S, SAID_S = 1.0, 60.0
"""Pauses before a job is asked for again that an absent orchestrator did not answer, and before
the log says so again."""
_USERS = frozenset(
    {
        ErrorCode.BAD_INPUT,
        ErrorCode.TOO_LONG,
        ErrorCode.NON_FINITE_GRADIENT,
        ErrorCode.LOGPROB_GAP,
    }
)
"""Codes of failures that the client's request causes."""


@dataclass(slots=True, kw_only=True)
class _Line:
    """A model's requests that wait for earlier ones: number -> request and when it came.

    `refused` are numbers that will never come.
    """

    next_seq: int
    early: dict[int, tuple[Request, float]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


def _digest(request: Request) -> str:
    return hashlib.sha256(request.kind.encode() + b"\0" + request.body).hexdigest()


def in_tinkers_words(error: JobFailed) -> str:
    """Return why a job failed, without splice's advice where the SDK has no such call."""
    if error.code is ErrorCode.WORK_LOST:
        return (
            f"{error.message}. Training continues from the last state that was saved or published: "
            "load it (load_state), or make the lost steps again"
        )
    if error.code is ErrorCode.NOT_READY and "no gradients" in error.message:
        return "optim_step has no gradients: call forward_backward first"
    return str(error)


class Turns:
    """Runs training requests one at a time.

    Args:
        work: carries out a request on a thread; raises `SpliceError`.
    """

    def __init__(
        self, books: Books, config: TinkerConfig, work: Callable[[Request], Result]
    ) -> None:
        self._books, self._config, self._work = books, config, work
        self._lines: dict[str, _Line] = {}
        self._ready: asyncio.Queue[Request] = asyncio.Queue()
        self._ends: dict[str, asyncio.Event] = {}

    # ------------------------------------------------------------ in

    def restore(self) -> None:
        """Queue what a former process accepted and did not end."""
        for request in self._books.waiting():
            self._ends[request.request_id] = asyncio.Event()
            self._enqueue(request)

    def accept(self, request: Request) -> str:
        """Take a request; returns its future's id. The same request again changes nothing.

        Raises:
            Refused: another request has this number, or too many wait.
        """
        if self.repeated(request) is not None:
            return request.request_id
        line = self._line(request.model_id)
        if 0 < request.seq_id < line.next_seq:
            raise malformed(
                f"request {request.seq_id} of {request.model_id} is over: the next one is "
                f"{line.next_seq}"
            )
        # Never of the one that the others wait for.
        if len(self._ends) >= self._config.max_waiting and request.seq_id != line.next_seq:
            raise Refused(BUSY, f"{len(self._ends)} training requests wait, which is the most")
        self._books.add_request(request, _digest(request))
        self._ends[request.request_id] = asyncio.Event()
        self._enqueue(request)
        return request.request_id

    def repeated(self, request: Request) -> str | None:
        """Return the future's id of a request that was accepted before, or None.

        Raises:
            Refused: another request has this number.
        """
        known = self._books.request_digest(request.request_id)
        if known is not None and known != _digest(request):
            raise malformed(
                f"request {request.seq_id} of {request.model_id} was another one; a seq_id names "
                "one request"
            )
        return None if known is None else request.request_id

    def skip(self, model_id: str, seq_id: int) -> None:
        """Note that a request of this number was refused: later ones do not wait for it."""
        line = self._line(model_id)
        if seq_id >= line.next_seq:
            line.refused.add(seq_id)
            self._advance(model_id, line)

    def _line(self, model_id: str) -> _Line:
        if model_id not in self._lines:
            self._lines[model_id] = _Line(next_seq=self._books.model(model_id)["next_seq"])
        return self._lines[model_id]

    def _enqueue(self, request: Request) -> None:
        """Queue a request whose turn it is, and those that waited for it."""
        if request.seq_id == 0:  # it makes the model
            self._ready.put_nowait(request)
            return
        line = self._line(request.model_id)
        if request.seq_id < line.next_seq:  # queued already when the server ended
            self._ready.put_nowait(request)
            return
        line.early[request.seq_id] = (request, time.monotonic())
        line.refused.discard(request.seq_id)
        self._advance(request.model_id, line)

    def _advance(self, model_id: str, line: _Line) -> None:
        while line.next_seq in line.early or line.next_seq in line.refused:
            if line.next_seq in line.early:
                self._ready.put_nowait(line.early.pop(line.next_seq)[0])
            line.refused.discard(line.next_seq)
            line.next_seq += 1
        self._books.advance(model_id, line.next_seq)

    # ------------------------------------------------------------ the lane

    async def run(self) -> None:
        """Carry out requests until cancelled."""
        while True:
            request = await self._ready.get()
            self._end(request, await self._carry_out(request))

    async def fail_gaps(self) -> None:
        """Fail requests that waited too long for an earlier one. Runs until cancelled.

        Later requests do not wait for the missing one.
        """
        while True:
            await asyncio.sleep(min(1.0, self._config.gap_timeout_s / 4))
            oldest = time.monotonic() - self._config.gap_timeout_s
            for model_id, line in self._lines.items():
                if not any(came < oldest for _, came in line.early.values()):
                    continue
                missing, early = line.next_seq, dict(line.early)
                line.early.clear()
                self._books.add_failed_pass(model_id, missing)
                for seq_id, (request, _) in sorted(early.items()):
                    text = (
                        f"request {missing} of {model_id} did not come within "
                        f"{self._config.gap_timeout_s:.0f} s, so {seq_id} cannot run"
                    )
                    self._end(request, failure(text, is_user=True))
                line.next_seq = max(early) + 1
                self._advance(model_id, line)

    async def _carry_out(self, request: Request) -> Result:
        deadline_s = time.monotonic() + self._config.job_timeout_s
        said_s = -SAID_S
        while True:
            try:
                return await asyncio.to_thread(self._work, request)
            except JobFailed as error:
                return failure(in_tinkers_words(error), is_user=error.code in _USERS)
            except (NodeLost, TimeoutError) as error:
                if time.monotonic() > deadline_s:
                    return failure(f"{type(error).__name__}: {error}", is_user=False)
                if time.monotonic() - said_s > SAID_S:
                    said_s = time.monotonic()
                    log.warning(
                        "%s waits for the orchestrator: %s. If the run has ended (`splice "
                        "status`), continue it with `splice up --resume`",
                        request.request_id,
                        error,
                    )
                await asyncio.sleep(AGAIN_S)
            except SpliceError as error:
                return failure(str(error), is_user=isinstance(error, Refused))
            except Exception as error:
                log.exception("%s failed, which is a defect of splice tinker", request.request_id)
                return defect(error)

    def _end(self, request: Request, result: Result) -> None:
        is_pass = request.kind == "forward_backward"
        if result.is_failure and is_pass and not parsed_pass(request.body).forward_only:
            self._books.add_failed_pass(request.model_id, request.seq_id)
        self._books.end_request(request.request_id, result)
        event = self._ends.pop(request.request_id, None)
        if event is not None:
            event.set()

    # ------------------------------------------------------------ out

    async def result(self, request_id: str, *, timeout_s: float) -> Result | None:
        """Wait for a result; None: not yet.

        Raises:
            Refused: there is no such future.
        """
        event = self._ends.get(request_id)
        if event is not None:
            try:
                await asyncio.wait_for(event.wait(), timeout_s)
            except TimeoutError:
                return None
        return self._books.result(request_id)
