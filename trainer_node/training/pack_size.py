"""Finds the pack size for which the GPU's memory suffices, with a measured memory model.

    for a few sizes: a forward and backward pass of made-up tokens on the real model -> peak bytes
        over what was held before
    -> peak(tokens) = fixed + per_token * tokens -> the most tokens for which it fits -> the
    smallest number of all ranks

The probes run at start-up, with every gradient allocated, as in all micro-batches of a step except
its first. They keep room for AdamW's moments, which do not exist yet. Gradients, sums and
generators are the same afterwards. The probes also load every kernel that the first job needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LossSpec
from trainer_node.model import rng
from trainer_node.model.offload import free_bytes
from trainer_node.training.batch import Batch
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")

LEAST_TOKENS, MOST_TOKENS, STEP = 256, 65_536, 256
FIRST_PROBES = (1024, 3072)
SENDER_BYTES = 2 << 30
"""Ring that publications are sent from. It stays allocated between them."""
GATHER_BYTES = 1 << 30
"""Two chunks between the trainer's ranks, where there are several; they stay as well."""
CHANCE = 0.04
"""Fraction by which two measurements of one model on one GPU may differ; less than MARGIN."""
MARGIN = 0.06
"""Fraction of the GPU's memory kept for fragmentation, uneven experts and libraries' workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Peak bytes of a forward and backward pass, over what is held between them."""

    fixed_bytes: float
    bytes_per_token: float

    def peak_bytes(self, tokens: int) -> float:
        """Return the peak bytes of a pack with this many tokens."""
        return self.fixed_bytes + self.bytes_per_token * tokens


def fit(samples: Sequence[tuple[int, int]]) -> MemoryModel:
    """Fit a line through (tokens, peak bytes) by least squares.

    If the fixed part is negative, or the peaks do not grow with the tokens, the fixed part is 0 and
    the slope covers every sample. A tiny model's peaks are mostly workspaces.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if len({tokens for tokens, _ in samples}) < 2:
        raise ValueError(f"a memory model needs probes of two sizes at least, got {list(samples)}")
    mean_tokens = sum(t for t, _ in samples) / len(samples)
    mean_bytes = sum(b for _, b in samples) / len(samples)
    slope = sum((t - mean_tokens) * (b - mean_bytes) for t, b in samples) / sum(
        (t - mean_tokens) ** 2 for t, _ in samples
    )
    fixed = mean_bytes - slope * mean_tokens
    if slope <= 0 or fixed < 0:
        return MemoryModel(fixed_bytes=0.0, bytes_per_token=max(b / t for t, b in samples))
    return MemoryModel(fixed_bytes=fixed, bytes_per_token=slope)


def choose(model: MemoryModel, *, room_bytes: int) -> int:
    """The most tokens that fit, a multiple of `STEP`, at most `MOST_TOKENS`; 0 where not even
    `LEAST_TOKENS` do."""
    tokens = min(longest(model, room_bytes=room_bytes), MOST_TOKENS) // STEP * STEP
    return tokens if tokens >= LEAST_TOKENS else 0


def longest(model: MemoryModel, *, room_bytes: float) -> int:
    """Tokens of the longest sequence that fits, in its own pack."""
    return max(0, math.floor((room_bytes - model.fixed_bytes) / model.bytes_per_token))


def tokens_for(trainer: Trainer) -> int:
    """Return the config's `micro_batch_tokens`, or the measured number. A measurement also sets the
    trainer's `longest_sequence`. A collective.

    Raises:
        ConfigError: nothing fits. Says how much memory is missing.
    """
    wanted = trainer.model.config.micro_batch_tokens
    if wanted != "auto":
        return wanted
    return trainer.micro_batch_tokens if trainer.model.device.type == "cpu" else _measured(trainer)


def remember(trainer: Trainer, saved: int | None) -> None:
    """Take a checkpoint's pack size if the config sets none and the measured one is close.

    Other packs add up in another order, so a resumed step would have other bits.
    """
    is_open = trainer.model.config.micro_batch_tokens == "auto"
    if saved and is_open and abs(saved - trainer.micro_batch_tokens) <= CHANCE * saved:
        trainer.micro_batch_tokens = saved


def _measured(trainer: Trainer) -> int:
    probe(trainer, LEAST_TOKENS)  # libraries take their workspaces for good
    samples = [(tokens, _peak(trainer, tokens)) for tokens in FIRST_PROBES]
    # A third one near the middle of what these promise: small packs say little about the slope.
    far = _same_on_all(choose(fit(samples), room_bytes=_room(trainer)), trainer) // 2 // STEP * STEP
    if far > FIRST_PROBES[-1]:
        samples = [samples[-1], (far, _peak(trainer, far))]
    model, room = fit(samples), _room(trainer)
    tokens = _same_on_all(choose(model, room_bytes=room), trainer)
    # The margin is there for a sequence that somebody wants to train on.
    most = _same_on_all(longest(model, room_bytes=room + _margin_bytes()), trainer)
    trainer.longest_sequence = most
    log.info(
        "memory model: %.2f GB + %.1f KB a token, from %s; room %.2f GB -> "
        "micro_batch_tokens = %d; the longest sequence that fits has %d",
        model.fixed_bytes / 1e9,
        model.bytes_per_token / 1e3,
        [(t, round(b / 1e9, 2)) for t, b in samples],
        room / 1e9,
        tokens,
        most,
    )
    if tokens == 0:
        raise ConfigError(
            f"no memory for a pack of {LEAST_TOKENS} tokens: it takes "
            f"{model.peak_bytes(LEAST_TOKENS) / 1e9:.1f} GB and a rank has "
            f"{room / 1e9:.1f} GB left; use recompute = 'full', more parallel.tensor, expert or "
            "pipeline, or set micro_batch_tokens"
        )
    return tokens


def _same_on_all(tokens: int, trainer: Trainer) -> int:
    least = torch.tensor(tokens)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=trainer.model.control_group)
    return int(least)


def _peak(trainer: Trainer, tokens: int) -> int:
    """Most bytes allocated during a probe, over what is held before it."""
    for p in trainer.model.params:
        p.grad  # noqa: B018  (made where there is none)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        probe(trainer, tokens)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"measuring how large a pack may be, {tokens} tokens did not fit on the GPU; set "
            "micro_batch_tokens to fewer, or use "
            "recompute = 'full' or more parallel.tensor, expert or pipeline"
        ) from error
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    torch.cuda.empty_cache()
    return peak


def _room(trainer: Trainer) -> int:
    """Bytes that a pass may take in addition to gradients and moments; no probe is allocated."""
    grads = sum(4 * p.param.numel() for p in trainer.model.params)
    moments = sum(
        8 * p.param.numel() for p, found in trainer.optimizer.tensors() if len(found) == 1
    )
    return int(free_bytes() - grads - moments - kept_bytes())


def kept_bytes() -> float:
    """Bytes of the GPU that no pack may take: for publications and the margin."""
    sender = SENDER_BYTES + (GATHER_BYTES if dist.get_world_size() > 1 else 0)
    return sender + _margin_bytes()


def _margin_bytes() -> float:
    return MARGIN * torch.cuda.mem_get_info()[1]


def probe(trainer: Trainer, tokens: int) -> None:
    """Run a forward and backward pass over packs of made-up tokens with loss. A collective.

    There are enough packs to fill the pipeline. The pass leaves no trace.

    Raises:
        RuntimeError: gradients are pending; the pass would drop them.
    """
    from megatron.core import parallel_state

    if trainer.pending.num_batches:
        raise RuntimeError("a probe needs the gradients for itself; drop what is pending first")
    model = trainer.model
    length = math.gcd(tokens, min(512, 1 << (model.max_length.bit_length() - 1)))
    num_packs = parallel_state.get_data_parallel_world_size() * model.config.parallel.pipeline
    total = num_packs * tokens
    ids_T = torch.arange(total) * 7919 % model.vocab_size
    mask_T = (torch.arange(total) % length != 0).float()
    batch = Batch(
        tokens_T=ids_T,
        loss_mask_T=mask_T,
        advantages_T=mask_T,
        sampler_logprobs_T=-math.log(model.vocab_size) * mask_T,
        lengths=(length,) * (total // length),
    )
    generators, budget = rng.state(model.device), trainer.micro_batch_tokens
    trainer.micro_batch_tokens = tokens
    try:
        trainer.forward_backward(batch, LossSpec(name="importance_sampling"))
    finally:
        trainer.micro_batch_tokens = budget
        trainer.drop_pending()
        rng.restore(generators, model.device)
