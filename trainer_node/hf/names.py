"""Names of Megatron's parameters and modules, without what wraps them."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module)\.")


_DECODER = re.compile(r"^(?:language_model\.)?(decoder\.layers\..*)$")


def strip_wrappers(name: str) -> str:
    """Drop `module.` (DDP, Float16Module) and `_orig_mod.` (torch.compile) components anywhere in a
    name."""
    return _WRAPPERS.sub("", name)


def decoder_name(name: str) -> str | None:
    """The name below the decoder's layers ("decoder.layers.3...."), for text models and text towers
    alike; None elsewhere."""
    match = _DECODER.match(strip_wrappers(name))
    return match.group(1) if match else None
