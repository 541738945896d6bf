"""Fetches a model by Hub id into the Hugging Face cache.

    "org/name" or "org/name@revision", where no such folder exists -> the snapshot's folder

HF_HUB_OFFLINE, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_TOKEN have huggingface_hub's meaning.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import HUB_ID

log = logging.getLogger("splice.hub")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
FILES = (*SMALL_FILES, "*.safetensors")
INDEX = "model.safetensors.index.json"


def is_hub_id(model: Path) -> bool:
    """Whether it names a Hub repository: it looks like one, and no such folder exists here."""
    return HUB_ID.match(str(model)) is not None and not model.exists()


def fetch(model: Path, *, weights: bool = True) -> Path:
    """Return the snapshot's folder. Download it if it is not in the cache.

    Args:
        weights: False: config and tokenizer are enough.

    Raises:
        ConfigError: offline and not cached, no such repository, no network, or missing files. Says
            what to do.
    """
    try:
        from huggingface_hub import constants, snapshot_download
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{model} is not a local folder, and {sys.executable} has no huggingface_hub to "
            "download it with; give a folder, or install huggingface_hub there"
        ) from error
    match = HUB_ID.match(str(model))
    assert match is not None
    started = time.monotonic()
    try:
        folder = Path(
            # Offline, huggingface_hub 1 would ask the hub for a commit's list of files.
            snapshot_download(
                match["repo"],
                revision=match["revision"],
                allow_patterns=list(FILES if weights else SMALL_FILES),
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
    _check_whole(folder, model, weights=weights)
    log.info("%s is in %s (%.1f s)", model, folder, time.monotonic() - started)
    return folder


def _check_whole(folder: Path, model: Path, *, weights: bool) -> None:
    """A snapshot from an interrupted download has a folder, but not all files."""
    index = folder / INDEX
    wanted = {"config.json"}
    if weights and index.is_file():
        wanted |= set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"the cached snapshot of {model} in {folder} has no {', '.join(missing)}; download it "
            "again"
        )
