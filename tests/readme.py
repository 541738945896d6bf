"""The README's code blocks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return [piece.split("```")[0] for piece in readme.split(f"```{language}\n")[1:]]
