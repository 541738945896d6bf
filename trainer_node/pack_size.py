"""How many tokens go into a pack, where the config leaves it open: as many as the GPU's memory takes, by a measured memory model.

    for a few sizes: a forward and backward pass of made-up tokens on the real model -> peak bytes over what was held before
    -> peak(tokens) = fixed + per_token * tokens -> the most tokens for which it fits -> the smallest number of all ranks

The probes run at start-up, with every gradient allocated, as in all micro-batches of a step but its first; AdamW's moments are not there yet, and
room is kept for them. They leave nothing behind: gradients, sums and generators are as before. They also load every kernel that the first job needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LossSpec

if TYPE_CHECKING:
    from trainer_node.runtime import TrainerRuntime

log = logging.getLogger("splice.trainer")

DEFAULT_TOKENS = 4096
"""On a CPU, whose caches a larger pack leaves."""
LEAST_TOKENS, MOST_TOKENS, STEP = 256, 65_536, 256
FIRST_PROBES = (1024, 3072)
SENDER_BYTES = 2 << 30
"""The ring that publications are sent from stays allocated between them (docs/architecture.md, How the bytes travel)."""
GATHER_BYTES = 1 << 30
"""Two chunks between the trainer's ranks, where there are several; they stay as well."""
CHANCE = 0.04
"""Part by which two measurements of the same model on the same GPU may differ; less than MARGIN, which it eats from."""
MARGIN = 0.06
"""Of the GPU's memory: fragmentation, experts that get more than their share of tokens, workspaces of libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Peak bytes of a forward and backward pass, over what is held between them."""

    fixed_bytes: float
    bytes_per_token: float

    def peak_bytes(self, tokens: int) -> float:
        """Of a pack of so many tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens


def fit(samples: Sequence[tuple[int, int]]) -> MemoryModel:
    """Least squares through (tokens, peak bytes); where that gives a negative fixed part, or peaks that do not grow with the tokens (a tiny
    model's are mostly workspaces), the fixed part is 0 and the slope covers every sample.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if len({tokens for tokens, _ in samples}) < 2:
        raise ValueError(f"a memory model needs probes of two sizes at least, got {list(samples)}")
    mean_tokens = sum(t for t, _ in samples) / len(samples)
    mean_bytes = sum(b for _, b in samples) / len(samples)
    slope = sum((t - mean_tokens) * (b - mean_bytes) for t, b in samples) / sum((t - mean_tokens) ** 2 for t, _ in samples)
    fixed = mean_bytes - slope * mean_tokens
    if slope <= 0 or fixed < 0:
        return MemoryModel(fixed_bytes=0.0, bytes_per_token=max(b / t for t, b in samples))
    return MemoryModel(fixed_bytes=fixed, bytes_per_token=slope)


def choose(model: MemoryModel, *, room_bytes: int) -> int:
    """The most tokens that fit, a multiple of `STEP`, at most `MOST_TOKENS`; 0 where not even `LEAST_TOKENS` do."""
    tokens = math.floor((room_bytes - model.fixed_bytes) / model.bytes_per_token)
    tokens = min(tokens, MOST_TOKENS) // STEP * STEP
    return tokens if tokens >= LEAST_TOKENS else 0


def tokens_for(runtime: TrainerRuntime) -> int:
    """`micro_batch_tokens` of the config, or what the model and the memory say. A collective.

    Raises:
        ConfigError: nothing fits; says how much is missing.
    """
    wanted = runtime.config.micro_batch_tokens
    if wanted != "auto":
        return wanted
    return DEFAULT_TOKENS if runtime.device.type == "cpu" else _measured(runtime)


def remember(runtime: TrainerRuntime, saved: int | None) -> None:
    """Take the number that a checkpoint of this topology was written with, where the config leaves it open and what was measured here differs by
    chance only: other packs add up in another order, and a resumed step would not have the bits of the one it repeats."""
    if saved and runtime.config.micro_batch_tokens == "auto" and abs(saved - runtime.micro_batch_tokens) <= CHANCE * saved:
        runtime.micro_batch_tokens = saved


def _measured(runtime: TrainerRuntime) -> int:
    probe(runtime, LEAST_TOKENS)  # libraries take their workspaces for good
    samples = [(tokens, _peak(runtime, tokens)) for tokens in FIRST_PROBES]
    # A third one near the middle of what these promise: small packs say little about the slope.
    far = _same_on_all(choose(fit(samples), room_bytes=_room(runtime)), runtime) // 2 // STEP * STEP
    if far > FIRST_PROBES[-1]:
        samples = [samples[-1], (far, _peak(runtime, far))]
    model, room = fit(samples), _room(runtime)
    tokens = _same_on_all(choose(model, room_bytes=room), runtime)
    log.info(
        "memory model: %.2f GB + %.1f KB a token, from %s; room %.2f GB -> micro_batch_tokens = %d",
        model.fixed_bytes / 1e9, model.bytes_per_token / 1e3, [(t, round(b / 1e9, 2)) for t, b in samples], room / 1e9, tokens,
    )  # fmt: skip
    if tokens == 0:
        raise ConfigError(
            f"no memory for a pack of {LEAST_TOKENS} tokens: it takes {model.peak_bytes(LEAST_TOKENS) / 1e9:.1f} GB and a rank has "
            f"{room / 1e9:.1f} GB left; use recompute = 'full', more parallel.tensor, expert or pipeline, or set micro_batch_tokens"
        )
    return tokens


def _same_on_all(tokens: int, runtime: TrainerRuntime) -> int:
    least = torch.tensor(tokens)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=runtime.control_group)
    return int(least)


def _peak(runtime: TrainerRuntime, tokens: int) -> int:
    """Most bytes allocated during a probe, over what is held before it."""
    for p in runtime.params:
        p.grad  # noqa: B018  (made where there is none)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        probe(runtime, tokens)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"measuring how large a pack may be, {tokens} tokens did not fit on the GPU; set micro_batch_tokens to fewer, or use "
            "recompute = 'full' or more parallel.tensor, expert or pipeline"
        ) from error
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    torch.cuda.empty_cache()
    return peak


def _room(runtime: TrainerRuntime) -> int:
    """Bytes that a pass may take, gradients and moments aside. With nothing of a probe allocated."""
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    grads = sum(4 * p.param.numel() for p in runtime.params)
    moments = sum(8 * p.param.numel() for p, found in runtime.optimizer.tensors() if len(found) == 1)
    sender = SENDER_BYTES + (GATHER_BYTES if dist.get_world_size() > 1 else 0)
    return int(free - grads - moments - sender - MARGIN * total)


def probe(runtime: TrainerRuntime, tokens: int) -> None:
    """A forward and backward pass over packs of so many made-up tokens, all with loss, as many as fill the pipeline; nothing is left of it. A collective.

    Raises:
        RuntimeError: gradients are pending, which it would drop.
    """
    from megatron.core import parallel_state

    from trainer_node.batch import Batch
    from trainer_node.checkpoint import rng_state, set_rng_state

    if runtime.pending.num_batches:
        raise RuntimeError("a probe needs the gradients for itself; drop what is pending first")
    length = math.gcd(tokens, min(512, 1 << (runtime.max_length.bit_length() - 1)))
    num_packs = parallel_state.get_data_parallel_world_size() * runtime.config.parallel.pipeline
    total = num_packs * tokens
    ids_T = torch.arange(total) * 7919 % runtime.vocab_size
    mask_T = (torch.arange(total) % length != 0).float()
    batch = Batch(
        tokens_T=ids_T,
        loss_mask_T=mask_T,
        advantages_T=mask_T,
        sampler_logprobs_T=-math.log(runtime.vocab_size) * mask_T,
        lengths=(length,) * (total // length),
    )
    generators, budget = rng_state(runtime), runtime.micro_batch_tokens
    runtime.micro_batch_tokens = tokens
    try:
        runtime.forward_backward(batch, LossSpec(name="importance_sampling"))
    finally:
        runtime.micro_batch_tokens = budget
        runtime.drop_pending()
        set_rng_state(runtime, generators)
