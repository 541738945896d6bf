"""The client: submits jobs and waits for the one outcome of each.

with SpliceClient(endpoint="tcp://127.0.0.1:40001", run_token=token) as client:
    client.run(InitialSyncJob())
    client.train_merged(batch, LossSpec(name="ppo"), OptimParams(lr=1e-5))

    old = client.forward(batch).logprobs
    for part in parts:
        client.forward_backward(part, LossSpec(name="ppo"))
    client.optim_step(OptimParams(lr=1e-5))  # one step with the gradients of all parts
    client.publish()

    first = client.submit(job, buffers=batch.buffers)  # queues both, waits for neither
    second = client.submit(job, buffers=next_batch.buffers)
    client.wait(first), client.wait(second)
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    NotRequired,
    ParamSpec,
    Protocol,
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
    FORWARD_TENSORS,
    OPTIONAL_FORWARD_TENSORS,
    WAITING,
    AdapterResult,
    CancelJob,
    Cancelled,
    Completed,
    ExportHfJob,
    ExportHfResult,
    Failed,
    ForwardBackwardJob,
    ForwardBackwardResult,
    ForwardJob,
    ForwardResult,
    GetStatus,
    Hello,
    InitialSyncJob,
    JobOf,
    JobResult,
    JobSpec,
    LoadAdapterJob,
    LoadCheckpointJob,
    LoadCheckpointResult,
    LossSpec,
    NewAdapterJob,
    NextBatch,
    OptimParams,
    OptimStepJob,
    OptimStepResult,
    Progress,
    PublishJob,
    PublishResult,
    ResyncJob,
    SaveCheckpointJob,
    SaveCheckpointResult,
    Status,
    StopRun,
    SubmitJob,
    TensorSpec,
    TrainLoraJob,
    TrainLoraResult,
    TrainMergedJob,
    TrainMergedResult,
    TrainStep,
    check_node_id,
    new_id,
)
from orchestrator.protocol.node_link import NodeLink
from splice.run_file import find_run

log = logging.getLogger("splice.client")
OnProgress = Callable[[Progress], None]
READ_TURN_S = 0.5
LOOK_S = 1.0
Buffers = Sequence[bytes | memoryview]
P = ParamSpec("P")
R = TypeVar("R")
Result = TypeVar("Result", bound=JobResult)


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


class BatchBuffers(Protocol):
    """A batch: specs (see `batch_specs`) and the raw buffers in the same order."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """One spec for each buffer."""
        ...

    @property
    def buffers(self) -> Buffers:
        """Raw elements, little-endian and row-major."""
        ...


@dataclass(slots=True, kw_only=True)
class _Submitted:
    """A job whose outcome `wait` has not returned. `came`: progress for `on_progress`."""

    message: SubmitJob
    buffers: Buffers
    on_progress: OnProgress | None
    came: deque[Progress] = field(default_factory=deque)
    outcome: Envelope | None = None
    is_cancelled: bool = False


class SpliceClient:
    """A client of a running orchestrator. Threads may share it.

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
    def of_run(cls, run_dir: str | Path, **naming: Unpack[Naming]) -> SpliceClient:
        """A client of the run in this folder. It reads endpoint and token there.

        After `splice stop` and `splice up --resume` it finds the run's new endpoint. A host that
        does not see the folder reads SPLICE_ENDPOINT and SPLICE_RUN_TOKEN.

        Raises:
            ConfigError: no orchestrator has written them yet.
        """
        return cls(**find_run(Path(run_dir)), **naming)

    def __enter__(self) -> SpliceClient:
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

    def announce(self, job: TrainMergedJob, *, buffers: Buffers) -> None:
        """Say what the next training job will bring, while another one runs.

        The trainer may begin with the batch while it saves. If the next job has the same batch and
        loss, the trainer continues from there, with the same result as without; `optim` may differ.
        Any other job makes the trainer forget it. Call it once for a batch.

        Raises:
            ConfigError: the job is of another kind.
            ProtocolError: the buffers do not match the job's `tensors`.
        """
        if not isinstance(job, TrainMergedJob):
            raise ConfigError(f"announce takes a TrainMergedJob, not {type(job).__name__}")
        fields = {name: getattr(job, name) for name in TrainStep.model_fields}
        self._link.send(NextBatch(**fields), buffers)

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

    # ------------------------------------------------------------ jobs

    def initial_sync(
        self, *, replicas: int | None = None, **options: Unpack[RunOptions]
    ) -> PublishResult:
        """Publish the trainer's weights as `name@0`, once `replicas` (None: all) are ready."""
        return self.run(InitialSyncJob(replicas=replicas), **options)

    def resync(self, **options: Unpack[RunOptions]) -> PublishResult:
        """Send the whole served version to every replica again, and verify it."""
        return self.run(ResyncJob(), **options)

    def forward(
        self,
        batch: BatchBuffers,
        *,
        adapters: bool = True,
        allowed_token_ids: Sequence[int] | None = None,
        **options: Unpack[RunOptions],
    ) -> ForwardResult:
        """Return log-probs and entropy of every token.

        Sends only the batch's tokens, lengths and temperatures.

        Args:
            adapters: False evaluates the base model, which is the reference policy.
            allowed_token_ids: normalise over these token ids only.
        """
        wanted = FORWARD_TENSORS | OPTIONAL_FORWARD_TENSORS
        kept = [(s, b) for s, b in zip(batch.specs, batch.buffers, strict=True) if s.name in wanted]
        job = ForwardJob(
            tensors=tuple(s for s, _ in kept),
            adapters=adapters,
            allowed_token_ids=None if allowed_token_ids is None else tuple(allowed_token_ids),
        )
        return self.run(job, buffers=[b for _, b in kept], **options)

    def train_merged(
        self,
        batch: BatchBuffers,
        loss: LossSpec | None = None,
        optim: OptimParams | None = None,
        *,
        mini_batch_sequences: int | None = None,
        epochs: int = 1,
        grad_accumulation_sequences: int | None = None,
        **options: Unpack[RunOptions],
    ) -> TrainMergedResult:
        """Train on the batch, then publish the next version.

        Args:
            mini_batch_sequences: sequences per optimizer step, in order; None: all in one step.
            epochs: passes over the batch.
        """
        job = TrainMergedJob(
            loss=loss or LossSpec(),
            optim=optim or OptimParams(),
            tensors=tuple(batch.specs),
            mini_batch_sequences=mini_batch_sequences,
            epochs=epochs,
            grad_accumulation_sequences=grad_accumulation_sequences,
        )
        return self.run(job, buffers=batch.buffers, **options)

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
        **options: Unpack[RunOptions],
    ) -> TrainLoraResult:
        """Train as `train_merged` does, then write the adapter to a folder on the trainer's host.

        Nothing is published.
        """
        job = TrainLoraJob(
            loss=loss or LossSpec(),
            optim=optim or OptimParams(),
            tensors=tuple(batch.specs),
            mini_batch_sequences=mini_batch_sequences,
            epochs=epochs,
            grad_accumulation_sequences=grad_accumulation_sequences,
            output_dir=output_dir,
        )
        return self.run(job, buffers=batch.buffers, **options)

    def forward_backward(
        self,
        batch: BatchBuffers,
        loss: LossSpec | None = None,
        *,
        loss_weight: float = 1.0,
        grad_accumulation_sequences: int | None = None,
        returns_logprobs: bool = False,
        **options: Unpack[RunOptions],
    ) -> ForwardBackwardResult:
        """Add the batch's gradient to the pending gradients.

        Args:
            returns_logprobs: the result has every token's log-prob, as this pass computed it.
        """
        job = ForwardBackwardJob(
            loss=loss or LossSpec(),
            tensors=tuple(batch.specs),
            loss_weight=loss_weight,
            grad_accumulation_sequences=grad_accumulation_sequences,
            returns_logprobs=returns_logprobs,
        )
        return self.run(job, buffers=batch.buffers, **options)

    def optim_step(
        self, optim: OptimParams | None = None, **options: Unpack[RunOptions]
    ) -> OptimStepResult:
        """Take one optimizer step with the pending gradients."""
        return self.run(OptimStepJob(optim=optim or OptimParams()), **options)

    def save_checkpoint(
        self,
        checkpoint_dir: str,
        *,
        client_state: Mapping[str, Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> SaveCheckpointResult:
        """Write the trainer's state to a folder on its host.

        A relative path is relative to the run's folder, here and in every other method.
        """
        return self.run(
            SaveCheckpointJob(checkpoint_dir=checkpoint_dir, client_state=dict(client_state or {})),
            **options,
        )

    def load_checkpoint(
        self, checkpoint_dir: str, **options: Unpack[RunOptions]
    ) -> LoadCheckpointResult:
        """Restore the trainer's state from a checkpoint."""
        return self.run(LoadCheckpointJob(checkpoint_dir=checkpoint_dir), **options)

    def load_adapter(self, adapter_dir: str, **options: Unpack[RunOptions]) -> AdapterResult:
        """Replace the trainer's adapter by a PEFT adapter, a folder on the trainer's hosts."""
        return self.run(LoadAdapterJob(adapter_dir=adapter_dir), **options)

    def new_adapter(
        self,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        seed: int | None = None,
        **options: Unpack[RunOptions],
    ) -> AdapterResult:
        """Replace the trainer's adapter by a fresh one. What is left out stays as it is."""
        wanted = None if targets is None else tuple(targets)
        return self.run(NewAdapterJob(rank=rank, alpha=alpha, targets=wanted, seed=seed), **options)

    def export_hf(
        self, output_dir: str, *, fp8_like: str | None = None, **options: Unpack[RunOptions]
    ) -> ExportHfResult:
        """Write the merged model as an HF checkpoint into a new folder on the trainer's host.

        Args:
            fp8_like: a block-scaled FP8 checkpoint of this model there; the export is FP8 like it.
        """
        return self.run(ExportHfJob(output_dir=output_dir, fp8_like=fp8_like), **options)

    def publish(
        self, *, refuses_pending: bool = False, **options: Unpack[RunOptions]
    ) -> PublishResult:
        """Publish the trainer's current state as the next version. Pending gradients stay.

        Args:
            refuses_pending: fail while gradients are pending, such as another client's.
        """
        return self.run(PublishJob(refuses_pending=refuses_pending), **options)

    def status(self, *, timeout_s: float = 10.0) -> Status:
        """The served version, the nodes and the queue."""
        with self._changed:
            had = self._statuses_came
            self._awaits_status = True
        self._link.send(GetStatus())
        if self._read_until(lambda: self._statuses_came > had, time.monotonic() + timeout_s):
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
                "(InitialSyncJob). `splice status` shows what it waits for"
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
        self._is_stopping = True
        try:
            # A restarted orchestrator drops messages until it knows this client again.
            self.status(timeout_s=timeout_s)
        except BaseException:
            self._is_stopping = False
            raise
        self._link.send(StopRun())


def run_watched(
    client: SpliceClient,
    job: JobOf[Result],
    *,
    look: Callable[[], None],
    timeout_s: float = 7200.0,
    buffers: Buffers = (),
    job_id: str | None = None,
    on_progress: OnProgress | None = None,
) -> Result:
    """`SpliceClient.run`, for whoever started the roles and knows when one does not come back.

    Args:
        look: called every `LOOK_S`; what it raises ends the wait.
    """
    spec, deadline_s = cast(JobSpec, job), time.monotonic() + timeout_s
    job_id = client.submit(spec, buffers=buffers, job_id=job_id, on_progress=on_progress)
    while True:
        look()
        try:
            return cast(Result, client.wait(job_id, timeout_s=LOOK_S))
        except TimeoutError:
            if time.monotonic() > deadline_s:
                raise


def _on_a_thread(
    method: Callable[Concatenate[SpliceClient, P], R],
) -> Callable[Concatenate[AsyncSpliceClient, P], Awaitable[R]]:
    """The method for asyncio, with the same arguments and result."""

    async def call(self: AsyncSpliceClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self.client, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class AsyncSpliceClient:
    """`SpliceClient` for asyncio: each call runs on a worker thread, so awaits may overlap."""

    def __init__(self, **connection: Unpack[Connection]) -> None:
        self.client = SpliceClient(**connection)

    @classmethod
    def of_run(cls, run_dir: str | Path, **naming: Unpack[Naming]) -> Self:
        """See `SpliceClient.of_run`."""
        return cls(**find_run(Path(run_dir)), **naming)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.client.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.__exit__)

    run = _on_a_thread(SpliceClient.run)
    submit = _on_a_thread(SpliceClient.submit)
    announce = _on_a_thread(SpliceClient.announce)
    wait = _on_a_thread(SpliceClient.wait)
    initial_sync = _on_a_thread(SpliceClient.initial_sync)
    resync = _on_a_thread(SpliceClient.resync)
    forward = _on_a_thread(SpliceClient.forward)
    train_merged = _on_a_thread(SpliceClient.train_merged)
    train_lora = _on_a_thread(SpliceClient.train_lora)
    forward_backward = _on_a_thread(SpliceClient.forward_backward)
    optim_step = _on_a_thread(SpliceClient.optim_step)
    save_checkpoint = _on_a_thread(SpliceClient.save_checkpoint)
    load_checkpoint = _on_a_thread(SpliceClient.load_checkpoint)
    load_adapter = _on_a_thread(SpliceClient.load_adapter)
    new_adapter = _on_a_thread(SpliceClient.new_adapter)
    export_hf = _on_a_thread(SpliceClient.export_hf)
    publish = _on_a_thread(SpliceClient.publish)
    status = _on_a_thread(SpliceClient.status)
    base_url = _on_a_thread(SpliceClient.base_url)
    cancel = _on_a_thread(SpliceClient.cancel)
    stop_run = _on_a_thread(SpliceClient.stop_run)


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
        raise JobFailed(
            code=message.code,
            node=message.node,
            phase=message.phase,
            message=message.message,
            remedy=message.remedy,
            steps_taken=message.steps_taken,
        )
    if isinstance(message, Cancelled):
        raise JobFailed(
            code=ErrorCode.CANCELLED,
            node="orchestrator",
            phase="queued",
            message=message.reason,
            remedy="submit it again under a new id",
        )
    raise ProtocolError(f"{message!r} is not an outcome")
