"""The client: submits jobs and waits for their one outcome.

with SpliceClient(endpoint="tcp://127.0.0.1:40001", run_token=token) as client:
    client.run(InitialSyncJob())
    result = client.run(TrainMergedJob(tensors=..., optim=OptimParams(lr=1e-3)), buffers=batch.buffers)

    old = client.forward(batch).logprobs
    for part in parts:
        client.forward_backward(part, LossSpec(name="ppo"))
    client.optim_step(OptimParams(lr=1e-5))      # one step with all of them
    client.publish()
"""

from __future__ import annotations

import array
import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.errors import JobFailed, NodeLost, ProtocolError
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    FORWARD_RESULTS,
    FORWARD_TENSORS,
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
from orchestrator.protocol.node_link import CurveKeys, NodeLink
from orchestrator.router import new_id

OnProgress = Callable[[Progress], None]


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
        envelope = self._run(job, buffers, job_id=job_id, timeout_s=timeout_s, on_progress=on_progress)
        return _outcome(envelope.message)

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
        job_id = job_id or new_id("job")
        self._link.send(SubmitJob(job_id=job_id, job=job), buffers)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            envelope = self._link.recv(timeout_s=min(left_s, 1.0))
            if envelope is not None and isinstance(envelope.message, Hello):
                self._link.send(SubmitJob(job_id=job_id, job=job), buffers)  # the orchestrator was restarted; it knows the id
                continue
            if envelope is None or getattr(envelope.message, "request_id", None) != job_id:
                continue
            if not isinstance(envelope.message, Progress):
                return envelope
            if on_progress is not None:
                on_progress(envelope.message)
        raise TimeoutError(f"job {job_id} has no outcome after {timeout_s:.0f} s; ask again with job_id={job_id!r}")

    # ------------------------------------------------------------ the trainer's operations; keywords are those of `run`

    def forward(
        self, batch: BatchBuffers, *, adapters: bool = True, allowed_token_ids: Sequence[int] | None = None, **run: Any
    ) -> ForwardResult:
        """Log-probs and entropy of every token; only the batch's tokens and lengths are sent.

        Args:
            adapters: False: the base model's, that is the reference policy's.
            allowed_token_ids: normalise over these only.
        """
        kept = [(s, b) for s, b in zip(batch.specs, batch.buffers, strict=True) if s.name in FORWARD_TENSORS]
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
        """Train on the batch, then publish the next version; `["steps"]` has the metrics of each optimizer step, `["metrics"]` all together.

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

    async def status(self) -> Status:
        """See `SpliceClient.status`."""
        return await asyncio.to_thread(self._client.status)


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
