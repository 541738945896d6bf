"""Tinker's LoRA settings as splice's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from tinker import types

from orchestrator.protocol.config import LM_HEAD, LoraConfig
from splice.tinker.refused import malformed, unsupported, wrong_value

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
"""Ends of the names of the linears that `train_attn` and `train_mlp` mean."""
MOST_RANK = 4096


def wanted(asked: types.LoraConfig | None, ours: LoraConfig) -> LoraConfig:
    """Return the adapter that a model asks for: the run's with another rank, or on fewer linears.

    `alpha` is the run's whatever the rank, as in Tinker. The unembedding has an adapter if the
    run's has one there.

    Raises:
        Refused: it would train nothing, or its rank or seed is not a valid one.
    """
    if asked is None:
        return ours
    if asked.rank > MOST_RANK:
        raise malformed(f"lora_config: rank is {asked.rank}; the most is {MOST_RANK}")
    if asked.seed is not None and not -(2**63) <= asked.seed < 2**63:
        raise malformed(f"lora_config: seed is {asked.seed}; it must fit into 64 bits")
    head = (LM_HEAD,) if asked.train_unembed and LM_HEAD in ours.targets else ()
    targets = tuple(t for t in ours.targets if t != LM_HEAD)
    if not (asked.train_attn and asked.train_mlp):
        targets = ATTENTION if asked.train_attn else MLP if asked.train_mlp else ()
    if not targets + head:
        raise unsupported(
            "lora_config: train_attn and train_mlp are false, and the unembedding gets no adapter: "
            f"the run's trainer.lora.targets are {', '.join(ours.targets)}, without {LM_HEAD}, or "
            "train_unembed is false too. So nothing would train"
        )
    update = {"rank": asked.rank, "targets": targets + head}
    try:
        return LoraConfig.model_validate(ours.model_dump() | update)
    except ValidationError as error:
        raise wrong_value("lora_config", error) from error


def info(lora: LoraConfig | None) -> dict[str, Any]:
    """Return what `weights_info` says of an adapter; None: all parameters train."""
    if lora is None:
        return {"is_lora": False, "lora_rank": None}
    return {
        "is_lora": True,
        "lora_rank": lora.rank,
        "train_attn": _has_other_than(MLP, lora),
        "train_mlp": _has_other_than(ATTENTION, lora),
        "train_unembed": LM_HEAD in lora.targets,
    }


def _has_other_than(linears: tuple[str, ...], lora: LoraConfig) -> bool:
    return bool(set(lora.targets) - {*linears, LM_HEAD})


def of_model(facts: Mapping[str, Any], ours: LoraConfig | None) -> LoraConfig | None:
    """Return a model's adapter. A model of an older server has the run's."""
    return ours if facts.get("lora") is None else LoraConfig.model_validate(facts["lora"])
