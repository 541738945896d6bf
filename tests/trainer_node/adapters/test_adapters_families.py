"""Adapters on every linear of structurally different families, against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.errors import ConfigError
from tests.numerics import chain_error_bound
from tests.trainer_node.conftest import Ranks
from tests.trainer_node.families import LENGTHS, make, pack_experts
from tests.trainer_node.family_bounds import SMALL, roundings
from tests.trainer_node.family_cases import ALL, ONE_RANK, PACKED, SEVERAL, SLOW_EXPERTS
from trainer_node.hf.checkpoint import read_config
from trainer_node.tools.identity_adapter import linear_shapes

Cell = Callable[..., dict[str, Any]]


def topology(case: tuple[str, str, int, tuple[int, ...]]) -> str:
    """A case's name: family-tp2."""
    family, targets, sequence, sizes = case
    split = [f"{n}{s}" for n, s in zip(("tp", "cp", "ep", "etp"), sizes, strict=True) if s > 1]
    head = ["lm_head"] * ("lm_head" in targets)
    return "-".join([family, *head, *split, *["no-sequence"] * (not sequence)])


@pytest.fixture(scope="module")
def cell(torchrun: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """What `adapted` leaves."""
    root = tmp_path_factory.mktemp("families")

    def run(family: str, targets: str, *, sequence: int = 1, sizes: Any = (1, 1, 1, 1)) -> Any:
        name = family.removesuffix(PACKED)
        folder = root / family / name
        if not folder.exists():
            make(name, folder)
            if name != family:
                pack_experts(folder)
        out = root / "result.pt"
        torchrun(
            max(sizes), "adapters.adapted", out, folder.parent, name, targets, sequence, *sizes
        )
        return torch.load(out)

    return run


def bound(result: dict[str, Any], family: str, *, products: int = 3) -> float:
    """Between two computations of a log-prob: every linear is three products."""
    logit = result["theirs"].std().item()
    count = products * roundings(family.removesuffix(PACKED))
    return chain_error_bound(torch.float32, roundings=count, magnitude=logit)


def check(result: dict[str, Any], family: str) -> None:
    """Log-probs and gradients are PEFT's; an adapter and a step can be seen."""
    allowed = bound(result, family)
    assert (result["ours"] - result["theirs"]).abs().max() <= allowed
    for other in ("base", "stepped"):
        assert (result["ours"] - result[other]).abs().max() > 1e4 * allowed
    for export in ("merged", "wired", "served"):
        # The merge rounds every weight once more.
        allowed = bound(result, family, products=6)
        assert (result["ours"] - result[export]).abs().max() <= allowed, export
    ours = result["our_gradients"]
    compare(ours, result["served_gradients"], family)
    if theirs := result["their_gradients"]:  # PEFT fuses some adapters
        compare(ours, theirs, family)


def compare(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor], family: str) -> None:
    """Gradients of each matrix."""
    assert ours.keys() == theirs.keys()
    largest = max(t.abs().max().item() for t in theirs.values())
    relative = chain_error_bound(
        torch.float32,
        roundings=6 * roundings(family.removesuffix(PACKED)) + sum(LENGTHS),
        magnitude=1.0,
    )
    for name, tensor in theirs.items():
        size = max(tensor.abs().max().item(), SMALL * largest)
        assert (ours[name] - tensor).abs().max().item() <= relative * size, name


@pytest.mark.parametrize(("family", "targets"), ONE_RANK)
def test_adapters_are_pefts(cell: Cell, family: str, targets: str, tmp_path: Path) -> None:
    """The names are also those of an identity adapter made only from config.json."""
    result = cell(family, targets)
    check(result, family)
    if targets == ALL:
        make(family, tmp_path / "model")
        config = read_config(tmp_path / "model")
        if family == "minimax_m2":
            with pytest.raises(ConfigError, match="let the trainer write its adapter"):
                linear_shapes(config, [ALL])
        else:
            assert set(linear_shapes(config, [ALL])) == set(result["names"])
    if "lm_head" in targets:
        assert "lm_head" in result["names"]
    if ALL not in targets and "experts." not in targets.replace("shared_expert", ""):
        ends = targets.split(",")
        assert {n for n in result["names"] if not n.endswith(tuple(ends))} == set()
        assert all(any(n.endswith(e) for n in result["names"]) for e in ends)
    is_slow = family in SLOW_EXPERTS or "experts.gate_up_proj" in targets
    assert set(result["fallbacks"]) == ({"experts"} if is_slow else set())
    assert result["stacked"] == (0 if is_slow else result["moe_layers"])


@pytest.mark.parametrize(
    ("family", "targets", "sequence", "sizes"), SEVERAL, ids=map(topology, SEVERAL)
)
def test_adapters_over_several_ranks(
    cell: Cell, family: str, targets: str, sequence: int, sizes: tuple[int, ...]
) -> None:
    check(cell(family, targets, sequence=sequence, sizes=sizes), family)


def test_what_cannot_have_an_adapter_is_refused(torchrun: Ranks, tmp_path: Path) -> None:
    torchrun(1, "adapters.adapter_refusals", tmp_path)
