"""One rank's model, adapters and optimizer: config in, training steps out.

    init process groups -> build the model through Megatron-Bridge -> freeze it -> hook adapters on
    forward_backward over micro-batches (sums) ... forward_backward -> optim_step (reduce once, divide once, clip, AdamW)

With finetuning_type "lora" the base is frozen and fp32 adapters train; with "full" every parameter of the model does, and there is no
adapter. Every method is a collective: all ranks call it with the same arguments.
A loss is a sum over tokens, and gradients are reduced and divided once, at `optim_step`, so a step does not depend on how its tokens were
cut into micro-batches or calls, or where they ran. What is pending is dropped, never half kept, where a call fails after it has begun.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from trainer_node import gap, objects, pack_size, rendezvous
from trainer_node.batch import Batch, BatchError, MicroBatch, Packs, check_accumulation, check_routing, micro_batches
from trainer_node.dropout import key_of
from trainer_node.hf import HfCheckpoint, read_config
from trainer_node.losses import (
    LossInputs,
    bind_loss,
    gather_positions,
    import_losses,
    linear_statistics,
    registered,
    total_loss,
)
from trainer_node.merge import strip_wrappers
from trainer_node.offload import HostCopies, held_tensors, storage_bytes
from trainer_node.peft_io import read_together
from trainer_node.sums import Pending, StepSums

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTROL_TIMEOUT_S = 3600.0
"""Deadline of the control group's collectives; rank 0 sends a keepalive much more often."""


MAX_REFERENCES = 4
"""Adapters that are kept for KL terms; the one unused for longest goes."""
COMPILE_BACKEND = "inductor"
NUM_REPORTED = 6
"""What `_loss` reports of a micro-batch: loss, clipped tokens, log-prob gap, KL, entropy (sums) and the largest gap."""


class NonFiniteGradient(SpliceError, ArithmeticError):
    """The gradient's norm is not finite; the step was skipped and the weights are untouched."""


class NothingPending(SpliceError, RuntimeError):
    """An optimizer step without a forward_backward before it."""


class TrainerRuntime:
    """The model of one rank. Use `close` at the end.

    Raises:
        ConfigError: the config, the checkpoint and the topology do not fit together.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.hf_config = read_config(config.model)
        import_losses(config.loss_modules)
        self.pending = self.used = Pending()
        """Of `used` the last optimizer step was made, or would have been."""
        self.num_steps, self.num_skipped_steps = 0, 0
        self.steps_since_sent = 0
        """Optimizer steps since the weights were last sent, or loaded from a checkpoint or adapter; 0: a step now should be on policy."""
        self.first_forward_s = 0.0
        """Monotonic clock at the first forward pass since whoever wants to know set it to 0."""
        _check_topology(config, self.hf_config)
        if config.device == "cpu":
            from trainer_node import cpu_shims

            cpu_shims.apply()
        objects.restrict_torch()
        self.device = _init_distributed(config)
        timeout = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
        self.control_group = dist.new_group(backend="gloo", timeout=timeout)
        self.staging_group = dist.new_group(backend="gloo", timeout=timeout)
        self.gather_group = dist.new_group(timeout=timeout)
        """For the pieces of weights that ranks send to rank 0 (`gathering`), whose waits have deadlines of their own."""
        self._build_model()
        self._adapt()
        self.references: dict[Path, list[torch.Tensor]] = {}
        if config.adapter is not None:
            self.load_adapter(config.adapter)
        self.micro_batch_tokens = pack_size.DEFAULT_TOKENS
        """Most tokens of a pack."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # building took more than what is left of it (experts are copied into stacks)
        self.micro_batch_tokens = pack_size.tokens_for(self)

    # ------------------------------------------------------------ building

    def _build_model(self) -> None:
        from megatron.bridge import AutoBridge

        auto = AutoBridge.from_hf_config(self.hf_config)
        self.provider = self._provider(auto)
        # The instance caches the parameter names of all pipeline ranks, so one is kept for good.
        self.bridge = auto._model_bridge
        self.bridge._unwrap_name = strip_wrappers
        self.bridge.hf_config = self.hf_config
        self.checkpoint = HfCheckpoint(
            self.config.model,
            self.hf_config,
            padded_vocab=_padded_vocab(self.provider),
            with_weights=self.config.init == "hf",
        )
        self.model = [self._provide()]
        if self.config.init == "hf":
            self._load_weights()
        else:
            self._random_weights()
        self.model[0].requires_grad_(False)
        self.conversion_tasks = self.bridge.build_conversion_tasks(self.checkpoint, self.model)
        for task in self.conversion_tasks:
            # Bridge 0.3.1 would send its whole configuration between pipeline ranks, pickled. Every rank has the same one.
            task.mapping._broadcast_obj_cache |= dict.fromkeys(("qkv_config", "kv_config"), self.provider)

    def _provider(self, auto: Any) -> Any:
        parallel = self.config.parallel
        provider = auto.to_megatron_provider(load_weights=False)
        provider.tensor_model_parallel_size = parallel.tensor
        provider.pipeline_model_parallel_size = parallel.pipeline
        provider.expert_model_parallel_size = parallel.expert
        provider.expert_tensor_parallel_size = parallel.expert_tensor
        provider.context_parallel_size = parallel.context
        provider.sequence_parallel = parallel.sequence and parallel.tensor > 1
        provider.params_dtype = provider.pipeline_dtype = self.dtype
        provider.bf16, provider.fp16 = self.dtype is torch.bfloat16, False
        provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128
        # Not linear in the micro-batch cut (Bridge sets 1e-3 for Qwen3-MoE).
        provider.moe_aux_loss_coeff = 0.0
        # Bridge assumes normalised top-k probabilities; HF has both.
        provider.moe_router_pre_softmax = not getattr(self.hf_config, "norm_topk_prob", True)
        # Whether the choice of experts is replayed is said for each micro-batch (`_replay_routing`); a fused router would not listen.
        provider.moe_enable_routing_replay = bool(getattr(self.hf_config, "num_experts", None))
        provider.moe_router_fusion = False
        # On GPUs; unfused rotary embeddings of packed sequences also read the sequences' bounds back to the host, in every layer.
        # (Without dropout and bias the fused bias-dropout is one addition, which Megatron would compile for every shape.)
        provider.apply_rope_fusion = provider.bias_activation_fusion = True
        # The base is frozen: nothing accumulates into main_grad, and sums are divided by us.
        provider.gradient_accumulation_fusion = False
        provider.calculate_per_token_loss = True
        provider.finalize_model_grads_func = None
        provider.attention_dropout = provider.hidden_dropout = 0.0
        provider.perform_initialization = False
        if self.config.recompute != "none":
            provider.recompute_granularity = self.config.recompute
        if self.config.recompute == "full":
            provider.recompute_method, provider.recompute_num_layers = "uniform", 1
        if self.config.device == "cpu":
            from trainer_node import cpu_shims

            cpu_shims.prepare_provider(provider)
        provider.finalize()
        return provider

    def _provide(self) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_router_replay_instances()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.provider._pg_collection = groups
        first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
        model = self.provider.provide(pre_process=first, post_process=last)
        model.to(self.device)
        self._routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
        if first and self.config.recompute == "full":
            # Megatron's checkpointing is reentrant: without an input that wants a gradient the adapters behind it would get none.
            model.embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_())
        if self.config.compile:
            for layer in model.decoder.layers:
                layer.compile(backend=COMPILE_BACKEND)
        if last:
            self._head = model
            # The model ends with its hidden states: logits are made where there is loss, a chunk at a time (`_statistics`).
            model.output_layer.forward = lambda hidden, **_: (hidden, None)
        for module in model.modules():
            if isinstance(module, MoELayer) and not self.provider.sequence_parallel:
                # In training mode the layer refuses tensor parallelism without sequence parallelism, for speed only. Its own flag
                # decides nothing else; the modules below it keep theirs.
                module.training = False
        return model

    def _load_weights(self) -> None:
        self.bridge._with_progress_tracking = lambda tasks, *_, **__: iter(tasks)
        self.bridge.load_weights_hf_to_megatron(self.checkpoint, self.model)

    @torch.no_grad()
    def _random_weights(self) -> None:
        """Normal weights of the config's std on the device, seeded by global name, so that pipeline and expert ranks do not matter."""
        from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
        from megatron.core import parallel_state

        tied = bool(self.hf_config.tie_word_embeddings)
        tp_rank, etp_rank = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        for local, param in self.model[0].named_parameters():
            if param.dim() < 2:
                continue
            name = _megatron_local_name_to_global(self.model, self.provider, strip_wrappers(local), 0)
            if tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            part = etp_rank if ".experts." in name else 0 if ".router." in name else tp_rank
            key = f"{self.config.seed}:{name}:{part}"
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
            generator = torch.Generator(device=self.device).manual_seed(seed)
            param.normal_(0.0, self.hf_config.initializer_range, generator=generator)

    def _adapt(self) -> None:
        """Decide what trains: adapters on the frozen model, or (with none) the model itself."""
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from trainer_node.lora import AdapterSet
        from trainer_node.optimizer import ShardedAdamW
        from trainer_node.parameters import count, model_parameters

        self.adapters = AdapterSet(
            tasks=() if self.trains_all else self.conversion_tasks,
            layers=[m for m in self.model[0].modules() if isinstance(m, TransformerLayer)],
            config=self.provider,
            lora=self.config.lora,
            seed=self.config.seed,
            device=self.device,
        )
        if self.trains_all:
            self.model[0].requires_grad_(True)
            tied = bool(self.hf_config.tie_word_embeddings)
            self.params = model_parameters(
                self.model[0], self.conversion_tasks, config=self.provider, tied=tied, vocab_size=self.vocab_size
            )
        else:
            self.params = self.adapters.params()
            self._stack_experts()
        self.optimizer = ShardedAdamW(self.params)
        self.num_parameters = count(self.params, self.device)
        if self.num_parameters == 0:
            raise ConfigError(f"no linear of the model is among the lora targets {self.config.lora.targets}")

    def _stack_experts(self) -> None:
        """Put grouped products in the place of Megatron's experts where they compute the same."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        from trainer_node.experts import StackedExperts, understood

        if self.config.lora.dropout or not understood(self.provider, self.device):
            return
        for layer in [m for m in self.model[0].modules() if isinstance(m, MoELayer)]:
            linears = layer.experts.linear_fc1, layer.experts.linear_fc2
            adapters = tuple(self.adapters.by_module.get(linear) for linear in linears)
            StackedExperts(layer, adapters, is_on=lambda: self.adapters.is_on)  # type: ignore[arg-type]

    @property
    def trains_all(self) -> bool:
        """Whether the model's own parameters train; there are no adapters then."""
        return self.config.finetuning_type == "full"

    def need_adapters(self, what: str) -> None:
        """Raises ConfigError in full-parameter training, for what only adapters make possible."""
        if self.trains_all:
            raise ConfigError(f"{what} needs adapters, and this trainer has none: it was started with finetuning_type = 'full'")

    @property
    def vocab_size(self) -> int:
        """The HF vocabulary's size, without Megatron's padding."""
        return int(self.hf_config.vocab_size)

    @property
    def max_length(self) -> int:
        """Longest sequence the model knows positions for."""
        return int(self.hf_config.max_position_embeddings)

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.config.lora.alpha / self.config.lora.rank

    # ------------------------------------------------------------ a step

    def train_step(
        self, batch: Batch, loss: LossSpec, optim: OptimParams, *, grad_accumulation_sequences: int | None = None
    ) -> dict[str, float]:
        """`forward_backward`, then `optim_step` with all that is pending; returns the latter's metrics and seconds_forward_backward."""
        started = time.monotonic()
        self.forward_backward(batch, loss, grad_accumulation_sequences=grad_accumulation_sequences)
        middle = time.monotonic()
        return self.optim_step(optim) | {"seconds_forward_backward": middle - started}

    def drop_pending(self) -> int:
        """Forget accumulated gradients. Returns how many batches they came from."""
        dropped = self.pending.num_batches
        self.pending = Pending()
        for p in self.params:
            p.drop_grad()
        return dropped

    def forward_backward(
        self, batch: Batch, loss: LossSpec, *, loss_weight: float = 1.0, grad_accumulation_sequences: int | None = None
    ) -> StepSums:
        """Add the gradient of `loss_weight` times the summed loss to what is pending; nothing is reduced or divided yet.

        Returns the batch's own sums.

        Raises:
            ConfigError: the loss or the cut is refused; what is pending stays.
            LogprobGapError: trainer and sampler are further apart than the loss allows; what was pending is dropped.
            Exception: anything later; what was pending is dropped, and a note on the exception says so.
        """
        batch = self.check(batch, loss, grad_accumulation_sequences=grad_accumulation_sequences)
        try:
            if loss.kl is not None and loss.kl.reference != "given":
                with self.reference_in_place(loss.kl.adapter_dir):
                    base_T, _ = self.forward(
                        batch, allowed_token_ids=loss.allowed_token_ids, adapters=loss.kl.reference == "adapter"
                    )
                batch = replace(batch, reference_logprobs_T=base_T)
            with self.adapters.dropout.on(self._dropout_key()):
                reports = self._schedule(
                    self._cut(batch), partial(self._loss, loss, self._allowed(loss.allowed_token_ids), loss_weight)
                )
            sums = self._reduce_sums(reports, batch, loss)
            gap.check(sums, loss)
        except BaseException as error:
            dropped = self.drop_pending()
            error.add_note(f"Gradients pending from {dropped} batches before it were dropped with it.")
            raise
        self.pending = self.pending.plus(sums, normalize_by=loss.normalize_by, rows=len(batch.tokens_T))
        return sums

    def check(self, batch: Batch, loss: LossSpec, *, grad_accumulation_sequences: int | None = None) -> Batch:
        """All that `forward_backward` refuses; returns the batch, whose parts need no longer check their routing.

        Raises:
            ConfigError: the loss or the cut is refused; nothing has changed.
        """
        from megatron.core import parallel_state

        bind_loss(loss)
        self.pending.check(loss.normalize_by)
        if loss.kl is not None and loss.kl.reference != "given":
            self.need_adapters(f"a KL term with reference {loss.kl.reference!r} (send reference log-probs and use 'given')")
        if loss.kl is not None and loss.kl.adapter_dir is not None:
            self.read_reference(Path(loss.kl.adapter_dir))
        check_accumulation(grad_accumulation_sequences, dp_size=parallel_state.get_data_parallel_world_size())
        self._check_routing(batch)
        return batch if batch.routing_is_checked else replace(batch, routing_is_checked=True)

    def _dropout_key(self) -> int:
        """Another one for each optimizer step; the counters are in checkpoints."""
        return key_of(self.config.seed, self.num_steps, self.num_skipped_steps)

    @torch.no_grad()
    def forward(
        self, batch: Batch, *, allowed_token_ids: Sequence[int] | None = None, adapters: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy, at the batch's temperatures, of every token that its loss mask marks; [T], fp32 on the CPU, on every rank.

        Rows as in `messages.FORWARD_RESULTS`; 0 where the mask is 0. Gradients, weights and optimizer are untouched.

        Args:
            adapters: False: the base model's.
        """
        if not adapters:
            self.need_adapters("a forward pass of the base model")
        micro = self._cut(batch)
        with self.adapters.switched(on=adapters):
            values = self._schedule(micro, partial(self._scores, self._allowed(allowed_token_ids)), forward_only=True)
        result_2T = torch.zeros(2, len(batch.tokens_T), device=self.device)
        if self._speaks():
            for one, value_2N in zip(micro, values, strict=True):
                result_2T[:, one.rows_N] = value_2N
        dist.all_reduce(result_2T)
        logprobs_T, entropy_T = result_2T.cpu()
        return logprobs_T, entropy_T

    def _allowed(self, ids: Sequence[int] | None) -> torch.Tensor | None:
        return None if ids is None else torch.tensor(sorted(set(ids)), device=self.device)

    def _cut(self, batch: Batch) -> Packs:
        """This rank's micro-batches, on its device, each from when it is first asked for."""
        from megatron.core import parallel_state

        parallel = self.config.parallel
        return micro_batches(
            batch,
            budget=self.micro_batch_tokens,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            least=parallel.pipeline,
            same_length=max(parallel.pipeline, parallel.expert, parallel.expert_tensor) > 1,
            multiple=parallel.tensor if self.provider.sequence_parallel else 1,
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=parallel.context,
            device=self.device,
        )

    def _schedule(self, micro: Packs, loss: Callable[..., Any], *, forward_only: bool = False) -> list[torch.Tensor]:
        """Megatron's schedule over these micro-batches; `loss(micro, hidden)`'s reports, on the last pipeline stage only.

        Nothing in it waits for the device: what depends on the data (positions with loss, sequence bounds) was worked out on the CPU.
        """
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            one = next(data)
            self.first_forward_s = self.first_forward_s or time.monotonic()
            self._replay_routing(one)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=one.cu_seqlens,
                cu_seqlens_kv=one.cu_seqlens,
                max_seqlen_q=one.max_seqlen,
                max_seqlen_kv=one.max_seqlen,
            )
            if self.config.parallel.context > 1:
                # TransformerEngine's context parallelism wants them. Sequences keep their padding: causal attention never looks there.
                packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = one.cu_seqlens
            # Travels with what the layers get, and so reaches a recomputed one as well. Rows of batches that are pending count.
            packed.rows_L = one.rows_L + self.pending.num_rows  # type: ignore[attr-defined]
            output = model(
                input_ids=one.tokens_L[None], position_ids=one.positions_L[None], attention_mask=None, packed_seq_params=packed
            )
            return output, partial(loss, one)

        reports: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro),
            model=self.model,
            num_microbatches=len(micro),
            seq_length=micro.lengths[0],
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports

    def check_routing_early(self, batch: Batch) -> Batch:
        """The batch, marked if its routed experts are this model's, which takes long to see. If they are not, it is refused in its turn. From any
        thread."""
        with contextlib.suppress(BatchError):
            self._check_experts(batch)
            return replace(batch, routing_is_checked=True)
        return batch

    def _check_experts(self, batch: Batch) -> None:
        hf = self.hf_config
        num_experts, top_k = getattr(hf, "num_experts", None) or 0, getattr(hf, "num_experts_per_tok", 0)
        check_routing(batch, num_layers=hf.num_hidden_layers, num_experts=num_experts, top_k=top_k)

    def _check_routing(self, batch: Batch) -> None:
        parallel = self.config.parallel
        if not batch.routing_is_checked:
            self._check_experts(batch)
        if batch.routed_experts_T is not None and parallel.pipeline > 1 and self.config.recompute == "full":
            # Routers hold one micro-batch's experts; recomputing one while others are on their way would take the wrong ones.
            raise BatchError(
                "routed_experts: cannot be replayed with recompute = 'full' and parallel.pipeline > 1; use 'selective'"
            )

    def _replay_routing(self, micro: MicroBatch) -> None:
        """Tell this stage's routers where the micro-batch's tokens go, or to choose by themselves."""
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        for router in self._routers:
            replay = router.router_replay
            replay.clear_indices()
            replay.clear_router_replay_action()
            if micro.routed_experts_L is None:
                continue
            experts_LK = micro.routed_experts_L[:, router.layer_number - 1]
            if self.provider.sequence_parallel:
                group = parallel_state.get_tensor_model_parallel_group()
                experts_LK = experts_LK.chunk(group.size())[group.rank()]
            replay.set_target_indices(experts_LK)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def _statistics(
        self, micro: MicroBatch, allowed_K: torch.Tensor | None, hidden_1LH: torch.Tensor, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy where the micro-batch has loss, [N] each; context-parallel ranks put theirs together, so that a loss sees whole
        sequences and is the same on each of them."""
        from megatron.core import parallel_state, tensor_parallel

        group, head, hidden_LH = parallel_state.get_tensor_model_parallel_group(), self._head, hidden_1LH[0]
        tied = head.share_embeddings_and_output_weights
        weight_VH = head.shared_embedding_or_output_weight() if tied else head.output_layer.weight
        # Each rank's part of the vocabulary gives the hidden states one term of their gradient; the region's backward adds them up.
        if self.provider.sequence_parallel:
            hidden_LH = tensor_parallel.gather_from_sequence_parallel_region(hidden_LH, group=group)
        predictors_M, targets_M, temperatures_M = micro.predictors_N, micro.targets_N, micro.temperatures_N
        if micro.here_M is not None:
            predictors_M, targets_M = predictors_M[micro.here_M], targets_M[micro.here_M]
            temperatures_M = None if temperatures_M is None else temperatures_M[micro.here_M]
        hidden_MH = hidden_LH.index_select(0, predictors_M)
        if not self.provider.sequence_parallel:
            hidden_MH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_MH, group=group)
        mine = linear_statistics(
            hidden_MH,
            weight_VH,
            targets_M,
            vocab_start=group.rank() * weight_VH.shape[0],
            vocab_size=self.vocab_size,
            allowed_K=allowed_K,
            group=group,
            with_entropy=with_entropy,
            temperatures_N=temperatures_M,
        )
        if micro.here_M is None:
            return mine
        log_probs_N, entropy_N = gather_positions(
            torch.stack(mine), micro.here_M, len(micro.rows_N), parallel_state.get_context_parallel_group()
        )
        return log_probs_N, entropy_N

    def _scores(
        self, allowed_K: torch.Tensor | None, micro: MicroBatch, hidden_1LH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the schedule's forward-only run: nothing, no count, and [log-prob, entropy] as [2, N]."""
        result = torch.zeros(2, len(micro.rows_N), device=self.device)
        if len(micro.rows_N):
            result = torch.stack(self._statistics(micro, allowed_K, hidden_1LH, with_entropy=True))
        nothing = torch.zeros((), device=self.device)
        return nothing, nothing.to(torch.int), result

    def _loss(
        self, spec: LossSpec, allowed_K: torch.Tensor | None, weight: float, micro: MicroBatch, hidden_1LH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the schedule wants on the last stage: summed loss, its token count, and the NUM_REPORTED sums for the report."""
        count = torch.full((), len(micro.rows_N), dtype=torch.int, device=self.device)
        if not len(micro.rows_N):
            zeros = torch.zeros(NUM_REPORTED, dtype=torch.float64, device=self.device)
            return hidden_1LH.float().sum() * 0.0, count, zeros
        log_probs_N, entropy_N = self._statistics(micro, allowed_K, hidden_1LH, with_entropy=spec.entropy_bonus != 0.0)
        inputs = LossInputs(
            log_probs_N=log_probs_N,
            sampler_logprobs_N=micro.sampler_logprobs_N,
            advantages_N=micro.advantages_N,
            old_logprobs_N=micro.old_logprobs_N,
            sequence_N=micro.sequence_N,
            num_sequences=micro.num_sequences,
        )
        terms = total_loss(inputs, spec, entropy_N=entropy_N, reference_logprobs_N=micro.reference_logprobs_N)
        total = terms.total * weight
        reported = (total.detach(), terms.num_clipped, terms.logprob_gap, terms.kl, terms.entropy, terms.logprob_gap_max)
        return total, count, torch.stack([x.double() for x in reported])

    def _speaks(self) -> bool:
        """Whether this rank answers for its data-parallel rank: first tensor and context rank of the last stage."""
        from megatron.core import parallel_state

        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return bool(first and parallel_state.is_pipeline_last_stage())

    def _reduce_sums(self, reports: list[torch.Tensor], batch: Batch, spec: LossSpec) -> StepSums:
        """Add up over micro-batches and data-parallel ranks; only those that speak have a say."""
        stacked = torch.stack(reports) if reports else torch.zeros(1, NUM_REPORTED, dtype=torch.float64, device=self.device)
        total, worst = stacked[:, :-1].sum(0), stacked[:, -1].max()
        total = total if self._speaks() else torch.zeros_like(total)
        dist.all_reduce(total)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        loss, clipped, logprob_gap, kl, entropy = total.tolist()
        return StepSums(
            loss=loss,
            num_clipped=clipped,
            logprob_gap=logprob_gap,
            logprob_gap_max=float(worst),
            gap_tokens=batch.num_loss_tokens if registered(spec.name).takes_sampler else 0,
            kl=kl,
            kl_tokens=batch.num_loss_tokens if spec.kl is not None else 0,
            entropy=entropy,
            entropy_tokens=batch.num_loss_tokens if spec.entropy_bonus != 0.0 else 0,
            num_tokens=batch.num_loss_tokens,
            num_loss_sequences=batch.num_loss_sequences,
            num_sequences=len(batch.lengths),
        )

    def optim_step(self, optim: OptimParams) -> dict[str, float]:
        """Reduce what is pending, divide it once, clip, step. Nothing is pending afterwards, whatever happens.

        Returns:
            loss (divided as the gradient is), grad_norm (before clipping), tokens, num_sequences, num_batches, logprob_gap_mean and
            logprob_gap_max (|trainer - sampler|), clip_fraction, kl_mean and entropy_mean (where asked for), skipped_steps (so far), seconds_optim.

        Raises:
            NothingPending: no forward_backward since the last step.
            NonFiniteGradient: the step was skipped; weights and optimizer are untouched.
        """
        started, pending = time.monotonic(), self.pending
        if not pending.num_batches:
            raise NothingPending("no gradients are pending: send ForwardBackward before OptimStep")
        self.used = pending
        try:
            grad_norm = self._step(optim, denominator=pending.denominator)
        except NonFiniteGradient as error:
            self.num_skipped_steps += 1
            error.add_note(
                f"The step was skipped: weights and optimizer are untouched, the gradients of {pending.num_batches} batches "
                f"were dropped. Steps skipped so far: {self.num_skipped_steps}."
            )
            raise
        except BaseException as error:
            error.add_note(f"The gradients of {pending.num_batches} batches were dropped.")
            raise
        finally:
            self.drop_pending()
        self.num_steps += 1
        self.steps_since_sent += 1
        return pending.sums.metrics(pending.normalize_by) | {
            "grad_norm": grad_norm,
            "num_batches": float(pending.num_batches),
            "skipped_steps": float(self.num_skipped_steps),
            "seconds_optim": time.monotonic() - started,
        }

    @torch.no_grad()
    def _step(self, optim: OptimParams, *, denominator: float) -> float:
        """Returns the norm before clipping."""
        from trainer_node.parameters import global_norm

        self._finalize_gradients(denominator)
        norm = global_norm(self.params, self.device)
        if not torch.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {float(norm)}")
        # torch.nn.utils.clip_grad_norm_'s formula.
        factor = None if optim.max_grad_norm is None else (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(optim, factor=factor)
        return float(norm)

    def _finalize_gradients(self, denominator: float) -> None:
        from trainer_node.parameters import finalize_gradients

        sequence_parallel = bool(self.provider.sequence_parallel)
        finalize_gradients(self.params, denominator=denominator, sequence_parallel=sequence_parallel)

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """The pending gradient, finalised as `optim_step` does (summed, divided once, not clipped); nothing is pending afterwards.

        Returns whole fp32 tensors by HF name on the CPU of rank 0, an empty dict elsewhere; of adapters under PEFT's names, `lora_A` and
        `lora_B` after the module's, experts one by one. For checks: everything passes through rank 0's memory.

        Raises:
            NothingPending: no forward_backward since the last step.
        """
        if not self.pending.num_batches:
            raise NothingPending("no gradients are pending: send ForwardBackward first")
        try:
            self._finalize_gradients(self.pending.denominator)
            return self._whole([p.grad for p in self.params])
        finally:
            self.drop_pending()

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """What is trained, as `take_gradients` returns the gradients. A collective; for checks."""
        return self._whole([p.param.detach() for p in self.params])

    def _whole(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """One tensor for each parameter, gathered to whole ones by HF name on rank 0, experts one by one."""
        from trainer_node.parameters import gather

        whole = gather(self.params, tensors, self.control_group)
        found = {}
        for name, tensor in whole.items():
            before, stacked, rest = name.partition(".experts.")
            if stacked and tensor.dim() == 3:
                found.update({f"{before}.experts.{e}.{rest}": one for e, one in enumerate(tensor)})
            else:
                found[name] = tensor
        return found

    def seed(self, step: int) -> None:
        """Seed this process's generators for what follows `step`; for a state that was saved at another topology."""
        from megatron.core import tensor_parallel

        torch.manual_seed(self.config.seed + step)
        if self.device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(self.config.seed + step)

    # ------------------------------------------------------------ adapters from PEFT

    def load_adapter(self, folder: Path) -> int:
        """Put a PEFT adapter in the place of the present one; the optimizer starts afresh. Returns the batches whose gradients were dropped.

        Raises:
            AdapterError: on every rank, it does not fit or is not whole; nothing changed.
        """
        self.need_adapters(f"loading the adapter {folder}")
        whole = read_together(self, folder)
        self.adapters.load(whole)  # type: ignore[arg-type]
        self.optimizer.state.clear()
        self.steps_since_sent = 0
        return self.drop_pending()

    def read_reference(self, folder: Path) -> None:
        """Keep this rank's pieces of a PEFT adapter for `reference_in_place`; a folder is read once while it is among the last `MAX_REFERENCES`.

        Raises:
            AdapterError: as `load_adapter`.
        """
        if folder in self.references:
            self.references[folder] = self.references.pop(folder)
            return
        self.need_adapters("a KL term with reference 'adapter' (send reference log-probs and use 'given')")
        whole = read_together(self, folder)
        while len(self.references) >= MAX_REFERENCES:
            del self.references[next(iter(self.references))]
        pieces = [torch.empty_like(p.param.data) for p in self.params]
        self.references[folder] = pieces
        try:
            with self.reference_in_place(str(folder)):
                self.adapters.load(whole)  # type: ignore[arg-type]
        except BaseException:
            del self.references[folder]  # its memory was never written whole
            raise

    @contextlib.contextmanager
    def reference_in_place(self, folder: str | None) -> Iterator[None]:
        """Within the block the adapters are those that `read_reference` kept (None: the present ones); no number is copied."""
        pieces = self.references[Path(folder)] if folder is not None else []
        present = [p.param.data for p in self.params] if pieces else []
        try:
            for p, piece in zip(self.params, pieces, strict=False):
                p.param.data = piece
            yield
        finally:
            for p, data in zip(self.params, present, strict=False):
                p.param.data = data

    # ------------------------------------------------------------ memory between jobs

    _host_copies: HostCopies | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether `offload` was the last of the two."""
        return self._host_copies is not None and self._host_copies.holds_data

    def offload(self) -> int:
        """Move every tensor of the model, adapters, optimizer and pending gradients to host memory and free the device's.

        Returns the bytes that this rank holds on the host. Twice is once.
        """
        if self._host_copies is None:
            self._host_copies = HostCopies(pinned=self.device.type == "cuda")
        self._host_copies.take(held_tensors(self))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._host_copies.nbytes

    def reload(self) -> None:
        """Undo `offload`: every tensor has its bytes again, and every view of it is a view of it still."""
        if self._host_copies is not None:
            self._host_copies.give_back()

    def resident_bytes(self) -> int:
        """Bytes of the model, adapters, optimizer and pending gradients where they compute."""
        return storage_bytes(held_tensors(self))

    def close(self) -> None:
        """Leave the process groups. Safe to call twice."""
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _padded_vocab(provider: Any) -> int:
    from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

    return int(
        calculate_padded_vocab_size(
            provider.vocab_size, provider.make_vocab_size_divisible_by, provider.tensor_model_parallel_size
        )
    )


def _check_topology(config: TrainerConfig, hf_config: Any) -> None:
    """Sizes that do not divide and what does not go together, before anything is allocated or a process group made."""
    parallel, world = config.parallel, int(os.environ.get("WORLD_SIZE", "1"))
    if world != parallel.world_size:
        raise ConfigError(f"parallel.world_size is {parallel.world_size} but {world} ranks were started")
    experts = getattr(hf_config, "num_experts", None) or 0
    for size, field, value, what in (
        (parallel.tensor, "tensor", hf_config.num_attention_heads, "attention heads"),
        (parallel.tensor, "tensor", hf_config.num_key_value_heads, "key-value heads"),
        (parallel.tensor, "tensor", 0 if experts else hf_config.intermediate_size, "intermediate_size"),
        (parallel.pipeline, "pipeline", hf_config.num_hidden_layers, "layers"),
        (parallel.expert, "expert", experts, "experts"),
        (parallel.expert_tensor, "expert_tensor", hf_config.moe_intermediate_size if experts else 0, "moe_intermediate_size"),
    ):
        if value % size or (field.startswith("expert") and size > 1 and not experts):
            raise ConfigError(f"parallel.{field} = {size} does not divide the model's {value} {what}; choose a divisor")
    lora = config.lora
    if (
        experts
        and config.finetuning_type == "lora"
        and lora.dropout
        and {"gate_proj", "up_proj", "down_proj"} & set(lora.targets)
    ):
        _check_expert_dropout(parallel)


def _check_expert_dropout(parallel: ParallelConfig) -> None:
    """Each copy of a token that an expert gets has to drop the same elements."""
    if parallel.tensor > 1 and parallel.expert > 1 and not parallel.sequence:
        raise ConfigError(
            "lora.dropout on experts with parallel.tensor > 1 and parallel.expert > 1 needs parallel.sequence = True: without it an "
            "expert gets every token once from each tensor rank and would drop other elements of each copy"
        )
    if parallel.expert_tensor > 1:
        raise ConfigError(
            "lora.dropout on experts needs parallel.expert_tensor = 1: the ranks that share an expert would drop other elements of "
            "the same token"
        )


def _init_distributed(config: TrainerConfig) -> torch.device:
    """Process groups, and the device of this rank."""
    from megatron.core import parallel_state, tensor_parallel

    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rendezvous.join(config)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        context_parallel_size=parallel.context,
        distributed_timeout_minutes=config.collective_timeout_s / 60,  # type: ignore[arg-type]
        create_gloo_process_groups=False,
    )
    if config.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    torch.manual_seed(config.seed)
    return device
