"""Names that users of TRL, verl, prime-rl, slime and OpenRLHF type, and where splice has them."""

from __future__ import annotations

_PLACES: dict[str, str] = {
    # Class.field of splice, or the key in run.toml -> what others call it
    "OptimParams.lr": "learning_rate lr actor_lr",
    "OptimParams.value_lr": "critic_lr critic_learning_rate value_lr",
    "OptimParams.weight_decay": "weight_decay",
    "OptimParams.beta1": "adam_beta1 beta1 betas",
    "OptimParams.beta2": "adam_beta2 beta2",
    "OptimParams.eps": "adam_epsilon adam_eps",
    "OptimParams.max_grad_norm": "max_grad_norm grad_clip clip_grad max_norm gradient_clip",
    "LossSpec.name": "loss_type algorithm policy_loss rollout_is rollout_rs "
    "vllm_importance_sampling_mode truncated_importance_sampling_type",
    "LossSpec.clip_low": "epsilon epsilon_low clip_ratio clip_ratio_low cliprange clip_range "
    "eps_clip clip_eps",
    "LossSpec.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "LossSpec.dual_clip": "clip_ratio_c eps_clip_c delta",
    "LossSpec.ratio_cap": "tis_clip tis_imp_ratio_cap vllm_importance_sampling_cap "
    "rollout_is_threshold rollout_rs_threshold truncated_importance_sampling_ratio",
    "LossSpec.ratio_low": "rollout_rs_threshold_lower truncated_importance_sampling_ratio_min",
    "LossSpec.entropy_bonus": "entropy_coef entropy_coeff ent_coef entropy_loss_coef",
    "LossSpec.normalize_by": "loss_agg_mode token_level_loss",
    "KlSpec.coefficient": "beta kl_beta kl_coef kl_coeff kl_loss_coef init_kl_coef kl_tau "
    "kl_penalty_coef",
    "KlSpec.in_reward": "use_kl_in_reward kl_in_reward",
    "KlSpec.estimator": "kl_loss_type kl_estimator kl_penalty",
    "KlSpec.reference": "ref_model ref_load reference_model",
    "ValueSpec.gamma": "gamma",
    "ValueSpec.lam": "lam lambd lambda gae_lambda",
    "ValueSpec.coefficient": "vf_coef value_loss_coef value_coef critic_coef",
    "ValueSpec.clip": "cliprange_value value_clip vf_clip vf_clip_param",
    "ValueSpec.whiten": "whiten_advantages normalize_advantages",
    "LoopConfig.group_size": "num_generations rollouts_per_example n_samples_per_prompt n "
    "rollout_n num_samples",
    "LoopConfig.groups_per_step": "batch_size train_batch_size per_device_train_batch_size "
    "generation_batch_size rollout_batch_size global_batch_size prompts_per_step",
    "LoopConfig.mini_batch_sequences": "mini_batch_size ppo_mini_batch_size",
    "LoopConfig.epochs": "num_iterations ppo_epochs update_epochs",
    "LoopConfig.steps": "max_steps num_steps total_training_steps num_rollout num_train_epochs "
    "total_epochs",
    "LoopConfig.max_staleness": "async_level max_async_level max_off_policy_steps "
    "staleness_threshold max_head_offpolicyness",
    "LoopConfig.advantages": "adv_estimator advantage_estimator scale_rewards",
    "LoopConfig.dynamic_sampling": "filter_groups use_dynamic_sampling max_num_gen_batches "
    "online_difficulty_filtering dynamic_sampling_max_gen_batches",
    "LoopConfig.overlong": "mask_truncated_completions overlong_filtering apply_overlong_filtering",
    "LoopConfig.max_in_flight": "max_inflight_rollouts max_concurrent max_concurrency",
    "LoopConfig.keep_samples": "log_completions",
    "LoopConfig.sinks": "report_to logger wandb use_wandb",
    "SamplingConfig.max_tokens": "max_completion_length max_response_length max_new_tokens "
    "response_length rollout_max_response_len max_tokens",
    "SamplingConfig.temperature": "temperature rollout_temperature",
    "SamplingConfig.extra": "top_p top_k min_p repetition_penalty stop",
    "model": "model_name model_name_or_path model_path pretrain hf_checkpoint",
    "dtype": "bf16 fp16 torch_dtype precision",
    "run_dir": "output_dir save_path default_local_dir",
    "trainer.micro_batch_tokens": "gradient_accumulation_steps micro_batch_size "
    "ppo_micro_batch_size_per_gpu max_tokens_per_gpu ppo_max_token_len_per_gpu",
    "trainer.recompute": "gradient_checkpointing enable_gradient_checkpointing "
    "activation_offloading enable_activation_offload",
    "trainer.memory": "param_offload optimizer_offload colocate",
    "trainer.profile_versions": "profile_steps profiler torch_profiler profile_step_start",
    "trainer.lora.rank": "lora_rank lora_r r",
    "trainer.lora.alpha": "lora_alpha",
    "trainer.lora.targets": "target_modules lora_target_modules",
    "trainer.lora.dropout": "lora_dropout",
    "trainer.parallel.tensor": "tensor_model_parallel_size tp",
    "trainer.parallel.pipeline": "pipeline_model_parallel_size pp",
    "trainer.parallel.context": "context_parallel_size cp",
    "trainer.parallel.expert": "expert_model_parallel_size ep",
    "trainer.gpus": "n_gpus_per_node num_gpus num_train_gpus actor_num_gpus_per_node",
    "inference.tensor_parallel": "tensor_parallel_size vllm_tensor_parallel_size "
    "rollout_num_gpus_per_engine",
    "inference.replicas": "num_infer_gpus vllm_num_engines data_parallel_size",
    "inference.max_model_len": "max_prompt_length max_seq_len max_seq_length seq_len max_length",
    "inference.gpu_memory_utilization": "vllm_gpu_memory_utilization sglang_mem_fraction_static",
    "orchestrator.keep_versions": "save_steps save_total_limit save_freq save_interval",
}
_SECTIONS = {
    "OptimParams": "optim",
    "LossSpec": "loss",
    "KlSpec": "loss.kl",
    "LoopConfig": "loop",
    "SamplingConfig": "sampling",
}
"""Class -> its table in a run.toml that says what to train."""
_NOTES: dict[str, str] = {
    "OptimParams.beta1": " and beta2",
    "ValueSpec.gamma": ", given as LossSpec(value=ValueSpec(...))",
    "ValueSpec.lam": ", given as LossSpec(value=ValueSpec(...))",
    "ValueSpec.coefficient": ", given as LossSpec(value=ValueSpec(...))",
    "ValueSpec.clip": ", given as LossSpec(value=ValueSpec(...))",
    "OptimParams.lr": "; a loop also takes a function: optim=lambda step: OptimParams(lr=...)",
    "KlSpec.coefficient": ", given as LossSpec(kl=KlSpec(...))",
    "LossSpec.clip_low": " and clip_high",
    "LoopConfig.groups_per_step": ", the prompts of a step; each has group_size answers",
    "SamplingConfig.max_tokens": ", given as LoopConfig(sampling=SamplingConfig(...))",
    "SamplingConfig.temperature": ", given as LoopConfig(sampling=SamplingConfig(...))",
    "SamplingConfig.extra": "; docs/sampling.md says which are exact",
    "trainer.parallel.tensor": ", and vLLM's as inference.tensor_parallel",
    "inference.tensor_parallel": ", and the trainer's as trainer.parallel.tensor",
}
_SCHEDULE = "warmup_steps warmup_ratio lr_warmup_steps lr_scheduler_type lr_schedule min_lr"
PLACES = {name: place for place, names in _PLACES.items() for name in names.split()}
PLACES |= dict.fromkeys(_SCHEDULE.split(), "OptimParams.lr")
"""What others call it -> `Class.field`, or the key in run.toml."""


def hint(word: str, *, model: str, in_file: bool = False) -> str:
    """Return "; splice has it as ..." for a name of another library, or nothing.

    Args:
        model: class that was given the name. A section of run.toml is one too.
        in_file: a run.toml that says what to train has the name.
    """
    place = PLACES.get(word.lower(), "")
    holder, _, field = place.rpartition(".")
    if not place:
        return ""
    if in_file and holder in _SECTIONS:
        field = "schedule" if word.lower() in _SCHEDULE.split() else field
        field = f"extra.{word}" if field == "extra" else field
        return f"; splice has it as {_SECTIONS[holder]}.{field} in run.toml."
    if not holder[:1].isupper():
        return f"; splice has it as {place} in run.toml{_NOTES.get(place, '')}."
    name = f"{field!r}" if holder == model else f"{holder}({field}=...)"
    where = "" if f"{model}." in " ".join(_PLACES) else " in your loop"
    return f"; splice has it as {name}{where}{_NOTES.get(place, '')}."
