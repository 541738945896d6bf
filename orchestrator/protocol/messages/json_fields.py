"""Fields that hold any JSON object, with bounds on depth, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

MAX_DEPTH = 32
"""Deepest nesting of dicts and lists in a field that takes any JSON."""
MAX_KEYS = 2**16
"""Most keys of one object in a message."""
MAX_VALUES = 2**20
"""Most values of an object in a message, over all levels."""
_SCALARS = frozenset({bool, int, float, str, type(None)})


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` if it respects MAX_DEPTH, which recursive functions need, and MAX_VALUES.

    Raises:
        ValueError: the nesting is too deep, or there are too many values.
    """
    level: list[Any] = [value]
    left = MAX_VALUES
    for _ in range(MAX_DEPTH):
        left -= sum(map(len, level))
        if left < 0:
            raise ValueError(
                f"more than {MAX_VALUES:,} values; write large arrays to a file instead"
            )
        level = [
            one for held in level for one in (held.values() if isinstance(held, dict) else held)
        ]
        level = [one for one in level if isinstance(one, dict | list | tuple)]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


Json = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""Any JSON object, nested at most MAX_DEPTH levels deep."""


class _NotJson(ValueError):
    """A value that JSON cannot hold. The recursion adds the place while it unwinds."""

    def __init__(self, what: str) -> None:
        self.what, self.place = what, ""

    def inside(self, place: str) -> _NotJson:
        self.place = place + self.place
        return self

    def __str__(self) -> str:
        return f"client_state{self.place} {self.what}"


def _plain_json(value: Any) -> Any:
    """Return `value` with tuples as lists.

    Raises:
        ValueError: a JSON round trip would change the value; names the place.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        if all(type(one) in _SCALARS for one in value):
            return list(value)
        return _plain_list(value)
    if not isinstance(value, dict):
        raise _NotJson(
            f"is {type(value).__name__}, which JSON does not hold; give it as text or numbers"
        )
    if len(value) > MAX_KEYS:
        raise _NotJson(f"has {len(value)} keys; at most {MAX_KEYS} are allowed in one object")
    return _plain_dict(value)


def _plain_list(value: Sequence[Any]) -> list[Any]:
    plain: list[Any] = []
    try:
        for one in value:
            plain.append(_plain_json(one))  # noqa: PERF401  - its length is the place
    except _NotJson as error:
        raise error.inside(f"[{len(plain)}]") from None
    return plain


def _plain_dict(value: dict[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, one in value.items():
        if not isinstance(key, str):
            raise _NotJson(
                f"has the key {key!r:.40}; keys must be text, or they would come back as text"
            )
        try:
            plain[key] = _plain_json(one)
        except _NotJson as error:
            raise error.inside(f".{key:.40}") from None
    return plain


ClientState = Annotated[dict[str, Any], AfterValidator(_shallow), AfterValidator(_plain_json)]
"""A JSON object. The trainer writes it as JSON next to its state."""
