"""FP8 on a real vLLM: publications of weights that the trainer's code quantised, and refusals.

The live bytes must be those of an engine that loads the same bf16 weights cold, weights and scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_node.node.node import refuse_unverified
from inference_node.server import all_workers
from inference_node.worker import fp8 as held
from inference_node.worker import placement
from inference_node.worker.plan import WorkerPlan
from orchestrator.errors import ConfigError, ManifestError
from orchestrator.protocol.messages import Fp8Group, fp8_manifest
from tests.inference_node import fp8_engine, tiny, vllm_models
from tests.inference_node.conftest import ENGINE_S, Run
from tests.inference_node.fp8_engine import Outcome
from weight_transfer import fp8

BLOCKS = fp8_engine.BLOCKS
CASES = [("fp8_per_channel", "qwen3"), ("fp8_per_tensor", "llama"), (BLOCKS, "qwen3")]
ON_GPUS = [
    *(("fp8", name) for name in ("qwen3", "qwen3_moe", "llama")),
    ("fp8_per_channel", "qwen3"),
    ("fp8_per_block", "qwen3"),
    ("fp8_per_block", "qwen3_moe"),
    (BLOCKS, "qwen3"),
    (BLOCKS, "qwen3_moe"),
]
NEAR = 0.25
"""Nats between the same weights twice on a GPU, which adds in any order and rounds to e4m3."""


def check(forked: Run, kind: str, name: str) -> None:
    found: Outcome = forked(fp8_engine.run, name, kind)
    assert found.refused == ""
    assert (found.wrong, found.unverified) == ([], {}) and found.fp8 > 0
    assert all(flip in wrong for flip, wrong in found.flipped.items()) and len(found.flipped) == 2
    part, whole = found.partial_bytes
    assert part < whole
    live, logprobs = forked(fp8_engine.cold, name, kind)
    assert live == found.live
    first, second, last = found.logprobs
    assert first != second != last
    prompt = zip(logprobs[:39], last[:39], strict=True)
    assert max(abs(a - b) for a, b in prompt) <= (NEAR if fp8_engine.CUDA else 0.0)


@pytest.mark.timeout(2 * ENGINE_S + 60.0)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_live_bytes_are_those_of_a_cold_load(forked: Run, kind: str, name: str) -> None:
    check(forked, kind, name)


@pytest.mark.gpu1
@pytest.mark.timeout(2 * ENGINE_S + 60.0)
@pytest.mark.parametrize(("kind", "name"), ON_GPUS)
def test_live_bytes_on_a_gpu(forked: Run, kind: str, name: str) -> None:
    check(forked, kind, name)


# ---------------------------------------------------------------- the quantiser


def weights(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Values of many magnitudes, one of them zero, and ties of the rounding."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    values *= torch.exp(3 * torch.randn(shape[0], 1, generator=generator)) * 0.02
    values[0, 0] = 0.0
    values[1, :16] = torch.arange(16) * 2.0**-9
    return values.bfloat16().to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [(256, 384), (200, 130)])
def test_every_byte_is_that_of_vllm_s_reference(shape: tuple[int, int]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.online import fp8 as theirs
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = weights(*shape)
    ours, scales = fp8.per_block(weight[None])
    want, want_scales = per_block_cast_to_fp8(weight, [128, 128])
    assert same(ours[0], want) and same(scales[0], want_scales)

    ours, scales = fp8.per_channel(weight)
    want_scales = theirs._fp8_channel_scale(weight_amax(weight, dim=-1, keepdim=True))
    assert same(scales, want_scales)
    assert same(ours, theirs._fp8_quant_per_channel(weight, want_scales))

    ours, scales = fp8.per_tensor(weight.reshape(1, -1))
    want_scales = theirs._fp8_scale(weight_amax(weight).reshape(1))
    with set_current_vllm_config(VllmConfig()):
        reference = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
    want, _ = reference.forward_native(weight, want_scales)
    assert same(scales, want_scales) and same(ours.view(shape), want)


@pytest.mark.gpu1
@pytest.mark.parametrize("shape", [(256, 384), (4096, 14336), (200, 130)])
def test_every_byte_is_that_of_vllm_s_kernels(shape: tuple[int, int]) -> None:
    from vllm import _custom_ops as ops

    weight = weights(*shape, device="cuda")
    ours, scales = fp8.per_tensor(weight.reshape(1, -1))
    want, want_scales = ops.scaled_fp8_quant(weight, scale=None)
    assert same(scales, want_scales.flatten()) and same(ours.view(shape), want)
    want, _ = ops.scaled_fp8_quant(weight, scale=want_scales)
    assert same(ours.view(shape), want)
    ours, scales = fp8.per_channel(weight)
    want, want_scales = ops.scaled_fp8_quant(weight, scale=None, use_per_token_if_dynamic=True)
    assert same(scales, want_scales) and same(ours, want)


@pytest.mark.gpu1
@pytest.mark.parametrize("shape", [(256, 384), (4096, 14336), (200, 130), (17408, 5120)])
def test_every_byte_is_that_of_vllm_s_compiled_quantiser(shape: tuple[int, int]) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = weights(*shape, device="cuda")
    ours, scales = fp8.per_block(weight[None])
    want, want_scales = per_block_cast_to_fp8(weight, [128, 128])
    assert same(scales[0], want_scales) and same(ours[0], want)


# ---------------------------------------------------------------- experts, without their kernels


@pytest.fixture(scope="module")
def distributed() -> Iterator[None]:
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    vllm_models.start_distributed()
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture
def eager() -> Iterator[None]:
    """Runs vLLM's quantiser of blocks uncompiled; `test_every_byte_is_that_of_vllm_s_reference`
    compiles it, for some ten seconds a shape.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def live_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {
        f"{path}.{n}": p.data.contiguous().view(torch.uint8).numpy().tobytes()
        for path, layer in model.named_modules()
        if held.kind_of(layer) is not None
        for n, p in layer._parameters.items()
        if p is not None
    }


@pytest.mark.parametrize("kind", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", BLOCKS])
def test_experts_are_placed_as_a_cold_load_makes_them(
    kind: str, tmp_path: Path, distributed: None, eager: None
) -> None:
    fp8_engine.lend_kernel()
    folder, again = tmp_path / "model", tmp_path / "again"
    base = fp8_engine.weights_of("qwen3_moe", folder)
    tensors = fp8_engine.moved(base, 1)
    write, quantization = fp8_engine.write_like, kind
    if kind == BLOCKS:
        write, quantization = fp8_engine.in_blocks, None
        folder = write(folder, base, tmp_path / "blocks")
    model, config = vllm_models.load(folder, dtype="bfloat16", quantization=quantization)
    experts = fp8_engine.InProcess(model, config, tiny.manifest_of(base))
    assert experts.refused == {}
    assert experts.wrong(base) == []
    weights_of = [n for n in experts.quantised if n.endswith(".weight")]
    assert set(weights_of) <= set(experts.wrong(tensors))  # the largest may stay the largest
    experts.put(tensors)
    assert experts.wrong(tensors) == []
    cold, _ = vllm_models.load(
        write(folder, tensors, again), dtype="bfloat16", quantization=quantization
    )
    assert live_of(model) == live_of(cold)
    scale = "weight_scale_inv" if kind in ("fp8_per_block", BLOCKS) else "weight_scale"
    weight = model.get_parameter(f"model.layers.0.mlp.experts.routed_experts.w2_{scale}")
    weight.data.view(torch.uint8).flatten()[0] ^= 1
    (name,) = experts.wrong(tensors)
    assert name.endswith(f"experts.0.down_proj.{scale}")


# ---------------------------------------------------------------- tensor parallel, blocks


def scale_of(
    kind: str, *, first: tuple[int, int], size: tuple[int, int], at: int, rows: int
) -> placement.Region:
    """Of a part of a 512 x 300 matrix, at a row of a worker's parameter of `rows` x the columns."""
    width, name, params = 300, "proj.weight", ("qkv", "weight")
    columns = size[1]
    part = placement.Region(
        name=name,
        first_index=first[0] * width + first[1],
        index_strides=(width, 1),
        size=size,
        module=params[0],
        param=params[1],
        offset=at * columns,
        strides=(columns, 1),
    )
    fmt = placement.ParamFormat(
        module=params[0],
        param=params[1],
        shape=(rows, columns),
        stride=(columns, 1),
        dtype="bfloat16",
        numel=rows * columns,
    )
    plan = placement.PlacementPlan(regions=(part,), formats={params: fmt}, covered={})
    blocks = (-(-rows // 128), -(-columns // 128))
    live = {
        "weight_scale_inv": torch.empty(blocks[::-1]).t(),  # columns first, as for TMA
        "weight_scale": torch.empty(rows, 1),
    }
    return held._scale_region(part, plan, kind, live, {name: (512, width)})


def test_parts_of_a_matrix_take_the_scales_of_their_rows_and_blocks() -> None:
    lower = scale_of("per_block", first=(256, 0), size=(256, 300), at=128, rows=384)
    assert (lower.first_index, lower.index_strides, lower.size) == (6, (3, 1), (2, 3))
    assert (lower.offset, lower.strides) == (1, (1, 3))
    right = scale_of("per_block", first=(0, 128), size=(512, 172), at=0, rows=512)
    assert (right.first_index, right.index_strides, right.size) == (1, (3, 1), (4, 2))
    rows = scale_of("per_channel", first=(100, 0), size=(50, 300), at=7, rows=384)
    assert (rows.first_index, rows.size, rows.offset) == (100, (50, 1), 7)


@pytest.mark.parametrize(
    ("first", "size", "at"),
    [
        ((0, 0), (200, 300), 0),  # ends within a block
        ((64, 0), (128, 300), 0),  # begins within one of the matrix
        ((128, 0), (128, 300), 64),  # begins within one of the parameter
        ((0, 0), (384, 100), 0),  # columns that another worker continues
    ],
)
def test_parts_within_a_block_are_refused(
    first: tuple[int, int], size: tuple[int, int], at: int
) -> None:
    with pytest.raises(ManifestError, match="within a block"):
        scale_of("per_block", first=first, size=size, at=at, rows=384)


# ---------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def dense(
    tmp_path_factory: pytest.TempPathFactory, distributed: None
) -> tuple[torch.nn.Module, Any]:
    folder = tmp_path_factory.mktemp("fp8")
    tiny.write_checkpoint(folder, "dense")
    return vllm_models.load(folder, dtype="bfloat16", quantization="fp8_per_channel")


def refusals(dense: tuple[torch.nn.Module, Any]) -> dict[str, list[str]]:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(dense[1]), torch.no_grad():
        return held.refusals(dense[0])


def test_a_described_quantisation_is_taken(dense: tuple[torch.nn.Module, Any]) -> None:
    assert refusals(dense) == {}


def test_another_quantisation_is_refused_with_its_layers(
    dense: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = dense[0].get_submodule("model.layers.0.mlp.down_proj")

    class AWQLinearMethod(type(layer.quant_method)):  # type: ignore[misc]
        pass

    monkeypatch.setattr(layer.quant_method, "__class__", AWQLinearMethod)
    ((why, paths),) = refusals(dense).items()
    assert "AWQLinearMethod" in why and paths == ["model.layers.0.mlp.down_proj"]


def test_a_kernel_that_shuffles_is_refused(
    dense: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = dense[0].get_submodule("model.layers.1.self_attn.o_proj")
    kernel = type(layer.quant_method.fp8_linear)

    def shuffle(_: Any, stand_in: torch.nn.Module) -> None:
        stand_in.weight.data = stand_in.weight.data.t().flip(0).contiguous().t()

    monkeypatch.setattr(kernel, "process_weights_after_loading", shuffle)
    assert any("other bytes" in why for why in refusals(dense))


def test_a_scale_that_a_kernel_keeps_is_refused(
    dense: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = dense[0].get_submodule("model.layers.0.mlp.gate_up_proj")
    copied = layer.weight_scale.data.clone()
    monkeypatch.setattr(layer.quant_method.fp8_linear, "alpha", copied, raising=False)
    ((why, paths),) = refusals(dense).items()
    assert "copy of scales" in why and paths == ["model.layers.0.mlp.gate_up_proj"]


def test_fp32_weights_are_not_sent_as_fp8(
    dense: tuple[torch.nn.Module, Any], tmp_path: Path
) -> None:
    tensors = tiny.write_checkpoint(tmp_path, "dense")
    manifest = tiny.manifest_of(tensors)
    plan = placement.record(dense[0], manifest)
    with pytest.raises(ManifestError, match="only bf16 matrices"):
        held.groups(plan, manifest, dense[0])


def test_a_padded_weight_is_refused(
    dense: tuple[torch.nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {n: t.bfloat16() for n, t in tiny.write_checkpoint(tmp_path, "dense").items()}
    manifest = tiny.manifest_of(tensors)
    plan = placement.record(dense[0], manifest)
    groups = all_workers.merged_groups([held.groups(plan, manifest, dense[0])])
    sent = fp8_manifest(manifest, groups)
    assert held.placed(plan, sent, dense[0]).formats
    weight = dense[0].get_parameter("model.layers.0.self_attn.o_proj.weight")
    monkeypatch.setattr(weight, "data", torch.nn.functional.pad(weight.data.t(), (0, 16)).t())
    with pytest.raises(ManifestError, match="is padded"):
        held.placed(plan, sent, dense[0])


def test_the_node_ends_before_the_first_job(caplog: pytest.LogCaptureFixture) -> None:
    fine = {"refusals": [], "holds_static_fp8": False}
    workers = [fine, fine | {"refusals": ["AWQLinearMethod is no ... (layers.0.mlp)"]}]
    refuse_unverified([fine], is_allowed=False)
    with pytest.raises(ConfigError, match=r"AWQLinearMethod.*layers\.0\.mlp.*allow_unverified"):
        refuse_unverified(workers, is_allowed=False)
    refuse_unverified(workers, is_allowed=True)
    assert "because allow_unverified is set" in caplog.text
    with pytest.raises(ConfigError, match="An FP8 checkpoint cannot go without; serve the bf16"):
        refuse_unverified([fine, workers[1] | {"holds_static_fp8": True}], is_allowed=True)


def test_workers_that_group_otherwise_are_refused() -> None:
    one = Fp8Group(kind="per_tensor", tensors=(1, 2, 3))
    other = Fp8Group(kind="per_tensor", tensors=(1, 2))
    assert all_workers.merged_groups([[one], [one]]) is not None
    assert all_workers.merged_groups([[], []]) is None
    with pytest.raises(ManifestError, match="different groups"):
        all_workers.merged_groups([[one], [other]])


# ---------------------------------------------------------------- block-scaled checkpoints


@pytest.fixture(scope="module")
def blocks(
    tmp_path_factory: pytest.TempPathFactory, distributed: None
) -> tuple[torch.nn.Module, Any]:
    fp8_engine.lend_kernel()
    folder = tmp_path_factory.mktemp("blocks")
    base = fp8_engine.weights_of("qwen3", folder)
    written = fp8_engine.in_blocks(folder, base, folder.with_suffix(".f8"))
    return vllm_models.load(written, dtype="bfloat16")


def test_a_block_scaled_checkpoint_is_taken(blocks: tuple[torch.nn.Module, Any]) -> None:
    layer = blocks[0].get_submodule("model.layers.0.mlp.down_proj")
    assert held.is_static(layer) and held.kind_of(layer) == "per_block"
    assert refusals(blocks) == {}


def test_other_static_scales_are_refused(
    blocks: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = blocks[0].get_submodule("model.layers.0.mlp.down_proj")
    for size in (None, [64, 128]):
        monkeypatch.setattr(layer.quant_method, "weight_block_size", size)
        ((why, paths),) = refusals(blocks).items()
        assert "other scales than one for each 128 x 128" in why
        assert paths == ["model.layers.0.mlp.down_proj"]


def test_blocks_that_a_kernel_rounds_again_are_refused(
    blocks: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepGEMM does, whose scales are powers of two."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils import deep_gemm

    layer = blocks[0].get_submodule("model.layers.1.self_attn.o_proj")

    def round_again(_: Any, stand_in: torch.nn.Module) -> None:
        requant_weight_ue8m0_inplace(stand_in.weight.data, stand_in.weight_scale_inv.data)

    kernel = type(layer.quant_method.fp8_linear)
    monkeypatch.setattr(kernel, "process_weights_after_loading", round_again)
    assert any("quantises weight to other bytes" in why for why in refusals(blocks))
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_e8m0_used", lambda: True)
    assert any("VLLM_USE_DEEP_GEMM_E8M0=0" in why for why in refusals(blocks))


def test_a_refused_fp8_checkpoint_is_not_loaded_from_bf16(
    blocks: tuple[torch.nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """allow_unverified lets vLLM quantise bf16 itself, which such a server cannot."""
    manifest = tiny.manifest_of(fp8_engine.weights_of("qwen3", tmp_path / "model"))
    model, config = blocks
    worker = WorkerPlan(model=model, vllm_config=config, device=torch.device("cpu"))
    worker.prepare_update(manifest)
    assert worker.fp8_groups(may_be_unverified=True)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    monkeypatch.setattr(layer.quant_method, "weight_block_size", None)
    worker = WorkerPlan(model=model, vllm_config=config, device=torch.device("cpu"))
    assert any("weight_scale_inv" in name for name in worker.prepare_update(manifest).uncovered)
    with pytest.raises(ManifestError, match="other scales"):
        worker.fp8_groups(may_be_unverified=True)
