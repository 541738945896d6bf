"""Checkpoints that are not what their config says: refused at the start, with the tensor's or the
file's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer_node.conftest import Ranks
from tests.trainer_node.families import make
from trainer_node.hf.checkpoint import fingerprint, tensor_files

Change = Callable[[dict[str, torch.Tensor]], object]
GATE = "model.layers.1.mlp.gate_proj.weight"


def changed(folder: Path, change: Change, name: str = "llama", **settings: object) -> Path:
    make(name, folder, **settings)
    (file,) = set(tensor_files(folder).values())
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def cut(folder: Path) -> Path:
    make("llama", folder)
    (file,) = set(tensor_files(folder).values())
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def as_bin(folder: Path) -> Path:
    make("llama", folder)
    (file,) = set(tensor_files(folder).values())
    torch.save(load_file(file), folder / "pytorch_model.bin")
    for path in folder.glob("*safetensors*"):
        path.unlink()
    return folder


def without_weights(folder: Path) -> Path:
    as_bin(folder)
    (folder / "pytorch_model.bin").unlink()
    return folder


def naming(folder: Path, *architectures: str) -> Path:
    make("llama", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    named = {"architectures": architectures} if architectures else {}
    path.write_text(json.dumps(config | named))
    return folder


MADE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut": (cut, r"\.safetensors cannot be read: .*is it complete\?"),
    "nan": (
        lambda f: changed(f, lambda t: t[GATE].view(-1)[3:4].fill_(float("nan"))),
        rf"NaN or infinite weights in {GATE}; restore",
    ),
    "another-head": (
        lambda f: changed(f, other_head, "llama_tied"),
        "ties lm_head.weight to model.embed_tokens.weight, but",
    ),
    "another-shape": (
        lambda f: changed(f, lambda t: t.update({GATE: torch.ones(3, 64)})),
        "tensors do not fit its config.json",
    ),
    "another-name": (
        lambda f: changed(f, lambda t: t.update({"model.layers.1.mlp.gate.weight": t.pop(GATE)})),
        rf"lacks 1 of the model's tensors, e.g. {GATE}, and has model.layers.1.mlp.gate.weight",
    ),
    "bin": (as_bin, r"has its weights in pytorch_model\.bin, and splice reads \*\.safetensors"),
    "no-weights": (without_weights, r"has no \*\.safetensors; download the model's weights"),
    "no-class": (naming, r'names nothing in architectures; name .*\["LlamaForCausalLM"\]$'),
    "another-class": (
        lambda f: naming(f, "LlamaModel"),
        r"names \['LlamaModel'\] in architectures; name the causal",
    ),
    "a-bias-without-a-mapping": (
        lambda f: make("llama", f, attention_bias=True),
        r"Megatron-Bridge [\d.]+ has no mapping for decoder\S+bias and \d+ more parameters",
    ),
}


@pytest.mark.parametrize("what", MADE)
def test_is_refused_by_name(torchrun: Ranks, tmp_path: Path, what: str) -> None:
    folder, said = MADE[what][0](tmp_path / "model"), MADE[what][1]
    torchrun(1, "hf.refused_start", folder, said)


def test_what_nobody_reads_is_named(torchrun: Ranks, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64), "mtp.x.weight": torch.ones(2)}
    folder = changed(tmp_path / "model", lambda t: t.update(extra))
    torchrun(
        1,
        "hf.refused_start",
        folder,
        "1 tensors of the checkpoint are not read, e.g. .*q_proj.bias",
    )


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    """Other files of the same weights have the same."""
    folder = make("llama", tmp_path / "model")
    whole = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, some in (("a", names[:5]), ("b", names[5:])):
        save_file({n: tensors[n] for n in some}, folder / f"model-{part}.safetensors")
    assert fingerprint(folder) == whole
    tensors[GATE] += 1e-3
    save_file({n: tensors[n] for n in names[5:]}, folder / "model-b.safetensors")
    assert fingerprint(folder) != whole


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_rounded_is_named(torchrun: Ranks, tmp_path: Path, dtype: str) -> None:
    folder = make("llama", tmp_path / "model", "bfloat16")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {GATE: tensors[GATE].to(getattr(torch, dtype))}, file, {"format": "pt"})
    said = rf"1 of \d+ tensors of the checkpoint are {dtype}, e\.g\. {GATE}; .* rounded"
    torchrun(1, "hf.refused_start", folder, said, "bfloat16")


def test_experts_of_other_ranks_are_read(torchrun: Ranks, tmp_path: Path) -> None:
    torchrun(2, "hf.refused_start", make("qwen3_moe", tmp_path / "model"), 2)


def test_an_index_that_is_no_json(torchrun: Ranks, tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weights": {}})[:-3])
    torchrun(1, "hf.refused_start", folder, "index.json cannot be read")
