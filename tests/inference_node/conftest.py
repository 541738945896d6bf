"""One real inference node per model kind, shared by the session: 35 s each to start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.inference_node.harness import Node

ENGINE_S = 250.0
"""Longest life of a forked engine."""
Run = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests without a node first: a node that hears nothing for `ORPHAN_S` ends."""
    items.sort(key=lambda item: "inference_node/worker/" not in item.nodeid)


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


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Calls a function of `family_engine` in a process that has imported vLLM and nothing else."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_DEEP_GEMM_E8M0": "0",  # else FP8 blocks get other scales: docs/fp8.md
    }
    if not torch.cuda.is_available():
        settings["TORCH_COMPILE_DISABLE"] = "1"  # as in the harness; GPUs compile their kernels
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings.items():
            patch.setenv(key, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.inference_node.fp8_engine"])

        from tests.inference_node import family_engine

        def run(function: Callable[..., Any], name: str, *args: Any) -> Any:
            ours, theirs = context.Pipe(duplex=False)
            folder = tmp_path_factory.mktemp(name) / "model"
            process = context.Process(
                target=family_engine.answer, args=(theirs, function, name, folder, *args)
            )
            process.start()
            theirs.close()
            try:
                assert ours.poll(ENGINE_S), f"no answer of {name} within {ENGINE_S} s"
                return ours.recv()
            finally:
                process.kill()
                process.join()

        yield run
