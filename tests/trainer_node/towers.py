"""Tiny checkpoints of models that see, as they are published: with a vision tower, and with heads
of further tokens where their family has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from tests.trainer_node.families import FAMILIES, VOCAB

IMAGE = VOCAB - 1
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
    },
    "qwen3_5_moe": {
        "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    },
}  # fmt: skip # a table
FURTHER = {"qwen3_5_moe": ("mtp.fc.weight", "mtp.norm.weight")}
"""Heads of further tokens, which nobody trains or exports."""


def make(family: str, folder: Path) -> Path:
    """Write a tiny checkpoint with a tower."""
    from trainer_node.tools.check_model import randomize

    name, settings = FAMILIES[family].name, FAMILIES[family].settings
    text = getattr(transformers, f"{name}TextConfig")(**settings)
    config = getattr(transformers, f"{name}Config")(
        text_config=text.to_dict(),
        vision_config=TOWERS[family],
        tie_word_embeddings=text.tie_word_embeddings,
        image_token_id=IMAGE,
        **({"mm_tokens_per_image": 4} if family == "gemma3" else {}),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    randomize(model)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {_published(name): tensor for name, tensor in load_file(file).items()}
    tensors |= {name: torch.ones(4) for name in FURTHER.get(family, ())}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _published(name: str) -> str:
    """Gemma 3's spelling; the newest transformers writes another, which vLLM cannot load."""
    if name.startswith("vision_tower.") and "vision_model." not in name:
        return name.replace("vision_tower.", "vision_tower.vision_model.")
    return name


def write_processor(folder: Path) -> None:
    """What vLLM reads next to Gemma 3's weights: a tokenizer with marks, and an image processor."""
    marks = {"image_token": IMAGE, "boi_token": VOCAB - 2, "eoi_token": VOCAB - 3}
    lines = {"\n" * count: VOCAB - 3 - count for count in (1, 2, 3, 4)}
    words = {f"t{i}": i for i in range(min(lines.values()))}
    named = {f"<{mark}>": i for mark, i in marks.items()}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words | lines | named, unk_token="t0")),
        unk_token="t0",
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
        extra_special_tokens={mark: f"<{mark}>" for mark in marks},
    ).save_pretrained(folder)
    transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
