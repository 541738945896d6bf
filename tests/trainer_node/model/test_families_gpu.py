"""Every family on a GPU: TransformerEngine's layers and the kernels that the CPU has stand-ins for,
in bfloat16, against transformers in fp32.

What transformers' own rounding to bfloat16 does is the measure. It may send a token to another
expert, there as here, so norms over all numbers are compared and not the largest difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_node.conftest import run_on_gpus
from tests.trainer_node.families import FAMILIES, make, pack_experts
from tests.trainer_node.family_cases import ALL, ONE_RANK, PACKED

TIMES_ROUNDING = 3.0
TIMES_FLIPPED = 10.0
"""The same where tokens may have gone to other experts in one of the two computations."""
VISIBLE = 2.0
"""How many times the rounding an adapter and a step must move the median token by."""

pytestmark = pytest.mark.gpu1


def distance(ours: Any, theirs: Any) -> float:
    """Norm of the difference over the norm; of dictionaries, of all tensors together."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        parts = ([d[n].double().flatten() for n in theirs] for d in (ours, theirs))
        ours, theirs = map(torch.cat, parts)
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def typical(ours_TV: torch.Tensor, theirs_TV: torch.Tensor) -> float:
    """The median token's distance."""
    return float((ours_TV - theirs_TV).norm(dim=-1).median() / theirs_TV.norm(dim=-1).median())


def check(result: dict[str, Any], ours: str) -> None:
    """Log-probs."""
    theirs, rounded = result["theirs"], result["their_rounded"]
    allowed = TIMES_ROUNDING * typical(rounded, theirs)
    assert 0 < allowed < 0.5
    assert typical(result[ours], theirs) <= allowed
    allowed = TIMES_FLIPPED * distance(rounded, theirs)
    assert distance(result[ours], theirs) <= allowed


def check_gradients(result: dict[str, Any], ours: str = "our_gradients") -> None:
    """Of all tensors together."""
    theirs = result["their_gradients"]
    allowed = TIMES_FLIPPED * distance(result["their_rounded_gradients"], theirs)
    assert allowed > 0
    assert distance(result[ours], theirs) <= min(allowed, 0.7)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_transformers_has(tmp_path: Path, family: str) -> None:
    make(family, tmp_path / family, "bfloat16")
    out = tmp_path / "out.pt"
    run_on_gpus(1, "model.family", out, tmp_path, family, 1, 1, 1, 1, "bfloat16", "cuda")
    result = torch.load(out)
    check(result, "ours")
    check_gradients(result)


@pytest.mark.parametrize(
    ("family", "targets"), [c for c in ONE_RANK if c[1] == ALL or ",experts." in c[1]]
)
def test_adapters_are_pefts(tmp_path: Path, family: str, targets: str) -> None:
    name = family.removesuffix(PACKED)
    make(name, tmp_path / name, "bfloat16")
    if name != family:
        pack_experts(tmp_path / name)
    out = tmp_path / "out.pt"
    run_on_gpus(1, "adapters.adapted", out, tmp_path, name, targets, 1, 1, 1, 1, 1, "cuda")
    result = torch.load(out)
    check(result, "ours")
    for export in ("merged", "wired", "served"):
        check(result, export)
    rounding = typical(result["their_rounded"], result["theirs"])
    for other in ("base", "stepped"):
        assert typical(result[other], result["ours"]) > VISIBLE * rounding
    if result["their_gradients"]:  # else PEFT fuses these adapters
        check_gradients(result)
        check_gradients(result, "served_gradients")
