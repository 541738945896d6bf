"""Compares what Megatron computes with what vLLM computed: the trainer's side of `splice check
--bits`.

    python -m trainer_node.tools.bits --model FOLDER --device cpu --dtype float32 --sampler FILE
        [--exact] [--out report.json]

With one rank and the checkpoint's own weights. See `weight_transfer.exact.bits`. Exit
code 1 if a log-prob differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from trainer_node.tools.check_model import batch_of
from weight_transfer.exact import bits, kernels

Found = dict[str, torch.Tensor]


def _flat(x: Any) -> torch.Tensor:
    """[N, 1, ...] or [N, ...] -> [N, features]."""
    first: torch.Tensor = x[0] if isinstance(x, tuple) else x
    return first.detach().reshape(-1 if first.dim() < 3 else first.shape[0] * first.shape[1],
                                  first.shape[-1])  # fmt: skip


def _in_hf_order(qkv_NF: torch.Tensor, config: Any) -> torch.Tensor:
    """Megatron has query heads, key and value of each group together; HF all q, all k, all v."""
    size, groups = config.kv_channels, config.num_query_groups
    parts = qkv_NF.view(len(qkv_NF), groups, -1, size).split(
        [config.num_attention_heads // groups, 1, 1], dim=2
    )
    return torch.cat([part.flatten(1) for part in parts], dim=-1)


@contextlib.contextmanager
def _hooks(module: Any, found: Found) -> Iterator[None]:
    """Keep what the modules take and give, under the names of `bits.OPERATIONS`."""
    with contextlib.ExitStack() as stack:

        def after(where: Any, name: str, take: Any = _flat) -> None:
            hook = where.register_forward_hook(
                lambda _m, _a, out: found.__setitem__(name, take(out).clone())
            )
            stack.callback(hook.remove)

        def before(where: Any, name: str, take: Any = lambda args: _flat(args[0])) -> None:
            hook = where.register_forward_pre_hook(
                lambda _m, args: found.__setitem__(name, take(args).clone())
            )
            stack.callback(hook.remove)

        def norm_of(linear: Any, name: str) -> None:
            if not hasattr(linear, "normed"):  # TransformerEngine's, which returns both
                ordinary_forward = linear.forward

                def forwarded(*args: Any, **kwargs: Any) -> Any:
                    result = ordinary_forward(*args, **kwargs)
                    if isinstance(result[0], tuple):
                        found[name] = _flat(result[0][1]).clone()
                    return result

                linear.forward = forwarded
                stack.callback(setattr, linear, "forward", ordinary_forward)
                return
            ordinary = linear.normed

            def kept(x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = ordinary(x)
                found[name] = _flat(out).clone()
                return out

            linear.normed = kept
            stack.callback(setattr, linear, "normed", ordinary)

        after(module.embedding.word_embeddings, "embedding",
              lambda out: out.detach().reshape(-1, out.shape[-1]))  # fmt: skip
        after(module.decoder.final_layernorm, "final_norm")
        for n, layer in enumerate(module.decoder.layers):
            attention, mlp = layer.self_attention, layer.mlp
            config = attention.config
            norm_of(attention.linear_qkv, f"{n}.input_norm")
            after(attention.linear_qkv, f"{n}.qkv", lambda o, c=config: _in_hf_order(_flat(o), c))
            for name in ("q", "k"):
                one = getattr(attention, f"{name}_layernorm", None)
                if one is not None and getattr(one, "weight", None) is not None:
                    after(one, f"{n}.{name}_norm", _heads)
            before(attention.core_attention, f"{n}.rope",
                   lambda args: torch.cat([_heads(args[0]), _heads(args[1])], dim=-1))  # fmt: skip
            after(attention.core_attention, f"{n}.attention")
            after(attention.linear_proj, f"{n}.attention_out")
            if hasattr(mlp, "router"):
                before(layer.pre_mlp_layernorm, f"{n}.residual")
                after(layer.pre_mlp_layernorm, f"{n}.mlp_norm")
                gating = mlp.router.gating
                mlp.router.gating = _kept(gating, found, f"{n}.router")
                stack.callback(setattr, mlp.router, "gating", gating)
                after(mlp, f"{n}.experts")
                continue
            before(mlp.linear_fc1, f"{n}.residual")
            norm_of(mlp.linear_fc1, f"{n}.mlp_norm")
            after(mlp.linear_fc1, f"{n}.gate_up")
            before(mlp.linear_fc2, f"{n}.swiglu")
            after(mlp.linear_fc2, f"{n}.down")
        yield


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[N, (1,) heads, D] -> [N, heads * D]."""
    return x.detach().flatten(-2).reshape(-1, x.shape[-2] * x.shape[-1])


def _kept(function: Any, found: Found, name: str) -> Any:
    def kept(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        found[name] = _flat(out).clone()
        return out

    return kept


def measured(config: TrainerConfig, sampler: Found) -> Found:
    """What the trainer computes for the sampler's tokens."""
    from trainer_node.training.start import start

    trainer = start(config)
    with torch.no_grad():
        return _measured(trainer, config.numerics == "exact", sampler)


def _measured(trainer: Any, is_exact: bool, sampler: Found) -> Found:
    model, found = trainer.model, dict[str, torch.Tensor]()
    asked = [torch.tensor(ids) for ids in bits.sequences(model.vocab_size, bits.SEQUENCES)]
    with _hooks(model.head, found):
        trainer.forward(batch_of(asked))
    head = model.head
    tied = head.share_embeddings_and_output_weights
    weight = head.shared_embedding_or_output_weight() if tied else head.output_layer.weight
    product = kernels.linear if is_exact else torch.nn.functional.linear
    found["logits"] = product(found["final_norm"], weight)[:, : model.vocab_size]
    found["log_probs"] = kernels.log_softmax(found["logits"].float())
    answers = sampler["sampled_tokens"]
    prompts = bits.sequences(model.vocab_size, bits.PROMPTS)
    rows = [torch.cat([torch.tensor(p), a]) for p, a in zip(prompts, answers, strict=True)]
    scored, _ = trainer.forward(batch_of(rows))
    ends = torch.tensor([len(r) for r in rows]).cumsum(0).tolist()
    found[bits.SAMPLED] = torch.cat([scored[e - answers.shape[1] : e] for e in ends])
    return {name: tensor.cpu() for name, tensor in found.items()}


def _table(rows: list[bits.Row], first: str) -> str:
    lines = [f"{'operation':28}{'layers':>7}{'differ':>9}{'largest':>12}{'ulps':>12}  first in"]
    for row in rows:
        name = bits.OPERATIONS.get(row.operation, "log-probs of sampled tokens")
        where = ""
        if row.first_layer is not None:
            where = f"layer {row.first_layer}: {row.first_largest:.1e}"
        share = f"{row.differing / row.count:.1%}" if row.differing else "0"
        lines.append(f"{name:28}{row.layers:7}{share:>9}{row.largest:12.3e}{row.ulps:12}  {where}")
    return "\n".join([*lines, f"the first operation that differs: {first or 'none'}", ""])


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--sampler", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = TrainerConfig(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        numerics="exact" if options.exact else "adapters",
        shared_prefixes=False,
        micro_batch_tokens=4096,
    )
    theirs = load_file(options.sampler)
    try:
        ours = measured(config, theirs)
    except ConfigError as error:
        sys.stderr.write(f"splice check: {error}\n")
        return 2
    rows, first = bits.compare(ours, theirs)
    sys.stdout.write(_table(rows, first))
    if options.out is not None:
        names = ("model", "device", "dtype", "exact")
        settings = {name: str(getattr(options, name)) for name in names}
        report = settings | {"first": first, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(report, indent=1))
    return int(any(r.differing for r in rows if r.operation in ("log_probs", bits.SAMPLED)))


if __name__ == "__main__":
    sys.exit(main())
