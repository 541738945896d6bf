"""Runs packs of a batch through one rank's model, and scores batches. Changes no weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from orchestrator.protocol.messages import LossSpec
from trainer_node.adapters.lora import Mode
from trainer_node.model.model import Model
from trainer_node.training import gae, passes, served_weights
from trainer_node.training.batch import Batch, check_fits
from trainer_node.training.memory_model import RankMemory
from trainer_node.training.packing import Packs

DEFAULT_TOKENS = 4096
"""Tokens of a pack on a CPU: a larger pack exceeds its caches."""


class Scorer:
    """One rank's model, and the size of its packs. Every method is a collective."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.first_forward_s = 0.0
        """Time of the first forward pass since it was set to 0, on the monotonic clock."""
        self.micro_batch_tokens = DEFAULT_TOKENS
        """Largest number of tokens in a pack; `pack_size` sets it."""
        self.memory: tuple[RankMemory, ...] = ()
        """What fits on each rank; `pack_size` sets it. Empty: not measured, as on a CPU."""
        self.bundle_tokens: int | None = None
        """Largest load of a bundle of sequences longer than a pack; `pack_size` sets it. None: not
        measured."""
        self.forced_share: float | None = None
        """Share of the layers that every pack recomputes, whatever fits. None: by what fits."""
        self.forced_offload = False
        """With `forced_share`: whether the inputs of these layers are in host memory meanwhile."""

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        *,
        allowed_token_ids: Sequence[int] | None = None,
        mode: Mode | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy, at the batch's temperatures, of every token that its loss mask
        marks.

        Returns [T] each, fp32 on the CPU, on every rank; 0 where the mask is 0. Gradients, weights
        and optimizer are untouched.

        Args:
            mode: how the model runs; None: as it learns, without dropout.

        Raises:
            TooLong: a sequence does not fit into memory. Nothing has run.
        """
        if mode == "base":
            self.model.need_adapters("a forward pass of the base model")
        of_pack = partial(passes.scores, self.model, self._allowed(allowed_token_ids))
        logprobs_T, entropy_T = self._scored(batch, of_pack, mode=mode, rows=2)
        return logprobs_T, entropy_T

    @torch.no_grad()
    def valued(self, batch: Batch, loss: LossSpec) -> Batch:
        """Return the batch with the present values, and the advantages and returns that they give.
        The same batch if the loss has no value head, or the batch has them.

        Raises:
            TooLong: as `forward`.
        """
        if loss.value is None or batch.returns_T is not None:
            return batch
        of_pack = partial(passes.values, self.model)
        (values_T,) = self._scored(replace(batch, scored_T=None), of_pack, mode=None, rows=1)
        advantages_T, returns_T = gae.advantages(batch, values_T, loss.value, loss.kl)
        return replace(batch, values_T=values_T, advantages_T=advantages_T, returns_T=returns_T)

    def _scored(
        self, batch: Batch, of_pack: Callable[..., Any], *, mode: Mode | None, rows: int
    ) -> torch.Tensor:
        """What a forward pass says of each marked token, [`rows`, T]."""
        longest = min((rank.longest_scored for rank in self.memory), default=None)
        check_fits(batch, longest, "without a backward pass")
        packs = self._cut(batch)
        with self._scoring(mode):
            found = self._run(packs, of_pack, forward_only=True)
        return passes.gather_scores(self.model, batch, packs, found, rows=rows)

    def _scoring(self, mode: Mode | None) -> contextlib.AbstractContextManager[None]:
        """What a forward pass without a backward pass computes with."""
        is_served = self.model.config.numerics != "adapters"
        mode = mode or ("served" if is_served else "adapters")
        if mode != "served":
            return self.model.adapters.switched(mode)
        served = served_weights.of(self.model)
        return served.all() if is_served else served.one_by_one()

    def share_of(self, tokens: int) -> float:
        """Share of the layers that a pack of this many tokens recomputes in its backward pass; the
        same on every rank."""
        if self.forced_share is not None:
            return self.forced_share
        if self.model.config.recompute == "auto":
            return max((rank.share(tokens) for rank in self.memory), default=0.0)
        return float(self.model.config.recompute in ("full", "offload"))

    def offloads(self, tokens: int) -> bool:
        """Whether the layers' inputs of a pack of this many tokens are in host memory until its
        backward pass; the same on every rank."""
        if self.forced_share is not None:
            return self.forced_offload
        if self.model.config.recompute == "auto":
            return any(rank.offloads(tokens) for rank in self.memory)
        return self.model.config.recompute == "offload"

    def recomputed_share(self, packs: Packs) -> float:
        """Share of the layers that run again, over the tokens of this rank's packs."""
        pairs = zip(packs.lengths, packs.loads, strict=True)
        return sum(n * self.share_of(load) for n, load in pairs) / sum(packs.lengths)

    @property
    def longest_trained(self) -> int | None:
        """Tokens of the longest sequence that fits; None: not measured."""
        return min((rank.longest_trained for rank in self.memory), default=None)

    @property
    def longest_way(self) -> str:
        """How that sequence would run, for a message."""
        longest, way = self.longest_trained, self.model.config.recompute.replace("auto", "full")
        if longest is not None and longest > min(r.longest_without_offload for r in self.memory):
            is_full = longest == self.memory[0].host_tokens
            return "with recompute = 'offload'" + " in this host's memory" * is_full
        return f"with recompute = {way!r}"

    def _cut(self, batch: Batch) -> Packs:
        budget = self.micro_batch_tokens
        most = None
        if self.forced_share is None:  # a probe's tokens are not text
            most = self.bundle_tokens or budget
        packs = passes.cut(self.model, batch, budget=budget, most=most)
        if packs.num_shared and self._must_not_share(batch, packs):
            packs = passes.cut(self.model, batch, budget=budget, most=None)
        return packs

    def _must_not_share(self, batch: Batch, packs: Packs) -> bool:
        """Whether the batch must be cut without sharing prefixes.

        Packs that share prefixes have equal length and load, and may not fit although each would by
        itself. In a pipeline that replays routing, layers that run again would take another pack's
        experts. `check` has ruled both out for packs that compute each sequence.
        """
        parallel = self.model.config.parallel
        if batch.routed_experts_T is not None and parallel.pipeline > 1:
            return any(map(self.share_of, packs.loads))
        fits = max(self.micro_batch_tokens, self.bundle_tokens or 0, *batch.lengths)
        return bool(self.memory) and max(packs.loads) >= fits + parallel.tensor  # rounded up to it

    def _run(
        self,
        packs: Packs,
        of_pack: Callable[..., Any],
        *,
        first_row: int = 0,
        forward_only: bool = False,
    ) -> list[Any]:
        return passes.run(
            self.model,
            packs,
            of_pack,
            first_row=first_row,
            on_pack=self._note_first_forward,
            share_of=None if forward_only else self.share_of,
            offloads=self.offloads,
        )

    def _note_first_forward(self) -> None:
        self.first_forward_s = self.first_forward_s or time.monotonic()

    def _allowed(self, ids: Sequence[int] | None) -> torch.Tensor | None:
        return None if ids is None else torch.tensor(sorted(set(ids)), device=self.model.device)
