"""Jobs that are one request to the trainer, and what they change in its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.facts import steps_taken
from orchestrator.jobs import Job, Outcome
from orchestrator.protocol.messages import (
    ExportHf,
    Forward,
    ForwardBackward,
    LoadAdapter,
    LoadCheckpoint,
    NewAdapter,
    OperationJob,
    OptimStep,
    SaveCheckpoint,
    SaveCheckpointJob,
    TrainLora,
)
from orchestrator.run import Run

_PHASES: dict[type, str] = {
    Forward: "forward",
    TrainLora: "training",
    ForwardBackward: "forward and backward",
    OptimStep: "optimizer step",
    SaveCheckpointJob: "saving",
    LoadCheckpoint: "loading",
    LoadAdapter: "loading an adapter",
    NewAdapter: "making an adapter",
    ExportHf: "exporting",
}


Spec = OperationJob | SaveCheckpointJob


class Operations:
    """Runs these jobs."""

    def __init__(self, run: Run) -> None:
        self._config, self._folder = run.config, run.folder
        self._facts, self._trainer, self._router = run.facts, run.trainer, run.router
        self._publisher = run.publisher

    async def run(self, job: Job, spec: OperationJob | SaveCheckpointJob) -> Outcome:
        """Check the job's folders, ask the trainer, and note the new state."""
        phase = _PHASES[type(spec)]
        spec, folders = self._with_whole_paths(spec)
        if isinstance(spec, SaveCheckpointJob):
            self._trainer.memory.saving = spec.checkpoint_dir
        completed, buffers = await self._trainer.ask(
            self._request(spec, request_id=request_id(phase, job)),
            job.buffers,
            phase=phase,
            report=job.report,
            replaces_state=isinstance(spec, LoadCheckpoint),
        )
        self._note(spec, completed.result)
        result = {**completed.result, **folders}
        return Outcome(result=result, tensors=completed.tensors, buffers=buffers)

    def _with_whole_paths(self, spec: Spec) -> tuple[Spec, dict[str, str]]:
        """Return the job with absolute paths, and what its result says of them.

        A relative path is relative to the run's folder: orchestrator, client and trainer may have
        different working folders.
        """
        folders = {
            field: self._folder.resolve(getattr(spec, field))
            for field in ("checkpoint_dir", "adapter_dir", "output_dir", "fp8_like")
            if getattr(spec, field, None) is not None
        }
        if not isinstance(spec, LoadCheckpoint | LoadAdapter):
            for field, folder in folders.items():
                if field != "fp8_like":  # is only read
                    self._folder.refuse_own(folder, field=field)
        if not folders:
            return spec, {}
        trainer = self._router.peers.get("trainer")
        host = {} if trainer is None else {"host": trainer.hello.host}
        return spec.model_copy(update=folders), folders | host

    def _request(
        self, spec: OperationJob | SaveCheckpointJob, *, request_id: str
    ) -> OperationJob | SaveCheckpoint:
        deadline_s = self._config.train_timeout_s
        if not isinstance(spec, SaveCheckpointJob):
            return spec.as_request(request_id=request_id, deadline_s=deadline_s)
        return SaveCheckpoint(
            request_id=request_id,
            deadline_s=deadline_s,
            version=self._trainer.memory.version,
            checkpoint_dir=spec.checkpoint_dir,
            client_state=spec.client_state,
        )

    def _note(self, spec: OperationJob | SaveCheckpointJob, result: Mapping[str, Any]) -> None:
        memory = self._trainer.memory
        if result.get("adapter_changed"):
            self._publisher.forget_plan()
        if isinstance(spec, TrainLora | OptimStep):
            memory.stepped(steps_taken(result))
        elif isinstance(spec, LoadAdapter):
            memory.took_adapter(spec.adapter_dir)
        elif isinstance(spec, NewAdapter):
            memory.took_adapter(f"of rank {result.get('rank')}")
        elif isinstance(spec, ForwardBackward):
            memory.pending = int(result.get("pending_batches", memory.pending + 1))
        elif isinstance(spec, SaveCheckpointJob):
            memory.saved(spec.checkpoint_dir)
        elif isinstance(spec, LoadCheckpoint):
            memory.loaded(spec.checkpoint_dir)
            self._facts.put_aside(None)


def request_id(phase: str, job: Job) -> str:
    """Return the id of a job's request: the same one if a restarted orchestrator asks again."""
    return f"{phase.replace(' ', '-')}-{job.id}"
