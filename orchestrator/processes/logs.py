"""The log of a process of splice."""

from __future__ import annotations

import logging


def log_to_stderr(who: str = "") -> None:
    """Write what is logged, from level INFO on, to stderr; `who` follows the time."""
    prefix = f"%(asctime)s {who} " if who else "%(asctime)s "
    logging.basicConfig(level=logging.INFO, format=f"{prefix}%(levelname)s %(name)s: %(message)s")
