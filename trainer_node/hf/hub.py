"""Fetches `TrainerConfig.model` by hub id, once on each host.

The host's local rank 0 fetches, and the other ranks wait with a deadline.

    "org/name" or "org/name@revision", where no such folder exists -> the snapshot's folder in the
    Hugging Face cache

HF_HUB_OFFLINE, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_TOKEN have huggingface_hub's meaning.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import HUB_ID, TrainerConfig
from trainer_node.ranks import objects, rendezvous

log = logging.getLogger("splice.trainer")
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
INDEX = "model.safetensors.index.json"


def is_hub_id(model: Path) -> bool:
    """Whether it names a hub's repository: it looks like one, and is no folder here."""
    return HUB_ID.match(str(model)) is not None and not model.exists()


def fetch(model: Path) -> Path:
    """Return the snapshot's folder. Download it if it is not in the cache.

    Raises:
        ConfigError: offline and not cached, no such repository, no network, or missing files. Says
            what to do.
    """
    from huggingface_hub import constants, snapshot_download

    match = HUB_ID.match(str(model))
    assert match is not None
    started = time.monotonic()
    try:
        folder = Path(
            # Offline, huggingface_hub 1 would ask the hub for a commit's list of files.
            snapshot_download(
                match["repo"],
                revision=match["revision"],
                allow_patterns=list(FILES),
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    except (OSError, ValueError) as error:
        why = (
            "HF_HUB_OFFLINE is set, and the model is not in the cache"
            if constants.HF_HUB_OFFLINE
            else str(error).partition("\n")[0]
        )
        raise ConfigError(
            f"{model} is not a local folder, and the Hub download failed: {why} (cache: "
            f"{constants.HF_HUB_CACHE}). Give a folder, or run "
            f"`hf download {match['repo']}` where there is a network"
        ) from error
    _check_whole(folder, model)
    log.info("%s is in %s (%.1f s)", model, folder, time.monotonic() - started)
    return folder


def _check_whole(folder: Path, model: Path) -> None:
    """A snapshot from an interrupted download has a folder, but not all files."""
    index = folder / INDEX
    wanted = {"config.json"}
    if index.is_file():
        wanted |= set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"the cached snapshot of {model} in {folder} has no {', '.join(missing)}; download it "
            "again"
        )


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
