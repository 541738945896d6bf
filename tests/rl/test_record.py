"""What a loop leaves for people: samples and numbers. No failure to write them ends it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import NodeStatus
from splice.cli import app
from splice.report import _on_what
from splice.rl import decisions, samples, sinks
from splice.rl.background import Background
from splice.rl.record import facts_of_run
from tests.orchestrator.fake_nodes import soon
from tests.rl.stand_in import Crash, StandIn
from tests.rl.stood_in import run_loop


def loop_steps(folder: Path, run: StandIn | None = None, **more):
    return asyncio.run(run_loop(run or StandIn(), folder, **more))


def places(rollouts) -> list:
    return [(r.group, r.sample, r.reward, r.completion.answer_ids) for r in rollouts]


# ---------------------------------------------------------------- samples


def test_every_rollout_is_a_line(tmp_path):
    steps = loop_steps(tmp_path, steps=3)
    folder = tmp_path / samples.SAMPLES
    assert samples.steps_of(folder) == [1, 2, 3]
    for step in steps:
        rollouts = [r for group in step.groups for r in group]
        found = samples.read(folder, step.number)
        kept = [(s["group"], s["sample"], s["reward"], tuple(s["answer_ids"])) for s in found]
        assert kept == places(rollouts)
        first = found[0]
        assert first["spans"] == [list(span) for span in rollouts[0].spans]
        assert first["logprobs"] == [-1.0] * 4 and first["finish_reason"] == "length"
        assert first["prompt"] == rollouts[0].row["prompt"] and "name" in first["row"]
        assert first["answer"] == rollouts[0].completion.text


def test_a_line_has_the_seed_of_its_request(tmp_path):
    """Also if another prompt had the group's place before."""
    asked = set()

    class Noted(StandIn):
        def token(self, seed: int, place: int) -> int:
            asked.add(seed)
            return super().token(seed, place)

    loop_steps(tmp_path, Noted(), steps=1)
    first = set(asked)
    assert seeds_of(tmp_path, 1) == first and len(first) == 6

    def equal(row, completion) -> float:
        return 1.0

    other = tmp_path / "other"
    asked.clear()
    loop_steps(other, Noted(), steps=1, dynamic_sampling=1, reward=equal)
    assert seeds_of(other, 1) == asked - first and len(asked) == 12


def seeds_of(folder: Path, step: int) -> set:
    return {line["seed"] for line in samples.read(folder / samples.SAMPLES, step)}


@pytest.mark.parametrize("moment", ["before submit", "after submit"])
def test_after_a_crash_every_sample_is_one_that_trains(tmp_path, moment):
    """Also if an earlier start had other groups in its steps."""
    run = StandIn()

    async def crash_later(step, replicas, loop) -> None:
        if step.number == 2:
            run.crash_at = moment

    with pytest.raises(Crash):
        loop_steps(tmp_path, run, steps=5, on_step=crash_later)
    path = samples.path_of(tmp_path / samples.SAMPLES, 4)
    other = samples.path_of(tmp_path / samples.SAMPLES, 3).read_text().splitlines()[-1]
    path.write_text(f'{other}\n{{"step": 4, "group": 6, "samp')  # of another group; a power cut
    run.crash_at = ""
    trained = loop_steps(tmp_path, run, steps=5)[1]
    assert trained.number == 4
    kept = samples.read(tmp_path / samples.SAMPLES, 4)
    assert [(s["group"], s["sample"], s["reward"]) for s in kept] == [
        (g, s, r) for g, s, r, _ in places(r for group in trained.groups for r in group)
    ]
    lines = path.read_text().split("\n")
    assert len(lines) == len(kept) + 1, "nothing is left of the earlier start"


def test_old_samples_go(tmp_path):
    loop_steps(tmp_path, steps=6, keep_samples=2)
    assert samples.steps_of(tmp_path / samples.SAMPLES) == [5, 6]
    loop_steps(tmp_path / "none", steps=2, keep_samples=0)
    assert not (tmp_path / "none" / samples.SAMPLES).exists()


def test_a_later_steps_samples_remove_none_of_a_step_that_is_not_trained(tmp_path):
    files = samples.SampleFiles(tmp_path, keep_steps=1)
    for step in (1, 1, 2, 1):  # samples of step 2 come before the last one of step 1
        files.append(step, json.dumps({"step": step}) + "\n")
    files.prune(1)
    assert samples.path_of(tmp_path, 1).read_text().count("\n") == 3
    files.prune(2)
    assert samples.steps_of(tmp_path) == [2]


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    (tmp_path / f"{decisions.STATUS}.part").mkdir()
    assert len(loop_steps(tmp_path, steps=2)) == 2
    assert f"cannot write {tmp_path / decisions.STATUS}" in caplog.text


def test_a_full_disk_costs_samples_and_is_said(tmp_path, caplog):
    """/dev/full answers every write with ENOSPC, as a full disk does."""
    folder = tmp_path / samples.SAMPLES
    folder.mkdir()
    samples.path_of(folder, 2).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        assert len(loop_steps(tmp_path, steps=4)) == 4, "training continues"
    assert "samples: 1 writes lost" in caplog.text and "No space left" in caplog.text
    said = json.loads((tmp_path / decisions.STATUS).read_text())["text"]
    assert "samples: 6 writes lost" in said and "No space left on device" in said
    assert [len(samples.read(folder, step)) for step in (1, 3, 4)] == [6, 6, 6]


def test_a_write_that_is_cut_short_leaves_no_half_line(tmp_path):
    """RLIMIT_FSIZE ends a write in its middle, as the last block of a disk does."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from splice.rl import samples\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "files = samples.SampleFiles(Path(sys.argv[1]), keep_steps=None)\n"
        "files.append(1, 'a' * 69 + chr(10))\n"
        "try:\n"
        "    files.append(1, 'b' * 69 + chr(10))\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "File too large", done.stderr
    assert samples.path_of(tmp_path, 1).read_text() == "a" * 69 + "\n"


def test_the_command_browses_them(tmp_path):
    steps = loop_steps(tmp_path, steps=3)
    rewards = {step.number: [r.reward for group in step.groups for r in group] for step in steps}

    def shown(*options: str) -> list[dict]:
        done = CliRunner().invoke(app, ["samples", str(tmp_path), "--json", *options])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert [s["step"] for s in shown()] == [3] * 6 + [2] * 6 + [1] * 6, "the newest first"
    assert [s["reward"] for s in shown("--step", "2")] == rewards[2]
    everything = sorted(reward for own in rewards.values() for reward in own)
    assert [s["reward"] for s in shown("--worst", "-n", "4")] == everything[:4]
    assert [s["reward"] for s in shown("--best", "-n", "4")] == everything[:-5:-1]
    assert {s["row"]["name"] for s in shown("--contains", "[3, 1, 2]")} == {3}
    assert shown("--contains", "nobody said this") == []
    table = CliRunner().invoke(app, ["samples", str(tmp_path), "--step", "1"]).stdout
    assert "@0:4" in table and "-1.000" in table and "length" in table
    text = CliRunner().invoke(app, ["samples", str(tmp_path), "--whole", "-n", "1"]).stdout
    assert "reward" in text and "[" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--step", "9"], "there are steps 1 to 1"), (["--best", "--worst"], "choose one")],
)
def test_what_is_not_there_is_said(tmp_path, options, said):
    loop_steps(tmp_path, steps=1)
    done = CliRunner().invoke(app, ["samples", str(tmp_path), *options])
    assert done.exit_code == 2 and said in done.output


# ---------------------------------------------------------------- sinks


def events_in(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar of TensorBoard's event files, read by their format: tag -> step -> value."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,), (crc,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
            body, (check,) = data[12 : 12 + length], struct.unpack_from("<I", data, 12 + length)
            assert (crc, check) == (masked(data[:8]), masked(body))
            event, data = Event.FromString(body), data[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


async def evaluate(step, replicas, loop) -> None:
    if step.number % 2 == 0:
        loop.note(accuracy=step.number / 10)


def test_tensorboard_has_every_number_also_after_a_restart(tmp_path):
    run = StandIn()
    steps = loop_steps(tmp_path, run, steps=2, on_step=evaluate)
    steps += loop_steps(tmp_path, run, steps=4, on_step=evaluate)
    found = events_in(tmp_path / "tensorboard")
    for step in steps:
        assert found["rollout/reward_mean"][step.number] == pytest.approx(
            step.metrics["reward_mean"]
        )
        assert found["train/loss"][step.number] == 0.0
        assert found["version"][step.number] == step.version
        share = step.seconds["trainer_waits"] / step.seconds["step"]
        assert found["balance/trainer_waits"][step.number] == pytest.approx(share, abs=1e-6)
    assert found["accuracy"] == pytest.approx({2: 0.2, 4: 0.4})
    assert "seconds/training" in found
    notes = [d for d in decisions.read(tmp_path / decisions.LOG) if d["event"] == "note"]
    assert [(n["step"], n["metrics"]) for n in notes] == [
        (2, {"accuracy": 0.2}),
        (4, {"accuracy": 0.4}),
    ]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"'tensorboard'.*pip install tensorboardX, or leave it"):
        loop_steps(tmp_path, steps=1)
    assert len(loop_steps(tmp_path, steps=1, sinks=())) == 1


def test_an_unknown_sink_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tensorboard"):
        loop_steps(tmp_path, steps=1, sinks=("comet",))


def test_a_sink_that_cannot_write_ends_nothing(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where its folder should be")
    mended = []

    async def mend(step, replicas, loop) -> None:
        if step.number == 2:
            while "2 writes lost" not in "".join(loop._record.problems):
                await asyncio.sleep(0.01)
            (tmp_path / "tensorboard").unlink()
            mended.append(True)

    with caplog.at_level(logging.WARNING):
        assert len(loop_steps(tmp_path, steps=4, on_step=mend)) == 4
    assert mended and "tensorboard: 1 writes lost" in caplog.text
    assert "the loop continues without them" in caplog.text
    said = json.loads((tmp_path / decisions.STATUS).read_text())["text"]
    assert "tensorboard: 2 writes lost, the last one because of FileExistsError" in said
    assert set(events_in(tmp_path / "tensorboard")["train/loss"]) == {3, 4}, "it comes back"


def test_a_sink_that_hangs_is_left_behind(caplog):
    hung, ran = threading.Event(), []
    background = Background("slow")
    background.call(lambda: hung.wait(60) and None)
    background.call(lambda: ran.append(1))
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        background.close(timeout_s=0.3)
    hung.set()
    assert time.monotonic() - began_s < 5.0
    assert "slow: 2 writes are lost, because they took more than 0 s" in caplog.text


def test_a_checkout_that_is_not_installed(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    node = NodeStatus(node_id="trainer", role="trainer", state="ready", gpus=("H200", "H200"))
    found = facts_of_run(StandIn().status().model_copy(update={"nodes": (node,)}))
    assert found["splice"] == "" and found["devices"] == {"trainer": ["H200", "H200"]}
    assert next(iter(_on_what(found))).startswith("trainer on 2 x H200; splice at commit ")


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "CLOSE_S", 120.0)  # its service starts slowly on a busy machine
    monkeypatch.setenv("WANDB_MODE", "offline")
    loop_steps(tmp_path, steps=2, sinks=("wandb",))
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # Its own process writes the file, on a busy machine after the run has ended.
    assert soon(lambda: b"rollout/reward_mean" in path.read_bytes(), 60)


def test_mlflow_goes_on_in_its_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = StandIn()
    steps = loop_steps(tmp_path, run, steps=2, sinks=("mlflow",))
    steps += loop_steps(tmp_path, run, steps=3, sinks=("mlflow",))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("splice")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "rollout/reward_mean")
    assert {m.step: m.value for m in history} == {s.number: s.metrics["reward_mean"] for s in steps}
    assert found.data.params["max_staleness"] == "1" and found.info.status == "FINISHED"


def test_trackio(tmp_path, monkeypatch):
    script_env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.rl.stand_in import StandIn\n"
        "from tests.rl.stood_in import run_loop\n"
        "asyncio.run(run_loop(StandIn(), Path(sys.argv[1]), steps=2, sinks=('trackio',)))\n"
    )  # it reads TRACKIO_DIR when it is imported
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=script_env, check=True, timeout=120
    )
    with sqlite3.connect(tmp_path / "trackio" / "splice.db") as db:
        rows = db.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == [1, 2] and b"rollout/reward_mean" in bytes(rows[0][1])
