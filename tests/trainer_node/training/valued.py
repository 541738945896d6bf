"""One rank of a check of the value head: a job's steps, checkpoints, memory, adapters, prefixes.

    ... -m tests.trainer_node.training.valued OUT MODEL TENSOR PIPELINE EXPERT {lora,full}
    [FOLDER OF ANOTHER TOPOLOGY]

Leaves OUT/one_step, a checkpoint, and OUT/facts.json: names of the metrics.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import KlSpec, LossSpec, OptimParams, TrainLora, ValueSpec
from tests.trainer_node import bounds
from tests.trainer_node.gradients import take_gradients, trained_tensors
from tests.trainer_node.training.operations import close, part, same, state
from tests.trainer_node.training.parity import batches, set_head
from tests.trainer_node.training.sharing import tree_batch
from tests.trainer_node.worker import make_trainer
from trainer_node.files.generations import CheckpointError
from trainer_node.state import checkpoint, loading
from trainer_node.training import pack_size, steps
from trainer_node.training.batch import Batch
from trainer_node.training.trainer import Trainer

LOSS = LossSpec(name="ppo", value=ValueSpec(gamma=0.95, lam=0.9, clip=0.05))
OPTIM = OptimParams(lr=1e-2, value_lr=3e-2)
KEY = "value_head.weight"


def head_of(trainer: Trainer) -> torch.Tensor:
    """The whole head, on rank 0; empty elsewhere."""
    return trained_tensors(trainer).get(KEY, torch.zeros(0))


def check_first_values(trainer: Trainer, batch: Batch) -> None:
    """A new head predicts 0, explains nothing, and gives the model below it no gradient; its own is
    that of the returns.
    """
    valued = trainer.valued(batch, LOSS)
    assert valued.values_T.count_nonzero() == 0
    assert trainer.valued(valued, LOSS) is valued
    sums, _ = trainer.forward_backward(batch, LOSS)
    metrics, with_value = sums.metrics("tokens"), take_gradients(trainer)
    assert metrics["explained_variance"] == metrics["value_mean"] == 0.0
    assert metrics["value_loss"] > 0.1
    without = LOSS.model_copy(update={"value": None})
    trainer.forward_backward(valued, without)
    plain = take_gradients(trainer)
    if dist.get_rank() == 0:
        assert with_value.pop(KEY).abs().max() > 0 == plain.pop(KEY).abs().max()
        assert all(torch.equal(with_value[n], plain[n]) for n in plain)


def check_what_trains(trainer: Trainer, batch: Batch) -> None:
    """`trains_model` = False gives the model the policy's gradient only, and the head the same."""
    found = {}
    for name, more in (
        ("whole", {}),
        ("head", {"trains_model": False}),
        ("none", {"coefficient": 0.0}),
    ):
        value = LOSS.value.model_copy(update=more)
        trainer.forward_backward(batch, LOSS.model_copy(update={"value": value}))
        found[name] = take_gradients(trainer)
    if dist.get_rank() != 0:
        return
    heads = {name: gradients.pop(KEY) for name, gradients in found.items()}
    assert torch.equal(heads["whole"], heads["head"]) and heads["none"].count_nonzero() == 0
    close(found["head"], found["none"], relative=bounds.gradients())
    largest = max(t.abs().max() for t in found["none"].values())
    assert any(
        (found["whole"][n] - t).abs().max() > 1e-3 * largest for n, t in found["none"].items()
    )


def check_steps(trainer: Trainer, batch: Batch) -> list[torch.Tensor]:
    """All steps of a job have the values and advantages of the policy before the first, whitened
    over the whole batch. Returns the state after them.
    """
    checkpoint_of, ends = state(trainer), []
    message = TrainLora(
        tensors=(), output_dir="nowhere", loss=LOSS, optim=OPTIM, mini_batch_sequences=2, epochs=2
    )
    for composed in (True, False):
        with torch.no_grad():
            for p, start in zip(trainer.model.params, checkpoint_of, strict=False):
                p.param.copy_(start)
        trainer.optimizer.state.clear()
        if composed:
            valued = trainer.valued(batch, LOSS)
            pieces = [part(valued, 0, 2), part(valued, 2, 4), part(valued, 4, 5)] * 2
            metrics = [trainer.train_step(piece, LOSS, OPTIM) for piece in pieces]
            found = [m["value_clip_fraction"] for m in metrics]
            assert found[0] == 0 < max(found)
            assert metrics[0]["value_mean"] == metrics[3]["value_mean"]
        else:
            done = steps.train(trainer, batch, message, on_step=lambda *_: None)
            assert len(done) == 6
            totals = steps.total_metrics(done)
            tokens = 2 * batch.num_loss_tokens
            mean = sum(m["value_loss"] * m["tokens"] for m in metrics) / tokens
            assert totals["value_loss"] == pytest.approx(mean)
        ends.append(state(trainer))
    assert same(*ends)
    return ends[0]


def check_checkpoints(trainer: Trainer, batch: Batch, out: Path) -> None:
    """A step after a load has the bits of one without; the head is durable before the moments."""
    trainer.train_step(batch, LOSS, OPTIM)
    checkpoint.save(trainer, out / "one_step", version=1)
    saved, head = state(trainer), head_of(trainer)
    after = trainer.train_step(batch, LOSS, OPTIM)
    later = state(trainer)
    assert not same(saved, later)
    loading.load(trainer, out / "one_step")
    assert same(saved, state(trainer)) and torch.equal(head, head_of(trainer))
    again = trainer.train_step(batch, LOSS, OPTIM)
    assert all(again[k] == after[k] for k in ("loss", "grad_norm", "value_loss"))
    assert same(later, state(trainer))
    loading.load(trainer, out / "one_step", with_moments=False)
    assert torch.equal(head, head_of(trainer))
    if dist.get_rank() == 0:
        torch.save(head, out / "head.pt")


def check_memory(trainer: Trainer, batch: Batch) -> None:
    """The head and its gradient move to the host and back, and a probe leaves no trace."""
    before = state(trainer)
    pack_size.probe(trainer, 32)
    assert same(before, state(trainer)) and not trainer.pending.num_batches
    trainer.forward_backward(batch, LOSS)
    held = trainer.resident_bytes()
    assert trainer.offload() == held
    for p in trainer.model.params:
        assert p.param.untyped_storage().nbytes() == p.param.grad.untyped_storage().nbytes() == 0
    trainer.reload()
    assert trainer.resident_bytes() == held and same(before, state(trainer))
    trainer.drop_pending()


def check_adapters(trainer: Trainer, batch: Batch, out: Path) -> None:
    """Another adapter leaves the head as it is, and both train. An adapter's files have no head."""
    checkpoint.save_adapter(trainer.model, out / "adapter")
    head = head_of(trainer)
    trainer.load_adapter(out / "adapter")
    assert torch.equal(head, head_of(trainer))
    before = trainer.model.num_parameters
    trainer.use_adapter(trainer.plan_adapter(trainer.model.config.lora))
    assert trainer.model.num_parameters == before, "the head counts"
    trainer.use_adapter(trainer.plan_adapter(LoraConfig(rank=2, alpha=3, targets=("q_proj",))))
    assert torch.equal(head, head_of(trainer))
    trainer.train_step(batch, LOSS.model_copy(update={"kl": KlSpec()}), OPTIM)
    now = head_of(trainer)
    assert dist.get_rank() != 0 or not torch.equal(head, now)
    assert loading.load(trainer, out / "one_step").adapter_changed


def check_prefixes(trainer: Trainer) -> None:
    """Sequences that share tokens have the values and gradients of those that do not."""
    batch = tree_batch()
    noise_T = torch.randn(len(batch.tokens_T), generator=torch.Generator().manual_seed(2))
    batch = replace(batch, rewards_T=noise_T * batch.loss_mask_T, reference_logprobs_T=None)
    trainer.micro_batch_tokens = 4096
    assert trainer._cut(batch).num_shared > 0
    found = []
    for obstacle in (None, "a test"):
        trainer.model.sharing_obstacle = obstacle
        values_T = trainer.valued(batch, LOSS).values_T
        trainer.forward_backward(batch, LOSS)
        found.append((values_T, take_gradients(trainer)))
    trainer.model.sharing_obstacle = None
    (shared_T, ours), (apart_T, theirs) = found
    assert (shared_T - apart_T).abs().max() <= bounds.scores() < apart_T.abs().max()
    if dist.get_rank() == 0:
        close(ours, theirs, relative=bounds.gradients())


def check_without(model: Path, out: Path, batch: Batch, kind: str) -> None:
    """A trainer without a head refuses the loss and the checkpoint."""
    trainer = make_trainer(model, 1, 1, 1, finetuning_type=kind)
    with pytest.raises(ConfigError, match=r"needs a value head.*set trainer.value_head = true"):
        trainer.check(batch, LOSS)
    checkpoint.save(trainer, out / "without", version=1)
    with pytest.raises(CheckpointError, match="value_head True; this trainer has False"):
        loading.load(trainer, out / "one_step")
    trainer.model.close()


def main() -> None:
    """See the module's docstring."""
    out, model, kind, others = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[6], sys.argv[7:]
    sizes = [*map(int, sys.argv[3:6])]
    trainer = make_trainer(model, *sizes, finetuning_type=kind, value_head=True)
    batch, _ = batches(LOSS)
    for folder in others:
        loading.load(trainer, Path(folder) / "one_step")
        head = head_of(trainer)
        if dist.get_rank() == 0:
            assert torch.equal(head, torch.load(Path(folder) / "head.pt"))
        trainer.train_step(batch, LOSS, OPTIM)
    if not others:
        check_first_values(trainer, batch)
    set_head(trainer)
    check_what_trains(trainer, batch)
    check_steps(trainer, batch)
    check_checkpoints(trainer, batch, out)
    check_memory(trainer, batch)
    if kind == "lora":
        check_adapters(trainer, batch, out)
    check_prefixes(trainer)
    metrics = trainer.train_step(batch, LOSS, OPTIM)
    if dist.get_rank() == 0:
        (out / "facts.json").write_text(json.dumps(sorted(metrics)))
    alone = dist.get_world_size() == 1
    trainer.model.close()
    if alone:
        check_without(model, out, batch, kind)


if __name__ == "__main__":
    main()
