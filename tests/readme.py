"""Code blocks of the README and other pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str, page: str = "README.md") -> list[str]:
    """A page's code blocks of a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [piece.split("```")[0] for piece in text.split(f"```{language}\n")[1:]]
