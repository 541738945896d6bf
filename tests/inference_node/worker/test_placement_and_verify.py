"""Placement recorded on real vLLM models, digests of their live tensors, and what must make the
digests differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_node.server import all_workers
from inference_node.shared.reports import PartDigest, WorkerDigests
from inference_node.worker import chunk_plan, derived, packing, placement, reload, verify
from orchestrator.errors import ManifestError, VerificationError
from orchestrator.protocol.messages import Manifest, TensorSpec
from tests.inference_node import family_engine, tiny, vllm_models
from tests.inference_node.harness import moved
from weight_transfer.digest import tensor_digest

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": ("moe", {}),
    "moe_padded": ("moe", {"moe_intermediate_size": 48}),
    "dense": ("dense", {}),
    "tied": ("tied", {}),
    "deepseek_v3": ("family", {}),
    "gpt_oss": ("family", {}),
}
CONVOLUTION = "qwen3_next"


class Loaded:
    """A model, its tensors and its plan."""

    def __init__(self, folder: Path, name: str) -> None:
        kind, changes = KINDS.get(name, ("family", {}))
        dtype = "bfloat16" if name == CONVOLUTION else "float32"
        if kind == "family":
            self.tensors = family_engine.checkpoint(name, folder)
        else:
            self.tensors = tiny.write_checkpoint(folder, kind, **changes)
        self.model, self.config = vllm_models.load(folder, dtype=dtype)
        self.manifest = tiny.manifest_of(self.tensors)
        self.plan = placement.record(self.model, self.manifest)

    def wrong(
        self,
        tensors: dict[str, torch.Tensor],
        corrections: dict[placement.Region, int] | None = None,
    ) -> list[str]:
        """Names whose live digests are not those of `tensors`; a disagreement between copies counts
        for all.
        """
        with torch.no_grad():
            found = verify.read_back(self.model, self.plan, corrections or {})
        digests, unverified = all_workers.combine(self.manifest, [found])
        assert unverified == {}
        return [
            n
            for (n, t), d in zip(tensors.items(), digests, strict=True)
            if int(tensor_digest(t)) != d
        ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Loaded]]:
    import torch.distributed as dist

    vllm_models.start_distributed()
    yield {name: Loaded(tmp_path_factory.mktemp(name), name) for name in (*KINDS, CONVOLUTION)}
    dist.destroy_process_group()


@pytest.mark.parametrize("name", KINDS)
def test_digests_follow_updates_and_a_failed_one(models: dict[str, Loaded], name: str) -> None:
    m = models[name]
    second, third = moved(m.tensors, 1), moved(m.tensors, 2)
    assert m.wrong(m.tensors) == []
    assert sorted(m.wrong(second)) == sorted(m.tensors)
    vllm_models.update(m.model, m.config, second)
    assert m.wrong(second) == []
    reload.start(m.model)
    m.model.load_weights(iter(list(third.items())[:11]))
    assert reload.reset(m.model) > 0
    assert not any(p.is_meta for p in m.model.parameters())
    assert placement.record(m.model, m.manifest).regions == m.plan.regions
    vllm_models.update(m.model, m.config, third)
    assert m.wrong(third) == []
    vllm_models.update(m.model, m.config, m.tensors)
    assert m.wrong(m.tensors) == []


def test_a_live_tensor_may_lie_in_the_middle_of_its_storage(models: dict[str, Loaded]) -> None:
    m = models["dense"]
    norm = m.model.model.norm.weight
    kept, norm.data = norm.data, torch.cat([torch.full((3,), 7.0), norm.data])[3:]
    assert norm.data.storage_offset() == 3 and m.wrong(m.tensors) == []
    norm.data = kept


def test_an_update_aborted_before_its_first_tensor_leaves_the_old_version(
    models: dict[str, Loaded],
) -> None:
    m = models["moe"]
    reload.start(m.model)
    reload.reset(m.model)
    assert m.wrong(m.tensors) == []


def test_the_stock_reload_would_be_caught(models: dict[str, Loaded]) -> None:
    """vLLM's own reload, without our repairs: wrong experts (MoE) and a stale head (tied), and the
    digests say so.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    def stock(m: Loaded, tensors: dict[str, torch.Tensor]) -> None:
        with set_current_vllm_config(m.config), torch.no_grad():
            initialize_layerwise_reload(m.model)
            m.model.load_weights(iter([(n, t.clone()) for n, t in tensors.items()]))
            finalize_layerwise_reload(m.model, m.config.model_config)

    moe, tied = models["moe"], models["tied"]
    mended = [
        layer.quant_method
        for layer in moe.model.modules()
        if getattr(getattr(layer, "quant_method", None), reload._REPAIRED, False)
    ]
    for method in mended:
        del method.process_weights_after_loading
        delattr(method, reload._REPAIRED)
    stock(moe, moe.tensors)
    assert moe.wrong(moe.tensors) and all(".mlp.experts." in n for n in moe.wrong(moe.tensors))
    stock(tied, moved(tied.tensors, 3))
    with pytest.raises(VerificationError, match="embed_tokens"):
        tied.wrong(tied.tensors)
    for m in (moe, tied):
        vllm_models.update(m.model, m.config, m.tensors)
        assert m.wrong(m.tensors) == []


def test_one_flipped_live_element_names_its_tensor(models: dict[str, Loaded]) -> None:
    m = models["moe"]
    layers = dict(m.model.named_modules())
    experts = next(p for p in layers if "w13_weight" in layers[p]._parameters and ".1." in p)
    for path, param, index, name in [
        ("model.norm", "weight", 3, "model.norm.weight"),
        ("model.embed_tokens", "weight", 64 * 7 + 1, "model.embed_tokens.weight"),
        (experts, "w2_weight", 5, "model.layers.1.mlp.experts.0.down_proj.weight"),
    ]:
        flat = layers[path]._parameters[param].data.view(-1)
        before = flat[index].clone()
        flat[index] = torch.nextafter(before, before + 1)
        assert m.wrong(m.tensors) == [name]
        flat[index] = before
    assert m.wrong(m.tensors) == []


def test_one_flipped_element_inside_a_packed_linear_names_its_tensor(
    models: dict[str, Loaded],
) -> None:
    m = models["dense"]
    layer = dict(m.model.named_modules())["model.layers.0.self_attn.qkv_proj"]
    packed = layer.cpu_linear

    def one_bit_off(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = packed(x, weight, bias).clone()
        y[..., 130] += x[..., 9] * 1e-6  # row 130 of [q; k; v] with 128 rows of q: k_proj's row 2
        return y

    layer.cpu_linear = one_bit_off
    assert m.wrong(m.tensors) == ["model.layers.0.self_attn.k_proj.weight"]
    layer.cpu_linear = packed
    assert m.wrong(m.tensors) == []


def test_a_convolution_is_read_back_from_each_of_its_copies(models: dict[str, Loaded]) -> None:
    """vLLM on a CPU may permute it and keep what was loaded as well."""
    m = models[CONVOLUTION]
    name = "model.layers.0.linear_attn.conv1d.weight"
    layer = dict(m.model.named_modules())[name.removesuffix(".weight")]
    assert m.wrong(m.tensors) == []
    extra = packing.extra_tensors(layer)
    for live in (layer.weight.data, *extra.values()):
        flat = live.view(-1)
        before = flat[9].clone()
        flat[9] += 1
        if extra:
            with pytest.raises(VerificationError, match=rf"{name} \(its live copies disagree"):
                m.wrong(m.tensors)
        else:
            assert m.wrong(m.tensors) == [name]
        flat[9] = before
    assert m.wrong(m.tensors) == []


def test_absorbed_projections_follow_a_weight_that_is_written_in_place(
    models: dict[str, Loaded],
) -> None:
    m = models["deepseek_v3"]
    layers = derived.deriving_layers(m.model)
    assert len(layers) == m.config.model_config.hf_config.num_hidden_layers
    layer = next(iter(layers.values()))
    weight = layer.kv_b_proj.weight
    before = weight.data.clone()
    for name in ("W_UK_T", "W_UV"):  # copies, as of a weight of another dtype
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).clone(), requires_grad=False))
    derived.check(layers)
    weight.data += 0.5
    with pytest.raises(VerificationError, match="absorbed"):
        derived.check(layers)
    derived.refresh(layers, torch.float32)
    derived.check(layers)
    layer.W_UV.data[1, 2, 3] += 1e-3
    with pytest.raises(VerificationError, match="absorbed"):
        derived.check(layers)
    weight.data.copy_(before)
    derived.refresh(layers, torch.float32)
    assert m.wrong(m.tensors) == []


def test_a_weight_that_is_dropped_is_refused_and_unverified(models: dict[str, Loaded]) -> None:
    """As vLLM's MLA backend for AMX does with a weight that it has packed."""
    m = models["deepseek_v3"]
    layer = dict(m.model.named_modules())["model.layers.1.self_attn.kv_b_proj"]
    kept, layer.weight = layer.weight, torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with torch.no_grad():
        found = verify.read_back(m.model, m.plan, {})
    with pytest.raises(ManifestError, match=r"layers\.1\..* dropped the weight of kv_b_proj"):
        derived.deriving_layers(m.model)
    layer.weight = kept
    assert list(found.unverified) == ["model.layers.1.self_attn.kv_b_proj.weight"]


def test_a_wider_live_tensor_is_read_back_but_not_written_in_place(
    models: dict[str, Loaded],
) -> None:
    m = models[CONVOLUTION]
    norm = m.model.model.norm
    kept, norm.weight.data = norm.weight.data, norm.weight.data.float()
    assert m.wrong(m.tensors) == []
    live = chunk_plan.live_parameters(m.model, m.plan)
    norm.weight.data = kept
    assert "another shape" in live["model.norm", "weight"]


def test_what_a_loader_computes_is_neither_placed_nor_verified() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    class Model(torch.nn.Module):
        """Loads like vLLM's Mamba (decay) and like gpt-oss on a rank that is not the first."""

        def __init__(self) -> None:
            super().__init__()
            for name in ("weight", "decay", "down_bias", "up_bias"):
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(4, 4)))

        def load_weights(self, weights: Any) -> None:
            for name, loaded in weights:
                target = dict(self.named_parameters())[name]
                if name == "down_bias":
                    loaded.zero_()
                target.copy_(torch.zeros_like(loaded) if name == "up_bias" else loaded.t())
                if name == "decay":
                    target.copy_(-torch.exp(target))

    model = Model()
    record_metadata_for_reloading(model)
    manifest = tiny.manifest_of({n: torch.zeros(4, 4) for n, _ in model.named_parameters()})
    plan = placement.record(model, manifest)
    assert {r.name for r in plan.regions} == {"weight", "decay"}
    assert {param for (_, param), fmt in plan.formats.items() if fmt.is_computed} == {"decay"}
    findings = placement.local_findings(plan, manifest)
    assert findings.uncovered == {} and findings.refused == {}
    assert (
        chunk_plan.live_parameters(model, plan)["", "decay"] == "the loader of Model computes decay"
    )
    with torch.no_grad():
        found = verify.read_back(model, plan, {})
    assert set(found.unverified) == {"decay"} and set(found.parts) == {"weight"}


def test_negative_zeros_survive_the_read_back_of_packed_layers(models: dict[str, Loaded]) -> None:
    m = models["dense"]
    tensors = {n: t.clone() for n, t in m.tensors.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(-1)[[3, 77]] = -0.0
    vllm_models.update(m.model, m.config, tensors)
    regions = [r for r in m.plan.regions if r.name == name]
    assert m.wrong(tensors) == [name]
    assert (
        m.wrong(tensors, {r: verify.zero_sign_correction(tensors[name], r) for r in regions}) == []
    )
    vllm_models.update(m.model, m.config, m.tensors)
    for place in range(64):  # each digest is added to an int64, which must take it
        tensors[name].view(-1)[place] = -0.0
        for region in regions:
            correction = verify.zero_sign_correction(tensors[name], region)
            assert torch.zeros(1, dtype=torch.int64).add(correction).item() == correction


def test_the_plan_knows_what_is_missing_and_what_is_too_much(models: dict[str, Loaded]) -> None:
    m = models["moe"]
    specs = list(m.manifest.tensors)

    def judged(tensors: list[TensorSpec]) -> str:
        manifest = Manifest(tensors=tuple(tensors))
        with pytest.raises(ManifestError) as error:
            all_workers.judge(
                manifest, [placement.local_findings(placement.record(m.model, manifest), manifest)]
            )
        assert not any(p.is_meta for p in m.model.parameters())
        return str(error.value)

    expert = next(s for s in specs if s.name.endswith("layers.1.mlp.experts.2.up_proj.weight"))
    assert "w13_weight" in judged([s for s in specs if s is not expert])
    wide = TensorSpec(
        name=expert.name, dtype="float32", shape=(expert.shape[0], expert.shape[1] + 8)
    )
    assert expert.name in judged([wide if s is expert else s for s in specs])
    assert "float64" in judged(
        [
            TensorSpec(name=expert.name, dtype="float64", shape=expert.shape) if s is expert else s
            for s in specs
        ]
    )
    assert m.wrong(m.tensors) == []


def test_combine_counts_replicas_once_and_wants_them_equal() -> None:
    manifest = Manifest(
        tensors=(
            TensorSpec(name="a", dtype="float32", shape=(4,)),
            TensorSpec(name="b", dtype="float32", shape=(4,)),
        )
    )

    def part(first: int, count: int, digest: int) -> PartDigest:
        return PartDigest(key=(first, (count,), (1,)), numel=count, digest=digest)

    one = WorkerDigests(parts={"a": [part(0, 2, 2**63 - 1)], "b": [part(0, 4, 7)]})
    two = WorkerDigests(parts={"a": [part(2, 2, 2)], "b": [part(0, 4, 7)]})
    assert all_workers.combine(manifest, [one, two]) == ([-(2**63) + 1, 7], {})
    other = WorkerDigests(parts={"a": [part(2, 2, 2)], "b": [part(0, 4, 8)]})
    with pytest.raises(VerificationError, match=r"b .*disagree"):
        all_workers.combine(manifest, [one, other])
    with pytest.raises(VerificationError, match=r"a .2 of 4"):
        all_workers.combine(manifest, [one])
