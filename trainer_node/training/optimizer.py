"""AdamW with ZeRO stage 1 (https://arxiv.org/abs/1910.02054).

Moments and fp32 masters exist once in a data-parallel group.

    every rank: finalised gradients -> the owner of each parameter steps it -> the owner sends it to
        the other ranks of its group

One rank owns a whole parameter, so state is named and saved by parameter. The largest parameter
goes first, to the rank with the fewest elements. Adam is elementwise: the result equals the
unsharded optimizer's bit for bit. Megatron-Core 0.19's `DistributedOptimizer` works on CUDA only
(it raises TypeError for CPU tensors). This one is the same on both, so the tests cover what trains.

Parameters of less than fp32 have a master: AdamW steps the master, the parameter is its rounding.
As in Megatron, parameters of one dimension (norms, biases) do not decay.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.protocol.messages import OptimParams
from trainer_node.layout.pieces import TrainedParam
from trainer_node.training.gradients import buckets

MOMENTS = ("exp_avg", "exp_avg_sq")


def assign_owners(sizes: Sequence[int], num_owners: int) -> list[int]:
    """Assign parameters to owners: the largest first, to the owner with the fewest elements.

    The lower number wins a draw.
    """
    loads = [(0, owner) for owner in range(num_owners)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, owner = heapq.heappop(loads)
        owners[index] = owner
        heapq.heappush(loads, (load + sizes[index], owner))
    return owners


class ShardedAdamW:
    """AdamW whose state is spread over the data-parallel ranks (experts': expert-data-parallel
    ranks).

    Args:
        params: this rank's parameters; on the ranks of a group the same ones in the same order.
    """

    def __init__(self, params: Sequence[TrainedParam]) -> None:
        self._partitions = [
            _Partition([p for p in params if p.expert is expert]) for expert in (False, True)
        ]
        owned = [p for partition in self._partitions for p in partition.owned()]
        self.masters = [(p, _master(p)) for p in owned]
        """This rank's parameters and what AdamW steps: an fp32 parameter is its own master."""
        values = [m for p, m in self.masters if p.is_value]
        decays = [m for _, m in self.masters if m.dim() > 1]
        others = [m for p, m in self.masters if m.dim() <= 1 and not p.is_value]
        groups = [
            {"params": found, "decays": found is decays, "is_value": found is values}
            for found in (decays, others, values)
            if found
        ]
        fused = bool(owned) and owned[0].param.is_cuda
        self._adam = torch.optim.AdamW(groups, fused=fused or None) if groups else None
        self._step_device = owned[0].param.device if fused else torch.device("cpu")

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """torch's state: this rank's masters -> step, exp_avg, exp_avg_sq."""
        return {} if self._adam is None else self._adam.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's groups of the fp32 weights that this rank owns."""
        return [] if self._adam is None else self._adam.param_groups

    @torch.no_grad()
    def make_moments(self) -> None:
        """Make all missing moments, or none. AdamW would make each one after it has updated the
        parameters before it."""
        missing = [master for _, master in self.masters if master not in self.state]
        self.state.update(
            {
                master: self._state_of(0, *(torch.zeros_like(master) for _ in MOMENTS))
                for master in missing
            }
        )

    def _state_of(self, num_steps: int, *moments: torch.Tensor) -> dict[str, torch.Tensor]:
        """torch's state of one master."""
        step = torch.tensor(float(num_steps), dtype=torch.float32, device=self._step_device)
        return {"step": step, **dict(zip(MOMENTS, moments, strict=True))}

    @torch.no_grad()
    def step(self, optim: OptimParams, *, factor: torch.Tensor | None) -> None:
        """One AdamW step with the finalised gradients, each first multiplied by `factor`. A
        collective, after `make_moments`. If it fails, the state is unknown."""
        for p, master in self.masters:
            master.grad = p.grad if factor is None else p.grad.mul_(factor)
        if self._adam is not None:
            for group in self._adam.param_groups:
                decay = optim.weight_decay if group["decays"] else 0.0
                lr = optim.value_lr if group["is_value"] and optim.value_lr else optim.lr
                group.update(
                    lr=lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=decay
                )
            self._adam.step()
        for p, master in self.masters:
            if master is not p.param:
                master.grad = None
        self.broadcast()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Round the masters into the parameters and send these to each group. A collective."""
        for p, master in self.masters:
            if master is not p.param:
                p.param.copy_(master)
        for partition in self._partitions:
            partition.broadcast()

    # ------------------------------------------------------------ checkpoints

    def num_steps(self, group: Any) -> int:
        """Steps that the moments have seen, the same for every parameter. A collective over a CPU
        group of all ranks."""
        mine = max((int(s["step"]) for s in self.state.values()), default=0)
        steps = torch.tensor(mine)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
        return int(steps)

    def tensors(self) -> Iterator[tuple[TrainedParam, dict[str, torch.Tensor]]]:
        """Yield this rank's parameters with fp32 weight and, after the first step, moments. Not
        copies."""
        for p, master in self.masters:
            state = self.state.get(master, {})
            yield p, {"weight": master, **{name: state[name] for name in MOMENTS if name in state}}

    @torch.no_grad()
    def restore(
        self, values: Iterable[Mapping[str, torch.Tensor]], *, num_steps: int | None
    ) -> None:
        """Take values in the order of `tensors`. A missing weight stays as it is. A collective.

        Args:
            num_steps: steps that the moments have seen. None: the present moments stay.
        """
        for (_, master), found in zip(self.masters, values, strict=True):
            if "weight" in found:
                master.copy_(found["weight"])
            if num_steps is None:
                continue
            self.state.pop(master, None)
            if num_steps:
                moments = (found[n].to(master.device) for n in MOMENTS)
                self.state[master] = self._state_of(num_steps, *moments)
        self.broadcast()


class _Partition:
    """Parameters of one group of ranks, each owned by one of them."""

    def __init__(self, params: Sequence[TrainedParam]) -> None:
        self._params = list(params)
        self._group = self._params[0].group if self._params else None
        size = 1 if self._group is None else self._group.size()
        self._owners = assign_owners([p.param.numel() for p in self._params], size)

    def owned(self) -> list[TrainedParam]:
        """Return the parameters that this rank owns."""
        rank = 0 if self._group is None else self._group.rank()
        return [p for p, owner in zip(self._params, self._owners, strict=True) if owner == rank]

    def broadcast(self) -> None:
        """Send each parameter from its owner to the other ranks."""
        if self._group is None or self._group.size() == 1:
            return
        by_owner: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for p, owner in zip(self._params, self._owners, strict=True):
            by_owner[owner, p.param.dtype].append(p.param.data)
        for (owner, _), tensors in by_owner.items():
            for bucket in buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.broadcast(
                    flat, src=dist.get_global_rank(self._group, owner), group=self._group
                )
                for tensor, piece in zip(
                    bucket, flat.split([t.numel() for t in bucket]), strict=True
                ):
                    tensor.copy_(piece.view_as(tensor))


def _master(p: TrainedParam) -> torch.Tensor:
    return p.param if p.param.dtype is torch.float32 else p.param.detach().float()
