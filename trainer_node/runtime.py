"""One rank's model, adapters and optimizer: config in, training steps out.

    init process groups -> build the model through Megatron-Bridge -> freeze it -> hook adapters on
    train_step: forward_backward over micro-batches (sums) -> optim_step (reduce once, divide once, clip, AdamW)

The base is frozen; only fp32 adapters train. Every method is a collective: all ranks call it with the same arguments.
A loss is a sum over tokens, and gradients are divided once by the global number of loss tokens, so a step does not depend on how the
batch was cut or where it ran.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages import LossSpec, OptimParams
from trainer_node.batch import Batch, MicroBatch, micro_batches
from trainer_node.hf import HfCheckpoint, read_config
from trainer_node.losses import cross_entropy, grpo, vocab_parallel_log_probs
from trainer_node.merge import strip_wrappers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTROL_TIMEOUT_S = 3600.0
"""Deadline of the control group's collectives; rank 0 sends a keepalive much more often."""


class NonFiniteGradient(SpliceError, ArithmeticError):
    """The gradient's norm is not finite; the step was skipped and the weights are untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums over the loss tokens of the whole batch, the same on every rank."""

    loss: float
    num_clipped: float
    logprob_gap: float
    logprob_gap_max: float
    num_tokens: int
    num_sequences: int


class TrainerRuntime:
    """The model of one rank. Use `close` at the end.

    Raises:
        ConfigError: the config, the checkpoint and the topology do not fit together.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.hf_config = read_config(config.model)
        _check_topology(config, self.hf_config)
        if config.device == "cpu":
            from trainer_node import cpu_shims

            cpu_shims.apply()
        self.device = _init_distributed(config)
        self.control_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=CONTROL_TIMEOUT_S))
        self._build_model()
        self._adapt()

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

    def _provider(self, auto: Any) -> Any:
        parallel = self.config.parallel
        provider = auto.to_megatron_provider(load_weights=False)
        provider.tensor_model_parallel_size = parallel.tensor
        provider.pipeline_model_parallel_size = parallel.pipeline
        provider.expert_model_parallel_size = parallel.expert
        provider.expert_tensor_parallel_size = 1
        provider.params_dtype = provider.pipeline_dtype = self.dtype
        provider.bf16, provider.fp16 = self.dtype is torch.bfloat16, False
        provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128
        # Not linear in the micro-batch cut (Bridge sets 1e-3 for Qwen3-MoE).
        provider.moe_aux_loss_coeff = 0.0
        # Bridge assumes normalised top-k probabilities; HF has both.
        provider.moe_router_pre_softmax = not getattr(self.hf_config, "norm_topk_prob", True)
        # The base is frozen: nothing accumulates into main_grad, and sums are divided by us.
        provider.gradient_accumulation_fusion = False
        provider.calculate_per_token_loss = True
        provider.finalize_model_grads_func = None
        provider.attention_dropout = provider.hidden_dropout = 0.0
        provider.perform_initialization = False
        if self.config.device == "cpu":
            from trainer_node import cpu_shims

            cpu_shims.prepare_provider(provider)
        provider.finalize()
        return provider

    def _provide(self) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.moe_layer import MoELayer

        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.provider._pg_collection = groups
        first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
        model = self.provider.provide(pre_process=first, post_process=last)
        model.to(self.device)
        for module in model.modules():
            if isinstance(module, MoELayer):
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
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        for local, param in self.model[0].named_parameters():
            if param.dim() < 2:
                continue
            name = _megatron_local_name_to_global(self.model, self.provider, strip_wrappers(local), 0)
            if tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            expert_or_whole = ".experts." in name or ".router." in name
            key = f"{self.config.seed}:{name}:{0 if expert_or_whole else tp_rank}"
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
            generator = torch.Generator(device=self.device).manual_seed(seed)
            param.normal_(0.0, self.hf_config.initializer_range, generator=generator)

    def _adapt(self) -> None:
        from trainer_node.lora import AdapterSet

        self.adapters = AdapterSet(
            tasks=self.conversion_tasks,
            config=self.provider,
            lora=self.config.lora,
            seed=self.config.seed,
            device=self.device,
        )
        self.params = self.adapters.params()
        self.optimizer = torch.optim.AdamW([p.param for p in self.params], lr=1e-4) if self.params else None
        self.num_parameters = self.adapters.num_parameters()
        if self.num_parameters == 0:
            raise ConfigError(f"no linear of the model is among the lora targets {self.config.lora.targets}")

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

    def train_step(self, batch: Batch, loss: LossSpec, optim: OptimParams) -> dict[str, float]:
        """Forward, backward and one AdamW step.

        Returns:
            loss (mean over loss tokens), grad_norm (before clipping), tokens, num_sequences, logprob_gap_mean and logprob_gap_max
            (|trainer - sampler|, grpo only), clip_fraction, seconds_forward_backward, seconds_optim.

        Raises:
            NonFiniteGradient: the step was skipped.
        """
        started = time.monotonic()
        self.zero_grad()
        sums = self.forward_backward(batch, loss)
        middle = time.monotonic()
        grad_norm = self.optim_step(optim, num_tokens=sums.num_tokens)
        count = sums.num_tokens
        return {
            "loss": sums.loss / count,
            "grad_norm": grad_norm,
            "tokens": float(count),
            "num_sequences": float(sums.num_sequences),
            "logprob_gap_mean": sums.logprob_gap / count,
            "logprob_gap_max": sums.logprob_gap_max,
            "clip_fraction": sums.num_clipped / count,
            "seconds_forward_backward": middle - started,
            "seconds_optim": time.monotonic() - middle,
        }

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for p in self.params:
            p.param.grad = None

    def forward_backward(self, batch: Batch, loss: LossSpec) -> StepSums:
        """Accumulate the gradient of the summed loss over this rank's micro-batches; nothing is reduced or divided yet."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        cut = micro_batches(
            batch,
            max_rows=self.config.micro_batch_sequences,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
        )
        rows, length = cut[0].tokens_BL.shape
        sums: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=self._forward_step(loss),
            data_iterator=iter([m.to(self.device) for m in cut]),
            model=self.model,
            num_microbatches=len(cut),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        return self._reduce_sums(sums, batch)

    def _forward_step(self, loss: LossSpec) -> Callable[..., Any]:
        allowed = None
        if loss.allowed_token_ids is not None:
            allowed = torch.tensor(sorted(set(loss.allowed_token_ids)), device=self.device)

        def step(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro = next(data)
            positions = torch.arange(micro.tokens_BL.shape[1], device=self.device).expand_as(micro.tokens_BL)
            output = model(input_ids=micro.tokens_BL, position_ids=positions, attention_mask=None)
            return output, partial(self._loss, micro, loss, allowed)

        return step

    def _loss(
        self, micro: MicroBatch, spec: LossSpec, allowed_K: torch.Tensor | None, logits_BLV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the schedule wants on the last stage: summed loss, its token count, and [loss, clipped, gap, gap max] for the report."""
        from megatron.core import parallel_state

        picked = micro.loss_mask_BL.bool()
        count = picked.sum().to(torch.int)
        if not picked.any():
            return logits_BLV[..., 0].float().sum() * 0.0, count, torch.zeros(4, dtype=torch.float64, device=self.device)
        rank, rows = parallel_state.get_tensor_model_parallel_rank(), logits_BLV.shape[-1]
        log_probs_N = vocab_parallel_log_probs(
            logits_BLV[picked],
            micro.targets_BL[picked],
            vocab_start=rank * rows,
            vocab_size=self.vocab_size,
            allowed_K=allowed_K,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        gap_N = torch.zeros_like(log_probs_N)
        if spec.name == "grpo":
            sampler_N = micro.sampler_logprobs_BL[picked]
            gap_N = (log_probs_N.detach() - sampler_N).abs()
            out = grpo(
                log_probs_N,
                sampler_logprobs_N=sampler_N,
                advantages_N=micro.advantages_BL[picked],
                clip_low=spec.clip_low,
                clip_high=spec.clip_high,
            )
        else:
            out = cross_entropy(log_probs_N)
        report = torch.stack([out.loss.detach(), out.num_clipped.to(out.loss.dtype), gap_N.sum(), gap_N.max()])
        return out.loss, count, report.double()

    def _reduce_sums(self, reports: list[torch.Tensor], batch: Batch) -> StepSums:
        """Add up over micro-batches and data-parallel ranks; only first tensor ranks of the last stage have a say."""
        from megatron.core import parallel_state

        stacked = torch.stack(reports) if reports else torch.zeros(1, 4, dtype=torch.float64, device=self.device)
        total, worst = stacked[:, :3].sum(0), stacked[:, 3].max()
        speaks = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        total = total if speaks else torch.zeros_like(total)
        dist.all_reduce(total)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        loss, clipped, gap = total.tolist()
        return StepSums(
            loss=loss,
            num_clipped=clipped,
            logprob_gap=gap,
            logprob_gap_max=float(worst),
            num_tokens=batch.num_loss_tokens,
            num_sequences=len(batch.lengths),
        )

    @torch.no_grad()
    def optim_step(self, optim: OptimParams, *, num_tokens: int) -> float:
        """Reduce the gradients, divide them by `num_tokens`, clip, step. Returns the norm before clipping.

        Raises:
            NonFiniteGradient: the step was skipped.
        """
        self._finalize_gradients(num_tokens)
        norm = self._global_norm()
        if not torch.isfinite(norm):
            self.zero_grad()
            raise NonFiniteGradient(f"the gradient's norm is {float(norm)}; the step was skipped, the weights are untouched")
        if optim.max_grad_norm is not None:
            # torch.nn.utils.clip_grad_norm_'s formula.
            factor = (optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for p in self.params:
                p.param.grad.mul_(factor)  # type: ignore[union-attr]
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group.update(lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay)
            self.optimizer.step()
        self.zero_grad()
        return float(norm)

    def _finalize_gradients(self, num_tokens: int) -> None:
        """Sum over data-parallel ranks, make copies agree, divide once.

        Experts see every token of their expert-data-parallel group; without sequence parallelism each token is there once per tensor
        rank, hence the division by the tensor size.
        """
        from megatron.core import parallel_state

        tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        for p in self.params:
            if p.param.grad is None:
                p.param.grad = torch.zeros_like(p.param)
        dense = [p.param.grad for p in self.params if not p.expert]
        experts = [p.param.grad for p in self.params if p.expert]
        copies = [p.param.grad for p in self.params if not p.expert and not p.split]
        _all_reduce_flat(dense, parallel_state.get_data_parallel_group(), 1 / num_tokens)
        _all_reduce_flat(experts, parallel_state.get_expert_data_parallel_group(), 1 / (num_tokens * tensor_size))
        # Complete already on every tensor rank (the adapters exchange their hidden layer's gradient); averaging keeps the copies
        # equal to the bit where a kernel's order is not deterministic.
        if tensor_size > 1:
            _all_reduce_flat(copies, parallel_state.get_tensor_model_parallel_group(), 1 / tensor_size)

    def _global_norm(self) -> torch.Tensor:
        """L2 norm over all ranks, each parameter counted once."""
        from megatron.core import parallel_state

        first_tensor = parallel_state.get_tensor_model_parallel_rank() == 0
        first_data = parallel_state.get_data_parallel_rank() == 0
        first_expert_data = parallel_state.get_expert_data_parallel_rank() == 0
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for p in self.params:
            if first_expert_data if p.expert else first_data and (p.split or first_tensor):
                total += p.param.grad.double().square().sum()  # type: ignore[union-attr]
        dist.all_reduce(total)
        return total.sqrt()

    def close(self) -> None:
        """Leave the process groups. Safe to call twice."""
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _all_reduce_flat(grads: list[Any], group: Any, factor: float) -> None:
    """Sum over the group and scale, in one message."""
    if not grads:
        return
    if group.size() > 1:
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view_as(grad))
    if factor != 1.0:
        torch._foreach_mul_(grads, factor)


def _padded_vocab(provider: Any) -> int:
    from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size

    return int(
        calculate_padded_vocab_size(
            provider.vocab_size, provider.make_vocab_size_divisible_by, provider.tensor_model_parallel_size
        )
    )


def _check_topology(config: TrainerConfig, hf_config: Any) -> None:
    """Sizes that do not divide, before anything is allocated."""
    parallel, world = config.parallel, int(os.environ.get("WORLD_SIZE", "1"))
    if world != parallel.world_size:
        raise ConfigError(f"parallel.world_size is {parallel.world_size} but torchrun started {world} ranks")
    experts = getattr(hf_config, "num_experts", None) or 0
    for size, field, value, what in (
        (parallel.tensor, "tensor", hf_config.num_attention_heads, "attention heads"),
        (parallel.tensor, "tensor", hf_config.num_key_value_heads, "key-value heads"),
        (parallel.tensor, "tensor", 0 if experts else hf_config.intermediate_size, "intermediate_size"),
        (parallel.pipeline, "pipeline", hf_config.num_hidden_layers, "layers"),
        (parallel.expert, "expert", experts, "experts"),
    ):
        if value % size or (field == "expert" and size > 1 and not experts):
            raise ConfigError(f"parallel.{field} = {size} does not divide the model's {value} {what}; choose a divisor")


def _init_distributed(config: TrainerConfig) -> torch.device:
    """Process groups from torchrun's environment; a lone process makes its own."""
    from megatron.core import parallel_state, tensor_parallel

    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "gloo" if config.device == "cpu" else "nccl"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=config.collective_timeout_s / 60,  # type: ignore[arg-type]
        create_gloo_process_groups=False,
    )
    if config.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    torch.manual_seed(config.seed)
    return device
