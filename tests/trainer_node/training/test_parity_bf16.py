"""Parity in bf16 with fp32 masters: topologies against one rank in fp32, on the CPU and, marked
gpu2 and gpu4, through TransformerEngine and NCCL.

Rounding is most of what differs, so each tolerance is a multiple of what rounding by itself does:
one rank in bf16 against one in fp32, on the CPU in the same run. The errors that the fp32 matrix
looks for (a sum missing, a part counted twice) are of the order of the values themselves.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_node.conftest import run_on_gpus
from tests.trainer_node.topologies import MOE, load, options

CELLS = [
    ("dense_tied", "tp2", "full-rl"),
    ("dense_untied", "dp2", "lora-sft"),
    ("moe", "tp2ep2", "lora-rl"),
    ("moe", "dp2ep2", "full-sft"),
    ("dense_tied", "cp2", "lora-rl"),
    ("moe", "tp2-etp2", "lora-rl"),
]
TIMES_ROUNDING = 3.0
GPU_MARKS = {2: pytest.mark.gpu2, 4: pytest.mark.gpu4}


def distances(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Relative to the values' size: log-probs and entropies, the gradient, the weights. In nats:
    the loss, and the mean of the scores' differences.
    """
    result = {"scores": relative([ours["scores"]], [theirs["scores"]])}
    result["nats"] = float((ours["scores"].double() - theirs["scores"].double()).abs().mean())
    result["loss"] = max(
        abs(a["loss"] - b["loss"]) for a, b in zip(ours["metrics"], theirs["metrics"], strict=True)
    )
    for key in ("gradients", "trained"):
        assert ours[key].keys() == theirs[key].keys()
        result[key] = relative([ours[key][n] for n in theirs[key]], list(theirs[key].values()))
    return result


def relative(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    flat, other = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (ours, theirs))
    return float((flat - other).norm() / other.norm())


@pytest.fixture(scope="session")
def rounding(models, torchrun, single_parity, tmp_path_factory):
    """(model, cell) -> what bf16 by itself changes, on one rank; made once."""

    @functools.cache
    def get(model: str, cell: str) -> dict[str, float]:
        out = tmp_path_factory.mktemp("bf16")
        torchrun(1, "training.parity", out, models[model], 1, 1, 1, *cell.split("-"), "bfloat16")
        return distances(load(out), load(single_parity(model, cell)))

    return get


@pytest.mark.parametrize(("model", "topology", "cell"), CELLS)
def test_on_the_cpu(
    model: str, topology: str, cell: str, models, torchrun, rounding, single_parity, tmp_path: Path
) -> None:
    ranks, sizes = MOE[topology]
    torchrun(
        ranks,
        "training.parity",
        tmp_path,
        models[model],
        *sizes,
        *cell.split("-"),
        "bfloat16",
        *options(topology),
    )
    check(load(tmp_path), load(single_parity(model, cell)), rounding(model, cell))


@pytest.mark.parametrize(
    ("model", "topology", "cell"),
    [pytest.param(*c, marks=GPU_MARKS[MOE[c[1]][0]], id="-".join(c)) for c in CELLS],
)
def test_on_gpus(
    model: str, topology: str, cell: str, models, rounding, single_parity, tmp_path: Path
) -> None:
    ranks, sizes = MOE[topology]
    run_on_gpus(
        ranks,
        "training.parity",
        tmp_path,
        models[model],
        *sizes,
        *cell.split("-"),
        "bfloat16",
        "cuda",
        *options(topology),
    )
    check(load(tmp_path), load(single_parity(model, cell)), rounding(model, cell))


def check(ours: dict[str, Any], fp32: dict[str, Any], rounding: dict[str, float]) -> None:
    """Each distance to fp32 is at most `TIMES_ROUNDING` that of one rank in bf16, and something was
    rounded at all.

    The loss is one number, in which rounding cancels more or less by luck: it may be as far off as
    a score is in the mean.
    """
    assert min(rounding.values()) > 0
    found = distances(ours, fp32)
    allowed = rounding | {"loss": max(rounding["loss"], rounding["nats"])}
    assert all(found[k] <= TIMES_ROUNDING * allowed[k] + 1e-4 for k in allowed), (found, allowed)
