"""The same by transformers and PEFT."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel

from tests.trainer_node.data import arrays
from tests.trainer_node.tiny import hf_model


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
