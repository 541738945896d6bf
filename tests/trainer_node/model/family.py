"""One rank of a check of one family: the trainer's model against transformers.

    torchrun ... -m tests.trainer_node.model.family OUT FOLDER FAMILY TENSOR CONTEXT EXPERT \
        EXPERT_TENSOR [FLAG ...]

Rank 0 leaves OUT: the log-probs of every token over the vocabulary, ours of all sequences in one
pack ("ours") and transformers' of one sequence at a time ("theirs"); the gradients of the tokens'
mean loss by HF name ("our_gradients", "their_gradients"); and on one rank transformers' log-probs
with other settings ("visible"). Every rank exports what it loaded and compares names and bytes with
the checkpoint. On one rank a second pass must give the same bits. Data-parallel ranks see the same
pack. Flags: `bfloat16`, where transformers computes in fp32; `selective` and `full`, what is
recomputed; `no-sequence`, without sequence parallelism; `cuda`, on a GPU, where OUT also has what
transformers makes in bfloat16 ("their_rounded", "their_rounded_gradients").

Axes: T = tokens of all sequences, V = vocabulary.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors import safe_open

from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from tests.trainer_node.data import make_batch
from tests.trainer_node.families import FAMILIES, LENGTHS, VOCAB
from trainer_node.export.merged import Exporter
from trainer_node.hf.checkpoint import read_config
from trainer_node.model import build as product
from trainer_node.model.model import Model
from trainer_node.ranks import topology
from trainer_node.training.gradients import finalize_gradients
from trainer_node.training.packing import MicroBatch, micro_batches

Tensors = dict[str, torch.Tensor]


def build(config: TrainerConfig) -> Model:
    """The trainer's, with the logits of every position. What the checkpoint does not fill shows."""
    load = product._load_weights

    def load_into_nothing(bridge: Any, checkpoint: Any, modules: list[Any]) -> None:
        with torch.no_grad():
            for parameter in modules[0].parameters():
                parameter.fill_(torch.nan)
        load(bridge, checkpoint, modules)

    product._load_weights = load_into_nothing
    model = product.build(config, read_config(config.model))
    vars(model.head.output_layer).pop("forward", None)
    return model


def export(model: Model) -> Tensors:
    """The module's tensors under HF's names."""
    found: Tensors = {}
    for name, tensor in Exporter(model).base_tensors():
        assert name not in found, name
        found[name] = tensor.detach().clone()
    return found


def saved(folder: Path) -> Tensors:
    """A folder's tensors."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def check_export(model: Model) -> None:
    """Names and bytes. Megatron keeps a router's bias in fp32, whatever the file has."""
    found, wanted = export(model), saved(model.config.model)
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu(), wanted[name]), name
        wide = torch.float32 if name.endswith("e_score_correction_bias") else None
        assert tensor.dtype in (wanted[name].dtype, wide), name


def tokens() -> list[torch.Tensor]:
    """Of each sequence, without the special ones."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]


def pack(config: TrainerConfig) -> MicroBatch:
    """This rank's part of all sequences in one pack, as a trainer lays it out."""
    total = sum(LENGTHS)
    mask = np.concatenate([np.r_[0, np.ones(n - 1)] for n in LENGTHS]).astype(np.float32)
    zeros = np.zeros(total, dtype=np.float32)
    values = {
        "tokens": torch.cat(tokens()).numpy().astype(np.int32),
        "sequence_lengths": np.array(LENGTHS, dtype=np.int32),
        "loss_mask": mask,
        "advantages": zeros,
        "sampler_logprobs": zeros,
    }
    packs = micro_batches(
        make_batch(values, max_length=128),
        budget=2 * total,
        multiple=config.parallel.tensor,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=config.parallel.context,
    )
    assert len(packs) == 1
    return packs[0].to(torch.device(config.device))


def log_probs(model: Model, micro: MicroBatch) -> torch.Tensor:
    """This rank's [L, V]."""
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )
    if model.config.parallel.context > 1:
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = micro.cu_seqlens
    head = model.head.output_layer
    is_adapted = "lm_head" in model.config.lora.targets
    if is_adapted:
        vars(head)["weight"] = model.adapters.of_head(head.weight)
    logits_1LV = model.head(
        input_ids=micro.tokens_L[None],
        position_ids=micro.positions_L[None],
        attention_mask=None,
        packed_seq_params=packed,
    )
    if is_adapted:
        del vars(head)["weight"]
    whole_LV = tensor_parallel.gather_from_tensor_model_parallel_region(logits_1LV)[0, :, :VOCAB]
    return whole_LV.float().log_softmax(-1)


def whole(log_probs_LV: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[T, V] from the context-parallel ranks' parts."""
    found = log_probs_LV.new_zeros(sum(LENGTHS), VOCAB).detach()
    real = micro.rows_L >= 0
    found[micro.rows_L[real]] = log_probs_LV[real].detach()
    dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
    return found.cpu()


def reference(
    folder: Path, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Any, list[torch.Tensor]]:
    """transformers' model, and its log-probs of each sequence by itself."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in settings.items():
        setattr(config, name, value)
    model_class = getattr(transformers, config.architectures[0])
    module = sys.modules[model_class.__module__]
    for kernel in FUSED:
        if hasattr(module, kernel):
            setattr(module, kernel, None)
    model = model_class.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="eager"
    ).eval()
    return model, [
        model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        for ids in tokens()
    ]


FUSED = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "FusedRMSNormGated")
"""What transformers takes from flash-linear-attention where a GPU is, also for tensors on a CPU."""

# ---------------------------------------------------------------- gradients


def gradients(model: Model, log_probs_LV: torch.Tensor, micro: MicroBatch) -> Tensors:
    """Of the tokens' mean loss, by parameter; data-parallel ranks see the same tokens."""
    here_M = slice(None) if micro.here_M is None else micro.here_M
    mine_M = log_probs_LV[micro.predictors_N[here_M], micro.targets_N[here_M].long()]
    (-mine_M.sum() / len(micro.rows_N)).backward()
    finalize_gradients(
        model.params,
        denominator=parallel_state.get_data_parallel_world_size(),
        sequence_parallel=model.provider.sequence_parallel,
    )
    by_param = {id(p.param): p.grad.clone() for p in model.params}
    return {n: by_param[id(p)] for n, p in model.head.named_parameters()}


def by_hf_name(model: Model, found: Tensors) -> Tensors:
    """Bridge exports gradients as if they were weights. Some mappings add a constant, so what it
    makes of zeros is taken off.
    """
    exports = []
    for zero in (False, True):
        for name, parameter in model.head.named_parameters():
            parameter.data = torch.zeros_like(parameter) if zero else found[name]
        exports.append(export(model))
    return {name: (exports[0][name] - exports[1][name]).cpu() for name in exports[0]}


def their_gradients(model: Any, log_probs: list[torch.Tensor]) -> Tensors:
    """By the names under which transformers saves."""
    picked = [
        one[:-1].gather(-1, ids[1:, None])[:, 0]
        for one, ids in zip(log_probs, tokens(), strict=True)
    ]
    (-torch.cat(picked).mean()).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    for buffer in model.buffers():
        buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return saved(Path(folder))


@torch.no_grad()
def visible(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers' log-probs with another value of each setting."""
    for name, value in settings.items():
        yield name, torch.cat(reference(folder, **{name: value})[1])


def main() -> None:
    """See the module's docstring."""
    out, family = Path(sys.argv[1]), sys.argv[3]
    folder = Path(sys.argv[2]) / family
    torch.set_num_threads(1)
    tensor, context, expert, expert_tensor = sizes = list(map(int, sys.argv[4:8]))
    config = TrainerConfig(
        model=folder,
        device="cuda" if "cuda" in sys.argv else "cpu",
        parallel=ParallelConfig(
            tensor=tensor,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence="no-sequence" not in sys.argv,
            world_size=max(sizes),
        ),
        finetuning_type="full",
        dtype="bfloat16" if "bfloat16" in sys.argv else "float32",
        recompute=next((flag for flag in ("selective", "full") if flag in sys.argv), "none"),
    )
    model = build(config)
    check_export(model)
    result = run(model)
    if dist.get_rank() == 0:
        other, theirs = reference(folder)
        result["theirs"] = torch.cat(theirs).detach()
        result["their_gradients"] = their_gradients(other, theirs)
        if "cuda" in sys.argv:
            other, rounded = reference(folder, dtype=torch.bfloat16)
            result["their_rounded"] = torch.cat(rounded).detach()
            result["their_rounded_gradients"] = their_gradients(other, rounded)
        elif dist.get_world_size() == 1:
            result["visible"] = dict(visible(folder, FAMILIES[family].visible))
        torch.save(result, out)
    topology.leave()


def run(model: Model) -> dict[str, Any]:
    """Log-probs and gradients; on one rank twice, because the bits must not change. A GPU adds in
    any order.
    """
    micro = pack(model.config)
    twice = dist.get_world_size() == 1 and model.config.device == "cpu"
    passes = [log_probs(model, micro) for _ in range(2 if twice else 1)]
    backward = []
    for log_probs_LV in passes:
        for trained in model.params:
            trained.drop_grad()
        backward.append(gradients(model, log_probs_LV, micro))
    for log_probs_LV, found in zip(passes, backward, strict=True):
        assert torch.equal(log_probs_LV, passes[0])
        assert all(torch.equal(found[n], backward[0][n]) for n in found)
    return {"ours": whole(passes[0], micro), "our_gradients": by_hf_name(model, backward[0])}


if __name__ == "__main__":
    main()
