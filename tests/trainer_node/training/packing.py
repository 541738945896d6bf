"""One rank of a check of packing and of what changes memory only: every budget and order,
recomputation, compilation.

    ... -m tests.trainer_node.training.packing OUT MODEL TENSOR PIPELINE EXPERT SEQUENCE [FLAG ...]

SEQUENCE: 1 with sequence parallelism, 0 without. Leaves log-probs, losses and whole gradients of
one sequence at a time in OUT/result.pt, of a MoE also log-probs with a routing of our own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from orchestrator.protocol.messages import KlSpec, LossSpec
from tests.trainer_node import bounds
from tests.trainer_node.training.operations import close, part, take_gradients, whole_batch
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.state import checkpoint
from trainer_node.training import pack_size, passes
from trainer_node.training.batch import Batch, BatchError
from trainer_node.training.memory_model import MemoryModel, RankMemory
from trainer_node.training.trainer import Trainer

SPECS = (
    LossSpec(name="dapo", kl=KlSpec(coefficient=0.3, reference="given"), entropy_bonus=0.05),
    LossSpec(name="gspo", clip_low=0.2, clip_high=0.2),
)


def in_order(batch: Batch, order: list[int]) -> Batch:
    """The same sequences in another order."""
    parts = [part(batch, i, i + 1) for i in order]
    names = [n for n in Batch.__slots__ if n.endswith("_T")]
    rows = {
        n: None if getattr(batch, n) is None else torch.cat([getattr(p, n) for p in parts])
        for n in names
    }
    return Batch(**rows, lengths=tuple(batch.lengths[i] for i in order))


def set_budget(trainer: Trainer, tokens: int) -> None:
    """Another `micro_batch_tokens` from now on."""
    trainer.micro_batch_tokens = tokens


def measure(trainer: Trainer, batch: Batch) -> dict:
    """Log-probs and entropy, and each loss's sum and gradients."""
    result = {"scores": torch.stack(trainer.forward(batch)), "losses": [], "gradients": []}
    for spec in SPECS:
        result["losses"].append(trainer.forward_backward(batch, spec)[0].loss)
        result["gradients"].append(take_gradients(trainer))
    return result


def one_at_a_time(trainer: Trainer, batch: Batch) -> dict:
    """`measure` without packing: each sequence is a batch. The last has no loss."""
    parts = [part(batch, i, i + 1) for i in range(len(batch.lengths))]
    result = {
        "scores": torch.cat([torch.stack(trainer.forward(p)) for p in parts], dim=1),
        "losses": [],
        "gradients": [],
    }
    for spec in SPECS:
        result["losses"].append(sum(trainer.forward_backward(p, spec)[0].loss for p in parts[:-1]))
        result["gradients"].append(take_gradients(trainer))
    return result


def same(ours: dict, theirs: dict) -> None:
    """Equal but for rounding."""
    assert (ours["scores"] - theirs["scores"]).abs().max() <= bounds.scores()
    for a, b in zip(ours["losses"], theirs["losses"], strict=True):
        assert abs(a - b) <= bounds.loss(count=whole_batch().num_loss_tokens), (a, b)
    for a, b in zip(ours["gradients"], theirs["gradients"], strict=True):
        close(a, b, relative=bounds.gradients())


def check_packs(trainer: Trainer, batch: Batch) -> dict:
    """Whatever the budget, and in whatever order the sequences come, it is one sequence at a time.
    Returns that.
    """
    alone = one_at_a_time(trainer, batch)
    for budget in (max(batch.lengths), 4096):
        set_budget(trainer, budget)
        assert max(m.num_sequences for m in trainer._cut(batch)) > 1
        same(measure(trainer, batch), alone)
    order = [3, 0, 4, 2, 1]
    shuffled = measure(trainer, in_order(batch, order))
    starts = [sum(batch.lengths[:i]) for i in range(len(order))]
    rows = torch.cat([torch.arange(starts[i], starts[i] + batch.lengths[i]) for i in order])
    same(
        shuffled
        | {"scores": torch.empty_like(alone["scores"]).index_copy_(1, rows, shuffled["scores"])},
        alone,
    )
    return alone


def check_neighbours(trainer: Trainer, batch: Batch) -> None:
    """Other tokens in one sequence of a pack leave its neighbours' log-probs as they are, to the
    bit.
    """
    set_budget(trainer, 4096)
    before = torch.stack(trainer.forward(batch))
    tokens_T = batch.tokens_T.clone()
    start, end = batch.lengths[0], sum(batch.lengths[:2])
    tokens_T[start:end] = tokens_T[start:end].flip(0)
    changed = Batch(**{n: getattr(batch, n) for n in Batch.__slots__} | {"tokens_T": tokens_T})
    after = torch.stack(trainer.forward(changed))
    differs_T = (before != after).any(dim=0)
    assert differs_T[start + 1 : end].any()
    # A MoE's experts take the tokens of all sequences in one product, whose rounding depends on how
    # many there are.
    tolerance = bounds.scores() if trainer.model.hf_config.model_type == "qwen3_moe" else 0.0
    outside = torch.ones(len(tokens_T), dtype=torch.bool)
    outside[start:end] = False
    assert ((before - after).abs()[:, outside] <= tolerance).all()


def check_probe(trainer: Trainer, batch: Batch) -> None:
    """A memory probe leaves nothing behind: generators, gradients, counters, and the bits of what
    is computed next.
    """
    set_budget(trainer, 16)

    def state() -> tuple:
        grads = [p.param.grad is None for p in trainer.model.params]
        return (
            grads,
            trainer.pending.num_batches,
            trainer.num_steps,
            trainer.num_skipped_steps,
            trainer.micro_batch_tokens,
        )

    def computed() -> tuple[float, dict[str, torch.Tensor]]:
        return trainer.forward_backward(batch, SPECS[0])[0].loss, take_gradients(trainer)

    (loss, gradients), before, generator = computed(), state(), torch.get_rng_state()
    drawing = trainer.model.modules[0].register_forward_pre_hook(
        lambda *_: (torch.rand(3), None)[1]
    )  # as a layer with random numbers does
    pack_size.probe(trainer, 32)
    drawing.remove()
    assert state() == before and torch.equal(torch.get_rng_state(), generator)
    again, gradients_again = computed()
    assert again == loss and all(torch.equal(gradients[n], gradients_again[n]) for n in gradients)
    trainer.forward_backward(batch, SPECS[0])
    with pytest.raises(RuntimeError, match="a probe needs the gradients for itself"):
        pack_size.probe(trainer, 32)
    assert trainer.drop_pending() == 1


def check_routing(trainer: Trainer, batch: Batch, alone: dict) -> None:
    """Replaying the model's own routing changes nothing, in packs of another size and order;
    replaying another changes the log-probs.
    """
    set_budget(trainer, 4096)
    for router in trainer.model.routers:
        router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    replay_routing, passes.replay_routing = passes.replay_routing, lambda *_: None
    trainer.forward(batch)
    passes.replay_routing = replay_routing
    # One pack in the batch's own order.
    own_T = torch.stack(
        [r.router_replay.get_recorded_indices() for r in trainer.model.routers], dim=1
    )
    assert own_T.shape == (len(batch.tokens_T), 2, 2)
    set_budget(trainer, 16)
    replayed = replace(batch, routed_experts_T=own_T.int())
    same(measure(trainer, replayed), alone)
    other = torch.stack(trainer.forward(replace(batch, routed_experts_T=(own_T.int() + 1) % 4)))
    assert (other - alone["scores"]).abs().max() > 1e-2
    same(measure(trainer, batch), alone)
    for wrong, message in (
        (own_T[:, :1], "the model has 2 layers with 4 experts"),
        (
            own_T * 0,
            r"sequence 0: routed_experts\[0\] in layer 0 is \[0, 0\], not 2 different experts below 4",  # noqa: E501
        ),
        (
            own_T + 4 * (torch.arange(len(own_T)) == 10)[:, None, None],
            r"sequence 1: routed_experts\[1\] in layer 0",
        ),
    ):
        with pytest.raises(BatchError, match=message):
            trainer.check(replace(batch, routed_experts_T=wrong), SPECS[0])


def check_memory_modes(model: Path, batch: Batch, alone: dict) -> None:
    """Recomputed or compiled layers compute the same. The backend only traces: what it would
    compile to is torch's business.
    """
    from trainer_node.model import (
        build,  # late: test_packing imports this module without Megatron's shims
    )

    backend = build.COMPILE_BACKEND
    build.COMPILE_BACKEND = "eager"
    moe = "moe" in model.name
    try:
        for options in (
            {"recompute": "full"},
            {"recompute": "offload"},
            {"recompute": "selective"} if moe else {"compile": True},
        ):
            # One pack where it compiles: each length is compiled again.
            budget = 4096 if "compile" in options else 25
            trainer = make_trainer(model, 1, 1, 1, micro_batch_tokens=budget, **options)
            random_adapters(trainer)
            layer, calls = trainer.model.modules[0].decoder.layers[0], []
            if "recompute" in options:
                layer.self_attention.core_attention.register_forward_pre_hook(
                    lambda *_, calls=calls: calls.append(0)
                )
            same(measure(trainer, batch), alone)
            assert bool(trainer.model.layer_inputs.moved_bytes) == ("offload" in options.values())
            # For each micro-batch one forward pass for the scores, and for each loss one and
            # another in the backward pass.
            assert len(calls) == ("recompute" in options) * len(trainer._cut(batch)) * (
                1 + 2 * len(SPECS)
            )
            assert (layer._compiled_call_impl is not None) == options.get("compile", False)
            trainer.model.close()
    finally:
        build.COMPILE_BACKEND = backend


def check_ways(model: Path, batch: Batch) -> None:
    """Packs of one batch recompute none, one or both of the two layers, or these with offload, by
    what fits, and the gradients have the same bits as with none.
    """
    trainer = make_trainer(model, 1, 1, 1, micro_batch_tokens=8)
    random_adapters(trainer)
    calls: list[int] = []
    for number, layer in enumerate(trainer.model.modules[0].decoder.layers):
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda *_, number=number: calls.append(number)
        )
    none, lengths = measure(trainer, batch), trainer._cut(batch).lengths
    assert len(set(lengths)) > 2 and len(calls) == len(lengths) * 2 * (1 + len(SPECS))
    small, middle, *_ = sorted(set(lengths))
    # A token takes two bytes, or one if every layer is recomputed, and there is room for `small`.
    kept = MemoryModel(fixed_bytes=0.0, bytes_per_token=2.0)
    recomputed = MemoryModel(fixed_bytes=0.0, bytes_per_token=1.0)
    room = {"room_bytes": 2.0 * small, "margin_bytes": 0.0}
    trainer.memory = (RankMemory(kept=kept, recomputed=recomputed, scored=recomputed, **room),)
    shares = [trainer.share_of(n) for n in lengths]
    assert trainer.share_of(small) == 0 < trainer.share_of(middle) <= 0.5 < max(shares) <= 1
    calls.clear()
    ways = measure(trainer, batch)
    again = [sum(s > least for s in shares) for least in (0.0, 0.5)]
    for number, count in enumerate(again):
        assert calls.count(number) == len(lengths) * (1 + len(SPECS)) + count * len(SPECS)
    assert again[0] > again[1] > 0 == trainer.model.layer_inputs.moved_bytes
    # With half of the room, the larger packs do not fit even if every layer runs again.
    line = MemoryModel(fixed_bytes=0.0, bytes_per_token=0.1)
    (memory,) = trainer.memory
    memory = replace(memory, scored=line, offloaded=line, host_tokens=4096)
    trainer.memory = (replace(memory, room_bytes=1.0 * small),)
    assert [trainer.offloads(n) for n in lengths] == [n > small for n in lengths]
    offloaded = measure(trainer, batch)
    assert trainer.model.layer_inputs.moved_bytes > 0
    for found in (ways, offloaded):
        assert torch.equal(found["scores"], none["scores"]) and found["losses"] == none["losses"]
        for a, b in zip(found["gradients"], none["gradients"], strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    trainer.model.close()


def main() -> None:
    """See the module's docstring."""
    out, model, sequence = Path(sys.argv[1]), Path(sys.argv[2]), bool(int(sys.argv[6]))
    trainer = make_trainer(model, *map(int, sys.argv[3:6]), sequence=sequence)
    assert trainer.model.provider.sequence_parallel == (
        sequence and trainer.model.config.parallel.tensor > 1
    )
    random_adapters(trainer)
    batch = whole_batch()
    checkpoint.save_adapter(trainer.model, out / "random")
    result = check_packs(trainer, batch)
    check_neighbours(trainer, batch)
    if trainer.model.routers:
        set_budget(trainer, 16)
        first = torch.arange(len(batch.tokens_T))[:, None, None] + torch.arange(2)[:, None]
        experts = (first + torch.arange(2)) % 4
        result["routed"] = torch.stack(
            trainer.forward(replace(batch, routed_experts_T=experts.int()))
        )
        assert (result["routed"] - result["scores"]).abs().max() > 1e-2
    check_probe(trainer, batch)
    if dist.get_rank() == 0:
        torch.save(result, out / "result.pt")
    world = dist.get_world_size()
    if world == 1 and trainer.model.routers:
        check_routing(trainer, batch, result)
    trainer.model.close()
    if world == 1:
        check_memory_modes(model, batch, result)
        check_ways(model, batch)


if __name__ == "__main__":
    main()
