"""Reads and writes adapters in the PEFT library's format.

    read_config(folder) -> check_config(config, lora)    refuses settings that change the numbers
    read_tensors(folder) -> by_module(...)               PEFT's names -> (HF module, "A" or "B")
    check_tensors(found, expected)                       names missing, extra, misshapen tensors

`write`, or `layout` and `write_config`, write an adapter.

Shapes: O = out features, I = in features, R = rank; A is [R, I], B is [O, R].
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import ALL_LINEAR, LoraConfig
from trainer_node.adapters.linears import expert_name
from trainer_node.files.bulk_files import Extent, bulk_writer
from trainer_node.files.generations import write_file

Key = tuple[str, str]
"""HF module name and "A" or "B"."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"
SAME_NUMBERS = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip # a list of names
"""Settings that do not change what a saved adapter computes. The trainer uses its own
`lora_dropout`. `loftq_config` has an effect only with init_lora_weights="loftq"."""
PLAIN_INIT = (None, True, False, "gaussian", "orthogonal", "eva")
"""Other initialisations (pissa, olora, corda, loftq, ...) also change the base weights, so their
adapter does not fit the checkpoint's base."""
_NAME = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?\.weight$"
)

_PREFIX, _COPY = "base_model.model.", ".base_layer.weight"


class AdapterError(ConfigError):
    """A PEFT adapter that cannot be loaded; names the file and the settings or tensors. Nothing was
    changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One matrix of an HF linear, or of all experts' linears end to end, as in the file: fp32."""

    names: tuple[str, ...]
    """HF module names, in the order in which they are stacked."""
    matrix: str
    """"A" or "B"."""
    shape: tuple[int, ...]
    """Shape of one module's matrix."""
    pieces: tuple[tuple[int, torch.Tensor], ...]
    """(first element, tensor) of each piece, contiguous, on any device. They make up the whole
    stack."""
    tensor: str | None = None
    """The stacked HF tensor whose experts these are."""

    @property
    def nbytes(self) -> int:
        """Bytes of all modules."""
        return 4 * len(self.names) * math.prod(self.shape)


def in_file(stacks: Sequence[Stack]) -> list[Stack]:
    """The same tensors under PEFT's names, with stacked experts in PEFT's shapes.

    PEFT wraps the module once for each of its stacked tensors: the last one's adapter has the
    module's name, the one before it has `base_layer` after it. A is [E * R, I], B is [O, R * E].
    """
    of_module: dict[str, list[str]] = defaultdict(list)
    for stack in stacks:
        if stack.tensor is not None and stack.matrix == "A":
            of_module[stack.tensor.rpartition(".")[0]].append(stack.tensor)
    return [s if s.tensor is None else _wrapped(s, of_module) for s in stacks]


def _wrapped(stack: Stack, of_module: Mapping[str, Sequence[str]]) -> Stack:
    assert stack.tensor is not None
    name = _wrapper(stack.tensor, of_module)
    (experts, *rows), pieces = (len(stack.names), *stack.shape), stack.pieces
    if stack.matrix == "A":
        shape: tuple[int, ...] = (experts * rows[0], rows[1])
    else:
        flat = torch.cat([tensor.reshape(-1) for _, tensor in pieces])
        whole_OQ = flat.view(experts, *rows).permute(1, 2, 0).reshape(rows[0], -1)
        shape, pieces = tuple(whole_OQ.shape), ((0, whole_OQ),)
    return Stack(names=(name,), matrix=stack.matrix, shape=shape, pieces=pieces)


def _wrapper(tensor: str, of_module: Mapping[str, Sequence[str]]) -> str:
    module = tensor.rpartition(".")[0]
    same = of_module[module]
    return module + ".base_layer" * (len(same) - 1 - same.index(tensor))


def single_experts(
    found: Mapping[Key, torch.Tensor], stacked: Sequence[str], *, num_experts: int
) -> dict[Key, torch.Tensor]:
    """Undo `in_file`: (tensor, expert) each, under the names that `expected_tensors` has."""
    of_module: dict[str, list[str]] = defaultdict(list)
    for tensor in stacked:
        of_module[tensor.rpartition(".")[0]].append(tensor)
    single = dict(found)
    for tensor in stacked:
        name = _wrapper(tensor, of_module)
        a, b = single.pop((name, "A"), None), single.pop((name, "B"), None)
        if a is None or b is None or len(a) % num_experts or b.shape[1] % num_experts:
            continue  # it is missing then
        all_B = b.view(len(b), -1, num_experts).permute(2, 0, 1)
        for expert, (one_A, one_B) in enumerate(zip(a.chunk(num_experts), all_B, strict=True)):
            single[expert_name(tensor, expert), "A"] = one_A
            single[expert_name(tensor, expert), "B"] = one_B
    return single


def layout(stacks: Sequence[Stack]) -> list[Extent]:
    """Lay out a safetensors file: 8 bytes with the header's size, the header, the stacks.

    The header names every module's matrix.
    """
    stacks = in_file(stacks)
    # Written as text: dicts of 37,000 modules would keep the garbage collector busy for longer than
    # the disk.
    entries, places, end = ['"__metadata__":{"format":"pt"}'], [], 0
    for stack in stacks:
        places.append(end)
        size, shape = 4 * math.prod(stack.shape), json.dumps(stack.shape)
        for name in stack.names:
            key = json.dumps(f"base_model.model.{name}.lora_{stack.matrix}.weight")
            entries.append(
                f'{key}:{{"dtype":"F32","shape":{shape},"data_offsets":[{end},{end + size}]}}'
            )
            end += size
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    parts = [Extent(offset=0, nbytes=len(head), source=head)]
    for stack, place in zip(stacks, places, strict=True):
        for first, tensor in stack.pieces:
            parts.append(
                Extent(
                    offset=len(head) + place + 4 * first,
                    nbytes=4 * tensor.numel(),
                    source=partial(_itself, tensor),
                )
            )
    return parts


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def write(
    folder: Path, tensors: Mapping[Key, torch.Tensor], *, lora: LoraConfig, model: Path
) -> None:
    """Write whole tensors as a PEFT adapter into `folder`: `write_stacks`."""
    stacks = [
        Stack(names=(n,), matrix=m, shape=tuple(t.shape), pieces=((0, t.float()),))
        for (n, m), t in tensors.items()
    ]
    write_stacks(folder, stacks, lora=lora, model=model)


def write_stacks(folder: Path, stacks: Sequence[Stack], *, lora: LoraConfig, model: Path) -> None:
    """Write a PEFT adapter into `folder`, which may exist.

    Each file appears whole or not at all, the config last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = layout(stacks)
    with bulk_writer(stacks[0].pieces[0][1].device) as writer:
        write_file(folder / WEIGHTS, lambda path: writer.start(path, parts).wait())
    write_config(folder, stacks, lora=lora, model=model)


def write_config(folder: Path, stacks: Sequence[Stack], *, lora: LoraConfig, model: Path) -> None:
    """Write PEFT's adapter_config.json; to be called when the weights are there."""
    modules = {name for stack in stacks for name in stack.names if stack.tensor is None}
    parameters = {stack.tensor for stack in stacks if stack.tensor is not None}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(_endings(modules, lora)),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if parameters:
        config["target_parameters"] = sorted(_tails(parameters))
    write_file(folder / CONFIG, lambda path: path.write_text(json.dumps(config, indent=1)))


def _endings(modules: Collection[str], lora: LoraConfig) -> set[str]:
    """Targets that match these modules."""
    if ALL_LINEAR in lora.targets:
        return _leaves(modules)
    return {t for t in lora.targets if any(f".{m}".endswith(f".{t}") for m in modules)}


def _leaves(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _tails(tensors: Iterable[str]) -> set[str]:
    """The last two parts of stacked tensors' names."""
    return {".".join(name.split(".")[-2:]) for name in tensors}


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json.

    Raises:
        AdapterError: it is not there, or no JSON object.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{folder} is no PEFT adapter: {path} cannot be read ({error})"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} does not hold a JSON object")
    return config


def check_config(
    config: Mapping[str, Any],
    lora: LoraConfig,
    *,
    modules: Iterable[str],
    stacked: Iterable[str] = (),
    path: Path,
) -> None:
    """Check that this trainer computes the adapter as PEFT does.

    Args:
        modules: HF modules that have adapters here.
        stacked: stacked tensors whose experts have.

    Raises:
        AdapterError: names each setting, its value and what the trainer has or knows.
    """
    wrong = (
        []
        if config.get("peft_type") == "LORA"
        else [f"peft_type is {config.get('peft_type')!r}; LORA is known"]
    )
    for field, ours in (("r", lora.rank), ("lora_alpha", lora.alpha)):
        if config.get(field) != ours:
            wrong.append(
                f"{field} is {config.get(field)!r}, the trainer's lora config has {ours!r}"
            )
    wrong += _target_mismatch(config.get("target_modules"), modules)
    named, known = _tails(map(str, config.get("target_parameters") or ())), _tails(stacked)
    if named != known:
        wrong.append(
            f"target_parameters are {sorted(named)}, the trainer's lora config has {sorted(known)}"
        )
    if config.get("init_lora_weights") not in PLAIN_INIT:
        wrong.append(
            f"init_lora_weights is {config['init_lora_weights']!r}, which changes the base "
            "weights too"
        )
    fields = SAME_NUMBERS | {
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "init_lora_weights",
        "target_parameters",
    }
    for field in sorted(set(config) - fields):
        if config[field] and not (field == "bias" and config[field] == "none"):
            wrong.append(f"{field} is {config[field]!r}, which is not supported")
    if wrong:
        raise AdapterError(f"{path}: {'; '.join(wrong)}")


def _target_mismatch(targets: Any, modules: Iterable[str]) -> list[str]:
    """PEFT matches a list's entries as endings of module names. The tensors show what a pattern
    matched."""
    if isinstance(targets, str):
        return []
    named, ours = _leaves(map(str, targets or ())), _leaves(modules)
    if named == ours:
        return []
    return [f"target_modules are {sorted(named)}, the trainer's lora config has {sorted(ours)}"]


def read_tensors(folder: Path, *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The stored tensors under their names.

    Args:
        mapped: the tensors stay views of the file, which the ranks of a host share. Nobody may
            change the file while they are in use.

    Raises:
        AdapterError: neither file is there, or it is damaged.
    """
    path, old = folder / WEIGHTS, folder / OLD_WEIGHTS
    try:
        if path.is_file():
            stored = load_file(path)
            return stored if mapped else {name: t.clone() for name, t in stored.items()}
        if old.is_file():
            return cast(
                dict[str, torch.Tensor], torch.load(old, map_location="cpu", weights_only=True)
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}") from error
    raise AdapterError(
        f"there is neither {WEIGHTS} nor {OLD_WEIGHTS} in {folder}; the adapter's weights are "
        "missing"
    )


def by_module(stored: Mapping[str, torch.Tensor], *, path: Path) -> dict[Key, torch.Tensor]:
    """Take stored names apart; the tensors become fp32.

    Raises:
        AdapterError: a name that is not a linear's lora_A or lora_B, or that occurs twice;
            names it.
    """
    found: dict[Key, torch.Tensor] = {}
    foreign, twice, adapters = [], [], set()
    for name, tensor in stored.items():
        match = _NAME.match(name)
        if match is None:
            foreign.append(name)
            continue
        key = (match["module"], match["matrix"])
        twice += [name] if key in found else []
        adapters.add(match["adapter"])
        found[key] = tensor.float()
    if foreign or twice:
        raise AdapterError(
            f"{path}: not a LoRA of linear layers: "
            f"{_some(foreign or twice)}{' (there twice)' if twice else ''}"
        )
    if len(adapters) > 1:
        raise AdapterError(
            f"{path} holds several adapters: {sorted(map(str, adapters))}; save one of them"
        )
    return found


def check_tensors(
    found: Mapping[Key, torch.Tensor], expected: Mapping[Key, tuple[int, ...]], *, path: Path
) -> None:
    """Check for exactly the expected tensors, in the expected shapes.

    Raises:
        AdapterError: names what is missing, too many, or of another shape.
    """
    missing = [_stored_name(k) for k in expected if k not in found]
    extra = [_stored_name(k) for k in found if k not in expected]
    shapes = [
        f"{_stored_name(k)} is {tuple(found[k].shape)}, the model wants {shape}"
        for k, shape in expected.items()
        if k in found and tuple(found[k].shape) != shape
    ]
    wrong = [
        f"{what}: {_some(names)}"
        for what, names in (("missing", missing), ("too many", extra), ("shape", shapes))
        if names
    ]
    if wrong:
        raise AdapterError(f"{path} does not fit the model: {'; '.join(wrong)}")


def _stored_name(key: Key) -> str:
    return f"{key[0]}.lora_{key[1]}.weight"


def _some(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:5])
    return first if len(names) <= 5 else f"{first} and {len(names) - 5} more"


def read_adapter(
    folder: Path,
    *,
    lora: LoraConfig,
    expected: Mapping[Key, tuple[int, ...]],
    stacked: Sequence[str] = (),
    base: Mapping[str, torch.Tensor] | None = None,
) -> dict[Key, torch.Tensor]:
    """A checked adapter's whole tensors, fp32 on the CPU.

    Args:
        expected: as `expected_tensors` has it.
        stacked: `AdapterSet.stacked`.
        base: the model's tensors by HF name, of which PEFT may have copied the output layer's.

    Raises:
        AdapterError: see the functions above.
    """
    experts = {t: _num_experts(t, expected) for t in stacked}
    singles = {expert_name(t, e) for t, count in experts.items() for e in range(count)}
    modules = {module for module, _ in expected} - singles
    check_config(read_config(folder), lora, modules=modules, stacked=stacked, path=folder / CONFIG)
    stored = _without_copies(read_tensors(folder), base or {}, expected, path=folder)
    found = as_expected(by_module(stored, path=folder), expected, stacked)
    check_tensors(found, expected, path=folder)
    bad = [_stored_name(k) for k, t in found.items() if not t.isfinite().all()]
    if bad:
        raise AdapterError(f"{folder} holds values that are not finite: {_some(bad)}")
    return found


def _without_copies(
    stored: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    expected: Mapping[Key, tuple[int, ...]],
    *,
    path: Path,
) -> dict[str, torch.Tensor]:
    """The stored tensors without base weights. PEFT adds that of an output layer with an adapter.

    Raises:
        AdapterError: one is not the model's.
    """
    kept = dict(stored)
    for name in [n for n in stored if n.endswith(_COPY)]:
        module = name.removeprefix(_PREFIX).removesuffix(_COPY)
        if (module, "A") not in expected:
            continue
        weight, own = kept.pop(name), base.get(f"{module}.weight")
        # Without Megatron's padding.
        if own is None or not torch.equal(weight.to(own.dtype), own[: expected[module, "B"][0]]):
            raise AdapterError(
                f"{path} has its own base weight for {module}, and it is not the model's; "
                "remove it from the file, or train from the model that it belongs to"
            )
    return kept


def as_expected(
    found: Mapping[Key, torch.Tensor],
    expected: Mapping[Key, tuple[int, ...]],
    stacked: Sequence[str],
) -> dict[Key, torch.Tensor]:
    """Stored matrices, those of stacked experts one by one."""
    if not stacked:
        return dict(found)
    return single_experts(found, stacked, num_experts=_num_experts(stacked[0], expected))


def _num_experts(tensor: str, expected: Collection[Key]) -> int:
    count = 0
    while (expert_name(tensor, count), "A") in expected:
        count += 1
    return count
