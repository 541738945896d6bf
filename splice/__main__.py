"""`python -m splice` runs the `splice` command."""

from splice.cli import app

app()
