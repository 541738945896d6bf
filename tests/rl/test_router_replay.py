"""Router replay: vLLM's experts in the batch, and in the trainer's routers."""

from __future__ import annotations

import array
import asyncio
import base64
import io
from dataclasses import replace

import numpy as np
import pytest

from splice import Completion, LossSpec, OptimParams, grpo_batch
from splice.client.batches import Routing
from splice.rl import Loop, LoopConfig, SamplingConfig
from splice.rl.routing import routing_of
from tests.rl.conftest import tiny_cluster
from tests.rl.stand_in import Server, StandIn

LOSS = LossSpec(name="truncated_importance_sampling")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_vllms_array_is_read(dtype):
    given = np.arange(30, dtype=dtype).reshape(5, 3, 2)
    with io.BytesIO() as file:
        np.save(file, given)
        found = routing_of(base64.b64encode(file.getvalue()).decode())
    assert (found.layers, found.top_k, len(found)) == (3, 2, 5)
    assert list(found.experts) == list(range(30)) and list(found.rows(1, 2)) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("wrong", [b"no array", np.zeros((2, 3), np.uint8), np.zeros((1, 1, 1))])
def test_another_format_is_refused(wrong):
    with io.BytesIO() as file:
        file.write(wrong) if isinstance(wrong, bytes) else np.save(file, wrong)
        text = base64.b64encode(file.getvalue()).decode()
    with pytest.raises(ValueError, match="routed experts are"):
        routing_of(text)


def of(batch, name):
    place = [spec.name for spec in batch.specs].index(name)
    spec = batch.specs[place]
    return np.frombuffer(batch.buffers[place], spec.dtype).reshape(spec.shape)


def test_two_turns_of_the_loop_bring_every_tokens_experts(tmp_path):
    """Prompt, answers and tool alike; the last token, which no layer has seen, repeats a row."""
    batches = []

    async def two_turns(row, sample) -> float:
        first = await sample(row["prompt"])
        second = await sample([*first.token_ids, 301], max_tokens=3)
        return float(second.completion.answer_ids[0])

    def make_batch(groups):
        batches.append(grpo_batch(groups))
        return batches[-1]

    async def run(routes: bool) -> None:
        stand_in = StandIn()
        server = await Server(stand_in).start()
        server.routes = routes
        config = LoopConfig(
            steps=1,
            group_size=2,
            groups_per_step=1,
            router_replay=True,
            sampling=SamplingConfig(max_tokens=4, seed=1),
        )
        rows = [{"prompt": [9, 8, 7]}]
        options = {"environment": two_turns, "config": config, "make_batch": make_batch}
        try:
            async with Loop(stand_in, tmp_path, prompts=rows, **options) as loop:
                async for _ in loop:
                    pass
        finally:
            server.kill()

    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        asyncio.run(run(routes=False))
    asyncio.run(run(routes=True))
    (batch,) = batches
    tokens, experts = of(batch, "tokens"), of(batch, "routed_experts")
    assert experts.shape == (2 * 11, 2, 2)
    expected = np.where(np.arange(22) % 11 == 10, np.roll(tokens, 1), tokens) % 251
    assert (experts[:, :, 0] == expected[:, None]).all() and (experts[:, :, 1] == [0, 1]).all()


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}}, {"user": "x"}])
def test_fields_that_vllms_route_would_drop_are_refused(tmp_path, fields):
    async def run() -> None:
        stand_in = StandIn()
        server = await Server(stand_in).start()
        config = LoopConfig(steps=1, router_replay=True, sampling=SamplingConfig(extra=fields))
        rows = [{"prompt": [9, 8, 7]}]
        try:
            options = {"reward": lambda row, said: 1.0, "config": config}
            async with Loop(stand_in, tmp_path, prompts=rows, **options) as loop:
                async for _ in loop:
                    pass
        finally:
            server.kill()

    with pytest.raises(ValueError, match=f"ignores .'{next(iter(fields))}'"):
        asyncio.run(run())


def test_a_conversation_is_encoded_with_its_tools(tmp_path):
    """The route of token ids has no template, so /tokenize must get all that the template reads."""
    tools = [{"type": "function", "function": {"name": "add"}}]

    async def run() -> list[dict]:
        stand_in = StandIn()
        server = await Server(stand_in).start()
        sampling = SamplingConfig(max_tokens=2, extra={"tools": tools, "top_k": 5})
        config = LoopConfig(
            steps=1, group_size=2, groups_per_step=1, router_replay=True, sampling=sampling
        )
        rows = [{"messages": [{"role": "user", "content": "2 + 3"}]}]
        try:
            options = {"reward": lambda row, said: 1.0, "config": config}
            async with Loop(stand_in, tmp_path, prompts=rows, **options) as loop:
                async for _ in loop:
                    pass
        finally:
            server.kill()
        return server.asked

    asked = asyncio.run(run())
    encoded = next(body for body in asked if "tools" in body)
    generated = next(body for body in asked if "sampling_params" in body)
    assert encoded["tools"] == tools
    assert (
        "tools" not in generated["sampling_params"] and generated["sampling_params"]["top_k"] == 5
    )


def test_some_routings_are_not_enough():
    routing = Routing(experts=array.array("i", [0, 1] * 2), layers=1, top_k=2)
    with_it = Completion(prompt_ids=(1, 2), answer_ids=(3,), logprobs=(-1.0,), routing=routing)
    without = replace(with_it, routing=None)
    with pytest.raises(ValueError, match="1 of 2 sequences have no routed experts"):
        grpo_batch([[(with_it, 1.0), (without, 0.0)]])
    longer = replace(with_it, answer_ids=(3, 4), logprobs=(-1.0, -1.0))
    with pytest.raises(ValueError, match="4 tokens has routed experts of only 2"):
        grpo_batch([[(longer, 1.0), (longer, 0.0)]])


def chosen_experts(model_folder, completion) -> Routing:
    """What transformers' routers choose; they share no code with the trainer's."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = torch.tensor([[*completion.prompt_ids, *completion.answer_ids]])
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    experts = torch.stack([layer.topk(top_k).indices for layer in logits], dim=1)[:-1]
    return Routing(
        experts=array.array("i", experts.flatten().tolist()), layers=len(logits), top_k=top_k
    )


@pytest.mark.timeout(600)
def test_the_trainer_uses_the_experts(models, tmp_path):
    """The sampler's own experts keep the gap at rounding; other experts open it."""
    folder = models["qwen3_moe"]

    async def sampled(cluster):
        config = LoopConfig(sampling=SamplingConfig(max_tokens=12, extra={"ignore_eos": True}))
        rows = [{"prompt": [5 + k, 17, 33, 101]} for k in range(4)]
        async with Loop(
            cluster.client, tmp_path, prompts=rows, reward=lambda r, c: 0.0, config=config
        ) as loop:
            return [answer for (answer,) in await loop.sample(rows, temperature=1.0)]

    def gap(client, answers) -> float:
        batch = grpo_batch([[(answer, float(k % 2)) for k, answer in enumerate(answers)]])
        return client.forward_backward(batch, LOSS).metrics["logprob_gap_max"]

    with tiny_cluster(folder, tmp_path / "run") as cluster:
        answers = asyncio.run(sampled(cluster))
        right = [replace(a, routing=chosen_experts(folder, a)) for a in answers]
        wrong = [
            replace(
                a,
                routing=replace(
                    a.routing, experts=array.array("i", [0, 1] * (len(a.routing.experts) // 2))
                ),
            )
            for a in right
        ]
        gaps = [gap(cluster.client, batch) for batch in (answers, right, wrong)]
        cluster.client.optim_step(OptimParams())
    assert gaps[0] < 1e-4 and gaps[1] < 1e-4 < 0.01 < gaps[2], gaps
