"""Lets Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2 build every family's own layers on a CPU.

Bridge's layer specs name classes of `megatron.core.extensions.transformer_engine`. `install` puts
`extension` in that module's place, so one spec serves both tiers, and our adapters and Bridge's
mappings see one set of names. For device="cpu", and for numerics="exact" on a GPU.

What is put in place, its reason, and when it can go:

`_Finder`: answers the imports of TransformerEngine, which needs CUDA. `extension` has the classes
    that Megatron's specs ask for. `transformer_engine` itself is an empty shell of the version that
    runs on GPUs, because Megatron and Bridge choose specs by whether it can be imported. Its
    submodules are missing wherever their importers tolerate that. Until TransformerEngine runs on a
    CPU.
`_plain_functions`: Megatron decorates small functions with `torch.compile`, which on a CPU starts a
    C++ compiler for each of them and rounds differently. Until Megatron asks the device.
`gated_delta.install`: gated delta net layers need flash-linear-attention's Triton kernels. Until
    they run on a CPU.
`_yarn_without_pinned_memory`: YaRN's table of a context-parallel rank is picked with pinned memory,
    already when the layer is built. Until Megatron asks the device.
`_full_norms_without_cuda`: Bridge sends the norms over all heads (MiniMax-M2) to tensor ranks by
    way of a CUDA device. Until it asks the parameter's device.

`install` must run before anything imports Megatron.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.errors import ConfigError
from trainer_node.backends import gated_delta

EXTENSION = "megatron.core.extensions.transformer_engine"
TE_VERSION = "2.12.0"
_SHELLS = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.fp8",
    "transformer_engine.pytorch.ops",
    "transformer_engine.pytorch.tensor",
)
"""Modules that Megatron and Bridge import, or annotate with, without a way out."""


class _Shell(types.ModuleType):
    """A module in which every class is an empty one: enough to be imported and annotated with."""

    __version__ = TE_VERSION

    def __getattr__(self, name: str) -> Any:
        if (module := f"{self.__name__}.{name}") in _SHELLS:
            return importlib.import_module(module)
        if not name[0].isupper():
            raise AttributeError(name)
        value = type(name, (nn.Module,), {})
        setattr(self, name, value)
        return value


class _Finder:
    """Finds the stand-ins before anything that is installed."""

    stands_in_for = EXTENSION

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """`extension` for Megatron's module, shells for TransformerEngine's."""
        if name == EXTENSION:
            return importlib.util.spec_from_file_location(
                name, Path(__file__).with_name("cpu_te_extension.py")
            )
        if name in _SHELLS:
            return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)  # type: ignore[arg-type]
        if name.split(".")[0] == "transformer_engine":
            raise ModuleNotFoundError(f"{name} is not on the CPU tier", name=name)
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty shell."""
        return _Shell(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Nothing: a shell has no code."""


def install() -> None:
    """Put the stand-ins in place for this process; safe to call twice.

    Raises:
        ConfigError: Megatron is imported already, so its modules have made their choices.
    """
    if any(getattr(finder, "stands_in_for", None) == EXTENSION for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ConfigError("the CPU stand-ins must be installed before Megatron is imported")
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    _plain_functions()
    gated_delta.install()
    _yarn_without_pinned_memory()
    _full_norms_without_cuda()


def _plain_functions() -> None:
    """Import Megatron-Core while `torch.compile` returns what it is given."""
    compiler = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compiler  # type: ignore[assignment]


def _yarn_without_pinned_memory() -> None:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    def on_this_rank(table: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        chunks = table.chunk(2 * group.size(), dim)
        return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]], dim)

    yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = on_this_rank


class TorchOnCpu(types.ModuleType):
    """`torch` for a module that asks for CUDA: its devices and zeros are the CPU's, everything else
    is torch's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.zeros` on the CPU."""
        kwargs.pop("device", None)
        return torch.zeros(*args, **kwargs)


def _full_norms_without_cuda() -> None:
    from megatron.bridge.models.minimax_m2 import minimax_m2_bridge

    minimax_m2_bridge.torch = TorchOnCpu("torch")
