"""The pages of docs/: no link leads nowhere, and each error code has its section."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ErrorCode
from tests.readme import ROOT

BROKEN = {
    "page": "[x](no-such-page.md)",
    "file": "[x](../no-such-file.py)",
    "anchor": "[x](operation.md#no-such-heading)",
    "own anchor": "[x](#no-such-heading)",
}


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


@pytest.mark.parametrize("what", BROKEN)
def test_a_link_that_leads_nowhere_is_an_error(what: str, site: Path) -> None:
    with (site / "docs/quickstart.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{BROKEN[what]}\n")
    done = build(site)
    assert done.returncode == 1
    assert "1 warnings in strict mode" in done.stdout + done.stderr
    assert "quickstart.md" in done.stderr


def test_a_page_that_no_menu_names_is_an_error(site: Path) -> None:
    (site / "docs/forgotten.md").write_text("# Forgotten\n", encoding="utf-8")
    assert build(site).returncode == 1


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
