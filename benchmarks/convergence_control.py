"""The control of `benchmarks.convergence`: warm start and RL in one process, by transformers, PEFT
and torch.optim only.

    python -m benchmarks.convergence_control warm-start --model DIR --out DIR
    python -m benchmarks.convergence_control run --model DIR --seed N --jobs N --out FILE.json

It samples from the very weights it trains and merges nothing, so it has no synchronisation that
could go wrong. Nothing of splice's trainer is used; the prompts, the rewards and the group-relative
advantages are `splice.smoke.rollouts`', because they are the task.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.protocol.config import LORA_TARGETS
from splice.client.advantages import group_advantages
from splice.smoke.rollouts import PROMPTS, REWARDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What merged mode and control have in common."""

    num_prompts: int = 12
    group_size: int = 8
    rank: int = 8
    alpha: float = 16.0
    lr: float = 1.5e-3
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    clip: float = 0.2
    kl_coefficient: float = 0.01
    temperature: float = 0.8


WARM_STEPS, WARM_LR = 60, 3e-3


def job_prompts(seed: int, job: int, count: int) -> list[str]:
    """The prompts of a job; the same for control and merged mode."""
    return random.Random(f"{seed}:{job}").sample(PROMPTS, k=count)


def answer_ids(tokenizer: Any) -> dict[int, float]:
    """First token of each answer -> its reward; any other token earns nothing."""
    return {
        tokenizer(f" {answer}", add_special_tokens=False)["input_ids"][0]: reward
        for answer, reward in REWARDS.items()
    }


def next_token_logprobs(
    model: Any, prompts: list[list[int]], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the token after each prompt, [P, V]; one prompt at a time, so that nothing is
    padded.
    """
    logits_PV = torch.stack(
        [model(input_ids=torch.tensor([p])).logits[0, -1].float() for p in prompts]
    )
    return (logits_PV / temperature).log_softmax(-1)


def warm_start(model_dir: Path, out: Path, *, seed: int = 0) -> None:
    """Full-parameter SFT until the model answers every prompt with yes, no or maybe, each as often;
    written as an HF checkpoint.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompts, answers_A = (
        [tokenizer(p)["input_ids"] for p in PROMPTS],
        torch.tensor(sorted(answer_ids(tokenizer))),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, weight_decay=0.0)
    for _ in range(WARM_STEPS):
        loss = -next_token_logprobs(model, prompts)[:, answers_A].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    out.mkdir(parents=True, exist_ok=True)
    for path in model_dir.iterdir():
        shutil.copy(path, out / path.name)
    names = load_file(model_dir / "model.safetensors").keys()
    state = model.state_dict()
    save_file(
        {n: state[n].contiguous().clone() for n in names},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    with torch.no_grad():
        mass = next_token_logprobs(model, prompts)[:, answers_A].exp().sum(-1).min()
    print(f"{out}: least probability of yes, no or maybe {mass:.3f}")


def run(model_dir: Path, *, seed: int, jobs: int, task: Task) -> list[dict[str, float]]:
    """Sample, score, step, `jobs` times; a row for each job, measured before its step."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(
        r=task.rank, lora_alpha=task.alpha, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(base, lora)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=task.lr, betas=(task.beta1, task.beta2), eps=1e-8, weight_decay=0.0
    )
    rewards, rows = answer_ids(tokenizer), []
    for job in range(1, jobs + 1):
        prompts = [tokenizer(p)["input_ids"] for p in job_prompts(seed, job, task.num_prompts)]
        with torch.no_grad():
            sampled_PV = next_token_logprobs(model, prompts, temperature=task.temperature)
            answers_PG = torch.multinomial(sampled_PV.exp(), task.group_size, replacement=True)
            old_PG = sampled_PV.gather(1, answers_PG)
            with model.disable_adapter():
                reference_PG = next_token_logprobs(
                    model, prompts, temperature=task.temperature
                ).gather(1, answers_PG)
        earned = [[rewards.get(t, 0.0) for t in row] for row in answers_PG.tolist()]
        advantages_PG = torch.tensor([group_advantages(row) for row in earned])
        logp_PG = next_token_logprobs(model, prompts, temperature=task.temperature).gather(
            1, answers_PG
        )
        ratio_PG = (logp_PG - old_PG).exp()
        clipped_PG = ratio_PG.clamp(1 - task.clip, 1 + task.clip)
        surrogate = torch.minimum(ratio_PG * advantages_PG, clipped_PG * advantages_PG)
        # The k3 estimator: http://joschu.net/blog/kl-approx.html
        kl_PG = (reference_PG - logp_PG).exp() - (reference_PG - logp_PG) - 1
        loss = (-surrogate + task.kl_coefficient * kl_PG).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, task.max_grad_norm)
        optimizer.step()
        rows.append(
            {
                "reward": sum(map(sum, earned)) / answers_PG.numel(),
                "kl": float(kl_PG.detach().mean()),
                "logprob_gap": float((logp_PG - old_PG).detach().abs().max()),
            }
        )
    return rows


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["warm-start", "run"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "warm-start":
        warm_start(arguments.model, arguments.out, seed=arguments.seed)
        return
    rows = run(arguments.model, seed=arguments.seed, jobs=arguments.jobs, task=Task())
    arguments.out.write_text(
        json.dumps({"task": asdict(Task()), "seed": arguments.seed, "jobs": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
