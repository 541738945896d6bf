"""What PEFT can write and the trainer cannot compute is refused by name; what is missing, extra or
damaged is named.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import KlSpec
from tests.trainer_node.tiny import make_peft_adapter
from trainer_node.adapters import peft_io
from trainer_node.adapters.peft_io import AdapterError, read_adapter
from trainer_node.hf.checkpoint import read_config
from trainer_node.tools.identity_adapter import linear_shapes

LORA = LoraConfig(rank=4, alpha=8)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.down_proj"


@pytest.fixture(scope="module")
def peft(models, tmp_path_factory):
    return make_peft_adapter(models["moe"], tmp_path_factory.mktemp("peft") / "moe")


@pytest.fixture(scope="module")
def expected(models):
    shapes = linear_shapes(read_config(models["moe"]), LORA.targets)
    return {
        (n, m): s
        for n, (out, inner) in shapes.items()
        for m, s in (("A", (4, inner)), ("B", (out, 4)))
    }


def changed(peft: Path, folder: Path, *, tensors=None, **settings) -> Path:
    """A copy with other settings, and its tensors passed through a function."""
    shutil.copytree(peft, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        path = folder / "adapter_model.safetensors"
        save_file(tensors(load_file(path)), path)
    return folder


def test_what_peft_wrote(peft, expected, models, tmp_path) -> None:
    stored = load_file(peft / "adapter_model.safetensors")
    found = read_adapter(peft, lora=LORA, expected=expected)
    assert len(found) == len(stored) == 2 * (4 + 3 * 4) * 2
    assert torch.equal(found[DOWN, "B"], stored[f"base_model.model.{DOWN}.lora_B.weight"])
    infixed = changed(
        peft,
        tmp_path / "a",
        tensors=lambda t: {n.replace(".weight", ".default.weight"): x for n, x in t.items()},
    )
    older = changed(peft, tmp_path / "b")
    (older / "adapter_model.safetensors").unlink()
    torch.save(stored, older / "adapter_model.bin")
    by_pattern = make_peft_adapter(models["moe"], tmp_path / "c", target_modules=r".*_proj")
    assert isinstance(
        json.loads((by_pattern / "adapter_config.json").read_text())["target_modules"], str
    )
    for folder in (infixed, older, by_pattern):
        again = read_adapter(folder, lora=LORA, expected=expected)
        assert again.keys() == found.keys()
        assert all(torch.equal(again[k], found[k]) for k in found), folder
    del stored
    mapped = Path("/proc/self/maps").read_text()
    assert str(peft) not in mapped, "a file of the adapter stayed mapped"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"r": 8}, r"r is 8, the trainer's lora config has 4"),
        ({"lora_alpha": 16}, r"lora_alpha is 16, the trainer's lora config has 8\.0"),
        (
            {"target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"]},
            r"\['q_proj', 'v_proj'\], the trainer's .*'down_proj', 'gate",
        ),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_rslora": True}, "use_rslora is True, which is not supported"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"of_a_later_peft": 1}, "of_a_later_peft is 1, which is not supported"),
        ({"r": 8, "use_dora": True}, "r is 8.*use_dora"),
    ],
)
def test_settings(settings, says, peft, expected, tmp_path) -> None:
    with pytest.raises(AdapterError, match=says):
        read_adapter(changed(peft, tmp_path / "a", **settings), lora=LORA, expected=expected)


def without(*parts):
    return lambda tensors: {n: t for n, t in tensors.items() if not any(p in n for p in parts)}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (without(f"{Q}.lora_B"), f"missing: {Q}.lora_B.weight$"),
        (without("layers.1."), r"missing: model\.layers\.1.* and 27 more"),
        (
            lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)},
            r"too many: lm_head\.lora_A\.weight",
        ),
        (
            lambda t: (
                t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 64)}
            ),
            "not a LoRA.*lora_embedding_A",
        ),
        (
            lambda t: t | {f"base_model.model.{Q}.lora_magnitude_vector": torch.zeros(4)},
            "not a LoRA.*magnitude",
        ),
        (
            lambda t: t | {f"base_model.model.{Q}.lora_A.default.weight": torch.zeros(4, 64)},
            "there twice",
        ),
        (
            lambda t: {
                (n.replace(".weight", ".x.weight") if Q in n else n): v for n, v in t.items()
            },
            "several adapters: .*'x'",
        ),
        (
            lambda t: t | {f"base_model.model.{Q}.lora_B.weight": torch.zeros(63, 4)},
            r"lora_B.weight is \(63, 4\), the model wants \(64, 4\)",
        ),
        (lambda t: {n: v / 0 if DOWN in n else v for n, v in t.items()}, f"not finite: {DOWN}"),
        (lambda _: {}, "missing: "),
    ],
)
def test_tensors(tensors, says, peft, expected, tmp_path) -> None:
    with pytest.raises(AdapterError, match=says):
        read_adapter(changed(peft, tmp_path / "a", tensors=tensors), lora=LORA, expected=expected)


def test_files(peft, expected, tmp_path) -> None:
    no_weights = changed(peft, tmp_path / "a")
    (no_weights / "adapter_model.safetensors").unlink()
    cut = changed(peft, tmp_path / "b")
    path = cut / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    (tmp_path / "c").mkdir()
    for folder, says in (
        (no_weights, "neither adapter_model.safetensors nor adapter_model.bin"),
        (cut, "cannot be read"),
        (tmp_path / "c", "is no PEFT adapter"),
        (tmp_path / "nowhere", "is no PEFT adapter"),
    ):
        with pytest.raises(AdapterError, match=says):
            read_adapter(folder, lora=LORA, expected=expected)


def test_a_base_weight_in_the_file_is_the_models(tmp_path: Path) -> None:
    """PEFT adds the output layer's where it has an adapter. A trained one would be lost here."""
    expected = {("lm_head", "A"): (4, 8), ("lm_head", "B"): (6, 4)}
    lora = LORA.model_copy(update={"targets": ("lm_head",)})
    weight_VH, prefix = torch.randn(6, 8), "base_model.model.lm_head"
    stored = {f"{prefix}.lora_{m}.weight": torch.randn(expected["lm_head", m]) for m in "AB"}
    save_file(stored | {f"{prefix}.base_layer.weight": weight_VH}, tmp_path / peft_io.WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["lm_head"]}
    (tmp_path / peft_io.CONFIG).write_text(json.dumps(config))
    padded_VH = torch.cat([weight_VH, torch.zeros(2, 8)])
    base = {"lm_head.weight": padded_VH}
    found = read_adapter(tmp_path, lora=lora, expected=expected, base=base)
    assert torch.equal(found["lm_head", "B"], stored[f"{prefix}.lora_B.weight"])
    for other in ({"lm_head.weight": padded_VH + 1}, {}):
        with pytest.raises(AdapterError, match="its own base weight for lm_head"):
            read_adapter(tmp_path, lora=lora, expected=expected, base=other)


def test_a_reference_adapter_is_named() -> None:
    for wrong in (
        {"reference": "adapter"},
        {"adapter_dir": "/a"},
        {"reference": "given", "adapter_dir": "/a"},
    ):
        with pytest.raises(ValueError, match=r"kl\.adapter_dir names the PEFT folder"):
            KlSpec(**wrong)
