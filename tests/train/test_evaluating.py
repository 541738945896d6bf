"""Evaluations while the loop trains, on stand-ins: none is lost, and the best version is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.storage import retention
from splice.client.batches import Completion
from splice.rl import Loop, decisions, evaluations
from splice.train.evaluating import Evaluating, is_overdue, metrics_of, pass_at
from splice.train.sections import EvalSection
from tests.rl.stand_in import Crash, Server, StandIn
from tests.rl.stood_in import ROWS, config

HELD_OUT = [{"prompt": [9, 9, 9], "held_out": True}]


def section(**more: Any) -> EvalSection:
    return EvalSection(path="unread", **{"every": 2, **more})


async def train(
    run: StandIn,
    run_dir: Path,
    *,
    section: EvalSection,
    steps: int,
    reward: Any,
    before: Callable[[int], None] = lambda step: None,
) -> list[str]:
    """What was said. `before`: between a step and its evaluation."""
    said: list[str] = []
    run.servers.clear()
    server = await Server(run).start()
    options: dict[str, Any] = {"prompts": ROWS, "reward": reward, "config": config(steps=steps)}
    try:
        async with Loop(run, run_dir / decisions.LOOP_DIR, **options) as loop:  # type: ignore[arg-type]
            own = {"score": loop.score, "steps": steps, "say": said.append}
            async with Evaluating(loop, run_dir, section, HELD_OUT, **own) as evaluating:
                async for step in loop:
                    before(step.number)
                    await evaluating.after(step.number, step.version)
        return said
    finally:
        server.kill()


def evaluated(run_dir: Path) -> list[tuple[int, int]]:
    return [(one.step, one.version) for one in evaluations.read(run_dir / decisions.LOOP_DIR)]


def test_the_trainer_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    trained_more = asyncio.Event()

    async def reward(row: Any, completion: Completion) -> float:
        if "held_out" in row and completion.versions[0] == 0:
            await trained_more.wait()
        return 1.0

    def before(step: int) -> None:
        if step == 1:
            trained_more.set()

    made = train(StandIn(), tmp_path, section=section(), steps=5, reward=reward, before=before)
    said = asyncio.run(made)
    assert [line.split(":")[0] for line in said] == [
        f"evaluation after step {step}" for step in (0, 2, 4, 5)
    ]
    assert [step for step, _ in evaluated(tmp_path)] == [0, 2, 4, 5]
    log = decisions.read(tmp_path / decisions.LOOP_DIR / decisions.LOG)
    notes = [line for line in log if line["event"] == "note"]
    assert [line["step"] for line in notes] == [0, 2, 4, 5]


def test_an_evaluation_survives_a_kill_before_it(tmp_path: Path) -> None:
    run = StandIn()

    def crash(step: int) -> None:
        if step == 2:
            raise Crash

    given: dict[str, Any] = {"section": section(), "steps": 4, "reward": lambda row, c: 1.0}
    with pytest.raises(Crash):
        asyncio.run(train(run, tmp_path, **given, before=crash))
    assert evaluated(tmp_path) == [(0, 0)]
    said = asyncio.run(train(run, tmp_path, **given))
    assert "after step 2" in said[0]
    assert [step for step, _ in evaluated(tmp_path)] == [0, 2, 4]


def test_the_last_evaluation_too(tmp_path: Path) -> None:
    run = StandIn()

    def crash(step: int) -> None:
        if step == 3:
            raise Crash

    given: dict[str, Any] = {"section": section(), "steps": 3, "reward": lambda row, c: 1.0}
    with pytest.raises(Crash):
        asyncio.run(train(run, tmp_path, **given, before=crash))
    assert is_overdue(tmp_path, section(), done=3, steps=3)
    asyncio.run(train(run, tmp_path, **given))
    assert evaluated(tmp_path)[-1] == (3, 3) and not is_overdue(
        tmp_path, section(), done=3, steps=3
    )


def test_a_torn_line_is_made_again(tmp_path: Path) -> None:
    one = evaluations.Evaluation(step=2, version=2, metrics={"eval_reward": 0.5})
    evaluations.add(tmp_path, one)
    path = tmp_path / evaluations.FILE
    path.write_text(path.read_text() + '{"step": 4, "ver')
    assert evaluations.read(tmp_path) == [one]
    evaluations.add(tmp_path, one)
    assert len(path.read_text().splitlines()) == 2
    path.write_text("nothing\n")
    with pytest.raises(ConfigError, match="no evaluation"):
        evaluations.read(tmp_path)


def test_the_best_version_is_kept_and_those_that_are_evaluated(tmp_path: Path) -> None:
    values = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.3, 4: 0.4}
    for version in values:
        (tmp_path / "versions" / str(version)).mkdir(parents=True)
    kept = []

    def reward(row: Any, completion: Completion) -> float:
        if "held_out" in row:
            kept.append(retention.kept(tmp_path))
        return values[completion.versions[0]]

    own = section(keep_best=True, every=1, waits=True)
    asyncio.run(train(StandIn(), tmp_path, section=own, steps=4, reward=reward))
    assert kept == [[0], [0, 1], [1, 2], [2, 3], [2, 4]]
    assert retention.kept(tmp_path) == [2]
    best = evaluations.best_kept(tmp_path)
    assert best is not None and best.metrics == {"eval_reward": 0.9} and best.step == 2
    (tmp_path / "versions" / "2").rmdir()
    assert evaluations.best_kept(tmp_path) is None, "4 is the best, and not kept"


def test_a_failing_evaluation_ends_the_command(tmp_path: Path) -> None:
    def reward(row: Any, completion: Completion) -> float:
        return 1 / 0 if "held_out" in row else 1.0

    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        asyncio.run(train(StandIn(), tmp_path, section=section(), steps=4, reward=reward))


def test_pass_at_k_by_hand() -> None:
    assert [pass_at(k, 4, 1) for k in (1, 2, 4)] == pytest.approx([1 / 4, 1 / 2, 1])
    assert pass_at(3, 4, 2) == 1.0 and pass_at(2, 4, 0) == 0.0
    own = section(n=4, pass_at=[1, 2], pass_reward=0.5, temperature=1.0)
    answer = Completion(prompt_ids=(1,), answer_ids=(1,), logprobs=(0.0,), versions=(1, 2))
    rewards = [[0.5, 0.0, 0.0, 0.4], [0.0] * 4]
    found = metrics_of(own, rewards, [[answer] * 4] * 2, version=1)
    assert found == pytest.approx(
        {
            "eval_reward": 0.9 / 8,
            "eval_best_of_4": 0.25,
            "eval_pass_at_1": 1 / 8,
            "eval_pass_at_2": 1 / 4,
            "eval_later": 1.0,
        }
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"n": 4, "temperature": 1.0, "pass_at": [8]}, "pass_at has 8, and there are 4 answers"),
        ({"n": 4}, "would be the same: they are greedy"),
    ],
)
def test_sections_that_cannot_work(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        section(**more)


def test_kept_versions_that_cannot_be_read(tmp_path: Path) -> None:
    retention.keep(tmp_path, [3, 1, 3])
    assert retention.kept(tmp_path) == [1, 3]
    (tmp_path / retention.KEPT).write_text(json.dumps(["x"]))
    with pytest.raises(ConfigError, match="no list of versions"):
        retention.kept(tmp_path)
