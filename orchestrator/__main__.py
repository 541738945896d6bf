"""`python -m orchestrator` is the `splice` command."""

from orchestrator.cli import app

app()
