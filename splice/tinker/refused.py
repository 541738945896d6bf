"""What the server refuses, each with an HTTP status and a sentence."""

from __future__ import annotations

from pydantic import ValidationError

from orchestrator.errors import ConfigError

MALFORMED, UNAUTHORIZED, UNKNOWN, GONE, TOO_LARGE, UNSUPPORTED = 400, 401, 404, 410, 413, 422
SLOW, BUSY = 408, 429
"""The SDK repeats these two after a pause. The others say that a request is wrong."""


class Refused(ConfigError):
    """A request that the server does not carry out. `status` is a 4xx."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def unsupported(text: str) -> Refused:
    """Return the refusal of something that Tinker has and this server lacks."""
    return Refused(UNSUPPORTED, text)


def malformed(text: str) -> Refused:
    """Return the refusal of a request that says nothing sensible."""
    return Refused(MALFORMED, text)


def wrong_value(what: str, error: ValidationError) -> Refused:
    """Return the refusal of the first value that a model does not take."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return malformed(f"{what}: {where} is {first['input']!r}: {first['msg'].lower()}")


def unknown(text: str) -> Refused:
    """Return the refusal of a name that the server does not know."""
    return Refused(UNKNOWN, text)
