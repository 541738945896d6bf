"""No process that splice starts imports anything from the folder in which it starts."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.processes.child import ChildProcess
from orchestrator.processes.python import python_command
from tests.hiding import hiding_folder

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("splice", "orchestrator", "weight_transfer", "trainer_node", "inference_node")
STARTS_PYTHON = ("-m", "-c")


def by_hand(source: str) -> Iterator[int]:
    """Lines with a Python's command line that `python_command` did not make."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            parts = [] if name.endswith("python_command") else node.args
        elif isinstance(node, ast.List | ast.Tuple):
            parts = node.elts
        else:
            continue
        words = [part.value for part in parts if isinstance(part, ast.Constant)]
        names = [ast.unparse(part) for part in parts]
        is_list = not isinstance(node, ast.Call)
        is_python = any(word in STARTS_PYTHON for word in words) and words[0] != "bash"
        if is_python or (is_list and "sys.executable" in names):
            yield node.lineno


def test_every_command_line_of_python_is_made_by_one_function():
    found = {
        str(path.relative_to(REPO)): lines
        for package in PACKAGES
        for path in (REPO / package).rglob("*.py")
        if (lines := list(by_hand(path.read_text())))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "run([sys.executable, '-m', 'splice'])",
        "argv = [str(python), '-c', CODE]",
        "NodeProcess(argv=(sys.executable, *words))",
        "os.execv(sys.executable, [sys.executable, *rest])",
        "launch(python, '-m', 'splice')",
    ],
)
def test_one_by_hand_is_found(source):
    assert list(by_hand(source)) == [1]
    assert not list(by_hand("os.execv(python, python_command(python, '-m', 'splice'))"))


def without_environment(source: str) -> Iterator[str]:
    """Functions that start a Python with an environment that `python_environment` did not make."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            starts = any(name.startswith(("subprocess.", "os.exec")) for name in called)
            if starts and "python_command" in called and "python_environment" not in called:
                yield node.name


def test_every_environment_of_python_is_made_by_one_function():
    """`ChildProcess` makes that of all others."""
    found = {
        str(path.relative_to(REPO)): names
        for package in PACKAGES
        for path in (REPO / package).rglob("*.py")
        if (names := list(without_environment(path.read_text())))
    }
    assert not found
    assert list(without_environment("def f():\n  subprocess.run(python_command(python))")) == ["f"]


GRANDCHILD = """
import subprocess, sys
argv = [sys.executable, "-c", "import orchestrator.errors, zmq; print('installed')"]
sys.exit(subprocess.run(argv).returncode)
"""


@pytest.mark.parametrize("before", ["", os.pathsep])
def test_the_current_folder_hides_no_package(before, tmp_path, monkeypatch):
    """Neither from a child nor from a Python that the child starts in its own way."""
    monkeypatch.setenv("PYTHONPATH", f"{before}{REPO}")
    monkeypatch.chdir(hiding_folder(tmp_path))
    shadowed = subprocess.run([sys.executable, "-m", "splice", "--version"], capture_output=True)
    assert shadowed.returncode, "the folder hides nothing, so this test shows nothing"
    for argv in (["-m", "splice", "--version"], ["-c", GRANDCHILD]):
        child = ChildProcess(
            argv=python_command(sys.executable, *argv), env={}, log_file=tmp_path / "log"
        )
        child.start()
        assert child.process.wait(60) == 0, child.log_tail()
    assert "installed" in child.log_tail()


def test_modules_of_a_users_own_are_found_by_pythonpath(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("")
    monkeypatch.chdir(tmp_path)
    argv = python_command(sys.executable, "-c", "import my_losses")
    assert subprocess.run(argv, capture_output=True).returncode
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not subprocess.run(argv).returncode
