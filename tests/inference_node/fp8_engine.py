"""An FP8 vLLM in this process, and publications of weights that the trainer's code quantised.

vLLM's CPU build has no kernel that rounds with a given scale. `lend_kernel` puts vLLM's own Python
reference in its place; everything else is the real vLLM.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from inference_node.server import all_workers
from inference_node.shared.reports import Findings, WorkerDigests
from inference_node.worker import chunk_plan, direct, placement, verify
from inference_node.worker import fp8 as held
from orchestrator.protocol import messages as m
from tests.inference_node.family_engine import CUDA, Engine, checkpoint, moved, write_like
from tests.inference_node.harness import new
from trainer_node.export import fp8_export
from trainer_node.hf import fp8_blocks
from trainer_node.tools.make_checkpoint import fp8_settings, is_projection
from weight_transfer.chunks import ChunkSender
from weight_transfer.digest import tensor_digest
from weight_transfer.layout import as_bytes, chunk_offsets, view_of

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 16,
}
"""Blocks of 128 x 128 end where tensors do. A router's rows are a multiple of 16, as real ones:
vLLM 0.26 quantises it too, and its CUTLASS kernel would pad it.
"""
VERSIONS = 20
"""Published before the live bytes are compared with a cold load's."""
OF_EXPERTS = ("moe_intermediate_size", "num_experts")


def lend_kernel() -> None:
    """Give vLLM's CPU build what its layers call: the rounding kernel, and a layout of experts.

    A CPU without AMX has no FP8 experts, so the layout is that of the Triton kernels; they do not
    run. For blocks it has no kernel either, so a layer keeps what was loaded and multiplies by the
    dequantised weight.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8 as static
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    def scaled_fp8_quant(
        weight: torch.Tensor,
        scale: torch.Tensor | None = None,
        use_per_token_if_dynamic: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scale is None:
            assert use_per_token_if_dynamic
            largest = weight_amax(weight, dim=-1, keepdim=True)
            scale = fp8._fp8_channel_scale(largest)
            return fp8._fp8_quant_per_channel(weight, scale), scale
        values = weight.float() * scale.float().reciprocal()
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale

    class Ops:
        def __getattr__(self, name: str) -> Any:
            return scaled_fp8_quant if name == "scaled_fp8_quant" else getattr(ops, name)

    class Blocks(linear.Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return A @ fp8_blocks.dequantised(B, Bs).t()

    fp8.ops = Ops()
    for module in (fp8, static):
        module.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, TritonExperts)
    linear._POSSIBLE_FP8_BLOCK_KERNELS[linear.PlatformEnum.CPU] = [Blocks]


BLOCKS = "blocks"
"""Instead of a `--quantization`: the checkpoint is block-scaled FP8."""


def in_blocks(folder: Path, tensors: Mapping[str, torch.Tensor], out: Path) -> Path:
    """The checkpoint of `folder` with these bf16 tensors, block-scaled as on this device."""
    scaled = [n for n in tensors if is_projection(n)]
    device = "cuda" if CUDA else "cpu"  # a GPU's scales differ from a CPU's in the last bit
    made = fp8_blocks.quantising(((n, t.to(device)) for n, t in tensors.items()), scaled)
    write_like(folder, {n: t.cpu() for n, t in made}, out)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = fp8_settings(tensors)
    (out / "config.json").write_text(json.dumps(config))
    return out


class Filled:
    """Stand-in for the merging export: bf16 tensors that are there already."""

    longest_s = float("inf")

    def __init__(self, tensors: Mapping[str, torch.Tensor], specs: Any, order: Any) -> None:
        self._tensors, self._specs, self._order = tensors, specs, order

    def fill(self, chunk: int, out_B: torch.Tensor) -> None:
        specs = [self._specs[i] for i in self._order[chunk]]
        for spec, at in zip(specs, chunk_offsets(specs), strict=True):
            out_B[at : at + spec.nbytes].copy_(as_bytes(self._tensors[spec.name]))


class Fp8Engine(Engine):
    """An engine with `quantization`."""

    def plan_fp8(self, changed: tuple[int, ...] | None = None) -> m.Fp8Weights:
        """Plan what is sent; returns what travels as FP8."""
        self.base = m.Manifest(tensors=self.manifest.tensors, changed=changed)
        found = self.call("splice_prepare_update", self.base.model_dump_json())
        all_workers.judge(self.base, [Findings(**found["findings"])])
        weights = all_workers.merged_groups([[m.Fp8Group.model_validate(g) for g in found["fp8"]]])
        assert weights is not None
        found = self.call("splice_use_fp8", weights.model_dump_json())
        self.sent, self.weights = m.fp8_manifest(self.base, weights), weights
        self.findings = Findings(**found["findings"])
        all_workers.judge(self.sent, [self.findings])
        stuck = sorted({i for indices in found["obstacles"].values() for i in indices})
        self.reloaded = self.call("splice_whole_layers", stuck)["indices"]
        all_workers.refuse_reload(self.sent, self.reloaded)
        return weights

    def lay_out_fp8(self, part: list[int] | None = None) -> None:
        self.part = part
        self.chunks = self.call("splice_lay_out", self.reloaded, part, True)["chunks"]

    def export(self, tensors: Mapping[str, torch.Tensor]) -> tuple[m.Manifest, Any]:
        """What is sent, or the part of it, and the trainer's export of these tensors."""
        order = [tuple(indices) for _, indices in self.chunks]
        planned = fp8_export.plan(self.base, self.sent, self.weights, order, self.part)
        specs = [self.base.tensors[i] for i in planned.part]
        sent = self.sent if self.part is None else self.sent.part(self.part)
        filled: Any = Filled(tensors, specs, planned.order)
        device = torch.device("cuda" if CUDA else "cpu")
        return sent, fp8_export.Fp8Export(
            filled, planned, specs=specs, sent=sent, order=order, device=device
        )

    def quantised(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is sent, by name."""
        sent, export = self.export(tensors)
        found: dict[str, torch.Tensor] = {}
        for k, (_, indices) in enumerate(self.chunks):
            buffer_B = torch.empty(export.chunk_nbytes(k), dtype=torch.uint8)
            export.fill(k, buffer_B)
            specs = [sent.tensors[i] for i in indices]
            for spec, at in zip(specs, chunk_offsets(specs), strict=True):
                found[spec.name] = view_of(buffer_B, spec, at)
        return found

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], flip: str | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Publish; returns (tensors with wrong digests, `unverified`).

        Args:
            flip: a tensor of which one bit changes on the wire.
        """
        sent, export = self.export(tensors)
        right = {n: int(tensor_digest(t)) for n, t in self.quantised(tensors).items()}

        def fill(chunk: int, out_B: torch.Tensor) -> None:
            export.fill(chunk, out_B)
            specs = [sent.tensors[i] for i in self.chunks[chunk][1]]
            for spec, at in zip(specs, chunk_offsets(specs), strict=True):
                if spec.name == flip:
                    out_B[at] ^= 1

        order = [tuple(indices) for _, indices in self.chunks]
        sender = ChunkSender(
            groups=self._groups, manifest=sent, chunks=order, fill=fill, device="cpu"
        )
        thread = threading.Thread(target=lambda: sender.send(deadline_s=30.0))
        thread.start()
        base = None if self.part is None else version - 1
        request = new(m.ReceiveWeights, version=version, base_version=base)
        answer = self.call("splice_receive_weights", request.model_dump_json())
        thread.join(30.0)
        sender.release()
        digests, unverified = self._combined(sent, answer)
        wrong = [
            s.name
            for s, d in zip(sent.tensors, digests, strict=True)
            if s.name not in unverified and d != right[s.name]
        ]
        return wrong, unverified

    def _combined(self, sent: m.Manifest, answer: Any) -> tuple[list[int], dict[str, str]]:
        arriving = [i for kind, indices in self.chunks if kind != "reload" for i in indices]
        return all_workers.combine(
            sent,
            [WorkerDigests.of(answer)],
            all_workers.Arrivals(sent, arriving, [self.findings.loaded]),
        )

    def live_bytes(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Every parameter of the FP8 layers: dtype, shape, bytes in memory order."""
        model = self._llm.llm_engine.model_executor.driver_worker.worker.get_model()
        return {
            f"{path}.{n}": (
                str(p.dtype),
                tuple(p.shape),
                p.data.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
            )
            for path, layer in model.named_modules()
            if held.kind_of(layer) is not None
            for n, p in layer._parameters.items()
            if p is not None
        }


class InProcess:
    """A model without an engine, planned and updated as a worker does it."""

    def __init__(self, model: torch.nn.Module, config: Any, manifest: m.Manifest) -> None:
        self._model, self._config = model, config
        with set_current_vllm_config(config), torch.no_grad():
            self.refused = held.refusals(model)
        recorded = held.as_bf16(placement.record(model, manifest), model)
        weights = all_workers.merged_groups([held.groups(recorded, manifest, model)])
        assert weights is not None
        self._sent = m.fp8_manifest(manifest, weights)
        self._plan = held.placed(recorded, self._sent, model)
        findings = placement.local_findings(self._plan, self._sent)
        all_workers.judge(self._sent, [findings])
        live = chunk_plan.live_parameters(model, self._plan)
        self._reload = placement.whole_layers(
            self._plan, self._sent, sorted(chunk_plan.obstacles(self._plan, self._sent, live))
        )
        all_workers.refuse_reload(self._sent, self._reload)
        places = m.fp8_places(manifest, weights)
        together = [tuple(p for i in g.tensors for p in places[i]) for g in weights.groups]
        chunks = chunk_plan.plan_chunks(self._sent, reload=self._reload, together=together)
        self._chunks, self._order = chunks, [c.tensors for c in chunks]
        self._base = fp8_export.plan(manifest, self._sent, weights, self._order, None)
        self._specs = manifest.tensors
        self._receiver = direct.DirectReceiver(
            chunks=chunks,
            manifest=self._sent,
            plan=self._plan,
            live=live,
            device=torch.device("cpu"),
        )
        quantised = [t for g in weights.groups for i in g.tensors for t in places[i]]
        self.quantised = sorted(self._sent.tensors[i].name for i in quantised)

    def _buffers(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        filled: Any = Filled(tensors, self._specs, self._base.order)
        export = fp8_export.Fp8Export(
            filled,
            self._base,
            specs=self._specs,
            sent=self._sent,
            order=self._order,
            device=torch.device("cpu"),
        )
        buffers = []
        for k in range(export.num_chunks):
            buffers.append(torch.empty(export.chunk_nbytes(k), dtype=torch.uint8))
            export.fill(k, buffers[-1])
        return buffers

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Place the tensors; those that vLLM must load itself stay."""
        with torch.no_grad():
            self._receiver.apply(
                self._buffers(tensors), load=lambda _: None, on_written=lambda _: None
            )

    def wrong(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """What travels as FP8 and is not live as it should be."""
        found = verify.read_back(self._model, self._plan, {})
        digests, unverified = all_workers.combine(self._sent, [found])
        assert unverified == {}
        right: dict[int, int] = {}
        for chunk, buffer_B in zip(self._order, self._buffers(tensors), strict=True):
            specs = [self._sent.tensors[i] for i in chunk]
            for i, spec, at in zip(chunk, specs, chunk_offsets(specs), strict=True):
                right[i] = int(tensor_digest(view_of(buffer_B, spec, at)))
        names = [spec.name for spec in self._sent.tensors]
        wrong = [n for i, n in enumerate(names) if digests[i] != right[i]]
        return sorted(set(wrong) & set(self.quantised))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of FP8 publications."""

    refused: str = ""
    fp8: int = 0
    tensors: int = 0
    wrong: list[str] = field(default_factory=list)
    unverified: dict[str, str] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    """Each parameter of the FP8 layers at the end, with a hash of its bytes."""
    flipped: dict[str, list[str]] = field(default_factory=dict)
    """Tensor with a flipped bit -> tensors with wrong digests."""
    partial_bytes: tuple[int, int] = (0, 0)
    """Bytes of a changed-only update, and of a whole one."""
    logprobs: list[list[float]] = field(default_factory=list)


def weights_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a bf16 checkpoint; returns its tensors."""
    is_moe = "moe" in name
    wide = {k: v for k, v in WIDE.items() if is_moe or k not in OF_EXPERTS}
    return checkpoint(name, folder, "bfloat16", **wide)


def run(name: str, folder: Path, quantization: str) -> Outcome:
    """Publish, flip bits, publish more versions, the last in part; then the live bytes."""
    if not CUDA:
        lend_kernel()
    base = weights_of(name, folder)
    served = (
        folder if quantization != BLOCKS else in_blocks(folder, base, folder.with_suffix(".f8"))
    )
    try:
        engine = Fp8Engine(name, served, base, dtype="bfloat16", **_options(quantization))
        names = [s.name for s in engine.manifest.tensors]
        changed = tuple(i for i, n in enumerate(names) if ".layers.1." in n and "_proj" in n)
        weights = engine.plan_fp8(changed)
    except AssertionError as error:
        return Outcome(refused=str(error))
    engine.join()
    engine.lay_out_fp8()
    first = engine.logprobs()[1].tolist()
    second, third = moved(base, 1), moved(base, 2)
    wrong, unverified = engine.send(1, second)
    flipped = {}
    scale = next(s.name for s in engine.sent.tensors if "weight_scale" in s.name)
    for flip in (scale.rpartition("_scale")[0], scale):
        flipped[flip] = engine.send(2, second, flip)[0]
    for version in range(3, VERSIONS):
        sent = second if version == VERSIONS - 1 else moved(base, version)
        again = engine.send(version, sent)
        wrong, unverified = wrong + again[0], unverified | again[1]
    served = engine.logprobs()[1].tolist()
    whole = engine.sent.nbytes
    assert engine.sent.changed is not None
    part = engine.call("splice_whole_layers", list(engine.sent.changed))["indices"]
    engine.lay_out_fp8(part)
    mixed = {n: third[n] if i in changed else second[n] for i, n in enumerate(names)}
    last = engine.send(VERSIONS, mixed)
    wrong, unverified = wrong + last[0], unverified | last[1]
    return Outcome(
        fp8=sum(len(g.tensors) for g in weights.groups),
        tensors=len(engine.sent.tensors),
        wrong=wrong,
        unverified=unverified,
        flipped=flipped,
        partial_bytes=(engine.sent.part(part).nbytes, whole),
        logprobs=[first, served, engine.logprobs()[1].tolist()],
        live=sorted(_digest_of(engine)),
    )


def _options(quantization: str) -> dict[str, str]:
    return {} if quantization == BLOCKS else {"quantization": quantization}


def _digest_of(engine: Fp8Engine) -> list[str]:
    import hashlib

    return [
        f"{n} {dtype} {shape} {hashlib.sha256(data).hexdigest()}"
        for n, (dtype, shape, data) in engine.live_bytes().items()
    ]


def cold(name: str, folder: Path, quantization: str) -> tuple[list[str], list[float]]:
    """The live bytes and log-probs of an engine that loads the last weights as its checkpoint."""
    if not CUDA:
        lend_kernel()
    base = weights_of(name, folder)
    second, third = moved(base, 1), moved(base, 2)
    mixed = {n: third[n] if ".layers.1." in n and "_proj" in n else second[n] for n in base}
    written = in_blocks if quantization == BLOCKS else write_like
    last = written(folder, mixed, folder.with_suffix(".cold"))
    engine = Fp8Engine(name, last, mixed, dtype="bfloat16", **_options(quantization))
    return sorted(_digest_of(engine)), engine.logprobs()[1].tolist()


if __name__ == "__main__":  # by hand: python -m tests.inference_node.fp8_engine KIND FAMILY ...
    for family in sys.argv[2:]:
        at = Path(tempfile.mkdtemp()) / family
        found = run(family, at, sys.argv[1])
        print(found.refused or (found.fp8, found.tensors, found.wrong, found.unverified))
        print("flipped:", found.flipped, "bytes:", found.partial_bytes)
        if not found.refused:
            digests, logprobs = cold(family, at.with_suffix(".again"), sys.argv[1])
            print("live bytes as loaded cold:", digests == found.live)
            print("log-probs as served cold:", logprobs == found.logprobs[-1])
