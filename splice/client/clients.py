"""The client: submits jobs and waits for the one outcome of each.

with SpliceClient(endpoint="tcp://127.0.0.1:40001", run_token=token) as client:
    client.initial_sync()
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
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
)

from orchestrator.protocol.messages import (
    FORWARD_TENSORS,
    OPTIONAL_FORWARD_TENSORS,
    AdapterResult,
    ExportHf,
    ExportHfResult,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    InitialSync,
    JobOf,
    JobSpec,
    LoadAdapter,
    LoadCheckpoint,
    LoadCheckpointResult,
    LossSpec,
    NewAdapter,
    OptimParams,
    OptimStep,
    OptimStepResult,
    Publish,
    PublishResult,
    Resync,
    SaveCheckpoint,
    SaveCheckpointResult,
    TensorSpec,
    TrainLora,
    TrainLoraResult,
    TrainMerged,
    TrainMergedResult,
)
from splice.client.run_file import find_run
from splice.client.run_link import (
    Buffers,
    Connection,
    Naming,
    OnProgress,
    Result,
    RunLink,
    RunOptions,
)

LOOK_S, WATCHED_S = 1.0, 7200.0
P = ParamSpec("P")
R = TypeVar("R")


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


def forward_of(
    batch: BatchBuffers, *, adapters: bool = True, allowed_token_ids: Sequence[int] | None = None
) -> tuple[Forward, list[bytes | memoryview]]:
    """Return the job of a forward pass over a batch, and those buffers of the batch that it
    needs."""
    wanted = FORWARD_TENSORS | OPTIONAL_FORWARD_TENSORS
    kept = [(s, b) for s, b in zip(batch.specs, batch.buffers, strict=True) if s.name in wanted]
    job = Forward(
        tensors=tuple(s for s, _ in kept),
        adapters=adapters,
        allowed_token_ids=None if allowed_token_ids is None else tuple(allowed_token_ids),
    )
    return job, [b for _, b in kept]


class SpliceClient(RunLink):
    """A client of a running orchestrator. Threads may share it.

    The orchestrator runs jobs one at a time, in the order of their arrival. Each method returns a
    job's result; `submit` and `wait` of `RunLink` run several.

    Raises (on enter): as `RunLink`.
    """

    def initial_sync(
        self, *, replicas: int | None = None, **options: Unpack[RunOptions]
    ) -> PublishResult:
        """Publish the trainer's weights as `name@0`, once `replicas` (None: all) are ready."""
        return self.run(InitialSync(replicas=replicas), **options)

    def resync(self, **options: Unpack[RunOptions]) -> PublishResult:
        """Send the whole served version to every replica again, and verify it."""
        return self.run(Resync(), **options)

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
        job, buffers = forward_of(batch, adapters=adapters, allowed_token_ids=allowed_token_ids)
        return self.run(job, buffers=buffers, **options)

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
        job = TrainMerged(
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
        job = TrainLora(
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
        job = ForwardBackward(
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
        return self.run(OptimStep(optim=optim or OptimParams()), **options)

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
            SaveCheckpoint(checkpoint_dir=checkpoint_dir, client_state=dict(client_state or {})),
            **options,
        )

    def load_checkpoint(
        self, checkpoint_dir: str, **options: Unpack[RunOptions]
    ) -> LoadCheckpointResult:
        """Restore the trainer's state from a checkpoint."""
        return self.run(LoadCheckpoint(checkpoint_dir=checkpoint_dir), **options)

    def load_adapter(self, adapter_dir: str, **options: Unpack[RunOptions]) -> AdapterResult:
        """Replace the trainer's adapter by a PEFT adapter, a folder on the trainer's hosts."""
        return self.run(LoadAdapter(adapter_dir=adapter_dir), **options)

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
        return self.run(NewAdapter(rank=rank, alpha=alpha, targets=wanted, seed=seed), **options)

    def export_hf(
        self, output_dir: str, *, fp8_like: str | None = None, **options: Unpack[RunOptions]
    ) -> ExportHfResult:
        """Write the merged model as an HF checkpoint into a new folder on the trainer's host.

        Args:
            fp8_like: a block-scaled FP8 checkpoint of this model there; the export is FP8 like it.
        """
        return self.run(ExportHf(output_dir=output_dir, fp8_like=fp8_like), **options)

    def publish(
        self, *, refuses_pending: bool = False, **options: Unpack[RunOptions]
    ) -> PublishResult:
        """Publish the trainer's current state as the next version. Pending gradients stay.

        Args:
            refuses_pending: fail while gradients are pending, such as another client's.
        """
        return self.run(Publish(refuses_pending=refuses_pending), **options)


def run_watched(
    client: SpliceClient,
    job: JobOf[Result],
    *,
    look: Callable[[], None],
    buffers: Buffers = (),
    on_progress: OnProgress | None = None,
) -> Result:
    """`SpliceClient.run`, for whoever started the roles and knows when one does not come back.

    Args:
        look: called every `LOOK_S`; what it raises ends the wait.
    """
    deadline_s = time.monotonic() + WATCHED_S
    job_id = client.submit(cast(JobSpec, job), buffers=buffers, on_progress=on_progress)
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
