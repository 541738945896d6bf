"""The pages of docs/: no link leads nowhere, and each error code has its section."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import splice
from orchestrator.errors import ErrorCode
from splice import rl
from splice.cli import app
from tests.readme import ROOT

BROKEN = (
    "[page](no-such-page.md)",
    "[file](../no-such-file.py)",
    "[anchor](operation.md#no-such-heading)",
    "[own anchor](#no-such-heading)",
)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=folder,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site_builds(site: Path) -> None:
    done = build(site)
    assert done.returncode == 0, done.stderr
    page = (site / "build/site/architecture/job.html").read_text(encoding="utf-8")
    assert '<pre class="mermaid">' in page, "a picture, not its source"
    api = (site / "build/site/api.html").read_text(encoding="utf-8")
    absent = [n for m in (splice, rl) for n in m.__all__ if f'id="{m.__name__}.{n}"' not in api]
    assert not absent, "what users import is on the page of the API"


def test_versions_stand_next_to_each_other(site: Path) -> None:
    """As `make docs-version` adds them; the theme's switch reads versions.json."""
    own = (["config", "user.name", "x"], ["config", "user.email", "x@example.org"])
    for line in (["init", "-q"], *own, ["add", "."], ["commit", "-q", "-m", "docs"]):
        subprocess.run(["git", *line], cwd=site, check=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PATH": path}
    mike = [sys.executable, "-c", "from mike.driver import main; main()"]
    for version in ("0.1.0", "0.2.0"):
        argv = [*mike, "deploy", "--update-aliases", version, "latest"]
        subprocess.run(argv, cwd=site, check=True, env=env, timeout=120, capture_output=True)

    def shown(name: str) -> str:
        argv = ["git", "show", f"gh-pages:{name}"]
        return subprocess.run(argv, cwd=site, check=True, text=True, capture_output=True).stdout

    found = {entry["version"]: entry["aliases"] for entry in json.loads(shown("versions.json"))}
    assert found == {"0.1.0": [], "0.2.0": ["latest"]}
    assert '"version":{"provider":"mike"}' in shown("0.1.0/quickstart.html").replace(" ", "")


def test_links_and_pages_that_lead_nowhere_are_errors(site: Path) -> None:
    with (site / "docs/quickstart.md").open("a", encoding="utf-8") as page:
        page.write("\n" + "\n".join(BROKEN) + "\n")
    (site / "docs/forgotten.md").write_text("# No menu names it\n", encoding="utf-8")
    done = build(site)
    assert done.returncode == 1
    assert f"{len(BROKEN) + 1} warnings in strict mode" in done.stdout + done.stderr
    assert done.stderr.count("quickstart.md") == len(BROKEN) and "forgotten.md" in done.stderr


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_from_outside_docs_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for path, _, anchor in re.findall(r"\]\(([^:)#]+)(#([^)]+))?\)", text):
        target = ROOT / path
        assert target.exists(), f"{name}: {path}"
        if anchor:
            assert anchor in _anchors(target), f"{name}: {path}#{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_every_error_code_has_its_section() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `(\w+)`$", text, re.MULTILINE) == list(ErrorCode)
    for section in text.split("\n## `")[1:]:
        labels = re.findall(r"^- \*\*(.+):\*\*", section.split("\n## ")[0], re.MULTILINE)
        assert labels == ["You see", "Why", "Do"], section[:30]


def test_the_comparison_counts_what_its_tables_have() -> None:
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    own = [row for row in rows if len(row) == 3 and row[1] in ("yes", "part", "no")]
    others = [row for row in rows if len(row) == 8 and row[1] in ("yes", "part", "\u2013")]
    assert [row[0] for row in own] == [row[0] for row in others] and len(own) == 25
    found = [row[1] for row in own]
    said = f"splice has {found.count('yes')}, and {found.count('part')} in part."
    assert said in page and all(row[2] != "nothing" or row[1] == "no" for row in own)
    commands = typer.main.get_group(app).commands
    assert set(re.findall(r"`splice (\w+)", page)) <= set(commands)
