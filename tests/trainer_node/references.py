"""The same by transformers and PEFT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import PeftModel

from orchestrator.protocol.messages import ValueSpec
from tests.trainer_node.data import arrays
from tests.trainer_node.tiny import hf_model
from trainer_node.training.batch import Batch


def peft_merged(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    base = hf_model(model)
    return PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()


def reference_loss(model: torch.nn.Module, clip_low: float, clip_high: float) -> torch.Tensor:
    """The clipped surrogate written again, one sequence at a time."""
    batch, start, total, count = arrays(), 0, 0.0, 0
    for length in batch["sequence_lengths"]:
        rows = slice(start, start + length)
        ids = torch.from_numpy(batch["tokens"][rows].astype("int64"))
        logp = (
            model(input_ids=ids[None])
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(-1, ids[1:, None])[:, 0]
        )
        mask, adv, old = (
            torch.from_numpy(batch[k][rows])[1:]
            for k in ("loss_mask", "advantages", "sampler_logprobs")
        )
        ratio = (logp - old).exp()
        surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
        total, count, start = total - (surrogate * mask).sum(), count + mask.sum(), start + length
    return total / count


def paper_gae(
    batch: Batch, values_T: torch.Tensor, spec: ValueSpec
) -> tuple[np.ndarray, np.ndarray]:
    """GAE as the paper's sum (eq. 16), over the sampled tokens laid side by side: [rows] each."""
    advantages, returns = np.zeros(len(values_T)), np.zeros(len(values_T))
    ends = np.cumsum(batch.lengths)
    for end, length in zip(ends, batch.lengths, strict=True):
        rows = end - length + np.flatnonzero(batch.loss_mask_T.numpy()[end - length : end])
        r = batch.rewards_T.numpy()[rows].astype(np.float64)
        v = np.append(values_T.numpy()[rows].astype(np.float64), 0.0)
        delta = r + spec.gamma * v[1:] - v[:-1]
        for i in range(len(rows)):
            weights = (spec.gamma * spec.lam) ** np.arange(len(rows) - i)
            advantages[rows[i]] = (weights * delta[i:]).sum()
        returns[rows] = advantages[rows] + v[:-1]
    if spec.whiten:
        own = advantages[batch.loss_mask_T.numpy() != 0]
        advantages = (advantages - own.mean()) / (own.std() + 1e-8)
        advantages[batch.loss_mask_T.numpy() == 0] = 0
    return advantages, returns
