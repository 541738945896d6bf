"""One rank of a check of one family's adapters: random ones on every linear, against transformers
and PEFT.

    ... -m tests.trainer_node.adapters.adapted OUT FOLDER FAMILY TARGETS SEQUENCE TENSOR CONTEXT \
        EXPERT EXPERT_TENSOR [cuda]

Rank 0 leaves OUT: log-probs with the adapters ("ours", "theirs"), without them ("base") and after
one step ("stepped"); the gradients of the tokens' mean loss by module and matrix ("our_gradients",
"their_gradients"); the names with adapters ("names"); and transformers' log-probs of both merged
exports ("merged", "wired"). SEQUENCE is 1 for sequence parallelism. `cuda`: on a GPU in bfloat16;
OUT also has PEFT's in bfloat16 ("their_rounded", "their_rounded_gradients").
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from peft import PeftModel
from safetensors.torch import save_file

from orchestrator.protocol.config import LoraConfig, ParallelConfig, TrainerConfig
from tests.trainer_node.model import family
from trainer_node.adapters import peft_io
from trainer_node.export.merged import Exporter
from trainer_node.export.wire_export import WireExport, supports
from trainer_node.model.model import Model
from trainer_node.model.whole_adapters import gather_stacks, read_on_all_ranks
from trainer_node.ranks import topology
from trainer_node.tools.reference import with_single_experts
from trainer_node.training import served_weights
from trainer_node.training.gradients import finalize_gradients
from trainer_node.training.packing import MicroBatch
from weight_transfer.layout import torch_dtype

LORA = LoraConfig(rank=4, alpha=8)
LR = 0.5


def fill(model: Model) -> None:
    """Random A and B, that depend only on the name."""
    for local in model.adapters.local_matrices():
        seed = sum(map(ord, local.module)) * 2 + (local.matrix == "B")
        generator = torch.Generator().manual_seed(seed)
        whole = torch.empty(local.whole_shape).normal_(0.0, 0.1, generator=generator)
        local.tensor.copy_(whole[local.place].to(local.tensor.device))


def by_key(stacks: list[peft_io.Stack]) -> dict[peft_io.Key, torch.Tensor]:
    """(module, "A" or "B") -> matrix, as in PEFT's file."""
    found = {}
    for stack in peft_io.in_file(stacks):
        flat = torch.cat([tensor.reshape(-1) for _, tensor in stack.pieces])
        for name, matrix in zip(stack.names, flat.view(-1, *stack.shape), strict=True):
            found[name, stack.matrix] = matrix.cpu().clone()
    return found


def gradients(model: Model, log_probs_LV: torch.Tensor, micro: MicroBatch) -> dict[Any, Any]:
    """Of the tokens' mean loss, whole on rank 0; they stay in the parameters."""
    here_M = slice(None) if micro.here_M is None else micro.here_M
    mine_M = log_probs_LV[micro.predictors_N[here_M], micro.targets_N[here_M].long()]
    (-mine_M.sum() / len(micro.rows_N)).backward()
    same = parallel_state.get_data_parallel_world_size()  # they see the same pack
    finalize_gradients(
        model.params, denominator=same, sequence_parallel=model.provider.sequence_parallel
    )
    kept = [p.param.data for p in model.params]
    for p in model.params:
        p.param.data = p.grad
    found = by_key(gather_stacks(model, group=None))
    for p, data in zip(model.params, kept, strict=True):
        p.param.data = data
    return found


# ---------------------------------------------------------------- PEFT


def theirs(
    folder: Path, adapter: Path, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, dict[Any, Any]]:
    """Log-probs of transformers with the adapter in PEFT, and the gradients. PEFT fuses the
    adapters of stacked experts, so these models have one module for each expert. PEFT then saves
    the adapter over ours."""
    model, _ = family.reference(folder, dtype=dtype)
    is_native = "block_sparse_moe" in (adapter / peft_io.WEIGHTS).read_bytes()[:2000].decode(
        errors="replace"
    )
    is_single = {"gate_proj", "down_proj"} & set(peft_io.read_config(adapter)["target_modules"])
    if not is_native and is_single:
        model = with_single_experts(model)
    tuned = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    tuned.eval()
    ids = family.tokens()
    found = [
        tuned(input_ids=i[None], use_cache=False).logits[0].float().log_softmax(-1) for i in ids
    ]
    picked = [o[:-1].gather(-1, i[1:, None])[:, 0] for o, i in zip(found, ids, strict=True)]
    (-torch.cat(picked).mean()).backward()
    grads = {}
    for name, parameter in tuned.named_parameters():
        if ".lora_" in name:
            grad = parameter.grad
            grads[name.removeprefix("base_model.model.")] = (
                torch.zeros_like(parameter) if grad is None else grad
            )
    tuned.save_pretrained(adapter)
    by_module = {}
    for name, grad in grads.items():
        module, _, rest = name.rpartition(".lora_")
        by_module[module, rest[0]] = grad
    return torch.cat(found).detach(), {} if is_native else by_module


def check_reload(model: Model, adapter: Path) -> None:
    """What we or PEFT wrote is read, bit by bit."""
    whole = read_on_all_ranks(model, adapter)
    for local in model.adapters.local_matrices():
        read = whole.pop((local.module, local.matrix))[local.place]
        assert torch.equal(local.tensor.cpu(), read)
    assert not whole


def from_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' log-probs of the family with these tensors."""
    with tempfile.TemporaryDirectory() as temp:
        shutil.copy(folder / "config.json", temp)
        tensors = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
        save_file(tensors, Path(temp) / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            return torch.cat(family.reference(Path(temp))[1])


def wired(model: Model, exporter: Exporter) -> dict[str, torch.Tensor]:
    """What goes over the wire, by name, on rank 0; a collective."""
    assert (reason := supports(model)) is None, reason
    manifest = exporter.manifest()
    export = WireExport(model, manifest, [[i] for i in range(len(manifest.tensors))])
    export.start(limit=time.monotonic() + 60.0)
    if dist.get_rank():
        export.contribute()
        return {}
    found = {}
    for k, spec in enumerate(manifest.tensors):
        out_B = torch.empty(export.chunk_nbytes(k), dtype=torch.uint8, device=model.config.device)
        export.fill(k, out_B)
        found[spec.name] = out_B.view(torch_dtype(spec.dtype)).view(spec.shape)
    export.drain()
    return found


def as_served(model: Model, micro: MicroBatch) -> tuple[torch.Tensor, dict[Any, Any]]:
    """Log-probs and gradients with the merged weights."""
    served = served_weights.of(model)
    with served.all():
        served_LV = family.log_probs(model, micro)
        found = gradients(model, served_LV, micro)
    for p in model.params:
        p.drop_grad()
    with torch.no_grad(), served.one_by_one():
        assert torch.equal(family.log_probs(model, micro), served_LV)
    return served_LV.detach(), found


def check_served_bits(model: Model, exporter: Exporter, merged: dict[str, torch.Tensor]) -> None:
    """The weights of `served_weights`, exported without adapters, are the publication's bits."""
    adapters = list(model.adapters.by_module.values())
    Bs = [p for adapter in adapters for p in adapter.lora_B.values()]
    kept = [p.detach().clone() for p in Bs]
    with served_weights.of(model).all(), torch.no_grad():
        point_at_stacks(model)
        for p in Bs:
            p.zero_()
        for name, tensor in exporter.merged_tensors():
            # Only rank 0 has whole adapters.
            assert dist.get_rank() or torch.equal(tensor, merged[name]), name
        for p, whole in zip(Bs, kept, strict=True):
            p.copy_(whole)
    point_at_stacks(model)


def point_at_stacks(model: Model) -> None:
    """Let experts' parameters, which an export reads, be views of the present stacks."""
    for experts in model.experts:
        for linear, stack in (("linear_fc1", "fc1_E2FH"), ("linear_fc2", "fc2_EHF")):
            for e, weight in enumerate(getattr(experts, stack)):
                getattr(getattr(experts.layer.experts, linear), f"weight{e}").data = weight


def main() -> None:
    """See the module's docstring."""
    out, name, targets = Path(sys.argv[1]), sys.argv[3], tuple(sys.argv[4].split(","))
    folder = Path(sys.argv[2]) / name
    torch.set_num_threads(1)
    sequence, *sizes = list(map(int, sys.argv[5:10]))
    cuda = "cuda" in sys.argv
    tensor, context, expert, expert_tensor = sizes
    config = TrainerConfig(
        model=folder,
        parallel=ParallelConfig(
            tensor=tensor,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence=bool(sequence),
            world_size=max(sizes),
        ),
        lora=LORA.model_copy(update={"targets": targets}),
        device="cuda" if cuda else "cpu",
        dtype="bfloat16" if cuda else "float32",
    )
    model = family.build(config)
    fill(model)
    result = run(model, folder)
    if dist.get_rank() == 0:
        torch.save(result, out)
    topology.leave()


def moe_layers(model: Model) -> list[Any]:
    return [m for m in model.modules[0].modules() if isinstance(m, MoELayer)]


def run(model: Model, folder: Path) -> dict[str, Any]:
    """Everything of a rank."""
    micro = family.pack(model.config)
    stacks, lora = gather_stacks(model, group=None), model.config.lora
    written = tempfile.TemporaryDirectory()
    adapter = Path(written.name)
    if stacks:
        peft_io.write_stacks(adapter, stacks, lora=lora, model=folder)
    served_LV, served_gradients = as_served(model, micro)
    log_probs_LV = family.log_probs(model, micro)
    with torch.no_grad(), model.adapters.switched("base"):
        base_LV = family.log_probs(model, micro)
    result: dict[str, Any] = {
        "ours": family.whole(log_probs_LV, micro),
        "base": family.whole(base_LV, micro),
        "served": family.whole(served_LV, micro),
        "served_gradients": served_gradients,
        "our_gradients": gradients(model, log_probs_LV, micro),
        "names": sorted({name for name, _ in by_key(stacks)}),
        "fallbacks": model.fallbacks,
        "moe_layers": len(moe_layers(model)),
        "stacked": sum("forward" in vars(m) for m in moe_layers(model)),
    }
    if dist.get_world_size() == 1:
        check_reload(model, adapter)
    exporter = Exporter(model)
    merged = {n: t.clone() for n, t in exporter.merged_tensors()}
    check_served_bits(model, exporter, merged)
    sent = wired(model, exporter)
    if dist.get_rank() == 0:
        result["merged"], result["wired"] = (from_tensors(folder, t) for t in (merged, sent))
    with torch.no_grad():
        for p in model.params:
            p.param -= LR * p.grad
        result["stepped"] = family.whole(family.log_probs(model, micro), micro)
    if dist.get_rank() == 0:
        result["adapter_config"] = peft_io.read_config(adapter)
        if model.config.device == "cuda":
            copied = shutil.copytree(adapter, adapter / "copied")
            result["their_rounded"], result["their_rounded_gradients"] = theirs(
                folder, copied, dtype=torch.bfloat16
            )
        result["theirs"], result["their_gradients"] = theirs(folder, adapter)
        if dist.get_world_size() == 1 and result["their_gradients"]:
            fill(model)  # the step is undone
            check_reload(model, adapter)
        written.cleanup()
    return result


if __name__ == "__main__":
    main()
