"""Writes what vLLM computes, operation by operation: the sampler's side of `splice check --bits`.

    python -m inference_node.bits --model FOLDER --device cpu --dtype float32 --out FILE [--exact]

Sequences are prefilled together, with a hook on each module. Then prompts are answered at
temperature 1, together. vLLM runs in this process. See `weight_transfer.exact.bits`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from inference_node.shared import names
from orchestrator.errors import ConfigError
from weight_transfer.exact import bits

Found = dict[str, list[torch.Tensor]]


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _in_rows(heads: int, out: torch.Tensor) -> torch.Tensor:
    return out.reshape(-1, heads * out.shape[-1])


def _hooks(model: Any, found: Found) -> list[Any]:
    """Keep what modules return, under the names of `bits.OPERATIONS`."""
    handles: list[Any] = []

    def keep(name: str, tensor: torch.Tensor) -> None:
        found.setdefault(name, []).append(tensor.detach().flatten(1).clone())

    def after(module: nn.Module | None, name: str, take: Callable[[Any], Any] = _first) -> None:
        if module is not None:
            hook = lambda _m, _a, out: keep(name, take(out))  # noqa: E731
            handles.append(module.register_forward_hook(hook))

    def before(module: nn.Module, name: str, take: Callable[[Any], Any] = _first) -> None:
        hook = lambda _m, args: keep(name, take(args))  # noqa: E731
        handles.append(module.register_forward_pre_hook(hook))

    inner = model.model
    after(inner.embed_tokens, "embedding")
    after(inner.norm, "final_norm")
    for number, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        after(layer.input_layernorm, f"{number}.input_norm")
        after(attention.qkv_proj, f"{number}.qkv")
        for name, count in (("q_norm", attention.num_heads), ("k_norm", attention.num_kv_heads)):
            by_head = functools.partial(_in_rows, count)
            after(getattr(attention, name, None), f"{number}.{name}", by_head)
        # One module turns q and k of all layers.
        before(attention.attn, f"{number}.rope", lambda args: torch.cat(args[:2], dim=-1))
        after(attention.attn, f"{number}.attention")
        after(attention.o_proj, f"{number}.attention_out")
        after(layer.post_attention_layernorm, f"{number}.mlp_norm")
        after(layer.post_attention_layernorm, f"{number}.residual", lambda out: out[1])
        after(getattr(mlp, "gate_up_proj", None), f"{number}.gate_up")
        after(getattr(mlp, "gate", None), f"{number}.router")
        if (down := getattr(mlp, "down_proj", None)) is not None:
            before(down, f"{number}.swiglu")
            after(down, f"{number}.down")
        else:
            after(mlp, f"{number}.experts")
    return handles


def ids_and_logprobs(answer: Any) -> tuple[list[int], list[float]]:
    """Return the tokens of vLLM's answer and their log-probs, which are fp32."""
    (output,) = answer.outputs
    ids = list(output.token_ids)
    return ids, [entry[i].logprob for entry, i in zip(output.logprobs, ids, strict=True)]


@torch.no_grad()
def record(model: Path, dtype: str, **more: Any) -> dict[str, torch.Tensor]:
    """Run vLLM and return what it computed."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        **more,
        model=str(model), dtype=dtype, enforce_eager=True, max_model_len=256, seed=0,
        kv_cache_memory_bytes=1 << 28, logprobs_mode="processed_logprobs",
        generation_config="vllm", enable_prefix_caching=False,
    )  # fmt: skip # options
    network = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    attentions = [getattr(layer, "self_attn", None) for layer in network.model.layers]
    if not all(hasattr(attention, "qkv_proj") for attention in attentions):
        raise ConfigError(
            f"{type(network).__name__} has layers without one product for q, k and v; --bits "
            "compares models in which all layers have it"
        )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    found: Found = {}
    handles = _hooks(network, found)
    asked = bits.sequences(vocab, bits.SEQUENCES)
    only = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked], only, use_tqdm=False)
    for handle in handles:
        handle.remove()
    result = {name: torch.cat(parts) for name, parts in found.items()}
    result["logits"] = network.compute_logits(result["final_norm"])
    result["log_probs"] = torch.log_softmax(result["logits"].float(), dim=-1)
    params = SamplingParams(
        max_tokens=bits.ANSWER, temperature=1.0, seed=3, logprobs=0, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip # options
    prompts = bits.sequences(vocab, bits.PROMPTS)
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False
    )
    ids, logprobs = zip(*map(ids_and_logprobs, answers), strict=True)
    result["sampled_tokens"] = torch.tensor(ids)
    result[bits.SAMPLED] = torch.tensor(logprobs, dtype=torch.float32).flatten()
    return {name: tensor.cpu() for name, tensor in result.items()}


def use_this_process(device: str, *, is_exact: bool) -> None:
    """Set the environment for vLLM in this process, before it is imported."""
    os.environ[names.EXACT] = str(int(is_exact))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    use_this_process(options.device, is_exact=options.exact)
    more: dict[str, Any] = {}
    if options.device == "cuda":
        # vLLM only checks that so much is free: the size of its cache is given.
        more = {"gpu_memory_utilization": 0.3, "attention_backend": names.EXACT_BACKEND}
        os.environ.update(names.EXACT_ENVIRONMENT)
    try:
        result = record(options.model, options.dtype, **more)
    except ConfigError as error:
        sys.stderr.write(f"splice check: vLLM's side failed: {error}\n")
        os._exit(2)
    save_file({name: t.contiguous() for name, t in result.items()}, options.out)
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine in this process leaves threads that join slowly


if __name__ == "__main__":
    main()
