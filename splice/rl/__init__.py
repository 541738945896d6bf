"""The asynchronous RL loop: `docs/loop.md`.

from splice.rl import Loop, LoopConfig
"""

from splice.rl.config import LoopConfig, SamplingConfig
from splice.rl.loop import Loop
from splice.rl.parts import as_reward
from splice.rl.rewards import trl_reward
from splice.rl.rollouts import Rollout, SampleFailed
from splice.rl.sampler import RequestRefused, Row
from splice.rl.scoring import Reward
from splice.rl.steps import Step
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
    "as_reward",
    "trl_reward",
]
