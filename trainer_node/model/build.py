"""Builds one rank's model: a checked config in, a `Model` out. Every function is a collective.

    process groups -> Megatron's model through Bridge -> HF's weights -> freeze it -> hook adapters
    on

With finetuning_type "lora" the base is frozen and fp32 adapters train. With "full" every parameter
trains, without adapters. On a CPU `cpu_shims.apply` must run before this module is imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.exact import model_obstacle
from trainer_node.adapters.lora import AdapterSet
from trainer_node.hf import language_part
from trainer_node.hf.checkpoint import HfCheckpoint, tensor_files, warn_of_rounding
from trainer_node.hf.names import strip_wrappers
from trainer_node.layout.layouts import layouts
from trainer_node.model import paths, providers, recompute, value_head
from trainer_node.model.layer_inputs import LayerInputs
from trainer_node.model.model import Model
from trainer_node.model.parameters import (
    VOCAB_PARAMS,
    count,
    is_split,
)
from trainer_node.model.trainable import experts_obstacle, trainable
from trainer_node.ranks import objects, topology

log = logging.getLogger("splice.trainer")

COMPILE_BACKEND = "inductor"
BRIDGE = f"Megatron-Bridge {importlib.metadata.version('megatron-bridge')}"


def build(config: TrainerConfig, hf_config: Any) -> Model:
    """Join the other ranks and build this rank's part of the model.

    Args:
        hf_config: `checkpoint.read_config`'s; `topology.check` has passed it.

    Raises:
        ConfigError: the config and the checkpoint do not fit together.
    """
    objects.restrict_torch()
    if config.numerics == "exact":
        parts = config.sampler_parallel
        if found := model_obstacle(hf_config.to_dict(), config.device, parts=parts):
            raise ConfigError(f"numerics = 'exact' does not go with {found[0]}, {found[1]}")
    device = topology.join(config)
    control_group, saving_group = topology.group_of_all("gloo"), topology.group_of_all("gloo")
    gather_group = topology.group_of_all()
    bridge, provider = _bridge(config, hf_config)
    with_weights = config.init == "hf"
    language_part.use_names(bridge, tensor_files(config.model))
    checkpoint = HfCheckpoint(
        config.model,
        hf_config,
        vocab_tensors=_vocab_tensors(bridge),
        padded_vocab=_padded_vocab(provider),
        tied=provider.share_embeddings_and_output_weights,
        with_weights=with_weights,
    )
    modules = [_megatron_model(config, provider, device)]
    tasks = _conversion_tasks(bridge, checkpoint, modules, provider)
    if with_weights:
        # Expert-parallel ranks have tasks of their own experts.
        names = objects.all_gather(_hf_names(tasks), group=control_group)
        checkpoint.check_names(set().union(*names))
        if config.dtype == "bfloat16":
            warn_of_rounding(config.model, set().union(*names))
        _load_weights(bridge, checkpoint, modules)
        _check_finite(tasks, checkpoint)
    modules[0].requires_grad_(False)
    language_part.export_towers(bridge, checkpoint.state, tasks[-1])
    if not with_weights:
        _random_weights(modules, tasks, bridge=bridge, config=config, provider=provider)
    adapters, params, experts = trainable(
        modules[0],
        tasks,
        config=config,
        provider=provider,
        bridge=bridge,
        checkpoint=checkpoint,
        device=device,
    )
    num_parameters = count(params, device)
    if num_parameters == 0:
        raise ConfigError(f"no linear of the model is among the lora targets {config.lora.targets}")
    if config.value_head:
        params += value_head.parameters(provider, device)
        num_parameters = count(params, device)
    return Model(
        config=config,
        hf_config=hf_config,
        device=device,
        control_group=control_group,
        saving_group=saving_group,
        gather_group=gather_group,
        provider=provider,
        bridge=bridge,
        checkpoint=checkpoint,
        modules=modules,
        head=modules[0],
        routers=[m for m in modules[0].modules() if isinstance(m, TopKRouter)],
        conversion_tasks=tasks,
        adapters=adapters,
        params=params,
        experts=experts,
        layer_inputs=LayerInputs(hidden_size=provider.hidden_size, device=device),
        num_parameters=num_parameters,
        fallbacks=_fallbacks(config, provider, device, modules[0], adapters),
        sharing_obstacle=_sharing_obstacle(config, provider, modules[0], control_group),
    )


# ---------------------------------------------------------------- Megatron's model


def _bridge(config: TrainerConfig, hf_config: Any) -> tuple[Any, Any]:
    """Bridge's mapping for this architecture, and Megatron's config.

    Raises:
        ConfigError: Bridge has none, or cannot read this config.
    """
    name = hf_config.architectures[0] if hf_config.architectures else hf_config.model_type
    try:
        auto = AutoBridge.from_hf_config(hf_config)
        provider = auto.to_megatron_provider(load_weights=False)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"cannot read this config of {name}: {type(error).__name__}: {error}"
        if "not yet supported" in str(error):
            why = f"has no mapping for {name}; docs/models.md says what is trained"
        elif "only supports models with architectures" in str(error):
            kinds = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            wanted = kinds.get(hf_config.model_type, "LlamaForCausalLM")
            raise ConfigError(
                f"{config.model}/config.json names {hf_config.architectures or 'nothing'} in "
                f'architectures; name the causal language model there, such as ["{wanted}"]'
            ) from error
        raise ConfigError(f"{BRIDGE} {why}") from error
    # The instance caches the parameter names of all pipeline ranks, so one is kept for good.
    bridge = auto._model_bridge
    providers.prepare(provider, bridge, config, hf_config)
    bridge._unwrap_name = strip_wrappers
    bridge.hf_config = hf_config
    return bridge, provider


def _padded_vocab(provider: Any) -> int:
    multiple, tensor = provider.make_vocab_size_divisible_by, provider.tensor_model_parallel_size
    return int(calculate_padded_vocab_size(provider.vocab_size, multiple, tensor))


def _vocab_tensors(bridge: Any) -> tuple[str, ...]:
    """HF names of the embedding and, in families that have one, of an output layer apart."""
    registry = bridge.mapping_registry()
    mappings = [registry.megatron_to_hf_lookup(name) for name in VOCAB_PARAMS]
    return tuple(mapping.hf_param for mapping in mappings if mapping is not None)


def _megatron_model(config: TrainerConfig, provider: Any, device: torch.device) -> Any:
    RouterReplay.clear_global_router_replay_instances()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider._pg_collection = groups
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    model = provider.provide(pre_process=first, post_process=last)
    providers.settle(model, provider)
    if config.numerics == "exact":
        from trainer_node.backends import exact  # it imports the stand-ins

        exact.use(model, provider, device, parts=config.sampler_parallel)
    model.to(device)
    if first:
        recompute.follow(model)
    if config.compile:
        for layer in model.decoder.layers:
            layer.compile(backend=COMPILE_BACKEND)
    if last:
        # The model ends with its hidden states: `passes` makes logits where there is loss, a chunk
        # at a time.
        model.output_layer.forward = lambda hidden, **_: (hidden, None)
    for module in model.modules():
        if isinstance(module, MoELayer) and not provider.sequence_parallel:
            # In training mode the layer refuses tensor parallelism without sequence parallelism,
            # for speed only. Its own flag decides nothing else; the modules below it keep theirs.
            module.training = False
    return model


def _load_weights(bridge: Any, checkpoint: HfCheckpoint, modules: list[Any]) -> None:
    bridge._with_progress_tracking = lambda tasks, *_, **__: iter(tasks)
    try:
        bridge.load_weights_hf_to_megatron(checkpoint, modules)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the checkpoint's tensors do not fit its config.json: {error}"
        ) from error


def _check_finite(tasks: Sequence[Any], checkpoint: HfCheckpoint) -> None:
    """Refuse weights that are NaN or infinite, because they would spread to every result.

    Raises:
        ConfigError: names a tensor.
    """
    for task in tasks:
        if task.param_weight is not None and not torch.isfinite(task.param_weight).all():
            names = _hf_names([task])
            wrong = [n for n in names if not torch.isfinite(checkpoint.state[n]).all()]
            raise ConfigError(
                f"the checkpoint has NaN or infinite weights in {', '.join(wrong or names)}; "
                "restore the file, or take an earlier checkpoint"
            )


def _hf_names(tasks: Sequence[Any]) -> list[str]:
    params = [task.mapping.hf_param for task in tasks]
    return [name for p in params for name in ([p] if isinstance(p, str) else p.values())]


@torch.no_grad()
def _random_weights(
    modules: list[Any], tasks: Sequence[Any], *, bridge: Any, config: TrainerConfig, provider: Any
) -> None:
    """Draw normal weights of the config's std, seeded by global name, so that pipeline and expert
    ranks do not matter; sinks too. Biases become zero. Norms keep the values that Megatron gives
    them, and gated delta rules start nearly as in transformers."""
    by_param = {id(t.param_weight): t for t in tasks if t is not None}
    for local, param in modules[0].named_parameters():
        name = _megatron_local_name_to_global(modules, provider, strip_wrappers(local), 0)
        if provider.share_embeddings_and_output_weights and name == VOCAB_PARAMS[1]:
            name = VOCAB_PARAMS[0]
        task, part = by_param.get(id(param)), parallel_state.get_tensor_model_parallel_rank()
        if task is not None:
            part = task.mapping.tp_rank if is_split(layouts(task, bridge, {})) else 0
        key = f"{config.seed}:{name}:{part}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        generator = torch.Generator(device=param.device).manual_seed(seed)
        kind = name.rpartition(".")[2]
        if kind == "A_log":  # from 1 up: in bfloat16 zeros would be drawn, whose log is infinite
            param.uniform_(1.0, 16.0, generator=generator).log_()
        elif kind == "dt_bias":
            param.fill_(1.0)
        elif param.dim() == 1 and "norm" in name:
            continue
        elif "bias" in kind:  # bias0 of the first expert; Megatron leaves some without a value
            param.zero_()
        else:
            param.normal_(0.0, provider.init_method_std, generator=generator)


def _conversion_tasks(
    bridge: Any, checkpoint: HfCheckpoint, modules: list[Any], provider: Any
) -> list[Any]:
    """Bridge's tasks, one for each parameter of the whole model.

    Raises:
        ConfigError: Bridge knows no tensor for a parameter.
    """
    tasks: list[Any] = bridge.build_conversion_tasks(checkpoint, modules)
    if None in tasks:
        tied = provider.share_embeddings_and_output_weights
        names = bridge._megatron_global_param_names_all_pp_ranks(modules)
        names = [name for name in names if not (tied and "output_layer" in name)]
        unknown = [name for name, task in zip(names, tasks, strict=True) if task is None]
        more = f" and {len(unknown) - 1} more parameters" if len(unknown) > 1 else ""
        raise ConfigError(
            f"{BRIDGE} has no mapping for {unknown[0]}{more} of this model: a bias, norm or head "
            "that other models of its kind lack"
        )
    for task in tasks:
        # Bridge 0.6.2 would send its whole configuration between pipeline ranks, pickled. Every
        # rank has the same one.
        task.mapping._broadcast_obj_cache |= dict.fromkeys(("qkv_config", "kv_config"), provider)
    return tasks


# ---------------------------------------------------------------- what runs slower than it could


def _sharing_obstacle(
    config: TrainerConfig, provider: Any, module: Any, control_group: Any
) -> str | None:
    """Why prefixes are computed for each sequence. None: the layers of every pipeline stage can
    share them. A collective."""
    own = paths.obstacle(module, provider, config)
    if own is None:
        paths.follow(module)
    why = next(filter(None, objects.all_gather(own, group=control_group)), None)
    if why is not None:
        log.info("prefixes are computed for each sequence: %s", why)
    return why


def _fallbacks(
    config: TrainerConfig, provider: Any, device: torch.device, module: Any, adapters: AdapterSet
) -> dict[str, str]:
    """Parts of the model that run slower than they could -> what they do instead, and why."""
    found = providers.fallbacks(provider, config)
    why = experts_obstacle(config, provider, device, module, adapters)
    if why is not None:
        found["experts"] = f"run in one product for each expert, because {why}"
    for part, what in found.items():
        log.warning("%s: %s", part, what)
    return found
