"""Train on an environment of OpenEnv, through the OpenEnv task set of verifiers.

python -m venv .venv-openenv
.venv-openenv/bin/pip install "verifiers[openenv]==0.4.0" openenv==0.4.1 -e .
splice up runs/openenv
cd examples/openenv
../../.venv-openenv/bin/python train.py ../../runs/openenv/run MODEL_FOLDER
"""

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from renderers import DefaultRendererConfig
from verifiers.v1.tasksets.openenv import OpenEnvEnvConfig

from splice import LossSpec, OptimParams
from splice.rl import Loop, LoopConfig, SamplingConfig
from splice.rl.verifiers import VerifiersEnvironment

START_S = 120


@contextlib.contextmanager
def serving_guesses():
    """OpenEnv's server with `guess_env`, in its own process; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url, number = f"http://127.0.0.1:{listening.getsockname()[1]}", listening.fileno()
        folder = str(Path(__file__).parent)
        argv = [sys.executable, "-m", "uvicorn", "guess_env:app", "--app-dir", folder]
        # OpenEnv 0.4.1 closes a session that is closed; uvicorn 0.54 logs a traceback for each.
        argv += ["--fd", str(number), "--log-level", "critical"]
        server = subprocess.Popen(argv, pass_fds=[number])
    try:
        # The socket listens already, so this request waits until the server has started.
        httpx.get(f"{url}/health", timeout=START_S, trust_env=False).raise_for_status()
        yield url
    finally:
        server.terminate()
        server.wait(timeout=START_S)


def environment_of(arguments, url):
    """The environment that verifiers itself would evaluate."""
    resets = [{"seed": seed} for seed in range(arguments.tasks)]
    config = OpenEnvEnvConfig.model_validate(
        {
            "taskset": {"id": "openenv", "base_url": url, "resets": resets},
            "player": {"harness": {"id": "chat_harness"}, "runtime": {"type": "subprocess"}},
        }
    )
    renderer = DefaultRendererConfig() if arguments.default_renderer else None
    return VerifiersEnvironment(config, tokenizer=arguments.model, renderer=renderer)


async def train(arguments, url):
    """Some steps."""
    config = LoopConfig(
        group_size=arguments.group_size,
        groups_per_step=arguments.groups,
        steps=arguments.steps,
        max_staleness=arguments.max_staleness,
        max_in_flight=arguments.sessions,
        on_error="drop",  # an answer that is JSON, but no action of the environment
        sampling=SamplingConfig(max_tokens=arguments.max_tokens),
    )
    async with environment_of(arguments, url) as environment:
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


def main(arguments):
    """Train on the server that is given, or on one of our own."""
    given = arguments.url
    with contextlib.nullcontext(given) if given else serving_guesses() as url:
        asyncio.run(train(arguments, url))


def arguments_of(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("model", help="folder or hub id, whose tokenizer renders the prompts")
    parser.add_argument("--url", help="a server of OpenEnv that runs; default: guess_env's own")
    parser.add_argument("--sessions", type=int, default=32, help="episodes at once on the server")
    parser.add_argument("--default-renderer", action="store_true", help="for an unknown model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=3, help="seeds of the environment")
    parser.add_argument("--groups", type=int, default=3, help="tasks in each step")
    parser.add_argument("--group-size", type=int, default=4, help="episodes of each task")
    parser.add_argument("--max-tokens", type=int, default=8, help="in each turn")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(arguments_of())
