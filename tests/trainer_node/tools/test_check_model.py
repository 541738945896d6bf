"""`splice check`: what it admits, and the mistakes that it must find by itself."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from orchestrator.errors import ConfigError
from splice.cli import app
from tests.trainer_node import towers
from tests.trainer_node.conftest import Ranks
from tests.trainer_node.families import FAMILIES, make
from trainer_node.tools import admission, check_model

Checked = Callable[..., dict[str, Any]]


@pytest.fixture
def checked(torchrun: Ranks, tmp_path: Path) -> Checked:
    """The report on a folder, on its own weights with `--whole`, or with a mistake in Megatron's
    config."""

    def run(folder: Path, *more: str) -> dict[str, Any]:
        torchrun(1, "tools.checked", tmp_path / "report.json", folder, *more)
        found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        return found | {"rows": {row["name"]: row for row in found["rows"]}}

    return run


def test_a_model_with_a_window_is_admitted(checked: Checked, tmp_path: Path) -> None:
    report = checked(make("mistral", tmp_path / "mistral"))
    assert report["ok"] and all(row["ok"] for row in report["rows"].values())
    assert {"sliding_window", "rope_parameters.rope_theta", "rms_norm_eps"} <= set(report["seen"])
    assert "hidden_size" not in report["seen"] + report["unseen"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_admitted(checked: Checked, tmp_path: Path, name: str) -> None:
    report = checked(make(name, tmp_path / name))
    assert report["ok"], report["rows"]


@pytest.mark.parametrize("family", towers.TOWERS)
def test_the_weights_of_a_model_that_sees(checked: Checked, tmp_path: Path, family: str) -> None:
    report = checked(towers.make(family, tmp_path / family), "--whole")
    assert report["ok"], report["rows"]
    said = f"Nobody reads {', '.join(towers.FURTHER.get(family, ()))}"
    assert (said in report["rows"]["exported"]["text"]) == (family in towers.FURTHER)
    assert not any("vision_config" in name for name in report["seen"] + report["unseen"])


GROUPS = {"n_routed_experts": 32, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
"""DeepSeek-V3's."""


def test_deepseek_v3s_groups_are_admitted(checked: Checked, tmp_path: Path) -> None:
    """Its small model takes as many experts of each group."""
    report = checked(make("deepseek_v3", tmp_path / "model", **GROUPS))
    assert report["ok"], report["rows"]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}),
        ("deepseek_v3", GROUPS | {"topk_group": 2}),
        ("deepseek_v2", GROUPS | {"topk_group": 3, "num_experts_per_tok": 6}),  # V2's own
    ],
)
def test_other_groups_are_refused(
    checked: Checked, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    report = checked(make(family, tmp_path / "model", **settings))
    assert not report["ok"] and "Megatron ranks groups by" in report["rows"]["built"]["text"]


def test_the_padding_token_is_not_drawn(checked: Checked, tmp_path: Path) -> None:
    """transformers has no gradient for its embedding."""
    ((first, *_), *_) = check_model._tokens(transformers.LlamaConfig(vocab_size=300))
    report = checked(make("llama", tmp_path / "model", pad_token_id=int(first)))
    assert report["ok"], report["rows"]
    tokens = check_model._tokens(transformers.LlamaConfig(vocab_size=300, pad_token_id=int(first)))
    assert int(first) not in [int(t) for ids in tokens for t in ids]
    assert max(int(ids.max()) for ids in tokens) < 300


@pytest.mark.parametrize("named", ["LlamaForSequenceClassification", None])
def test_another_class_is_refused(tmp_path: Path, named: str | None) -> None:
    """The start would not build it."""
    folder = make("llama", tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = None if named is None else [named]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"names {named or 'nothing'} .*LlamaForCausalLM is"):
        check_model.write_small(folder, tmp_path / "small")


def test_a_window_that_is_off_by_one_is_found(checked: Checked, tmp_path: Path) -> None:
    """As Megatron-Bridge 0.3.1 had it."""
    report = checked(make("mistral", tmp_path / "mistral"), "window_size", "[8, 0]")
    assert not report["ok"] and report["rows"]["exported"]["ok"]
    assert not report["rows"]["log-probs"]["ok"] and not report["rows"]["gradient"]["ok"]


def test_a_family_that_bridge_computes_otherwise_is_found(checked: Checked, tmp_path: Path) -> None:
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, moe_num_experts=8, moe_k=2,
        moe_intermediate_size=32, moe_num_shared_experts=1, moe_layer_start_index=1,
        architectures=["Ernie4_5_MoeForCausalLM"],
    )  # fmt: skip # a table
    config.save_pretrained(tmp_path / "ernie")
    report = checked(tmp_path / "ernie")
    assert not report["ok"] and report["rows"]["built"]["ok"]
    assert not report["rows"]["log-probs"]["ok"]


def gemma2(folder: Path) -> None:
    """A config that the trainer refuses."""
    config = transformers.Gemma2Config(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32,
        architectures=["Gemma2ForCausalLM"],
    )  # fmt: skip # a table
    config.save_pretrained(folder)


def test_what_the_trainer_refuses_is_the_report(checked: Checked, tmp_path: Path) -> None:
    gemma2(tmp_path / "gemma2")
    report = checked(tmp_path / "gemma2")
    assert not report["ok"] and list(report["rows"]) == ["built"]
    assert "softcap" in report["rows"]["built"]["text"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "has no config.json; give the folder"),
        ("{", r"config.json is no JSON"),
        ('{"model_type": "gpt2"}', "has no num_hidden_layers, hidden_size, num_attention_heads"),
        (
            json.dumps(
                {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3}
                | {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
            ),
            r"num_attention_heads \(4\) is no multiple of num_key_value_heads \(3\)",
        ),
        (
            json.dumps(
                {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2}
                | {"hidden_size": 64, "rope_parameters": {"rope_type": "magic", "factor": 2.0}}
            ),
            r"cannot build a small llama: it does not know 'magic', which \S*config.json says",
        ),
        ('{"model_type": "nonesuch"}', r"transformers 5\S+, .* knows no model_type 'nonesuch'"),
        ('{"model_type": "qwen2_5_vl"}', r"qwen2_5_vl \(qwen2_5_vl_text\).*language parts only"),
    ],
)
def test_what_cannot_be_checked_ends_in_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    config: str | None,
    said: str,
) -> None:
    monkeypatch.setattr(check_model, "_be_quiet", lambda: None)  # for good, and in other tests
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert check_model.main(["--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("splice check: ") and str(tmp_path) in line and re.search(said, line)


def test_a_quantised_checkpoint_is_refused_before_a_small_model_is_made(tmp_path: Path) -> None:
    make("llama", tmp_path / "llama")
    raw = json.loads((tmp_path / "llama" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(raw))
    report = check_model.check(tmp_path / "llama", whole=False)
    assert not report.ok and "the trainer reads bf16, and FP8" in report.rows[0].text


def test_a_limit_that_would_not_bind_is_lowered(checked: Checked, tmp_path: Path) -> None:
    """Neither Bridge nor vLLM knows OLMoE's `clip_qkv`, and small random models stay below it."""
    folder = make("olmoe", tmp_path / "olmoe", clip_qkv=800.0)
    report = checked(folder)
    assert not report["ok"] and "clip_qkv" in report["seen"]
    assert not report["rows"]["log-probs"]["ok"]
    assert "Not seen to change transformers' log-probs: " in report["rows"]["config"]["text"]


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [("dsss", 3), ("dsds", 3), ("llllf", 5), ("lllflllf", 5), ("dd", 2), ("dddss", 5)],
)
def test_a_small_model_has_each_kind_of_layer_after_each_that_it_follows(
    kinds: str, layers: int
) -> None:
    assert check_model._layers({"num_hidden_layers": len(kinds), "kinds": list(kinds)}) == layers


def test_only_the_small_model_is_published(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(tmp_path), "--whole", "--serve"])
    assert done.exit_code == 2 and "splice smoke --model" in done.output


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ConfigError, match="nonesuch"):
        check_model.small_config(tmp_path)


def test_a_small_model_keeps_what_changes_the_mathematics(tmp_path: Path) -> None:
    transformers.Qwen3NextConfig(partial_rotary_factor=0.25, norm_topk_prob=False).save_pretrained(
        tmp_path
    )
    config = check_model.small_config(tmp_path)
    linear, full = "linear_attention", "full_attention"
    assert config.layer_types == [linear, linear, linear, full, linear]
    assert (config.num_hidden_layers, config.num_experts, config.hidden_size) == (5, 8, 128)
    assert (config.head_dim, config.norm_topk_prob, config.rms_norm_eps) == (256, False, 1e-6)
    assert config.rope_parameters["partial_rotary_factor"] == 0.25


def test_the_first_start_checks_and_the_next_finds_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")  # a rank's
    model = make("llama", tmp_path / "llama")
    admission.require(model)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it checks again"))
    admission.require(model)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(pytest.fail.Exception):
        admission.require(model)


def test_a_model_that_fails_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gemma2(tmp_path / "gemma2")
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM.* softcap.*admission = \"skip\""):
        admission.require(tmp_path / "gemma2")
    assert not list(tmp_path.glob("splice/checks/*"))


def test_a_model_that_cannot_be_checked_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ConfigError, match=r"cannot be checked: /.*knows no model_type 'nonesuch'"):
        admission.require(tmp_path)
