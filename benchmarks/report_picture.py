"""docs/report.svg: four plots of `splice report`, from a committed log of a loop.

python -m benchmarks.report_picture > docs/report.svg
"""

from __future__ import annotations

import gzip
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from splice import report

LOG = Path(__file__).parent / "results" / "report-loop-cpu.jsonl.gz"
"""Thirty steps of the tiny Qwen3 on two CPU cores, which learns to say maybe."""


def picture(log: Path) -> str:
    """Return the timeline, and reward, staleness and the time of a step below it."""
    history, plots = report.read(log), report.Plots()
    pieces = [plots.timeline(history)]
    for title in ("Reward", "Staleness (versions)"):
        names = report.PLOTS[title]
        pieces.append(plots.lines({n: _series(history, n) for n in names}))
    pieces.append(plots.phases(history.seconds))
    body, height = "\n".join(_placed(pieces)), 365 + 195
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1130 {height}">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _series(history: report.History, name: str) -> dict[int, float]:
    return {step: own[name] for step, own in history.steps.items() if name in own}


def _placed(pieces: list[str]) -> Iterator[str]:
    """Yield the pieces as elements with a place: the first is as wide as the three below it."""
    places = [(0, 0, 1130, 356), *((x, 365, 376, 190) for x in (0, 377, 754))]
    for number, (piece, (x, y, width, height)) in enumerate(zip(pieces, places, strict=True)):
        box = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        piece = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", piece)
        piece = re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", piece)
        # Ids are unique within a figure only.
        piece = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>p{number}-", piece)
        yield piece.replace("<svg", f"<svg {box}", 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        log.write_bytes(gzip.decompress(LOG.read_bytes()))
        sys.stdout.write(picture(log))
