"""The link of a client to its orchestrator: submits jobs, and waits for the one outcome of each."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    NotRequired,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
)

from pydantic import ValidationError

from orchestrator.errors import ConfigError, ErrorCode, JobFailed, ProtocolError
from orchestrator.protocol.curve import PeerKeys
from orchestrator.protocol.frames import Envelope, briefly
from orchestrator.protocol.messages import (
    WAITING,
    CancelJob,
    Cancelled,
    Completed,
    Failed,
    GetStatus,
    Hello,
    JobOf,
    JobResult,
    JobSpec,
    NextBatch,
    Progress,
    Status,
    StopRun,
    SubmitJob,
    TrainMerged,
    check_node_id,
    new_id,
)
from orchestrator.protocol.node_link import NodeLink
from splice.client.run_file import find_run

log = logging.getLogger("splice.client")
OnProgress = Callable[[Progress], None]
Buffers = Sequence[bytes | memoryview]
Result = TypeVar("Result", bound=JobResult)
READ_TURN_S = 0.5


class RunOptions(TypedDict, total=False):
    """Keywords of `SpliceClient.run`, which every method that runs a job takes."""

    job_id: str | None
    timeout_s: float
    on_progress: OnProgress | None


class Naming(TypedDict, total=False):
    """Keywords of `SpliceClient.of_run`."""

    client_id: str | None
    curve: PeerKeys | None


class Connection(Naming):
    """Keywords of `SpliceClient`."""

    endpoint: str
    run_token: str
    endpoint_file: NotRequired[Path | None]


@dataclass(slots=True, kw_only=True)
class _Submitted:
    """A job whose outcome `wait` has not returned. `came`: progress for `on_progress`."""

    message: SubmitJob
    buffers: Buffers
    on_progress: OnProgress | None
    came: deque[Progress] = field(default_factory=deque)
    outcome: Envelope | None = None
    is_cancelled: bool = False


class RunLink:
    """Submits jobs to a running orchestrator and waits for their outcomes. Threads may share it.

    The orchestrator runs jobs one at a time, in the order of their arrival.

    Raises (on enter):
        NodeLost: nothing answers at `endpoint`.
        ConfigError: the orchestrator rejected the client (another run's token, another protocol
            version). The constructor raises it for an invalid `client_id`.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        run_token: str,
        client_id: str | None = None,
        curve: PeerKeys | None = None,
        endpoint_file: Path | None = None,
    ) -> None:
        hello = Hello(
            role="client",
            node_id=check_node_id(client_id or new_id("client")),
            incarnation=uuid.uuid4().hex,
            run_token=run_token,
            pid=os.getpid(),
        )
        self._link = NodeLink(
            endpoint=endpoint,
            hello=hello,
            curve=curve,
            endpoint_file=endpoint_file,
            lost_after_s=30.0,
        )
        self.run_id = hashlib.sha256(run_token.encode()).hexdigest()[:12]
        """The same for every client of a run, over all its starts, and for no other run."""
        self.run_dir = None if endpoint_file is None else endpoint_file.parent
        """The run's folder, which this host may not see. None: nobody named it."""
        self._jobs: dict[str, _Submitted] = {}
        self._status: Status | None = None
        self._statuses_came = 0
        self._awaits_status = self._is_stopping = False
        self._changed = threading.Condition()
        self._is_reading = False

    @classmethod
    def of_run(cls, run_dir: str | Path, **naming: Unpack[Naming]) -> Self:
        """A client of the run in this folder. It reads endpoint and token there.

        After `splice stop` and `splice up --resume` it finds the run's new endpoint. A host that
        does not see the folder reads SPLICE_ENDPOINT and SPLICE_RUN_TOKEN.

        Raises:
            ConfigError: no orchestrator has written them yet.
        """
        return cls(**find_run(Path(run_dir)), **naming)

    def __enter__(self) -> Self:
        self._link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def run(
        self,
        job: JobOf[Result],
        *,
        buffers: Buffers = (),
        job_id: str | None = None,
        timeout_s: float = 7200.0,
        on_progress: OnProgress | None = None,
    ) -> Result:
        """Submit a job and wait for its result.

        A second submission of the same `job_id` returns the first outcome. No job runs twice.

        Raises:
            JobFailed: the job failed; has code, node, phase and remedy.
            NodeLost: the orchestrator is gone.
            TimeoutError: no outcome within `timeout_s`. The job continues; run it again with the
                same id to wait for it.
        """
        spec = cast(JobSpec, job)
        job_id = self.submit(spec, buffers=buffers, job_id=job_id, on_progress=on_progress)
        return _result(job, self._wait(job_id, timeout_s))

    def submit(
        self,
        job: JobSpec,
        *,
        buffers: Buffers = (),
        job_id: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> str:
        """Submit a job without waiting for it; returns its id for `wait`.

        Args:
            buffers: must not change until `wait` returns, because the client sends them again to a
                restarted orchestrator.
            on_progress: called by `wait`.

        Raises:
            ProtocolError: the buffers do not match the job's `tensors`.
        """
        job_id = job_id or new_id("job")
        message = SubmitJob(job_id=job_id, job=job, progress=on_progress is not None)
        with self._changed:
            self._jobs[job_id] = _Submitted(
                message=message, buffers=buffers, on_progress=on_progress
            )
        try:
            self._link.send(message, buffers)
        except ProtocolError:
            with self._changed:
                del self._jobs[job_id]
            raise
        return job_id

    def announce(self, job: TrainMerged, *, buffers: Buffers) -> None:
        """Say what the next training job will bring, while another one runs.

        The trainer may begin with the batch while it saves. If the next job has the same batch and
        loss, the trainer continues from there, with the same result as without; `optim` may differ.
        Any other job makes the trainer forget it. Call it once for a batch.

        Raises:
            ConfigError: the job is of another kind.
            ProtocolError: the buffers do not match the job's `tensors`.
        """
        if not isinstance(job, TrainMerged):
            raise ConfigError(f"announce takes a TrainMerged, not {type(job).__name__}")
        self._link.send(NextBatch(job=job), buffers)

    def wait(self, job_id: str, *, timeout_s: float = 7200.0) -> JobResult:
        """Wait for the result of a job that this client submitted. Raises as `run` does.

        Returns: what `run` returns for the job: its `result_type`.

        Raises:
            KeyError: this client did not submit the job, or `wait` already returned its result.
        """
        job = self._jobs[job_id].message.job
        return _result(job, self._wait(job_id, timeout_s))

    def _wait(self, job_id: str, timeout_s: float) -> Envelope:
        """The job's terminal message. After a timeout or NodeLost the caller may wait again."""
        submitted, deadline_s = self._jobs[job_id], time.monotonic() + timeout_s
        while self._read_until(
            lambda: bool(submitted.came) or submitted.outcome is not None, deadline_s
        ):
            while submitted.came and submitted.on_progress is not None:
                submitted.on_progress(submitted.came.popleft())
            if submitted.outcome is not None:
                with self._changed:
                    self._jobs.pop(job_id, None)
                return submitted.outcome
        raise TimeoutError(
            f"job {job_id} has no outcome after {timeout_s:.0f} s; "
            f"wait again with job_id={job_id!r}"
        )

    # ------------------------------------------------------------ reading

    def _read_until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Whether the condition became true in time.

        One waiting thread at a time reads the link, on behalf of all.

        Raises:
            NodeLost: the orchestrator is gone.
        """
        while True:
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if condition() or left_s <= 0:
                    return condition()
                if self._is_reading:
                    self._changed.wait(min(left_s, READ_TURN_S))
                    continue
                self._is_reading = True
            try:
                self._take(self._link.recv(timeout_s=min(left_s, READ_TURN_S)))
            finally:
                with self._changed:
                    self._is_reading = False
                    self._changed.notify_all()

    def _take(self, envelope: Envelope | None) -> None:
        message = None if envelope is None else envelope.message
        with self._changed:
            if isinstance(message, Hello):  # a restarted orchestrator; it knows earlier job ids
                for job_id, submitted in self._jobs.items():
                    self._link.send(submitted.message, submitted.buffers)
                    if submitted.is_cancelled:
                        self._link.send(CancelJob(job_id=job_id))
                if self._awaits_status:
                    self._link.send(GetStatus())
                if self._is_stopping:
                    self._link.send(StopRun())
                return
            if isinstance(message, Status):
                self._status = message
                self._statuses_came += 1
                self._awaits_status = False
                return
            known = self._jobs.get(getattr(message, "request_id", ""))
            if known is None:
                return
            if not isinstance(message, Progress):
                known.outcome = envelope
            elif known.on_progress is not None:
                known.came.append(message)
            elif message.phase == WAITING:
                log.warning("job %s is %s: %s", message.request_id, WAITING, message.detail["text"])

    # ------------------------------------------------------------ the run

    def status(self, *, timeout_s: float = 10.0) -> Status:
        """The served version, the nodes and the queue."""
        deadline_s = time.monotonic() + timeout_s
        # At a reconnect it is asked for again; such answers are older than this call.
        self._read_until(lambda: not self._link.has_mail, deadline_s)
        with self._changed:
            had = self._statuses_came
            self._awaits_status = True
        self._link.send(GetStatus())
        if self._read_until(lambda: self._statuses_came > had, deadline_s):
            assert self._status is not None
            return self._status
        raise TimeoutError(f"no status within {timeout_s:.0f} s")

    def base_url(self) -> str:
        """URL of the first inference node's OpenAI API.

        Raises:
            ConfigError: the run serves nothing yet.
        """
        status = self.status()
        urls = [n.detail["base_url"] for n in status.nodes if "base_url" in n.detail]
        if status.version is None or not urls:
            raise ConfigError(
                "the run serves no version yet; wait for `splice up`, or publish one "
                "(InitialSync). `splice status` shows what it waits for"
            )
        return str(urls[0])

    def cancel(self, job_id: str) -> None:
        """Cancel a job that has not started. `wait` then raises `JobFailed`, code "cancelled"."""
        with self._changed:
            submitted = self._jobs.get(job_id)
            if submitted is not None:  # in case the orchestrator is restarting
                submitted.is_cancelled = True
        self._link.send(CancelJob(job_id=job_id))

    def stop_run(self, *, timeout_s: float = 30.0) -> None:
        """End the run: nodes and orchestrator shut down in order.

        Raises:
            TimeoutError: no orchestrator answered within `timeout_s`. It has ended, or the run
                continues once it is resumed.
            NodeLost: the orchestrator is gone.
        """
        # A restarted orchestrator drops messages until it knows this client again. It answers
        # nothing once it stops.
        self.status(timeout_s=timeout_s)
        self._is_stopping = True
        self._link.send(StopRun())


def _result(job: JobOf[Result], outcome: Envelope) -> Result:
    """Return what a job's terminal message says.

    Raises:
        JobFailed: the job failed or was cancelled.
        ProtocolError: its result has other fields.
    """
    message = outcome.message
    if isinstance(message, Completed):
        try:
            return job.result_type.of(message, outcome.buffers)
        except ValidationError as error:
            raise ProtocolError(
                f"the result is not a {job.result_type.__name__}: {briefly(error)}; client and "
                "orchestrator may be of different versions of splice"
            ) from error
    if isinstance(message, Failed):
        raise message.as_error(node=message.node)
    if isinstance(message, Cancelled):
        raise JobFailed(
            code=ErrorCode.CANCELLED,
            node="orchestrator",
            phase="queued",
            message=message.reason,
            remedy="submit it again under a new id",
        )
    raise ProtocolError(f"{message!r} is not an outcome")
