"""A user's program with only Tinker's SDK; it runs in the SDK's own environment.

python sdk_user.py PART prints one JSON line of facts for the test to judge.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings

import numpy as np
import tinker
from tinker import types

warnings.simplefilter("ignore")
PROMPT = [5, 17, 33, 101, 7, 9, 44, 12]
ANSWER = [3, 40, 41, 42]
WANTED = range(100, 200)
MODEL, RANK = "tiny", 4


def sft_datum(weights: list[float] | None = None) -> types.Datum:
    """Prompt and answer, as cookbook's SFT cuts them; the answer carries loss."""
    tokens = PROMPT + ANSWER
    given = [0.0] * (len(PROMPT) - 1) + (weights or [1.0] * len(ANSWER))
    inputs = {"target_tokens": tokens[1:], "weights": given}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rl_datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float):
    pad = [0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": pad + tokens,
            "logprobs": [float(p) for p in pad] + logprobs,
            "advantages": [float(p) for p in pad] + [advantage] * len(tokens),
        },
    )


def trainer_of(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=MODEL, rank=RANK).result()


def sft(service: tinker.ServiceClient) -> dict:
    """Losses fall, and the served log-probs are the trainer's."""
    client, losses = trainer_of(service), []
    fresh = logprobs_of(client)
    for _ in range(6):
        passed = client.forward_backward([sft_datum(), sft_datum()], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        metrics = stepped.result().metrics
    ours = client.forward([sft_datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    sampler = client.save_weights_and_get_sampling_client().result()
    served = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT + ANSWER)).result()
    gap = np.abs(np.array(served[1:]) - ours.to_numpy()).max()
    base = service.create_sampling_client(base_model=MODEL).result()
    return {
        "losses": losses,
        "gap": float(gap),
        "grad_norm": metrics["grad_norm"],
        "fresh": fresh,
        "base": base.compute_logprobs(types.ModelInput.from_ints(PROMPT + ANSWER)).result()[1:],
    }


def rl(service: tinker.ServiceClient) -> dict:
    """A loop with importance sampling; rewards rise, and trainer and sampler agree."""
    client, rewards, gaps = trainer_of(service), [], []
    prompts = [[3, 395, 1, 4, 20 + i] for i in range(8)]
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=7)
    for _ in range(6):
        sampler = client.save_weights_and_get_sampling_client().result()
        asked = [sampler.sample(types.ModelInput.from_ints(p), 8, params) for p in prompts]
        data, sampled, all_rewards = [], [], []
        for prompt, future in zip(prompts, asked, strict=True):
            group = future.result().sequences
            found = [float(np.mean([t in WANTED for t in s.tokens])) for s in group]
            all_rewards += found
            for sequence, reward in zip(group, found, strict=True):
                advantage = reward - float(np.mean(found))
                data.append(rl_datum(prompt, sequence.tokens, sequence.logprobs, advantage))
                sampled.append(sequence.logprobs)
        passed = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        outputs = passed.result().loss_fn_outputs
        trained = [o["logprobs"].to_numpy()[len(prompts[0]) - 1 :] for o in outputs]
        gaps.append(max(np.abs(a - b).max() for a, b in zip(trained, sampled, strict=True)))
        rewards.append(float(np.mean(all_rewards)))
    return {"rewards": rewards, "gap": float(max(gaps))}


def logprobs_of(client: tinker.TrainingClient) -> list[float]:
    passed = client.forward([sft_datum()], "cross_entropy").result()
    return passed.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()


def state(service: tinker.ServiceClient) -> dict:
    """Save, step on, come back; with the optimizer and without; sample from a named snapshot."""
    client = trainer_of(service)

    def step() -> None:
        client.forward_backward([sft_datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    fresh = logprobs_of(client)
    step()
    path = client.save_state("one").result().path
    saved = logprobs_of(client)
    step()
    went_on = logprobs_of(client)
    snapshot = client.save_weights_for_sampler("two").result().path
    sampler = service.create_sampling_client(model_path=snapshot).result()
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    greedy = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params).result()
    client.save_state("two").result()
    client = service.create_training_client_from_state_with_optimizer(path).result()
    loaded = logprobs_of(client)
    step()
    again = logprobs_of(client)
    client.save_state("three").result()
    client = service.create_training_client_from_state(path).result()
    rest = tinker.RestClient()
    runs = rest.list_training_runs().result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    return {
        "fresh": fresh,
        "saved": saved,
        "went_on": went_on,
        "loaded": loaded,
        "again": again,
        "weights_alone": logprobs_of(client),
        "greedy": [s.tokens for s in greedy.sequences],
        "sequence_ids": [s.sequence_id for s in greedy.sequences],
        "base_of_sampler": sampler.get_base_model(),
        "num_runs": len(runs.training_runs),
        "checkpoints": [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints],
        "info": [info.base_model, info.lora_rank],
    }


def publishing(service: tinker.ServiceClient) -> dict:
    """A step with a publication between its gradients and itself, and the same without."""
    paths = []
    for publishes in (True, False):
        client = trainer_of(service)
        client.forward_backward([sft_datum()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        client.forward_backward([sft_datum([1.0, -0.5, 0.25, 2.0])], "cross_entropy").result()
        if publishes:
            client.save_weights_and_get_sampling_client().result()
        client.forward_backward([sft_datum()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        paths.append(client.save_state(f"publishes-{publishes}").result().path)
    return {"paths": paths}


def adapters(service: tinker.ServiceClient) -> dict:
    """Models of other adapters than the run's, each trained and served; one comes back."""
    gaps, trained, paths = [], [], []
    prompt = types.ModelInput.from_ints(PROMPT + ANSWER)
    for more in ({"rank": 9}, {"rank": 2, "train_mlp": False}, {"rank": 3, "train_attn": False}):
        client = service.create_lora_training_client(base_model=MODEL, **more).result()
        fresh = logprobs_of(client)
        for _ in range(2):
            client.forward_backward([sft_datum()], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        ours = logprobs_of(client)
        sampler = client.save_weights_and_get_sampling_client().result()
        served = sampler.compute_logprobs(prompt).result()[1:]
        gaps.append(float(np.abs(np.array(served) - np.array(ours)).max()))
        trained.append(float(np.abs(np.array(fresh) - np.array(ours)).max()))
        paths.append(client.save_state("it").result().path)
        if len(paths) == 1:
            wide = ours
    back = service.create_training_client_from_state_with_optimizer(paths[0]).result()
    sampler = back.save_weights_and_get_sampling_client().result()
    served = sampler.compute_logprobs(prompt).result()[1:]
    gaps.append(float(np.abs(np.array(served) - np.array(wide)).max()))
    info = tinker.RestClient().get_weights_info_by_tinker_path(paths[1]).result()
    return {
        "gaps": gaps,
        "trained": trained,
        "back": logprobs_of(back) == wide,
        "info": [info.lora_rank, info.train_attn, info.train_mlp],
        "rank": back.get_info().model_data.lora_rank
        if hasattr(back.get_info().model_data, "lora_rank")
        else back.get_info().lora_rank,
    }


def custom(service: tinker.ServiceClient) -> dict:
    """A loss of the user's own, with the same gradient as a weighted cross_entropy."""
    weights = [1.0, -0.5, 0.25, 2.0]
    full = [0.0] * (len(PROMPT) - 1) + weights

    def loss(data, logprobs):
        total = -sum((lp * lp.new_tensor(full)).sum() for lp in logprobs)
        return total, {"mine": total.item()}

    found = {}
    for name in ("custom", "cross_entropy"):
        client = trainer_of(service)
        if name == "custom":
            passed = client.forward_backward_custom([sft_datum(), sft_datum()], loss)
        else:
            passed = client.forward_backward([sft_datum(weights), sft_datum(weights)], name)
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        found[name] = passed.result().metrics
        found[f"{name}_after"] = logprobs_of(client)
        client.save_state(name).result()
    return found


def inflight(service: tinker.ServiceClient) -> dict:
    """One sampler continues over publications; a snapshot is refused once it is old."""
    client = trainer_of(service)
    params = types.SamplingParams(max_tokens=4, temperature=1.0)
    prompt = types.ModelInput.from_ints(PROMPT)
    snapshot = client.save_weights_and_get_sampling_client().result()
    before = snapshot.sample(prompt, 2, params).result()
    scored = snapshot.compute_logprobs(prompt).result()[1:]
    following = client.save_weights_and_get_sampling_client(kind="inflight").result()
    lengths, why = [], ""
    for _ in range(2):
        client.forward_backward([sft_datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        client.save_weights_and_get_sampling_client(kind="inflight").result()
        lengths += [len(s.tokens) for s in following.sample(prompt, 2, params).result().sequences]
    try:
        snapshot.sample(prompt, 1, params).result()
    except tinker.RequestFailedError as error:
        why = str(error)
    return {
        "before": len(before.sequences),
        "lengths": lengths,
        "why": why,
        "scored": scored,
        "scored_later": snapshot.compute_logprobs(prompt).result()[1:],
        "sampler": following._sampling_session_id,
    }


def again(service: tinker.ServiceClient) -> dict:
    """Two snapshots and the base model take turns, while the trainer continues where it was."""
    client = trainer_of(service)
    prompt = types.ModelInput.from_ints(PROMPT + ANSWER)
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    found: dict = {"scores": [], "again": [], "answers": []}
    samplers = []
    for _ in range(2):
        client.forward_backward([sft_datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        samplers.append(client.save_weights_and_get_sampling_client().result())
        found["scores"].append(samplers[-1].compute_logprobs(prompt).result()[1:])
    path = client.save_state("before").result().path
    for _ in range(2):
        asked = [sampler.compute_logprobs(prompt) for sampler in samplers]
        found["again"].append([future.result()[1:] for future in asked])
    base = service.create_sampling_client(base_model=MODEL).result()
    asked = [s.sample(prompt, 1, greedy) for s in (samplers[0], base, samplers[1])]
    found["answers"] = [[list(s.tokens) for s in f.result().sequences] for f in asked]
    found["trainer"] = logprobs_of(client)
    client.forward_backward([sft_datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    found["went_on"] = logprobs_of(client)
    client.load_state_with_optimizer(path).result()
    found["trainer_before"] = logprobs_of(client)
    client.forward_backward([sft_datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    found["went_on_before"] = logprobs_of(client)
    return found


def refused(service: tinker.ServiceClient) -> dict:
    """What the SDK's user reads."""
    said = {}
    for name, ask in {
        "linears": lambda: service.create_lora_training_client(
            MODEL, rank=64, train_attn=False, train_mlp=False
        ).result(),
        "model": lambda: service.create_lora_training_client("Qwen/Qwen3-8B", rank=RANK).result(),
        "loss": lambda: trainer_of(service).forward_backward([sft_datum()], "dro").result(),
        "path": lambda: service.create_sampling_client("tinker://a/sampler_weights/b").result(),
    }.items():
        try:
            ask()
        except tinker.APIStatusError as error:
            said[name] = [error.status_code, str(error)]
    return said


def hold(service: tinker.ServiceClient) -> dict:
    """Leave gradients behind, and wait for the end."""
    client = trainer_of(service)
    snapshot = client.save_weights_for_sampler("held").result().path
    client.forward_backward([sft_datum()], "cross_entropy").result()
    print(json.dumps({"holding": snapshot}), flush=True)
    time.sleep(600)
    return {}


def sample(service: tinker.ServiceClient) -> dict:
    """Sample from the snapshot that stdin names until another line comes, then train."""
    sampler = service.create_sampling_client(model_path=sys.stdin.readline().strip()).result()
    params = types.SamplingParams(max_tokens=2)
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ends.set()), daemon=True).start()
    count = 0
    while not ends.is_set():
        count += len(
            sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params).result().sequences
        )
        print(json.dumps({"sampled": count}), flush=True)
    client = trainer_of(service)
    passed = client.forward_backward([sft_datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return {"loss": passed.result().metrics["loss:sum"]}


_ALL = (sft, rl, state, publishing, adapters, custom, inflight, again, refused, hold, sample)
PARTS = {part.__name__: part for part in _ALL}

if __name__ == "__main__":
    client = tinker.ServiceClient()
    print(json.dumps(PARTS[sys.argv[1]](client)), flush=True)
    client.close("success").result()
