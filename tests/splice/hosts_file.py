"""A run.toml whose roles are on several hosts."""

from __future__ import annotations

FILE = """
name = "tiny"
model = "model"
device = "cuda"
[orchestrator]
endpoint = "tcp://0.0.0.0:40001"
curve_dir = "keys/orchestrator"
[trainer]
gpus = [4, 5]
[trainer.parallel]
world_size = 4
[inference]
replicas = 3
tensor_parallel = 2
gpus = [0, 1, 2, 3, 4, 5]
"""
