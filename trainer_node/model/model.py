"""One rank's model, as `build` makes it, for training, exports and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from trainer_node.adapters.lora import AdapterSet
from trainer_node.adapters.rounding import Rounding
from trainer_node.hf.checkpoint import HfCheckpoint
from trainer_node.layout.pieces import TrainedParam
from trainer_node.model.experts import StackedExperts
from trainer_node.model.layer_inputs import LayerInputs
from trainer_node.ranks import topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class Model:
    """Megatron's modules with their adapters, and the process groups of all ranks. Use `close` at
    the end.

    Only `trainable.adapt` changes it: `adapters`, `params`, `num_parameters` and `config.lora`.
    """

    config: TrainerConfig
    hf_config: Any
    device: torch.device
    control_group: Any
    """gloo group for requests, outcomes and plans."""
    saving_group: Any
    """gloo group for saves in the background, which only their thread uses."""
    gather_group: Any
    """Group for the pieces of weights that go to rank 0 (`gathering`), with its own deadlines."""
    provider: Any
    """Megatron's transformer config."""
    bridge: Any
    """Bridge's mapping between Megatron's parameters and HF's tensors."""
    checkpoint: HfCheckpoint
    modules: list[Any]
    """Megatron's model on this rank, in a list as Megatron and Bridge require."""
    head: Any
    """Module whose output layer makes logits. Only the last pipeline stage has that layer."""
    routers: list[Any]
    """Routers of this rank's MoE layers."""
    conversion_tasks: list[Any]
    """Bridge's tasks: for each parameter of the whole model, its HF tensors."""
    adapters: AdapterSet
    params: list[TrainedParam]
    """Trained parameters: the adapters, or all with finetuning_type "full"; and the value head."""
    experts: list[StackedExperts]
    """Layers whose experts are stacked; empty: the experts are Megatron's, or there are none."""
    layer_inputs: LayerInputs
    """Where the inputs of recomputed layers are until the backward pass."""
    num_parameters: int
    """Trainable elements of the whole model."""
    fallbacks: dict[str, str]
    """Parts that run slower than they could -> what they do instead, and why."""
    sharing_obstacle: str | None
    """Why prefixes are computed for each sequence; None: those that sequences share, once."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return DTYPES[self.config.dtype]

    @property
    def trains_all(self) -> bool:
        """Whether the model's own parameters train, without adapters."""
        return self.config.finetuning_type == "full"

    @property
    def value_head(self) -> torch.Tensor | None:
        """This rank's part of the value head; None: there is none, or on another stage."""
        return next((p.param for p in self.params if p.is_value), None)

    def need_value_head(self) -> None:
        """Raise ConfigError if the trainer has no value head."""
        if not self.config.value_head:
            raise ConfigError(
                "loss.value needs a value head, and this trainer has none; set "
                "trainer.value_head = true, and start the trainer again"
            )

    def need_adapters(self, what: str) -> None:
        """Raise ConfigError in full-parameter training, where `what` needs adapters."""
        if self.trains_all:
            raise ConfigError(
                f"{what} needs adapters, and this trainer has none: it was started with "
                "finetuning_type = 'full'"
            )

    @property
    def vocab_size(self) -> int:
        """The HF vocabulary's size, without Megatron's padding."""
        return int(self.provider.vocab_size)

    @property
    def max_length(self) -> int:
        """Longest sequence the model knows positions for."""
        return int(self.hf_config.get_text_config().max_position_embeddings)

    @property
    def rounding(self) -> Rounding:
        """How the present weights are merged."""
        return self.adapters.rounding

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.config.lora.alpha / self.config.lora.rank

    def exported(self, tasks: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor) of conversion tasks by Bridge's export, without adapters. A
        collective."""
        pairs: Iterator[tuple[str, torch.Tensor]] = self.bridge.stream_weights_megatron_to_hf(
            self.modules,
            self.checkpoint,
            cpu=False,
            show_progress=False,
            conversion_tasks=tasks,
            merge_adapter_weights=False,
        )
        return pairs

    def close(self) -> None:
        """Leave the process groups. Safe to call twice."""
        topology.leave()
