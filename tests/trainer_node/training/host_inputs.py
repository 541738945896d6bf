"""One rank of a check of layers' inputs in host memory: losses and gradients have the same bits as
with every activation kept, and as with every layer recomputed.

    ... -m tests.trainer_node.training.host_inputs OUT MODEL TENSOR PIPELINE EXPERT [cuda]
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state

from orchestrator.protocol.messages import LossSpec
from tests.trainer_node.training.operations import take_gradients, whole_batch
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.model import layer_inputs
from trainer_node.training.trainer import Trainer

SPECS = (LossSpec(name="dapo", entropy_bonus=0.05), LossSpec(name="cross_entropy"))
WAYS = {"kept": (0.0, False), "recomputed": (1.0, False), "offloaded": (1.0, True)}


def left_on_the_device(_module: object, _args: object, _output: object) -> None:
    """After a stage has run, none of its layers' inputs but the last is on the device."""
    inputs = [o for o in gc.get_objects() if type(o) is layer_inputs._Input]
    SEEN.append((len(inputs), sum(one._here is not None for one in inputs)))


SEEN: list[tuple[int, int]] = []


def measure(trainer: Trainer, way: tuple[float, bool]) -> tuple[list[float], list[dict], int]:
    """Losses, gradients, and the bytes that went to the host."""
    trainer.forced_share, trainer.forced_offload = way
    before, batch = trainer.model.layer_inputs.moved_bytes, whole_batch()
    losses, gradients = [], []
    for spec in SPECS:
        losses.append(trainer.forward_backward(batch, spec)[0].loss)
        gradients.append(take_gradients(trainer))
    return losses, gradients, trainer.model.layer_inputs.moved_bytes - before


def main() -> None:
    """See the module's docstring."""
    layer_inputs.CHUNK_BYTES = 100  # several pieces, and the last one shorter
    gpu = {"device": "cuda", "dtype": "bfloat16"} if "cuda" in sys.argv else {}
    trainer = make_trainer(Path(sys.argv[2]), *map(int, sys.argv[3:6]), **gpu)
    random_adapters(trainer)
    module = trainer.model.modules[0]
    module.register_forward_hook(left_on_the_device)
    found = {name: measure(trainer, way) for name, way in WAYS.items()}
    packs = trainer._cut(whole_batch())
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    element = torch.finfo(trainer.model.dtype).bits // 8
    per_layer = sum(packs.lengths) // ranks * trainer.model.provider.hidden_size * element
    least = per_layer * len(module.decoder.layers) * len(SPECS)
    assert found["kept"][2] == found["recomputed"][2] == 0
    # The final norm may save hidden states too: on a CPU two of them.
    more = found["offloaded"][2] - least
    assert 0 <= more <= 2 * per_layer * len(SPECS) * module.post_process, (more, least)
    assert max(count for count, _ in SEEN) >= len(module.decoder.layers)
    assert all(here <= 1 for _, here in SEEN), SEEN
    gc.collect()
    assert not any(type(o) is layer_inputs._Input for o in gc.get_objects())
    losses, gradients, _ = found["offloaded"]
    for name in ("kept", "recomputed"):
        if gpu:  # a GPU adds up gradients in any order
            for ours, theirs in zip(gradients, found[name][1], strict=True):
                for key, value in theirs.items():
                    assert (ours[key] - value).abs().max() <= 0.02 * value.abs().max(), key
            continue
        assert losses == found[name][0]
        for ours, theirs in zip(gradients, found[name][1], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    trainer.model.close()


if __name__ == "__main__":
    main()
