"""One rank of a check of layers' inputs in host memory: losses and gradients have the same bits as
with every activation kept, and as with every layer recomputed.

    ... -m tests.trainer_node.training.host_inputs OUT MODEL TENSOR PIPELINE EXPERT [FLAG ...]

Flags: `cuda`, on a GPU; `start`, also what a start measures.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import LossSpec
from tests.trainer_node.training.operations import take_gradients, whole_batch
from tests.trainer_node.worker import make_trainer, random_adapters
from trainer_node.model import layer_inputs
from trainer_node.ranks import host_memory
from trainer_node.training import pack_size
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


def check_start(trainer: Trainer, room_tokens: int) -> None:
    """What a start on a GPU measures, with real passes and peaks by hand: with room for half of the
    model's positions, the fourth kind of pass is measured, and its host memory.
    """
    peaks = {(0.0, False): 40, (1.0, False): 10, (1.0, True): 5}
    way, probe = (0.0, False), pack_size.probe

    def noting(trainer: Trainer, tokens: int, *, forward_only: bool = False, **chosen: Any) -> None:
        nonlocal way
        way = (chosen.get("share", 0.0), chosen.get("offload", False))
        probe(trainer, tokens, forward_only=forward_only, **chosen)

    def peak(_: Trainer, tokens: int, run: Callable[[int], None]) -> int:
        run(tokens)
        return peaks[way] * tokens

    trainer.forced_share, trainer.forced_offload = None, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_size, "probe", noting)
        patch.setattr(pack_size, "_peak", peak)
        patch.setattr(pack_size, "_room", lambda _: 10 * room_tokens)
        patch.setattr(pack_size, "_margin_bytes", lambda: 0.0)
        patch.setattr(host_memory, "room_bytes", lambda **_: 10**7)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        (found,) = trainer.memory = pack_size._measured(trainer)
        assert found.longest_without_offload == room_tokens
        if room_tokens >= trainer.model.max_length:
            assert found.offloaded is None
            return
        assert found.offloaded is not None
        assert found.offloaded.bytes_per_token == 5.0
        # Two layers and at most two hidden states of the norm, of 64 features each.
        assert 10**7 // (4 * 64 * 4) <= found.host_tokens <= 10**7 // (2 * 64 * 4)
        assert trainer.longest_trained == 2 * room_tokens
        assert trainer.longest_way == "with recompute = 'offload'"
        assert trainer.offloads(room_tokens + 1) and not trainer.offloads(room_tokens)
        patch.setattr(host_memory, "room_bytes", lambda **_: 10**5)
        (found,) = trainer.memory = pack_size._measured(trainer)
        assert found.offloaded is None, "the host has no room for a probe"
        assert trainer.longest_way == "with recompute = 'full'"
        trainer.model.config = trainer.model.config.model_copy(update={"recompute": "offload"})
        with pytest.raises(ConfigError, match=r"a rank may take 0\.0 GB, which hold"):
            pack_size._measured(trainer)
        patch.setattr(host_memory, "room_bytes", lambda **_: 10**7)
        (only,) = pack_size._measured(trainer)
        assert only.kept is only.recomputed is None
        assert only.pack_tokens == 2 * room_tokens // 256 * 256


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
    if "start" in sys.argv:
        trainer.model.hf_config.max_position_embeddings = 8192
        check_start(trainer, 8192)
        check_start(trainer, 4096)
    trainer.model.close()


if __name__ == "__main__":
    main()
