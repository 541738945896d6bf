"""What a follower asks of its run: after failures, and after it was killed."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from orchestrator.errors import ConfigError, JobFailed
from orchestrator.protocol.config import FollowConfig, TrainerConfig
from trainer_node.follower import Follower
from weight_transfer.store import ORIGIN, Store, Version, new_keys

PRIVATE, PUBLIC = new_keys()


def put(root: Path, number: int, base: Version | None = None) -> Version:
    folder = root / "made" / str(number)
    folder.mkdir(parents=True)
    save_file({"w": torch.full((4,), float(number))}, folder / "model.safetensors")
    store = Store(str(root / "store"))
    return store.put(folder, name="m", version=number, base=base, key=PRIVATE)


def follower(root: Path) -> Follower:
    follow = FollowConfig(store=str(root / "store"), key=PUBLIC, poll_s=0.01)
    return Follower(TrainerConfig(model="x", device="cpu", follow=follow), follow, root / "run")


class Asked:
    """An orchestrator that says what is served, and notes the jobs."""

    def __init__(self, stop: threading.Event, *statuses: tuple[int | None, str]) -> None:
        self.jobs: list[tuple[str, int | None]] = []
        self.statuses, self.stop, self.error = [*statuses], stop, None

    def status(self) -> SimpleNamespace:
        version, publication = self.statuses.pop(0)
        if not self.statuses:
            self.stop.set()
        return SimpleNamespace(version=version, publication=publication)

    def run(self, job) -> None:
        self.jobs.append((job.kind, getattr(job, "version", None)))
        if self.error is not None:
            raise self.error


def watched(one: Follower, *statuses: tuple[int | None, str]) -> list[tuple[str, int | None]]:
    stop = threading.Event()
    asked = Asked(stop, *statuses)
    one.watch(asked, stop)
    return asked.jobs


def test_what_is_not_served_because_a_publication_failed_is_served_again(tmp_path):
    put(tmp_path, 1)
    one = follower(tmp_path)
    put(tmp_path, 2)
    assert watched(one, (None, "idle")) == [], "InitialSync comes first"
    jobs = watched(one, (None, "poisoned"), (1, "idle"), (2, "idle"))
    assert jobs == [("Resync", None), ("LoadCheckpoint", None), ("Publish", 2)]


def test_publications_that_fail_are_tried_less_and_less_often(tmp_path, monkeypatch):
    put(tmp_path, 1)
    one, stop = follower(tmp_path), threading.Event()
    put(tmp_path, 2)
    waits: list[float] = []
    monkeypatch.setattr(stop, "wait", lambda s: waits.append(s) or stop.is_set())
    asked = Asked(stop, *[(1, "idle")] * 4)
    asked.error = JobFailed(code="internal", node="x", message="no", phase="y", remedy="z")
    one.watch(asked, stop)
    assert waits == [0.01, 0.02, 0.04, 0.08, 0.16]


def test_a_folder_that_was_being_written_is_no_version(tmp_path):
    put(tmp_path, 1)
    half = tmp_path / "run/versions/1.part"
    half.mkdir(parents=True)
    Version(folder=half, name="m", number=1, link_sha256="0" * 64).write()
    assert (half / ORIGIN).exists()
    assert follower(tmp_path).weights.version.folder == tmp_path / "run/fetched/1"


def test_what_a_change_is_of_may_have_been_deleted(tmp_path):
    first = put(tmp_path, 1)
    one = follower(tmp_path)
    put(tmp_path, 2, base=first)
    for path in one.weights.version.folder.iterdir():
        path.unlink()
    assert watched(one, (1, "idle"), (2, "idle"))[-1] == ("Publish", 2)


def test_a_run_that_follows_has_one_process_that_stays():
    follow = {"store": "s3://bucket", "key": PUBLIC}
    for own, name in (({"parallel": {"tensor": 2}}, "parallel"), ({"memory": "exit"}, "memory")):
        with pytest.raises(ValueError, match=f"trainer.follow does not go with {name}"):
            TrainerConfig(model="x", follow=follow, **own)


def test_another_runs_store_ends_the_follower_at_once(tmp_path):
    put(tmp_path, 1)
    follow = FollowConfig(store=str(tmp_path / "store"), key=PUBLIC, name="other")
    with pytest.raises(ConfigError, match="has versions of m, not of other"):
        Follower(TrainerConfig(model="x", device="cpu", follow=follow), follow, tmp_path / "run")
