"""One rank of a check of one family: Bridge's own provider and layers against transformers.

    torchrun ... -m tests.trainer_node.family OUT FOLDER FAMILY TENSOR CONTEXT EXPERT \
        EXPERT_TENSOR [FLAG ...]

Rank 0 leaves OUT: the log-probs of every token over the vocabulary, ours of all sequences in one
pack ("ours") and transformers' of one sequence at a time ("theirs"); the gradients of the tokens'
mean loss by HF name ("our_gradients", "their_gradients"); and on one rank transformers' log-probs
with other settings ("visible"). Every rank exports what it loaded and compares names and bytes with
the checkpoint. On one rank a second pass must give the same bits. Data-parallel ranks see the same
pack. Flags: `bfloat16`, where transformers computes in fp32; `selective` and `full`, what is
recomputed.

Axes: T = tokens of all sequences, V = vocabulary.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import safe_open
from torch.nn import functional

from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from tests.trainer_node.data import make_batch
from tests.trainer_node.families import FAMILIES, LENGTHS, VOCAB
from trainer_node.adapters.merge import strip_wrappers
from trainer_node.model import providers, topology
from trainer_node.training.batch import MicroBatch, micro_batches

Tensors = dict[str, torch.Tensor]


class PaddedState(Mapping[str, torch.Tensor]):
    """Bridge's reader of a checkpoint, with the rows that Megatron adds to the vocabulary."""

    def __init__(self, state: Any, vocab_tensors: set[str], rows: int) -> None:
        self._state, self.vocab_tensors, self._rows = state, vocab_tensors, rows
        self.source = state.source

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._state[name]
        if name not in self.vocab_tensors:
            return tensor
        return functional.pad(tensor, (0, 0, 0, self._rows - VOCAB))

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What Bridge asks of a checkpoint."""

    config: Any
    model_name_or_path: str
    state: PaddedState


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A family's model on this rank."""

    config: TrainerConfig
    module: Any
    bridge: Any
    checkpoint: Checkpoint
    tasks: list[Any]


def build(config: TrainerConfig) -> Built:
    """As `trainer_node.model.build` does it."""
    folder = config.model
    topology.join(config)
    auto = AutoBridge.from_hf_pretrained(folder)
    provider = auto.to_megatron_provider(load_weights=False)
    bridge, reader = auto._model_bridge, auto.hf_pretrained
    providers.prepare(provider, bridge, config, reader.config)
    bridge._unwrap_name, bridge.hf_config = strip_wrappers, reader.config
    lookup = bridge.mapping_registry().megatron_to_hf_lookup
    mappings = map(lookup, ("embedding.word_embeddings.weight", "output_layer.weight"))
    vocab_tensors = {m.hf_param for m in mappings if m is not None}
    rows = calculate_padded_vocab_size(VOCAB, 128, config.parallel.tensor)
    checkpoint = Checkpoint(
        config=reader.config,
        model_name_or_path=str(folder),
        state=PaddedState(reader.state, vocab_tensors, rows),
    )
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    module = provider.provide(pre_process=True, post_process=True)
    providers.settle(module, provider)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)  # what the checkpoint does not fill shows
    bridge._with_progress_tracking = lambda tasks, *_, **__: iter(tasks)
    bridge.load_weights_hf_to_megatron(checkpoint, [module])
    tasks = bridge.build_conversion_tasks(checkpoint, [module])
    return Built(config=config, module=module, bridge=bridge, checkpoint=checkpoint, tasks=tasks)


def export(built: Built) -> Tensors:
    """The module's tensors under HF's names."""
    stream = built.bridge.stream_weights_megatron_to_hf(
        [built.module],
        built.checkpoint,
        cpu=False,
        show_progress=False,
        conversion_tasks=built.tasks,
        merge_adapter_weights=False,
    )
    found: Tensors = {}
    for name, tensor in stream:
        assert name not in found, name
        is_vocab = name in built.checkpoint.state.vocab_tensors
        found[name] = (tensor[:VOCAB] if is_vocab else tensor).detach().clone()
    return found


def saved(folder: Path) -> Tensors:
    """A folder's tensors."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def check_export(built: Built) -> None:
    """Names and bytes."""
    found, wanted = export(built), saved(built.config.model)
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.dtype is wanted[name].dtype, name


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
    return packs[0]


def log_probs(built: Built, micro: MicroBatch) -> torch.Tensor:
    """This rank's [L, V]."""
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )
    if built.config.parallel.context > 1:
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = micro.cu_seqlens
    logits_1LV = built.module(
        input_ids=micro.tokens_L[None],
        position_ids=micro.positions_L[None],
        attention_mask=None,
        packed_seq_params=packed,
    )
    whole_LV = tensor_parallel.gather_from_tensor_model_parallel_region(logits_1LV)[0, :, :VOCAB]
    return whole_LV.float().log_softmax(-1)


def whole(log_probs_LV: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[T, V] from the context-parallel ranks' parts."""
    found = torch.zeros(sum(LENGTHS), VOCAB)
    real = micro.rows_L >= 0
    found[micro.rows_L[real]] = log_probs_LV[real].detach()
    dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
    return found


def reference(folder: Path, **settings: Any) -> tuple[Any, list[torch.Tensor]]:
    """transformers' model in fp32, and its log-probs of each sequence alone."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in settings.items():
        setattr(config, name, value)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, [
        model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1) for ids in tokens()
    ]


# ---------------------------------------------------------------- gradients


def gradients(built: Built, log_probs_LV: torch.Tensor, micro: MicroBatch) -> Tensors:
    """Of the tokens' mean loss, by parameter."""
    here_M = slice(None) if micro.here_M is None else micro.here_M
    mine_M = log_probs_LV[micro.predictors_N[here_M], micro.targets_N[here_M].long()]
    (-mine_M.sum() / len(micro.rows_N)).backward()
    return {n: finished(n, p) for n, p in built.module.named_parameters()}


def by_hf_name(built: Built, found: Tensors) -> Tensors:
    """Bridge exports gradients as if they were weights. Some mappings add a constant, so what it
    makes of zeros is taken off.
    """
    exports = []
    for zero in (False, True):
        for name, parameter in built.module.named_parameters():
            parameter.data = torch.zeros_like(parameter) if zero else found[name]
        exports.append(export(built))
    return {name: exports[0][name] - exports[1][name] for name in exports[0]}


@torch.no_grad()
def finished(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, summed over the ranks that saw other tokens; data-parallel ranks see
    the same.
    """
    assert parameter.grad is not None, name
    gradient = parameter.grad.clone()
    same = parallel_state.get_data_parallel_world_size()
    if ".experts." in name:
        dist.all_reduce(gradient, group=parallel_state.get_expert_data_parallel_group())
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(gradient, group=group)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient / same


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
        parallel=ParallelConfig(
            tensor=tensor,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            world_size=max(sizes),
        ),
        finetuning_type="full",
        dtype="bfloat16" if "bfloat16" in sys.argv else "float32",
        recompute=next((flag for flag in ("selective", "full") if flag in sys.argv), "none"),
    )
    built = build(config)
    check_export(built)
    result = run(built)
    if dist.get_rank() == 0:
        model, theirs = reference(folder)
        result["theirs"] = torch.cat(theirs).detach()
        result["their_gradients"] = their_gradients(model, theirs)
        if dist.get_world_size() == 1:
            result["visible"] = dict(visible(folder, FAMILIES[family].visible))
        torch.save(result, out)
    topology.leave()


def run(built: Built) -> dict[str, Any]:
    """Log-probs and gradients; on one rank twice, because the bits must not change."""
    micro = pack(built.config)
    passes = [log_probs(built, micro) for _ in range(2 if dist.get_world_size() == 1 else 1)]
    backward = []
    for log_probs_LV in passes:
        built.module.zero_grad(set_to_none=True)
        backward.append(gradients(built, log_probs_LV, micro))
    for log_probs_LV, found in zip(passes, backward, strict=True):
        assert torch.equal(log_probs_LV, passes[0])
        assert all(torch.equal(found[n], backward[0][n]) for n in found)
    return {"ours": whole(passes[0], micro), "our_gradients": by_hf_name(built, backward[0])}


if __name__ == "__main__":
    main()
