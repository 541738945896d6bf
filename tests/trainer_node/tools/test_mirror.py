"""What a mirror writes: on top of what, and what it survives. The export is a stand-in, because
these tests look at the store only."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from trainer_node.tools import mirror as tool
from weight_transfer.store import Store

PRIVATE, PUBLIC = tool.store.new_keys()


class Files:
    """Writes a version's number as its only file."""

    def __init__(self, config: object, version: Path, *, device: str) -> None:
        self.take(version)

    def take(self, version: Path) -> None:
        if not version.is_dir():
            raise ConfigError(f"{version} is not a version's checkpoint")
        self.number = int(version.name)

    def write(self, out: Path) -> None:
        out.mkdir()
        (out / "model.safetensors").write_bytes(bytes(1000) + bytes([self.number]))


@pytest.fixture(autouse=True)
def _files(monkeypatch):
    monkeypatch.setattr(tool, "Exporting", Files)


def made(run: Path, *numbers: int) -> Path:
    for number in numbers:
        (run / "versions" / str(number)).mkdir(parents=True)
        (run / "versions" / str(number) / "COMPLETE").touch()
    return run


def mirror_of(run: Path, to: Store, **more: object) -> tool.Mirror:
    given = {"name": "m", "key": PRIVATE, "full_every": 50, "keep": 100, "device": "cpu", **more}
    return tool.Mirror(TrainerConfig(model=Path("model")), run, to, **given)


def fetched(store: Store, number: int, into: Path) -> int:
    version = store.fetch(number, into, have=None, public_key=PUBLIC)
    return (version.folder / "model.safetensors").read_bytes()[-1]


def test_a_second_store_does_not_change_what_only_the_first_has(tmp_path):
    run = made(tmp_path / "run", 1, 2, 3, 4)
    one, other = Store(str(tmp_path / "one")), Store(str(tmp_path / "other"))
    first = mirror_of(run, one)
    first.write(1)
    first.write(2)
    mirror_of(run, other).write(2)
    mirror_of(run, one).write(3)
    mirror_of(run, other).write(3)
    mirror_of(run, one).write(4)
    assert fetched(one, 4, tmp_path / "4") == 4
    assert fetched(other, 3, tmp_path / "3") == 3


def test_a_broken_chain_is_mended_with_a_whole_version(tmp_path):
    run, to = made(tmp_path / "run", 1, 2, 3), Store(str(tmp_path / "store"))
    mirror = mirror_of(run, to)
    mirror.write(1)
    mirror.write(2)
    (tmp_path / "store/links/00000001.json").unlink()
    mirror.write(3)
    assert fetched(to, 3, tmp_path / "3") == 3


def run_tool(monkeypatch, run: Path, store: Path, lines: str) -> int:
    config = run / "trainer.json"
    config.write_text('{"model": "x"}')
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    argv = ["--config", config, "--run-dir", run, "--name", "m", "--store", store]
    return tool.main([*map(str, argv), "--key", str(run / "key")])


def test_a_version_that_the_run_has_deleted_does_not_end_the_mirror(
    monkeypatch, tmp_path, capsys, caplog
):
    run = made(tmp_path / "run", 1, 3)
    with caplog.at_level(logging.ERROR):
        assert run_tool(monkeypatch, run, tmp_path / "store", "1\n2\n3\n") == 0
    assert Store(str(tmp_path / "store")).versions() == [1, 3]
    assert capsys.readouterr().out.split()[-3:] == ["1", "2", "3"]


def test_the_exit_code_tells_that_the_last_version_was_not_written(monkeypatch, tmp_path):
    run = made(tmp_path / "run", 1)
    assert run_tool(monkeypatch, run, tmp_path / "store", "1\n2\n") == 1


def test_another_runs_store_is_refused_by_name(monkeypatch, tmp_path, caplog):
    mirror_of(made(tmp_path / "run", 7), Store(str(tmp_path / "store"))).write(7)
    with caplog.at_level(logging.ERROR):
        assert run_tool(monkeypatch, made(tmp_path / "new", 1), tmp_path / "store", "1\n") == 1
    assert "has version 7 already" in caplog.text


def test_a_version_of_all_parameters_is_read_from_links(monkeypatch, tmp_path):
    """A load repairs its folder, and the run's must stay as it is. What is linked does not stay."""
    run, to = made(tmp_path / "run", 1), Store(str(tmp_path / "store"))
    (run / "versions/1/weights").mkdir()
    (run / "versions/1/weights/part").write_text("1")

    def take(files: Files, version: Path) -> None:
        files.number = int((version / "weights/part").read_text())
        (version / "weights/part").unlink()

    monkeypatch.setattr(Files, "take", take)
    config = TrainerConfig(model=Path("model"), finetuning_type="full")
    more = {"name": "m", "key": PRIVATE, "full_every": 50, "keep": 100, "device": "cpu"}
    tool.Mirror(config, run, to, **more).write(1)
    assert fetched(to, 1, tmp_path / "1") == 1
    assert (run / "versions/1/weights/part").read_text() == "1"
    assert [path.name for path in (run / "mirror").iterdir()] == ["1"]
