"""How ranks start, end and come back: `splice trainer` on real Megatron, and the process below it
by itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.errors import ConfigError, LinkLost, NodeLost
from orchestrator.processes.restarts import EXIT_LINK_LOST, START_ID
from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import InitialSync, Shutdown, TrainMerged
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import TOKEN, Run
from tests.trainer_node.conftest import REPO, child_env
from tests.trainer_node.data import arrays, training
from tests.trainer_node.launched import Replica, ranks, trainer
from trainer_node import node
from trainer_node.launcher.ranks import check_can_fork
from trainer_node.ranks import lockstep

BACK_S = 5.0


def test_a_killed_rank_is_back_within_seconds(models, tmp_path: Path) -> None:
    """From SIGKILL to the end of the next TrainMerged job, published; then the template is killed;
    then the launcher.
    """
    fields, buffers = training(arrays(1), name="cross_entropy")
    job, parallel = TrainMerged(**fields), ParallelConfig(world_size=2)
    with (
        Run(tmp_path, transfer_timeout_s=60.0) as run,
        trainer(run, models["dense_tied"], tmp_path, max_restarts=3, parallel=parallel) as launcher,
    ):
        replica = Replica(endpoint=run.endpoint, node_id="inference-0", token=TOKEN).start()
        run.nodes.append(replica)
        assert soon(lambda: run.states().get("trainer") == "ready", 120)
        run.client.run(InitialSync(), timeout_s=60)
        run.client.run(job, buffers=buffers, timeout_s=60)
        for name in ("splice-rank-0", "splice-rank-1"):
            before = ranks(launcher)
            killed_s = time.monotonic()
            next(p for p in before if p.name() == name).kill()
            run.client.run(job, buffers=buffers, timeout_s=60)
            back_s = time.monotonic() - killed_s
            print(f"back {back_s:.1f} s after SIGKILL of {name}")
            assert back_s < BACK_S
            assert not {p.pid for p in before} & {p.pid for p in ranks(launcher)}
        (template,) = psutil.Process(launcher.pid).children()
        template.kill()
        assert soon(lambda: not ranks(launcher)) and soon(lambda: len(ranks(launcher)) == 2, 120)
        assert run.client.run(job, buffers=buffers, timeout_s=120).version == 4
        below = psutil.Process(launcher.pid).children(recursive=True)
        replica.on_LeaveTransferGroup(None)
        os.kill(launcher.pid, signal.SIGKILL)
        assert not psutil.wait_procs(below, timeout=10)[1]


class Process:
    """`trainer_node.launcher.ranks`, as the launcher speaks to it; its ranks are `stub_rank`s."""

    def __init__(self, folder: Path, action: str, *options: str, num_ranks: int = 2) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        argv = [
            sys.executable,
            "-m",
            "trainer_node.launcher.ranks",
            "--ranks",
            str(num_ranks),
            "--world",
            str(num_ranks),
            *options,
        ]
        # Not as a module of `tests.trainer_node`, which imports torch.
        argv += ["stub_rank", str(folder), action]
        env = child_env()
        env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=REPO,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.hears() == "ready"

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def start(self) -> list[dict[str, Any]]:
        """What the ranks wrote."""
        files = [self.folder / f"{r}.json" for r in range(self.num_ranks)]
        for file in files:
            file.unlink(missing_ok=True)
        self.say("start an-id")
        assert self.hears() == "started"
        assert soon(lambda: all(f.exists() for f in files), 60), (self.folder / "log").read_text()
        return [json.loads(f.read_text()) for f in files]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()  # type: ignore[union-attr]


def gone(found: list[dict[str, Any]]) -> bool:
    return not any(psutil.pid_exists(f["pid"]) for f in found)


def test_ranks_find_each_other_on_loopback_alone(tmp_path: Path) -> None:
    with Process(tmp_path, "joins") as process:
        found = process.start()
        for rank, (env, one) in enumerate((f["env"], f) for f in found):
            assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["GROUP_RANK"]) == (
                str(rank),
                str(rank),
                "2",
                "0",
            )
            assert (env["MASTER_ADDR"], env["OMP_NUM_THREADS"], one["sum"]) == ("127.0.0.1", "1", 1)
            assert one["parent"] == process.process.pid
        stores = [
            address
            for one in found
            for address in one["listening"]
            if address[1] == int(found[0]["env"]["MASTER_PORT"])
        ]
        assert stores == [["127.0.0.1", int(found[0]["env"]["MASTER_PORT"])]]
        process.say("end")
        assert process.hears() == "ended -9"
        assert gone(found)
        assert len(process.start()) == 2


def test_one_ends_all_and_all_end_with_those_above(tmp_path: Path) -> None:
    with Process(tmp_path, "ends:1:75") as process:
        found, started_s = process.start(), time.monotonic()
        assert process.hears() == "ended 75" and gone(found)
        assert time.monotonic() - started_s < 30, "rank 0 was left waiting"
        process.say("ping")
        assert process.hears() == "pong"
    for end in (lambda p: p.kill(), lambda p: p.terminate(), lambda p: p.stdin.close()):
        with Process(tmp_path, "waits") as process:
            found = process.start()
            end(process.process)
            process.process.wait(10)
            assert soon(lambda: gone(found), 10)  # noqa: B023 - called at once


def test_an_address_that_is_taken_can_be_free_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with Process(
            tmp_path, "waits", "--master", f"127.0.0.1:{taken.getsockname()[1]}"
        ) as process:
            process.say("start")
            assert (process.hears(), process.hears()) == ("started", f"ended {EXIT_LINK_LOST}")


def test_what_a_fork_would_not_survive_is_refused() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="in the way")
    thread.start()
    try:
        assert "in the way" in (check_can_fork("cpu") or "")
    finally:
        stop.set()
        thread.join()
    assert check_can_fork("cpu") is None or threading.active_count() > 1


def test_forked_ranks_draw_different_numbers(monkeypatch, tmp_path: Path) -> None:
    """They share a template; what it has drawn, or would draw, is not theirs. The template does not
    import Flash Linear Attention, whose import initialises CUDA's driver."""
    (tmp_path / "fla.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Process(tmp_path, "waits", "--template", "cpu") as process:
        found = process.start()
        assert len({f["random"] for f in found}) == 2
        assert {f["env"][START_ID] for f in found} == {"an-id"}
        assert [f["argv"] for f in found] == [[str(tmp_path), "waits"]] * 2
        assert [f["fla"] for f in found] == [str(tmp_path / "fla.py")] * 2


def test_a_lone_rank_takes_no_rank_from_its_caller(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    with Process(tmp_path, "waits", num_ranks=1) as process:
        (found,) = process.start()
        assert not {"RANK", "MASTER_ADDR"} & found["env"].keys()


def test_the_exit_code_says_whether_the_trainer_was_told_to_end(
    monkeypatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.json"
    config.write_text(TrainerConfig(model=tmp_path).model_dump_json())
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    for error, code in (
        (LinkLost("silent"), EXIT_LINK_LOST),
        (NodeLost("ranks"), EXIT_LINK_LOST),
        (ConfigError("bad"), 2),
    ):
        monkeypatch.setattr(node, "run", lambda error=error, **_: (_ for _ in ()).throw(error))
        with pytest.raises(SystemExit) as ended:
            node.main(["--endpoint", "tcp://127.0.0.1:1", "--config", str(config)])
        assert ended.value.code == code


class DeadLink:
    """A link whose orchestrator is silent, or says Shutdown."""

    def __init__(self, said: Envelope | None) -> None:
        self.said = said

    def send(self, *_: object) -> None: ...

    def recv(self, **_: object) -> Envelope:
        if self.said is None:
            raise LinkLost("silent")
        return self.said


@pytest.mark.parametrize(
    ("said", "code"), [(None, EXIT_LINK_LOST), (Envelope(message=Shutdown()), 0)]
)
def test_a_node_that_lost_its_link_was_not_told_to_end(said, code: int, monkeypatch) -> None:
    monkeypatch.setattr(lockstep.dist, "get_world_size", lambda: 1)
    lost = object.__new__(node.Node)
    lost.link, lost.lockstep = DeadLink(said), object.__new__(lockstep.Lockstep)
    with pytest.raises(StopIteration) as stop:
        lost._next()
    assert stop.value.value == code
