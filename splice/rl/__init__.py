"""The asynchronous RL loop: `docs/loop.md`.

from splice.rl import Loop, LoopConfig
"""

from splice.rl.config import LoopConfig, SamplingConfig
from splice.rl.loop import Loop, Reward, Rollout, SampleFailed, Step
from splice.rl.sampler import Row

__all__ = [
    "Loop",
    "LoopConfig",
    "Reward",
    "Rollout",
    "Row",
    "SampleFailed",
    "SamplingConfig",
    "Step",
]
