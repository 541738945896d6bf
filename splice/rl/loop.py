"""An asynchronous RL loop: it trains on one batch while it samples the next.

    async with Loop.of_run("runs/mine/run", prompts=rows, reward=reward, config=config) as loop:
        async for step in loop:
            print(step.number, step.version, step.metrics["reward_mean"])

Step k trains on the groups of step k: the next `groups_per_step` prompts, in order. Their rollouts
are admitted once step k - 1 - max_staleness is served, so none of their tokens can be older than
`max_staleness` versions when step k trains on them. What was admitted is therefore always used.
No prompt loses its place because its answers are slow.

While the loop's body runs, no job of the loop runs, but sampling goes on. Each decision is a line
in `decisions.jsonl` (`splice.rl.decisions`), from which `splice.rl.checker` proves all of this. A
loop that is started again in the same folder goes on at the next batch. A batch is durable, with
the id of its job, before it is sent, and the orchestrator runs no job id twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TypeVar, cast

from orchestrator.errors import ConfigError, ErrorCode, JobFailed, ProtocolError, SpliceError
from orchestrator.protocol.config_errors import check_loss_name
from orchestrator.protocol.frames import encode
from orchestrator.protocol.messages import (
    WAITING,
    JobOf,
    LossSpec,
    OptimParams,
    Progress,
    PublishJob,
    PublishResult,
    Status,
    SubmitJob,
    TrainMergedJob,
    TrainMergedResult,
)
from splice.batches import Batch, Completion, grpo_batch
from splice.client import SpliceClient
from splice.rl import decisions
from splice.rl.balance import SIDES, Balance, Meter
from splice.rl.config import INEXACT, LoopConfig, SamplingConfig
from splice.rl.record import Record
from splice.rl.reward_processes import (
    START_S,
    NoProcess,
    RewardFailed,
    RewardLate,
    RewardProcesses,
    refuse_in_process,
)
from splice.rl.reward_threads import NoThread, RewardThreads
from splice.rl.sampler import Answer, RequestRefused, RolloutLost, Row, Sampler, check_row
from splice.rl.turns import (
    LARGEST_REWARD,
    Environment,
    Sample,
    Scored,
    Turn,
    scored,
    sequences_of,
)
from splice.run_file import run_folder

log = logging.getLogger("splice.rl")
Reward = Callable[[Row, Completion], "float | Awaitable[float]"]
Answered = Completion | Sequence[Completion]
"""One sequence, or several of the same rollout."""
MakeBatch = Callable[[Sequence[Sequence[tuple[Any, float]]]], Batch]
"""From groups of (`Answered`, reward)."""
T = TypeVar("T")
Published = TypeVar("Published", bound=PublishResult)
WAIT_TURN_S = 1.0
"""A wait for a job on a thread ends this soon after the loop is cancelled."""
STATUS_TIMEOUT_S = 30.0
BATCH_IS_WHY = (ErrorCode.TRAINER_KILLED, ErrorCode.TOO_LONG)
"""Codes of jobs that fail again with the same batch, but not with the next one."""
BALANCE_STEPS = 20
"""Steps whose times `splice status` sees together."""


class SampleFailed(SpliceError, RuntimeError):
    """A reward or an environment raised, vLLM refused a request, or an answer did not come in
    time; names prompt and sample.

    Attributes:
        row: the prompt's row.
        group: number of its group.
        sample: number of the sample in the group.
    """

    code = ErrorCode.BAD_INPUT
    remedy = (
        "Correct the reward or the environment, or let the loop drop such samples "
        '(on_error = "drop").'
    )

    def __init__(self, message: str, *, row: Row, group: int, sample: int) -> None:
        super().__init__(message)
        self.row, self.group, self.sample = row, group, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer with its reward, or what one role said in an environment.

    Attributes:
        group: number of its group, over the whole loop.
        sample: its place in the group.
        attempt: how often it was asked again.
        completion: the answer; with an environment, the last of `sequences`.
        spans: (version, number of tokens) of all sampled tokens, in order.
        sequences: those that train. One without an environment.
        turns: those of the environment, in order.
        name: of the role, as the environment names it.
    """

    row: Row
    group: int
    sample: int
    attempt: int
    completion: Completion
    spans: tuple[tuple[int, int], ...]
    reward: float
    sequences: tuple[Completion, ...]
    turns: tuple[Turn, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that was trained and is served.

    Attributes:
        number: counts from 1 over all starts of the loop.
        version: the version that the step made.
        metrics: those of the trainer, and of the rollouts: reward_mean, reward_std, answer_tokens,
            truncated (share of answers cut off), groups_without_signal (share of groups whose
            rewards are all equal), dropped (samples), staleness_mean, staleness_max (in versions,
            over tokens).
        seconds: see `splice.rl.balance`; and the job's own phases as job.*.
        groups: the rollouts. Empty if an earlier start of the loop sampled them.
        result: the training job's.
    """

    number: int
    version: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    groups: tuple[tuple[Rollout, ...], ...]
    result: TrainMergedResult


class Loop:
    """See the module.

    Args:
        client: of a run that serves a version. The loop neither enters nor leaves it.
        folder: the loop's log and state. A folder with a log continues that loop.
        prompts: rows with `prompt` (text or token ids) or `messages`, and whatever the reward
            needs. They are taken in order, again and again.
        reward: `reward(row, completion)`, a plain function on a thread or a coroutine.
        environment: instead of a reward, a coroutine `environment(row, sample)` that asks the model
            as often as it likes; see `splice.rl.turns`.
        optim: for all steps, or a function of the step's number.
        make_batch: from groups of (completion, reward).
    """

    def __init__(
        self,
        client: SpliceClient,
        folder: str | Path,
        *,
        prompts: Sequence[Row],
        reward: Reward | None = None,
        environment: Environment | None = None,
        config: LoopConfig | None = None,
        loss: LossSpec | None = None,
        optim: OptimParams | Callable[[int], OptimParams] | None = None,
        make_batch: MakeBatch = grpo_batch,
    ) -> None:
        if isinstance(prompts, Mapping) or not hasattr(prompts, "__getitem__"):
            raise ConfigError(f"prompts are a list of rows, not {type(prompts).__name__}")
        if not len(prompts):
            raise ConfigError("there are no prompts; a loop needs at least one row")
        if (reward is None) == (environment is None):
            raise ConfigError("a loop takes either a reward or an environment")
        if not isinstance(prompts[0], Mapping):
            kind = type(prompts[0]).__name__
            raise ConfigError(f'a prompt is a row such as {{"prompt": "2 + 3 ="}}, not {kind}')
        for name, value, of in (("config", config, LoopConfig), ("loss", loss, LossSpec)):
            if value is not None and not isinstance(value, of):
                raise ConfigError(f"{name} is a {of.__name__}, not {type(value).__name__}")
        self.config = config or LoopConfig()
        _check_signature(reward, environment)
        _check_place(reward, self.config)
        self.client, self.folder = client, Path(folder)
        self._prompts, self._make_batch = prompts, make_batch
        if self.config.group_size == 1 and make_batch is grpo_batch:
            raise ConfigError(
                "group_size is 1, and the advantages of a group's answers are relative to their "
                "mean: all would be 0. Use a larger group_size, or a make_batch of your own"
            )
        self._reward, self._environment = reward, environment
        self._score_with: Reward | None = reward
        """The reward, or the processes that compute it."""
        self._reward_limit_s = self.config.reward_timeout_s
        drops = environment is not None or self.config.on_error == "drop"
        if not drops:
            check_row(prompts[0])
        self._loss = loss or LossSpec()
        self._optim = optim or OptimParams()
        self._meter = Meter()
        self._order = decisions.Order(len(prompts), seed=self.config.shuffle_seed)
        self._tasks: dict[int, dict[int, list[asyncio.Task[tuple[Rollout, ...]]]]] = {}
        """Step -> group -> samples."""
        self._announced: dict[int, Batch] = {}
        """Step -> its batch, which the trainer knows before the job."""
        self._recent: list[dict[str, float]] = []
        self._asides = 0
        """Batches set aside since the last step."""
        self._last_drop: dict[int, str] = {}
        """Step -> why its newest dropped sample was."""
        self._has_said_no_signal = self._has_said_others = False
        self._exit = contextlib.AsyncExitStack()
        self._is_entered = False
        self._owns_client = False

    @classmethod
    def of_run(cls, run_dir: str | Path, **kwargs: Any) -> Loop:
        """A loop in the folder of a run on this host, with a client of its own."""
        folder = run_folder(Path(run_dir))
        loop = cls(SpliceClient.of_run(folder), folder / decisions.LOOP_DIR, **kwargs)
        loop._owns_client = True
        return loop

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> Loop:
        refuse_in_process()
        async with self._exit as stack:
            # Rewards and jobs have threads of their own, so that neither waits for the other's.
            self._job_threads = ThreadPoolExecutor(4, thread_name_prefix="splice-job")
            stack.callback(self._job_threads.shutdown, wait=False, cancel_futures=True)
            self._rewards = RewardThreads(
                self.config.reward_processes or self.config.reward_threads,
                patience_s=self.config.reward_timeout_s,
            )
            if self.config.reward_processes:
                await self._use_processes(stack)
            if self._owns_client:
                await self._call(self.client.__enter__)
                stack.push_async_callback(self._call, self.client.__exit__)
            status = await self._status()
            for node in status.nodes:
                # A lost trainer's losses are old, and with memory = "exit" there is none yet.
                if node.state == "ready" and (known := node.detail.get("losses")):
                    check_loss_name(self._loss.name, known)
            run_dir = self.client.run_dir
            if run_dir is not None and run_dir.is_dir():  # another host may not see it
                stack.enter_context(decisions.RunLock(run_dir, self.folder))
            self._log = stack.enter_context(decisions.DecisionLog(self.folder / decisions.LOG))
            self._past = decisions.past(self.folder / decisions.LOG)
            version = status.version
            if version is None and not self._past.published:
                version = self._past.made.newest  # and the next one is published first
            if version is None:
                raise ConfigError(
                    "the run serves no version. Publish the first one (InitialSyncJob, or `splice "
                    "up`); after a publication that failed, publish again (PublishJob, ResyncJob)"
                )
            self._begin(version)
            self._record = await stack.enter_async_context(
                Record(self.folder, self.config, loop=self._past.loop, alias=status.name)
            )
            self._sampler = await stack.enter_async_context(
                Sampler(
                    self._status,
                    name=status.name,
                    max_in_flight=self.config.max_in_flight,
                    router_replay=self.config.router_replay,
                )
            )
            self._in_flight = asyncio.Semaphore(self.config.max_in_flight)
            self._has_failed = asyncio.Event()
            stack.push_async_callback(self._cancel_rollouts)
            self._exit = stack.pop_all()
        return self

    async def _use_processes(self, stack: contextlib.AsyncExitStack) -> None:
        """Have processes compute the rewards, on which the threads then wait."""
        assert self._reward is not None
        limit_s = self.config.reward_timeout_s
        processes = RewardProcesses(self._reward, timeout_s=limit_s)
        stack.callback(processes.close)
        await self._call(processes.start)
        self._score_with, self._reward_limit_s = processes, limit_s + START_S

    def _begin(self, version: int) -> None:
        found = self._past
        if found.made.versions and version < found.made.newest:
            raise ConfigError(
                f"the loop in {self.folder} has made version {found.made.newest}, but the run "
                f"serves {version}; give the loop of another run a folder of its own"
            )
        run = self.client.run_id
        if found.run and found.run != run:
            raise ConfigError(
                f"the loop in {self.folder} belongs to another run ({found.run}, this is {run}); "
                "give this loop a folder of its own"
            )
        extra = self.config.sampling.extra
        if inexact := sorted(
            {n for n in INEXACT.keys() & extra.keys() if extra[n] not in INEXACT[n]}
            | ({"allowed_token_ids"} & extra.keys() if not self._loss.allowed_token_ids else set())
        ):
            log.warning(
                "sampling.extra: %s change the distribution that vLLM samples from, and the "
                "trainer does not compute that one; docs/sampling.md has two ways around it",
                inexact,
            )
        found.loop = found.loop or uuid.uuid4().hex[:12]
        count, seed = len(self._prompts), self.config.shuffle_seed
        before = (found.prompts or count, found.config.get("shuffle_seed"))
        if found.config and before != (count, seed):
            log.warning(
                "prompts or shuffle_seed have changed (%s and %s, now %s and %s): within this "
                "pass, some prompts may come twice or not at all",
                *(*before, count, seed),
            )
        lr = self._optim.lr if isinstance(self._optim, OptimParams) else None  # a schedule
        if found.lr is not None and lr is not None and found.lr != lr:
            log.warning(
                "the learning rate was %g and is %g now, with AdamW's moments of before: the next "
                "steps are as large as that",
                *(found.lr, lr),
            )
        self._log.write(
            "start",
            durable=True,
            loop=found.loop,
            run=run,
            version=version,
            config=self.config.model_dump(mode="json"),
            prompts=count,
            lr=lr,
        )
        found.made.add(version)
        self._is_entered = True
        self._next_group, self._admitted = found.groups, found.done
        if found.done or found.open:
            log.info("the loop goes on after step %d", found.done)
        steps = self.config.steps
        if steps is not None and found.done >= steps and found.open is None:
            log.warning(
                "nothing is left to do: the loop in %s has made %d steps, and steps = %d counts "
                "over all its starts; another experiment needs a run of its own",
                *(self.folder, found.done, steps),
            )
        else:
            (self.folder / decisions.STATUS).unlink(missing_ok=True)  # of an earlier start

    async def __aexit__(self, *error: Any) -> None:
        await self._exit.__aexit__(*error)

    async def _cancel_rollouts(self) -> None:
        tasks = self._all_tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()
        self._announced.clear()

    # ------------------------------------------------------------ the steps

    async def __aiter__(self) -> AsyncIterator[Step]:
        if not self._is_entered:
            raise ConfigError("enter the loop first: `async with Loop(...) as loop`")
        if not self._past.published:
            await self._publish_again()
        if self._past.open is not None:
            if self._tasks:  # those that its first attempt admitted
                raise self._left(self._past.open["step"])
            self._next_group = self._past.open["groups"][-1] + 1
            self._admitted = self._past.open["step"]
            step = await self._train_kept(self._past.open)
            if step is not None:
                with self._meter.during("body"):
                    yield step
        while self.config.steps is None or self._past.done < self.config.steps:
            self._admit_for(self._past.done + 1)
            step = await self._next_step(self._past.done + 1)
            if step is not None:
                with self._meter.during("body"):
                    yield step

    async def _next_step(self, number: int) -> Step | None:
        """Make a step. None: its batch was set aside."""
        if number not in self._tasks:
            raise self._left(number)
        groups = await self._groups_of(number)
        numbers = list(self._tasks.pop(number))
        self._last_drop.pop(number, None)
        batch = self._announced.pop(number, None) or self._batch_of(groups)
        job = self._job_of(batch, self._optim_of(number))
        check_sendable(number, job, batch)
        decisions.keep_batch(self.folder / decisions.BATCH, batch)
        line = {
            "step": number,
            "version": self._past.made.newest,
            "groups": numbers,
            "rollouts": [
                list(place)
                for place in dict.fromkeys(
                    (r.group, r.sample, r.attempt) for group in groups for r in group
                )
            ],
            "tokens": sum(
                len(sequence.answer_ids) if not sequence.sampled else sum(sequence.sampled)
                for group in groups
                for rollout in group
                for sequence in rollout.sequences
            ),
            "metrics": self._sampling_metrics(groups),
        }
        return await self._train(line, job, batch, groups, attempt=self._past.attempt)

    @staticmethod
    def _left(number: int) -> ConfigError:
        return ConfigError(
            f"step {number} has failed in this loop; leave its `async with` and enter a new Loop, "
            "which goes on at the same step"
        )

    def _batch_of(self, groups: Sequence[Sequence[Rollout]]) -> Batch:
        return self._make_batch([part for group in groups for part in answers_by_name(group)])

    @contextlib.asynccontextmanager
    async def _announcing(self, number: int) -> AsyncIterator[None]:
        """Announce the step within the block, if it gets that far."""
        announcing = asyncio.create_task(self._announce(number))
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.wait([announcing])

    async def _announce(self, number: int) -> None:
        """Tell the trainer of the step's batch as soon as its rollouts are there.

        Whatever is wrong with them, the step itself says.
        """
        never_begun = self.config.mini_batch_sequences or self._loss.needs_reference_passes
        if number not in self._tasks or never_begun:
            return
        try:
            groups = await self._groups_of(number)
            batch = self._announced.get(number) or self._batch_of(groups)
            self._announced[number] = batch
            job = self._job_of(batch, OptimParams())
            await self._call(self.client.announce, job, buffers=batch.buffers)
        except Exception as error:  # noqa: BLE001  - a user's reward or make_batch raises anything
            log.info("step %d is not announced: %s", number, error)

    async def _train_kept(self, line: dict[str, Any]) -> Step | None:
        """Train on the batch that an earlier start of the loop sampled, or hear of its outcome."""
        batch = decisions.kept_batch(self.folder / decisions.BATCH)
        stalest = line["metrics"]["staleness_max"]
        if stalest > self.config.max_staleness:
            raise ConfigError(
                f"step {line['step']} is open, and its batch has tokens {stalest:.0f} versions "
                f"old, more than max_staleness ({self.config.max_staleness}) now allows; start the "
                f"loop with max_staleness = {stalest:.0f} until the step is made"
            )
        self._admit_for(line["step"])
        job = self._job_of(batch, self._optim_of(line["step"]))
        names = ("step", "version", "groups", "rollouts", "tokens", "metrics")
        kept = {name: line[name] for name in names if name in line}  # older logs have no `tokens`
        return await self._train(kept, job, batch, (), attempt=line["attempt"])

    async def _train(
        self,
        line: dict[str, Any],
        job: TrainMergedJob,
        batch: Batch,
        groups: tuple[tuple[Rollout, ...], ...],
        *,
        attempt: int,
    ) -> Step | None:
        """Train and publish. A trainer that was lost before the step gets the same batch again.
        None: the batch has ended it twice, and was set aside.

        Args:
            attempt: counts over all starts of the loop, because a job's id has one outcome.
        """
        # The batch is part of the id: an older folder's step is not another batch's outcome.
        digest = hashlib.sha256()
        for buffer in batch.buffers:
            digest.update(buffer)
        last = attempt + self.config.train_attempts - 1
        while True:
            self._log.write("train", durable=True, **line, attempt=attempt)
            try:
                with self._meter.during("training"):
                    place = f"{self._past.loop}-{line['step']}-{attempt}"
                    job_id = f"loop-{place}-{digest.hexdigest()[:8]}"
                    async with self._announcing(line["step"] + 1):
                        result = await self._job(job, job_id, batch.buffers)
                break
            except JobFailed as error:
                stops = self.config.on_trainer_killed == "stop"
                is_aside = error.code in BATCH_IS_WHY and not stops
                self._log.write(
                    "failed",
                    durable=True,
                    step=line["step"],
                    attempt=attempt,
                    code=error.code.value,
                    steps_taken=error.steps_taken,
                    why=str(error)[:1000],
                    **({"aside": self._prompts_of(line)} if is_aside else {}),
                )
                if is_aside:
                    self._set_aside(line, error)
                    if self._asides >= self.config.most_aside:
                        raise
                    return None
                is_lost = error.code == ErrorCode.NODE_LOST and not error.steps_taken
                if not is_lost or attempt >= last:
                    raise
                attempt += 1
                log.warning("step %d is sent again: %s", line["step"], error)
        return self._trained(line, groups, result)

    def _prompts_of(self, line: dict[str, Any]) -> list[int]:
        """Indices of the prompts of a step."""
        return sorted({self._prompt(group) for group in line["groups"]})

    def _set_aside(self, line: dict[str, Any], error: JobFailed) -> None:
        """Continue without a batch; its step makes no version."""
        number = line["step"]
        self._past.done, self._past.open, self._past.attempt = number, None, 0
        self._asides += 1
        log.error(
            "step %d makes no version: its batch was set aside (%s), with the prompts %s. %s",
            *(number, decisions.set_aside(self.folder, number), self._prompts_of(line), error),
        )

    def _trained(
        self,
        line: dict[str, Any],
        groups: tuple[tuple[Rollout, ...], ...],
        result: TrainMergedResult,
    ) -> Step:
        number, version = line["step"], result.version
        self._past.done, self._past.open, self._past.attempt = number, None, 0
        self._asides = 0
        newest = self._past.made.newest
        if version > newest + 1 and not self._has_said_others:
            self._has_said_others = True
            log.warning(
                "step %d made version %d, and this loop had made %d before: somebody else trains "
                "or publishes in this run, or a publication failed. Two loops in one run train the "
                "same weights",
                *(number, version, newest),
            )
        self._past.made.add(version)
        seconds = self._meter.take()
        seconds |= {f"job.{name}": value for name, value in result.seconds.items()}
        train, rollout = result.metrics, line["metrics"]
        metrics = {**train, **rollout}
        made: dict[str, Any] = {"version": version, "seconds": seconds}
        self._log.write("trained", durable=True, step=number, **made, metrics=metrics)
        self._log.rotate()
        self._record.step(number, **made, train=train, rollout=rollout)
        self._say(number, version, seconds, rollout)
        for text in result.warnings:
            log.warning("step %d: %s", number, text)
        has_none = rollout.get("groups_without_signal") == 1.0
        has_none &= not self._loss.entropy_bonus and self._loss.kl is None
        if has_none and self._make_batch is grpo_batch and not self._has_said_no_signal:
            self._has_said_no_signal = True  # the metric says it from here on
            log.warning(
                "step %d: in no group do the rewards differ, so all advantages are 0 and nothing "
                "is learnt (group_size %d)",
                *(number, self.config.group_size),
            )
        return Step(
            number=number,
            version=version,
            metrics=metrics,
            seconds=seconds,
            groups=groups,
            result=result,
        )

    def _optim_of(self, number: int) -> OptimParams:
        return self._optim(number) if callable(self._optim) else self._optim

    def _job_of(self, batch: Batch, optim: OptimParams) -> TrainMergedJob:
        loss = self._loss
        if self.config.max_staleness:
            loss = loss.model_copy(update={"off_policy": True})
        return TrainMergedJob(
            loss=loss,
            optim=optim,
            tensors=batch.specs,
            mini_batch_sequences=self.config.mini_batch_sequences,
            epochs=self.config.epochs,
        )

    async def _publish_again(self) -> None:
        """The last step was taken, but no replica serves it: publish it under the next name.

        If the trainer has lost that step since, its batch is sent again.
        """
        job_id = f"loop-{self._past.loop}-{self._past.done}-publish-{uuid.uuid4().hex[:8]}"
        try:
            result = await self._job(PublishJob(), job_id, ())
        except JobFailed as error:
            if error.code is not ErrorCode.WORK_LOST:
                raise
            log.warning("step %d is made again: %s", self._past.done, error)
            why = str(error)[:1000]
            self._log.write("reopened", durable=True, step=self._past.done, why=why)
            self._past.reopen()
            return
        self._past.made.add(result.version)
        self._past.published = True
        self._log.write(
            "trained", durable=True, step=self._past.done, version=result.version, seconds={}
        )

    async def _job(self, job: JobOf[Published], job_id: str, buffers: Sequence[bytes]) -> Published:
        """Run a job; a cancelled loop leaves it to the orchestrator."""
        deadline_s = time.monotonic() + self.config.train_timeout_s
        running = asyncio.get_running_loop()
        with _Outage(self._meter) as outage:

            def on_progress(progress: Progress) -> None:  # on the thread that waits
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    running.call_soon_threadsafe(outage.hear, progress)

            given = {"job_id": job_id, "buffers": buffers, "on_progress": on_progress}
            await self._call(self.client.submit, job, **given)
            while True:
                try:
                    result = await self._call(self.client.wait, job_id, timeout_s=WAIT_TURN_S)
                    return cast(Published, result)
                except TimeoutError:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(
                            f"job {job_id} has no outcome after "
                            f"{self.config.train_timeout_s:.0f} s (train_timeout_s); read the "
                            "trainer's log, then start the loop again"
                        ) from None

    # ------------------------------------------------------------ admission

    def _admit_for(self, number: int) -> None:
        """Ask for all rollouts that may use tokens of the version that step `number` trains on."""
        config = self.config
        last = number + config.max_staleness
        if config.steps is not None:
            last = min(last, config.steps)
        while self._admitted < last:
            self._admitted += 1
            groups = range(self._next_group, self._next_group + config.groups_per_step)
            self._next_group = groups.stop
            self._tasks[self._admitted] = {
                group: [
                    asyncio.create_task(self._rollout(self._admitted, group, sample))
                    for sample in range(config.group_size)
                ]
                for group in groups
            }
            for group in groups:
                for task in self._tasks[self._admitted][group]:
                    task.add_done_callback(self._note_failure)

    def _note_failure(self, task: asyncio.Task[tuple[Rollout, ...]]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._has_failed.set()

    def _all_tasks(self) -> list[asyncio.Task[tuple[Rollout, ...]]]:
        return [t for step in self._tasks.values() for group in step.values() for t in group]

    def _prompt(self, group: int) -> int:
        """Index of the group's prompt."""
        return self._order.prompt(group)

    async def _groups_of(self, number: int) -> tuple[tuple[Rollout, ...], ...]:
        """Wait for the step's rollouts. A failure in any step's rollouts ends the wait.

        Raises:
            SampleFailed: a reward or an environment raised, a deadline passed or vLLM refused a
                request, and on_error is "stop".
            ConfigError: no rollout of the batch is left.
        """
        own = asyncio.ensure_future(
            asyncio.wait([task for group in self._tasks[number].values() for task in group])
        )
        failure = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait({own, failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            own.cancel()
            failure.cancel()
        for task in self._all_tasks():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        groups = tuple(
            tuple(rollout for task in group for rollout in task.result())
            for group in self._tasks[number].values()
        )
        if not any(groups):
            why = self._last_drop.get(number, "decisions.jsonl says why")
            raise ConfigError(f"every rollout of step {number} was dropped: {why}")
        return groups

    # ------------------------------------------------------------ one rollout

    async def _rollout(self, step: int, group: int, sample: int) -> tuple[Rollout, ...]:
        """Sample and score, again after a loss. Nothing: the sample was dropped."""
        made = await self._make(step, group, sample)
        for part, rollout in enumerate(made):
            self._record.sample(step, rollout, part)
        return made

    async def _make(self, step: int, group: int, sample: int) -> tuple[Rollout, ...]:
        try:
            row = self._row(group, sample)
            if self._environment is not None:
                return await self._play(self._environment, row, step, group, sample)
            turn = await self._answer(row, step, group, sample)
            with self._meter.during("scoring"):
                reward = await self._score(row, turn.completion, group, sample)
        except SampleFailed as error:
            if self.config.on_error == "stop":
                raise
            log.warning("dropped: %s", error)
            self._last_drop[step] = str(error)[:1000]
            self._log.write(
                "drop",
                step=step,
                group=group,
                prompt=self._prompt(group),
                sample=sample,
                why=str(error)[:1000],
            )
            return ()
        rollout = Rollout(
            row=row,
            group=group,
            sample=sample,
            attempt=turn.attempt,
            completion=turn.completion,
            spans=turn.spans,
            reward=reward,
            sequences=(turn.completion,),
        )
        return (rollout,)

    def _row(self, group: int, sample: int) -> Row:
        try:
            row = self._prompts[self._prompt(group)]
        except Exception as error:  # a user's data set may raise anything
            text = f"the prompt cannot be read ({type(error).__name__}: {error})"
            raise self._failure(text, {}, group, sample) from error
        if not isinstance(row, Mapping):
            text = f"a prompt is a row, not {type(row).__name__}"
            raise self._failure(text, {"prompt": row}, group, sample)
        return row

    async def _answer(self, row: Row, step: int, group: int, sample: int) -> Turn:
        lost: list[int] = []
        async with self._in_flight:
            try:
                async with asyncio.timeout(self.config.rollout_timeout_s):
                    return await self._turn(row, step, group, sample, turn=0, lost=lost)
            except RequestRefused as error:
                raise self._failure(str(error), row, group, sample) from error
            except TimeoutError:
                text = f"no answer within {self.config.rollout_timeout_s:.0f} s"
                raise self._failure(
                    f"{text} (rollout_timeout_s), {len(lost)} attempts lost", row, group, sample
                ) from None

    async def _turn(
        self,
        asked: Row,
        step: int,
        group: int,
        sample: int,
        *,
        turn: int,
        lost: list[int],
        **more: Any,
    ) -> Turn:
        """Ask until an answer comes whole and young enough.

        Args:
            lost: gets the number of a turn for each of its attempts that was lost.
        """
        attempt, sampling = 0, self.config.sampling
        place: dict[str, Any] = {"group": group, "sample": sample, "turn": turn}
        more = {"seed": request_seed(sampling, group, sample, turn), **more}
        while True:
            admitted = self._past.made.newest
            self._log.write(
                "admit",
                step=step,
                prompt=self._prompt(group),
                **place,
                attempt=attempt,
                version=admitted,
            )
            try:
                answer = await self._sampler.sample(asked, sampling, meter=self._meter, **more)
                self._refuse_stale(answer, admitted)
                break
            except RolloutLost as error:
                self._log.write("lost", **place, attempt=attempt, why=str(error)[:1000])
                lost.append(turn)
                attempt += 1
        self._log.write(
            "finish", **place, attempt=attempt, spans=answer.spans, replica=answer.replica
        )
        return Turn(number=turn, attempt=attempt, completion=answer.completion, spans=answer.spans)

    def _refuse_stale(self, answer: Answer, admitted: int) -> None:
        """A replica that was cut off may serve an old version for minutes. An answer that begins
        with the version of its admission, or a later one, keeps the bound."""
        oldest = min((version for version, _ in answer.spans), default=admitted)
        if oldest < admitted:
            self._sampler.distrust(answer.replica)
            raise RolloutLost(
                f"{answer.replica} answered with version {oldest}, older than version {admitted}, "
                "with which the answer was admitted"
            )

    async def _score(self, row: Row, completion: Completion, group: int, sample: int) -> float:
        reward_of, timeout = self._score_with, asyncio.timeout(None)
        assert reward_of is not None
        try:
            if inspect.iscoroutinefunction(reward_of):
                async with timeout:
                    timeout.reschedule(self._reward_deadline())
                    given: Any = await reward_of(row, completion)
            else:
                await self._rewards.turn()  # the wait for a thread does not count
                async with timeout:
                    timeout.reschedule(self._reward_deadline())
                    given = await self._rewards.call(lambda: reward_of(row, completion))
                    if inspect.isawaitable(given):
                        given = await given
        except (NoThread, NoProcess):
            raise
        except Exception as error:  # a user's reward may raise anything
            text = (
                f"the reward took more than {self.config.reward_timeout_s:.0f} s (reward_timeout_s)"
                if timeout.expired() or isinstance(error, RewardLate)
                else f"the reward {error}"
                if isinstance(error, RewardFailed)
                else f"the reward raised {type(error).__name__}: {error}"
            )
            raise self._failure(text, row, group, sample) from error
        except (asyncio.CancelledError, SystemExit) as error:
            if is_own_end(error):
                raise
            text = f"the reward raised {type(error).__name__}"
            raise self._failure(text, row, group, sample) from error
        try:
            reward = float(given)
        except Exception:  # noqa: BLE001  - a user's object may raise anything
            text = f"the reward returned {given!r:.100}, which is no number"
            raise self._failure(text, row, group, sample) from None
        if not abs(reward) <= LARGEST_REWARD:  # nor NaN
            raise self._failure(f"the reward is {reward}", row, group, sample)
        return reward

    # ------------------------------------------------------------ a rollout in an environment

    async def _play(
        self, environment: Environment, row: Row, step: int, group: int, sample: int
    ) -> tuple[Rollout, ...]:
        lost: list[int] = []

        async def ask(asked: Row, *, turn: int, **more: Any) -> Turn:
            return await self._turn(asked, step, group, sample, turn=turn, lost=lost, **more)

        asking, timeout = Sample(ask, self.encode), asyncio.timeout(None)
        try:
            async with self._in_flight, timeout:  # the wait for a place does not count
                now_s = asyncio.get_running_loop().time()
                timeout.reschedule(now_s + self.config.rollout_timeout_s)
                with self._meter.during("scoring"):
                    parts = scored(await environment(row, asking), asking.turns)
        except ConfigError as error:
            if not isinstance(error, RequestRefused):
                raise
            raise self._failure(str(error), row, group, sample) from error
        except Exception as error:  # a user's environment may raise anything
            text = (
                f"the rollout took more than {self.config.rollout_timeout_s:.0f} s "
                f"(rollout_timeout_s), {len(lost)} attempts lost"
                if timeout.expired()
                else f"the environment raised {type(error).__name__}: {error}"
            )
            raise self._failure(text, row, group, sample) from error
        except (asyncio.CancelledError, SystemExit) as error:
            if is_own_end(error):
                raise
            text = f"the environment raised {type(error).__name__}"
            raise self._failure(text, row, group, sample) from error
        finally:
            asking.end()
        trained = [turn for part in parts for turn in part.turns]
        numbers = sorted(turn.number for turn in trained)
        self._log.write("turns", group=group, sample=sample, trained=numbers)
        place = {"group": group, "sample": sample, "attempt": sum(t.attempt for t in trained)}
        return tuple(rollout_of(part, row=row, **place) for part in parts)

    async def play(
        self, rows: Sequence[Row], *, n: int = 1, temperature: float = 0.0, **more: Any
    ) -> list[list[tuple[Scored, ...]]]:
        """Run the loop's environment on rows of your own, `n` times each, for an evaluation.

        Nothing of it is trained on.

        Args:
            more: further fields of the requests; those of the environment's own go before.

        Raises:
            TimeoutError: a rollout took longer than `rollout_timeout_s`.
            RequestRefused: vLLM refuses a request.
        """
        environment = self._environment
        if environment is None:
            raise ConfigError("play() runs the loop's environment; this loop has a reward")

        async def ask(asked: Row, *, turn: int, **own: Any) -> Turn:
            fields = {"temperature": temperature, **more, **own}
            answer = await self._sampled(asked, **fields)
            return Turn(number=turn, attempt=0, completion=answer.completion, spans=answer.spans)

        async def one(row: Row) -> tuple[Scored, ...]:
            asking = Sample(ask, self.encode)
            try:
                async with self._in_flight, asyncio.timeout(self.config.rollout_timeout_s):
                    result = await environment(row, asking)
            finally:
                asking.end()
            return scored(result, asking.turns, trains=False)

        return await each_of(one, rows, n)

    def _reward_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._reward_limit_s

    def _failure(self, text: str, row: Row, group: int, sample: int) -> SampleFailed:
        asked = row.get("prompt", row.get("messages"))
        try:
            prompt = json.dumps(asked, default=str)[:300]
        except (TypeError, ValueError, RecursionError):
            prompt = f"{asked!r:.300}"
        return SampleFailed(
            f"{text}; prompt {self._prompt(group)} (group {group}), sample {sample}: {prompt}",
            row=row,
            group=group,
            sample=sample,
        )

    # ------------------------------------------------------------ beside the loop

    async def sample(
        self, rows: Sequence[Row], *, n: int = 1, temperature: float = 0.0, **more: Any
    ) -> list[list[Completion]]:
        """Answers of the served version to rows of your own, `n` each, for an evaluation.

        They are not trained on. Lost ones are asked again, until `rollout_timeout_s`.

        Args:
            more: further fields of the requests, such as `max_tokens`.

        Raises:
            TimeoutError: an answer did not come within `rollout_timeout_s`.
            ConfigError: vLLM refuses a request.
        """

        async def one(row: Row) -> Completion:
            async with self._in_flight, asyncio.timeout(self.config.rollout_timeout_s):
                return (await self._sampled(row, temperature=temperature, **more)).completion

        return await each_of(one, rows, n)

    async def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, as the server encodes them."""
        async with asyncio.timeout(self.config.rollout_timeout_s):
            while True:
                try:
                    return await self._sampler.encode(
                        {"prompt": prompt}, add_special_tokens=add_special_tokens
                    )
                except RolloutLost as error:
                    log.warning("asked again: %s", error)

    async def _sampled(self, asked: Row, **more: Any) -> Answer:
        """An answer that is not trained on."""
        while True:
            admitted = self._past.made.newest
            try:
                answer = await self._sampler.sample(asked, self.config.sampling, **more)
                self._refuse_stale(answer, admitted)
                return answer
            except RolloutLost as error:
                log.warning("asked again: %s", error)

    def note(self, **metrics: float) -> None:
        """Add numbers of your own, such as an evaluation's, to the log and the sinks.

        They belong to the last step that was trained.
        """
        found = {name: float(value) for name, value in metrics.items()}
        self._log.write("note", step=self._past.done, metrics=found)
        self._record.note(self._past.done, found)

    def _sampling_metrics(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group]
        rewards = [rollout.reward for rollout in rollouts]
        ages = [
            (self._past.made.age(version), count)
            for rollout in rollouts
            for version, count in rollout.spans
        ]
        tokens = sum(count for _, count in ages)
        cut = [rollout.completion.finish_reason == "length" for rollout in rollouts]
        compared = [
            {part.reward for part in group if part.name == name}
            for group in groups
            for name in {part.name for part in group}
        ]
        asked = self.config.group_size * self.config.groups_per_step
        return {
            "reward_mean": fmean(rewards),
            "reward_std": pstdev(rewards),
            "answer_tokens": tokens / len(rollouts),
            "truncated": fmean(cut),
            "groups_without_signal": fmean(len(rewards) == 1 for rewards in compared),
            "dropped": float(asked - len({(r.group, r.sample) for r in rollouts})),
            "staleness_mean": sum(age * count for age, count in ages) / max(1, tokens),
            "staleness_max": float(max((age for age, _ in ages), default=0)),
        }

    def _say(
        self, number: int, version: int, seconds: dict[str, float], rollout: dict[str, float]
    ) -> None:
        """Write what `splice status` shows."""
        self._recent = [*self._recent[-BALANCE_STEPS:], seconds]
        # The first step of a start warms everything up, and says nothing of the balance.
        counted = self._recent[1:] or self._recent
        balance = Balance.of(counted, max_staleness=self.config.max_staleness)
        said = [balance.text()] if len(self._recent) > 1 else []
        text = "; ".join([f"step {number} made version {version}", *said, *self._record.problems])
        log.info("%s", text)
        shares = {name: getattr(balance, name) for name in SIDES}
        ages = {name: rollout[name] for name in ("staleness_mean", "staleness_max")}
        found = {"step": number, "version": version, "at": time.time(), "text": text}
        found |= shares | ages
        part = self.folder / f"{decisions.STATUS}.part"
        try:
            part.write_text(json.dumps(found))
            part.replace(self.folder / decisions.STATUS)
        except OSError as error:  # the step is trained and in the log
            log.warning("cannot write %s: %s", part, error)

    async def _status(self) -> Status:
        return await self._call(self.client.status, timeout_s=STATUS_TIMEOUT_S)

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the client, which blocks, on a thread."""
        running = asyncio.get_running_loop()
        return await running.run_in_executor(self._job_threads, lambda: function(*args, **kwargs))


class _Outage:
    """Meters the time that a job waits for nodes, within a `with` block."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._waiting, self._is_over = meter, contextlib.ExitStack(), False

    def __enter__(self) -> _Outage:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._waiting.close()

    def hear(self, progress: Progress) -> None:
        """Take the job's progress."""
        self._waiting.close()
        if progress.phase == WAITING and not self._is_over:
            log.warning("the job is %s: %s", WAITING, progress.detail.get("text", ""))
            self._waiting.enter_context(self._meter.during("no_node"))


def _check_signature(reward: Reward | None, environment: Environment | None) -> None:
    """Refuse what cannot be called with two arguments."""
    function, takes = (
        (environment, "(row, sample)") if reward is None else (reward, "(row, completion)")
    )
    if not callable(function):
        raise ConfigError("the reward or environment is no function")
    try:
        # Of the function that is called, not of one that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        hint = "; functions with TRL's arguments go through trl_reward" if reward else ""
        raise ConfigError(f"{name}{signature} is called with {takes}: {error}{hint}") from None


def _check_place(reward: Reward | None, config: LoopConfig) -> None:
    """Refuse `reward_processes` where no process can compute the reward."""
    if config.reward_processes and (reward is None or inspect.iscoroutinefunction(reward)):
        what = "an environment" if reward is None else "a coroutine"
        raise ConfigError(
            f"reward_processes is for rewards that are plain functions, and {what} runs in the "
            "loop; leave reward_processes out"
        )


def check_sendable(number: int, job: TrainMergedJob, batch: Batch) -> None:
    """Refuse a batch that no message can carry, before it is durable.

    Raises:
        ConfigError: names the step and the remedy.
    """
    try:
        encode(SubmitJob(job_id="x", job=job), batch.buffers)
    except ProtocolError as error:
        raise ConfigError(
            f"the batch of step {number} cannot be sent: {error}. Lower groups_per_step or "
            "group_size, or correct make_batch; then start the loop again"
        ) from error


def is_own_end(error: BaseException) -> bool:
    """Whether a cancellation is that of this task, not of something that it waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def each_of(
    one: Callable[[Row], Coroutine[Any, Any, T]], rows: Sequence[Row], n: int
) -> list[list[T]]:
    """`n` results for each row, all at once. The first failure ends all."""
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [[tasks.create_task(one(row)) for _ in range(n)] for row in rows]
    except BaseExceptionGroup as group:  # one reason is enough for a caller
        raise group.exceptions[0] from group
    return [[task.result() for task in group] for group in asked]


def rollout_of(part: Scored, *, row: Row, group: int, sample: int, attempt: int) -> Rollout:
    """What an environment scored, as a rollout."""
    turns = tuple(sorted(part.turns, key=lambda turn: turn.number))
    sequences = sequences_of(turns)
    return Rollout(
        row=row,
        group=group,
        sample=sample,
        attempt=attempt,
        completion=sequences[-1],
        spans=tuple(span for turn in turns for span in turn.spans),
        reward=part.reward,
        sequences=sequences,
        turns=turns,
        name=part.name,
    )


def answers_by_name(group: Sequence[Rollout]) -> list[list[tuple[Answered, float]]]:
    """A group's answers and rewards, those of each role apart."""
    found: dict[str, list[tuple[Answered, float]]] = {}
    for rollout in group:
        several = rollout.sequences
        answer = several[0] if len(several) == 1 else several
        found.setdefault(rollout.name, []).append((answer, rollout.reward))
    return list(found.values())


def request_seed(sampling: SamplingConfig, group: int, sample: int, turn: int = 0) -> int | None:
    """Return the seed of one request, or None."""
    if sampling.seed is None:
        return None
    place = f"{sampling.seed}/{group}/{sample}" + (f"/{turn}" if turn else "")
    return random.Random(place).getrandbits(31)
