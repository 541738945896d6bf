"""The client: submits jobs and waits for their one outcome.

with SpliceClient(endpoint="tcp://127.0.0.1:40001", run_token=token) as client:
    client.run(InitialSyncJob())
    result = client.run(TrainMergedJob(tensors=..., optim=OptimParams(lr=1e-3)), buffers=batch.buffers)

    old = client.forward(batch).logprobs
    for part in parts:
        client.forward_backward(part, LossSpec(name="ppo"))
    client.optim_step(OptimParams(lr=1e-5))      # one step with all of them
    client.publish()

    first = client.submit(job, buffers=batch.buffers)   # the next batch travels to the trainer while this one trains
    second = client.submit(job, buffers=next_batch.buffers)
    client.wait(first), client.wait(second)
"""

from __future__ import annotations

import array
import asyncio
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.errors import JobFailed, NodeLost, ProtocolError
from orchestrator.protocol.curve import PeerKeys
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    FORWARD_RESULTS,
    FORWARD_TENSORS,
    OPTIONAL_FORWARD_TENSORS,
    AnyMessage,
    CancelJob,
    Completed,
    ExportHfJob,
    Failed,
    ForwardBackwardJob,
    ForwardJob,
    GetStatus,
    Hello,
    JobSpec,
    LoadAdapterJob,
    LoadCheckpointJob,
    LossSpec,
    OptimParams,
    OptimStepJob,
    Progress,
    PublishJob,
    SaveCheckpointJob,
    Status,
    StopRun,
    SubmitJob,
    TensorSpec,
    TrainLoraJob,
    TrainMergedJob,
)
from orchestrator.protocol.node_link import NodeLink
from orchestrator.router import new_id

OnProgress = Callable[[Progress], None]
READ_TURN_S = 0.5


class BatchBuffers(Protocol):
    """A batch as the client has it: specs (`batch_specs`) and the raw buffers in the same order."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """One for each buffer."""
        ...

    @property
    def buffers(self) -> Sequence[bytes | memoryview]:
        """Raw, little-endian, row-major."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Of every token of the batch, sequences laid end to end; rows as in `messages.FORWARD_RESULTS`."""

    logprobs: array.array[float]
    entropy: array.array[float]
    seconds: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Submitted:
    """A job whose outcome has not been taken. `came`: its progress, where somebody wants it."""

    message: SubmitJob
    buffers: Sequence[bytes | memoryview]
    on_progress: OnProgress | None
    came: deque[Progress] = field(default_factory=deque)
    outcome: Envelope | None = None
    is_cancelled: bool = False


class SpliceClient:
    """A client of a running orchestrator; its methods may be called from several threads. Jobs run one at a time, in the order they came.

    Raises (on enter):
        NodeLost: nothing answers at `endpoint`.
        ConfigError: the orchestrator rejected us (another run's token, another protocol version).
    """

    def __init__(self, *, endpoint: str, run_token: str, client_id: str | None = None, curve: PeerKeys | None = None) -> None:
        hello = Hello(
            role="client",
            node_id=client_id or new_id("client"),
            incarnation=uuid.uuid4().hex,
            run_token=run_token,
            pid=os.getpid(),
        )
        self._link = NodeLink(endpoint=endpoint, hello=hello, curve=curve, lost_after_s=30.0)
        self._jobs: dict[str, _Submitted] = {}
        self._status: Status | None = None
        self._statuses_came = 0
        self._awaits_status = self._is_stopping = False
        self._changed = threading.Condition()
        self._is_reading = False

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
        envelope = self._run(job, buffers, job_id=job_id, timeout_s=timeout_s, on_progress=on_progress)
        return _outcome(envelope.message)

    def submit(
        self,
        job: JobSpec,
        *,
        buffers: Sequence[bytes | memoryview] = (),
        job_id: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> str:
        """Submit a job without waiting for it; returns its id for `wait`. The batch of one that waits behind another goes to the trainer ahead.

        Args:
            buffers: kept, and not to be changed, until `wait` returns: a restarted orchestrator is sent them again.
            on_progress: called by `wait`.

        Raises:
            ProtocolError: the buffers are not those that the job's `tensors` say.
        """
        job_id = job_id or new_id("job")
        message = SubmitJob(job_id=job_id, job=job, progress=on_progress is not None)
        with self._changed:
            self._jobs[job_id] = _Submitted(message=message, buffers=buffers, on_progress=on_progress)
        try:
            self._link.send(message, buffers)
        except ProtocolError:
            with self._changed:
                del self._jobs[job_id]
            raise
        return job_id

    def wait(self, job_id: str, *, timeout_s: float = 7200.0) -> dict[str, Any]:
        """The result of a job that this client has submitted; raises as `run` does.

        Raises:
            KeyError: it was not submitted by this client, or was waited for already.
        """
        return _outcome(self._wait(job_id, timeout_s).message)

    def _run(
        self,
        job: JobSpec,
        buffers: Sequence[bytes | memoryview],
        *,
        job_id: str | None = None,
        timeout_s: float = 7200.0,
        on_progress: OnProgress | None = None,
    ) -> Envelope:
        """Submit and wait for the terminal message."""
        return self._wait(self.submit(job, buffers=buffers, job_id=job_id, on_progress=on_progress), timeout_s)

    def _wait(self, job_id: str, timeout_s: float) -> Envelope:
        """The job's terminal message. After a timeout, or a lost orchestrator, it can be waited for again."""
        submitted, deadline_s = self._jobs[job_id], time.monotonic() + timeout_s
        while self._read_until(lambda: bool(submitted.came) or submitted.outcome is not None, deadline_s):
            while submitted.came and submitted.on_progress is not None:
                submitted.on_progress(submitted.came.popleft())
            if submitted.outcome is not None:
                with self._changed:
                    self._jobs.pop(job_id, None)
                return submitted.outcome
        raise TimeoutError(f"job {job_id} has no outcome after {timeout_s:.0f} s; ask again with job_id={job_id!r}")

    # ------------------------------------------------------------ reading: one thread at a time, for all that wait

    def _read_until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Whether the condition became true in time. Whoever waits reads in turn, for the others too.

        Raises:
            NodeLost: the orchestrator went away.
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
            if isinstance(message, Hello):  # the orchestrator was restarted; it knows the ids of what it had
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

    # ------------------------------------------------------------ the trainer's operations; keywords are those of `run`

    def forward(
        self, batch: BatchBuffers, *, adapters: bool = True, allowed_token_ids: Sequence[int] | None = None, **run: Any
    ) -> ForwardResult:
        """Log-probs and entropy of every token; only the batch's tokens, lengths and temperatures are sent.

        Args:
            adapters: False: the base model's, that is the reference policy's.
            allowed_token_ids: normalise over these only.
        """
        wanted = FORWARD_TENSORS | OPTIONAL_FORWARD_TENSORS
        kept = [(s, b) for s, b in zip(batch.specs, batch.buffers, strict=True) if s.name in wanted]
        allowed = None if allowed_token_ids is None else tuple(allowed_token_ids)
        job = ForwardJob(tensors=tuple(s for s, _ in kept), adapters=adapters, allowed_token_ids=allowed)
        envelope = self._run(job, [b for _, b in kept], **run)
        result = _outcome(envelope.message)
        found = dict(zip((s.name for s in envelope.message.tensors), envelope.buffers, strict=True))  # type: ignore[union-attr]
        values = {name: array.array("f", found[name]) for name in FORWARD_RESULTS}
        return ForwardResult(**values, seconds=result["seconds"])

    def train_merged(
        self,
        batch: BatchBuffers,
        loss: LossSpec | None = None,
        optim: OptimParams | None = None,
        *,
        mini_batch_sequences: int | None = None,
        epochs: int = 1,
        grad_accumulation_sequences: int | None = None,
        **run: Any,
    ) -> dict[str, Any]:
        """Train on the batch, then publish the next version; `["steps"]` has the metrics of each optimizer step, `["metrics"]` all together,
        `["warnings"]` what looks wrong (see `LossSpec.max_logprob_gap`).

        Args:
            mini_batch_sequences: one step for every so many sequences, in order; None: one for all of them.
            epochs: how often the batch is gone over.
        """
        job = TrainMergedJob(
            loss=loss or LossSpec(),
            optim=optim or OptimParams(),
            tensors=tuple(batch.specs),
            mini_batch_sequences=mini_batch_sequences,
            epochs=epochs,
            grad_accumulation_sequences=grad_accumulation_sequences,
        )
        return self.run(job, buffers=batch.buffers, **run)

    def train_lora(
        self,
        batch: BatchBuffers,
        output_dir: str,
        loss: LossSpec | None = None,
        optim: OptimParams | None = None,
        *,
        mini_batch_sequences: int | None = None,
        epochs: int = 1,
        grad_accumulation_sequences: int | None = None,
        **run: Any,
    ) -> dict[str, Any]:
        """Train on the batch, then write the adapter to a folder on the trainer's host; steps as in `train_merged`. Nothing is published."""
        job = TrainLoraJob(
            loss=loss or LossSpec(),
            optim=optim or OptimParams(),
            tensors=tuple(batch.specs),
            mini_batch_sequences=mini_batch_sequences,
            epochs=epochs,
            grad_accumulation_sequences=grad_accumulation_sequences,
            output_dir=output_dir,
        )
        return self.run(job, buffers=batch.buffers, **run)

    def forward_backward(
        self,
        batch: BatchBuffers,
        loss: LossSpec | None = None,
        *,
        loss_weight: float = 1.0,
        grad_accumulation_sequences: int | None = None,
        **run: Any,
    ) -> dict[str, Any]:
        """Add the batch's gradient to what is pending; `["metrics"]` are the batch's."""
        job = ForwardBackwardJob(
            loss=loss or LossSpec(),
            tensors=tuple(batch.specs),
            loss_weight=loss_weight,
            grad_accumulation_sequences=grad_accumulation_sequences,
        )
        return self.run(job, buffers=batch.buffers, **run)

    def optim_step(self, optim: OptimParams | None = None, **run: Any) -> dict[str, Any]:
        """One optimizer step with all that is pending; `["metrics"]` are those of all its batches together."""
        return self.run(OptimStepJob(optim=optim or OptimParams()), **run)

    def save_checkpoint(
        self, checkpoint_dir: str, *, client_state: Mapping[str, Any] | None = None, **run: Any
    ) -> dict[str, Any]:
        """Write the trainer's state to a folder on its host."""
        return self.run(SaveCheckpointJob(checkpoint_dir=checkpoint_dir, client_state=dict(client_state or {})), **run)

    def load_checkpoint(self, checkpoint_dir: str, **run: Any) -> dict[str, Any]:
        """Restore it; `["client_state"]` is what was saved with it, `["dropped_batches"]` how many batches' gradients were
        dropped, `["rng_restored"]` whether the random number generators go on where they were (at the same topology)."""
        return self.run(LoadCheckpointJob(checkpoint_dir=checkpoint_dir), **run)

    def load_adapter(self, adapter_dir: str, **run: Any) -> dict[str, Any]:
        """Put a PEFT adapter (a folder on the trainer's hosts) in the place of the trainer's; `["dropped_batches"]` as `load_checkpoint`."""
        return self.run(LoadAdapterJob(adapter_dir=adapter_dir), **run)

    def export_hf(self, output_dir: str, **run: Any) -> dict[str, Any]:
        """Write the merged model as an HF checkpoint into a new folder on the trainer's host."""
        return self.run(ExportHfJob(output_dir=output_dir), **run)

    def publish(self, **run: Any) -> dict[str, Any]:
        """Publish the trainer's present state as the next version."""
        return self.run(PublishJob(), **run)

    def status(self, *, timeout_s: float = 10.0) -> Status:
        """What is served, and by whom."""
        with self._changed:
            had = self._statuses_came
            self._awaits_status = True
        self._link.send(GetStatus())
        if self._read_until(lambda: self._statuses_came > had, time.monotonic() + timeout_s):
            assert self._status is not None
            return self._status
        raise TimeoutError(f"no status within {timeout_s:.0f} s")

    def cancel(self, job_id: str) -> None:
        """Cancel a job that has not started; `wait` for it then raises `JobFailed` with the code "cancelled"."""
        with self._changed:
            submitted = self._jobs.get(job_id)
            if submitted is not None:  # for an orchestrator that is just being restarted
                submitted.is_cancelled = True
        self._link.send(CancelJob(job_id=job_id))

    def stop_run(self, *, timeout_s: float = 30.0) -> None:
        """End the run: nodes and orchestrator shut down in order.

        Raises:
            TimeoutError: no orchestrator was there to hear it within `timeout_s`: it has ended, or the run goes on once it was resumed.
            NodeLost: none has been there for longer than a client waits.
        """
        self._is_stopping = True
        try:
            # What is sent to one that was just restarted, before it knows us again, is dropped.
            self.status(timeout_s=timeout_s)
        except BaseException:
            self._is_stopping = False
            raise
        self._link.send(StopRun())


class AsyncSpliceClient:
    """The same for asyncio; each call runs on a worker thread, so several jobs may be awaited at once."""

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

    async def submit(self, job: JobSpec, **kwargs: Any) -> str:
        """See `SpliceClient.submit`."""
        return await asyncio.to_thread(self._client.submit, job, **kwargs)

    async def wait(self, job_id: str, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.wait`."""
        return await asyncio.to_thread(self._client.wait, job_id, **kwargs)

    async def forward(self, batch: BatchBuffers, **kwargs: Any) -> ForwardResult:
        """See `SpliceClient.forward`."""
        return await asyncio.to_thread(self._client.forward, batch, **kwargs)

    async def train_merged(
        self, batch: BatchBuffers, loss: LossSpec | None = None, optim: OptimParams | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """See `SpliceClient.train_merged`."""
        return await asyncio.to_thread(self._client.train_merged, batch, loss, optim, **kwargs)

    async def train_lora(
        self,
        batch: BatchBuffers,
        output_dir: str,
        loss: LossSpec | None = None,
        optim: OptimParams | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See `SpliceClient.train_lora`."""
        return await asyncio.to_thread(self._client.train_lora, batch, output_dir, loss, optim, **kwargs)

    async def forward_backward(self, batch: BatchBuffers, loss: LossSpec | None = None, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.forward_backward`."""
        return await asyncio.to_thread(self._client.forward_backward, batch, loss, **kwargs)

    async def optim_step(self, optim: OptimParams | None = None, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.optim_step`."""
        return await asyncio.to_thread(self._client.optim_step, optim, **kwargs)

    async def save_checkpoint(self, checkpoint_dir: str, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.save_checkpoint`."""
        return await asyncio.to_thread(self._client.save_checkpoint, checkpoint_dir, **kwargs)

    async def load_checkpoint(self, checkpoint_dir: str, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.load_checkpoint`."""
        return await asyncio.to_thread(self._client.load_checkpoint, checkpoint_dir, **kwargs)

    async def load_adapter(self, adapter_dir: str, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.load_adapter`."""
        return await asyncio.to_thread(self._client.load_adapter, adapter_dir, **kwargs)

    async def export_hf(self, output_dir: str, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.export_hf`."""
        return await asyncio.to_thread(self._client.export_hf, output_dir, **kwargs)

    async def publish(self, **kwargs: Any) -> dict[str, Any]:
        """See `SpliceClient.publish`."""
        return await asyncio.to_thread(self._client.publish, **kwargs)

    async def status(self, **kwargs: Any) -> Status:
        """See `SpliceClient.status`."""
        return await asyncio.to_thread(self._client.status, **kwargs)

    async def cancel(self, job_id: str) -> None:
        """See `SpliceClient.cancel`."""
        self._client.cancel(job_id)

    async def stop_run(self, **kwargs: Any) -> None:
        """See `SpliceClient.stop_run`."""
        await asyncio.to_thread(self._client.stop_run, **kwargs)


def _outcome(message: AnyMessage | None) -> dict[str, Any]:
    if isinstance(message, Completed):
        return message.result
    if isinstance(message, Failed):
        raise JobFailed(
            code=message.code, node=message.node, phase=message.phase, message=message.message, remedy=message.remedy,
            steps_taken=message.steps_taken,
        )  # fmt: skip
    if message is not None and message.kind == "Cancelled":
        raise JobFailed(
            code="cancelled",
            node="orchestrator",
            phase="queued",
            message=message.reason,
            remedy="submit it again under a new id",
        )
    raise ProtocolError(f"{message!r} is not an outcome")


__all__ = ["AsyncSpliceClient", "BatchBuffers", "ForwardResult", "NodeLost", "SpliceClient"]
