"""The README's loop is the file that runs, and the README stays short."""

from __future__ import annotations

from tests.readme import ROOT, blocks

MOST_LINES = 150


def test_the_loop_in_the_readme_is_the_file_that_runs():
    assert blocks("python") == [(ROOT / "examples/first_loop.py").read_text(encoding="utf-8")]


def test_the_readme_starts_the_file():
    (start,) = blocks("bash")
    assert "python examples/first_loop.py runs/first/run" in start.splitlines()


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
