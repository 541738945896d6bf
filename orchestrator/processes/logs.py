"""The log of a process of splice."""

from __future__ import annotations

import json
import logging
import os
import time

FORMAT = "SPLICE_LOG_FORMAT"
"""Environment variable: `json` makes each line of a log a JSON object."""


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; who and traceback where there are."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = {"who": who} if who else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            **self._who,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def log_to_stderr(who: str = "") -> None:
    """Write what is logged, from level INFO on, to stderr; `who` follows the time."""
    prefix = f"%(asctime)s {who} " if who else "%(asctime)s "
    logging.basicConfig(level=logging.INFO, format=f"{prefix}%(levelname)s %(name)s: %(message)s")
    if os.environ.get(FORMAT) == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines(who))
