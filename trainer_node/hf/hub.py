"""Fetches `TrainerConfig.model` by hub id (`orchestrator.protocol.hub`), once on each host.

The host's local rank 0 fetches, and the other ranks wait with a deadline.
"""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.hub import fetch, is_hub_id
from trainer_node.ranks import objects, rendezvous


def with_local_model(config: TrainerConfig) -> TrainerConfig:
    """The config with a folder for a hub id; another config comes back as it is. A collective where
    it is a hub id.

    Raises:
        ConfigError: on every rank: a host could not fetch it, or not within
            `model_fetch_timeout_s`.
    """
    if not is_hub_id(config.model):
        return config
    if "RANK" not in os.environ:
        return config.model_copy(update={"model": fetch(config.model)})
    try:
        with rendezvous.patient_group(config, timeout_s=config.model_fetch_timeout_s) as group:
            found = objects.all_gather(_fetch_if_first(config.model), group=group)
    except RuntimeError as error:
        raise ConfigError(
            f"a host did not have {config.model} within model_fetch_timeout_s = "
            f"{config.model_fetch_timeout_s:.0f} s"
        ) from error
    host = os.environ.get("GROUP_RANK", "0")
    failed = [f"host {h}: {value}" for h, what, value in found if what == "error"]
    if failed:
        raise ConfigError("; ".join(failed))
    folders = [value for h, what, value in found if h == host and what == "folder"]
    return config.model_copy(update={"model": Path(folders[0])})


def _fetch_if_first(model: Path) -> tuple[str, str, str]:
    """(host, "folder" or "error" or "", path or text) of this rank."""
    host = os.environ.get("GROUP_RANK", "0")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return host, "", ""
    try:
        return host, "folder", str(fetch(model))
    except ConfigError as error:
        return host, "error", str(error)
