"""Teach a tiny model to say "maybe": sample from vLLM, train with Megatron, publish, repeat.

It continues where an earlier start of it ended, because the run knows its version.
"""

import sys
from statistics import fmean

import httpx

from splice import ASK, LossSpec, OptimParams, SpliceClient, completions_of, grpo_batch

PROMPTS = [f"{verb} with yes or no or maybe:" for verb in ("Respond", "Answer", "Reply", "React")]
REWARDS = {" yes": 0.5, " no": 0.75, " maybe": 1.0}
STEPS, EVALUATE_EVERY = 4, 2


def first_token(http, text):
    """The id of the text's first token."""
    body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
    return http.post("/tokenize", json=body).json()["tokens"][0]


def answers(http, prompt, rewards, **sampling):
    """Sampled answers to a prompt, each with its reward."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "allowed_token_ids": list(rewards)}
    reply = http.post("/v1/completions", json={**body, **ASK, **sampling}).raise_for_status()
    return [(answer, rewards[answer.answer_ids[0]]) for answer in completions_of(reply.json())]


def mean_reward(groups):
    """Over all answers to all prompts."""
    return fmean(reward for group in groups for _, reward in group)


with SpliceClient.of_run(sys.argv[1]) as client:
    status = client.status()
    with httpx.Client(base_url=client.base_url(), timeout=60, trust_env=False) as http:
        rewards = {first_token(http, text): reward for text, reward in REWARDS.items()}
        loss = LossSpec(name="grpo", allowed_token_ids=tuple(rewards))
        for step in range(status.version + 1, STEPS + 1):
            groups = [answers(http, p, rewards, n=16, temperature=1.0) for p in PROMPTS]
            result = client.train_merged(grpo_batch(groups), loss, OptimParams(lr=5e-3))
            print(f"mean reward {mean_reward(groups):.3f}, now serving {result.alias}", flush=True)
            if step % EVALUATE_EVERY == 0:
                best = [answers(http, prompt, rewards, temperature=0.0) for prompt in PROMPTS]
                saved = client.save_checkpoint(f"saved/{step}", client_state={"step": step})
                print(
                    f"greedy {mean_reward(best):.3f}, saved in {saved.checkpoint_dir}", flush=True
                )
