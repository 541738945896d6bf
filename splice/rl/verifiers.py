"""Environments of `verifiers` (0.4), unchanged, in the loop.

    async with VerifiersEnvironment(config, tokenizer="Qwen/Qwen3-0.6B") as environment:
        async with Loop.of_run(
            run_dir, prompts=environment.rows(), environment=environment.rollout, config=...
        ) as loop:
            async for step in loop: ...

verifiers runs the harness, the tools and the rewards. Its train client renders prompts to token ids
and posts them to `/inference/v1/generate`. This module answers that request with the loop's own
sampler, so every turn has version spans, is asked again after a loss, and is in the log. The traces
say which turns train. A turn of a trace that the loop did not sample is an error.

vLLM's own route is not asked: verifiers 0.4.0 drops its `weight_versions`, and cannot read the
log-probs of vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from splice.rl.sampler import RequestRefused, Row
from splice.rl.turns import Sample, Scored, Turn

if TYPE_CHECKING:
    from aiohttp import web

SESSION_HEADER = "X-Session-ID"
"""verifiers sends the id of the trace in it."""
_NOT_SAMPLING = ("logprobs", "skip_special_tokens", "routed_experts_prompt_start", "n")
"""Fields that the loop sets or does not need."""
MAX_BODY_BYTES = 64 * 2**20


@dataclass(slots=True, kw_only=True)
class _Session:
    """One trace while it runs."""

    sample: Sample
    turns: dict[tuple[int, ...], list[Turn]] = field(default_factory=dict)
    """Prompt and answer -> turns."""
    fault: ConfigError | None = None


class VerifiersEnvironment:
    """See the module. Enter it before the loop.

    Args:
        config: verifiers' `EnvConfig`, which names the taskset.
        tokenizer: the model that the prompts are rendered for: a folder or a hub id.
        renderer: verifiers' renderer. None: chosen by the model.
        tasks: at most this many of the taskset's tasks.
    """

    def __init__(
        self, config: Any, *, tokenizer: str, renderer: Any = None, tasks: int | None = None
    ) -> None:
        from verifiers.v1.utils.loaders import load_environment

        self._env = load_environment(config)
        self._tokenizer, self._renderer = tokenizer, renderer
        self._tasks = list(self._env.taskset if tasks is None else self._env.taskset.take(tasks))
        self._sessions: dict[str, _Session] = {}
        self._exit = contextlib.AsyncExitStack()

    def rows(self) -> list[dict[str, Any]]:
        """The loop's prompts: one for each task."""
        return [
            {"prompt": task.data.prompt, "task": number} for number, task in enumerate(self._tasks)
        ]

    async def __aenter__(self) -> VerifiersEnvironment:
        from verifiers.v1 import ModelContext, TrainClientConfig

        async with self._exit as stack:
            client = TrainClientConfig(
                base_url=f"{await self._serve(stack)}/v1",
                api_key_var="",
                renderer=self._renderer,
                renderer_model_name=self._tokenizer,
            )
            self._context = ModelContext(model=self._tokenizer, client=client)
            await stack.enter_async_context(self._env.serving())
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._exit.__aexit__(*error)

    async def _serve(self, stack: contextlib.AsyncExitStack) -> str:
        """Answer verifiers' requests on loopback; returns the URL."""
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/inference/v1/generate", self._on_generate)
        app.router.add_get("/v1/models", _on_models)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    # ------------------------------------------------------------ a rollout

    async def rollout(self, row: Row, sample: Sample) -> list[Scored]:
        """One episode: the environment of a loop."""
        (slot,) = self._env.slots(self._tasks[row["task"]])
        own: dict[str, _Session] = {}

        def minted(trace: Any) -> None:
            own[trace.id] = self._sessions[trace.id] = _Session(sample=sample)

        try:
            episode = await self._env.run_slot(slot, self._context, on_trace=minted)
        finally:
            for trace_id in own:
                del self._sessions[trace_id]
        for session in own.values():
            if session.fault is not None:
                raise session.fault
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            raise RuntimeError(f"the episode failed: {errors[-1:] or 'it names no error'}")
        return [
            Scored(
                reward=trace.reward,
                turns=turns_of(trace, own[trace.id].turns),
                name=trace.agent.name,
            )
            for trace in episode.traces
            if trace.agent.trainable
        ]

    async def _on_generate(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return web.json_response({"error": {"message": "no rollout of the loop"}}, status=404)
        body = await request.json()
        fields = {k: v for k, v in body["sampling_params"].items() if k not in _NOT_SAMPLING}
        try:
            turn = await session.sample(body["token_ids"], **fields)
        except RequestRefused as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except ConfigError as error:
            session.fault = error
            return web.json_response({"error": {"message": str(error)}}, status=400)
        session.turns.setdefault(turn.token_ids, []).append(turn)
        return web.json_response(reply_of(turn))


async def _on_models(request: web.Request) -> web.Response:
    from aiohttp import web

    return web.json_response({"object": "list", "data": []})


def reply_of(turn: Turn) -> dict[str, Any]:
    """A turn as verifiers' train client reads it."""
    said = turn.completion
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(said.answer_ids, said.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": list(said.answer_ids),
        "logprobs": {"content": content},
        "finish_reason": said.finish_reason,
    }
    return {"request_id": f"turn-{turn.number}", "choices": [choice]}


def turns_of(trace: Any, sampled: dict[tuple[int, ...], list[Turn]]) -> list[Turn]:
    """The turns that a trace trains on. A node that branches share counts once.

    Raises:
        ConfigError: the trace has an answer that the loop did not sample, so nobody knows its
            version.
    """
    found: dict[int, Turn] = {}
    for branch in trace.branches:
        if not branch.trainable:
            continue
        tokens: list[int] = []
        for node in branch.nodes:
            tokens += node.token_ids
            if not node.sampled or id(node) in found:
                continue
            turns = sampled.get(tuple(tokens))
            if not turns:
                said = json.dumps(str(node.message.content))[:200]
                raise ConfigError(
                    f"trace {trace.id} has an answer that the loop did not sample, so its tokens "
                    f"have no version: {said}; pin no other model or client to a role that trains"
                )
            found[id(node)] = turns.pop()
    return sorted(found.values(), key=lambda turn: turn.number)
