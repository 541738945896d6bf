"""No exception is kept in one of its own frames: it would hold their tensors until a garbage
collection, which may never come (`trainer_node/ranks/heap.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import without_frames

REPO = Path(__file__).parent.parent
PACKAGES = ("orchestrator", "splice", "trainer_node", "inference_node", "weight_transfer")
RELEASED = {
    "trainer_node/ranks/lockstep.py: own = caught": "released in `finally`",
    "splice/rl/reward_threads.py: error = caught": "released in `finally`",
    "splice/rl/verifiers.py: session.fault = error": "raised once, in a process that collects",
}
"""Exceptions that are kept with their frames, and why that holds nothing."""


def kept(tree: ast.AST) -> Iterator[ast.AST]:
    """Where a handler gives its exception to a name, an attribute or a list."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for node in ast.walk(handler):
            value = None
            if isinstance(node, ast.Assign):
                value = node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
                value = node.args[0]
            if isinstance(value, ast.Name) and value.id == handler.name:
                yield node


def test_no_handler_keeps_an_exception_with_its_frames() -> None:
    found = {
        f"{path.relative_to(REPO)}: {ast.unparse(node)}"
        for package in PACKAGES
        for path in (REPO / package).rglob("*.py")
        for node in kept(ast.parse(path.read_text()))
    }
    assert found == set(RELEASED)


@pytest.mark.parametrize("body", ["own = error", "self.error = error", "errors.append(error)"])
def test_the_search_finds_each_way_to_keep_one(body: str) -> None:
    source = f"try:\n    f()\nexcept Exception as error:\n    {body}\n"
    assert len(list(kept(ast.parse(source)))) == 1


def test_causes_contexts_and_members_lose_their_frames_too() -> None:
    def fail() -> None:
        raise KeyError("first")

    def wrap() -> None:
        try:
            fail()
        except KeyError as error:
            raise ValueError("second") from error

    def during() -> None:
        try:
            wrap()
        except ValueError:
            fail()

    members: list[Exception] = []
    for function in (wrap, during):
        with pytest.raises((KeyError, ValueError)) as raised:
            function()
        members.append(raised.value)
    with pytest.raises(ExceptionGroup) as raised:
        raise ExceptionGroup("both", members)
    group: BaseException = raised.value
    group.__context__ = group  # a cycle ends
    assert without_frames(group) is group
    chain = [group, *members, members[0].__cause__, members[1].__context__]
    assert all(one is not None and one.__traceback__ is None for one in chain)
    assert members[0].__cause__ is not None, "the exceptions themselves stay"
