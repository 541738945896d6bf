"""The language part of a multimodal model: it trains on text, and the towers keep their weights.

transformers nests the language model, so a checkpoint's tensors have `language_model.` in their
names, and towers' tensors are next to them. Bridge builds only the language part, by its own text
architecture. Here its mappings get the checkpoint's names, and its export the towers' tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from orchestrator.errors import ConfigError
from trainer_node.hf import fp8_blocks

NESTED = "language_model."
"""What transformers puts into the names of a nested language model's tensors."""
_FURTHER = re.compile(r"(?:model\.)?mtp\.")
"""Heads of further tokens."""
_TOWER_TOKEN = re.compile(r"(?:image|video|audio)_token_(?:id|index)")


def text_config(config: Any) -> Any:
    """The config of the language part, with its architecture; of a text model the config itself.

    `tower_tokens` are the ids that stand for what a tower makes of an image, video or sound.

    Raises:
        ConfigError: transformers has no causal language model for the nested config.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config()
    if text is config:
        return config
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if name is None:
        raise ConfigError(
            f"{config.name_or_path}: the language part of {config.model_type} ({text.model_type}) "
            "is no architecture of its own in transformers; the trainer trains language parts "
            "only, not towers"
        )
    text = copy.deepcopy(text)
    text.architectures = [name]
    if "tie_word_embeddings" in config.to_diff_dict():
        text.tie_word_embeddings = config.tie_word_embeddings
    text.tower_tokens = sorted(
        value
        for key, value in config.to_dict().items()
        if _TOWER_TOKEN.fullmatch(key) and isinstance(value, int)
    )
    return text


def prefix_of(names: Collection[str]) -> tuple[str, str] | None:
    """How a checkpoint spells the beginning of the language part's names: (Bridge's, its own).

    None: as Bridge does.
    """
    for stored in names:
        for own in (f"model.{NESTED}", f"{NESTED}model."):
            if stored.startswith(own):
                return "model.", own
    return None


def use_names(bridge: Any, names: Collection[str]) -> None:
    """Let Bridge's mappings have a checkpoint's spelling of the language part's names."""
    found = prefix_of(names)
    if found is None:
        return
    theirs, own = found

    def spelled(name: str) -> str:
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
        return NESTED + name if NESTED + name in names else name

    original = bridge.mapping_registry

    def registry() -> Any:
        mappings = [copy.copy(mapping) for mapping in original().get_all_mappings()]
        for mapping in mappings:
            param = mapping.hf_param
            if isinstance(param, dict):
                mapping.hf_param = {role: spelled(name) for role, name in param.items()}
            else:
                mapping.hf_param = spelled(param)
        return type(original())(*mappings)

    bridge.mapping_registry = registry


def towers(names: Iterable[str]) -> list[str]:
    """The checkpoint's tensors of towers. Scales of block-scaled FP8 are not separate tensors:
    they are read with their weights."""
    names = list(names)
    if prefix_of(names) is None:
        return []
    return [
        name
        for name in names
        if NESTED not in name
        and not name.startswith("lm_head.")
        and not name.endswith(fp8_blocks.SUFFIX)
        and not _FURTHER.match(name)
    ]


def export_towers(bridge: Any, state: Mapping[str, torch.Tensor], last_task: Any) -> None:
    """Let Bridge's export end with the checkpoint's tensors of towers, where it is given the last
    task."""
    if not (kept := towers(state)):
        return
    stream = bridge.stream_weights_megatron_to_hf

    def with_towers(
        *args: Any, conversion_tasks: Iterable[Any], **options: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        last: list[str] = []

        def noted() -> Iterator[Any]:
            for task in conversion_tasks:
                last[:] = [task.global_param_name]
                yield task

        yield from stream(*args, conversion_tasks=noted(), **options)
        if last == [last_task.global_param_name]:
            for name in kept:
                yield name, state[name]

    bridge.stream_weights_megatron_to_hf = with_towers
