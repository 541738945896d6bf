"""An asynchronous RL loop: it trains on one batch while it samples the next.

    async with Loop.of_run("runs/mine/run", prompts=rows, reward=reward, config=config) as loop:
        async for step in loop:
            print(step.number, step.version, step.metrics["reward_mean"])

Step k trains on the groups of step k: the next `groups_per_step` prompts, in order. Their rollouts
are admitted once step k - 1 - max_staleness is served, so none of their tokens can be older than
`max_staleness` versions when step k trains on them. What was admitted is therefore always used.
No prompt loses its place because its answers are slow.

While the loop's body runs, no job of the loop runs, but sampling continues. Each decision is a line
in `decisions.jsonl` (`splice.rl.decisions`), from which `splice.rl.checker` proves all of this. A
loop that is started again in the same folder continues at the next batch. A batch is durable, with
the id of its job, before it is sent, and the orchestrator runs no job id twice.

    rollouts.py   which samples are asked for, and what becomes of each
    asking.py     its requests, asked again after a loss
    scoring.py    its reward
    jobs.py       the batch of a step and its job, after failures too
    steps.py      what is said of the step
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import (
    LossSpec,
    OptimParams,
    Status,
    TrainMergedResult,
    ValueSpec,
)
from orchestrator.protocol.messages.mistakes import check_loss_name
from splice.client.advantages import GAE, WITHOUT_GROUP
from splice.client.batches import Completion, grpo_batch
from splice.client.clients import SpliceClient
from splice.client.run_file import run_folder
from splice.rl import decisions
from splice.rl.asking import Context
from splice.rl.balance import Meter
from splice.rl.config import LoopConfig
from splice.rl.jobs import MakeBatch, StepJobs
from splice.rl.record import Record, facts_of_run
from splice.rl.reward_processes import refuse_in_process
from splice.rl.rollouts import Group, Rollouts
from splice.rl.sampler import Row, Sampler, check_row
from splice.rl.scoring import Reward, Scoring, check_scoring, score_all
from splice.rl.steps import Said, Step, line_of, warn_of_changes
from splice.rl.turns import Environment, Scored

log = logging.getLogger("splice.rl")
T = TypeVar("T")
STATUS_TIMEOUT_S = 30.0


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
        _check_prompts(prompts)
        for name, value, of in (("config", config, LoopConfig), ("loss", loss, LossSpec)):
            if value is not None and not isinstance(value, of):
                raise ConfigError(f"{name} is a {of.__name__}, not {type(value).__name__}")
        if optim is not None and not (isinstance(optim, OptimParams) or callable(optim)):
            raise ConfigError(
                "optim is an OptimParams or a function of the step, not "
                f"{type(optim).__name__}: OptimParams(lr=1e-5)"
            )
        self.config = config or LoopConfig()
        check_scoring(reward, environment, self.config)
        self.client, self.folder = client, Path(folder)
        self._prompts, self._make_batch = prompts, make_batch
        is_ours, name = make_batch is grpo_batch, self.config.advantages
        if self.config.group_size == 1 and is_ours and name not in WITHOUT_GROUP:
            others = " or ".join(f'"{other}"' for other in WITHOUT_GROUP)
            raise ConfigError(
                "group_size is 1, and the advantages of a group's answers are relative to their "
                f"mean: all would be 0. Use a larger group_size, advantages = {others}, or a "
                "make_batch of your own"
            )
        if not is_ours and name != "grpo":
            raise ConfigError(
                f'advantages = "{name}" is for batches that the loop makes, and make_batch makes '
                "yours: leave one of them out"
            )
        self._reward, self._environment = reward, environment
        if environment is None and self.config.on_error == "stop":
            check_row(prompts[0])
        self._loss = loss or LossSpec()
        if name == GAE and self._loss.value is None:
            self._loss = self._loss.model_copy(update={"value": ValueSpec()})
        if is_ours and name != GAE and self._loss.value is not None:
            raise ConfigError(
                f'loss.value makes the advantages, and the loop has advantages = "{name}": set '
                f'advantages = "{GAE}", or leave loss.value out'
            )
        kl = self._loss.kl
        if kl is not None and kl.in_reward and kl.reference != "base" and self._loss.value is None:
            raise ConfigError(
                f'loss.kl.in_reward with advantages = "{name}" takes the KL to the base model, and '
                f'kl.reference is "{kl.reference}": use "base", or advantages = "{GAE}"'
            )
        self._optim = optim or OptimParams()
        self._meter = Meter()
        self._exit = contextlib.AsyncExitStack()
        self._is_entered = False
        self._owns_client = False

    @classmethod
    def of_run(cls, run_dir: str | Path, **kwargs: Any) -> Loop:
        """A loop in the folder of a run on this host, with its own client."""
        folder = run_folder(Path(run_dir))
        loop = cls(SpliceClient.of_run(folder), folder / decisions.LOOP_DIR, **kwargs)
        loop._owns_client = True
        return loop

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> Loop:
        refuse_in_process()
        async with self._exit as stack:
            # Rewards and jobs have separate threads, so that neither waits for the other's.
            self._job_threads = ThreadPoolExecutor(4, thread_name_prefix="splice-job")
            stack.callback(self._job_threads.shutdown, wait=False, cancel_futures=True)
            scoring = None if self._reward is None else Scoring(self._reward, self.config)
            self._scoring = scoring
            if scoring is not None and scoring.processes is not None:
                stack.callback(scoring.processes.close)
                await self._call(scoring.processes.start)
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
            self._begin(status)
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
            self._make_parts(scoring)
            stack.push_async_callback(self._rollouts.cancel)
            self._exit = stack.pop_all()
        self._is_entered = True
        return self

    def _make_parts(self, scoring: Scoring | None) -> None:
        context, optim = (
            Context(
                config=self.config,
                past=self._past,
                log=self._log,
                record=self._record,
                meter=self._meter,
                sampler=self._sampler,
            ),
            self._optim,
        )
        self._rollouts = Rollouts(
            context, self._prompts, scoring=scoring, environment=self._environment
        )
        self._jobs = StepJobs(
            context,
            self._rollouts,
            self.client,
            self.folder,
            call=self._call,
            loss=self._loss,
            optim=optim if callable(optim) else lambda _: optim,
            make_batch=partial(grpo_batch, advantages=self.config.advantages)
            if self._make_batch is grpo_batch
            else self._make_batch,
        )

    def _begin(self, status: Status) -> None:
        """Refuse what does not continue with the folder's loop, and log the start."""
        found, version, run = self._past, status.version, self.client.run_id
        if version is None and not found.published:
            version = found.made.newest  # and the next one is published first
        if version is None:
            raise ConfigError(
                "the run serves no version. Publish the first one (InitialSync, or `splice "
                "up`); after a publication that failed, publish again (Publish, Resync)"
            )
        if found.made.versions and version < found.made.newest:
            raise ConfigError(
                f"the loop in {self.folder} has made version {found.made.newest}, but the run "
                f"serves {version}; give the loop of another run its own folder"
            )
        if found.run and found.run != run:
            raise ConfigError(
                f"the loop in {self.folder} belongs to another run ({found.run}, this is {run}); "
                "give this loop its own folder"
            )
        lr = self._optim.lr if isinstance(self._optim, OptimParams) else None  # a schedule
        warn_of_changes(found, self.config, self._loss, prompts=len(self._prompts), lr=lr)
        found.loop = found.loop or uuid.uuid4().hex[:12]
        self._log.write(
            "start",
            durable=True,
            loop=found.loop,
            run=run,
            version=version,
            config=self.config.model_dump(mode="json"),
            prompts=len(self._prompts),
            lr=lr,
            facts=facts_of_run(status),
        )
        found.made.add(version)
        has_own_batch = self._make_batch is not grpo_batch
        self._said = Said(self.folder, self.config, None if has_own_batch else self._loss)
        if found.done or found.open:
            log.info("the loop continues after step %d", found.done)
        steps = self.config.steps
        if steps is not None and found.done >= steps and found.open is None:
            log.warning(
                "nothing is left to do: the loop in %s has made %d steps, and steps = %d counts "
                "over all its starts; another experiment needs its own run",
                *(self.folder, found.done, steps),
            )
        else:
            self._said.forget()

    async def __aexit__(self, *error: Any) -> None:
        await self._exit.__aexit__(*error)

    # ------------------------------------------------------------ the steps

    async def __aiter__(self) -> AsyncIterator[Step]:
        if not self._is_entered:
            raise ConfigError("enter the loop first: `async with Loop(...) as loop`")
        if not self._past.published:
            await self._jobs.publish_again()
        if self._past.open is not None:
            if self._rollouts:  # those that its first attempt admitted
                raise self._left(self._past.open["step"])
            step = await self._open_step(self._past.open)
            if step is not None:
                with self._meter.during("body"):
                    yield step
        while self.config.steps is None or self._past.done < self.config.steps:
            self._rollouts.admit_for(self._past.done + 1)
            step = await self._next_step(self._past.done + 1)
            if step is not None:
                with self._meter.during("body"):
                    yield step

    async def _next_step(self, number: int) -> Step | None:
        """Make a step. None: its batch was set aside."""
        if number not in self._rollouts:
            raise self._left(number)
        groups = await self._rollouts.of_step(number)
        asked = self._rollouts.take(number)
        batch, metrics = await self._jobs.batch_of(number, groups)
        decisions.keep_batch(self.folder / decisions.BATCH, batch)
        line = line_of(number, asked, groups, made=self._past.made, config=self.config)
        line["metrics"] |= metrics
        result = await self._jobs.train(line, batch, attempt=self._past.attempt)
        return None if result is None else self._trained(line, groups, result)

    async def _open_step(self, line: dict[str, Any]) -> Step | None:
        """Train on the batch that an earlier start of the loop sampled, or hear of its outcome."""
        number, stalest = line["step"], line["metrics"]["staleness_max"]
        self._rollouts.go_on(group=line["groups"][-1] + 1, step=number)
        batch = decisions.kept_batch(self.folder / decisions.BATCH)
        if stalest > self.config.max_staleness:
            raise ConfigError(
                f"step {number} is open, and its batch has tokens {stalest:.0f} versions "
                f"old, more than max_staleness ({self.config.max_staleness}) now allows; start the "
                f"loop with max_staleness = {stalest:.0f} until the step is made"
            )
        self._rollouts.admit_for(number)
        names = ("step", "version", "groups", "prompts", "rollouts", "tokens", "metrics")
        kept = {name: line[name] for name in names if name in line}  # older logs lack some
        kept.setdefault("prompts", [self._rollouts.order.prompt(g) for g in line["groups"]])
        result = await self._jobs.train(kept, batch, attempt=line["attempt"])
        return None if result is None else self._trained(kept, (), result)

    @staticmethod
    def _left(number: int) -> ConfigError:
        return ConfigError(
            f"step {number} has failed in this loop; leave its `async with` and enter a new Loop, "
            "which continues at the same step"
        )

    def _trained(
        self, line: dict[str, Any], groups: tuple[Group, ...], result: TrainMergedResult
    ) -> Step:
        number, version, newest = line["step"], result.version, self._past.made.newest
        self._past.ended(number)
        self._past.made.add(version)
        seconds = self._meter.take()
        seconds |= {f"job.{name}": value for name, value in result.seconds.items()}
        train, rollout = result.metrics, line["metrics"]
        step = Step(
            number=number,
            version=version,
            metrics={**train, **rollout},
            seconds=seconds,
            groups=groups,
            result=result,
        )
        made: dict[str, Any] = {"version": version, "seconds": seconds}
        self._log.write("trained", durable=True, step=number, **made, metrics=step.metrics)
        self._log.rotate()
        self._record.step(number, **made, train=train, rollout=rollout)
        self._said.step(step, self._record.problems)
        self._said.warnings(step, newest)
        return step

    # ------------------------------------------------------------ for the loop's body

    @property
    def done(self) -> int:
        """Steps that were made, over all starts."""
        return self._past.done

    @property
    def version(self) -> int:
        """The newest version that the loop knows of."""
        return self._past.made.newest

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
        return await self._rollouts.sample(rows, n, temperature=temperature, **more)

    async def evaluate(
        self, rows: Sequence[Row], *, n: int = 1, temperature: float = 0.0, **more: Any
    ) -> list[list[float]]:
        """The loop's reward of answers to rows of your own, `n` each. Nothing is trained on.

        Args:
            more: further fields of the requests, such as `max_tokens`.

        Raises:
            ConfigError: the loop has no reward, it failed, or vLLM refuses a request.
            TimeoutError: an answer did not come within `rollout_timeout_s`.
        """
        answers = await self.sample(rows, n=n, temperature=temperature, **more)
        return await self.score(rows, answers)

    async def score(
        self, rows: Sequence[Row], answers: Sequence[Sequence[Completion]]
    ) -> list[list[float]]:
        """The loop's reward of each answer to each row.

        Raises:
            ConfigError: the loop has no reward, or it failed.
        """
        scoring = self._scoring
        if scoring is None:
            raise ConfigError("this loop has an environment and no reward; use `play`")
        return await score_all(scoring, rows, answers)

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
        return await self._rollouts.play(rows, n, temperature=temperature, **more)

    async def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, as the server encodes them."""
        return await self._rollouts.encode(prompt, add_special_tokens=add_special_tokens)

    def note(self, step: int | None = None, /, **metrics: float) -> None:
        """Add numbers of your own, such as an evaluation's, to the log and the sinks.

        Args:
            step: the step that they belong to. None: the last step that was trained.
        """
        number = self._past.done if step is None else step
        found = {name: float(value) for name, value in metrics.items()}
        self._log.write("note", step=number, metrics=found)
        self._record.note(number, found)

    async def _status(self) -> Status:
        return await self._call(self.client.status, timeout_s=STATUS_TIMEOUT_S)

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the client, which blocks, on a thread."""
        running = asyncio.get_running_loop()
        return await running.run_in_executor(self._job_threads, lambda: function(*args, **kwargs))


def _check_prompts(prompts: Sequence[Row]) -> None:
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__getitem__"):
        raise ConfigError(f"prompts are a list of rows, not {type(prompts).__name__}")
    if not len(prompts):
        raise ConfigError("there are no prompts; a loop needs at least one row")
    if not isinstance(prompts[0], Mapping):
        kind = type(prompts[0]).__name__
        raise ConfigError(f'a prompt is a row such as {{"prompt": "2 + 3 ="}}, not {kind}')
