"""One contender of `benchmarks.train`: some optimizer steps over the same sequences, seconds of
each as JSON on the last line.

    python -m benchmarks.train_worker {splice,bridge,peft} --model DIR --kind {rl,sft} --device
    {cpu,cuda} --steps N --tokens N
    torchrun ... -m benchmarks.train_worker splice ... --tensor N --expert N    ranks share the same
                                                                                sequences; rank 0
                                                                                prints

Sequences: lengths log-uniform between 1/16 of the longest and the longest, until `--tokens` are
there; the second half of each carries loss. RL is the importance-sampling loss with given log-probs
and advantages, SFT is cross-entropy; both divided by the number of loss tokens.

- splice: `Trainer.train_step`; sequences packed to `--pack` tokens, or as many as fit.
- bridge: Megatron-Bridge's provider and its `LoRA` on linear_qkv, linear_proj, linear_fc1,
  linear_fc2 (one A for each fused part, one adapter for a rank's experts), one sequence in a
  forward and backward pass, torch's AdamW.
- peft: transformers' model, PEFT's LoRA on all linear layers, torch's SDPA attention, one sequence
  in a pass, torch's AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import kernel_profile
from benchmarks.timing import seconds

RANK, ALPHA, LR, WARM_STEPS = 16, 32.0, 1e-4, 2


def lengths_of(tokens: int, longest: int) -> list[int]:
    """The same for every contender."""
    rng, lengths = np.random.default_rng(7), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(np.exp(rng.uniform(np.log(max(longest // 16, 4)), np.log(longest))))
        lengths.append(drawn if left - drawn >= 4 else left)
    return lengths


class Data:
    """Token ids, loss mask, advantages and sampler log-probs of all sequences laid end to end, [T]
    each.
    """

    def __init__(self, config: dict[str, Any], *, tokens: int, longest: int) -> None:
        self.lengths = lengths_of(tokens, longest)
        self.pack_tokens = 0
        """What a contender packs to; 0: it does not pack."""
        rng, total = np.random.default_rng(8), sum(self.lengths)
        self.tokens = rng.integers(0, config["vocab_size"], total)
        self.mask = np.concatenate([np.arange(n) >= max(n // 2, 1) for n in self.lengths])
        self.advantages = (rng.standard_normal(total) * self.mask).astype(np.float32)
        self.logprobs = np.where(self.mask, -np.log(config["vocab_size"]), 0.0).astype(np.float32)

    def sequences(self, device: str) -> list[tuple[torch.Tensor, ...]]:
        """(ids, mask, advantages, log-probs) of each, on `device`."""
        fields = [
            torch.from_numpy(a).to(device)
            for a in (self.tokens, self.mask, self.advantages, self.logprobs)
        ]
        return list(zip(*(f.split(self.lengths) for f in fields), strict=True))


FLOPS_KNOWN = ("qwen3", "qwen3_moe")


def frozen_and_adapters(config: dict[str, Any]) -> tuple[int, int]:
    """Frozen weights and adapters' weights that a token passes."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv = config["num_key_value_heads"] * dim
    linears = [(hidden, heads * dim), (hidden, kv), (hidden, kv), (heads * dim, hidden)]
    experts = config.get("num_experts") or 0
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
    linears += mlp * (config["num_experts_per_tok"] if experts else 1)
    layers = config["num_hidden_layers"]
    frozen = layers * (sum(i * o for i, o in linears) + hidden * experts)
    return frozen, layers * sum(RANK * (i + o) for i, o in linears)


def step_flops(config: dict[str, Any], data: Data) -> float:
    """See `benchmarks.train` for the formula."""
    frozen, adapters = frozen_and_adapters(config)
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    layers, total = config["num_hidden_layers"], sum(data.lengths)
    contexts = sum(n * (n + 1) / 2 for n in data.lengths)
    head = 4 * hidden * config["vocab_size"] * int(data.mask.sum())
    return total * (4 * frozen + 6 * adapters) + layers * 12 * heads * dim * contexts + head


def loss_of(logprobs: torch.Tensor, rest: tuple[torch.Tensor, ...], kind: str) -> torch.Tensor:
    """Summed over a sequence's loss tokens; `logprobs` of all but the first, [L - 1]."""
    mask, advantages, old = (t[1:] for t in rest)
    per_token = -logprobs if kind == "sft" else -(logprobs - old).exp() * advantages
    return (per_token * mask).sum()


# ---------------------------------------------------------------- contenders: each returns the
# function that does one step


def splice(
    model: Path, data: Data, kind: str, device: str, pack: int, sizes: dict[str, int]
) -> Callable[[], object]:
    """Ours."""
    from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
    from orchestrator.protocol.messages import LossSpec, OptimParams
    from trainer_node.training.batch import Batch
    from trainer_node.training.start import start

    dtype = "bfloat16" if device == "cuda" else "float32"
    config = TrainerConfig(
        model=model,
        init="random",
        device=device,
        dtype=dtype,
        parallel=ParallelConfig(**sizes),
        lora=LoraConfig(rank=RANK, alpha=ALPHA),
        micro_batch_tokens=pack or "auto",  # type: ignore[arg-type]
        numerics=os.environ.get("SPLICE_BENCH_NUMERICS", "adapters"),  # type: ignore[arg-type]
    )
    trainer = start(config)
    batch = Batch(
        tokens_T=torch.from_numpy(data.tokens),
        loss_mask_T=torch.from_numpy(data.mask.astype(np.float32)),
        advantages_T=torch.from_numpy(data.advantages),
        sampler_logprobs_T=torch.from_numpy(data.logprobs),
        lengths=tuple(data.lengths),
    )
    loss = LossSpec(name="cross_entropy" if kind == "sft" else "importance_sampling")
    data.pack_tokens = trainer.micro_batch_tokens
    return lambda: trainer.train_step(batch, loss, OptimParams(lr=LR))


def bridge(
    model: Path, data: Data, kind: str, device: str, pack: int, sizes: dict[str, int]
) -> Callable[[], object]:
    """A bare loop on Megatron-Bridge."""
    from orchestrator.protocol.config import TrainerConfig
    from trainer_node.hf.checkpoint import read_config
    from trainer_node.ranks import topology

    if device == "cpu":
        from trainer_node.backends import cpu_shims

        cpu_shims.apply()
        import megatron.bridge.peft.utils as peft_utils

        peft_utils.HAVE_TE = False
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.packed_seq_params import PackedSeqParams

    topology.join(TrainerConfig(model=model, device=device))  # type: ignore[arg-type]
    provider = AutoBridge.from_hf_config(read_config(model)).to_megatron_provider(
        load_weights=False
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.moe_aux_loss_coeff, provider.gradient_accumulation_fusion = (
        device == "cuda",
        0.0,
        False,
    )
    if device == "cpu":
        cpu_shims.without_cuda(provider)
    provider.finalize()
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    gpt: Any = LoRA(target_modules=targets, dim=RANK, alpha=int(ALPHA), dropout=0.0)(
        provider.provide(pre_process=True, post_process=True).to(device), training=True
    )
    trainable = [p for p in gpt.parameters() if p.requires_grad]

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        length = len(ids) - 1
        positions = torch.arange(length, device=ids.device)[None]
        bounds = torch.tensor([0, length], dtype=torch.int32)
        # The CPU's attention knows packs only.
        packed = (
            None
            if device == "cuda"
            else PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)
        )
        result: torch.Tensor = -gpt(
            input_ids=ids[None, :-1],
            position_ids=positions,
            attention_mask=None,
            labels=ids[None, 1:],
            packed_seq_params=packed,
        )[0]
        return result

    return _plain_loop(logprobs, trainable, data, kind, device)


def peft(
    model: Path, data: Data, kind: str, device: str, pack: int, sizes: dict[str, int]
) -> Callable[[], object]:
    """A bare loop on transformers and PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from orchestrator.protocol.config import LORA_TARGETS

    config = AutoConfig.from_pretrained(model)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
    )
    policy: Any = get_peft_model(base, lora)

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        logits = policy(input_ids=ids[None, :-1], use_cache=False).logits[0]
        return -torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="none")

    return _plain_loop(
        logprobs, [p for p in policy.parameters() if p.requires_grad], data, kind, device
    )


def _plain_loop(
    logprobs: Callable[[torch.Tensor], torch.Tensor],
    trainable: list[Any],
    data: Data,
    kind: str,
    device: str,
) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.0, fused=device == "cuda")
    sequences, count = data.sequences(device), float(data.mask.sum())

    def step() -> None:
        for ids, *rest in sequences:
            (loss_of(logprobs(ids), tuple(rest), kind) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS = {"splice": splice, "bridge": bridge, "peft": peft}

# ---------------------------------------------------------------- measuring


def matmul_flops_per_s(device: str) -> float:
    """Of one large product: bf16 on CUDA, fp32 on a CPU; the best of five."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: a @ b, device) for _ in range(5))


def peak_bytes(device: str) -> int:
    """Allocated on the GPU at most; on a CPU the process's resident memory at most."""
    return (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kind", choices=["rl", "sft"], required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--longest", type=int, default=0, help="0: 4096, on a CPU 48")
    parser.add_argument(
        "--pack", type=int, default=0, help="0: what the trainer measures that fits, on a CPU 128"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        default=None,
        help="write there which kernels one more step takes its time with",
    )
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--expert", type=int, default=1)
    a = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {"tensor": a.tensor, "expert": a.expert, "world_size": world}
    cuda = a.device == "cuda"
    config = json.loads((a.model / "config.json").read_text())
    data = Data(config, tokens=a.tokens, longest=a.longest or (4096 if cuda else 48))
    pack = a.pack or (0 if cuda else 128)
    step = CONTENDERS[a.contender](a.model, data, a.kind, a.device, pack, sizes)
    for _ in range(WARM_STEPS):
        step()
    samples = [seconds(step, a.device) for _ in range(a.steps)]
    result = {
        "seconds": samples,
        "tokens": sum(data.lengths),
        "sequences": len(data.lengths),
        "loss_tokens": int(data.mask.sum()),
        **({"flops": step_flops(config, data)} if config["model_type"] in FLOPS_KNOWN else {}),
        "peak_bytes": peak_bytes(a.device),
        "matmul_flops_per_s": matmul_flops_per_s(a.device),
        "pack_tokens": data.pack_tokens,
        "rank": RANK,
        **sizes,
    }
    if a.profile is not None:
        a.profile.write_text(kernel_profile.table_of(step, a.device))
    sys.stderr.flush()
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
