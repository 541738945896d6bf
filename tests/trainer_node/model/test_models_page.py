"""docs/models.md says what the tests' lists say."""

from __future__ import annotations

from pathlib import Path

from tests.models_page import markdown

PAGE = Path(__file__).resolve().parents[3] / "docs/models.md"


def test_the_page_of_models_is_the_tests() -> None:
    assert PAGE.read_text() == markdown(), "run `python -m tests.models_page > docs/models.md`"
