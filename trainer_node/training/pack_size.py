"""Measures what fits into the GPU's memory: pack size, longest sequence, what is recomputed.

    for a few sizes: a pass of made-up tokens on the real model -> peak bytes over what was held
        before
    -> `memory_model.RankMemory` -> the most tokens of a pack, the smallest number of all ranks

Passes that keep every activation, passes that recompute every layer, and forward passes have a
line each. If these do not hold the longest sequence that the model knows positions for, so have
passes that also move the layers' inputs to host memory.

The probes run at start-up, with every gradient allocated, as in all micro-batches of a step except
its first. They keep room for AdamW's moments, which do not exist yet. Gradients, sums and
generators are the same afterwards. The probes also load every kernel that the first job needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LossSpec, ValueSpec
from trainer_node.model import rng
from trainer_node.model.offload import free_bytes
from trainer_node.ranks import host_memory, objects
from trainer_node.training.batch import Batch
from trainer_node.training.memory_model import (
    LEAST_TOKENS,
    MOST_TOKENS,
    STEP,
    MemoryModel,
    RankMemory,
    choose,
    fit,
)
from trainer_node.training.trainer import Trainer

log = logging.getLogger("splice.trainer")

FIRST_PROBES = (LEAST_TOKENS, 1024, 3072)
SENDER_BYTES = 2 << 30
"""Ring that publications are sent from. It stays allocated between them."""
GATHER_BYTES = 1 << 30
"""Two chunks between the trainer's ranks, where there are several; they stay as well."""
CHANCE = 0.04
"""Fraction by which two measurements of one model on one GPU may differ; less than MARGIN."""
MARGIN = 0.06
"""Fraction of the GPU's memory kept for fragmentation, uneven experts and libraries' workspaces."""
SHARES = {"none": (0.0,), "selective": (0.0,), "full": (1.0,), "auto": (0.0, 1.0), "offload": ()}
"""Shares of the layers to recompute that are measured, for each value of `recompute`."""


def tokens_for(trainer: Trainer) -> int:
    """Return the pack size: the config's, or the measured one. A measurement also sets the
    trainer's `memory` and `bundle_tokens`. A collective.

    Raises:
        ConfigError: nothing fits. Says how much memory is missing.
    """
    config = trainer.model.config
    if trainer.model.device.type == "cuda" and "auto" in (
        config.micro_batch_tokens,
        config.recompute,
    ):
        trainer.memory = _measured(trainer)
        trainer.bundle_tokens = min(rank.bundle_tokens for rank in trainer.memory)
        if config.micro_batch_tokens == "auto":
            return min(rank.pack_tokens for rank in trainer.memory)
    wanted = config.micro_batch_tokens
    return trainer.micro_batch_tokens if wanted == "auto" else wanted


def remember(trainer: Trainer, meta: Mapping[str, Any]) -> None:
    """Take a checkpoint's sizes where the config sets none and the measured ones are close.

    Other packs add up in another order, so a resumed step would have other bits.
    """
    names = ["bundle_tokens"]
    if trainer.model.config.micro_batch_tokens == "auto":
        names.append("micro_batch_tokens")
    for name in names:
        saved, own = meta.get(name), getattr(trainer, name)
        if saved and own and abs(saved - own) <= CHANCE * saved:
            setattr(trainer, name, saved)


def _measured(trainer: Trainer) -> tuple[RankMemory, ...]:
    """All ranks' memory."""
    recompute = trainer.model.config.recompute
    shares = SHARES[recompute]
    probe(trainer, LEAST_TOKENS, share=max(shares, default=1.0))  # libraries take their workspaces
    models = {share: _model(trainer, partial(probe, trainer, share=share)) for share in shares}
    own = RankMemory(
        kept=models.get(0.0),
        recomputed=models.get(1.0),
        scored=_model(trainer, partial(probe, trainer, forward_only=True)),
        room_bytes=_room(trainer),
        margin_bytes=_margin_bytes(),
    )
    if recompute == "offload" or (
        recompute == "auto"
        and _same_on_all(own.longest_trained, trainer) < trainer.model.max_length
    ):
        own = _with_offload(trainer, own)
    gathered = objects.all_gather(asdict(own), group=trainer.model.control_group)
    everyones = tuple(RankMemory.of(fields) for fields in gathered)
    log.info(
        "memory model: %s with every activation kept, %s with every layer recomputed, %s with "
        "their inputs on the host, %s forward only; room %.2f GB -> packs of %d tokens; the "
        "longest sequence to train on has %d, to score %d",
        own.kept,
        own.recomputed,
        own.offloaded,
        own.scored,
        own.room_bytes / 1e9,
        *(min(getattr(rank, name) for rank in everyones) for name in _LIMITS),
    )
    if not min(rank.pack_tokens for rank in everyones):
        ways = (own.kept, own.recomputed, own.offloaded)
        smallest = min(way.peak_bytes(LEAST_TOKENS) for way in ways if way is not None)
        raise ConfigError(
            f"no memory for a pack of {LEAST_TOKENS} tokens: it takes "
            f"{smallest / 1e9:.1f} GB and a rank has {own.room_bytes / 1e9:.1f} GB left; use "
            "recompute = 'auto', more parallel.tensor, expert or pipeline"
        )
    return everyones


_LIMITS = ("pack_tokens", "longest_trained", "longest_scored")


def _with_offload(trainer: Trainer, own: RankMemory) -> RankMemory:
    """The rank's memory, with passes that move the layers' inputs to host memory.

    Raises:
        ConfigError: there is no host memory for this only way. On every rank alike.
    """
    inputs, run = trainer.model.layer_inputs, partial(probe, trainer, share=1.0, offload=True)
    before, host_tokens = inputs.moved_bytes, 0
    room = host_memory.room_bytes(pinned=trainer.model.device.type == "cuda")
    if _same_on_all(room, trainer):
        run(LEAST_TOKENS)
        per_token = (inputs.moved_bytes - before) / LEAST_TOKENS
        host_tokens = _same_on_all(int(room / max(1.0, per_token)), trainer)
    if host_tokens >= FIRST_PROBES[-1]:
        line = _model(trainer, run, most=host_tokens)
        torch._C._host_emptyCache()  # torch (2.11) keeps pinned memory, and has no public name
        return replace(own, offloaded=line, host_tokens=host_tokens)
    if trainer.model.config.recompute == "offload":
        raise ConfigError(
            f"recompute = 'offload' needs pinned host memory for {FIRST_PROBES[-1]} tokens, and "
            f"a rank may take {room / 1e9:.1f} GB, which hold {host_tokens}; use recompute = 'auto'"
        )
    return own


def _model(trainer: Trainer, run: Callable[[int], None], *, most: int = MOST_TOKENS) -> MemoryModel:
    """The line through the peaks of passes of a few sizes. A pass that might not fit is left out.

    Args:
        run: makes a pass over this many tokens.
        most: tokens that fit elsewhere.

    Raises:
        ConfigError: there is no room for any. On every rank alike.
    """
    samples: list[tuple[int, int]] = []
    for tokens in FIRST_PROBES:
        # A peak grows with the tokens at most.
        bound = samples[-1][1] * tokens / samples[-1][0] if samples else 0.0
        if not _same_on_all(int(bound <= _room(trainer)), trainer):
            break
        samples.append((tokens, _peak(trainer, tokens, run)))
    if not samples:
        free_gb, missing_gb = free_bytes() / 1e9, -_room(trainer) / 1e9
        raise ConfigError(
            f"no memory for a pack: {free_gb:.1f} GB of the GPU are free, and gradients, moments "
            f"and publications take {missing_gb:.1f} GB more than that; look for other processes "
            "on the GPU (nvidia-smi), or use more parallel.tensor, expert or pipeline"
        )
    if len(samples) == 1:
        return MemoryModel(fixed_bytes=0.0, bytes_per_token=samples[0][1] / samples[0][0])
    # Another one near the middle of what these promise: small packs say little about the slope.
    promised = min(most, choose(fit(samples[-2:]), room_bytes=_room(trainer)))
    far = _same_on_all(promised, trainer) // 2 // STEP * STEP
    if far > samples[-1][0]:
        samples.append((far, _peak(trainer, far, run)))
    return fit(samples[-2:])


def _same_on_all(value: int, trainer: Trainer) -> int:
    least = torch.tensor(value)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=trainer.model.control_group)
    return int(least)


def _peak(trainer: Trainer, tokens: int, run: Callable[[int], None]) -> int:
    """Most bytes allocated during a pass, over what is held before it."""
    for p in trainer.model.params:
        p.grad  # noqa: B018  (made where there is none)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        run(tokens)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"measuring how large a pack may be, {tokens} tokens did not fit on the GPU; use "
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


def probe(
    trainer: Trainer,
    tokens: int,
    *,
    share: float = 0.0,
    offload: bool = False,
    forward_only: bool = False,
) -> None:
    """Run a forward and backward pass over packs of made-up tokens with loss. A collective.

    There are enough packs to fill the pipeline. The pass leaves no trace.

    Args:
        share: of the layers, to recompute.
        offload: whether their inputs go to host memory.
        forward_only: without the backward pass.

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
        rewards_T=mask_T,
    )
    value = ValueSpec() if model.config.value_head else None
    generators, budget = rng.state(model.device), trainer.micro_batch_tokens
    memory, trainer.memory = trainer.memory, ()
    trainer.micro_batch_tokens, trainer.forced_share = tokens, share
    trainer.forced_offload = offload
    try:
        if forward_only:
            trainer.forward(batch)
        else:
            trainer.forward_backward(batch, LossSpec(name="importance_sampling", value=value))
    finally:
        trainer.micro_batch_tokens, trainer.forced_share = budget, None
        trainer.forced_offload = False
        trainer.memory = memory
        trainer.drop_pending()
        rng.restore(generators, model.device)
