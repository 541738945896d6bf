"""Adapters with PEFT's semantics on Megatron's fused, sharded linears.

Each HF linear has one A and one B: q, k and v in a fused `linear_qkv`, gate and up in a fused
`linear_fc1`, and those of each expert. Adapters shard as the base does. A column-parallel linear's
A is whole on every tensor rank, and its B is split by rows. A row-parallel linear's A is split by
columns, and its B is whole. Experts are split over expert-parallel ranks, and each expert in the
same way over expert-tensor ranks. Bridge's mappings say where each HF linear is (`QKVMapping`,
`GatedMLPMapping`, `AutoMapping`).

The adapters are forward hooks outside Megatron's module tree, so Bridge sees an unchanged model.
Parameters are fp32. The product runs in the activations' dtype.

Shapes: O = out features, I = in features, R = rank, E = local experts, P = HF linears in one fused
linear; s = sequence, b = batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn import functional

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from trainer_node.adapters.dropout import Dropout, key_of
from trainer_node.adapters.merge import decoder_name
from trainer_node.model.parameters import Piece, TrainedParam, tensor_group


class LocalMatrix(NamedTuple):
    """This rank's part of one HF linear's A or B."""

    module: str
    """HF module name, e.g. model.layers.0.self_attn.q_proj."""
    matrix: str
    """"A" or "B"."""
    tensor: torch.Tensor
    """A view of the parameter."""
    whole_shape: tuple[int, ...]
    """Shape of the HF linear's matrix."""
    place: tuple[slice, ...]
    """Rows and columns of the whole that this rank has."""


def initial_lora_a(name: str, *, rank: int, in_features: int, seed: int) -> torch.Tensor:
    """PEFT's kaiming_uniform(a=sqrt(5)) for the whole A [R, I] on the CPU; depends on seed and name
    only, not on the topology."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    # kaiming_uniform with a = sqrt(5): sqrt(6 / ((1 + 5) * fan_in)).
    bound = 1 / math.sqrt(in_features)
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


class DenseAdapter(nn.Module):
    """Adapters of the HF linears in one dense Megatron linear.

    Args:
        parts: HF module name and full out features of each HF linear, in the fused order; a name is
            None where no adapter is wanted.
        in_features: full in features.
        dropout: the set's dropout.
        qkv_heads: (query heads, head size) of one local query group, if the output interleaves q,
            k, v by group.
        sequence_parallel: outside the linears this rank has its part of the sequence. Copies then
            get gradients of this part alone.
    """

    def __init__(
        self,
        *,
        parts: Sequence[tuple[str | None, int]],
        in_features: int,
        row_parallel: bool,
        qkv_heads: tuple[int, int] | None,
        sequence_parallel: bool,
        lora: LoraConfig,
        dropout: Dropout,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._dropout = dropout
        self._group = parallel_state.get_tensor_model_parallel_group()
        size, rank = self._group.size(), self._group.rank()
        self.row_parallel = row_parallel
        self.qkv_heads = qkv_heads
        self.scale = lora.alpha / lora.rank
        # Column: h is the same on all ranks but each rank's gradient of it is partial. Row: h
        # itself is partial. Under sequence parallelism h is what is gathered and scattered: rank is
        # less than hidden size.
        if sequence_parallel:
            self._exchange = (
                reduce_scatter_to_sequence_parallel_region
                if row_parallel
                else gather_from_sequence_parallel_region
            )
        else:
            self._exchange = (
                reduce_from_tensor_model_parallel_region
                if row_parallel
                else copy_to_tensor_model_parallel_region
            )
        self.names = [name for name, _ in parts]
        self._keys = [key_of(name) for name in self.names if name is not None]
        self.out_local = [out if row_parallel else out // size for _, out in parts]
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for i, name in enumerate(self.names):
            if name is None:
                continue
            lora_A_RI = initial_lora_a(name, rank=lora.rank, in_features=in_features, seed=seed)
            if row_parallel:
                lora_A_RI = lora_A_RI.chunk(size, dim=1)[rank]
            self.lora_A[str(i)] = nn.Parameter(lora_A_RI.contiguous().to(device))
            self.lora_B[str(i)] = nn.Parameter(
                torch.zeros(self.out_local[i], lora.rank, device=device)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute scale * A x of all parts: [s, b, I local] -> [s, b, parts with an adapter * R].

        Under sequence parallelism s is this rank's part before a column-parallel linear, also
        behind its fused norm, and after a row-parallel one.
        """
        if self._dropout.is_on:
            h = torch.cat(
                [
                    functional.linear(
                        self._dropout.dense(x, name_key=key, sharded=self.row_parallel),
                        self.lora_A[k].to(x.dtype),
                    )
                    for k, key in zip(self.lora_A, self._keys, strict=True)
                ],
                dim=-1,
            )
        else:
            lora_A = torch.cat([self.lora_A[k] for k in self.lora_A]).to(x.dtype)
            h = functional.linear(x, lora_A)
        return self._exchange(h, group=self._group) * self.scale

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The linear's output with the adapters' added, [s, b, sum of O local]; written over `out`
        where nothing is compiled."""
        h, lora_B_OQ = self(x), self._packed_b(out.dtype)
        if torch.compiler.is_compiling():
            # The compiler cannot trace writing over a custom function's input, and plans the memory
            # itself.
            return out + functional.linear(h, lora_B_OQ)
        added: torch.Tensor = _AddProduct.apply(out, h, lora_B_OQ)
        return added

    def _packed_b(self, dtype: torch.dtype) -> torch.Tensor:
        """B of all parts, each in its columns, rows in the fused linear's order. [sum of O local,
        parts with an adapter * R]"""
        num, done = len(self.lora_B), 0
        parts = []
        for i, (name, out) in enumerate(zip(self.names, self.out_local, strict=True)):
            if name is None:
                rank = next(iter(self.lora_B.values())).shape[1]
                parts.append(
                    next(iter(self.lora_B.values())).new_zeros(out, num * rank, dtype=dtype)
                )
                continue
            lora_B_OR = self.lora_B[str(i)].to(dtype)
            rank = lora_B_OR.shape[1]
            parts.append(functional.pad(lora_B_OR, (done * rank, (num - 1 - done) * rank)))
            done += 1
        if len(parts) == 1 or self.qkv_heads is None:
            return torch.cat(parts)
        heads, size = self.qkv_heads
        by_group = [
            t.unflatten(0, (-1, width))
            for t, width in zip(parts, (heads * size, size, size), strict=True)
        ]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def trained_params(self) -> Iterable[TrainedParam]:
        """The parameters and their layout."""
        for key in self.lora_A:
            name = self.names[int(key)]
            yield self._trained(
                f"{name}.lora_A", self.lora_A[key], 1 if self.row_parallel else None
            )
            yield self._trained(
                f"{name}.lora_B", self.lora_B[key], None if self.row_parallel else 0
            )

    def _trained(self, key: str, param: nn.Parameter, dim: int | None) -> TrainedParam:
        shape, offsets = list(param.shape), [0, 0]
        if dim is not None:
            shape[dim] *= self._group.size()
            offsets[dim] = param.shape[dim] * self._group.rank()
        piece = Piece(key=key, shape=tuple(shape), offsets=tuple(offsets), rows=param.shape[0])
        return TrainedParam(param=param, pieces=(piece,), split=dim is not None, expert=False)


class ExpertAdapter(nn.Module):
    """Adapters of all local experts' HF linears in one grouped Megatron linear, batched over the
    experts.

    Under expert tensor parallelism the token dispatcher gives every rank of the group the same
    tokens. It adds up their outputs and, in the backward pass, their inputs' gradients. So nothing
    is exchanged here. Behind a row-parallel linear's A, both h and the delta are parts of sums.
    Each copy (a column-parallel linear's A, a row-parallel linear's B) gets a part of its gradient.

    Args:
        names: for each HF linear of the fused order, the HF module names of the local experts; None
            where no adapter is wanted.
        in_features: full in features.
        out_features: full out features of one HF linear.
        dropout: the set's dropout.
    """

    def __init__(
        self,
        *,
        names: Sequence[Sequence[str] | None],
        in_features: int,
        out_features: int,
        row_parallel: bool,
        lora: LoraConfig,
        dropout: Dropout,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._group, self.row_parallel = tensor_group(expert=True), row_parallel
        size, rank = self._group.size(), self._group.rank()
        self.names, self.scale = names, lora.alpha / lora.rank
        self.out_features = out_features if row_parallel else out_features // size
        self._dropout = dropout
        self._keys = [key_of(experts[0]) for experts in names if experts is not None]
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for i, experts in enumerate(names):
            if experts is None:
                continue
            all_A = torch.stack(
                [
                    initial_lora_a(n, rank=lora.rank, in_features=in_features, seed=seed)
                    for n in experts
                ]
            )
            if row_parallel:
                all_A = all_A.chunk(size, dim=2)[rank]
            self.lora_A[str(i)] = nn.Parameter(all_A.contiguous().to(device))
            self.lora_B[str(i)] = nn.Parameter(
                torch.zeros(len(experts), self.out_features, lora.rank, device=device)
            )

    def add_to(self, out: torch.Tensor, x: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """The linear's output with the adapters' added, [t, P * O]."""
        return out + self(x, m_splits)

    def forward(self, x: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """[t, I] sorted by expert -> [t, P * O]; `m_splits[e]` rows belong to local expert e."""
        groups = _Groups(m_splits, x)
        if self._dropout.is_on:
            h = torch.cat(
                [
                    groups.matmul(
                        groups.pad(self._dropout.experts(x, name_key=key)),
                        self.lora_A[k].to(x.dtype),
                    )
                    for k, key in zip(self.lora_A, self._keys, strict=True)
                ],
                dim=-1,
            )
        else:
            lora_A = torch.cat([self.lora_A[k] for k in self.lora_A], dim=1).to(x.dtype)
            h = groups.matmul(groups.pad(x), lora_A)
        h = h * self.scale
        hidden = iter(h.chunk(len(self.lora_A), dim=-1))
        outs = [
            groups.matmul(next(hidden).contiguous(), self.lora_B[str(i)].to(x.dtype))
            if experts is not None
            else h.new_zeros(h.shape[0], self.out_features)
            for i, experts in enumerate(self.names)
        ]
        return groups.unpad(outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1))

    def _matrices(self) -> Iterator[tuple[str, nn.ParameterDict, int | None]]:
        """A and B, and the dimension of an expert's that is split."""
        yield "A", self.lora_A, 1 if self.row_parallel else None
        yield "B", self.lora_B, None if self.row_parallel else 0

    def trained_params(self) -> Iterable[TrainedParam]:
        """The parameters and their layout: rows of one tensor that stacks all experts of the model,
        [experts, ...]."""
        ranks = parallel_state.get_expert_model_parallel_world_size()
        for matrix, params, dim in self._matrices():
            for key, param in params.items():
                name = (self.names[int(key)] or ())[0]
                before, _, rest = name.partition(".experts.")
                first, _, linear = rest.partition(".")
                shape, offsets = [param.shape[0] * ranks, *param.shape[1:]], [int(first), 0, 0]
                if dim is not None:
                    shape[dim + 1] *= self._group.size()
                    offsets[dim + 1] = param.shape[dim + 1] * self._group.rank()
                piece = Piece(
                    key=f"{before}.experts.{linear}.lora_{matrix}",
                    shape=tuple(shape),
                    offsets=tuple(offsets),
                    rows=param.shape[0],
                )
                yield TrainedParam(param=param, pieces=(piece,), split=dim is not None, expert=True)


class _Groups:
    """Multiplies consecutive groups of rows by one weight each.

    On CUDA in bf16, torch's grouped kernel needs 16-byte steps. Groups are padded to 8 rows, and
    the rank to a multiple of 8. Elsewhere a loop over the groups is as fast.
    """

    STEP = 8

    def __init__(self, m_splits: Sequence[int], x: torch.Tensor) -> None:
        self._splits, self._num_rows = list(m_splits), x.shape[0]
        self._fused = x.is_cuda and x.dtype is torch.bfloat16
        if not self._fused:
            return
        splits = torch.tensor(self._splits)
        padded = (splits + self.STEP - 1) // self.STEP * self.STEP
        offsets = torch.cumsum(padded, 0)
        shift = (offsets - padded) - (torch.cumsum(splits, 0) - splits)
        self._rows = (torch.arange(self._num_rows) + shift.repeat_interleave(splits)).to(
            x.device, non_blocking=True
        )
        self._offsets = offsets.to(torch.int32).to(x.device, non_blocking=True)
        self._padded_rows = max(int(offsets[-1]), self.STEP)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Rows to their padded places."""
        if not self._fused:
            return x
        return x.new_zeros(self._padded_rows, x.shape[1]).index_copy(0, self._rows, x)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Padded rows back to the dense order."""
        return x.index_select(0, self._rows) if self._fused else x

    def matmul(self, x: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
        """Row t of group e times weight e: [t, I] -> [t, O]."""
        if not self._fused:
            return torch.cat(
                [
                    functional.linear(part, w)
                    for part, w in zip(torch.split(x, self._splits), weight_EOI, strict=True)
                ]
            )
        out_features = weight_EOI.shape[1]
        pad_in, pad_out = (-x.shape[1]) % self.STEP, (-out_features) % self.STEP
        if pad_in or pad_out:
            x, weight_EOI = (
                functional.pad(x, (0, pad_in)),
                functional.pad(weight_EOI, (0, pad_in, 0, pad_out)),
            )
        out = functional.grouped_mm(x.contiguous(), weight_EOI.transpose(1, 2), offs=self._offsets)
        return out[:, :out_features] if pad_out else out


class AdapterSet:
    """All adapters of this rank, hooked into its model.

    Args:
        tasks: Bridge's conversion tasks for the model.
        layers: its transformer layers.
        config: Megatron's transformer config.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Any],
        layers: Iterable[nn.Module],
        config: Any,
        lora: LoraConfig,
        seed: int,
        device: torch.device,
    ) -> None:
        self._lora, self._seed, self._device, self._config = lora, seed, device, config
        self.adapters: list[DenseAdapter | ExpertAdapter] = []
        self.by_module: dict[nn.Module, DenseAdapter | ExpertAdapter] = {}
        """Megatron's linear -> its adapter."""
        self._hooks: list[Any] = []
        self._on = True
        self.dropout = Dropout(
            lora.dropout,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
            sequence_parallel=config.sequence_parallel,
        )
        for layer in layers if lora.dropout and tasks else ():
            self._hooks.append(
                (
                    layer,
                    layer.register_forward_pre_hook(self.dropout.before_layer, with_kwargs=True),
                )
            )
        by_module: dict[Any, list[Any]] = defaultdict(list)
        for task in tasks:
            if task is not None and task.megatron_module is not None and _is_linear(task):
                by_module[task.megatron_module].append(task)
        for module, module_tasks in by_module.items():
            self._adapt(module, module_tasks)

    def _wanted(self, hf_param: str) -> str | None:
        name = hf_param.removesuffix(".weight")
        return name if name.rpartition(".")[2] in self._lora.targets else None

    def _adapt(self, module: nn.Module, tasks: Sequence[Any]) -> None:
        names = [[self._wanted(n) for n in _hf_params(task)] for task in tasks]
        if not any(name for row in names for name in row):
            return
        adapter: DenseAdapter | ExpertAdapter
        if tasks[0].mapping.is_expert:
            adapter = self._expert_adapter(module, tasks, names)
        else:
            adapter = self._dense_adapter(module, tasks[0], names[0])
        if hasattr(module, "return_layernorm_output"):
            # A fused norm-and-linear: the adapter's input is the norm's output.
            module.return_layernorm_output = True  # type: ignore[assignment]
        self.adapters.append(adapter)
        self.by_module[module] = adapter
        self._hooks.append(
            (module, module.register_forward_hook(_add_delta(adapter, lambda: self._on)))
        )

    def _dense_adapter(self, module: Any, task: Any, names: list[str | None]) -> DenseAdapter:
        size = parallel_state.get_tensor_model_parallel_world_size()
        row_parallel = _is_row_parallel(task, module)
        out_local, in_local = task.param_weight.shape
        config, heads = self._config, None
        if _fusion(task) == "qkv":
            if getattr(config, "attention_output_gate", False) or config.num_query_groups % size:
                raise ConfigError(
                    f"tensor parallel size {size} must divide the {config.num_query_groups} "
                    "key-value heads (and attention has no gate)"
                )
            heads = (config.num_attention_heads // config.num_query_groups, config.kv_channels)
            kv = config.num_query_groups * config.kv_channels
            outs = [config.num_attention_heads * config.kv_channels, kv, kv]
        else:
            outs = [out_local * (1 if row_parallel else size) // len(names)] * len(names)
        return DenseAdapter(
            parts=list(zip(names, outs, strict=True)),
            in_features=in_local * (size if row_parallel else 1),
            row_parallel=row_parallel,
            qkv_heads=heads,
            sequence_parallel=config.sequence_parallel,
            lora=self._lora,
            dropout=self.dropout,
            seed=self._seed,
            device=self._device,
        )

    def _expert_adapter(
        self, module: nn.Module, tasks: Sequence[Any], names: list[list[str | None]]
    ) -> ExpertAdapter:
        order = sorted(
            range(len(tasks)), key=lambda i: int(tasks[i].param_name.rpartition(".weight")[2])
        )
        row_parallel, size = _is_row_parallel(tasks[0], module), tensor_group(expert=True).size()
        out_local, in_local = tasks[0].param_weight.shape
        columns = [[names[i][part] for i in order] for part in range(len(names[0]))]
        return ExpertAdapter(
            names=[column if all(column) else None for column in columns],  # type: ignore[misc]
            in_features=in_local * (size if row_parallel else 1),
            out_features=out_local * (1 if row_parallel else size) // len(columns),
            row_parallel=row_parallel,
            lora=self._lora,
            dropout=self.dropout,
            seed=self._seed,
            device=self._device,
        )

    @property
    def is_on(self) -> bool:
        """Whether the model runs with its adapters at present (`switched`)."""
        return self._on

    @contextlib.contextmanager
    def switched(self, *, on: bool) -> Iterator[None]:
        """Within the block the model runs with its adapters (on) or as the bare base (off)."""
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    # ------------------------------------------------------------ parameters

    def params(self) -> list[TrainedParam]:
        """Every trainable parameter of this rank with its layout, in a stable order."""
        return [p for adapter in self.adapters for p in adapter.trained_params()]

    def local_matrices(self) -> Iterator[LocalMatrix]:
        """Yield this rank's part of each matrix. A stack of experts gives one per expert."""
        for p in self.params():
            (piece,) = p.pieces
            module, _, matrix = piece.key.rpartition(".lora_")
            before, _, linear = module.partition(".experts.")
            is_stack, shape = p.param.dim() == 3, piece.shape[-2:]
            for e, tensor in enumerate(p.param.data if is_stack else [p.param.data]):
                name = f"{before}.experts.{piece.offsets[0] + e}.{linear}" if is_stack else module
                corner = zip(piece.offsets[-2:], tensor.shape, strict=True)
                place = tuple(slice(first, first + size) for first, size in corner)
                yield LocalMatrix(name, matrix, tensor, shape, place)

    @torch.no_grad()
    def load(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Fill the adapters from whole fp32 matrices. The caller has checked for all of them."""
        for local in self.local_matrices():
            local.tensor.copy_(full[local.module, local.matrix][local.place])

    def close(self) -> None:
        """Take the hooks off the model."""
        for module, hook in self._hooks:
            hook.remove()
            if hasattr(module, "return_layernorm_output"):
                module.return_layernorm_output = False
        self._hooks.clear()


def _is_linear(task: Any) -> bool:
    """A weight matrix of a decoder layer; by name, not by shape."""
    name = decoder_name(task.global_param_name)
    return (
        name is not None
        and name.rpartition(".")[2].startswith("weight")
        and task.param_weight.dim() == 2
    )


def _hf_params(task: Any) -> list[str]:
    """HF tensor names inside a Megatron weight, in the fused order that the mapping declares."""
    names, fusion = task.mapping.hf_param, _fusion(task)
    if fusion == "qkv":
        return [names["q"], names["k"], names["v"]]
    if fusion == "gated":
        return [names["gate"], names["up"]]
    return [names] if isinstance(names, str) else []


def _fusion(task: Any) -> Literal["qkv", "gated", "none"]:
    """How the mapping lays HF linears out in one Megatron weight."""
    # Late, because on a CPU Bridge can be imported only after `cpu_shims.apply`.
    from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping, QKVMapping

    if isinstance(task.mapping, QKVMapping):
        return "qkv"
    return "gated" if isinstance(task.mapping, GatedMLPMapping) else "none"


def _is_row_parallel(task: Any, module: nn.Module) -> bool:
    if _fusion(task) != "none":
        return False
    kind = task.mapping._detect_parallelism_type(module)
    if kind == "replicated":
        raise ConfigError(
            f"{task.global_param_name} is replicated over tensor ranks; it cannot carry a sharded "
            "adapter"
        )
    return bool(kind == "row")


class _AddProduct(torch.autograd.Function):
    """Computes out + h B' in place of `out`.

    No linear keeps its output for its backward pass, so nothing else reads `out`. Autograd's
    version counter would detect a change of this.
    """

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, h: torch.Tensor, lora_B_OQ: torch.Tensor
    ) -> torch.Tensor:
        """[..., O], [..., Q], [O, Q] -> [..., O]"""
        ctx.save_for_backward(h, lora_B_OQ)
        # An alias that is no view: what is compiled behind it (SwiGLU) would else be compiled again
        # for each shape of a view's base.
        result = out.data if out.is_contiguous() else out.contiguous()
        result.view(-1, out.shape[-1]).addmm_(h.reshape(-1, h.shape[-1]), lora_B_OQ.t())
        torch.autograd.graph.increment_version(out)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of all three inputs."""
        h, lora_B_OQ = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        return grads[0], (flat @ lora_B_OQ).view_as(h), flat.t() @ h.reshape(-1, h.shape[-1])


def _add_delta(adapter: DenseAdapter | ExpertAdapter, is_on: Callable[[], bool]) -> Any:
    """A forward hook that adds the adapter's delta, while it is on, to what Megatron's and
    TransformerEngine's linears return."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], output: tuple[Any, Any]
    ) -> tuple[torch.Tensor, Any]:
        out, bias = output
        x, *rest = args
        if isinstance(out, tuple):  # (out, norm output)
            out, x = out
        return (adapter.add_to(out, x, *rest) if is_on() else out), bias

    return hook
