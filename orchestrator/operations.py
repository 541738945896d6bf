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
    Operation,
    OptimStep,
    SaveCheckpoint,
    TrainLora,
)
from orchestrator.run import Run

_PHASES: dict[type, str] = {
    Forward: "forward",
    TrainLora: "training",
    ForwardBackward: "forward and backward",
    OptimStep: "optimizer step",
    SaveCheckpoint: "saving",
    LoadCheckpoint: "loading",
    LoadAdapter: "loading an adapter",
    NewAdapter: "making an adapter",
    ExportHf: "exporting",
}


class Operations:
    """Runs these jobs."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder
        self._facts, self._trainer, self._router = run.facts, run.trainer, run.router
        self._publisher = run.publisher

    async def run(self, job: Job, spec: Operation) -> Outcome:
        """Check the job's folders, ask the trainer, and note the new state."""
        phase = _PHASES[type(spec)]
        spec, folders = self._with_whole_paths(spec)
        if isinstance(spec, SaveCheckpoint):
            self._trainer.memory.saving = spec.checkpoint_dir
        completed, buffers = await self._trainer.run(
            spec,
            job.buffers,
            request_id=request_id(phase, job),
            phase=phase,
            report=job.report,
            replaces_state=isinstance(spec, LoadCheckpoint),
        )
        self._note(spec, completed.result)
        result = {**completed.result, **folders}
        return Outcome(result=result, tensors=completed.tensors, buffers=buffers)

    def _with_whole_paths(self, spec: Operation) -> tuple[Operation, dict[str, str]]:
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

    def _note(self, spec: Operation, result: Mapping[str, Any]) -> None:
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
        elif isinstance(spec, SaveCheckpoint):
            memory.saved(spec.checkpoint_dir)
        elif isinstance(spec, LoadCheckpoint):
            memory.loaded(spec.checkpoint_dir)
            self._facts.put_aside(None)


def request_id(phase: str, job: Job) -> str:
    """Return the id of a job's request: the same one if a restarted orchestrator asks again."""
    return f"{phase.replace(' ', '-')}-{job.id}"
