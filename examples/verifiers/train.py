"""Train on an environment of verifiers.

python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.0 -e .
splice up runs/verifiers
cd examples/verifiers
../../.venv-verifiers/bin/python train.py ../../runs/verifiers/run MODEL_FOLDER
"""

import argparse
import asyncio
from pathlib import Path

import verifiers.v1 as vf
from renderers import DefaultRendererConfig

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SamplingConfig
from splice.rl.verifiers import VerifiersEnvironment


def environment_of(arguments):
    """The environment that verifiers itself would evaluate."""
    config = vf.SingleAgentEnvConfig.model_validate(
        {
            "taskset": {"id": arguments.taskset},
            "agent": {"runtime": {"type": "subprocess"}},
        }
    )
    renderer = DefaultRendererConfig() if arguments.default_renderer else None
    return VerifiersEnvironment(config, tokenizer=arguments.model, renderer=renderer)


async def main(arguments):
    """Some steps."""
    config = LoopConfig(
        group_size=arguments.group_size,
        groups_per_step=arguments.groups,
        steps=arguments.steps,
        max_staleness=arguments.max_staleness,
        sampling=SamplingConfig(max_tokens=arguments.max_tokens),
    )
    async with environment_of(arguments) as environment:
        async with Loop.of_run(
            arguments.run_dir,
            prompts=environment.rows(),
            environment=environment.rollout,
            config=config,
            loss=LossSpec(name="truncated_importance_sampling"),
            optim=OptimParams(lr=arguments.lr),
        ) as loop:
            async for step in loop:
                reward, gap = step.metrics["reward_mean"], step.metrics["logprob_gap_max"]
                print(f"step {step.number}: reward {reward:.3f}, gap {gap:.2e}", flush=True)


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("model", help="folder or hub id, whose tokenizer renders the prompts")
    parser.add_argument("--taskset", default="echo_taskset", help="a module, or a package")
    parser.add_argument("--default-renderer", action="store_true", help="for an unknown model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=3, help="tasks in each step")
    parser.add_argument("--group-size", type=int, default=4, help="episodes of each task")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main(arguments_of()))
