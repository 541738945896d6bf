"""Clients of a run's own processes ignore proxies and certificates that variables name.

httpx reads these variables by default, even for loopback: `ALL_PROXY=socks5://` and a missing
`SSL_CERT_FILE` fail when a client is made. aiohttp reads them with `trust_env=True` only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.readme import ROOT, blocks

FOLDERS = (
    *("splice", "orchestrator", "weight_transfer", "trainer_node", "inference_node"),
    *("benchmarks", "examples", "tests"),
)
OUTSIDE = ("tests/test_installation.py",)
"""Asks a package index."""
OF_HTTPX = (
    *("Client", "AsyncClient", "get", "post", "put", "patch", "delete", "head", "options"),
    *("request", "stream"),
)
OTHERS = ("requests", "urllib.request", "http.client", "urllib3", "httpx2", "websockets")


def trusting(source: str) -> Iterator[int]:
    """Lines with a client that looks at the environment, or that this test does not know."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names = {str(node.module)} | {f"{node.module}.{name}" for name in names}
            # `from httpx import Client` would hide the client from the check below.
            hides = isinstance(node, ast.ImportFrom) and node.module == "httpx"
            if hides or names & set(OTHERS):
                yield node.lineno
        elif isinstance(node, ast.Call):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            module, _, name = ast.unparse(node.func).rpartition(".")
            asks = module == "httpx" and name in OF_HTTPX and "transport" not in given
            if (asks and given.get("trust_env") != "False") or given.get("trust_env") == "True":
                yield node.lineno


def test_no_client_of_a_runs_processes_looks_at_the_environment():
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")]
    names = {str(file.relative_to(ROOT)): file for file in files}
    found = {
        name: lines
        for name, file in names.items()
        if name not in OUTSIDE and (lines := list(trusting(file.read_text())))
    }
    assert not found
    assert not [line for source in blocks("python") for line in trusting(source)]


@pytest.mark.parametrize(
    "source",
    [
        "httpx.Client()",
        "httpx.get(url, timeout=1)",
        "httpx.AsyncClient(trust_env=True)",
        "aiohttp.ClientSession(trust_env=True)",
        "from httpx import Client",
        "import requests",
        "from urllib.request import urlopen",
    ],
)
def test_one_that_does_is_found(source):
    assert list(trusting(source)) == [1]
    assert not list(trusting("httpx.Client(base_url=url, trust_env=False)"))
