"""Tinker's LoRA settings as splice's."""

from __future__ import annotations

import pytest
from tinker import types

from orchestrator.protocol.config import LoraConfig
from splice.tinker import adapters
from splice.tinker.refused import Refused

ALL = LoraConfig(rank=4)
WITH_HEAD = LoraConfig(rank=4, targets=("all-linear", "lm_head"))


def targets(ours: LoraConfig, **asked: bool) -> tuple[str, ...]:
    return adapters.wanted(types.LoraConfig(rank=2, **asked), ours).targets


def test_the_unembedding_has_an_adapter_where_the_runs_has_one() -> None:
    assert targets(WITH_HEAD) == ("all-linear", "lm_head")
    assert targets(WITH_HEAD, train_unembed=False) == ("all-linear",)
    assert targets(WITH_HEAD, train_mlp=False) == (*adapters.ATTENTION, "lm_head")
    assert targets(WITH_HEAD, train_attn=False, train_mlp=False) == ("lm_head",)
    assert targets(ALL) == ("all-linear",)
    assert targets(ALL, train_attn=False) == adapters.MLP


def test_nothing_to_train_is_refused() -> None:
    for ours, unembed in ((ALL, True), (WITH_HEAD, False)):
        with pytest.raises(Refused, match="nothing would train"):
            targets(ours, train_attn=False, train_mlp=False, train_unembed=unembed)


def test_weights_info() -> None:
    def seen(*targets: str) -> tuple[bool, ...]:
        found = adapters.info(LoraConfig(targets=targets))
        return tuple(found[f"train_{part}"] for part in ("attn", "mlp", "unembed"))

    assert seen("all-linear") == (True, True, False)
    assert seen(*adapters.ATTENTION, "lm_head") == (True, False, True)
    assert seen("lm_head") == (False, False, True)
    assert seen("all-linear", "lm_head") == (True, True, True)
