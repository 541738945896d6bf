"""An orchestrator with fake nodes, for the tests of its clients."""

from tests.orchestrator.conftest import run

__all__ = ["run"]
