"""The trainer's memory between jobs, as `TrainerConfig.memory` promises.

    resident    nothing happens
    offload     ReleaseMemory -> the job's terminal message; the next request reloads the trainer
    exit        save new state -> leave the transfer groups -> Shutdown, and StopTrainer to every
                launcher -> the job's terminal message; then StartTrainer before the next job

`release` returns once the promise is kept. The job's `Completed` follows. In exit mode the
launchers (`splice trainer`, one for each host) answer StopTrainer when their host has no trainer
process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from orchestrator.control.peers import LAUNCHER
from orchestrator.control.waiting import Report
from orchestrator.errors import ConfigError, NodeLost, SpliceError
from orchestrator.protocol.config import MemoryMode
from orchestrator.protocol.messages import (
    AnyMessage,
    ReleaseMemory,
    Shutdown,
    StartTrainer,
    StopTrainer,
)
from orchestrator.run import Run

log = logging.getLogger("splice.orchestrator")
LAUNCH_TIMEOUT_S, ORDERLY_END_S = 120.0, 45.0
LAUNCHERS_BACK_S = 5.0
MODES: tuple[MemoryMode, ...] = ("resident", "offload", "exit")


class BetweenJobs:
    """Applies the trainer's memory mode after a job, and wakes the trainer before the next.

    Exit mode saves new state in RUN_DIR/trainer_state. It alternates with a second folder, so that
    a save never overwrites the last durable state.
    """

    def __init__(self, run: Run) -> None:
        self._router, self._trainer, self._publisher = run.router, run.trainer, run.publisher
        self._facts, self._timeout_s = run.facts, run.config.train_timeout_s
        self._state_dir = str(run.config.run_dir.absolute() / "trainer_state")

    @property
    def mode(self) -> MemoryMode | None:
        """The mode that launchers or trainer reported. None: none has joined yet."""
        memory = self._trainer.memory
        for node_id in [*self._router.nodes("launcher"), *self._router.nodes("trainer")]:
            said = self._router.peers[node_id].detail.get("memory")
            memory.mode = next((m for m in MODES if m == said), memory.mode)
        return memory.mode

    @property
    def can_wake(self) -> bool:
        """Whether `wake` can start an absent trainer."""
        return self.mode == "exit" and bool(self._router.nodes("launcher"))

    async def refuse_pending(self) -> None:
        """Refuse `ForwardBackward` in exit mode, which would lose the gradients with the process.

        Raises:
            ConfigError: the mode is exit.
        """
        if self.mode is None:
            await self._trainer.ready(lambda phase, detail: None)
        if self.mode == "exit":
            raise ConfigError(
                "the trainer's memory mode is 'exit': its process ends with the job, and the "
                "gradients with it. Submit TrainMerged or "
                "TrainLora with the whole batch, or start the trainer with memory = 'offload' or "
                "'resident'"
            )

    async def wake(self, report: Report) -> None:
        """Exit mode: start the trainer if it is absent.

        Raises:
            ConfigError: launchers are missing.
        """
        if self.mode != "exit":
            return
        launchers = await self._launchers()
        if not self._router.is_connected("trainer"):
            report("starting the trainer", {"hosts": launchers})
            await self._ask_launchers(
                launchers,
                lambda: StartTrainer(deadline_s=LAUNCH_TIMEOUT_S),
                phase="starting the trainer",
            )

    @property
    def has_to_release(self) -> bool:
        """Whether `release` does anything. If not, it returns without yielding to the loop."""
        return self.mode in ("offload", "exit")

    async def release(self, report: Report) -> None:
        """Return once the mode's promise is kept.

        Raises:
            JobFailed, NodeLost: the promise could not be kept, or unsaved state was lost.
        """
        if self.mode == "offload":
            await self._trainer.ask(
                ReleaseMemory(deadline_s=self._timeout_s),
                phase="offloading",
                report=report,
            )
        elif self.mode == "exit":
            await self._end_trainer(report)

    async def release_after_failure(self) -> None:
        """Release after a failed job, and log errors: the job reports its own."""
        try:
            await self.release(
                lambda phase, detail: log.info("after a failed job: %s %s", phase, detail)
            )
        except (SpliceError, OSError) as error:
            log.warning("the trainer could not enter memory mode %s: %s", self.mode, error)

    async def _end_trainer(self, report: Report) -> None:
        grace_s = 0.0
        await self._save_what_is_new(report)
        if self._router.is_connected("trainer"):
            await self._publisher.leave_all()
            try:
                await self._router.send(
                    "trainer", Shutdown(reason="memory mode exit: the job is done")
                )
                grace_s = ORDERLY_END_S
            except NodeLost as error:
                log.info("the trainer is gone already: %s", error)
        report("ending the trainer", {})
        launchers = await self._launchers()
        await self._ask_launchers(
            launchers,
            lambda: StopTrainer(deadline_s=LAUNCH_TIMEOUT_S, grace_s=grace_s),
            phase="ending the trainer",
        )
        self._router.forget("trainer")

    async def _launchers(self) -> list[str]:
        """Return the launchers of all hosts. After a restart of the orchestrator they return in
        seconds.

        Raises:
            ConfigError: some are missing.
        """

        def missing() -> dict[str, str]:
            details = [self._router.peers[i].detail for i in self._router.nodes("launcher")]
            count = max([1, *(int(str(detail.get("num_nodes", 1))) for detail in details)])
            return self._router.missing([f"trainer{LAUNCHER}{rank}" for rank in range(count)])

        try:
            await self._router.wait(missing, timeout_s=LAUNCHERS_BACK_S)
        except NodeLost as error:
            raise ConfigError(
                "the trainer's memory mode is 'exit', and the launchers that start it again are "
                f"{error}. Start it by `splice trainer` on each of its hosts, not by torchrun, or "
                "choose another mode"
            ) from error
        return self._router.nodes("launcher")

    async def _save_what_is_new(self, report: Report) -> None:
        memory = self._trainer.memory
        if not memory.is_ahead:
            return
        await self.wake(report)
        folder = memory.free_folder(self._state_dir)
        report("saving", {"checkpoint_dir": folder})
        await self._trainer.save(folder, phase="saving before the trainer ends", report=report)
        self._facts.remember()

    async def _ask_launchers(
        self, launchers: Sequence[str], make: Callable[[], AnyMessage], *, phase: str
    ) -> None:
        await asyncio.gather(*(self._router.request(i, make(), phase=phase) for i in launchers))
