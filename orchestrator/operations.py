"""Jobs that are one request to the trainer, and what they change in its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.jobs import Job, Outcome
from orchestrator.protocol.messages import (
    ExportHf,
    Forward,
    ForwardBackward,
    LoadAdapter,
    LoadCheckpoint,
    OperationJob,
    OptimStep,
    SaveCheckpoint,
    SaveCheckpointJob,
    TrainLora,
)
from orchestrator.run import Run
from orchestrator.run_folder import refuse_relative

_PHASES: dict[type, str] = {
    Forward: "forward",
    TrainLora: "training",
    ForwardBackward: "forward and backward",
    OptimStep: "optimizer step",
    SaveCheckpointJob: "saving",
    LoadCheckpoint: "loading",
    LoadAdapter: "loading an adapter",
    ExportHf: "exporting",
}


class Operations:
    """Runs these jobs."""

    def __init__(self, run: Run) -> None:
        self._config, self._folder = run.config, run.folder
        self._facts, self._trainer = run.facts, run.trainer

    async def run(self, job: Job, spec: OperationJob | SaveCheckpointJob) -> Outcome:
        """Check the job's folders, ask the trainer, and note the new state."""
        phase = _PHASES[type(spec)]
        self._check_folders(spec)
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
        return Outcome(result=dict(completed.result), tensors=completed.tensors, buffers=buffers)

    def _check_folders(self, spec: OperationJob | SaveCheckpointJob) -> None:
        for field in ("checkpoint_dir", "adapter_dir", "output_dir"):
            folder = getattr(spec, field, None)
            if folder is not None:
                refuse_relative(folder, field=field)
                if not isinstance(spec, LoadCheckpoint | LoadAdapter):
                    self._folder.refuse_own(folder, field=field)

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
        if isinstance(spec, TrainLora | OptimStep):
            memory.stepped(steps_taken(result))
        elif isinstance(spec, LoadAdapter):
            memory.took_adapter(spec.adapter_dir)
        elif isinstance(spec, ForwardBackward):
            memory.pending = int(result.get("pending_batches", memory.pending + 1))
        elif isinstance(spec, SaveCheckpointJob):
            memory.saved(spec.checkpoint_dir)
        elif isinstance(spec, LoadCheckpoint):
            memory.loaded(spec.checkpoint_dir)
            self._facts.put_aside(None)


def steps_taken(result: Mapping[str, Any]) -> int:
    """Return the number of optimizer steps that a training request took, without skipped ones."""
    return sum("skipped" not in metrics for metrics in result.get("steps") or [{}])


def request_id(phase: str, job: Job) -> str:
    """Return the id of a job's request: the same one if a restarted orchestrator asks again."""
    return f"{phase.replace(' ', '-')}-{job.id}"
