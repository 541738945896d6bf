"""Request bodies: read whole, within limits of size, time and memory; and what they say of model
and stream.

max_bytes     of one body; a larger one is 413, before it is read if the client declares its length
total_bytes   of all bodies being read; more is 503
READ_S        for one body; slower is 408
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from inference_node.server.alias import Refusal, Refused
from inference_node.server.flights import Receive

READ_S = 60.0
BODIES_AT_ONCE = 16
"""Number of full-size bodies that may be read at the same time."""


class Bodies:
    """All bodies that one server reads."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes, self._total_bytes = max_bytes, BODIES_AT_ONCE * max_bytes
        self._held_bytes = 0

    async def read(self, headers: Any, receive: Receive) -> bytes | None:
        """The whole body; None if the client left.

        Args:
            headers: ASGI's.

        Raises:
            Refused: it is too large or too slow, or too much is being read already.
        """
        declared = dict(headers).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(READ_S):
                return await self._read(receive, parts)
        except TimeoutError as error:
            text = f"the body did not arrive within {READ_S:.0f} s"
            raise Refused(Refusal(status=408, message=text)) from error
        finally:
            self._held_bytes -= sum(map(len, parts))

    async def _read(self, receive: Receive, parts: list[bytes]) -> bytes | None:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._held_bytes += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if self._held_bytes > self._total_bytes:
                text = (
                    f"more than {self._total_bytes} bytes of request bodies are being read; "
                    "send this one again"
                )
                raise Refused(Refusal(status=503, message=text, retry_after_s=1))
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Refused:
        text = (
            f"the body exceeds {self._max_bytes} bytes; split the request, "
            "or raise max_body_bytes of this server"
        )
        return Refused(Refusal(status=413, message=text))


def fields_of(body: bytes) -> dict[str, Any]:
    """The request's fields. Empty if the body is not a JSON object; vLLM then answers it.

    Raises:
        Refused: it is nested deeper than any request.
    """
    try:
        fields = json.loads(body)
    except RecursionError as error:
        raise Refused(Refusal(status=400, message="the body is nested too deeply")) from error
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def model_of(fields: dict[str, Any]) -> str | None:
    """The request's model; None if it names none."""
    model = fields.get("model")
    return model if isinstance(model, str) and model else None


def stream_interval_of(fields: dict[str, Any]) -> int:
    """Tokens of each event of the stream; 1, vLLM's default, if it is not asked for."""
    sampling = fields.get("sampling_params")  # of /inference/v1/generate
    interval = (sampling if isinstance(sampling, dict) else fields).get("stream_interval")
    return interval if isinstance(interval, int) and interval > 0 else 1


def names_tokens_by_id(fields: dict[str, Any]) -> bool:
    """Whether the answer has token ids, and its log-probs name tokens as `token_id:N` as well."""
    return all(
        fields.get(name) is True for name in ("return_token_ids", "return_tokens_as_token_ids")
    )
