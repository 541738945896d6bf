"""The arrangement of a layer's weights in memory, learnt by loading indices instead of weights.

The layer's own packing is run on a stand-in whose elements are their indices, one exact base-256
digit at a time. If the result is a permutation, with or without padding, it is checked on random
data. Then it can be inverted on the live tensors.

Axes: S = items that are packed alike (experts), F = elements of an item as loaded, P = the same as
packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inference_node.worker import dialect
from inference_node.worker.placement import ParamFormat

MOE_METHOD = "UnquantizedFusedMoEMethod"
MOE_PARAMS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
"""Parameters that the MoE method packs or pads, as [experts, ...]."""
_Pack = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
_FAILURES = (NotImplementedError, RuntimeError, AssertionError, TypeError, AttributeError)


class Unreadable(Exception):
    """A live layout that cannot be read back; the text is the reported reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The packing of one tensor.

    Element p of a packed item is element `source_P[p]` of the loaded one; -1 is padding.
    """

    source_P: torch.Tensor
    is_identity: bool

    def unpack(self, live: torch.Tensor, shape: tuple[int, ...], *, items: int) -> torch.Tensor:
        """The live tensor in checkpoint layout.

        Raises:
            Unreadable: the packing gives the shape another size.
        """
        live_SP = live.reshape(items, -1)
        if live_SP.shape[1] != self.source_P.numel():
            raise Unreadable(f"{tuple(live.shape)} is not the packed size of {shape}")
        if self.is_identity:
            return live_SP.reshape(shape)
        kept_P = self.source_P >= 0
        loaded_SF = live_SP.new_empty(items, int(kept_P.sum()))
        loaded_SF[:, self.source_P[kept_P]] = live_SP[:, kept_P]
        return loaded_SF.view(shape)


_KNOWN: dict[tuple[Any, ...], dict[str, Packing]] = {}


def of_experts(
    layer: torch.nn.Module, method: Any, formats: Mapping[str, ParamFormat]
) -> dict[str, Packing]:
    """The packing of each parameter of an unquantised MoE layer, for each expert.

    Args:
        formats: the layer's parameters in checkpoint format, by name.

    Raises:
        Unreadable: the packing is not a permutation, or is hidden.
    """
    shapes = {n: formats[n].shape[1:] for n in MOE_PARAMS if n in formats}
    dtypes = {n: formats[n].dtype for n in shapes}
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    backend = str(getattr(method, "unquantized_backend", None))
    key = (type(method), backend, id(type(experts)), *shapes.items(), *dtypes.items())
    if key not in _KNOWN:

        def pack(tensors_SF: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            loaded = {
                n: t.view(-1, *shapes[n]).to(getattr(torch, dtypes[n]))
                for n, t in tensors_SF.items()
            }
            packed = dialect.convert_moe_weights(method=method, layer=layer, tensors=loaded)
            return {n: packed[n].reshape(packed[n].shape[0], -1) for n in shapes}

        _KNOWN[key] = _learn(layer, pack, shapes, items=2)
    return _KNOWN[key]


def of_extra_tensors(layer: torch.nn.Module, method: Any, fmt: ParamFormat) -> dict[str, Packing]:
    """The packing of a parameter, and of the tensors that the layer derives from it, by attribute.

    Raises:
        Unreadable: one of them is not a permutation of the parameter.
    """
    extra = extra_tensors(layer)
    key = (type(layer), type(method), fmt.param, fmt.shape, fmt.dtype, *extra)
    if key not in _KNOWN:

        def pack(tensors_SF: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            stand_in = copy.copy(layer)
            for name in extra:
                del stand_in.__dict__[name]
            loaded = tensors_SF[fmt.param].view(fmt.shape).to(getattr(torch, fmt.dtype))
            own = {n: p if p is None else p.detach().clone() for n, p in layer._parameters.items()}
            stand_in.__dict__["_parameters"] = {
                n: p if p is None else torch.nn.Parameter(p, requires_grad=False)
                for n, p in {**own, fmt.param: loaded.clone()}.items()
            }
            copy.copy(method).process_weights_after_loading(stand_in)
            made = {fmt.param: stand_in._parameters[fmt.param], **extra_tensors(stand_in)}
            return {n: t.detach().reshape(1, -1) for n, t in made.items() if t is not None}

        made_of = dict.fromkeys((fmt.param, *extra), fmt.param)
        _KNOWN[key] = _learn(layer, pack, {fmt.param: fmt.shape}, items=1, made_of=made_of)
    return _KNOWN[key]


def extra_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that a layer keeps in addition to parameters and buffers, by attribute."""
    return {n: t for n, t in vars(layer).items() if isinstance(t, torch.Tensor)}


def _learn(
    layer: torch.nn.Module,
    pack: _Pack,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    items: int,
    made_of: Mapping[str, str] | None = None,
) -> dict[str, Packing]:
    """The packing of each tensor that `pack` returns.

    Args:
        items: 2 if packing may mix items, 1 if there is one.
        made_of: packed name -> the loaded tensor that it is made of. None: the same name.
    """
    made_of = made_of or {n: n for n in shapes}
    device = next(p.device for p in layer.parameters())
    counts = {n: torch.Size(s).numel() for n, s in shapes.items()}
    # 1-based, because padding reads 0.
    numbers = {n: torch.arange(1, count + 1, device=device) for n, count in counts.items()}
    found: dict[str, torch.Tensor] = {}
    try:
        for digit in range(-(-(max(counts.values()) + 1).bit_length() // 8)):
            planes = {n: ((v >> (8 * digit)) & 255).repeat(items, 1) for n, v in numbers.items()}
            packed = pack(planes)
            for n in made_of:
                plane_P = packed[n][0].round().to(torch.int64) << (8 * digit)
                found[n] = plane_P if digit == 0 else found[n] + plane_P
        packings = {
            n: _as_packing(n, found[n] - 1, counts[source]) for n, source in made_of.items()
        }
        _check(pack, packings, made_of, counts, device, items=items)
    except (*_FAILURES, KeyError) as error:
        raise Unreadable(
            f"the packing of {type(layer).__name__} could not be learnt: {error}"
        ) from error
    return packings


def _as_packing(name: str, source_P: torch.Tensor, numel: int) -> Packing:
    kept = source_P[source_P >= 0]
    everything = torch.arange(numel, device=kept.device)
    if kept.numel() != numel or not torch.equal(kept.sort().values, everything):
        raise Unreadable(f"the packing of {name} is not a permutation of what was loaded")
    return Packing(
        source_P=source_P,
        is_identity=source_P.numel() == numel and torch.equal(source_P, everything),
    )


def _check(
    pack: _Pack,
    packings: Mapping[str, Packing],
    made_of: Mapping[str, str],
    counts: Mapping[str, int],
    device: torch.device,
    *,
    items: int,
) -> None:
    """Check the packings on random bytes; with several items, on one more than they were learnt."""
    generator = torch.Generator().manual_seed(0)
    items += items > 1
    data = {
        n: torch.randint(1, 256, (items, count), generator=generator).to(device)
        for n, count in counts.items()
    }
    packed = pack(data)
    for n, packing in packings.items():
        kept = packing.source_P >= 0
        same = packed[n].shape == (items, kept.numel()) and torch.equal(
            packed[n][:, kept].long(), data[made_of[n]][:, packing.source_P[kept]]
        )
        if not same:
            raise Unreadable(f"the packing of {n} mixes items or depends on their values")
