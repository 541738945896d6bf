"""The client: submits jobs and waits for their one outcome.

with SpliceClient(endpoint="tcp://127.0.0.1:40001", run_token=token) as client:
    client.run(InitialSyncJob())
    result = client.run(TrainMergedJob(tensors=..., optim=OptimParams(lr=1e-3)), buffers=batch.buffers)
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.errors import JobFailed, NodeLost, ProtocolError
from orchestrator.protocol.messages import (
    AnyMessage,
    CancelJob,
    Completed,
    Failed,
    GetStatus,
    Hello,
    JobSpec,
    Progress,
    Status,
    StopRun,
    SubmitJob,
)
from orchestrator.protocol.node_link import CurveKeys, NodeLink
from orchestrator.router import new_id

OnProgress = Callable[[Progress], None]


class SpliceClient:
    """A client of a running orchestrator. One job at a time per client; several clients may be connected.

    Raises (on enter):
        NodeLost: nothing answers at `endpoint`.
        ConfigError: the orchestrator rejected us (another run's token, another protocol version).
    """

    def __init__(self, *, endpoint: str, run_token: str, client_id: str | None = None, curve: CurveKeys | None = None) -> None:
        hello = Hello(
            role="client",
            node_id=client_id or new_id("client"),
            incarnation=uuid.uuid4().hex,
            run_token=run_token,
            pid=os.getpid(),
        )
        self._link = NodeLink(endpoint=endpoint, hello=hello, curve=curve, lost_after_s=30.0)

    def __enter__(self) -> SpliceClient:
        self._link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def run(
        self,
        job: JobSpec,
        *,
        buffers: Sequence[bytes | memoryview] = (),
        job_id: str | None = None,
        timeout_s: float = 7200.0,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        """Submit a job and wait for it; returns `Completed.result`.

        Submitting the same `job_id` again returns the first one's outcome; nothing runs twice.

        Raises:
            JobFailed: with code, node, phase and what to do.
            NodeLost: the orchestrator went away.
            TimeoutError: no outcome within `timeout_s`; the job goes on, ask again with the same id.
        """
        job_id = job_id or new_id("job")
        self._link.send(SubmitJob(job_id=job_id, job=job), buffers)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._next(min(left_s, 1.0))
            if getattr(message, "request_id", None) != job_id:
                continue
            if isinstance(message, Progress):
                if on_progress is not None:
                    on_progress(message)
            else:
                return _outcome(message)
        raise TimeoutError(f"job {job_id} has no outcome after {timeout_s:.0f} s; ask again with job_id={job_id!r}")

    def status(self, *, timeout_s: float = 10.0) -> Status:
        """What is served, and by whom."""
        self._link.send(GetStatus())
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._next(left_s)
            if isinstance(message, Status):
                return message
        raise TimeoutError(f"no status within {timeout_s:.0f} s")

    def cancel(self, job_id: str) -> None:
        """Cancel a job that has not started."""
        self._link.send(CancelJob(job_id=job_id))

    def stop_run(self) -> None:
        """End the run: nodes and orchestrator shut down in order."""
        self._link.send(StopRun())

    def _next(self, timeout_s: float) -> AnyMessage | None:
        envelope = self._link.recv(timeout_s=timeout_s)
        return None if envelope is None else envelope.message


class AsyncSpliceClient:
    """The same for asyncio; each call runs on a worker thread."""

    def __init__(self, **kwargs: Any) -> None:
        self._client = SpliceClient(**kwargs)

    async def __aenter__(self) -> AsyncSpliceClient:
        await asyncio.to_thread(self._client.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._client.__exit__)

    async def run(self, job: JobSpec, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.run`."""
        return await asyncio.to_thread(self._client.run, job, **kwargs)

    async def status(self) -> Status:
        """See `SpliceClient.status`."""
        return await asyncio.to_thread(self._client.status)


def _outcome(message: AnyMessage | None) -> dict[str, Any]:
    if isinstance(message, Completed):
        return message.result
    if isinstance(message, Failed):
        raise JobFailed(
            code=message.code, node=message.node, phase=message.phase, message=message.message, remedy=message.remedy
        )
    if message is not None and message.kind == "Cancelled":
        raise JobFailed(
            code="cancelled",
            node="orchestrator",
            phase="queued",
            message=message.reason,
            remedy="submit it again under a new id",
        )
    raise ProtocolError(f"{message!r} is not an outcome")


__all__ = ["AsyncSpliceClient", "NodeLost", "SpliceClient"]
