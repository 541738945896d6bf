"""What a user may get wrong, or damage, is said in a sentence that names it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from orchestrator.errors import ConfigError, ErrorCode, JobFailed
from orchestrator.protocol.messages import NodeStatus, OptimParams
from splice.rl import (
    Loop,
    LoopConfig,
    SampleFailed,
    SamplingConfig,
    checker,
    decisions,
    trl_reward,
)
from splice.rl.reward_threads import NoThread
from splice.rl.sampler import Sampler
from tests.rl.stand_in import Crash, Server, StandIn
from tests.rl.stood_in import ROWS, config, reward, run_loop

pytestmark = pytest.mark.timeout(60)


def test_the_loop_of_another_run_is_refused_and_the_checker_sees_it(tmp_path):
    """Its open batch would be trained by a policy that did not sample it."""
    first = StandIn()
    first.crash_at = "after submit"
    with pytest.raises(Crash):
        asyncio.run(run_loop(first, tmp_path, steps=3))
    other = StandIn()
    other.run_id, other.version = "another-run", 40
    with pytest.raises(ConfigError, match=r"belongs to another run \(a-run, this is another-run\)"):
        asyncio.run(run_loop(other, tmp_path, steps=3))
    log = list(decisions.read(tmp_path / decisions.LOG))
    assert checker.check(log).violations == []
    moved = [*log, {**log[0], "run": "another-run", "version": 40}]
    assert "another run" in checker.check(moved).violations[0]


@pytest.mark.parametrize("starts", [1, 2], ids=["sampled", "kept"])
def test_a_step_that_failed_is_not_made_again_by_the_same_loop(tmp_path, starts):
    """Its next rollouts would be admitted twice."""
    run = StandIn()
    run.crash_at = "before submit"

    async def start() -> None:
        async with Loop(run, tmp_path, prompts=ROWS, reward=reward, config=config()) as loop:
            with pytest.raises(Crash):
                await anext(aiter(loop))
            with pytest.raises(ConfigError, match="step 1 has failed in this loop; leave its"):
                await anext(aiter(loop))

    async def served() -> None:
        server = await Server(run).start()
        try:
            for _ in range(starts):
                await start()
        finally:
            server.kill()

    asyncio.run(served())
    assert checker.check(list(decisions.read(tmp_path / decisions.LOG))).violations == []


def test_warnings_of_the_trainer_and_a_loop_with_nothing_left_are_said(tmp_path, caplog):
    class Warns(StandIn):
        def wait(self, job_id, *, timeout_s):
            result = super().wait(job_id, timeout_s=timeout_s)
            return result.model_copy(update={"warnings": ["log-probs differ"]})

    run = Warns()
    with caplog.at_level(logging.WARNING, logger="splice.rl"):
        asyncio.run(run_loop(run, tmp_path, steps=1))
        assert "step 1: log-probs differ" in caplog.text
        caplog.clear()
        assert asyncio.run(run_loop(run, tmp_path, steps=1)) == []
    assert "has made 1 steps, and steps = 1 counts over all its starts" in caplog.text


def test_a_bad_row_is_named_or_dropped(tmp_path, monkeypatch):
    rows = [*ROWS[:2], {"name": 2}, {"prompt": [1], "messages": [], "name": 3}, ROWS[4]]
    monkeypatch.setattr("tests.rl.stood_in.ROWS", rows)
    with pytest.raises(SampleFailed, match=r"needs `prompt` or `messages`.*prompt 2 \(group 2\)"):
        asyncio.run(run_loop(StandIn(), tmp_path / "stop", steps=2))
    asyncio.run(run_loop(StandIn(), tmp_path / "drop", steps=2, groups_per_step=3, on_error="drop"))
    log = (tmp_path / "drop" / decisions.LOG).read_text()
    assert "not both" in log and '"drop"' in log


async def no_opinion(completion):
    return None


@pytest.mark.parametrize("is_mixed", [False, True])
def test_rewards_that_never_return_end_the_loop_and_drop_nobody_else(tmp_path, is_mixed):
    def hangs(row, completion):
        time.sleep(8 if row["name"] == 0 else 0)
        return reward(row, completion)

    def single(completion, name):
        time.sleep(8 if name == 0 else 0)
        return 1.0

    hangs = trl_reward(no_opinion, single) if is_mixed else hangs
    options = {"reward": hangs, "steps": 2, "on_error": "drop", "reward_threads": 1}
    with pytest.raises(NoThread, match="1 rewards exceeded reward_timeout_s"):
        asyncio.run(run_loop(StandIn(), tmp_path, reward_timeout_s=0.3, **options))
    dropped = [d for d in decisions.read(tmp_path / decisions.LOG) if d["event"] == "drop"]
    assert len(dropped) == 1


def test_tokens_of_a_batch_that_failed_are_not_counted(tmp_path):
    run = StandIn()
    run.fail_next = [
        JobFailed(code=ErrorCode.BAD_INPUT, node="trainer", phase="x", message="no", remedy="y")
    ]
    with pytest.raises(JobFailed):
        asyncio.run(run_loop(run, tmp_path, steps=1))
    asyncio.run(run_loop(run, tmp_path, steps=1))
    found = checker.check(decisions.read(tmp_path / decisions.LOG))
    assert (found.trained, found.tokens) == (6, 24) and found.violations == []


def test_damaged_files_are_named(tmp_path, capsys):
    run = StandIn()
    run.crash_at = "after submit"
    with pytest.raises(Crash):
        asyncio.run(run_loop(run, tmp_path, steps=1))
    run.crash_at = ""
    kept = (tmp_path / decisions.BATCH).read_bytes()
    (tmp_path / decisions.BATCH).write_bytes(kept[:-9])
    with pytest.raises(ConfigError, match="batch cannot be read"):
        asyncio.run(run_loop(run, tmp_path, steps=1))
    (tmp_path / decisions.LOG).open("a").write("garbage\n")
    assert checker.main([str(tmp_path / decisions.LOG)]) == 2
    assert "is no decision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": iter(ROWS)}, "prompts are a list of rows"),
        ({"prompts": ["2 + 3"]}, "a prompt is a row"),
        ({"config": {"steps": 3}}, "config is a LoopConfig, not dict"),
        ({"loss": "grpo"}, "loss is a LossSpec, not str"),
        ({"reward": 3}, "is no function"),
        ({"reward": [reward, reward]}, r"trl_reward\(first, second, weights="),
        ({"optim": 1e-5}, r"not float: OptimParams\(lr=1e-5\)"),
    ],
)
def test_wrong_arguments(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        Loop(StandIn(), tmp_path, **{"prompts": ROWS, "reward": reward} | more)


def test_a_loop_that_was_not_entered(tmp_path):
    async def go():
        async for _ in Loop(StandIn(), tmp_path, prompts=ROWS, reward=reward, config=config()):
            pass

    with pytest.raises(ConfigError, match="enter the loop first"):
        asyncio.run(go())


def test_an_earlier_starts_words_are_not_this_ones(tmp_path):
    folder = tmp_path / decisions.LOOP_DIR
    run = StandIn()
    asyncio.run(run_loop(run, folder, steps=1))
    said = decisions.status(tmp_path)
    assert said is not None and said["text"].startswith("no loop runs in this folder; 0 s ago")

    async def enter():
        async with Loop(run, folder, prompts=ROWS, reward=reward, config=config()):
            assert decisions.status(tmp_path) is None

    asyncio.run(enter())


def test_a_reward_of_another_signature_is_refused_before_anything_is_sampled(tmp_path):
    def single(completion):
        return 1.0

    def trl(prompts, completions, **kwargs):
        return [1.0]

    async def environment(row):
        return 1.0

    made = {"prompts": ROWS, "config": config()}
    with pytest.raises(
        ConfigError, match=r"single\(completion\) is called with \(row, completion\)"
    ):
        Loop(StandIn(), tmp_path, reward=single, **made)
    with pytest.raises(ConfigError, match=r"environment\(row\) is called with \(row, sample\)"):
        Loop(StandIn(), tmp_path, environment=environment, **made)
    with pytest.raises(ConfigError, match=r"needs `prompt` or `messages`; it has \['question'\]"):
        Loop(StandIn(), tmp_path, reward=reward, prompts=[{"question": 1}], config=config())
    Loop(StandIn(), tmp_path, reward=trl_reward(trl), **made)

    @functools.wraps(single)
    def decorated(row, completion):
        return single(completion)

    Loop(StandIn(), tmp_path, reward=decorated, **made)


@pytest.mark.parametrize("given", [None, "good", 10**400])
def test_a_reward_that_is_no_number_is_said(tmp_path, given):
    with pytest.raises(SampleFailed, match=r"the reward returned .*, which is no number"):
        asyncio.run(run_loop(StandIn(), tmp_path, reward=lambda row, completion: given, steps=1))


def test_misspelled_settings_are_named():
    with pytest.raises(
        ConfigError, match=r"max_stalenes: unknown key; did you mean 'max_staleness'"
    ):
        LoopConfig(max_stalenes=1)
    with pytest.raises(ConfigError, match=r"max_token: unknown key; did you mean 'max_tokens'"):
        LoopConfig(sampling={"max_token": 4})


def test_a_loop_that_learns_nothing_says_so_once(tmp_path, caplog):
    run = run_loop(StandIn(), tmp_path, reward=lambda row, completion: 1.0, steps=3)
    with caplog.at_level(logging.WARNING):
        steps = asyncio.run(run)
    assert [step.metrics["groups_without_signal"] for step in steps] == [1.0] * 3
    said = [r for r in caplog.records if "nothing is learnt" in r.getMessage()]
    assert len(said) == 1


def test_a_group_of_one_is_refused_before_anything_is_sampled(tmp_path):
    run = StandIn()
    with pytest.raises(ValueError, match="group_size is 1, and the advantages"):
        asyncio.run(run_loop(run, tmp_path, steps=1, group_size=1))
    assert not run.trained


def test_another_learning_rate_is_warned_of_when_a_loop_goes_on(tmp_path, caplog):
    run = StandIn()
    with caplog.at_level(logging.WARNING, logger="splice.rl"):
        for lr, said in ((1e-4, 0), (1e-4, 0), (1e-2, 1)):
            asyncio.run(run_loop(run, tmp_path, steps=1, optim=OptimParams(lr=lr)))
            assert caplog.text.count("the learning rate was 0.0001 and is 0.01 now") == said


def test_settings_that_change_the_distribution_are_named_at_the_start(tmp_path, caplog):
    extra = {"top_p": 0.9, "stop": ["x"], "top_k": -1, "min_p": 0.0, "allowed_token_ids": [1, 2]}
    sampling = SamplingConfig(max_tokens=4, extra=extra)
    with caplog.at_level(logging.WARNING):
        asyncio.run(run_loop(StandIn(), tmp_path, sampling=sampling, steps=1))
    assert "sampling.extra: ['allowed_token_ids', 'top_p'] change the distribution" in caplog.text


def test_only_a_ready_trainers_losses_count(tmp_path):
    """Those of a lost one are old: the next may know more."""

    class Other(StandIn):
        state = "lost"

        def status(self, *, timeout_s=10.0):
            found = super().status(timeout_s=timeout_s)
            own = NodeStatus(
                node_id="trainer", role="trainer", state=self.state, detail={"losses": ["mine"]}
            )
            return found.model_copy(update={"nodes": (*found.nodes, own)})

    run = Other()
    assert len(asyncio.run(run_loop(run, tmp_path, steps=1))) == 1
    run.state = "ready"
    with pytest.raises(ConfigError, match=r"no loss 'grpo'; there are \['mine'\]"):
        asyncio.run(run_loop(run, tmp_path, steps=2))


def test_dropped_samples_are_counted_and_the_cause_is_said(tmp_path):
    def bad(row, completion):
        if row["name"] == 0:
            raise KeyError("no such column")
        return reward(row, completion)

    options = {"reward": bad, "steps": 2, "on_error": "drop"}
    steps = asyncio.run(run_loop(StandIn(), tmp_path / "some", **options))
    assert steps[0].metrics["dropped"] == 3.0
    with pytest.raises(ConfigError, match=r"every rollout of step 1 was dropped: .*no such column"):
        asyncio.run(run_loop(StandIn(), tmp_path / "all", groups_per_step=1, **options))


def test_a_run_without_a_ready_replica_is_said(monkeypatch, caplog):
    async def status():
        return SimpleNamespace(nodes=[])

    async def ask():
        async with Sampler(status, name="tiny", max_in_flight=1) as sampler:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.5):
                    await sampler.encode({"prompt": "x"})

    monkeypatch.setattr("splice.rl.sampler.SILENT_S", 0.5)
    with caplog.at_level(logging.WARNING):
        asyncio.run(ask())
    assert caplog.text.count("no replica has been ready for") == 1


def test_versions_of_others_are_said_once(tmp_path, caplog):
    run = StandIn()

    async def publish(step, replicas, loop) -> None:
        run.version += 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(run_loop(run, tmp_path, steps=4, on_step=publish))
    assert caplog.text.count("somebody else trains or publishes") == 1


class Rows(list):
    """A data set that cannot decode its second row."""

    def __getitem__(self, index):
        if index == 1:
            raise ValueError("row 1 is damaged")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("half \ud83d", r"'\\ud83d' is half a character.*prompt 1 \(group 1\), sample [012]"),
        ([1, float("nan")], "Out of range float values"),
        (np.array([1.0, np.nan]), "Out of range float values"),
        (b"bytes", "JSON has no bytes such as b'bytes'"),
        ([1, {2, 3}], "JSON has no set such as"),
        ([{"role": "user", "content": "2 + 3 ="}], "name them `messages`"),
        (np.array([{"role": "user", "content": "2 + 3 ="}]), "name them `messages`"),
    ],
)
def test_a_prompt_that_is_no_json_is_named_or_dropped(prompt, says, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.rl.stood_in.ROWS", [ROWS[0], {"prompt": prompt, "name": 1}, ROWS[2]])
    with pytest.raises(SampleFailed, match=says) as failed:
        asyncio.run(run_loop(StandIn(), tmp_path / "stop", steps=2))
    assert failed.value.group == 1
    steps = asyncio.run(run_loop(StandIn(), tmp_path / "drop", steps=2, on_error="drop"))
    assert [step.metrics["dropped"] for step in steps] == [3, 0]


@pytest.mark.parametrize("replays", [False, True])
def test_prompts_of_numpy_are_token_ids(replays, tmp_path, monkeypatch):
    rows = [
        {"prompt": np.array([1, 2, 3]), "name": 0},
        {"prompt": [np.int64(1), np.int32(2), 3], "name": 1},
    ]
    monkeypatch.setattr("tests.rl.stood_in.ROWS", rows)
    run = StandIn()
    steps = asyncio.run(run_loop(run, tmp_path, steps=2, router_replay=replays))
    for rollout in (r for step in steps for group in step.groups for r in group):
        assert [*rollout.completion.prompt_ids] == [1, 2, 3]


@pytest.mark.parametrize("rows", [Rows(ROWS), [ROWS[0], "2 + 3 ="]])
def test_a_row_that_cannot_be_read_is_named_or_dropped(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.rl.stood_in.ROWS", rows)
    says = r"(row 1 is damaged|a prompt is a row, not str).*prompt 1 \(group 1\)"
    with pytest.raises(SampleFailed, match=says):
        asyncio.run(run_loop(StandIn(), tmp_path / "stop", steps=1))
    asyncio.run(run_loop(StandIn(), tmp_path / "drop", steps=1, on_error="drop"))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("max_new_tokens", "use max_tokens"),
        ("stop_strings", "use stop"),
        ("guided_regex", "use structured_outputs = {"),
        ("eos_token_id", "use stop_token_ids"),
        ("max_completion_tokens", "use max_tokens"),
        ("min_token", "did you mean 'min_tokens'"),
        ("z", "'z'$"),
    ],
)
def test_fields_that_vllm_would_ignore_are_refused_by_name(name, right, tmp_path):
    with pytest.raises(ConfigError, match="vLLM would ignore") as refused:
        SamplingConfig(extra={name: 1, "stop": ["x"]})
    assert f"'{name}'" in str(refused.value) and re.search(right, str(refused.value))

    async def asks(row, sample):
        await sample([1, 2, 3], **{name: 1})

    async def go():
        server = await Server(run := StandIn()).start()
        try:
            loop = Loop(run, tmp_path, prompts=ROWS, environment=asks, config=config())
            async with loop:
                with pytest.raises(ConfigError, match="vLLM would ignore"):
                    await anext(aiter(loop))
                with pytest.raises(ConfigError, match="vLLM would ignore"):
                    await loop.sample(ROWS[:1], **{name: 1})
        finally:
            server.kill()

    asyncio.run(go())


def test_a_field_of_the_other_route_is_refused(tmp_path):
    sampling = SamplingConfig(max_tokens=4, extra={"chat_template_kwargs": {"thinking": False}})
    with pytest.raises(ConfigError, match=r"/v1/completions, for a row with `prompt`: .*'chat_"):
        asyncio.run(run_loop(StandIn(), tmp_path, steps=1, sampling=sampling, on_error="drop"))


def test_settings_that_are_no_json_are_refused_and_numpys_are_taken():
    ids = np.array([5, 7])
    assert SamplingConfig(extra={"allowed_token_ids": ids}).extra == {"allowed_token_ids": [5, 7]}
    with pytest.raises(ConfigError, match="JSON has no set such as"):
        SamplingConfig(extra={"stop": {"x"}})


def test_a_second_loop_of_a_run_is_refused_in_whatever_folder(tmp_path):
    run, run_dir = StandIn(), tmp_path / "run"
    run.run_dir = run_dir
    run_dir.mkdir()

    async def second(step, replicas, loop):
        other = Loop(run, tmp_path / "other", prompts=ROWS, reward=reward, config=config())
        says = rf"another loop trains the run in {run_dir} \(pid {os.getpid()}, folder {tmp_path}/"
        with pytest.raises(ConfigError, match=says):
            await other.__aenter__()

    asyncio.run(run_loop(run, tmp_path / "one", steps=1, on_step=second))
    asyncio.run(run_loop(run, tmp_path / "other", steps=1))  # the first one has ended
    run.run_dir = tmp_path / "elsewhere"  # a host that does not see the folder
    asyncio.run(run_loop(run, tmp_path / "third", steps=1))
