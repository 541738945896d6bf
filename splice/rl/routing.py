"""vLLM's routed experts, for router replay.

vLLM sends an array as base64 of NumPy's `.npy`: [tokens - 1, layers, top_k], the prompt included.
The last token has not been through the model yet.
"""

from __future__ import annotations

import array
import ast
import base64
import struct

from orchestrator.errors import ConfigError
from splice.client.batches import Routing

_CODES = {"|u1": "B", "<u2": "H", "<i4": "i"}
"""NumPy's type -> that of `array`."""
MAGIC = b"\x93NUMPY"


def routing_of(text: str) -> Routing:
    """Read what vLLM sent.

    Raises:
        ConfigError: it is another format.
    """
    raw = base64.b64decode(text)
    size, start = (2, 10) if raw[6:7] == b"\x01" else (4, 12)
    if not raw.startswith(MAGIC):
        raise ConfigError(
            "the server's routed experts are not a .npy array; is this vLLM 0.28 to 0.32?"
        )
    (length,) = struct.unpack("<H" if size == 2 else "<I", raw[8 : 8 + size])
    header = ast.literal_eval(raw[start : start + length].decode("latin1"))
    shape, code = header["shape"], _CODES.get(header["descr"])
    if code is None or len(shape) != 3 or header["fortran_order"]:
        raise ConfigError(f"the server's routed experts are {header}, not [tokens, layers, top_k]")
    found = array.array(code, raw[start + length :])
    return Routing(experts=array.array("i", found), layers=shape[1], top_k=shape[2])
