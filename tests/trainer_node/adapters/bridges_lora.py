"""One rank of a check of our adapters against Megatron-Bridge's own LoRA.

    ... -m tests.trainer_node.adapters.bridges_lora OUT MODEL

Bridge wraps Megatron's linears: one A for each fused linear, and one B with the fused linear's
rows. Rank 0 leaves OUT: the log-probs and the loss of both, and both adapters' files (`theirs`,
`ours`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from orchestrator.protocol.messages import LossSpec
from tests.trainer_node.data import make_batch
from tests.trainer_node.worker import make_trainer
from trainer_node.state import checkpoint
from trainer_node.training.trainer import Trainer

LOSS = LossSpec(name="cross_entropy")
RANK, ALPHA = 4, 8


def with_bridges_lora(trainer: Trainer, out: Path) -> None:
    """Put Bridge's adapters on the model, random, and write them as Bridge does."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    utils.HAVE_TE = False  # the CPU's linears are Megatron's own, under TransformerEngine's names
    model = trainer.model
    for module in model.modules[0].modules():
        if hasattr(module, "return_layernorm_output"):
            module.return_layernorm_output = True  # LoRA sets it only on TransformerEngine's
    lora = LoRA(dim=RANK, alpha=ALPHA)
    lora(model.modules)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.modules[0].named_parameters():
            if ".adapter." in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    auto = AutoBridge.from_hf_config(model.hf_config)
    auto.save_hf_adapter(model.modules, out, lora, str(model.config.model), show_progress=False)


def numbers(trainer: Trainer) -> dict[str, object]:
    """Log-probs of the batch's tokens with loss, and their summed loss."""
    batch = make_batch()
    log_probs_T, _ = trainer.forward(batch)
    sums, _ = trainer.forward_backward(batch, LOSS)
    return {"log_probs_T": log_probs_T, "loss": sums.loss}


def main() -> None:
    """Bridge's adapters on a model that trains whole, then the same ones as ours."""
    out, model = Path(sys.argv[1]), Path(sys.argv[2])
    trainer = make_trainer(model, 1, 1, 1, finetuning_type="full")
    plain = numbers(trainer)
    trainer.drop_pending()
    with_bridges_lora(trainer, out / "theirs")
    theirs = numbers(trainer)
    trainer.model.close()
    trainer = make_trainer(model, 1, 1, 1)
    trainer.load_adapter(out / "theirs")
    ours = numbers(trainer)
    checkpoint.save_adapter(trainer.model, out / "ours")
    trainer.model.close()
    torch.save({"plain": plain, "theirs": theirs, "ours": ours}, out / "numbers.pt")


if __name__ == "__main__":
    main()
