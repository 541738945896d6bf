"""Two data-parallel engines of one server are two workers: both take the layout, both are
verified, both serve what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.inference_node.harness import TAU, Node, moved
from tests.inference_node.partial_updates import publish_whole, whole_layout


@pytest.fixture
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("engines"), "dense", data_parallel=2)
    try:
        node.wait_ready()
        yield node
    finally:
        node.close()


@pytest.mark.timeout(1200)
def test_both_engines_take_the_layout_and_serve_what_was_sent(two_engines: Node) -> None:
    node = two_engines
    assert node.router.ready[-1].detail["workers"] == 2
    for version, seed in enumerate((91, 92)):
        node.join()
        part = whole_layout(node, version)
        assert part.layout.chunks[0].kind == "staged"
        served = moved(node.base, seed)
        publish_whole(node, version, part, served)
        with ThreadPoolExecutor(8) as pool:  # enough concurrent requests to reach both
            scored = list(pool.map(node.prompt_logprobs, [f"tiny@{version}"] * 8))
        assert all((logprobs - node.expected(served)).abs().max() < TAU for logprobs in scored)
