"""One rank of a check of the operations: forward, forward_backward in pieces, every normalisation,
KL and entropy.

    ... -m tests.trainer_node.training.operations OUT MODEL TENSOR PIPELINE EXPERT PEFT_ADAPTER
    [FLAG ...]

Leaves log-probs, entropies and whole gradients in OUT/result.pt, and the adapter they belong to in
OUT/random. What needs no second topology (failures, skipped steps, checkpoints) runs where there is
one rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import KlSpec, LossSpec, OptimParams, TrainLora
from tests.trainer_node import bounds, gradients
from tests.trainer_node.data import arrays, make_batch, temperatures
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.adapters.peft_io import AdapterError
from trainer_node.files.generations import CheckpointError
from trainer_node.state import checkpoint, loading
from trainer_node.tools.identity_adapter import write_identity_adapter
from trainer_node.training import passes, steps
from trainer_node.training.batch import Batch, BatchError
from trainer_node.training.gap import LogprobGapError
from trainer_node.training.trainer import NonFiniteGradient, NothingPending, Trainer

SPECS = {
    "dapo_kl_entropy": LossSpec(
        name="dapo", kl=KlSpec(coefficient=0.3, estimator="k3"), entropy_bonus=0.05
    ),
    "gspo_kl_given": LossSpec(
        name="gspo",
        clip_low=0.2,
        clip_high=0.2,
        kl=KlSpec(coefficient=0.2, estimator="k2", reference="given"),
    ),
    "truncated_old": LossSpec(name="truncated_importance_sampling", normalize_by=7.0),
    "cross_entropy": LossSpec(name="cross_entropy", entropy_bonus=0.1),
    "cispo_sequences": LossSpec(name="cispo", normalize_by="sequences"),
}


def whole_batch() -> Batch:
    """The shared batch with the optional tensors; the last sequence carries no loss at all."""
    batch = make_batch(arrays() | {"temperatures": temperatures()})
    mask_T = batch.loss_mask_T.clone()
    mask_T[-batch.lengths[-1] :] = 0
    generator = torch.Generator().manual_seed(5)
    near_T = batch.sampler_logprobs_T + 0.3 * torch.randn(mask_T.shape, generator=generator)
    return replace(
        batch,
        loss_mask_T=mask_T,
        old_logprobs_T=near_T * mask_T,
        reference_logprobs_T=near_T.flip(0) * mask_T,
    )


def batch_for(name: str) -> Batch:
    """Only what the loss is to see."""
    batch = whole_batch()
    old = batch.old_logprobs_T if name == "truncated_old" else None
    reference = batch.reference_logprobs_T if name == "gspo_kl_given" else None
    return replace(batch, old_logprobs_T=old, reference_logprobs_T=reference)


def part(batch: Batch, first: int, last: int) -> Batch:
    """Sequences [first, last) alone."""
    start, end = sum(batch.lengths[:first]), sum(batch.lengths[:last])
    rows = {
        n: None if (t := getattr(batch, n)) is None else t[start:end]
        for n in Batch.__slots__
        if n.endswith("_T")
    }
    return Batch(**rows, lengths=batch.lengths[first:last])


def take_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The finalised gradients as whole HF matrices, on rank 0; nothing is pending afterwards."""
    return {
        name.replace(".lora_", "."): gradient
        for name, gradient in gradients.take_gradients(trainer).items()
    }


def close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, relative: float
) -> None:
    """Every element within `relative` of the largest element of all gradients."""
    assert ours.keys() == theirs.keys()
    largest = max((t.abs().max().item() for t in theirs.values()), default=0.0)
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max().item() <= relative * largest, name


def check_pieces(trainer: Trainer) -> dict[str, dict]:
    """Each loss: as one batch, in pieces, with padding sequences, and weighted; returns gradients
    and metrics of the first.
    """
    results = {}
    for name, spec in SPECS.items():
        batch = batch_for(name)
        whole_sums, _ = trainer.forward_backward(batch, spec)
        metrics = whole_sums.metrics(spec.normalize_by)
        results[name] = {"metrics": metrics, "gradients": take_gradients(trainer)}
        parts = [part(batch, 0, 2), part(batch, 2, 3), part(batch, 3, 4)]
        sums = [trainer.forward_backward(p, spec)[0] for p in parts]
        together = trainer.pending.sums.metrics(spec.normalize_by)
        slack = bounds.loss(count=batch.num_loss_tokens)
        assert abs(together["loss"] - metrics["loss"]) <= slack / whole_sums.denominator(
            spec.normalize_by
        ), name
        assert sum(s.num_tokens for s in sums) == metrics["tokens"]
        close(take_gradients(trainer), results[name]["gradients"], relative=bounds.gradients())

        trainer.check(batch, spec, grad_accumulation_sequences=8)
        whole, _ = trainer.forward_backward(batch, spec)
        half, _ = trainer.forward_backward(batch, spec, loss_weight=-0.5)
        assert abs(half.loss + 0.5 * whole.loss) <= slack
        assert trainer.pending.num_batches == 2
        # half the sum; twice the count, except where a constant divides
        factor = 0.5 if isinstance(spec.normalize_by, float) else 0.25
        expected = {n: t * factor for n, t in results[name]["gradients"].items()}
        close(take_gradients(trainer), expected, relative=bounds.gradients())
    return results


def check_refusals(trainer: Trainer) -> None:
    """What is refused leaves what is pending; a number that does not divide is named with the
    data-parallel size.
    """
    from megatron.core import parallel_state

    batch = batch_for("cross_entropy")
    trainer.forward_backward(batch, SPECS["cross_entropy"])
    with pytest.raises(
        ConfigError,
        match="normalize_by = 'sequences', but the 1 pending batches came with 'tokens'",
    ):
        trainer.check(batch, SPECS["cispo_sequences"])
    size = parallel_state.get_data_parallel_world_size()
    if size > 1:
        with pytest.raises(
            BatchError,
            match=f"grad_accumulation_sequences = 3 is not a multiple of the data-parallel size {size}",  # noqa: E501
        ):
            trainer.check(batch, SPECS["cross_entropy"], grad_accumulation_sequences=3)
    assert trainer.pending.num_batches == 1
    assert trainer.drop_pending() == 1
    with pytest.raises(NothingPending):
        trainer.optim_step(OptimParams())


def state(trainer: Trainer) -> list[torch.Tensor]:
    """Weights and optimizer, copied."""
    found = [p.param.detach().clone() for p in trainer.model.params]
    for values in trainer.optimizer.state.values():
        found += [v.clone() for v in values.values()]
    return found


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def check_skipped_step(trainer: Trainer, out: Path) -> None:
    """A gradient that is not finite changes nothing and is counted, in the checkpoint too; a good
    step after it is as without it.
    """
    batch, spec, optim = (
        batch_for("cispo_sequences"),
        SPECS["cispo_sequences"],
        OptimParams(lr=1e-2),
    )
    trainer.train_step(batch, spec, optim)
    checkpoint.save(trainer, out / "before", version=1, client_state={"row": 3})
    good = trainer.train_step(batch, spec, optim)
    after = state(trainer)
    trainer.forward_backward(batch, spec)
    loaded = loading.load(trainer, out / "before")
    assert (loaded.version, loaded.client_state, loaded.dropped_batches) == (1, {"row": 3}, 1)
    assert all(p.param.grad is None for p in trainer.model.params)
    before = state(trainer)
    trainer.forward_backward(batch, spec)
    ones_T = torch.ones_like(batch.advantages_T)
    trainer.forward_backward(
        replace(batch, advantages_T=ones_T * 3e38, sampler_logprobs_T=ones_T * -300), spec
    )
    with pytest.raises(NonFiniteGradient) as caught:
        trainer.optim_step(optim)
    assert (
        "gradients of 2 batches were dropped. Steps skipped so far: 1." in caught.value.__notes__[0]
    )
    assert same(state(trainer), before)
    assert not trainer.pending.num_batches
    checkpoint.save(trainer, out / "skipped", version=1)
    again = trainer.train_step(batch, spec, optim)
    assert again["skipped_steps"] == 1
    assert (again["loss"], again["grad_norm"]) == (good["loss"], good["grad_norm"])
    assert same(state(trainer), after)
    trainer.num_skipped_steps = 0
    loading.load(trainer, out / "skipped")
    assert trainer.num_skipped_steps == 1


def check_failures_drop(trainer: Trainer, out: Path) -> None:
    """A failure after the first micro-batch's backward leaves no half of a gradient; a refused
    checkpoint leaves all of it.
    """
    batch, spec = batch_for("cross_entropy"), SPECS["cross_entropy"]
    trainer.forward_backward(batch, spec)
    with pytest.raises(CheckpointError):
        loading.load(trainer, out / "nowhere")
    assert trainer.pending.num_batches == 1
    original, calls = passes.loss, []

    def fails(*args):
        calls.append(0)
        if len(calls) == 2:
            raise MemoryError("told to")
        return original(*args)

    passes.loss = fails
    dropped = "Gradients pending from 1 batch before it were dropped with it."
    for notes in ([dropped], []):
        calls.clear()
        with pytest.raises(MemoryError) as caught:
            trainer.forward_backward(batch, spec)
        assert getattr(caught.value, "__notes__", []) == notes
    passes.loss = original
    assert not trainer.pending.num_batches
    assert all(p.param.grad is None for p in trainer.model.params)


def check_returned_logprobs(trainer: Trainer) -> None:
    """A pass that returns its log-probs returns those of `forward`, of tokens without loss too, and
    adds the same gradient and sums. A sequence without loss is among them.

    To the bit where `forward` takes the same kernels: attention has others without autograd.
    """
    with_autograd = Trainer.forward.__wrapped__
    for name, spec in SPECS.items():
        batch = batch_for(name)
        sums, _ = trainer.forward_backward(batch, spec)
        plain = take_gradients(trainer)
        asked = batch.scoring_all()
        same_sums, logprobs_T = trainer.forward_backward(asked, spec)
        scoring = take_gradients(trainer)
        every = replace(batch, loss_mask_T=asked.scored_T)
        wanted_T, _ = with_autograd(trainer, every, allowed_token_ids=spec.allowed_token_ids)
        assert torch.equal(logprobs_T, wanted_T), name
        forward_T, _ = trainer.forward(every, allowed_token_ids=spec.allowed_token_ids)
        assert (logprobs_T - forward_T).nan_to_num().abs().max() <= bounds.scores(), name
        assert logprobs_T[batch.loss_mask_T == 0].count_nonzero() >= batch.lengths[-1] - 1
        close(scoring, plain, relative=bounds.gradients())
        assert same_sums.num_tokens == sums.num_tokens
        slack = bounds.loss(count=batch.num_loss_tokens)
        assert abs(same_sums.loss - sums.loss) <= slack, name


def check_composition(trainer: Trainer) -> None:
    """train_step is forward_backward and optim_step, and takes along what is pending."""
    batch, spec, optim = batch_for("cross_entropy"), SPECS["cross_entropy"], OptimParams(lr=1e-3)
    first, second = part(batch, 0, 2), part(batch, 2, 5)
    start = [p.param.detach().clone() for p in trainer.model.params]
    results = []
    for composed in (False, True):
        for p, data in zip(trainer.model.params, start, strict=True):
            p.param.data.copy_(data)
        trainer.optimizer.state.clear()
        trainer.forward_backward(first, spec)
        if composed:
            metrics = trainer.train_step(second, spec, optim)
        else:
            trainer.forward_backward(second, spec)
            metrics = trainer.optim_step(optim)
        assert metrics["num_batches"] == 2
        results.append((metrics["loss"], metrics["grad_norm"], metrics["tokens"], state(trainer)))
    assert results[0][:3] == results[1][:3]
    assert same(results[0][3], results[1][3])


def training(spec: LossSpec, **more: int) -> TrainLora:
    """A job of learning rate 1e-2."""
    optim = OptimParams(lr=1e-2)
    return TrainLora(
        tensors=(),
        output_dir="nowhere",
        loss=spec,
        optim=optim,
        **more,
    )


def check_steps(trainer: Trainer) -> None:
    """A job's steps are the composed calls to the bit, one that is skipped included; what is
    refused is refused before the first of them.
    """
    spec = SPECS["cispo_sequences"]
    message, good = (
        training(spec, mini_batch_sequences=3, epochs=2),
        replace(whole_batch(), reference_logprobs_T=None),
    )
    late_T = torch.arange(len(good.tokens_T)) >= sum(good.lengths[:3])
    huge_T, far_T = (
        torch.full_like(good.advantages_T, 3e38),
        torch.full_like(good.advantages_T, -300),
    )
    skips = replace(
        good,
        advantages_T=good.advantages_T.where(~late_T, huge_T),
        old_logprobs_T=None,
        sampler_logprobs_T=good.sampler_logprobs_T.where(~late_T, far_T),
    )
    start = [p.param.detach().clone() for p in trainer.model.params]
    for batch, skipped in ((good, []), (skips, [1, 3])):
        ends = []
        for composed in (True, False):
            for p, data in zip(trainer.model.params, start, strict=True):
                p.param.data.copy_(data)
            trainer.optimizer.state.clear()
            trainer.num_skipped_steps = trainer.steps_since_sent = 0
            metrics, totals = (
                composed_steps(trainer, batch, message)
                if composed
                else steps_of_a_job(trainer, batch, message)
            )
            ends.append((metrics, state(trainer)))
        assert ends[0][0] == ends[1][0]
        assert same(ends[0][1], ends[1][1])
        assert [i for i, m in enumerate(metrics) if "skipped" in m] == skipped
        taken = [m for m in metrics if "skipped" not in m]
        assert totals["tokens"] == sum(m["tokens"] for m in taken)
        assert totals["skipped_steps"] == len(skipped)
        weighted = sum(
            m["loss"] * n
            for m, n in zip(taken, [3, 1, 3, 1] if not skipped else [3, 3], strict=True)
        )
        assert totals["loss"] == pytest.approx(weighted / (6 if skipped else 8), rel=1e-6)
    check_refused_steps(trainer, good, skips)
    check_no_signal(trainer, good)


def composed_steps(trainer: Trainer, batch: Batch, message: TrainLora) -> tuple[list[dict], dict]:
    """As a client would send them: (metrics of each step, nothing)."""
    metrics = []
    for piece in [part(batch, 0, 3), part(batch, 3, 5)] * 2:
        trainer.forward_backward(piece, message.loss)
        try:
            found = trainer.optim_step(message.optim)
        except NonFiniteGradient:
            found = {"skipped": 1.0, "skipped_steps": float(trainer.num_skipped_steps)}
        metrics.append(timeless(found))
    return metrics, {}


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """Those that two runs of the same steps have in common."""
    of_this_run = ("seconds", "tokens_per_s", "peak_memory")
    return {k: v for k, v in metrics.items() if not k.startswith(of_this_run)}


def steps_of_a_job(trainer: Trainer, batch: Batch, message: TrainLora) -> tuple[list[dict], dict]:
    """As the node takes them: (metrics of each step, of all)."""
    said = []
    done = steps.train(
        trainer, batch, message, on_step=lambda step, count: said.append((step, count))
    )
    assert said == [(step, 4) for step in done]
    return [timeless(s.metrics) for s in done], steps.total_metrics(done)


def check_no_signal(trainer: Trainer, batch: Batch) -> None:
    """A gradient of zeros leaves weights and moments as they are: AdamW's momentum would
    continue."""
    spec, optim = LossSpec(name="importance_sampling"), OptimParams(lr=1e-2)
    trainer.train_step(batch, spec, optim)
    before = state(trainer)
    for name in ("advantages_T", "loss_mask_T"):
        empty = replace(batch, **{name: torch.zeros_like(batch.advantages_T)})
        metrics = trainer.train_step(empty, spec, optim.model_copy(update={"lr": 1.0}))
        assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)
        assert metrics["tokens"] == empty.num_loss_tokens
        assert same(before, state(trainer))
    job = training(spec, mini_batch_sequences=2)
    done = steps.train(trainer, batch, job, on_step=lambda *_: None)
    assert [s.metrics["grad_norm"] > 0 for s in done] == [
        True,
        True,
        False,
    ]  # the last has no token
    assert not same(before, state(trainer))
    assert steps.total_metrics(done)["tokens"] == batch.num_loss_tokens


def check_refused_steps(trainer: Trainer, good: Batch, skips: Batch) -> None:
    """What any mini-batch would be refused for leaves everything as it was; all steps skipped fail
    the job, weights untouched.
    """
    spec, before, counted = SPECS["cispo_sequences"], state(trainer), trainer.num_steps
    trainer.forward_backward(good, spec)
    other = spec.model_copy(update={"normalize_by": "tokens"})
    with pytest.raises(ConfigError, match="pending batches came with"):
        trainer.check(good, other)
    assert trainer.pending.num_batches == 1
    trainer.drop_pending()
    with pytest.raises(NonFiniteGradient):
        steps.train(trainer, part(skips, 3, 5), training(spec, epochs=2), on_step=lambda *_: None)
    assert same(before, state(trainer))
    assert trainer.num_steps == counted


def check_gap(trainer: Trainer) -> None:
    """A job's bound on the gap to the sampler holds for its first step: beyond it no step is taken,
    within it later ones may be further off.
    """
    batch = replace(whole_batch(), old_logprobs_T=None, reference_logprobs_T=None)
    spec = LossSpec(name="grpo", max_logprob_gap=1e-3)
    before, counted = state(trainer), trainer.num_steps
    trainer.forward_backward(batch, SPECS["cross_entropy"])
    with pytest.raises(
        LogprobGapError,
        match=r"log-probs .* differ from the sampler's by .*max_logprob_gap is 0.001",
    ):
        steps.train(trainer, batch, training(spec, epochs=3), on_step=lambda *_: None)
    assert same(before, state(trainer))
    assert (trainer.num_steps, trainer.pending.num_batches) == (counted, 0)
    sampled_T, _ = trainer.forward(batch)
    done = steps.train(
        trainer,
        replace(batch, sampler_logprobs_T=sampled_T),
        training(spec, epochs=3),
        on_step=lambda *_: None,
    )
    gaps = [step.metrics["logprob_gap_mean"] for step in done]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[2], gaps


def check_failure_between_steps(trainer: Trainer) -> None:
    """The steps before it stand, and the error says how many."""
    batch, original, began = batch_for("cross_entropy"), passes.loss, trainer.num_steps

    def fails(*args):
        if trainer.num_steps == began + 2:
            raise MemoryError("told to")
        return original(*args)

    passes.loss = fails
    with pytest.raises(MemoryError) as caught:
        steps.train(
            trainer, batch, training(SPECS["cross_entropy"], epochs=4), on_step=lambda *_: None
        )
    passes.loss = original
    assert (
        caught.value.__notes__[-1]
        == "Of the job's 4 optimizer steps 2 were taken and kept; nothing was saved."
    )
    assert not trainer.pending.num_batches


def check_offload(trainer: Trainer, out: Path) -> None:
    """Offloaded, every storage is empty; back, weights, optimizer, pending gradients and every view
    are as if nothing had been.
    """
    batch, spec, optim = batch_for("cross_entropy"), SPECS["cross_entropy"], OptimParams(lr=1e-2)
    checkpoint.save(trainer, out / "to_offload", version=1)
    results = []
    for offloads in (False, True):
        loading.load(trainer, out / "to_offload")
        before = state(trainer)
        for _ in range(2):
            trainer.forward_backward(batch, spec)
            if offloads:
                held = trainer.resident_bytes()
                assert trainer.offload() == held == trainer.offload() > 0
                assert trainer.is_offloaded
                tensors = [
                    *trainer.model.modules[0].parameters(),
                    *(p.param for p in trainer.model.params),
                    *(p.param.grad for p in trainer.model.params),
                ]
                tensors += [
                    v
                    for values in trainer.optimizer.state.values()
                    for v in values.values()
                    if v.dim()
                ]
                assert len(tensors) > 4 * len(trainer.model.params)
                assert all(t is None or t.untyped_storage().nbytes() == 0 for t in tensors)
                trainer.reload()
                assert trainer.resident_bytes() == held
                assert not trainer.is_offloaded
            metrics = trainer.optim_step(optim)
        adapters = [p.param.detach().clone() for p in trainer.model.params]
        results.append((metrics["loss"], metrics["grad_norm"], [*state(trainer), *adapters]))
        assert not same(before, state(trainer))
    assert results[0][:2] == results[1][:2]
    assert same(results[0][2], results[1][2])


def with_peft_adapter(trainer: Trainer, scored: Batch, peft: Path, back: Path) -> dict[str, object]:
    """What PEFT wrote: loaded, as the reference of a KL term while another adapter trains, and
    refused where it is not whole.
    """
    kl = KlSpec(coefficient=0.3, reference="adapter", adapter_dir=str(peft))
    spec, batch = LossSpec(name="cross_entropy", kl=kl), batch_for("cross_entropy")
    before = trainer.forward(scored)
    trainer.check(batch, spec)
    metrics = trainer.forward_backward(batch, spec)[0].metrics("tokens")
    found: dict[str, object] = {"kl_metrics": metrics, "kl_gradients": take_gradients(trainer)}
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.forward(scored), strict=True)), (
        "the reference stayed in place"
    )
    nowhere = kl.model_copy(update={"adapter_dir": str(peft / "nowhere")})
    trainer.forward_backward(batch, SPECS["cross_entropy"])
    for refused in (
        lambda: trainer.check(batch, spec.model_copy(update={"kl": nowhere})),
        lambda: trainer.load_adapter(peft / "nowhere"),
    ):
        with pytest.raises(AdapterError, match=r"no PEFT adapter.*adapter_config.json"):
            refused()
    assert trainer.pending.num_batches == 1, "what is refused leaves what is pending"
    assert trainer.load_adapter(peft) == 1
    found["peft"] = torch.stack(trainer.forward(scored))
    trainer.load_adapter(back)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.forward(scored), strict=True))
    return found


def check_identity_adapters(trainer: Trainer) -> None:
    """Fresh adapters are the base: the same log-probs to the bit, so no divergence from it."""
    batch = batch_for("cross_entropy")
    on, off = trainer.forward(batch), trainer.forward(batch, mode="base")
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))
    sums, _ = trainer.forward_backward(batch, SPECS["dapo_kl_entropy"])
    assert sums.kl == 0.0
    assert sums.kl_tokens == sums.num_tokens
    trainer.drop_pending()


def main() -> None:
    """See the module's docstring."""
    out, model = Path(sys.argv[1]), Path(sys.argv[2])
    trainer = make_trainer(model, *map(int, sys.argv[3:6]))
    check_identity_adapters(trainer)
    checkpoint.save_adapter(trainer.model, out / "start")
    if dist.get_rank() == 0:
        write_identity_adapter(
            model, out / "identity", lora=trainer.model.config.lora, seed=trainer.model.config.seed
        )
    random_adapters(trainer)
    checkpoint.save_adapter(trainer.model, out / "random")
    everything = whole_batch()
    ones_T = torch.ones(len(everything.tokens_T))
    ones_T[torch.tensor([0, *everything.lengths[:-1]]).cumsum(0)] = 0
    scored = replace(everything, loss_mask_T=ones_T)
    result = {
        "policy": torch.stack(trainer.forward(scored)),
        "base": torch.stack(trainer.forward(scored, mode="base")),
        "allowed": torch.stack(trainer.forward(scored, allowed_token_ids=range(150))),
        "losses": check_pieces(trainer),
    }
    assert trainer.pending.num_batches == 0, "a forward pass leaves no gradient"
    result |= with_peft_adapter(trainer, scored, Path(sys.argv[6]), out / "random")
    check_refusals(trainer)
    check_returned_logprobs(trainer)
    if dist.get_world_size() == 1:
        check_composition(trainer)
        check_skipped_step(trainer, out)
        check_failures_drop(trainer, out)
        check_offload(trainer, out)
        check_failure_between_steps(trainer)
        check_gap(trainer)
    check_steps(trainer)
    if dist.get_rank() == 0:
        torch.save(result, out / "result.pt")
    trainer.model.close()


if __name__ == "__main__":
    main()
