"""What `splice replay` refuses before anything starts. `test_train.py` of e2e runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from splice.train.replaying import plan


def version(versions: Path, number: int, *, base: str | None) -> Path:
    folder = versions / str(number)
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()
    remake = {} if base is None else {"remake": {"base": base, "save": "x", "steps": number}}
    (folder / "meta.json").write_text(json.dumps({"version": number, **remake}))
    if base is not None:
        (folder / "remake.bin").touch()
    return folder


def test_each_version_is_made_from_the_one_before(tmp_path: Path) -> None:
    for number in range(4):
        version(tmp_path, number, base=f"../{number - 1}" if number else None)
    assert plan(tmp_path, 0, 3) == [0, 1, 2, 3]
    assert plan(tmp_path, 2, 3) == [2, 3]


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (2, 2, "is not after --from 2"),
        (7, 9, "7 is no whole version.*keep_versions"),
        (3, 4, "4 is no whole version.*keep_versions"),
        (0, 2, "does not hold the job that made it"),
        (2, 3, "was made from .*/1, not from version 2; replay up to 2"),
    ],
)
def test_what_cannot_be_made_again_is_named(
    first: int, last: int, why: str, tmp_path: Path
) -> None:
    version(tmp_path, 0, base=None)
    version(tmp_path, 1, base="../0")
    version(tmp_path, 2, base=None)  # saved as a whole
    version(tmp_path, 3, base="../1")  # after a load of another one
    with pytest.raises(ConfigError, match=why):
        plan(tmp_path, first, last)
