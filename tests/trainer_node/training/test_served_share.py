"""The share of the update in the merged weights: sums by hand, warnings, and the sample of a real
trainer against its whole merged tensors.

    ... -m tests.trainer_node.training.test_served_share MODEL TENSOR PIPELINE EXPERT [FLAG ...]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.protocol.config import LoraConfig
from tests.trainer_node import families
from tests.trainer_node.conftest import run_on_gpus
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.adapters.merge import LoraDelta
from trainer_node.adapters.rounding import NEAREST, Corner, Rounding, delta_of, merge_matrix
from trainer_node.export.merged import Exporter
from trainer_node.export.runs import Run
from trainer_node.export.sources import Delta
from trainer_node.model.whole_adapters import gather_deltas
from trainer_node.ranks import objects
from trainer_node.training import served_share
from trainer_node.training.served_share import Sums, metrics_of, sums_of
from trainer_node.training.trainer import Trainer

ULP = 2.0**-7
"""Of bf16 numbers from 1 up to 2."""
STOCHASTIC = Rounding(seed=7)
CROSSED = 3e-4
"""Share of the changed elements that another order of a sum moves over their thresholds, at most.
Thresholds of another place change 1 % of them."""
SHARED = {
    "one": ("dense_untied", 1, (1, 1, 1), "head"),
    "moe": ("moe", 1, (1, 1, 1)),
    "fp32": ("dense_tied", 1, (1, 1, 1), "float32"),
    "tp2": ("dense_untied", 2, (2, 1, 1), "head"),
    "pp2": ("dense_tied", 2, (1, 2, 1)),
    "dp2": ("dense_tied", 2, (1, 1, 1)),
    "moe-ep2": ("moe", 2, (1, 1, 2)),
    "moe-tp2etp2": ("moe", 2, (2, 1, 1), "etp2"),
}


def measured(
    weight_HW: torch.Tensor, lora_B_HR: torch.Tensor, lora_A_RW: torch.Tensor, rounding: Rounding
) -> dict[str, float]:
    """Metrics of one whole matrix, merged."""
    corner = Corner("model.w")
    merged = merge_matrix(
        weight_HW, lora_B_HR, lora_A_RW, scale=2.0, rounding=rounding, corner=corner
    )
    sums = Sums(*sums_of(weight_HW, merged, delta_of(lora_B_HR, lora_A_RW, 2.0)).tolist())
    return metrics_of(sums._replace(whole_delta_squared=sums.delta_squared))


def of_delta(delta: float, weight: float, rounding: Rounding = NEAREST) -> dict[str, float]:
    """Metrics of a matrix of equal weights with equal deltas."""
    weight_HW = torch.full((4, 64), weight, dtype=torch.bfloat16)
    return measured(weight_HW, torch.full((4, 1), delta / 2), torch.ones(1, 64), rounding)


def random_matrices(ratio: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W, B and A of 2^20 elements, of an update that is `ratio` of the weights' size."""
    generator = torch.Generator().manual_seed(5)
    weight_HW = torch.randn(1024, 1024, generator=generator).bfloat16()
    lora_B_HR = torch.randn(1024, 4, generator=generator) * ratio / 4  # scale 2, rank 4
    return weight_HW, lora_B_HR, torch.randn(4, 1024, generator=generator)


class TestNumbers:
    @pytest.mark.parametrize(
        ("delta", "weight", "share", "changed"),
        [
            (ULP, 1.0, 1.0, 1.0),
            (-3 * ULP, 1.5, 1.0, 1.0),
            (ULP / 2, 1.0, 0.0, 0.0),  # a tie to the even number, which W is
            (ULP / 2, 1 + ULP, 2.0, 1.0),  # a tie to the even number after it
            (0.49 * ULP, 1 + ULP, 0.0, 0.0),
            (0.75 * ULP, 1.0, 4 / 3, 1.0),
        ],
    )
    def test_a_delta_in_units_of_the_last_place(
        self, delta: float, weight: float, share: float, changed: float
    ) -> None:
        found = of_delta(delta, weight)
        assert found["served_share"] == pytest.approx(share, rel=1e-6)
        assert found["changed_share"] == changed
        assert found["update_norm"] == pytest.approx(16 * abs(delta), rel=1e-6)
        assert found["update_ratio"] == pytest.approx(abs(delta) / weight, rel=1e-6)
        # sqrt(256 d^2 (e - d)^2) / (256 d^2)
        error = abs(share - 1) / 16
        assert found["served_share_error"] == pytest.approx(error, rel=1e-6, abs=1e-9)

    def test_a_stochastic_half_is_served_in_the_mean(self) -> None:
        weight_HW = torch.ones(1024, 1024, dtype=torch.bfloat16)
        found = measured(weight_HW, torch.full((1024, 1), ULP / 4), torch.ones(1, 1024), STOCHASTIC)
        assert found["changed_share"] == pytest.approx(0.5, abs=5 * 0.5 / 1024)
        assert found["served_share"] == pytest.approx(2 * found["changed_share"], rel=1e-9)
        assert found["served_share_error"] == pytest.approx(1 / 1024, rel=1e-9)  # |e - d| = |d|

    def test_a_small_update(self) -> None:
        matrices = random_matrices(1e-5)
        kept, lost = (measured(*matrices, rounding) for rounding in (STOCHASTIC, NEAREST))
        assert kept["update_ratio"] == lost["update_ratio"] == pytest.approx(1e-5, rel=0.2)
        assert abs(kept["served_share"] - 1) < 5 * kept["served_share_error"] < 0.2
        assert lost["served_share"] + 5 * lost["served_share_error"] < 0.1
        assert 0 < lost["changed_share"] < 0.5 * kept["changed_share"]  # those near 0

    def test_fp32_keeps_all(self) -> None:
        weight_HW, *adapter = random_matrices(1e-3)
        found = measured(weight_HW.float(), *adapter, STOCHASTIC)
        assert found["served_share"] == pytest.approx(1, abs=1e-6)
        assert found["served_share_error"] < 1e-6

    def test_no_update(self) -> None:
        found = of_delta(0.0, 1.0)
        assert found == {
            "update_norm": 0.0,
            "update_ratio": 0.0,
            "served_share": 1.0,
            "served_share_error": 0.0,
            "changed_share": 0.0,
        }
        assert served_share.warnings(found, mode="nearest", dtype="bfloat16") == []

    def test_an_empty_sample_and_an_infinite_weight_give_no_metrics(self) -> None:
        assert metrics_of(Sums()) == {}
        assert of_delta(ULP, math.inf) == {}
        assert served_share.warnings({}, mode="nearest", dtype="bfloat16") == []


LOST = {
    "update_norm": 3.0,
    "update_ratio": 1.2e-4,
    "served_share": 0.06,
    "served_share_error": 0.004,
    "changed_share": 0.01,
}
"""Metrics of a job that must warn."""


class TestWarnings:
    def said(self, mode: str = "nearest", dtype: str = "bfloat16", **found: float) -> list[str]:
        return served_share.warnings({**LOST, **found}, mode=mode, dtype=dtype)

    def test_a_lost_update(self) -> None:
        assert self.said() == [
            "The merged weights have 6.0% of the adapters' update (standard error 0.4%): it is "
            "1.2e-04 of the weights' size, and rounding to bfloat16 (nearest) loses the rest. The "
            'served model lags behind the trained one. Set publication.rounding = "stochastic", '
            "or use a larger learning rate."
        ]

    def test_nothing_served(self) -> None:
        (text,) = self.said(changed_share=0.0, served_share=0.0, served_share_error=0.1)
        assert text.startswith("The merged weights have nothing of the adapters' update: it is 1.2")

    @pytest.mark.parametrize(
        ("mode", "dtype"), [("stochastic", "bfloat16"), ("nearest", "float32")]
    )
    def test_the_remedy_is_not_what_is_set(self, mode: str, dtype: str) -> None:
        (text,) = self.said(mode, dtype)
        assert "publication.rounding" not in text
        assert text.endswith("Use a larger learning rate.")

    @pytest.mark.parametrize(
        ("share", "error", "warns"), [(0.94, 0.002, True), (0.94, 0.003, False), (0.96, 0, False)]
    )
    def test_what_the_sample_cannot_tell_is_not_said(
        self, share: float, error: float, warns: bool
    ) -> None:
        assert bool(self.said(served_share=share, served_share_error=error)) == warns


class TestBlocks:
    @staticmethod
    def runs(*rows: int) -> list[Run]:
        adapter = torch.zeros(1, 8), torch.zeros(max(rows), 1)
        delta = Delta(lora_A=adapter[0], lora_B=adapter[1], expert=None)
        return [
            Run(
                weight=torch.zeros(n, 8),
                delta=delta,
                corner=Corner(str(k)),
                first=0,
                first_B=0,
                rows=n,
            )
            for k, n in enumerate(rows)
        ]

    def test_all_of_a_small_model_once(self) -> None:
        blocks = served_share.blocks_of(self.runs(5, 1, 4), budget=80, block=16, step=1)
        places = [(b.corner.name, b.first, b.corner.row, b.rows) for b in blocks]
        assert places == [
            ("0", 0, 0, 2),
            ("0", 2, 2, 2),
            ("0", 4, 4, 1),
            ("1", 0, 0, 1),
            ("2", 0, 0, 2),
            ("2", 2, 2, 2),
        ]

    def test_whole_tiles(self) -> None:
        (run,) = self.runs(80)
        blocks = served_share.blocks_of([run], budget=640, block=16, step=32)
        assert [(b.first, b.rows) for b in blocks] == [(0, 32), (32, 32), (64, 16)]

    def test_a_part_is_spread_evenly(self) -> None:
        layers = [64, 16, 64, 256] * 32  # a period, as layers have
        runs = self.runs(*layers)
        numel = sum(run.numel for run in runs)
        blocks = served_share.blocks_of(runs, budget=numel // 8, block=16, step=1)
        assert len({(b.corner.name, b.first) for b in blocks}) == len(blocks)
        assert sum(b.numel for b in blocks) == pytest.approx(numel / 8, rel=0.02)
        for k, rows in enumerate((64, 16, 64, 256)):
            of_kind = sum(b.rows for b in blocks if int(b.corner.name) % 4 == k)
            assert of_kind == pytest.approx(32 * rows / 8, rel=0.15)


@pytest.mark.parametrize("what", SHARED)
def test_the_sample_equals_whole_tensors(what: str, models, torchrun) -> None:
    name, ranks, sizes, *flags = SHARED[what]
    torchrun(ranks, "training.test_served_share", models[name], *sizes, *flags)


def test_linears_that_tensor_ranks_have_copies_of(tmp_path: Path, torchrun) -> None:
    model = families.make("deepseek_v3", tmp_path / "deepseek_v3", "bfloat16")
    torchrun(2, "training.test_served_share", model, 2, 1, 1)


def test_transposed_stacks_of_experts(tmp_path: Path, torchrun) -> None:
    model = families.make("gpt_oss", tmp_path / "gpt_oss", "bfloat16")
    torchrun(1, "training.test_served_share", model, 1, 1, 1, "stacks")


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["dense_untied", "moe"])
def test_on_a_gpu(name: str, models) -> None:
    run_on_gpus(1, "training.test_served_share", models[name], 1, 1, 1, "cuda")


@pytest.mark.parametrize("size", [1e-9, 1e-8, 1e-7, 1e-6])
def test_few_crossed_thresholds_are_no_lost_update(size: float) -> None:
    """In a small sample of a tiny update hardly an element is changed; nobody is warned."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        weight = (torch.randn(256, 256, generator=generator) * 0.05).bfloat16()
        b = torch.randn(256, 4, generator=generator) * size
        a = torch.randn(4, 256, generator=generator) / 16
        common: dict[str, Any] = {"scale": 2.0, "corner": Corner("w")}
        for mode in ("stochastic", "nearest"):
            merged = merge_matrix(weight, b, a, rounding=Rounding(mode=mode, seed=seed), **common)
            is_stochastic = mode == "stochastic"
            total = sums_of(weight, merged, delta_of(b, a, 2.0), is_stochastic=is_stochastic)
            sums = Sums(*total.tolist())
            found = metrics_of(sums._replace(whole_delta_squared=sums.delta_squared))
            texts = served_share.warnings(found, mode=mode, dtype="bfloat16")
            assert bool(texts) == (mode == "nearest"), (seed, mode, found)


# ------------------------------------------------------------ on real Megatron


def whole(trainer: Trainer, exporter: Exporter) -> dict[str, float]:
    """Metrics of all elements of all tensors with an adapter, on rank 0. A collective."""
    model, total = trainer.model, torch.zeros(7, dtype=torch.float64)
    deltas = gather_deltas(model)
    base = {name: tensor.clone() for name, tensor in exporter.base_tensors()}
    for name, merged in exporter.merged_tensors():
        if dist.get_rank() == 0 and name in exporter._adapter_of:
            found = whole_delta(deltas[exporter._adapter_of[name]], model.scale)
            is_stochastic = model.rounding.mode == "stochastic" and merged.element_size() == 2
            total += sums_of(base[name], merged, found, is_stochastic=is_stochastic).cpu()
    sums = Sums(*total.tolist())
    return metrics_of(sums._replace(whole_delta_squared=sums.delta_squared))


def whole_delta(delta: LoraDelta, scale: float) -> torch.Tensor:
    """scale * B A, as the HF tensor has it."""
    found = scale * (delta.lora_B_OR.double() @ delta.lora_A_RI.double())
    return found.transpose(-1, -2) if delta.transposed else found


def same_on_all_ranks(trainer: Trainer) -> dict[str, float]:
    trainer.model.adapters.sample = None  # another budget chooses other blocks
    found = served_share.metrics(trainer.model)
    assert objects.all_gather(found, group=trainer.model.control_group)[0] == found
    return found


def check(trainer: Trainer, exporter: Exporter, rounding: Rounding) -> dict[str, float]:
    """All elements give the numbers of whole tensors, a part gives them within its errors."""
    trainer.model.adapters.rounding = rounding
    want, kind = whole(trainer, exporter), trainer.model.device.type
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(served_share.BLOCK_ELEMENTS, kind, 1 << 8)
        patch.setitem(served_share.BUDGET_ELEMENTS, kind, 1 << 20)
        got = same_on_all_ranks(trainer)
        patch.setitem(served_share.BUDGET_ELEMENTS, kind, 1 << 14)
        part = same_on_all_ranks(trainer)
    if dist.get_rank() == 0:
        assert got.keys() == want.keys() == part.keys()
        for name, value in want.items():
            rel = 1e-6 if name.startswith("update") else CROSSED
            assert got[name] == pytest.approx(value, rel=rel, abs=1e-9), (name, got, want)
        error = math.hypot(part["served_share_error"], want["served_share_error"])
        assert abs(part["served_share"] - want["served_share"]) <= 5 * error + 1e-6, (part, want)
        for name in ("update_norm", "update_ratio", "changed_share"):
            assert part[name] == pytest.approx(want[name], rel=0.3), (name, part, want)
            assert part[name] != got[name], "no part"
        check_merger(trainer)
    return got


def check_merger(trainer: Trainer) -> None:
    """What a GPU merges is what a CPU does, but for sums that differ in fp32's last place."""
    model, sample = trainer.model, served_share._Sample(trainer.model)
    merger = served_share.merger_of(model, sample._chunks)
    for number, chunk in enumerate(sample._chunks):
        sent = served_share.merged_as_sent(merger, number, chunk)
        deltas = served_share.deltas_of(chunk, model.scale)
        ours = served_share.merged_by_torch(chunk, deltas, model.rounding)
        differ = (sent != ours).float().mean()
        assert differ < (1e-3 if sent.dtype is torch.bfloat16 else 0.5)


def main() -> None:
    """Every size of the update, both roundings; then new adapters."""
    options: dict[str, object] = {"dtype": "float32" if "float32" in sys.argv else "bfloat16"}
    options["device"] = "cuda" if "cuda" in sys.argv else "cpu"
    if "stacks" in sys.argv:
        targets = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
        options["lora"] = LoraConfig(rank=4, alpha=8, targets=targets)
    trainer = make_trainer(Path(sys.argv[1]), *map(int, sys.argv[2:5]), **options)
    exporter = Exporter(trainer.model)
    random_adapters(trainer)
    with torch.no_grad():
        for adapter in trainer.model.adapters.adapters:
            for lora_B in adapter.lora_B.values():
                lora_B *= 1e-3
    shares = {
        mode: check(trainer, exporter, Rounding(mode=mode, seed=5))["served_share"]
        for mode in ("nearest", "stochastic")
    }
    if options["dtype"] == "float32":
        assert shares["nearest"] == shares["stochastic"] == pytest.approx(1, abs=1e-4)
    elif dist.get_rank() == 0:
        assert shares["nearest"] < 0.6 and shares["stochastic"] == pytest.approx(1, abs=0.1), shares
    assert served_share.metrics(trainer.model)["update_norm"] > 0
    narrow = trainer.model.config.lora.model_copy(update={"rank": 2})
    trainer.use_adapter(trainer.plan_adapter(narrow))
    assert served_share.metrics(trainer.model)["update_norm"] == 0, "the old adapter was measured"
    trainer.model.close()


if __name__ == "__main__":
    main()
