"""The fixture that most of these tests begin with; who needs another `run` has its own."""

from __future__ import annotations

import pytest

from tests.orchestrator.run import Run


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path) as r:
        yield r
