"""Which cuDNN TransformerEngine loads, and what attention on GPUs asks of it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

_NEEDED_BY_OTHERS = ("libcudnn_graph", "libcudnn_ops")
_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH")
WITH_SINKS = (9, 18, 0)
# On H200s, 9.14's backward pass of heads of 256 gave NaN (grouped heads), or another gradient than
# 9.19's for the same forward bits (latent attention: a norm of 1.41 instead of 1.60).
WITH_WIDE_HEADS = (9, 19, 0)


def load() -> None:
    """Load the cuDNN that came with torch, or that the user names, whole. Call it before
    TransformerEngine is imported.

    TransformerEngine looks in CUDNN_HOME first, and links to cuDNN's parts by name. On a host with
    a CUDA toolkit and its own cuDNN, it would combine the front of one cuDNN with the parts of the
    other, and report the older version. Parts that are already loaded take precedence.

    Raises:
        ConfigError: the user's folder has no cuDNN that can be loaded.
    """
    variable = next((name for name in _VARIABLES if os.environ.get(name)), None)
    folder = os.environ[variable] if variable else _torchs()
    if folder is None:
        return
    # TransformerEngine takes the last by name of all below the folder.
    fronts = [file for file in Path(folder).rglob("libcudnn.so*") if "stub" not in str(file)]
    try:
        if not fronts:
            raise OSError(f"there is no libcudnn.so below {folder}")
        for part in _parts(max(fronts, key=lambda file: file.name)):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        hint = f"correct or unset {variable}" if variable else "install it again"
        raise ConfigError(f"cuDNN cannot be loaded: {error}; {hint}") from error
    os.environ["CUDNN_HOME"] = folder


def _parts(front: Path) -> list[Path]:
    """The libraries of one cuDNN: those that others need first, the front last."""
    front = front.resolve()
    major = front.name.partition(".so.")[2].partition(".")[0]
    parts = {
        file.name.partition(".")[0]: file for file in front.parent.glob(f"libcudnn_*.so.{major}")
    }
    names = sorted(parts, key=lambda name: (name not in _NEEDED_BY_OTHERS, name))
    return [*(parts[name] for name in names), front]


def _torchs() -> str | None:
    if importlib.util.find_spec("nvidia") is None:
        return None
    found = importlib.util.find_spec("nvidia.cudnn")
    folders = found.submodule_search_locations if found is not None else None
    return folders[0] if folders else None


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


def advice() -> str:
    """What to do about a cuDNN whose kernels are wrong."""
    if os.environ.get("CUDNN_HOME") not in (None, _torchs()):
        return "unset CUDNN_HOME and CUDNN_PATH to use the one that came with torch"
    return "set CUDNN_HOME to a newer one's folder; NVTE_DEBUG=1 logs which kernels run"


def _version() -> tuple[int, int, int]:
    from transformer_engine.pytorch.utils import get_cudnn_version

    found: tuple[int, int, int] = get_cudnn_version()
    return found


def _older(needed: tuple[int, int, int]) -> str | None:
    """What to do, if the loaded cuDNN is older than the needed one."""
    if _version() >= needed:
        return None
    needs = ".".join(map(str, needed))
    return f"TransformerEngine loaded cuDNN {version()} and needs {needs}; {advice()}"
