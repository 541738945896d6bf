"""Checkpoints in block-scaled FP8: trained as the bf16 behind them, and exported as FP8 again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import ExportHf, Manifest, TensorSpec
from tests.trainer_node.served_node import node
from trainer_node.hf import fp8_blocks
from trainer_node.hf.checkpoint import HfCheckpoint, read_config, tensor_dtypes
from trainer_node.tools.make_checkpoint import is_projection, main
from weight_transfer import fp8


def checkpoint(folder: Path, *arguments: str) -> dict[str, torch.Tensor]:
    main(["--fp8-blocks", "--out", str(folder), *arguments])
    return load_file(folder / "model.safetensors")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", [(256, 384), (200, 130)])
def test_a_weight_is_its_codes_times_its_block_s_scale(shape: tuple[int, int]) -> None:
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = fp8_blocks.quantised("w", weight_OI).values()
    read_OI = fp8_blocks.dequantised(codes, scales)
    for row, column in ((0, 0), (127, 129), (128, 127), (shape[0] - 1, shape[1] - 1)):
        want = codes[row, column].float() * scales[row // 128, column // 128]
        assert read_OI[row, column] == want.bfloat16()
    # e4m3 has 4 significant bits; below its normal values its step is 2^-9 of the scale.
    bound_OI = torch.maximum(weight_OI.float().abs() * 2**-4, scales.max() * 2**-9) * 1.01
    assert ((read_OI.float() - weight_OI.float()).abs() <= bound_OI).all()
    again, _ = fp8_blocks.quantised("w", read_OI).values()
    assert same(again, codes)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_bridge_sees_bf16_under_the_weights_names(arch: str, tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, "--arch", arch)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored)
    config = read_config(tmp_path)
    assert not hasattr(config, "quantization_config")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    seen = HfCheckpoint(
        tmp_path, config, vocab_tensors=names, padded_vocab=512, tied=False, with_weights=True
    )
    keys = set(seen.state.source.get_all_keys())
    assert keys == {n for n in stored if not n.endswith("_scale_inv")}
    assert {n for n in keys if is_projection(n)} == {
        n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn
    }
    assert all(seen.state[name].dtype == torch.bfloat16 for name in keys)
    some = "model.layers.1.self_attn.k_proj.weight"
    want = fp8_blocks.dequantised(stored[some], stored[f"{some}_scale_inv"])
    assert same(seen.state[some], want)


def test_an_fp8_base_that_is_served_in_fp8_is_said_to_lose_small_updates(tmp_path: Path) -> None:
    checkpoint(tmp_path / "fp8")
    main(["--out", str(tmp_path / "plain")])
    assert "rounded away" in fp8_blocks.loss_of(tmp_path / "fp8", {"per_block"})
    assert not fp8_blocks.loss_of(tmp_path / "fp8", {"per_channel"})
    assert not fp8_blocks.loss_of(tmp_path / "plain", {"per_block"})


def test_another_quantisation_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float"}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="compressed-tensors"):
        fp8_blocks.is_block_scaled(tmp_path)


def test_an_export_like_another_model_is_refused() -> None:
    specs = (
        TensorSpec(name="a.weight", dtype="bfloat16", shape=(128, 128)),
        TensorSpec(name="b.weight", dtype="float32", shape=(128, 128)),
    )
    manifest = Manifest(tensors=specs)
    like = fp8_blocks.manifest_like(manifest, {"a.weight"})
    assert [s.name for s in like.tensors] == ["a.weight", "a.weight_scale_inv", "b.weight"]
    for wrong in ({"b.weight"}, {"c.weight"}, set[str]()):
        with pytest.raises(ConfigError, match="cannot write FP8"):
            fp8_blocks.manifest_like(manifest, wrong)


@pytest.mark.timeout(300)
def test_an_fp8_checkpoint_is_trained_and_exported_as_fp8(torchrun, tmp_path: Path) -> None:
    """The FP8 export has the bytes that a publication of the bf16 export sends."""
    model = tmp_path / "model"
    stored = checkpoint(model)
    with node(model, tmp_path, torchrun, ranks=2, tensor=2, dtype="bfloat16") as (control, _):
        plain, like = tmp_path / "plain", tmp_path / "like"
        control.ok(ExportHf, output_dir=str(plain))
        control.ok(ExportHf, output_dir=str(like), fp8_like=str(model), shard_bytes=300_000)
        wrong = {"output_dir": str(tmp_path / "x"), "fp8_like": str(plain)}
        assert "no checkpoint in block-scaled FP8" in control.refused(ExportHf, **wrong).message
        assert control.ok(ExportHf, output_dir=str(tmp_path / "x"))
    merged = load_file(plain / "model.safetensors")
    files = sorted(like.glob("*.safetensors"))
    written = {n: t for file in files for n, t in load_file(file).items()}
    assert len(files) > 1 and written.keys() == stored.keys()
    assert json.loads((like / "config.json").read_text())["quantization_config"]
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    for name, tensor in merged.items():
        if is_projection(name):
            codes, scales = fp8.per_block(tensor[None])
            assert same(written[name], codes[0]) and same(written[f"{name}_scale_inv"], scales[0])
            # What nobody trained keeps its codes. A merge makes +0 of -0.
            assert torch.equal(written[name].float(), stored[name].float())
        else:
            assert same(written[name], tensor)


@pytest.mark.parametrize(
    ("shape", "scales", "found"),
    [
        ((256, 128), None, "with no scales"),
        ((4, 128, 128), (4, 1, 1), r"with scales of shape \(4, 1, 1\)"),
        ((256, 128), (2, 2), r"with scales of shape \(2, 2\)"),
    ],
)
def test_fp8_that_would_be_read_with_wrong_scales_is_refused(shape, scales, found) -> None:
    codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=rf"layer\.weight is float8_e4m3fn .*{found}.*bf16 model"):
        fp8_blocks.read("layer.weight", codes, None if scales is None else torch.ones(scales))
    plain = torch.zeros(shape, dtype=torch.bfloat16)
    assert fp8_blocks.read("layer.weight", plain, None) is plain


def test_another_fp8_is_not_read_as_e4m3() -> None:
    codes = torch.zeros(128, 128, dtype=torch.float8_e5m2)
    with pytest.raises(ConfigError, match=r"float8_e5m2 .*reads float8_e4m3fn matrices"):
        fp8_blocks.read("layer.weight", codes, torch.ones(1, 1))


@pytest.mark.parametrize(
    "what", ["a scale is missing", "no scales", "bf16 with a scale", "nothing"]
)
def test_a_checkpoint_that_is_fp8_in_part_is_no_template(tmp_path: Path, what: str) -> None:
    stored = checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    assert fp8_blocks.scaled_weights(tmp_path, tensor_dtypes(tmp_path))
    scales = [n for n in stored if n.endswith("_scale_inv")]
    weight = scales[0].removesuffix("_scale_inv")
    if what == "bf16 with a scale":
        stored[weight] = stored[weight].bfloat16()
    gone = {"a scale is missing": scales[:1], "no scales": scales}.get(what, [])
    save_file({n: t for n, t in stored.items() if n not in gone}, file)
    says = {
        "a scale is missing": f"{weight} has no scales",
        "no scales": "no checkpoint in block-scaled FP8",
        "bf16 with a scale": f"{weight} has scales, but is no e4m3",
        "nothing": "has no config.json, or does not exist",
    }[what]
    folder = tmp_path / "elsewhere" if what == "nothing" else tmp_path
    with pytest.raises(ConfigError, match=says):
        fp8_blocks.scaled_weights(folder, tensor_dtypes(tmp_path))
