"""One rank of a check of shared prefixes: log-probs, losses and gradients as without.

... -m tests.trainer_node.training.sharing OUT MODEL TENSOR PIPELINE EXPERT
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.trainer_node.tiny import VOCAB
from tests.trainer_node.training.packing import SPECS, measure, same
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.training import passes
from trainer_node.training.batch import Batch, predicted
from trainer_node.training.memory_model import MemoryModel, RankMemory
from trainer_node.training.trainer import Trainer


def tree_batch() -> Batch:
    """Four answers to one prompt, one of them twice; the turns of an episode, each with the turns
    before it; and a stranger.

    Answers carry loss, and a turn carries it in every sequence that has it.
    """
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    prompt, first, second = some(9), some(4), some(5)
    answers = [prompt + some(n) for n in (3, 6, 1)]
    turns = [first + second, first + second + some(3), first + second[:2] + some(6)]
    sequences = [*answers, turns[0], some(7), answers[1], *turns[1:]]
    prompts = [9, 9, 9, 4, 2, 9, 4, 4]
    lengths = tuple(map(len, sequences))
    mask_T = torch.cat(
        [(torch.arange(n) >= least).float() for n, least in zip(lengths, prompts, strict=True)]
    )
    noise_T = torch.randn(len(mask_T), generator=generator)
    near_T = (-5.7 + 0.3 * torch.randn(len(mask_T), generator=generator)) * mask_T
    return Batch(
        tokens_T=torch.tensor([t for s in sequences for t in s]),
        loss_mask_T=mask_T,
        advantages_T=noise_T * mask_T,
        sampler_logprobs_T=near_T,
        reference_logprobs_T=near_T + 0.2 * noise_T * mask_T,
        temperatures_T=0.7 + 0.6 * torch.rand(len(mask_T), generator=generator),
        lengths=lengths,
    )


def check_every_budget(trainer: Trainer, batch: Batch, apart: dict) -> None:
    """One pack, packs that cut the bundles, packs that recompute, also with offload, and scores."""
    model = trainer.model
    for budget in (4096, 20):
        trainer.micro_batch_tokens = budget
        packs = trainer._cut(batch)
        assert packs.num_shared > 0
        same(measure(trainer, batch), apart)
    own = [4096, 20, 12]
    shared = []
    for trainer.micro_batch_tokens in own:
        shared.append(trainer._cut(batch).num_shared)
    assert shared == sorted(shared, reverse=True) and shared[0] > shared[-1]
    trainer.micro_batch_tokens = 4096
    kept = measure(trainer, batch)
    trainer.share_of = lambda _: 1.0  # type: ignore[method-assign]
    for offloads in (False, True):
        trainer.offloads = lambda _, is_on=offloads: is_on  # type: ignore[method-assign]
        again = measure(trainer, batch)
        assert bool(model.layer_inputs.moved_bytes) == offloads
        assert torch.equal(kept["scores"], again["scores"]) and kept["losses"] == again["losses"]
        for a, b in zip(kept["gradients"], again["gradients"], strict=True):
            assert all(torch.equal(a[n], b[n]) for n in a)
    del trainer.share_of, trainer.offloads
    whole = replace(batch, loss_mask_T=predicted(batch.lengths))
    found = torch.stack(trainer.forward(whole))
    obstacle, model.sharing_obstacle = model.sharing_obstacle, "a test"
    expected = torch.stack(trainer.forward(whole))
    model.sharing_obstacle = obstacle
    same(
        {"scores": found, "losses": [], "gradients": []},
        {"scores": expected, "losses": [], "gradients": []},
    )


def check_room(trainer: Trainer, batch: Batch) -> None:
    """Packs of one length: none is longer than what fits, although one has the most tokens and
    another one the most copies.
    """
    too_large = 0
    for fitting in range(max(batch.lengths), 2 * max(batch.lengths)):
        line = MemoryModel(fixed_bytes=0.0, bytes_per_token=1.0)
        room = {"room_bytes": float(fitting), "margin_bytes": 0.0}
        trainer.memory = (RankMemory(kept=line, recomputed=line, scored=line, **room),)
        trainer.bundle_tokens = fitting
        for trainer.micro_batch_tokens in range(4, fitting + 1):
            budget = trainer.micro_batch_tokens
            shared = passes.cut(trainer.model, batch, budget=budget, most=fitting)
            too_large += max(shared.loads) > fitting
            assert max(trainer._cut(batch).loads) <= fitting
    assert too_large
    trainer.memory, trainer.bundle_tokens = (), None


def check_replay(trainer: Trainer, batch: Batch) -> None:
    """A pipeline that replays routing runs no layer again, because a longest sequence that fits
    must not be bundled until it no longer does.
    """
    lengths = batch.lengths
    trainer.micro_batch_tokens = max(lengths) - 5
    kept, recomputed = (MemoryModel(fixed_bytes=0.0, bytes_per_token=n) for n in (2.0, 1.0))
    room = {"room_bytes": 2.0 * max(lengths), "margin_bytes": 0.0}
    trainer.memory = (RankMemory(kept=kept, recomputed=recomputed, scored=recomputed, **room),)
    trainer.bundle_tokens = 2 * max(lengths)
    experts = torch.tensor([0, 1], dtype=torch.int32).repeat(len(batch.tokens_T), 2, 1)
    routed = replace(batch, routed_experts_T=experts)
    trainer.check(routed, SPECS[0])
    assert max(map(trainer.share_of, trainer._cut(batch).loads)) > 0
    assert max(map(trainer.share_of, trainer._cut(routed).loads)) == 0
    trainer.memory, trainer.bundle_tokens = (), None
    trainer.micro_batch_tokens = 4096
    assert trainer._cut(routed).num_shared > 0


def main() -> None:
    """See the module's docstring."""
    model = Path(sys.argv[2])
    trainer = make_trainer(model, *map(int, sys.argv[3:6]))
    batch = tree_batch()
    why = sys.argv[6] if len(sys.argv) > 6 else None
    assert trainer.model.sharing_obstacle == why
    if why is not None:
        trainer.micro_batch_tokens = 4096
        packs = trainer._cut(batch)
        assert packs.num_shared == 0 and all(pack.paths is None for pack in packs)
        trainer.model.close()
        return
    random_adapters(trainer)
    trainer.model.sharing_obstacle = "a test"
    trainer.micro_batch_tokens = 4096
    assert trainer._cut(batch).num_shared == 0
    apart = measure(trainer, batch)
    trainer.model.sharing_obstacle = None
    check_every_budget(trainer, batch, apart)
    if trainer.model.routers and trainer.model.config.parallel.pipeline > 1:
        check_room(trainer, batch)
        check_replay(trainer, batch)
    trainer.forward_backward(batch, SPECS[0])
    assert trainer.pending.num_shared == trainer._cut(batch).num_shared
    trainer.model.close()


if __name__ == "__main__":
    main()
