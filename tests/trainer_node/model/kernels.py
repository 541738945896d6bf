"""One rank: the check of attention kernels passes for each kind of layer, and refuses a wrong
gradient and NaN. The stand-in for TransformerEngine takes its place.

    torchrun ... -m tests.trainer_node.model.kernels MODEL    # its folder is named by the family
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.errors import ConfigError
from tests.trainer_node.worker import make_trainer
from trainer_node.backends import cudnn
from trainer_node.model import kernel_check
from trainer_node.model.kernel_check import Kind


class Wrong(torch.autograd.Function):
    """The same key, with another gradient."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return key.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


HAS: dict[str, Callable[[Kind], bool]] = {
    "gemma3": lambda kind: kind.window is not None and kind.groups < kind.heads,
    "gpt_oss": lambda kind: kind.has_sinks,
    "deepseek_v3": lambda kind: kind.width != kind.value_width,
}


def main() -> None:
    model = Path(sys.argv[1])
    trainer = make_trainer(model, 1, 1, 1, dtype="bfloat16")
    layers = kernel_check.layers_of(trainer.model)
    assert any(HAS[model.name](kind) for kind in layers)
    layer = list(layers.values())[-1]
    kernel_check.check(trainer.model)
    config = trainer.model.config
    fp32 = {"dtype": "float32"}
    contexts = {"parallel": config.parallel.model_copy(update={"context": 2})}
    for change in (fp32, contexts):  # without a single layer
        model = SimpleNamespace(config=config.model_copy(update=change), device=None)
        kernel_check.check(model)
    cudnn.version = lambda: "9.1.0"  # not installed here
    usual = layer._run_core_attention
    for factor in (1.1, float("nan")):
        layer._run_core_attention = lambda q, k, v, *args, by=factor, **kwargs: usual(
            q, Wrong.apply(k, by), v, *args, **kwargs
        )
        with pytest.raises(ConfigError, match=r"the key's gradient differs .* cuDNN 9\.1\.0"):
            kernel_check.check(trainer.model)

    def none(*args: object, **kwargs: object) -> None:
        raise ValueError("no backend")

    layer._run_core_attention = none
    with pytest.raises(ConfigError, match=r"no attention kernel for Kind.*no backend"):
        kernel_check.check(trainer.model)


if __name__ == "__main__":
    main()
