"""One rank of a check that several ranks send what one would: bytes of `WireExport` against
`Exporter`, and failures in the middle.

    torchrun ... -m tests.trainer_node.export.gather MODEL TENSOR PIPELINE EXPERT [DTYPE] [cuda]
    [no-sequence] [FLAG ...]

LoRA with random adapters, then full parameters.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import SpliceError, TransferTimeout
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import (
    Fp8Group,
    Fp8Weights,
    Manifest,
    TensorSpec,
    fp8_manifest,
    fp8_scale,
)
from tests.trainer_node.export.wire_orders import shuffled_order, vllm_order
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.export import fp8_steps, wire_export
from trainer_node.export.gather_plan import PartitionError
from trainer_node.export.merged import Exporter
from trainer_node.export.wire_export import WireExport, supports
from trainer_node.model.model import Model
from trainer_node.ranks import objects
from trainer_node.ranks.lockstep import Lockstep, OutOfStep, has_diverged
from trainer_node.request import NotReady
from trainer_node.training.trainer import Trainer
from weight_transfer import edges, fp8
from weight_transfer.boxes import Box, matrix
from weight_transfer.digest import tensor_digest
from weight_transfer.layout import as_bytes

LIMIT_S = 60.0
BROKEN = 0xA5
"""What a chunk's buffer holds before it is filled."""


def device() -> str:
    return "cuda" if "cuda" in sys.argv else "cpu"


def is_root() -> bool:
    return dist.get_rank() == 0


def collect(export: WireExport, *, stop_at: int | None = None) -> list[torch.Tensor]:
    """Every chunk on rank 0 (nothing elsewhere), as in one send; rank 0 gives up at `stop_at`."""
    chunks: list[torch.Tensor] = []
    export.start(limit=time.monotonic() + LIMIT_S)
    if not is_root():
        export.contribute()
        return chunks
    for k in range(export.num_chunks if stop_at is None else stop_at):
        whole_B = torch.full(
            (export.chunk_nbytes(k) + 128,), BROKEN, dtype=torch.uint8, device=device()
        )
        export.fill(k, whole_B[64:-64])
        assert bool((whole_B[:64] == BROKEN).all() and (whole_B[-64:] == BROKEN).all()), (
            "written beyond the chunk"
        )
        chunks.append(whole_B[64:-64])
    export.drain()
    return chunks


def check_bytes(
    exporter: Exporter,
    export: WireExport,
    manifest: Manifest,
    order: Sequence[Sequence[int]],
    part=None,
) -> None:
    """Every chunk, tensor by tensor, to the bit."""
    expected = {n: t.clone().contiguous() for n, t in exporter.merged_tensors(part)}
    chunks = collect(export)
    for indices, chunk_B in zip(order, chunks, strict=True) if is_root() else ():
        specs = [manifest.tensors[i] for i in indices]
        for spec, got_B in zip(specs, chunk_B.split([s.nbytes for s in specs]), strict=True):
            wanted = expected[spec.name].reshape(-1).to(got_B.device)
            assert torch.equal(got_B, wanted.view(torch.uint8)), spec.name


def check(trainer: Trainer) -> None:
    """Whole and part, in several orders, after the parameters have moved, and after their memory
    was given away.
    """
    assert supports(trainer.model) is None
    exporter = Exporter(trainer.model)
    manifest = exporter.manifest()
    names = [s.name for s in manifest.tensors]
    orders = [vllm_order(names), shuffled_order(len(names), 5, seed=2), [list(range(len(names)))]]
    exports = [WireExport(trainer.model, manifest, order) for order in orders]
    if not trainer.model.trains_all:
        random_adapters(trainer)  # after the plan: adapters are read where they are
    for order, export in zip(orders, exports, strict=True):
        check_bytes(exporter, export, manifest, order)
    for p in trainer.model.modules[0].parameters():
        p.data = p.data.clone() + 0.25
    check_bytes(exporter, exports[0], manifest, orders[0])
    exports[0].release()
    trainer.offload()
    trainer.reload()
    check_bytes(exporter, exports[0], manifest, orders[0])
    if manifest.changed is not None:
        part = manifest.part(manifest.changed)
        order = shuffled_order(len(part.tensors), 3, seed=4)
        check_bytes(exporter, WireExport(trainer.model, part, order), part, order, manifest.changed)
    check_failures(exporter, exports[1], manifest, orders[1])
    check_edges(trainer.model, exporter, manifest, orders[0])


def random_keeps(manifest: Manifest, *, workers: int) -> list[dict[int, list[Box]]]:
    """What each worker keeps: rows or columns of some tensors, all of others."""
    draw = random.Random(7)
    keeps: list[dict[int, list[Box]]] = [{} for _ in range(workers)]
    for n, spec in enumerate(manifest.tensors):
        height, width = matrix(spec.shape)
        how = draw.choice(["rows", "columns", "copies", "one"])
        for w in range(workers):
            box = Box(0, height, 0, width)
            if how == "rows" and height >= workers:
                first, end = height * w // workers, height * (w + 1) // workers
                box = Box(first, end - first, 0, width)
            elif how == "columns" and width >= workers:
                first, end = width * w // workers, width * (w + 1) // workers
                box = Box(0, height, first, end - first)
            elif how == "one" and w != n % workers:
                continue
            keeps[w][n] = [box]
    return keeps


def check_edges(
    model: Model, exporter: Exporter, manifest: Manifest, order: Sequence[Sequence[int]]
) -> None:
    """Every rank merges its own pieces of each step. Together they are what each worker keeps, to
    the bit, and the ranks' digests add up to those of whole tensors."""
    specs, keeps = manifest.tensors, random_keeps(manifest, workers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "PIECE_BYTES", 900)
        patch.setattr(edges, "STEP_BYTES", 20_000)
        export = WireExport(model, manifest, order, keeps=keeps)
    sizes = [matrix(spec.shape) for spec in specs]
    whole = {n: [Box(0, height, 0, width)] for n, (height, width) in enumerate(sizes)}
    with pytest.raises(PartitionError, match="one broadcast is faster"):
        WireExport(model, manifest, order, keeps=[whole] * (2 * dist.get_world_size()))
    expected = {n: t.clone().contiguous().cpu() for n, t in exporter.merged_tensors()}
    check_steps(model, export, specs, keeps, expected)
    if model.config.dtype == "bfloat16":
        for kind in ("per_tensor", "per_channel", "per_block"):
            check_fp8_steps(model, manifest, expected, kind)


def check_fp8_steps(
    model: Model, manifest: Manifest, merged: dict[str, torch.Tensor], kind: Any
) -> None:
    """The same of weights that travel as FP8, whose scales are made of pieces of several ranks."""
    specs = manifest.tensors
    matrices = [i for i, s in enumerate(specs) if len(s.shape) == 2 and s.dtype == "bfloat16"]
    assert len(matrices) > 12
    groups = [tuple(matrices[n : n + 3]) for n in range(0, len(matrices) - 3, 4)]  # some stay bf16
    weights = Fp8Weights(groups=tuple(Fp8Group(kind=kind, tensors=group) for group in groups))
    sent = fp8_manifest(manifest, weights)
    keeps = random_keeps(sent, workers=3)
    order = shuffled_order(len(sent.tensors), 4, seed=6)
    own, made, scales = fp8_steps.plan(manifest, sent, weights, order, None)
    assert own == tuple(range(len(manifest.tensors)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "PIECE_BYTES", 900)
        patch.setattr(edges, "STEP_BYTES", 20_000)
        export = WireExport(model, manifest, [list(own)], keeps=keeps, sent=made)
    quantised = fp8_steps.Fp8Steps(
        export,
        made,
        scales,
        group=model.gather_group,
        rounding=lambda: model.rounding,
        device=model.device,
    )
    expected = dict(merged)
    for group in groups if is_root() else ():
        names = [manifest.tensors[i].name for i in group]
        # There, because CUDA divides by a number as by its reciprocal, with other last bits.
        values = [merged[name].to(device()) for name in names]
        if kind == "per_tensor":
            flat, scale = fp8.per_tensor(torch.cat([v.flatten() for v in values])[None])
            each = [(part, scale) for part in flat[0].split([v.numel() for v in values])]
        elif kind == "per_channel":
            each = [fp8.per_channel(value) for value in values]
        else:
            each = [fp8.per_block_by_torch(value[None]) for value in values]
        for name, (weight, scale) in zip(names, each, strict=True):
            expected[name] = weight.contiguous().cpu()
            expected[fp8_scale(name, kind)] = scale.cpu()
    check_no_send(quantised, Lockstep(model.control_group))
    check_steps(model, quantised, sent.tensors, keeps, expected)
    for p in model.modules[0].parameters():
        p.data.mul_(2.0)
    quantised.forget_prepared()
    export.start(limit=time.monotonic() + LIMIT_S)
    quantised.prepare()
    before = quantised._scales_S.clone()
    quantised.start(limit=time.monotonic() + LIMIT_S)
    quantised.exchange()
    assert not torch.equal(quantised._scales_S, before), "scales of old weights"
    for p in model.modules[0].parameters():
        p.data.mul_(0.5)


def check_no_send(export: fp8_steps.Fp8Steps, lockstep: Lockstep) -> None:
    """Rank 0 is not ready: the other ranks, which have started, wait for nobody."""

    def start() -> None:
        with lockstep.agree():
            if is_root():
                raise NotReady("aborted before the send")
            export.start(limit=time.monotonic() + LIMIT_S)

    began = time.monotonic()
    with pytest.raises(SpliceError):
        start()
    assert time.monotonic() - began < LIMIT_S / 2


def check_steps(
    model: Model,
    export: WireExport | fp8_steps.Fp8Steps,
    specs: Sequence[TensorSpec],
    keeps: Sequence[edges.Keeps],
    expected: dict[str, torch.Tensor],
) -> None:
    """One send, from all ranks to all workers."""
    assert export.steps is not None
    assert len(export.steps) > 2
    export.start(limit=time.monotonic() + LIMIT_S)
    if isinstance(export, fp8_steps.Fp8Steps):
        export.exchange()
    filled = []
    for k, step in enumerate(export.steps):
        whole_B = torch.full((step.nbytes + 128,), BROKEN, dtype=torch.uint8, device=device())
        export.fill(k, whole_B[64:-64])
        assert bool((whole_B[:64] == BROKEN).all() and (whole_B[-64:] == BROKEN).all())
        filled.append(whole_B[64:-64])
    digests_N = torch.zeros(len(specs), dtype=torch.int64, device=device())
    edges.digest_of_pieces(filled, export.steps, specs).launch(digests_N)
    digests_N = digests_N.cpu()
    dist.all_reduce(digests_N, group=model.control_group)
    if is_root():  # only there `merged_tensors` has the merged ones
        assert digests_N.tolist() == [int(tensor_digest(expected[s.name])) for s in specs]
    everyones = objects.all_gather(
        [
            [(list(d.peers), bytes(step_B[d.begin : d.end].cpu().numpy())) for d in step.deliveries]
            for step, step_B in zip(export.steps, filled, strict=True)
        ],
        group=model.control_group,
    )
    for worker, kept in enumerate(keeps) if is_root() else ():
        received = edges.steps_of_worker(export.tables[worker], specs)
        edges.check_coverage(received, kept, lambda i: specs[i].name)
        for k, step in enumerate(received):
            coming = [
                content for rank in everyones for peers, content in rank[k] if worker in peers
            ]
            buffer_B = torch.zeros(step.nbytes, dtype=torch.uint8)
            for delivery, content in zip(step.deliveries, coming, strict=True):
                buffer_B[delivery.begin : delivery.end] = torch.frombuffer(
                    bytearray(content), dtype=torch.uint8
                )
            for placed in step.placed:
                spec, box = specs[placed.piece.index], placed.piece.box
                wanted = expected[spec.name].view(matrix(spec.shape))
                wanted = wanted.narrow(0, box.first_row, box.rows)
                wanted = wanted.narrow(1, box.first_column, box.columns)
                got = edges.view_of_piece(buffer_B, placed, spec)
                assert torch.equal(as_bytes(got), as_bytes(wanted)), (spec.name, box)


def check_failures(
    exporter: Exporter, export: WireExport, manifest: Manifest, order: Sequence[Sequence[int]]
) -> None:
    """Rank 0 gives up in the middle, and before the first chunk; another rank's merge fails: the
    next send is right every time.
    """
    for stop_at in (2, 0):
        collect(export, stop_at=stop_at)
        check_bytes(exporter, export, manifest, order)
    last = dist.get_rank() == dist.get_world_size() - 1
    sends = any(sizes[dist.get_rank()] for sizes in export._exchange._sizes)
    fill = export._own.fill

    def fails(k: int, out_B: torch.Tensor) -> None:
        if last and k >= 2:
            raise MemoryError("no memory for a test")
        fill(k, out_B)

    export._own.fill = fails
    if last and sends:
        with pytest.raises(MemoryError, match="for a test"):
            collect(export)
    else:
        collect(export)
    export._own.fill = fill
    check_bytes(exporter, export, manifest, order)


def check_agreement(lockstep: Lockstep) -> None:
    """An act that fails on some rank ends alike on all, and they continue; out of step they do
    not."""

    def outcome(failing: int, error: Exception) -> str:
        try:
            with lockstep.agree():
                if dist.get_rank() == failing:
                    raise error
            return "done"
        except SpliceError as caught:
            failures = lockstep.compare(caught)
            diverged = has_diverged(failures, world_size=dist.get_world_size())
            assert diverged == isinstance(error, OutOfStep), failures
            return type(caught).__name__

    assert outcome(-1, ValueError()) == "done"
    assert outcome(0, NotReady("no group")) == ("NotReady" if is_root() else "SendFailed")
    assert (
        outcome(0, MemoryError())
        == outcome(1, TransferTimeout("late"))
        == outcome(1, MemoryError())
        == "SendFailed"
    )
    assert outcome(1, OutOfStep("gone")) == outcome(0, OutOfStep("gone")) == "OutOfStep"


def check_silence(trainer: Trainer) -> None:
    """A rank that sends nothing is waited for up to the limit, and the group is of no use after
    that. The last check: it breaks the group.
    """
    manifest = Exporter(trainer.model).manifest()
    export = WireExport(trainer.model, manifest, [list(range(len(manifest.tensors)))])
    began = time.monotonic()
    export.start(limit=began + 1.0)
    if is_root() and export._exchange.moves:
        with pytest.raises(OutOfStep, match="did not arrive"):
            export.fill(0, torch.empty(export.chunk_nbytes(0), dtype=torch.uint8))
        with pytest.raises(OutOfStep):
            export.drain()
        assert 0.5 < time.monotonic() - began < 30.0
    dist.barrier(trainer.model.control_group)


def zero_centred(task, *, on: bool) -> None:
    """Bridge adds 1 to the exported tensor, or no longer."""
    from megatron.bridge.models.conversion import param_mapping as bridge

    kind = bridge.RMSNorm2ZeroCenteredRMSNormMapping if on else bridge.AutoMapping
    task.mapping.__class__ = kind


def check_streamed(trainer: Trainer) -> None:
    """Tensors that are not views of parameters: on every send as Bridge converts them then."""
    tasks = [
        t
        for t in trainer.model.conversion_tasks
        if t.global_param_name.endswith(("input_layernorm.weight", "layer_norm_weight"))
    ]
    assert len(tasks) >= 2, "one of each layer"
    for task in tasks:
        zero_centred(task, on=True)
    assert supports(trainer.model) is None
    exporter = Exporter(trainer.model)
    manifest = exporter.manifest()
    order = shuffled_order(len(manifest.tensors), 5, seed=2)
    export = WireExport(trainer.model, manifest, order)
    assert len(export._streamed.buffers) == len(tasks)
    for _ in range(2):
        check_bytes(exporter, export, manifest, order)
        for p in trainer.model.modules[0].parameters():
            p.data = p.data.clone() + 0.25
    for task in tasks:
        zero_centred(task, on=False)


def check_hooks(trainer: Trainer) -> None:
    """What a bridge does after its mappings: another name for a tensor, a tensor of the
    checkpoint's, one left out, one changed.
    """
    bridge = trainer.model.bridge

    def hook(task, converted, state):
        del task, state
        for name, tensor in list(converted.items()):
            if name == "model.embed_tokens.weight":
                converted["model.layers.2.embed_tokens.weight"] = tensor.clone()
            elif name.endswith(".input_layernorm.weight"):
                converted[name.replace("input_layernorm.weight", "inv_freq")] = torch.arange(5.0)
            elif name.endswith(".post_attention_layernorm.weight"):
                converted[name] = tensor * 2
            elif name.endswith(".k_norm.weight"):
                del converted[name]
        return converted

    bridge.maybe_modify_converted_hf_weight = hook
    assert supports(trainer.model) is None
    exporter = Exporter(trainer.model)
    manifest = exporter.manifest()
    names = {spec.name for spec in manifest.tensors}
    assert {"model.layers.2.embed_tokens.weight", "model.layers.1.inv_freq"} <= names
    assert "model.layers.0.self_attn.k_norm.weight" not in names
    order = shuffled_order(len(manifest.tensors), 3, seed=5)
    export = WireExport(trainer.model, manifest, order)
    assert set(export._streamed.buffers) == {n for n in names if "post_attention" in n}
    check_bytes(exporter, export, manifest, order)
    del bridge.maybe_modify_converted_hf_weight


def check_reasons(trainer: Trainer) -> None:
    """What one rank cannot export, all of them refuse."""
    here = [t for t in trainer.model.conversion_tasks if t.param_weight is not None]
    task = next(t for t in here if t.global_param_name.endswith("linear_proj.weight"))
    limit = wire_export.STREAMED_BYTES
    if not is_root():
        zero_centred(task, on=True)
        wire_export.STREAMED_BYTES = 0 if trainer.model.trains_all else limit
    reason = supports(trainer.model) or ""
    assert reason.startswith("rank 1: ") and "o_proj.weight" in reason, reason
    assert ("too much" in reason) == trainer.model.trains_all, reason
    zero_centred(task, on=False)
    wire_export.STREAMED_BYTES = limit
    assert supports(trainer.model) is None


def main() -> None:
    from megatron.core import parallel_state

    model, sizes, sequence = (
        Path(sys.argv[1]),
        list(map(int, sys.argv[2:5])),
        "no-sequence" not in sys.argv,
    )
    dtype = "bfloat16" if "bfloat16" in sys.argv else "float32"
    options = {
        "sequence": sequence,
        "dtype": dtype,
        "device": device(),
        "lora": LoraConfig(rank=4, alpha=6),
    }
    for finetuning_type in ("lora", "full"):
        trainer = make_trainer(model, *sizes, finetuning_type=finetuning_type, **options)
        check(trainer)
        check_streamed(trainer)
        check_hooks(trainer)
        check_reasons(trainer)
        check_agreement(Lockstep(trainer.model.control_group))
        # A silent peer leaves a kernel of NCCL behind, which only the trainer's end frees.
        if trainer.model.trains_all and device() == "cpu":
            check_silence(trainer)
        parallel_state.destroy_model_parallel()  # the default process group stays for the next one
    trainer.model.close()


if __name__ == "__main__":
    main()
