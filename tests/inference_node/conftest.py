"""One real inference node per model kind, shared by the session: 35 s each to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.inference_node.harness import Node


def _node(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp(kind), kind)
    try:
        node.wait_ready()
        yield node
    finally:
        node.close()


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    yield from _node(tmp_path_factory, "dense")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    yield from _node(tmp_path_factory, "moe")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    yield from _node(tmp_path_factory, "tied")
