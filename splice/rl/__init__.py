"""The asynchronous RL loop: `docs/loop.md`.

from splice.rl import Loop, LoopConfig
"""

from splice.rl.config import LoopConfig, SamplingConfig
from splice.rl.loop import Loop, Reward, Rollout, SampleFailed, Step
from splice.rl.rewards import trl_reward
from splice.rl.sampler import RequestRefused, Row
from splice.rl.turns import Environment, Sample, Scored, Turn

__all__ = [
    "Environment",
    "Loop",
    "LoopConfig",
    "RequestRefused",
    "Reward",
    "Rollout",
    "Row",
    "Sample",
    "SampleFailed",
    "SamplingConfig",
    "Scored",
    "Step",
    "Turn",
    "trl_reward",
]
