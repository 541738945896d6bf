"""One rank of a check of packing and of what changes memory only: every budget and order, recomputation, compilation.

    torchrun ... -m tests.trainer_node.packing OUT MODEL TENSOR PIPELINE EXPERT SEQUENCE

SEQUENCE: 1 with sequence parallelism, 0 without. Leaves log-probs, losses and whole gradients of one sequence at a time in OUT/result.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_node.runtime
from orchestrator.protocol.messages import KlSpec, LossSpec
from tests.trainer_node.operations import close, part, take_gradients, whole_batch
from tests.trainer_node.worker import make_runtime, random_adapters
from trainer_node import checkpoint
from trainer_node.batch import Batch
from trainer_node.runtime import TrainerRuntime

SPECS = (
    LossSpec(name="dapo", kl=KlSpec(coefficient=0.3, reference="given"), entropy_bonus=0.05),
    LossSpec(name="gspo", clip_low=0.2, clip_high=0.2),
)
TOLERANCE = 2e-6
"""Of log-probs in nats, of losses relative to the sum, and of gradients to the largest: fp32, the same products in sums of other lengths."""


def in_order(batch: Batch, order: list[int]) -> Batch:
    """The same sequences in another order."""
    parts = [part(batch, i, i + 1) for i in order]
    names = [n for n in Batch.__slots__ if n.endswith("_T")]
    rows = {n: None if getattr(batch, n) is None else torch.cat([getattr(p, n) for p in parts]) for n in names}
    return Batch(**rows, lengths=tuple(batch.lengths[i] for i in order))


def set_budget(runtime: TrainerRuntime, tokens: int) -> None:
    """Another `micro_batch_tokens` from now on."""
    runtime.config = runtime.config.model_copy(update={"micro_batch_tokens": tokens})


def measure(runtime: TrainerRuntime, batch: Batch) -> dict:
    """Log-probs and entropy, and each loss's sum and gradients."""
    result = {"scores": torch.stack(runtime.forward(batch)), "losses": [], "gradients": []}
    for spec in SPECS:
        result["losses"].append(runtime.forward_backward(batch, spec).loss)
        result["gradients"].append(take_gradients(runtime))
    return result


def one_at_a_time(runtime: TrainerRuntime, batch: Batch) -> dict:
    """`measure` without packing: each sequence is a batch. The last has no loss."""
    parts = [part(batch, i, i + 1) for i in range(len(batch.lengths))]
    result = {"scores": torch.cat([torch.stack(runtime.forward(p)) for p in parts], dim=1), "losses": [], "gradients": []}
    for spec in SPECS:
        result["losses"].append(sum(runtime.forward_backward(p, spec).loss for p in parts[:-1]))
        result["gradients"].append(take_gradients(runtime))
    return result


def same(ours: dict, theirs: dict, *, tolerance: float = TOLERANCE) -> None:
    """Equal but for rounding."""
    assert (ours["scores"] - theirs["scores"]).abs().max() < tolerance
    for a, b in zip(ours["losses"], theirs["losses"], strict=True):
        assert abs(a - b) <= tolerance * max(1.0, abs(b)), (a, b)
    for a, b in zip(ours["gradients"], theirs["gradients"], strict=True):
        close(a, b, relative=tolerance)


def check_packs(runtime: TrainerRuntime, batch: Batch) -> dict:
    """Whatever the budget, and in whatever order the sequences come, it is one sequence at a time. Returns that."""
    alone = one_at_a_time(runtime, batch)
    for budget in (1, 25, 4096):
        set_budget(runtime, budget)
        assert max(m.num_sequences for m in runtime._cut(batch)) > 1
        same(measure(runtime, batch), alone)
    order = [3, 0, 4, 2, 1]
    shuffled = measure(runtime, in_order(batch, order))
    starts = [sum(batch.lengths[:i]) for i in range(len(order))]
    rows = torch.cat([torch.arange(starts[i], starts[i] + batch.lengths[i]) for i in order])
    same(shuffled | {"scores": torch.empty_like(alone["scores"]).index_copy_(1, rows, shuffled["scores"])}, alone)
    return alone


def check_neighbours(runtime: TrainerRuntime, batch: Batch) -> None:
    """Other tokens in one sequence of a pack leave its neighbours' log-probs as they are, to the bit."""
    set_budget(runtime, 4096)
    before = torch.stack(runtime.forward(batch))
    tokens_T = batch.tokens_T.clone()
    start, end = batch.lengths[0], sum(batch.lengths[:2])
    tokens_T[start:end] = tokens_T[start:end].flip(0)
    changed = Batch(**{n: getattr(batch, n) for n in Batch.__slots__} | {"tokens_T": tokens_T})
    after = torch.stack(runtime.forward(changed))
    differs_T = (before != after).any(dim=0)
    assert differs_T[start + 1 : end].any()
    # A MoE's experts take the tokens of all sequences in one product, whose rounding depends on how many there are.
    tolerance = TOLERANCE if runtime.hf_config.model_type == "qwen3_moe" else 0.0
    outside = torch.ones(len(tokens_T), dtype=torch.bool)
    outside[start:end] = False
    assert ((before - after).abs()[:, outside] <= tolerance).all()


def check_memory_modes(model: Path, batch: Batch, alone: dict) -> None:
    """Recomputed or compiled layers compute the same."""
    backend = trainer_node.runtime.COMPILE_BACKEND
    trainer_node.runtime.COMPILE_BACKEND = "aot_eager"
    try:
        for options in ({"recompute": "selective"}, {"recompute": "full"}, {"recompute": "full", "compile": True}):
            runtime = make_runtime(model, 1, 1, 1, **options)
            random_adapters(runtime)
            same(measure(runtime, batch), alone)
            runtime.close()
    finally:
        trainer_node.runtime.COMPILE_BACKEND = backend


def main() -> None:
    """See the module's docstring."""
    out, model, sequence = Path(sys.argv[1]), Path(sys.argv[2]), bool(int(sys.argv[6]))
    runtime = make_runtime(model, *map(int, sys.argv[3:6]), sequence=sequence)
    assert runtime.provider.sequence_parallel == (sequence and runtime.config.parallel.tensor > 1)
    random_adapters(runtime)
    batch = whole_batch()
    checkpoint.save_adapter(runtime, out / "random")
    result = check_packs(runtime, batch)
    check_neighbours(runtime, batch)
    if dist.get_rank() == 0:
        torch.save(result, out / "result.pt")
    world = dist.get_world_size()
    runtime.close()
    if world == 1:
        check_memory_modes(model, batch, result)


if __name__ == "__main__":
    main()
