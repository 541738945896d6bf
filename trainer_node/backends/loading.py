"""Imports Megatron as a trainer's device and numerics want it, before anything else does."""

from __future__ import annotations

from orchestrator.protocol.config import Tier
from trainer_node.backends import megatron_import


def load(tier: Tier) -> None:
    """Import it. Safe to call twice.

    Raises:
        ConfigError: Megatron is imported already, for another tier; as `cudnn.load`.
    """
    if tier == "cpu":
        from trainer_node.backends import cpu_shims

        cpu_shims.apply()
        return
    if tier == "exact":
        from trainer_node.backends import cpu_te

        cpu_te.install()
    megatron_import.load()
