"""Adapters with PEFT's semantics on Megatron's fused, sharded linears.

Each HF linear has one A and one B: q, k and v in a fused `linear_qkv`, gate and up in a fused
`linear_fc1`, and those of each expert. The probe says where an HF linear is in Megatron's
(`linears`). Adapters shard as the base does. A column-parallel linear's A is whole on every tensor
rank, and its B is split by rows. A row-parallel linear's A is split by columns, and its B is whole.
A linear that every tensor rank has a copy of has A and B whole. Experts are split over
expert-parallel ranks, and each expert in the same way over expert-tensor ranks.

The adapters are forward hooks outside Megatron's module tree, so Bridge sees an unchanged model.
Parameters are fp32. The product runs in the activations' dtype and is added to the linear's output
without a bias (`products`).

Shapes: O = out features, I = in features, R = rank, E = local experts, P = HF linears in one fused
linear; s = sequence, b = batch.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import Router
from torch import nn
from torch.nn import functional

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from trainer_node.adapters import products
from trainer_node.adapters.dense_lora import DenseAdapter, WeightAdapter
from trainer_node.adapters.dropout import Dropout, key_of
from trainer_node.adapters.linears import (
    Linear,
    Place,
    Targets,
    expert_name,
    initial_lora_a,
    is_linear,
    is_matrix,
    module_of,
)
from trainer_node.adapters.rounding import Rounding
from trainer_node.hf.names import decoder_name
from trainer_node.layout.layouts import layouts
from trainer_node.layout.pieces import Piece, TrainedParam
from trainer_node.layout.strides import Layout, NotStridedError
from trainer_node.ranks.topology import tensor_group

log = logging.getLogger(__name__)
_NUMBER = re.compile(r"\.\d+\.")

Adapter = DenseAdapter | WeightAdapter
Mode = Literal["adapters", "base", "served"]
"""How the model runs: the adapters add their products; without them; or its weights are a
publication's, and the adapters only learn."""


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


class ExpertAdapter(nn.Module):
    """Adapters of all local experts' HF linears in one grouped Megatron linear, batched over the
    experts.

    Under expert tensor parallelism the token dispatcher gives every rank of the group the same
    tokens. It adds up their outputs and, in the backward pass, their inputs' gradients. So nothing
    is exchanged here. After a row-parallel linear's A, both h and the delta are parts of sums. Each
    copy (a column-parallel linear's A, a row-parallel linear's B) gets a part of its gradient.

    Args:
        names: for each HF linear of the fused order, the HF module names of the local experts; None
            where no adapter is wanted.
        places: of each HF linear; all experts' are alike.
        dropout: the set's dropout.

    Raises:
        ConfigError: the HF linears are not one after the other in the fused one.
    """

    def __init__(
        self,
        *,
        names: Sequence[Sequence[str] | None],
        places: Sequence[Place],
        lora: LoraConfig,
        dropout: Dropout,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._group, self.places = tensor_group(expert=True), places
        self.names, self.scale = names, lora.alpha / lora.rank
        self.num_experts = max(len(experts) for experts in names if experts is not None)
        self._dropout = dropout
        self._keys = [key_of(experts[0]) for experts in names if experts is not None]
        self._orders = list(_orders(places, device))
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for i, (experts, place) in enumerate(zip(names, places, strict=True)):
            if experts is None:
                continue
            if len(place.runs) > 1:
                raise ConfigError(f"{experts[0]} has scattered rows on this rank: no adapter fits")
            all_A = torch.stack(
                [
                    initial_lora_a(n, rank=lora.rank, in_features=place.shape[1], seed=seed)
                    for n in experts
                ]
            ).narrow(2, *place.columns)
            self.lora_A[str(i)] = nn.Parameter(all_A.contiguous().to(device))
            self.lora_B[str(i)] = nn.Parameter(
                torch.zeros(len(experts), len(place.rows_N), lora.rank, device=device)
            )

    def add_to(self, out: torch.Tensor, x: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """The linear's output with the adapters' added, [t, P * O]."""
        return products.added(out, self(x, m_splits))

    def learn_from(
        self, out: torch.Tensor, x: torch.Tensor, m_splits: Sequence[int]
    ) -> torch.Tensor:
        """`out`, of a linear that has the adapters in its weight. A and B get the gradients of
        `add_to`; x gets them from the linear."""
        return products.learnt(out, self(x.detach(), m_splits))

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
            groups.matmul(next(hidden).contiguous(), self._fused_b(i, x.dtype))
            if experts is not None
            else h.new_zeros(h.shape[0], len(self.places[i].rows_N))
            for i, experts in enumerate(self.names)
        ]
        return groups.unpad(outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1))

    def _fused_b(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        """B [E, O, R] of one HF linear, rows in the fused linear's order."""
        lora_B, order = self.lora_B[str(i)].to(dtype), self._orders[i]
        if order is None:
            return lora_B
        return torch.zeros_like(lora_B).index_copy(1, order, lora_B)

    def trained_params(self) -> Iterable[TrainedParam]:
        """The parameters and their layout: rows of one tensor that stacks all experts of the model,
        [experts, ...]."""
        ranks = parallel_state.get_expert_model_parallel_world_size()
        for matrix, params, split in (("A", self.lora_A, "columns"), ("B", self.lora_B, "rows")):
            for key, param in params.items():
                name, place = (self.names[int(key)] or ())[0], self.places[int(key)]
                before, _, rest = name.partition(".experts.")
                first, _, linear = rest.partition(".")
                shape, offsets = [param.shape[0] * ranks, *param.shape[1:]], [int(first), 0, 0]
                if matrix == "A":
                    shape[2], offsets[2] = place.shape[1], place.columns[0]
                else:
                    shape[1], offsets[1] = place.shape[0], place.runs[0][0]
                piece = Piece(
                    key=f"{before}.experts.{linear}.lora_{matrix}",
                    shape=tuple(shape),
                    offsets=tuple(offsets),
                    rows=param.shape[0],
                )
                yield TrainedParam(
                    param=param, pieces=(piece,), split=place.split == split, expert=True
                )


def _orders(places: Sequence[Place], device: torch.device) -> Iterator[torch.Tensor | None]:
    """Where each part's rows are in its run of the fused linear's output; None: in their order."""
    first = 0
    for place in places:
        order = place.rows_N - first
        plain = torch.arange(len(order))
        if not torch.equal(order.sort().values, plain):
            raise ConfigError("experts' linears that take turns in Megatron's cannot have adapters")
        yield None if torch.equal(order, plain) else order.to(device)
        first += len(order)


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
    """All adapters of this rank. `attach` hooks them into its model.

    Args:
        tasks: Bridge's conversion tasks for the model; none, if there are to be no adapters.
        bridge, state: as in `layouts`.
        layers: its transformer layers.
        config: Megatron's transformer config.

    Raises:
        ConfigError: a target matches no linear, or one that cannot have an adapter; says why.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Any],
        bridge: Any,
        state: Mapping[str, torch.Tensor],
        layers: Iterable[nn.Module],
        config: Any,
        lora: LoraConfig,
        seed: int,
        rounding: Rounding,
        device: torch.device,
    ) -> None:
        self.rounding = rounding
        """How the present weights are merged: as the loaded checkpoint's were, and from the next
        step on as the config says, with the run's seed."""
        self.sample: Any = None
        """What `training.served_share` keeps of these adapters."""
        self.served: Any = None
        """What `training.served_weights` keeps of them."""
        self._config, self._bridge, self._state = config, bridge, state
        self._settings: dict[str, Any] = {"lora": lora, "seed": seed, "device": device}
        self.adapters: list[DenseAdapter | WeightAdapter | ExpertAdapter] = []
        self.by_module: dict[nn.Module, DenseAdapter | ExpertAdapter] = {}
        """Megatron's linear -> its adapter."""
        self.module_of: dict[DenseAdapter | ExpertAdapter, nn.Module] = {}
        """An adapter -> its linear."""
        self.stacked: list[str] = []
        """Stacked HF tensors of the whole model whose experts have adapters."""
        self.transposed: set[str] = set()
        """Those of this rank that are [experts, in, out]."""
        self._wanted: list[tuple[nn.Module, str, Callable[..., Any], dict[str, Any]]] = []
        self._normed: list[Any] = []
        """Linears that must return their norm's output."""
        self._hooks: list[Any] = []
        self._head: WeightAdapter | None = None
        self.mode: Mode = "adapters"
        """Set by `switched`."""
        self.dropout = Dropout(
            lora.dropout,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
            sequence_parallel=config.sequence_parallel,
        )
        for layer in layers if lora.dropout and tasks else ():
            self._hook(
                layer, "register_forward_pre_hook", self.dropout.before_layer, with_kwargs=True
            )
        if tasks:
            self._adapt_all([task for task in tasks if task is not None])

    # ------------------------------------------------------------ which linears

    def _adapt_all(self, tasks: Sequence[Any]) -> None:
        in_layers = [task for task in tasks if decoder_name(task.global_param_name) is not None]
        heads = [task for task in tasks if any(map(Targets.is_head, _hf_names(task)))]
        targets = Targets(
            self._settings["lora"].targets,
            [n for task in (*in_layers, *heads) for n in _hf_names(task)],
        )
        for task in heads:
            if targets.wants(_hf_names(task)[0]) and task.param_weight is not None:
                self._adapt_head(task)
        experts: dict[Any, list[Any]] = defaultdict(list)
        by_param: dict[Any, Any] = {}
        without = Counter[str]()
        for task in in_layers:
            wanted = [name for name in _hf_names(task) if targets.wants(name)]
            self.stacked += [
                n for n in wanted if not n.endswith(".weight") and n not in self.stacked
            ]
            if not wanted or task.param_weight is None:  # another pipeline stage's
                continue
            if refusal := _refusal(task, self._settings["lora"]):
                if not targets.all_linear:
                    raise ConfigError(f"lora.targets: {wanted[0]} {refusal}")
                without[f"{_NUMBER.sub('.*.', wanted[0])} {refusal}"] += 1
                continue
            if task.mapping.is_expert:
                experts[task.megatron_module].append(task)
            by_param[task.param_weight] = task
        for what, count in without.items():
            log.info("no adapter on %d tensors: %s", count, what)
        for param, task in by_param.items():
            if not task.mapping.is_expert:
                self._adapt_dense(param, task, targets)
            elif same := experts.pop(task.megatron_module, None):
                self._adapt_experts(task.megatron_module, same, targets)

    def _linears(
        self, task: Any, is_meant: Callable[[str], bool] = lambda _: True
    ) -> Iterator[tuple[str, Linear]]:
        """(HF tensor, linear) of each targeted linear in a task's parameter, in the fused order.

        Raises:
            ConfigError: one is not a matrix made of the parameter's rows; says why.
        """
        found = []
        answers = layouts(task, self._bridge, self._state)
        for name, answer in ((n, a) for n, a in answers.items() if is_meant(n)):
            why = answer if isinstance(answer, str) else ""
            try:
                if isinstance(answer, Layout):
                    columns = task.param_weight.shape[1]
                    place = Place.of(answer, part=task.mapping.tp_rank, columns=columns)
                    found.append((name, Linear(name=self._named(task, name, answer), place=place)))
                    continue
            except NotStridedError as error:
                why = str(error)
            raise ConfigError(
                f"lora.targets: {name} of {task.global_param_name} cannot have an adapter: {why}"
            )
        return iter(sorted(found, key=lambda pair: int(pair[1].place.rows_N.min())))

    def _named(self, task: Any, hf_name: str, layout: Layout) -> str:
        if len(layout.shape) != 3:
            return module_of(hf_name)
        height = layout.shape[1]
        expert = min(piece.box.first_row for piece in layout.pieces) // height
        return expert_name(hf_name, expert)

    # ------------------------------------------------------------ their adapters

    def _adapt_dense(self, param: torch.Tensor, task: Any, targets: Targets) -> None:
        module = task.megatron_module
        linears = [linear for _, linear in self._linears(task, targets.wants)]
        if len({linear.place.split for linear in linears}) > 1:
            raise ConfigError(f"{task.global_param_name}: its HF linears are split differently")
        if not is_linear(module):
            name = next(n for n, p in module.named_parameters(recurse=False) if p is param)
            weight = WeightAdapter(
                module=module,
                name=name,
                linear=linears[0],
                rounding=lambda: self.rounding,
                **self._settings,
            )
            self.adapters.append(weight)
            self._hook(module, "register_forward_pre_hook", lambda *_: self._put(weight))
            self._hook(module, "register_forward_hook", lambda *_: weight.take(), always_call=True)
            return
        adapter = DenseAdapter(
            linears=linears,
            out_features=param.shape[0],
            sequence_parallel=self._config.sequence_parallel,
            dropout=self.dropout,
            **self._settings,
        )
        if hasattr(module, "return_layernorm_output"):
            # A fused norm-and-linear: the adapter's input is the norm's output.
            self._normed.append(module)
        self.adapters.append(adapter)
        self.by_module[module], self.module_of[adapter] = adapter, module
        norms = [c for c in module.children() if next(c.parameters(), None) is not None]
        if norms:
            self._add_before(norms[0], module, adapter)
        else:
            self._hook(module, "register_forward_hook", _with_adapter(adapter, self))

    def _adapt_head(self, task: Any) -> None:
        if self._settings["lora"].dropout:
            raise ConfigError(
                "lora.targets: lm_head's input cannot be dropped; set lora.dropout to 0"
            )
        module, weight_VH = task.megatron_module, task.param_weight
        place = Place.of_vocab(
            tuple(weight_VH.shape),
            self._config.vocab_size,
            part=parallel_state.get_tensor_model_parallel_rank(),
            parts=parallel_state.get_tensor_model_parallel_world_size(),
        )
        linear = Linear(name=module_of(_hf_names(task)[0]), place=place)
        self._head = WeightAdapter(
            module=module,
            name="weight",
            linear=linear,
            rounding=lambda: self.rounding,
            **self._settings,
        )
        self.adapters.append(self._head)

    def of_head(self, weight_VH: torch.Tensor) -> torch.Tensor:
        """The output layer's weight, or its sum with the delta while it has an adapter."""
        return weight_VH if self._head is None or self.mode == "base" else self._head.sum()

    def _put(self, weight: WeightAdapter) -> None:
        if self.mode != "base":
            weight.put()

    def _add_before(self, norm: nn.Module, linear: nn.Module, adapter: DenseAdapter) -> None:
        """The linear norms its own output: what it computes is the norm's input."""
        inputs: list[torch.Tensor] = []

        def note(_: Any, args: tuple[Any, ...]) -> None:
            inputs[:] = args[:1]

        def add(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs.pop()
            return (self.applied(adapter, args[0], x), *args[1:])

        self._hook(linear, "register_forward_pre_hook", note)
        self._hook(norm, "register_forward_pre_hook", add)

    def _adapt_experts(self, module: nn.Module, tasks: Sequence[Any], targets: Targets) -> None:
        tasks = sorted(tasks, key=lambda t: int(t.param_name.rpartition(".weight")[2]))
        first = list(self._linears(tasks[0]))
        names: list[list[str] | None] = []
        for tensor, linear in first:
            place = _hf_names(tasks[0]).index(tensor)
            same = [_hf_names(task)[place] for task in tasks]
            if not tensor.endswith(".weight"):
                number = int(linear.name.rpartition(".experts.")[2].partition(".")[0])
                same = [expert_name(tensor, number + e) for e in range(len(tasks))]
            wanted = targets.wants(tensor)
            names.append([module_of(n) for n in same] if wanted else None)
            if wanted and linear.place.transposed:
                self.transposed.add(tensor)
        adapter = ExpertAdapter(
            names=names,
            places=[linear.place for _, linear in first],
            dropout=self.dropout,
            **self._settings,
        )
        self.adapters.append(adapter)
        self.by_module[module], self.module_of[adapter] = adapter, module
        self._hook(module, "register_forward_hook", _with_adapter(adapter, self))

    def _hook(self, module: nn.Module, kind: str, hook: Callable[..., Any], **options: Any) -> None:
        self._wanted.append((module, kind, hook, options))

    def attach(self) -> None:
        """Put the hooks on the model."""
        for module in self._normed:
            module.return_layernorm_output = True
        self._hooks = [
            getattr(module, kind)(hook, **options) for module, kind, hook, options in self._wanted
        ]

    @contextlib.contextmanager
    def switched(self, mode: Mode) -> Iterator[None]:
        """Run so within the block. For "served" the caller has put the weights in place."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def applied(
        self, adapter: DenseAdapter | ExpertAdapter, out: torch.Tensor, *inputs: Any
    ) -> torch.Tensor:
        """A linear's output, as the present mode wants it."""
        if self.mode == "adapters":
            return adapter.add_to(out, *inputs)
        if self.mode == "served" and torch.is_grad_enabled():
            return adapter.learn_from(out, *inputs)
        return out

    # ------------------------------------------------------------ parameters

    def params(self) -> list[TrainedParam]:
        """Every trainable parameter of this rank with its layout, in a stable order."""
        return [p for adapter in self.adapters for p in adapter.trained_params()]

    def local_matrices(
        self, memory: Callable[[torch.Tensor], torch.Tensor] = lambda param: param
    ) -> Iterator[LocalMatrix]:
        """Yield this rank's parts of each matrix. A stack of experts gives one per expert.

        Args:
            memory: returns a parameter's copy, of which the views are then.
        """
        for p in self.params():
            for piece in p.pieces:
                module, _, matrix = piece.key.rpartition(".lora_")
                is_stack, shape = p.param.dim() == 3, piece.shape[-2:]
                part = piece.read(memory(p.param))
                for e, tensor in enumerate(part if is_stack else [part]):
                    name = expert_name(module, piece.offsets[0] + e) if is_stack else module
                    corner = zip(piece.offsets[-2:], tensor.shape, strict=True)
                    place = tuple(slice(first, first + size) for first, size in corner)
                    yield LocalMatrix(name, matrix, tensor, shape, place)

    @torch.no_grad()
    def load(
        self,
        full: Mapping[tuple[str, str], torch.Tensor],
        memory: Callable[[torch.Tensor], torch.Tensor] = lambda param: param,
    ) -> None:
        """Fill the adapters, or copies of them, from whole fp32 matrices. The caller has checked
        for all of them."""
        for local in self.local_matrices(memory):
            local.tensor.copy_(full[local.module, local.matrix][local.place])

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        for module in self._normed:
            module.return_layernorm_output = False
        self._hooks.clear()


def _hf_names(task: Any) -> list[str]:
    """HF tensors of a conversion task."""
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else [str(n) for n in names.values()]


def _refusal(task: Any, lora: LoraConfig) -> str | None:
    """Why a weight cannot have an adapter."""
    module = task.megatron_module
    if not is_matrix(task):
        return f"is no linear: its parameter has shape {tuple(task.param_weight.shape)}"
    if isinstance(module, Router):
        return "is a router, which gets no adapter"
    if lora.dropout and not all(name.endswith(".weight") for name in _hf_names(task)):
        return "is a stacked tensor, for which PEFT has no dropout; set lora.dropout to 0"
    if task.mapping.is_expert and task.param_name.endswith(".weight"):
        return "is an expert's own linear; only grouped ones can have adapters"
    if not is_linear(module) and lora.dropout:
        return (
            f"is multiplied with within {type(module).__name__}, so its input cannot be dropped; "
            "set lora.dropout to 0"
        )
    return None


def _with_adapter(adapter: DenseAdapter | ExpertAdapter, adapters: AdapterSet) -> Any:
    """A forward hook that applies the adapter to what Megatron's and TransformerEngine's linears
    return."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], output: tuple[Any, Any]
    ) -> tuple[torch.Tensor, Any]:
        out, bias = output
        x, *rest = args
        if isinstance(out, tuple):  # (out, norm output)
            out, x = out
        return adapters.applied(adapter, out, x, *rest), bias

    return hook
