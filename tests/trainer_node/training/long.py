"""One rank of a check of a long sequence: log-probs and gradients are those of transformers, and
recomputation changes no bit.

... -m tests.trainer_node.training.long OUT MODEL LENGTH HOW_MANY_HAVE_LOSS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from orchestrator.protocol.messages import LossSpec
from tests.numerics import chain_error_bound, decoder_roundings
from tests.trainer_node.tiny import VOCAB, hf_model
from tests.trainer_node.training.operations import take_gradients
from tests.trainer_node.worker import make_trainer
from trainer_node.training.batch import Batch

LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def long_batch(length: int, loss_tokens: int) -> Batch:
    """One sequence, with loss on its last tokens."""
    generator = torch.Generator().manual_seed(5)
    mask_T = torch.zeros(length)
    mask_T[-loss_tokens:] = 1.0
    return Batch(
        tokens_T=torch.randint(VOCAB, (length,), generator=generator),
        loss_mask_T=mask_T,
        advantages_T=mask_T,
        sampler_logprobs_T=torch.zeros(length),
        lengths=(length,),
    )


def by_transformers(
    model: Path, batch: Batch, *, with_gradients: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the tokens with loss, and the gradients of their mean in two linears."""
    hf, ids_T = hf_model(model), batch.tokens_T
    hf.requires_grad_(requires_grad=False)
    for name in LINEARS if with_gradients else ():
        hf.get_submodule(name).weight.requires_grad_()
    kept = int(batch.loss_mask_T.sum())
    logits_NV = hf(input_ids=ids_T[None], logits_to_keep=kept + 1, use_cache=False).logits[0, :-1]
    logp_N = logits_NV.log_softmax(-1).gather(-1, ids_T[-kept:, None])[:, 0]
    if not with_gradients:
        return logp_N, {}
    (-logp_N.mean()).backward()
    return logp_N.detach(), {name: hf.get_submodule(name).weight.grad for name in LINEARS}


def check_gradients(
    ours: dict[str, torch.Tensor],
    lora_A: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    *,
    scale: float,
    relative: float,
) -> None:
    """B's gradient at B = 0 is scale * dW @ A^T."""
    for name, gradient_OI in theirs.items():
        wanted_OR = scale * gradient_OI @ lora_A[name].T
        difference = (ours[f"{name}.B"] - wanted_OR).abs().max()
        assert difference <= relative * wanted_OR.abs().max(), (name, difference)


def main() -> None:
    """Score and train one sequence, kept and recomputed."""
    model, length, loss_tokens = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    batch = long_batch(length, loss_tokens)
    with_gradients = length <= 20_000
    trainer = make_trainer(model, 1, 1, 1, micro_batch_tokens=length)
    roundings = decoder_roundings(
        torch.float32,
        layers=2,
        hidden=64,
        inner=128,
        head_dim=16,
        attention=64,
        length=length,
        vocab=VOCAB,
    )
    with torch.set_grad_enabled(with_gradients):
        expected_N, theirs = by_transformers(model, batch, with_gradients=with_gradients)
    scores_T = trainer.forward(batch)[0]
    error = (scores_T[-loss_tokens:] - expected_N).abs().max()
    assert error <= chain_error_bound(torch.float32, roundings=roundings, magnitude=1.0), error
    results = []
    for share in (1.0, 0.0) if with_gradients else (1.0,):
        trainer.share_of = lambda _, share=share: share  # type: ignore[method-assign]
        metrics = trainer.forward_backward(batch, LossSpec(name="cross_entropy"))[0]
        results.append((metrics.loss, take_gradients(trainer)))
    for loss, gradients in results:
        assert loss == results[0][0] and all(
            torch.equal(g, results[0][1][n]) for n, g in gradients.items()
        )
    assert all(g.isfinite().all() for g in results[0][1].values())
    lora_A = {
        local.module: local.tensor.detach()
        for local in trainer.model.adapters.local_matrices()
        if local.matrix == "A"
    }
    relative = chain_error_bound(
        torch.float32, roundings=2 * roundings + loss_tokens, magnitude=1.0
    )
    check_gradients(results[0][1], lora_A, theirs, scale=trainer.model.scale, relative=relative)


if __name__ == "__main__":
    main()
