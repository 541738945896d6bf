"""`splice train`: check everything, bring the run up, train, say where the model is, end the run.

    run.toml -> rows, reward -> `splice up` (or the run that is up) -> Loop -> versions/N/adapter

The same command continues after whatever ended it: the run's folder has its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.protocol.messages import LOSS_PARAMETERS, OptimParams
from orchestrator.protocol.messages.mistakes import check_loss_name
from splice.client.batches import Completion
from splice.client.clients import SpliceClient
from splice.client.run_file import ENDPOINT_FILE
from splice.cluster import up
from splice.rl import Loop, LoopConfig, Step, decisions, evaluations
from splice.rl.parts import PartedReward, as_reward, parts_of
from splice.rl.sampler import Row
from splice.rl.scoring import Given, Reward, Scoring, check_scoring, score_all
from splice.rl.turns import LARGEST_REWARD
from splice.train import estimate
from splice.train.data import rows_of
from splice.train.evaluating import Evaluating, Score, is_overdue
from splice.train.functions import reward_of
from splice.train.sections import SFT_LOSS, SftFile, TrainFile
from splice.train.teaching import Teacher, batch_of, lesson_of

log = logging.getLogger("splice.train")
Say = Callable[[str], None]
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a file trains, read and checked."""

    run: TrainFile
    rows: list[Row]
    held_out: list[Row]
    reward: Reward | None
    """None: answers are given, and nothing is evaluated."""
    config: LoopConfig
    steps: int
    """Over all starts."""
    optim: Callable[[int], OptimParams]


def plan(run: TrainFile, folder: Path) -> Plan:
    """Read the data, import the reward, and call it once. Nothing starts.

    Args:
        folder: of the run's file.

    Raises:
        ConfigError: names the mistake and its remedy.
    """
    if not run.trainer.loss_modules:
        check_loss_name(run.loss.name, tuple(LOSS_PARAMETERS))
    is_sft = isinstance(run, SftFile)
    if run.loss.name == SFT_LOSS and not is_sft:
        raise ConfigError(
            f"loss.name: {SFT_LOSS} trains on given answers and ignores rewards. Use `splice sft`, "
            "or leave [loss] out"
        )
    rows = rows_of(run.data, folder, table="data")
    if is_sft:
        rows = [lesson_of(row) for row in rows]
    held_out = [] if run.eval is None else rows_of(run.eval, folder, table="eval")
    reward = reward_of(run.loop.reward, folder) if run.loop.reward or not is_sft else None
    if reward is not None:
        _call_once(reward, held_out[0] if is_sft and held_out else rows[0])
    if reward is not None and run.loop.overlong_penalty:
        reward = _penalised(reward, run.loop.overlong_penalty)
    _check_room(run)
    steps = run.loop.steps or math.ceil(len(rows) * run.loop.passes / run.loop.groups_per_step)
    own = run.loop.model_dump(exclude={"reward", "passes", "overlong_penalty"}) | {"steps": steps}
    config = LoopConfig(**own, sampling=run.sampling)
    if reward is not None and not is_sft:
        check_scoring(reward, None, config)
    return Plan(
        run=run,
        rows=rows,
        held_out=held_out,
        reward=reward,
        config=config,
        steps=steps,
        optim=run.optim.of_step(steps),
    )


def _penalised(reward: Reward, penalty: float) -> Reward:
    """The reward, less the penalty for an answer that was cut off."""
    return partial(_less, reward, penalty)  # can be pickled, for reward_processes


def _less(
    reward: Reward, penalty: float, row: Row, completion: Completion
) -> float | Awaitable[float]:
    given = reward(row, completion)
    less = penalty * (completion.finish_reason == "length")
    return _later(given, less) if inspect.isawaitable(given) else _minus(given, less)


async def _later(given: Awaitable[Given], less: float) -> float:
    return _minus(await given, less)


def _minus(given: Given, less: float) -> float:
    value = as_reward(given)
    parts = parts_of(value) and {**parts_of(value), "overlong_penalty": -less}
    return PartedReward(value - less, parts)


def _check_room(run: TrainFile) -> None:
    longest = run.inference.max_model_len
    asked = max(run.sampling.max_tokens, (run.eval and run.eval.max_tokens) or 0)
    if longest != "auto" and asked >= longest:
        raise ConfigError(
            f"answers of {asked} tokens (max_tokens) leave no room for a prompt: "
            f"inference.max_model_len is {longest}; make it larger, or max_tokens smaller"
        )


def step_text(made: Plan) -> str:
    """Say what a step will be, with the trainer's memory and time where they can be estimated."""
    loop, sampling = made.run.loop, made.run.sampling
    text = f"{len(made.rows)} rows, {made.steps} steps of {loop.groups_per_step}"
    tokens = 0
    if isinstance(made.run, SftFile):
        text += " rows each"
    else:
        answers = loop.groups_per_step * loop.group_size
        tokens = answers * sampling.max_tokens
        text += (
            f" prompts with {loop.group_size} answers each: {answers} sequences in a step, with at "
            f"most {sampling.max_tokens} tokens in an answer, and {tokens:,} in a step"
        )
    more = estimate.text_of(made.run.trainer, step_tokens=tokens, steps=made.steps)
    return "\n".join([text, *more])


def _call_once(reward: Reward, row: Row) -> None:
    """An answer may be empty, so the reward must take one."""
    empty = Completion(prompt_ids=(0,), answer_ids=(0,), logprobs=(0.0,), finish_reason="stop")
    try:
        given = reward(row, empty)
        value = as_reward(asyncio.run(_result(given)) if inspect.isawaitable(given) else given)
    except Exception as error:
        if isinstance(error, KeyError) and error.args and error.args[0] not in row:
            raise ConfigError(
                f"loop.reward asks the first row for {error}; the row has the columns "
                f"{sorted(map(str, row))}"
            ) from error
        raise ConfigError(
            f"loop.reward fails for the first row and an empty answer: {type(error).__name__}: "
            f"{error}. A model may answer so, so give a number for it"
        ) from error
    if not abs(value) <= LARGEST_REWARD:
        raise ConfigError(f"loop.reward gives {value} for the first row and an empty answer")


async def _result(given: Awaitable[Given]) -> Given:
    return await given


def done(made: Plan) -> int | None:
    """The version that the last step made, if all steps and the last evaluation are made."""
    run = made.run
    past = decisions.past(run.run_dir / decisions.LOOP_DIR / decisions.LOG)
    if not past.published or past.done < made.steps:
        return None
    if run.eval is not None and is_overdue(run.run_dir, run.eval, done=past.done, steps=made.steps):
        return None
    return past.made.newest


def bring_up(run: TrainFile, *, timeout_s: float, say: Say) -> None:
    """Start the run, or find it up or starting."""
    state = up.read_state(run.run_dir)
    if up.is_alive(state):
        is_up, pid = state["phase"] == "up", state["pid"]
        say(f"the run in {run.run_dir} is {'up; it continues' if is_up else 'starting'}")
    else:
        pid = up.start(run, resume=True)  # or a new run, in a folder that holds none
    up.wait_until_up(run.run_dir, pid, timeout_s=timeout_s, on_wait=say)


def join(run: TrainFile, *, timeout_s: float, say: Say) -> None:
    """Wait for the nodes of a run that others start, and publish its first version.

    Raises:
        NodeLost: they are not ready in time.
        ConfigError: no orchestrator binds in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (run.run_dir / ENDPOINT_FILE).exists() and time.monotonic() < deadline_s:
        say("waiting for the orchestrator")
        time.sleep(POLL_S)
    nodes = {"trainer", *(f"inference-{i}" for i in range(run.inference.replicas))}
    with SpliceClient.of_run(run.run_dir) as client:
        while missing := nodes - _ready(client):
            text = f"waiting for {', '.join(sorted(missing))}"
            if time.monotonic() > deadline_s:
                raise NodeLost(f"not ready within {timeout_s:.0f} s: {text}")
            say(text)
            time.sleep(POLL_S)
        up.publish_first(client, say)


def _ready(client: SpliceClient) -> set[str]:
    return {n.node_id for n in client.status(timeout_s=30.0).nodes if n.state == "ready"}


async def train(made: Plan, say: Say) -> None:
    """Take the steps that are left, with their evaluations."""
    run, began_s, first = made.run, time.monotonic(), 0
    how: dict[str, Any] = {"reward": made.reward}
    if is_sft := isinstance(run, SftFile):
        how = {"environment": Teacher(run.sampling.extra), "make_batch": batch_of}
    loop = Loop.of_run(
        run.run_dir,
        prompts=made.rows,
        config=made.config,
        loss=run.loss,
        optim=made.optim,
        **how,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(loop)
        evaluating = None
        if run.eval is not None:
            score: Score = loop.score
            if is_sft and made.reward is not None:
                score = partial(score_all, Scoring(made.reward, made.config))
            evaluating = await stack.enter_async_context(
                Evaluating(
                    loop,
                    run.run_dir,
                    run.eval,
                    made.held_out,
                    score=score,
                    steps=made.steps,
                    say=say,
                )
            )
        async for step in loop:
            first = first or step.number
            spent_s = time.monotonic() - began_s
            each_s = spent_s / (step.number - first + 1)
            say(_line(step, made.steps, each_s, is_sft=is_sft))
            if evaluating is not None:
                await evaluating.after(step.number, step.version)


def _line(step: Step, steps: int, each_s: float, *, is_sft: bool) -> str:
    name, value = "reward", step.metrics["reward_mean"]
    if is_sft:
        name, value = "loss", step.metrics["loss"]
    left_s = each_s * (steps - step.number)
    took = ", ".join(
        f"{name} {step.seconds[key]:.1f} s"
        for name, key in (("trainer waited", "trainer_waits"), ("sampler", "sampler_waits"))
        if key in step.seconds
    )
    return (
        f"step {step.number} of {steps}: {name} {value:.3f}, "
        f"{step.seconds['step']:.1f} s ({took}), {_minutes(left_s)} left"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def ending(made: Plan, version: int) -> str:
    """Where the model is, and what may be done with the run."""
    run, best = made.run, evaluations.best_kept(made.run.run_dir)
    what = "adapter" if run.trainer.finetuning_type == "lora" else "weights"

    def place(of: int) -> str:
        return f"{what}: {run.run_dir / 'versions' / str(of) / what}"

    lines = [f"{made.steps} steps are made: {run.name}@{version}", place(version)]
    if best is not None:
        value = best.metrics[evaluations.REWARD]
        lines.append(
            f"best: {run.name}@{best.version}, {evaluations.REWARD} {value:.3f} after step "
            f"{best.step}; {place(best.version)}"
        )
    return "\n".join([*lines, f"report: splice report {shlex.quote(str(run.run_dir))}"])
