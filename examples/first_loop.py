"""Teach a tiny model to say "maybe": sample from vLLM, train with Megatron, publish, repeat."""

import os
from array import array
from statistics import fmean, pstdev

import httpx

from splice import InitialSyncJob, LossSpec, OptimParams, SpliceClient, TrainMergedJob, batch_specs

PROMPTS = [f"{verb} with yes or no or maybe:" for verb in ("Respond", "Answer", "Reply", "React")]
REWARDS = {" yes": 0.5, " no": 0.75, " maybe": 1.0}
SAMPLING = {"n": 16, "max_tokens": 1, "temperature": 1.0, "logprobs": 1, "return_token_ids": True}


def first_token(http, text):
    """The id of the text's first token."""
    body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
    return http.post("/tokenize", json=body).json()["tokens"][0]


def sample(http, prompt, rewards):
    """A group of rollouts: prompt tokens, answer tokens, the sampler's log-probs, reward."""
    body = {"model": "tiny", "prompt": prompt, "allowed_token_ids": list(rewards), **SAMPLING}
    reply = http.post("/v1/completions", json=body).raise_for_status().json()
    for choice in reply["choices"]:
        answer, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        yield choice["prompt_token_ids"], answer, logprobs, rewards[answer[0]]


def make_batch(groups):
    """Specs and raw buffers of a batch; a rollout's advantage is relative to its group."""
    tokens, lengths = array("i"), array("i")
    mask, advantages, logprobs = array("f"), array("f"), array("f")
    for group in groups:
        group_rewards = [reward for *_, reward in group]
        mean, spread = fmean(group_rewards), pstdev(group_rewards) + 1e-6
        for prompt, answer, sampler_logprobs, reward in group:
            no_loss = [0.0] * len(prompt)
            tokens.extend(prompt + answer)
            lengths.append(len(prompt) + len(answer))
            mask.extend(no_loss + [1.0] * len(answer))
            advantages.extend(no_loss + [(reward - mean) / spread] * len(answer))
            logprobs.extend(no_loss + sampler_logprobs)
    specs = batch_specs(num_sequences=len(lengths), num_tokens=len(tokens))
    return specs, [buffer.tobytes() for buffer in (tokens, lengths, mask, advantages, logprobs)]


client = SpliceClient(endpoint="tcp://127.0.0.1:25001", run_token=os.environ["SPLICE_RUN_TOKEN"])
with client, httpx.Client(base_url="http://127.0.0.1:25002", timeout=60) as http:
    print(client.run(InitialSyncJob())["alias"], "is served", flush=True)
    rewards = {first_token(http, text): reward for text, reward in REWARDS.items()}
    loss = LossSpec(name="grpo", allowed_token_ids=tuple(rewards))
    for _ in range(4):
        groups = [list(sample(http, prompt, rewards)) for prompt in PROMPTS]
        specs, buffers = make_batch(groups)
        job = TrainMergedJob(loss=loss, optim=OptimParams(lr=5e-3), tensors=specs)
        result = client.run(job, buffers=buffers)
        reward = fmean(reward for group in groups for *_, reward in group)
        print(f"mean reward {reward:.3f}, trained; now serving {result['alias']}", flush=True)
    client.stop_run()
