"""The loop against stand-ins: many interleavings, crashes and lost replicas, each in a second."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random

import pytest

from orchestrator.errors import ErrorCode, JobFailed, NodeLost
from splice.rl import asking, decisions, sampler
from splice.rl.balance import Balance
from splice.rl.checker import check, main
from tests.rl.stand_in import Crash, StandIn
from tests.rl.stood_in import reward, run_loop


def found_in(folder):
    return check(decisions.read(folder / decisions.LOG))


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_bound_holds_under_random_delays(tmp_path, staleness, seed):
    """Tokens, rewards and jobs of random lengths; updates come in the middle of answers."""
    run = StandIn(seed=seed, train_s=0.05, token_s=0.03)
    draw = random.Random(seed)

    async def slow(row, completion) -> float:
        await asyncio.sleep(draw.choice((0.0, 0.0, 0.08)))
        return reward(row, completion)

    settings = {"steps": 12, "max_staleness": staleness, "max_in_flight": 9}
    steps = asyncio.run(run_loop(run, tmp_path, servers=2, reward=slow, **settings))
    found = found_in(tmp_path)
    assert found.violations == [] and found.steps == len(steps) == 12
    assert (found.trained, found.tokens, found.pending, found.asked_again) == (72, 288, 0, 0)
    assert found.max_staleness == min(staleness, max(s.metrics["staleness_max"] for s in steps))
    names = [group[0].row["name"] for step in steps for group in step.groups]
    assert names == [n % 5 for n in range(24)], "each prompt as often as it was asked, in order"
    if staleness:
        spans = [len(r.spans) for step in steps for group in step.groups for r in group]
        assert found.max_staleness > 0 and max(spans) > 1, "answers span updates"
    assert main([str(tmp_path / decisions.LOG)]) == 0


def test_shuffled_prompts_come_once_each_pass(tmp_path):
    steps = asyncio.run(run_loop(StandIn(), tmp_path, steps=5, shuffle_seed=4))
    names = [group[0].row["name"] for step in steps for group in step.groups]
    assert sorted(names[:5]) == sorted(names[5:]) == [0, 1, 2, 3, 4]
    assert names[:5] != [0, 1, 2, 3, 4] and names[:5] != names[5:]


@pytest.mark.parametrize("moment", ["before submit", "after submit", "after outcome"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_crash_repeats_and_skips_nothing(tmp_path, moment, staleness):
    """With staleness 0 the weights at the end are the uninterrupted run's."""
    straight, broken = StandIn(), StandIn()
    asyncio.run(run_loop(straight, tmp_path / "a", steps=6, max_staleness=0))

    async def crash_later(step, replicas, loop) -> None:
        if step.number == 3:
            broken.crash_at = moment

    settings = {"steps": 6, "max_staleness": staleness}
    with pytest.raises(Crash):
        asyncio.run(run_loop(broken, tmp_path / "b", on_step=crash_later, **settings))
    broken.crash_at = ""
    steps = asyncio.run(run_loop(broken, tmp_path / "b", **settings))
    assert [step.number for step in steps] == [4, 5, 6] and steps[0].groups == ()
    assert steps[0].metrics["reward_mean"] > 0, "metrics of a step outlive a crash"
    assert len(broken.trained) == len(set(broken.trained)) == broken.version == 6
    found = found_in(tmp_path / "b")
    assert found.violations == [] and (found.steps, found.trained) == (6, 36)
    if staleness == 0:
        assert broken.weights == straight.weights


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    asyncio.run(run_loop(StandIn(), tmp_path, steps=2))
    path = tmp_path / decisions.LOG
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "trai')
    with decisions.DecisionLog(path):
        pass
    assert path.read_bytes() == whole


def test_two_loops_in_one_folder_are_refused(tmp_path):
    with decisions.DecisionLog(tmp_path / decisions.LOG):
        with pytest.raises(ValueError, match="another loop runs in"):
            asyncio.run(run_loop(StandIn(), tmp_path, steps=1))


def test_a_group_may_be_dropped_whole(tmp_path):
    """The prompt that nobody can answer is not taken again after a restart."""

    def bad(row, completion) -> float:
        if row["name"] == 1:
            raise ValueError("no")
        return reward(row, completion)

    run = StandIn()
    for steps in (1, 3):
        asyncio.run(run_loop(run, tmp_path, reward=bad, steps=steps, on_error="drop"))
        for line in decisions.read(tmp_path / decisions.LOG):
            if line["event"] == "trained":
                last = line
        assert last["step"] == steps
    found = found_in(tmp_path)
    assert found.violations == [] and (found.trained, found.dropped) == (15, 3)


def test_a_lost_trainer_gets_the_same_batch_again(tmp_path):
    run = StandIn()
    lost = JobFailed(
        code=ErrorCode.NODE_LOST, node="trainer", phase="training", message="gone", remedy="wait"
    )
    run.fail_next = [lost, lost]
    steps = asyncio.run(run_loop(run, tmp_path, steps=2))
    assert [step.number for step in steps] == [1, 2] and "-1-2-" in run.trained[0]
    assert found_in(tmp_path).violations == []
    run.fail_next = [lost] * 3
    with pytest.raises(JobFailed):
        asyncio.run(run_loop(run, tmp_path, steps=3))
    steps = asyncio.run(run_loop(run, tmp_path, steps=3))
    assert [step.number for step in steps] == [3] and run.version == 3
    assert found_in(tmp_path).violations == []


def killed(code: ErrorCode = ErrorCode.TRAINER_KILLED) -> JobFailed:
    return JobFailed(code=code, node="trainer", phase="training", message="no", remedy="x")


@pytest.mark.parametrize(
    ("code", "staleness"),
    [(ErrorCode.TRAINER_KILLED, 0), (ErrorCode.TRAINER_KILLED, 1), (ErrorCode.TOO_LONG, 1)],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_batch_that_fails_every_time_is_set_aside(tmp_path, caplog, code, staleness, is_kept):
    """Sent in this start, or kept by an earlier one: the next prompts follow, by name of these."""
    run = StandIn()
    if is_kept:
        run.crash_at = "before submit"
        with pytest.raises(Crash):
            asyncio.run(run_loop(run, tmp_path, steps=3, max_staleness=staleness))
        run.crash_at = ""
    run.fail_next = [killed(code)]
    steps = asyncio.run(run_loop(run, tmp_path, steps=3, max_staleness=staleness))
    assert [(step.number, step.version) for step in steps] == [(2, 1), (3, 2)]
    assert decisions.kept_batch(tmp_path / decisions.ASIDE / "step-1.msgpack").buffers
    lines = list(decisions.read(tmp_path / decisions.LOG))
    assert [line["aside"] for line in lines if line["event"] == "failed"] == [[0, 1]]
    assert [line["groups"] for line in lines if line["event"] == "train"][-2:] == [[2, 3], [4, 5]]
    assert "step 1 makes no version" in caplog.text and "with the prompts [0, 1]" in caplog.text
    found = found_in(tmp_path)
    assert (found.violations, found.trained, found.aside) == ([], 12, 6)
    steps = asyncio.run(run_loop(run, tmp_path, steps=4, max_staleness=staleness))
    assert [step.number for step in steps] == [4] and found_in(tmp_path).violations == []


def test_a_loop_may_stop_at_a_batch_that_ends_the_trainer(tmp_path):
    run = StandIn()
    run.fail_next = [killed()]
    with pytest.raises(JobFailed, match="trainer_killed"):
        asyncio.run(run_loop(run, tmp_path, steps=2, on_trainer_killed="stop"))
    steps = asyncio.run(run_loop(run, tmp_path, steps=2))
    assert [step.number for step in steps] == [1, 2] and found_in(tmp_path).violations == []


def test_a_loop_ends_when_several_batches_in_a_row_were_set_aside(tmp_path):
    """Those with a step between them are not in a row. The next start continues behind them."""
    run = StandIn()
    run.fail_next = [killed(), killed(), None, killed()]
    with pytest.raises(JobFailed, match="trainer_killed"):
        asyncio.run(run_loop(run, tmp_path, steps=6, most_aside=2))
    assert run.version == 1
    steps = asyncio.run(run_loop(run, tmp_path, steps=6, most_aside=2))
    assert [step.number for step in steps] == [5, 6] and found_in(tmp_path).violations == []


def test_a_step_that_could_not_be_published_is_not_trained_again(tmp_path):
    run = StandIn()
    run.fail_next = [
        JobFailed(
            code=ErrorCode.APPLY_FAILED,
            node="inference-0",
            phase="publishing",
            message="no",
            remedy="again",
            steps_taken=1,
        )
    ]
    with pytest.raises(JobFailed):
        asyncio.run(run_loop(run, tmp_path, steps=2))
    steps = asyncio.run(run_loop(run, tmp_path, steps=2))
    assert [step.number for step in steps] == [2]
    assert "publish" in run.trained[0], "its state is published under the next name first"
    assert found_in(tmp_path).violations == []


@pytest.mark.parametrize("code", [ErrorCode.STOPPED, ErrorCode.BAD_INPUT])
def test_a_step_that_failed_is_made_at_the_next_start(tmp_path, code):
    """A stopped one with the same batch; where the batch may be at fault, with a new one."""
    run = StandIn()
    failure = JobFailed(code=code, node="trainer", phase="training", message="no", remedy="again")
    for start in range(2):
        run.fail_next = [failure]
        with pytest.raises(JobFailed):
            asyncio.run(run_loop(run, tmp_path, steps=2))
        assert run.trained == [] and len(run.outcomes) == start + 1
    steps = asyncio.run(run_loop(run, tmp_path, steps=2))
    assert [step.number for step in steps] == [1, 2] and "-1-2-" in run.trained[0]
    assert found_in(tmp_path).violations == []


@pytest.mark.parametrize("how", ["killed", "gone", "refuses"])
def test_a_lost_replicas_rollouts_are_asked_elsewhere(tmp_path, how):
    run = StandIn(token_s=0.05)

    async def lose(step, replicas, loop) -> None:
        if step.number == 2:
            if how == "killed":
                replicas[0].kill()
            elif how == "refuses":
                replicas[0].answers = 503
            else:  # it hangs, and the orchestrator notices
                replicas[0].is_silent = True
                await asyncio.sleep(0.2)
                replicas[0].state = "lost"

    settings = {"steps": 6, "max_staleness": 1, "rollout_timeout_s": 30}
    steps = asyncio.run(run_loop(run, tmp_path, servers=2, on_step=lose, **settings))
    found = found_in(tmp_path)
    assert found.violations == [] and found.asked_again > 0
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    again = [r for step in steps for group in step.groups for r in group if r.attempt]
    assert again and all(len(group) == 3 for step in steps for group in step.groups)
    assert all([r.sample for r in group] == [0, 1, 2] for step in steps for group in step.groups), (
        "each keeps its place"
    )


def test_a_replica_with_an_old_version_is_not_believed(tmp_path):
    """Nor in an evaluation."""
    run, evaluated = StandIn(), []

    async def stick(step, replicas, loop) -> None:
        if step.number == 1:
            replicas[0].shows = 0
        if step.number == 3:
            for replica in loop._sampler.replicas.by_id.values():
                replica.avoid_until_s = 0.0  # the loop asks the stuck one again
            before, rows = len(replicas[0].asked), [{"prompt": [1, 2, 3]}] * 8
            evaluated.extend(c for answers in await loop.sample(rows) for c in answers)
            assert len(replicas[0].asked) > before

    settings = {"steps": 4, "max_staleness": 1, "rollout_timeout_s": 30}
    asyncio.run(run_loop(run, tmp_path, servers=2, on_step=stick, **settings))
    assert len(evaluated) == 8 and all(min(answer.versions) >= 3 for answer in evaluated)
    found = found_in(tmp_path)
    assert found.violations == [] and found.asked_again > 0 and found.max_staleness <= 1
    lost = [line for line in decisions.read(tmp_path / decisions.LOG) if line["event"] == "lost"]
    assert "answered with version 0" in lost[0]["why"]


def test_an_outage_in_an_evaluation_is_said_once(tmp_path, caplog):
    """Every answer in flight is lost, again and again, until the replica is back."""

    async def lose(step, replicas, loop) -> None:
        for replica in replicas:
            replica.answers = 503
        asked = asyncio.create_task(loop.sample([{"prompt": [1, 2, 3]}] * 20))
        while sum(len(replica.asked) for replica in replicas) < 60:
            await asyncio.sleep(0.05)
        for replica in replicas:
            replica.answers = None
        assert len(await asked) == 20

    settings = {"steps": 1, "max_staleness": 0, "rollout_timeout_s": 30}
    asyncio.run(run_loop(StandIn(), tmp_path, on_step=lose, **settings))
    said = [r.message for r in caplog.records if "asked again" in r.message]
    assert len(said) == 1 and "503" in said[0]


def test_a_run_that_dies_in_an_evaluation_is_said_once(tmp_path, caplog, monkeypatch):
    """Neither the orchestrator, which is silent for longer each time, nor a replica comes back. The
    error names the limit."""
    monkeypatch.setattr(asking, "SAY_EVERY_S", 0.0)
    monkeypatch.setattr(sampler, "POLL_S", 0.05)
    run, silent = StandIn(), itertools.count(30)

    def status(*, timeout_s: float = 10.0):
        raise NodeLost(f"the orchestrator has been silent for {next(silent)} s")

    async def die(step, replicas, loop) -> None:
        monkeypatch.setattr(run, "status", status)
        for replica in replicas:
            replica.kill()
        with pytest.raises(TimeoutError, match=r"no answer within 5 s \(rollout_timeout_s\)"):
            await loop.sample([{"prompt": [1, 2, 3]}] * 8)

    settings = {"steps": 1, "max_staleness": 0, "rollout_timeout_s": 5}
    asyncio.run(run_loop(run, tmp_path, on_step=die, **settings))
    said = [r.message for r in caplog.records]
    assert next(silent) > 40
    assert sum("cannot ask for the replicas" in message for message in said) == 1
    assert sum("asked again" in message for message in said) == 1


def test_a_server_that_names_no_version_is_refused(tmp_path):
    async def rename(step, replicas, loop) -> None:
        replicas[0].name = "somebody-else"

    with pytest.raises(ValueError, match="instead of tiny@N"):
        asyncio.run(run_loop(StandIn(), tmp_path, on_step=rename, steps=3))


# ---------------------------------------------------------------- the checker finds what is wrong


def lines_of(tmp_path) -> list[dict]:
    run = StandIn(train_s=0.02, token_s=0.01)
    asyncio.run(run_loop(run, tmp_path, steps=4, max_staleness=1))
    return list(decisions.read(tmp_path / decisions.LOG))


def of_kind(lines, event):
    return [line for line in lines if line["event"] == event]


def older_token(lines):
    """The last step's first answer is said to be by version 0."""
    group, sample, _ = of_kind(lines, "train")[-1]["rollouts"][0]
    for line in lines:
        if (line.get("group"), line.get("sample")) == (group, sample):
            if line["event"] == "admit":
                line["version"] = 0
            if line["event"] == "finish":
                line["spans"] = [[0, 4]]


def discarded(lines):
    of_kind(lines, "train")[1]["rollouts"].pop()


def trained_twice(lines):
    rollouts = of_kind(lines, "train")[1]["rollouts"]
    rollouts[0] = rollouts[1]


def other_prompt(lines):
    of_kind(lines, "admit")[4]["prompt"] = 4


def skipped_step(lines):
    for event in ("train", "trained"):
        lines.remove(of_kind(lines, event)[1])


def step_twice(lines):
    train, trained = of_kind(lines, "train")[1], of_kind(lines, "trained")[1]
    place = lines.index(trained) + 1
    lines[place:place] = [json.loads(json.dumps(line)) for line in (train, trained)]


def never_finished(lines):
    lines.remove(of_kind(lines, "finish")[0])


def too_early(lines):
    of_kind(lines, "admit")[-1]["version"] = 0


def downwards(lines):
    of_kind(lines, "finish")[-1]["spans"] = [[3, 2], [2, 2]]


def from_the_future(lines):
    of_kind(lines, "finish")[0]["spans"] = [[999, 4]]


def without_tokens(lines):
    of_kind(lines, "finish")[0]["spans"] = []


def fewer_tokens(lines):
    of_kind(lines, "finish")[0]["spans"] = [[of_kind(lines, "finish")[0]["spans"][0][0], 1]]


def sent_twice(lines):
    train = of_kind(lines, "train")[1]
    lines.insert(lines.index(train) + 1, json.loads(json.dumps(train)))


def sent_for_another_version(lines):
    train = of_kind(lines, "train")[1]
    again = json.loads(json.dumps(train)) | {"version": 0, "attempt": train["attempt"] + 1}
    lines.insert(lines.index(train) + 1, again)


def dropped_silently(lines):
    line = of_kind(lines, "finish")[0]
    drop = {"event": "drop", "group": line["group"], "sample": line["sample"], "why": ""}
    lines.insert(lines.index(line) + 1, drop)


@pytest.mark.parametrize(
    "break_it",
    [
        older_token,
        discarded,
        trained_twice,
        other_prompt,
        skipped_step,
        step_twice,
        never_finished,
        too_early,
        downwards,
        from_the_future,
        without_tokens,
        fewer_tokens,
        sent_twice,
        sent_for_another_version,
        dropped_silently,
    ],
)
def test_the_checker_finds(tmp_path, break_it):
    lines = lines_of(tmp_path)
    assert check(lines).violations == []
    break_it(lines)
    assert check(lines).violations


# ---------------------------------------------------------------- who waits


@pytest.mark.parametrize(
    ("trainer", "sampler", "rewards", "staleness", "said"),
    [
        (0.5, 0.4, 0.0, 0, "max_staleness = 1"),
        (0.4, 0.0, 0.0, 1, "the trainer waits"),
        (0.01, 0.3, 0.0, 1, "the sampler waits"),
        (0.2, 0.2, 0.0, 1, "both sides wait"),
        (0.3, 0.3, 0.2, 1, "rewards hold up"),
        (0.0, 0.75, 0.06, 1, "the sampler waits"),
        (0.02, 0.03, 0.0, 1, "balanced"),
    ],
)
def test_the_advice(trainer, sampler, rewards, staleness, said):
    steps = [{"step": 2.0, "trainer_waits": 2 * trainer, "sampler_waits": 2 * sampler}]
    steps[0]["rewards"] = 2 * rewards
    assert said in Balance.of(steps, max_staleness=staleness).text()


def test_an_outage_counts_as_waiting(tmp_path):
    """No replica is ready, and then a job waits for one."""
    run, said = StandIn(train_s=0.01), []

    async def on_step(step, replicas, loop) -> None:
        said.append(json.loads((tmp_path / decisions.STATUS).read_text())["text"])
        if step.number == 3:
            run.away_s = 2.0
        if step.number == 4:  # the sampler asks every second
            replicas[0].state = "lost"
            later = asyncio.get_running_loop().call_later
            later(3.0, lambda: setattr(replicas[0], "state", "ready"))
            await asyncio.sleep(1.2)

    steps = asyncio.run(run_loop(run, tmp_path, steps=5, on_step=on_step, max_staleness=0))
    job, sampling = steps[3].seconds, steps[4].seconds
    assert job["outage"] > 1.9 and job["trainer_waits"] > 1.9, job
    assert job["training"] < job["step"] - 1.9, job
    assert sampling["outage"] > 1.0 and sampling["sampler_waits"] > 1.0, sampling
    assert sampling["sampling"] < sampling["step"] - 1.0, "no request was with a replica"
    assert "nodes were away" not in said[2] and "nodes were away" in said[3]


def metered(run, folder):
    """What the steps between the first and the last say of time, summed."""
    steps = asyncio.run(run_loop(run, folder, steps=6, max_staleness=1))
    return {
        name: sum(step.seconds[name] for step in steps[1:-1])
        for name in ("sampler_waits", "trainer_waits", "step")
    }


def test_the_meter_tells_who_waited(tmp_path):
    """Training takes long, then sampling does: longer, where this machine is slow at the other."""
    for side, waits, works in (
        ({"train_s": 0.9}, "sampler_waits", "trainer_waits"),
        ({"token_s": 0.3}, "trainer_waits", "sampler_waits"),
    ):
        for factor in (1, 4, 16):
            folder = tmp_path / f"{waits}-{factor}"
            total = metered(StandIn(**{name: factor * s for name, s in side.items()}), folder)
            if total[waits] > 2 * total[works]:
                break
        assert total[waits] > 2 * total[works]
        assert total[waits] <= total["step"]
    found = json.loads((folder / decisions.STATUS).read_text())
    assert found["step"] == 6 and "trainer waits" in found["text"]


def test_the_first_step_of_a_start_gives_no_advice(tmp_path):
    asyncio.run(run_loop(StandIn(), tmp_path, steps=1))
    found = json.loads((tmp_path / decisions.STATUS).read_text())
    assert found["text"] == "step 1 made version 1"


def whole_past(folder):
    """What the whole log says, without the summaries of its segments."""
    found = decisions.Past()
    for line in decisions.read(folder / decisions.LOG):
        if json.dumps(line).startswith(decisions._STEPS):
            decisions._take(found, line)
    return found


def test_a_long_log_is_cut_into_segments_and_a_start_reads_the_newest_part(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "SEGMENT_BYTES", 6000)
    run, log = StandIn(), tmp_path / decisions.LOG
    asyncio.run(run_loop(run, tmp_path, steps=9, max_staleness=1))
    asyncio.run(run_loop(run, tmp_path, steps=15, max_staleness=1))
    parts = decisions.segments(log)
    assert len(parts) >= 3 and log.stat().st_size < 12_000
    found = found_in(tmp_path)
    assert found.violations == [] and (found.steps, found.starts) == (15, 2)
    assert decisions.past(log) == whole_past(tmp_path)
    assert decisions.past(log).done == 15

    # Ended between copy and cut: the file is still what the newest segment has.
    lines = list(decisions.read(log))
    with gzip.open(parts[-1], "rb") as file:
        log.write_bytes(file.read())
    again = list(decisions.read(log))
    assert again == lines[: len(again)], "nothing is read twice"
    before = decisions.past(log)
    for torn in (log.read_bytes(), b"", b'{"event": "segm'):
        log.write_bytes(torn)
        decisions.DecisionLog(log).close()
        assert decisions.past(log) == before == whole_past(tmp_path)
        assert log.read_text().count("\n") == 1


def test_a_loop_goes_on_after_its_log_began_anew(tmp_path, monkeypatch):
    """Also if it ended in the middle of a step whose batch was sent."""
    monkeypatch.setattr(decisions, "SEGMENT_BYTES", 1)
    run = StandIn()

    async def crash_later(step, replicas, loop) -> None:
        run.crash_at = "after submit" if step.number == 3 else ""

    with pytest.raises(Crash):
        asyncio.run(run_loop(run, tmp_path, steps=8, max_staleness=1, on_step=crash_later))
    run.crash_at = ""
    asyncio.run(run_loop(run, tmp_path, steps=8, max_staleness=1))
    found = found_in(tmp_path)
    assert found.violations == [] and (
        found.steps,
        len(decisions.segments(tmp_path / decisions.LOG)),
    ) == (8, 8)


@pytest.mark.parametrize(
    "tail",
    [b'{"event": "admit", "st', b"\0" * 200_000, b"\0" * 70_000 + b"\n" + b"\0" * 9 + b"}\n"],
)
def test_a_log_goes_on_after_what_a_power_loss_left_at_its_end(tmp_path, tail):
    asyncio.run(run_loop(StandIn(), tmp_path, steps=2))
    path = tmp_path / decisions.LOG
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    decisions.DecisionLog(path).close()
    assert path.read_bytes() == whole
    assert found_in(tmp_path).violations == []


def test_a_line_longer_than_a_read_is_found_again(tmp_path):
    path = tmp_path / decisions.LOG
    whole = b'{"a": 1}\n' + b'{"b": "' + b"x" * 200_000 + b'"}\n'
    for tail in (b"", b'{"c'):
        path.write_bytes(whole + tail)
        decisions.cut_torn_line(path)
        assert path.read_bytes() == whole
    path.write_bytes(b'{"c')
    decisions.cut_torn_line(path)
    assert path.read_bytes() == b""
