"""The tiny checkpoints: the same files everywhere, loadable, and every class of weights matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.trainer_node.tiny import hf_model
from trainer_node.tools.make_checkpoint import ANSWERS, VOCAB_SIZE, main, real_shapes

PROMPTS = [
    "Question: is the sky blue today? Answer:",
    "Question: is the sea made of sand? Answer:",
    "Question: will it rain tomorrow? Answer:",
    "Question: can a stone swim? Answer:",
]


@pytest.fixture(scope="module", params=["qwen3", "qwen3-tied", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    arch, _, tied = request.param.partition("-")
    main(["--arch", arch, "--out", str(folder), *(["--tie-word-embeddings"] if tied else [])])
    return folder


def test_tokenizer_is_real(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for word in ANSWERS:
        assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1
    text = "Grüße: yes, no & maybe… 12/48"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == VOCAB_SIZE and VOCAB_SIZE % 128, (
        "Megatron's padding must have something to do"
    )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Well?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>Well?<|end|><|assistant|>"
    assert AutoConfig.from_pretrained(checkpoint).eos_token_id == tokenizer.eos_token_id


def test_files_agree(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    config = AutoConfig.from_pretrained(checkpoint)
    assert ("lm_head.weight" in tensors) == (not config.tie_word_embeddings)
    if config.model_type == "qwen3_moe":
        assert config.num_experts == getattr(config, "num_local_experts", config.num_experts) == 8


def test_every_class_of_weights_moves_the_logprobs(checkpoint: Path) -> None:
    """A change of one in a hundred of any one tensor must show by more than 1e-3, or no check could
    see it missing.
    """
    tokenizer, model = (
        AutoTokenizer.from_pretrained(checkpoint),
        hf_model(checkpoint).eval(),
    )
    inputs = [torch.tensor([tokenizer.encode(p)]) for p in PROMPTS]
    generator = torch.Generator().manual_seed(7)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(i).logits[0].log_softmax(-1) for i in inputs])

    base = logprobs()
    assert base.max(-1).values.mean() > -3.5, "as good as uniform"
    unmoved = {}
    for name, parameter in model.named_parameters():
        before = parameter.data.clone()
        parameter.data += 0.01 * before.std() * torch.randn(before.shape, generator=generator)
        moved = float((logprobs() - base).abs().max())
        parameter.data = before
        if moved < 1e-3:
            unmoved[name] = moved
    assert not unmoved


def test_first_and_last_expert_get_tokens(tmp_path: Path) -> None:
    main(["--arch", "qwen3_moe", "--out", str(tmp_path)])
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path).float().eval(),
    )
    chosen = torch.zeros(2, 8, dtype=torch.int64)

    def count(layer: int) -> Any:
        def hook(
            _: object, inputs: tuple[torch.Tensor, ...], __: object, layer: int = layer
        ) -> None:
            router = model.model.layers[layer].mlp.gate.weight
            scores = inputs[0].reshape(-1, router.shape[1]) @ router.T
            chosen[layer] += torch.bincount(scores.topk(2, dim=-1).indices.flatten(), minlength=8)

        return hook

    for layer in range(2):
        model.model.layers[layer].mlp.register_forward_hook(count(layer))
    for prompt in PROMPTS:
        with torch.no_grad():
            model(torch.tensor([tokenizer.encode(prompt)]))
    assert (chosen > 0).all(), chosen


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        main(["--out", str(tmp_path / name), "--seed", str(seed)])
    contents = [(tmp_path / n / "model.safetensors").read_bytes() for n in "abc"]
    assert contents[0] == contents[1] != contents[2]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "c" / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("name", "tensors", "gigabytes"),
    [
        ("qwen3-30b-a3b", 18867, 61.06),
        ("qwen3-8b", 399, 16.38),
        ("qwen3-14b", 443, 29.54),
        ("llama-3.1-8b", 291, 16.06),
        ("gpt-oss-20b", 411, 41.83),
        ("glm-4.7-flash", 9491, 59.89),
        ("qwen3.5-35b-a3b", 31333, 69.32),
    ],
)
def test_real_configs(tmp_path: Path, name: str, tensors: int, gigabytes: float) -> None:
    main(["--shape", name, "--config-only", "--out", str(tmp_path)])
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == tensors == len(real_shapes(name))
    assert index["metadata"]["total_size"] == pytest.approx(gigabytes * 1e9, rel=1e-3)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([config.vocab_size - 1]).strip(), "random weights sample all ids"
    assert len(tokenizer.encode(" yes")) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--shape", "qwen3-8b"], ["--shape", "qwen3-8b", "--arch", "qwen3_moe", "--config-only"]],
    ids=["weights", "arch"],
)
def test_contradictions_are_refused(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path / "x")])
    assert "--shape qwen3-8b" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
