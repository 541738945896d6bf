"""Adapters that KL terms compare the policy with. This rank keeps its pieces between batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from orchestrator.protocol.messages import LossSpec
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import read_on_all_ranks
from trainer_node.training.batch import Batch

MAX_REFERENCES = 4
"""Number of adapters to keep. The least recently used one goes first."""


class References:
    """Reference adapters of one model, by folder."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pieces: dict[Path, list[torch.Tensor]] = {}

    def read(self, folder: Path) -> None:
        """Keep a PEFT adapter for `in_place`. A folder is read once while it is among the last
        `MAX_REFERENCES`.

        Raises:
            ConfigError: the trainer has no adapters.
            AdapterError: on every rank, the adapter does not fit or is not whole; nothing changed.
        """
        if folder in self._pieces:
            self._pieces[folder] = self._pieces.pop(folder)
            return
        self._model.need_adapters(
            "a KL term with reference 'adapter' (send reference log-probs and use 'given')"
        )
        whole = read_on_all_ranks(self._model, folder)
        while len(self._pieces) >= MAX_REFERENCES:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[folder] = [torch.empty_like(p.param.data) for p in self._model.params]
        try:
            with self.in_place(str(folder)):
                self._model.adapters.load(whole)
        except BaseException:
            del self._pieces[folder]  # its memory was not completely written
            raise

    @contextlib.contextmanager
    def in_place(self, folder: str | None) -> Iterator[None]:
        """Use an adapter that `read` kept (None: the present one) within the block. Nothing is
        copied."""
        params = self._model.params
        pieces = self._pieces[Path(folder)] if folder is not None else []
        present = [p.param.data for p in params] if pieces else []
        try:
            for p, piece in zip(params, pieces, strict=False):
                p.param.data = piece
            yield
        finally:
            for p, data in zip(params, present, strict=False):
                p.param.data = data

    def compared(self, batch: Batch, loss: LossSpec, forward: Callable[..., Any]) -> Batch:
        """Return the batch with the log-probs of its KL term's reference.

        Args:
            forward: of a `Scorer`.
        """
        if loss.kl is None or not loss.needs_reference_passes:
            return batch
        with self.in_place(loss.kl.adapter_dir):
            reference_T, _ = forward(
                replace(batch, scored_T=None),
                allowed_token_ids=loss.allowed_token_ids,
                mode="base" if loss.kl.reference == "base" else None,
            )
        return replace(batch, reference_logprobs_T=reference_T)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the kept adapters."""
        for pieces in self._pieces.values():
            yield from pieces
