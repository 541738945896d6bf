"""Compares an on-policy batch's log-probs with the sampler's, bit by bit, for `numerics = "exact"`.
Pure.

The bound of 0 holds for tokens that the trainer's present version sampled, with keys and values of
this version only (`Batch.versions_T`). After a swap within a sequence, earlier keys and values are
those of an older version. Such tokens are counted as mixed, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from orchestrator.protocol.messages import LossSpec
from trainer_node.training.batch import Batch
from trainer_node.training.registry import registered


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a comparison found."""

    version: int
    tokens: int
    """Tokens with loss."""
    exact: int
    """Of these, those that must be equal."""
    mixed: int
    """Of these, those with keys and values of several versions."""
    different: int
    """Of `exact`, those that are not equal."""
    largest: float
    """Their largest difference, in nats."""
    first: str
    """The first of them in words."""
    is_known: bool = True
    """Whether the batch says which versions sampled it."""

    def metrics(self) -> dict[str, float]:
        """`exact_gap_max` is only there if a token must be equal."""
        count = max(1, self.tokens)
        shares = {"exact_share": self.exact / count, "mixed_share": self.mixed / count}
        return shares | ({"exact_gap_max": self.largest} if self.exact else {})

    def warnings(self, model: Path) -> list[str]:
        """A warning for any bit that differs.

        Args:
            model: the checkpoint's folder.
        """
        if not self.is_known:
            return [
                "numerics = 'exact' compared nothing: the batch does not say which version sampled "
                "each token. Fill its buffer `versions`, as splice.batch_of does"
            ]
        if not self.different:
            return []
        return [
            f"numerics = 'exact' is broken: {self.different} of the {self.exact} tokens that "
            f"version {self.version} sampled have another log-prob in the trainer, by "
            f"{self.largest:.3e} nats at most. {self.first}. To find the operation that differs: "
            f"splice check {model} --bits --exact"
        ]


@dataclass(slots=True, kw_only=True)
class Sent:
    """Which version the trainer's weights are, until the next step."""

    is_exact: bool
    """Whether anything is compared."""
    version: int | None = None
    """The version that was sent or loaded last. None: other weights were put in its place."""
    compared: Compared | None = None
    """Of the last batch with this version's weights."""

    def compare(
        self, batch: Batch, loss: LossSpec, logprobs_T: torch.Tensor, *, steps: int
    ) -> None:
        """Compare a batch if its loss takes the sampler's log-probs.

        Args:
            steps: that the optimizer has taken since.
        """
        if self.is_exact and steps == 0 and registered(loss.name).takes_sampler:
            self.compared = compare(batch, logprobs_T, self.version)


def compare(batch: Batch, logprobs_T: torch.Tensor, version: int | None) -> Compared | None:
    """Compare the trainer's log-probs with the batch's.

    Args:
        version: whose weights the trainer has; None: those of no version.

    Returns:
        None: `version` is None.
    """
    if version is None:
        return None
    has_loss_T, sampler_T = batch.loss_mask_T != 0, batch.sampler_logprobs_T
    made_T = batch.versions_T
    if made_T is None:
        nothing = {"exact": 0, "mixed": 0, "different": 0, "largest": 0.0, "first": ""}
        tokens = int(has_loss_T.sum())
        return Compared(version=version, tokens=tokens, is_known=False, **nothing)  # type: ignore[arg-type]
    must_T = has_loss_T & (made_T == version)
    # Bits, so that not even a NaN passes.
    ours_T, theirs_T = (t.float().view(torch.int32) for t in (logprobs_T, sampler_T))
    bad_T = must_T & (ours_T != theirs_T)
    gap_T = (logprobs_T.double() - sampler_T.double()).abs()[bad_T]
    first = ""
    if len(gap_T):
        at = int(bad_T.nonzero()[0])
        ends = np.cumsum(batch.lengths)
        sequence = int(np.searchsorted(ends, at, side="right"))
        place = at - int(ends[sequence]) + batch.lengths[sequence]
        first = (
            f"The first is token {place} of sequence {sequence} (id {int(batch.tokens_T[at])}): "
            f"{float(sampler_T[at])!r} by the sampler, {float(logprobs_T[at])!r} by the trainer"
        )
    return Compared(
        version=version,
        tokens=int(has_loss_T.sum()),
        exact=int(must_T.sum()),
        mixed=int((has_loss_T & (made_T < 0)).sum()),
        different=len(gap_T),
        largest=float(gap_T.max()) if len(gap_T) else 0.0,
        first=first,
    )
