"""What a request is checked for before it is accepted."""

from __future__ import annotations

import re
from typing import Any

from tinker import types

from orchestrator.protocol.config import LM_HEAD, LoraConfig
from splice.tinker.adapters import of_model, wanted
from splice.tinker.books import Books
from splice.tinker.refused import malformed, unsupported

LONGEST_TTL_S = 100 * 365 * 86400
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Checks:
    """Compares requests with the run's adapter and with the models and checkpoints there are.

    Args:
        lora: the run's adapter; None: the run trains all parameters.
    """

    def __init__(self, books: Books, lora: LoraConfig | None) -> None:
        self._books, self._lora = books, lora

    def check_model(self, lora: types.LoraConfig | None, optimizer: str) -> dict[str, Any]:
        """Check what a new model asks for; returns its adapter and warnings.

        Raises:
            Refused: an unsupported optimizer, or a different adapter from the run's when that one
                is trained.
        """
        if optimizer != "adamw":
            raise unsupported(f"optimizer_config: {optimizer!r} is not supported; use adamw")
        if self._lora is None:
            return {"lora": None, "warnings": []}
        ours, found = self._lora, wanted(lora, self._lora)
        if found != ours and not self._books.fact("initial")["is_base"]:
            raise unsupported(
                f"lora_config: rank {found.rank} on {', '.join(found.targets)} is asked for, but "
                f"models start from this run's trained adapter, of rank {ours.rank} on "
                f"{', '.join(ours.targets)}; pass rank={ours.rank}, or start a new run"
            )
        warnings = []
        if lora is not None and lora.train_unembed and LM_HEAD not in found.targets:
            warnings.append(
                f"train_unembed: the unembedding gets no adapter, as {LM_HEAD} is not in the run's "
                "trainer.lora.targets"
            )
        return {"lora": found.model_dump(mode="json"), "warnings": warnings}

    def check_save(self, model_id: str, asked: types.SaveWeightsRequest) -> None:
        """Check a checkpoint's name.

        Raises:
            Refused: it is not a valid name, or it is taken.
        """
        check_name(asked.path)
        check_ttl(asked.ttl_seconds)
        path = f"tinker://{model_id}/weights/{asked.path}"
        if not asked.overwrite and self._books.find_checkpoint(path) is not None:
            raise malformed(f"checkpoint {path} exists; pass overwrite=True or another name")

    def check_load(self, path: str, model_id: str | None) -> None:
        """Check that weights can be loaded from a path, into a model or (None) into a new one.

        Raises:
            Refused: there is no such checkpoint, it is a sampler's, or its adapter differs from the
                model's.
        """
        checkpoint = self._books.checkpoint(path)
        model = None if model_id is None else self._books.find_model(model_id)
        if model is not None:
            saved = of_model(self._books.model(checkpoint["model_id"])["facts"], self._lora)
            present = of_model(model["facts"], self._lora)
            if saved is not None and present is not None and saved != present:
                raise unsupported(
                    f"{path} has an adapter of rank {saved.rank} on {', '.join(saved.targets)}, "
                    f"and {model_id} one of rank {present.rank} on {', '.join(present.targets)}; "
                    "make a model of it (create_training_client_from_state)"
                )
        if checkpoint["folder"] is None:
            raise unsupported(
                f"{path} is a sampler's checkpoint, which holds no trainer state; load one of "
                "save_state (tinker://.../weights/...)"
            )


def check_name(name: str | None) -> None:
    """Refuse anything that cannot be a checkpoint's name.

    Raises:
        Refused: characters other than letters, digits, `.`, `_` and `-`, or too many of them.
    """
    if name is not None and not NAME.fullmatch(name):
        raise malformed(
            f"the checkpoint name {name[:200]!r} must have 1 to 128 letters, digits, '.', '_' or "
            "'-', and begin with a letter or digit"
        )


def check_ttl(ttl_s: Any) -> None:
    """Refuse anything that cannot be a checkpoint's lifetime.

    Raises:
        Refused: it is not a number of seconds, or more than a hundred years.
    """
    if ttl_s is not None and (not isinstance(ttl_s, int) or not 1 <= ttl_s <= LONGEST_TTL_S):
        raise malformed(
            f"ttl_seconds is {str(ttl_s)[:50]}; send a number of seconds of at most {LONGEST_TTL_S}"
        )
