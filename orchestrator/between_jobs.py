"""What becomes of the trainer between jobs: `TrainerConfig.memory`, kept as a promise.

    resident    nothing happens
    offload     ReleaseMemory -> the job's terminal message; the trainer reloads by itself with its next request
    exit        save what no checkpoint has -> leave the transfer groups -> Shutdown, and StopTrainer to every launcher -> the job's
                terminal message; before the next job StartTrainer to every launcher

`release` returns only when the promised state has been reached, and the job's `Completed` is sent after that. In exit mode the
launchers (`splice trainer`, one for each host) answer for the processes: they answer StopTrainer when none is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.errors import ConfigError, NodeLost, SpliceError
from orchestrator.protocol.config import MemoryMode
from orchestrator.protocol.messages import ReleaseMemory, SaveCheckpoint, Shutdown, StartTrainer, StopTrainer
from orchestrator.publisher import Publisher
from orchestrator.router import ControlRouter, new_id
from orchestrator.trainer_requests import Report, TrainerRequests

log = logging.getLogger("splice.orchestrator")
LAUNCH_TIMEOUT_S, ORDERLY_END_S = 120.0, 45.0
LAUNCHERS_BACK_S = 5.0
MODES: tuple[MemoryMode, ...] = ("resident", "offload", "exit")


class BetweenJobs:
    """Brings the trainer to where its memory mode wants it after a job, and back before the next.

    Args:
        state_dir: where exit mode saves what no checkpoint has; this folder and one beside it in turn, so that the last durable state is never
            the one that is being written over.
        timeout_s: of a save or an offload.
    """

    def __init__(
        self,
        *,
        router: ControlRouter,
        trainer: TrainerRequests,
        publisher: Publisher,
        state_dir: Path,
        timeout_s: float,
        remember: Callable[[], None] = lambda: None,
    ) -> None:
        self._remember = remember
        self._router, self._trainer, self._publisher = router, trainer, publisher
        self._state_dir, self._timeout_s = str(state_dir.absolute()), timeout_s

    @property
    def mode(self) -> MemoryMode | None:
        """What launchers or trainer said; None before one of them was there."""
        memory = self._trainer.memory
        for node_id in [*self._router.nodes("launcher"), *self._router.nodes("trainer")]:
            said = self._router.peers[node_id].detail.get("memory")
            memory.mode = next((m for m in MODES if m == said), memory.mode)
        return memory.mode

    @property
    def can_wake(self) -> bool:
        """Whether a trainer that is not there can be had by `wake`."""
        return self.mode == "exit" and bool(self._router.nodes("launcher"))

    async def refuse_pending(self) -> None:
        """Gradients would be lost with the process.

        Raises:
            ConfigError: exit mode.
        """
        if self.mode is None:
            await self._trainer.ready(lambda phase, detail: None)
        if self.mode == "exit":
            raise ConfigError(
                "the trainer's memory mode is 'exit': its process ends with the job, and the gradients with it. Submit TrainMerged or "
                "TrainLora with the whole batch, or start the trainer with memory = 'offload' or 'resident'"
            )

    async def wake(self, report: Report) -> None:
        """Exit mode: have the trainer started, unless it is there.

        Raises:
            ConfigError: nobody is there to start it.
        """
        if self.mode != "exit":
            return
        launchers = await self._launchers()
        if not self._router.is_connected("trainer"):
            report("starting the trainer", {"hosts": launchers})
            await self._ask_launchers(
                [StartTrainer(request_id=new_id("start"), deadline_s=LAUNCH_TIMEOUT_S) for _ in launchers],
                launchers,
                phase="starting the trainer",
            )

    @property
    def has_to_release(self) -> bool:
        """Whether `release` does anything; where not, it returns without a turn of the event loop."""
        return self.mode in ("offload", "exit")

    async def release(self, report: Report) -> None:
        """Return once the mode's promise is true.

        Raises:
            JobFailed, NodeLost: it could not be made true, or something that no checkpoint has was lost on the way.
        """
        if self.mode == "offload":
            await self._trainer.ask(
                lambda: ReleaseMemory(request_id=new_id("release"), deadline_s=self._timeout_s),
                phase="offloading",
                report=report,
            )
        elif self.mode == "exit":
            await self._end_trainer(report)

    async def release_after_failure(self) -> None:
        """The same after a job that failed, whose own error counts: what goes wrong here is logged."""
        try:
            await self.release(lambda phase, detail: log.info("after a failed job: %s %s", phase, detail))
        except (SpliceError, OSError) as error:
            log.warning("the trainer could not be brought to memory mode %s: %s", self.mode, error)

    async def _end_trainer(self, report: Report) -> None:
        grace_s = 0.0
        await self._save_what_is_new(report)
        if self._router.is_connected("trainer"):
            await self._publisher.leave_all()
            try:
                await self._router.send("trainer", Shutdown(reason="memory mode exit: the job is done"))
                grace_s = ORDERLY_END_S
            except NodeLost as error:
                log.info("the trainer is gone already: %s", error)
        report("ending the trainer", {})
        launchers = await self._launchers()
        await self._ask_launchers(
            [StopTrainer(request_id=new_id("stop"), deadline_s=LAUNCH_TIMEOUT_S, grace_s=grace_s) for _ in launchers],
            launchers,
            phase="ending the trainer",
        )
        self._router.forget("trainer")

    async def _launchers(self) -> list[str]:
        """Those of all hosts; after a restart of ours they come back within seconds.

        Raises:
            ConfigError: not all of them are there.
        """
        deadline = time.monotonic() + LAUNCHERS_BACK_S
        while True:
            here = self._router.nodes("launcher")
            wanted = max([1, *(int(self._router.peers[i].detail.get("num_nodes", 1)) for i in here)])  # type: ignore[call-overload]
            if len(here) >= wanted:
                return here
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the trainer's memory mode is 'exit', but of {wanted} launchers, which start it again, {len(here)} are there: start it "
                    "by `splice trainer` on each of its hosts, not by torchrun, or choose another mode"
                )
            await asyncio.sleep(0.1)

    async def _save_what_is_new(self, report: Report) -> None:
        memory = self._trainer.memory
        if not memory.is_ahead:
            return
        await self.wake(report)
        folder = memory.free_folder(self._state_dir)
        report("saving", {"checkpoint_dir": folder})
        save = SaveCheckpoint(
            request_id=new_id("save"), deadline_s=self._timeout_s, version=memory.version, checkpoint_dir=folder
        )
        await self._trainer.ask(lambda: save, phase="saving before the trainer ends", report=report)
        memory.saved(folder)
        self._remember()

    async def _ask_launchers(
        self, requests: Sequence[StartTrainer | StopTrainer], launchers: Sequence[str], *, phase: str
    ) -> None:
        pairs = zip(launchers, requests, strict=True)
        await asyncio.gather(*(self._router.request(launcher, request, phase=phase) for launcher, request in pairs))
