"""Every family that Bridge has and the trainer can train: Bridge's own provider and layers, on the
CPU's stand-ins, against transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics import chain_error_bound
from tests.trainer_node.conftest import Ranks
from tests.trainer_node.families import FAMILIES, LENGTHS, make
from tests.trainer_node.family_bounds import SMALL, roundings
from tests.trainer_node.family_cases import PIPELINES, TOPOLOGIES

Cell = Callable[..., dict[str, Any]]
Sizes = tuple[int, int, int, int]
SIZES = ("tensor", "context", "expert", "expert_tensor")
DENSE = ["llama", "gemma3", "nemotron", "qwen3_5"]
"""In bfloat16 only these: another rounding sends a token to another expert."""
RECOMPUTED = ["mistral", "deepseek_v3", "gpt_oss", "qwen3_5"]
VISIBLE = 20.0
"""How many bounds another setting must move a log-prob by."""


@pytest.fixture(scope="module")
def cell(torchrun: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """What `family` leaves for a family on a topology; each is run once."""
    torch.set_num_threads(1)
    root, found = tmp_path_factory.mktemp("families"), {}

    def run(family: str, *flags: str, sizes: Sizes = (1, 1, 1, 1)) -> dict[str, Any]:
        key = "-".join(map(str, (family, *sizes, *flags)))
        if key not in found:
            dtype = "bfloat16" if "bfloat16" in flags else "float32"
            if not (root / dtype / family).exists():
                make(family, root / dtype / family, dtype)
            out = root / f"{key}.pt"
            torchrun(max(sizes), "model.family", out, root / dtype, family, *sizes, *flags)
            found[key] = torch.load(out)
        return found[key]

    return run


def bound(result: dict[str, Any], family: str, dtype: torch.dtype = torch.float32) -> float:
    """Between two computations of a log-prob."""
    logit = result["theirs"].std().item()
    return chain_error_bound(dtype, roundings=roundings(family, dtype), magnitude=logit)


def check(result: dict[str, Any], family: str, dtype: torch.dtype = torch.float32) -> None:
    """Log-probs over the vocabulary, and every tensor's gradient."""
    difference = (result["ours"] - result["theirs"]).abs().max().item()
    assert difference <= bound(result, family, dtype)
    ours, theirs = result["our_gradients"], result["their_gradients"]
    assert ours.keys() == theirs.keys()
    largest = max(t.abs().max().item() for t in theirs.values())
    relative = chain_error_bound(
        dtype, roundings=2 * roundings(family, dtype) + sum(LENGTHS), magnitude=1.0
    )
    for name, tensor in theirs.items():
        size = max(tensor.abs().max().item(), SMALL * largest)
        assert (ours[name] - tensor).abs().max().item() <= relative * size, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_transformers_has(cell: Cell, family: str) -> None:
    check(cell(family), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_sees_the_familys_settings(cell: Cell, family: str) -> None:
    result = cell(family)
    assert result["visible"]
    for name, theirs in result["visible"].items():
        moved = (theirs - result["theirs"]).abs().max().item()
        assert moved >= VISIBLE * bound(result, family), name


@pytest.mark.parametrize(("family", *SIZES), TOPOLOGIES)
def test_a_family_over_several_ranks(
    cell: Cell, family: str, tensor: int, context: int, expert: int, expert_tensor: int
) -> None:
    check(cell(family, sizes=(tensor, context, expert, expert_tensor)), family)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma3", "gpt_oss", "minimax_m2"])
def test_a_family_over_tensor_ranks_that_share_no_sequence(cell: Cell, family: str) -> None:
    check(cell(family, "no-sequence", sizes=(2, 1, 1, 1)), family)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", RECOMPUTED)
def test_recomputing_changes_no_bit(cell: Cell, family: str, recompute: str) -> None:
    kept, again = cell(family), cell(family, recompute)
    assert torch.equal(kept["ours"], again["ours"])
    gradients = kept["our_gradients"]
    assert all(torch.equal(again["our_gradients"][n], gradients[n]) for n in gradients)


@pytest.mark.parametrize("family", DENSE)
def test_a_family_in_bfloat16(cell: Cell, family: str) -> None:
    check(cell(family, "bfloat16"), family, torch.bfloat16)


@pytest.mark.parametrize("family", PIPELINES)
def test_a_family_over_pipeline_stages(torchrun: Ranks, tmp_path: Path, family: str) -> None:
    torchrun(2, "model.staged", make(family, tmp_path / family))


def test_what_megatron_would_get_wrong_is_refused(torchrun: Ranks) -> None:
    torchrun(1, "model.refusals")


def test_a_checkpoint_is_the_same_each_time(tmp_path: Path) -> None:
    """So that a bound which holds today holds tomorrow."""
    files = [make("llama", tmp_path / str(n)) / "model.safetensors" for n in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
