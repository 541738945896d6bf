"""Runs one batch through the model: cuts it into packs, and turns hidden states into losses or
scores.

    cut(batch) -> packs -> run(packs, loss or scores) -> one report of each pack ->
    reduce_sums(reports)

Megatron's schedule calls `loss` or `scores` with the hidden states of each pack. A pass never waits
for the device: positions with loss and sequence bounds come from the CPU.

Axes: L = a pack's positions, N = its scored positions, M = those of them on this context rank, H
= hidden size, V = this rank's part of the vocabulary, K = a set of token ids or a token's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from orchestrator.protocol.messages import LossSpec
from trainer_node.model import paths, recompute
from trainer_node.model.model import Model
from trainer_node.training import batch as batches
from trainer_node.training.batch import Batch, BatchError
from trainer_node.training.gae import value_sums
from trainer_node.training.head import gather_positions, linear_statistics, linear_values
from trainer_node.training.losses import LossInputs, ValueInputs, total_loss
from trainer_node.training.packing import MicroBatch, Packs, Sharing, micro_batches
from trainer_node.training.registry import registered
from trainer_node.training.sums import StepSums

NUM_REPORTED = 9
"""What `loss` reports of a micro-batch: loss, clipped tokens, log-prob gap, KL, entropy, KL to the
sampler, value loss, clipped values (sums) and the largest gap."""


class Report(NamedTuple):
    """What `loss` reports of a pack."""

    sums: torch.Tensor
    """NUM_REPORTED of them, fp64."""
    log_probs_N: torch.Tensor


def cut(model: Model, batch: Batch, *, budget: int, most: int | None) -> Packs:
    """Cut the batch into this rank's packs of at most `budget` tokens; each is laid out when it is
    first asked for.

    Args:
        most: largest number of tokens of a pack that shares prefixes. None: prefixes are not
            shared.
    """
    parallel = model.config.parallel
    sharing = None
    if most is not None and model.sharing_obstacle is None:
        sharing = Sharing(most=most, copy_load=paths.copy_load(model.provider))
    return micro_batches(
        batch,
        budget=budget,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        least=parallel.pipeline,
        same_length=max(parallel.pipeline, parallel.expert, parallel.expert_tensor) > 1,
        multiple=parallel.tensor if model.provider.sequence_parallel else 1,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel.context,
        sharing=sharing,
        device=model.device,
    )


# ---------------------------------------------------------------- Megatron's schedule


def run(
    model: Model,
    packs: Packs,
    loss: Callable[..., Any],
    *,
    first_row: int,
    on_pack: Callable[[], None],
    share_of: Callable[[int], float] | None,
    offloads: Callable[[int], bool],
) -> list[Any]:
    """Run Megatron's schedule over the packs. Returns what `loss(pack, hidden)` reports, on the
    last pipeline stage only.

    Args:
        first_row: rows of pending batches, which dropout counts before this batch's.
        on_pack: called before each pack's forward pass.
        share_of: a pack's load -> share of the layers that its backward pass runs again. None:
            there is no backward pass.
        offloads: a pack's load -> whether the inputs of these layers go to host memory.
    """

    def step(data: Iterator[MicroBatch], module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro = next(data)
        on_pack()
        replay_routing(model, micro)
        recompute.use(model, 0.0 if share_of is None else share_of(micro.load))
        paths.use(module, None if micro.paths is None else micro.positions_L)
        with model.layer_inputs.on_host(share_of is not None and offloads(micro.load)):
            output = module(
                input_ids=micro.tokens_L[None],
                position_ids=micro.positions_L[None],
                attention_mask=None,
                packed_seq_params=_packed(model, micro, first_row),
            )
        return output, partial(loss, micro)

    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(packs),
        model=model.modules,
        num_microbatches=len(packs),
        seq_length=packs.lengths[0],
        micro_batch_size=1,
        forward_only=share_of is None,
    )
    return reports


def _packed(model: Model, micro: MicroBatch, first_row: int) -> PackedSeqParams:
    """Tell attention where the sequences begin, and dropout which rows they are."""
    packed = _bounds(micro.cu_seqlens, micro.max_seqlen, micro.cu_seqlens, micro.max_seqlen)
    if model.config.parallel.context > 1:
        # TransformerEngine's context parallelism needs them. Sequences keep their padding, which
        # causal attention never reads.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = micro.cu_seqlens
    if micro.paths is not None:
        assert micro.cu_paths is not None
        along = _bounds(micro.cu_seqlens, micro.max_seqlen, micro.cu_paths, micro.max_path)
        # To all but attention the pack is one sequence, whose rotary table `model.paths` makes.
        whole = micro.cu_seqlens[:: len(micro.cu_seqlens) - 1].contiguous()
        packed = _bounds(whole, micro.max_path, whole, micro.max_path)
        packed.paths = paths.Paths(  # type: ignore[attr-defined]
            runs=micro.paths, packed=along, positions_L=micro.positions_L
        )
    # Travels with what the layers get, and so reaches a recomputed one as well.
    packed.rows_L = micro.rows_L + first_row  # type: ignore[attr-defined]
    return packed


def _bounds(
    queries: torch.Tensor, max_queries: int, keys: torch.Tensor, max_keys: int
) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=queries,
        cu_seqlens_kv=keys,
        max_seqlen_q=max_queries,
        max_seqlen_kv=max_keys,
    )


def check_routing(model: Model, batch: Batch, *, recomputes: bool) -> None:
    """Refuse expert routing that this model cannot replay.

    Args:
        recomputes: whether a pack of the batch runs layers again in its backward pass.

    Raises:
        BatchError: says what does not fit.
    """
    provider, config = model.provider, model.config
    batches.check_routing(
        batch,
        num_layers=provider.num_layers,
        num_experts=provider.num_moe_experts or 0,
        top_k=provider.moe_router_topk,
    )
    if batch.routed_experts_T is not None and config.parallel.pipeline > 1 and recomputes:
        # Routers hold one micro-batch's experts; recomputing one while others are on their way
        # would take the wrong ones.
        raise BatchError(
            "routed_experts: cannot be replayed where layers are recomputed and parallel.pipeline "
            "> 1; use recompute = 'selective', or a smaller micro_batch_tokens"
        )


def replay_routing(model: Model, micro: MicroBatch) -> None:
    """Tell this stage's routers where the pack's tokens go, or to choose by themselves."""
    for router in model.routers:
        replay = router.router_replay
        replay.clear_indices()
        replay.clear_router_replay_action()
        if micro.routed_experts_L is None:
            continue
        experts_LK = micro.routed_experts_L[:, router.layer_number - 1]
        if model.provider.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            experts_LK = experts_LK.chunk(group.size())[group.rank()]
        replay.set_target_indices(experts_LK)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


# ---------------------------------------------------------------- on the last stage


def loss(
    model: Model,
    spec: LossSpec,
    allowed_K: torch.Tensor | None,
    weight: float,
    micro: MicroBatch,
    hidden_1LH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Compute a pack's summed loss. Returns it, its token count, and the report."""
    count = torch.full((), micro.num_loss_tokens, dtype=torch.int, device=model.device)
    log_probs_N = entropy_N = values_N = torch.zeros(0, device=model.device)
    if len(micro.rows_N):
        learns_entropy = spec.entropy_bonus != 0.0
        hidden_MH = _at_predictors(model, micro, hidden_1LH)
        log_probs_N, entropy_N = _statistics(
            model, micro, allowed_K, hidden_MH, learns_entropy=learns_entropy
        )
        if spec.value is not None:
            below_MH = hidden_MH if spec.value.trains_model else hidden_MH.detach()
            values_N = _values(model, micro, below_MH)
    scored_N = log_probs_N.detach()
    if not micro.num_loss_tokens:
        zeros = torch.zeros(NUM_REPORTED, dtype=torch.float64, device=model.device)
        return hidden_1LH.float().sum() * 0.0, count, Report(zeros, scored_N)
    inputs, entropy_N, reference_N = _inputs(micro, log_probs_N, entropy_N)
    terms = total_loss(
        inputs,
        spec,
        entropy_N=entropy_N,
        reference_logprobs_N=reference_N,
        values=None if spec.value is None else _value_inputs(micro, values_N),
    )
    total = terms.total * weight
    reported = (
        total.detach(),
        terms.num_clipped,
        terms.logprob_gap,
        terms.kl,
        terms.entropy,
        terms.kl_sampler,
        terms.value_loss,
        terms.num_values_clipped,
        terms.logprob_gap_max,
    )
    return total, count, Report(torch.stack([x.double() for x in reported]), scored_N)


def _inputs(
    micro: MicroBatch, log_probs_N: torch.Tensor, entropy_N: torch.Tensor
) -> tuple[LossInputs, torch.Tensor, torch.Tensor | None]:
    """The loss's inputs, entropies and reference log-probs of the positions with loss."""
    of = micro.with_loss
    inputs = LossInputs(
        log_probs_N=of(log_probs_N),
        sampler_logprobs_N=of(micro.sampler_logprobs_N),
        advantages_N=of(micro.advantages_N),
        old_logprobs_N=None if micro.old_logprobs_N is None else of(micro.old_logprobs_N),
        sequence_N=of(micro.sequence_N),
        num_sequences=micro.num_sequences,
    )
    reference_N = micro.reference_logprobs_N
    return inputs, of(entropy_N), None if reference_N is None else of(reference_N)


def _value_inputs(micro: MicroBatch, values_N: torch.Tensor) -> ValueInputs:
    """The value loss's inputs, of the positions with loss."""
    assert micro.values_N is not None
    assert micro.returns_N is not None
    of = micro.with_loss
    return ValueInputs(
        values_N=of(values_N), old_values_N=of(micro.values_N), returns_N=of(micro.returns_N)
    )


def scores(
    model: Model, allowed_K: torch.Tensor | None, micro: MicroBatch, hidden_1LH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a pack's log-probs and entropies. Returns no loss, no count, and [log-prob, entropy]
    as [2, N]."""
    result = torch.zeros(2, len(micro.rows_N), device=model.device)
    if len(micro.rows_N):
        hidden_MH = _at_predictors(model, micro, hidden_1LH)
        result = torch.stack(_statistics(model, micro, allowed_K, hidden_MH, learns_entropy=False))
    nothing = torch.zeros((), device=model.device)
    return nothing, nothing.to(torch.int), result


def values(
    model: Model, micro: MicroBatch, hidden_1LH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a pack's values. Returns no loss, no count, and them as [1, N]."""
    result = torch.zeros(1, len(micro.rows_N), device=model.device)
    if len(micro.rows_N):
        result = _values(model, micro, _at_predictors(model, micro, hidden_1LH))[None]
    nothing = torch.zeros((), device=model.device)
    return nothing, nothing.to(torch.int), result


def _at_predictors(model: Model, micro: MicroBatch, hidden_1LH: torch.Tensor) -> torch.Tensor:
    """The hidden states that predict this context rank's scored tokens, on every tensor rank.

    Each rank's part of the vocabulary, and of the value head, gives them one term of their
    gradient. The region's backward adds the terms up.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    hidden_LH, predictors_M = hidden_1LH[0], micro.predictors_N
    if micro.here_M is not None:
        predictors_M = predictors_M[micro.here_M]
    if model.provider.sequence_parallel:
        hidden_LH = tensor_parallel.gather_from_sequence_parallel_region(hidden_LH, group=group)
    hidden_MH = hidden_LH.index_select(0, predictors_M)
    if not model.provider.sequence_parallel:
        hidden_MH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_MH, group=group)
    return hidden_MH


def _values(model: Model, micro: MicroBatch, hidden_MH: torch.Tensor) -> torch.Tensor:
    """Values of the scored positions, [N]. Context-parallel ranks join their positions."""
    group, weight_W = parallel_state.get_tensor_model_parallel_group(), model.value_head
    assert weight_W is not None
    share_M = linear_values(hidden_MH, weight_W, first=group.rank() * len(weight_W))
    values_M = tensor_parallel.reduce_from_tensor_model_parallel_region(share_M, group=group)
    return _joined(micro, values_M[None])[0]


def _joined(micro: MicroBatch, values_PM: torch.Tensor) -> torch.Tensor:
    """This context rank's positions with those of the others, [P, N]."""
    if micro.here_M is None:
        return values_PM
    group = parallel_state.get_context_parallel_group()
    return gather_positions(values_PM, micro.here_M, len(micro.rows_N), group)


def _statistics(
    model: Model,
    micro: MicroBatch,
    allowed_K: torch.Tensor | None,
    hidden_MH: torch.Tensor,
    *,
    learns_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of the scored positions, [N] each.

    Context-parallel ranks join their positions, so a loss sees whole sequences on each rank.

    Args:
        learns_entropy: whether the entropy has a gradient.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    head = model.head
    tied = head.share_embeddings_and_output_weights
    weight_VH = head.shared_embedding_or_output_weight() if tied else head.output_layer.weight
    weight_VH = model.adapters.of_head(weight_VH)
    targets_M, temperatures_M = micro.targets_N, micro.temperatures_N
    if micro.here_M is not None:
        targets_M = targets_M[micro.here_M]
        temperatures_M = None if temperatures_M is None else temperatures_M[micro.here_M]
    log_probs_M, entropy_M = linear_statistics(
        hidden_MH,
        weight_VH,
        targets_M,
        vocab_start=group.rank() * weight_VH.shape[0],
        vocab_size=model.vocab_size,
        allowed_K=allowed_K,
        group=group,
        temperatures_N=temperatures_M,
        learned_N=micro.loss_M,
        is_exact=model.config.numerics == "exact",
    )
    entropy_M = entropy_M if learns_entropy else entropy_M.detach()
    if micro.here_M is None:
        return log_probs_M, entropy_M
    log_probs_N, entropy_N = _joined(micro, torch.stack([log_probs_M, entropy_M]))
    return log_probs_N, entropy_N


# ---------------------------------------------------------------- over all ranks


def speaks() -> bool:
    """Whether this rank answers for its data-parallel rank: first tensor and context rank of the
    last stage."""
    first = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    return bool(first and parallel_state.is_pipeline_last_stage())


def gather_scores(
    model: Model, batch: Batch, packs: Packs, values: Sequence[torch.Tensor], *, rows: int
) -> torch.Tensor:
    """Put the packs' scores, [`rows`, N] each, in the batch's order: [`rows`, T] on the CPU of
    every rank."""
    result_RT = torch.zeros(rows, len(batch.tokens_T), device=model.device)
    if speaks():
        for one, value_RN in zip(packs, values, strict=True):
            result_RT[:, one.rows_N] = value_RN
    dist.all_reduce(result_RT)
    return result_RT.cpu()


def reduce_sums(model: Model, reports: Sequence[Report], batch: Batch, spec: LossSpec) -> StepSums:
    """Add up the reports over packs and data-parallel ranks. Only ranks that speak contribute to
    the sums."""
    stacked = (
        torch.stack([report.sums for report in reports])
        if reports
        else torch.zeros(1, NUM_REPORTED, dtype=torch.float64, device=model.device)
    )
    total, worst = stacked[:, :-1].sum(0), stacked[:, -1].max()
    total = total if speaks() else torch.zeros_like(total)
    dist.all_reduce(total)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    loss_sum, clipped, logprob_gap, kl, entropy, kl_sampler, value_loss, far = total.tolist()
    return StepSums(
        loss=loss_sum,
        num_clipped=clipped,
        logprob_gap=logprob_gap,
        logprob_gap_max=float(worst),
        gap_tokens=batch.num_loss_tokens if registered(spec.name).takes_sampler else 0,
        kl=kl,
        kl_tokens=batch.num_loss_tokens if spec.kl is not None else 0,
        entropy=entropy,
        kl_sampler=kl_sampler,
        num_tokens=batch.num_loss_tokens,
        num_loss_sequences=batch.num_loss_sequences,
        num_sequences=len(batch.lengths),
        value_loss=value_loss,
        num_values_clipped=far,
        **({} if spec.value is None else value_sums(batch)),
    )
