"""Which cuDNN TransformerEngine loads, and what attention on GPUs asks of it."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from orchestrator.errors import ConfigError

ADVICE = "set CUDNN_HOME to the folder of a newer one, such as site-packages/nvidia/cudnn"
WITH_SINKS = (9, 18, 0)
# On H200s, 9.14's backward pass of heads of 256 gave NaN (grouped heads), or another gradient than
# 9.19's for the same forward bits (latent attention: a norm of 1.41 instead of 1.60).
WITH_WIDE_HEADS = (9, 19, 0)


def prefer_torchs() -> None:
    """Name the cuDNN that came with torch, unless the user names one. TransformerEngine would load
    the system's, if there is one, beside it. Call it before TransformerEngine is imported."""
    if "CUDNN_PATH" in os.environ or importlib.util.find_spec("nvidia") is None:
        return
    found = importlib.util.find_spec("nvidia.cudnn")
    if found is not None and found.submodule_search_locations:
        os.environ.setdefault("CUDNN_HOME", found.submodule_search_locations[0])


def sinks_obstacle() -> str | None:
    """TransformerEngine attends unfused, in the memory of all scores, if its cuDNN knows no sinks
    in packs."""
    older = _older(WITH_SINKS)
    return older and f"sinks run unfused, slowly and in much memory: {older}"


def refuse_wide_heads(provider: Any) -> None:
    """Refuse attention with heads wider than 128 if its gradient may be wrong, by the version of
    cuDNN. For context parallelism, where `kernel_check` does not compare what is computed.

    Raises:
        ConfigError: the cuDNN is too old for the model's heads.
    """
    width = provider.kv_channels
    if provider.multi_latent_attention:
        width = provider.qk_head_dim + provider.qk_pos_emb_head_dim
    older = _older(WITH_WIDE_HEADS) if width > 128 else None
    if older:
        raise ConfigError(f"the gradient of attention heads of {width} can be wrong here: {older}")


def version() -> str:
    """As MAJOR.MINOR.PATCH."""
    return ".".join(map(str, _version()))


def _version() -> tuple[int, int, int]:
    from transformer_engine.pytorch.utils import get_cudnn_version

    found: tuple[int, int, int] = get_cudnn_version()
    return found


def _older(needed: tuple[int, int, int]) -> str | None:
    """What to do, if the loaded cuDNN is older than the needed one."""
    if _version() >= needed:
        return None
    needs = ".".join(map(str, needed))
    return f"TransformerEngine loaded cuDNN {version()} and needs {needs}; {ADVICE}"
