"""What nodes answer during a publication: checked, combined, and awaited together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, Json, ValidationError

from orchestrator.control.open_requests import Answer
from orchestrator.errors import JobFailed
from orchestrator.protocol.frames import briefly
from orchestrator.protocol.messages import (
    ErrorCode,
    Fp8Weights,
    ManifestPart,
    Rendezvous,
    WireLayout,
)

STOP_S = 30.0
"""How long to wait for the other requests after the first one failed."""
_Model = TypeVar("_Model", bound=BaseModel)
_Value = TypeVar("_Value")


class PrepareAnswer(BaseModel):
    """A replica's answer to `PrepareUpdate`."""

    layout: WireLayout
    changed: ManifestPart | None = None
    fp8: Fp8Weights | None = None
    """What travels as FP8; layout and part count in `fp8_manifest`."""
    keeps: tuple[str, ...] | None = None
    """In the order "edges": what each worker keeps."""
    serves: int | None = None
    """The version that it serves, and nothing else has been received since."""


class LayoutAnswer(BaseModel):
    """The trainer's answer to `UseLayout`."""

    why_not: str | None = None
    tables: tuple[str, ...] | None = None
    """In the order "edges": what each worker receives from which rank."""


class RelayAnswer(BaseModel):
    """A replica's answer to `OpenRelay`."""

    rendezvous: tuple[Json[Rendezvous], ...] = Field(min_length=1)
    """By position of its workers."""


class EncodeAnswer(BaseModel):
    """The trainer's answer to `EncodeChanges`."""

    why_not: str | None = None
    nbytes: int = Field(default=0, ge=0)
    elements: int = Field(default=0, ge=0)


class ReceiveAnswer(BaseModel):
    """A replica's answer to `ReceiveWeights` and `SwapWeights`."""

    unverified: dict[str, str] = {}


def valid(node_id: str, model: type[_Model], value: object) -> _Model:
    """A node's answer as the model that it must be.

    Raises:
        JobFailed: the answer does not fit the model; blames the node.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _malformed(node_id, f"is not a {model.__name__}: {briefly(error)}") from None


def digests_of(node_id: str, answer: Answer, *, count: int) -> bytes:
    """The int64 digests in a node's answer, one for each tensor.

    Raises:
        JobFailed: the buffers have other sizes; blames the node.
    """
    sizes = [len(buffer) for buffer in answer[1]]
    if sizes != [8 * count]:
        raise _malformed(
            node_id, f"has buffers of {sizes} bytes; expected {count} digests of 8 bytes each"
        )
    return answer[1][0]


def _malformed(node_id: str, what: str) -> JobFailed:
    return JobFailed(
        code=ErrorCode.PROTOCOL,
        node=node_id,
        phase="publishing",
        message=f"the answer of {node_id} {what}",
        remedy="install the same splice on all nodes, and restart this one",
    )


def seconds_of(answers: Iterable[Answer], names: Mapping[str, str]) -> dict[str, float]:
    """The slowest node's seconds of each phase, renamed by `names`; ignores malformed values."""
    slowest: dict[str, float] = {}
    for completed, _ in answers:
        given = completed.result.get("seconds")
        for key, value in given.items() if isinstance(given, dict) else ():
            if isinstance(value, int | float):
                name = names.get(str(key), str(key))
                slowest[name] = max(slowest.get(name, 0.0), float(value))
    return slowest


async def all_or_first_error(
    coroutines: Iterable[Coroutine[Any, Any, _Value]],
    on_error: Callable[[str], Awaitable[None]] | None = None,
) -> list[_Value]:
    """The results of all coroutines, in order.

    Raises:
        Exception: the first failure, after `on_error(why)` and the end of the other coroutines.
    """
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = next((e for t in done if (e := t.exception()) is not None), None)
        if first is None:
            return [t.result() for t in tasks]
        if on_error is not None:
            await on_error(str(first)[:500])
            # An aborted node answers with its own `Failed`; silence reveals a dead one.
            if pending:
                await asyncio.wait(pending, timeout=STOP_S)
        raise first
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
