"""The table of endpoints in docs/tinker.md: those that the SDK's source calls, and what answers.

python -m tests.tinker.page writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import tinker

from splice.tinker.endpoints import REFUSED, router

PAGE = Path(__file__).resolve().parents[2] / "docs/tinker.md"
BEGIN, END = "<!-- endpoints -->\n", "<!-- /endpoints -->"
PREFIX = "/api/v1"
CALL = re.compile(r"\.(_?)(get|post|put|delete)\(\s*f?\"(/api/v1/[^\"]*)\"")
BY_NAME = {"POST /cancel_future": "", "GET /healthz": ""}


def called() -> set[str]:
    """Every endpoint that the installed SDK calls, as `METHOD /path` with `{}` for its parts."""
    root = Path(tinker.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        if path.name.endswith("_test.py") or "cli" in path.parts:
            continue
        for _, method, url in CALL.findall(path.read_text()):
            found.add(f"{method.upper()} {plain(url.removeprefix(PREFIX))}")
    return found


def plain(path: str) -> str:
    """Return a path without the names of its parts."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def answered() -> dict[str, str]:
    """Every endpoint of the server, `METHOD /path` -> what it does."""
    found = {}
    for route in router.routes:
        (method,) = route.methods
        path = route.path.removeprefix(PREFIX)
        what = REFUSED.get((method, path))
        text = str(route.endpoint.__doc__).strip().partition("\n")[0].rstrip(".")
        found[f"{method} {plain(path)}"] = text if what is None else f"**refused:** {what}"
    return found


def table() -> str:
    """Return the table, sorted by path."""
    calls, rows = called(), answered()
    lines = ["| endpoint | in SDK 0.38.0 | here |", "| --- | --- | --- |"]
    order = sorted(rows, key=lambda name: name.partition(" ")[::-1])
    lines += [f"| `{n}` | {'yes' if n in calls else 'no'} | {rows[n]} |" for n in order]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole page with the table in its place."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
