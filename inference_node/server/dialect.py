"""Differences in the API process between vLLM 0.26 and 0.28 to 0.33.

One function here for each name that moved, each attribute of one version only, and each call that
gained an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any

from inference_node.server.output_gate import OutputGate
from inference_node.shared import names

SETTLE_S = 0.02
"""Seconds that `pause_generation` sleeps, so that tokens can leave."""
SETTLE_AT_MOST_S = 5.0
QUIET_TURNS = 10
"""Event loop turns in which a token that left its collector is sent.

Two are enough; middlewares that pass it on need some more.
"""


def server_parts() -> tuple[
    Callable[..., Any], Callable[..., Any], Callable[..., None], Callable[..., None]
]:
    """(run_server_worker, make_arg_parser, validate_parsed_serve_args, cli_env_setup)."""
    entry = _first_of("launchers.api_server.entry", "openai.api_server")
    # 0.33 moved both to `common`.
    args = _first_of("common.cli_args", "launchers.cli_args", "openai.cli_args")
    startup = _first_of("common.startup", "serve.utils.api_utils")
    return (
        entry.run_server_worker,
        args.make_arg_parser,
        args.validate_parsed_serve_args,
        startup.cli_env_setup,
    )


def _first_of(*names: str) -> Any:
    """The first module of `vllm.entrypoints` that this vLLM has."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"vllm.entrypoints.{name}")
    raise ImportError(f"this vLLM has none of vllm.entrypoints.{', '.join(names)}")


def base_model_paths(app: Any) -> list[Any]:
    """The list of names that vLLM serves.

    All routes share it, so it is changed in place.
    """
    paths: list[Any] = app.state.openai_serving_models.base_model_paths
    return paths


def base_model_path(*, model_name: str, model_path: str) -> Any:
    """One entry of `base_model_paths`."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath

    return BaseModelPath(name=model_name, model_path=model_path)


async def collective_rpc(engine_client: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Call a method of every worker; returns the answers of all.

    0.26 to 0.32 call the workers of every data-parallel engine, but return only the first engine's
    answers.
    """
    core = getattr(engine_client, "engine_core", None)
    engines = getattr(core, "core_engines", None) or ()
    if core is None or len(engines) < 2:
        answers: list[Any] = await engine_client.collective_rpc(method, args=args)
        return answers
    calls = [
        core._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
        for engine in engines
    ]
    return [answer for one_engines in await asyncio.gather(*calls) for answer in one_engines]


async def pause(engine_client: Any, *, mode: str, clear_cache: bool) -> None:
    """Stop generation: `AsyncLLM.pause_generation` without its last line, a sleep of 20 ms.

    When the engine answers, it is paused, and its earlier outputs have come through the same
    socket. vLLM sleeps so that its tasks pass them on ("not required for correctness"). Our
    commit waits for them instead: see `Traffic.commit`. The same in 0.26 to 0.32.
    """
    if clear_cache:
        await engine_client.renderer.clear_mm_cache_async()
    await engine_client.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


def keeps_order(engine_client: Any) -> bool:
    """Whether `pause_and_call` may be used.

    It needs one engine whose steps and calls reach its workers in order. Several engines step
    together until all have paused, so one would swap under another's step.
    """
    parallel = getattr(getattr(engine_client, "vllm_config", None), "parallel_config", None)
    is_alone = getattr(parallel, "data_parallel_size", None) == 1
    return is_alone and getattr(parallel, "distributed_executor_backend", None) in ("uni", "mp")


async def pause_and_call(
    engine_client: Any,
    *,
    clear_cache: bool,
    method: str,
    args: tuple[Any, ...],
    gate: OutputGate | None,
    on_send: Callable[[], None],
) -> list[Any]:
    """Pause in vLLM's mode `keep` and call a method of every worker, without waiting in between.

    Returns the workers' answers once the engine is paused.

    The engine takes calls in the order of sending, between two steps. From the pause on it
    schedules nothing. A step queued earlier has been launched by then, sampling included. The
    workers run the call after it, on the same thread and, on a GPU, the same stream. Earlier
    steps therefore never see what the call changes, and all later steps do.

    Args:
        gate: held from the workers' answers on. The last step's tokens follow immediately,
            and passing them on would delay this process's next messages to the engine.
        on_send: called just before. Requests admitted later reach the engine after the pause.
    """
    if clear_cache:
        await engine_client.renderer.clear_mm_cache_async()
    on_send()
    # Tasks start in order, and each sends before it waits.
    pausing = asyncio.ensure_future(
        engine_client.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
    )
    calling = asyncio.ensure_future(collective_rpc(engine_client, method, args))
    if gate is not None:
        gate.hold_at(calling)
    await asyncio.wait({calling})
    await pausing
    return calling.result()


async def settle(engine_client: Any, *, gate: OutputGate | None = None) -> None:
    """Wait until the outputs of a paused engine have left this process.

    Tokens go from the engine's socket through one queue to a collector for each request. The
    request's own task takes and sends them, and waits only for its client. Nothing is under way
    once queue and collectors are empty for `QUIET_TURNS` turns of the event loop. Streams get the
    tokens that vLLM holds back for their next event. If only collectors are filled and nothing
    changes for `SETTLE_S`, a client is slow, and nobody waits for it. Where this vLLM hides its
    queues, the wait is vLLM's own `SETTLE_S`.

    Args:
        gate: passes on what had been made, and holds what is made meanwhile. None: the queue must
            be empty.
    """
    seen = _outputs_under_way(engine_client, gate)
    if seen is None:
        await asyncio.sleep(SETTLE_S)
        return
    turns, began_s, is_flushed = 0, time.monotonic(), False
    moved_s = began_s
    while True:
        left, now_s = _outputs_under_way(engine_client, gate), time.monotonic()
        assert left is not None
        turns = turns + 1 if left == seen else 0
        if turns == 0:
            seen, moved_s = left, now_s
        if turns >= QUIET_TURNS and left[0] == 0 and not is_flushed:
            is_flushed, turns = True, 0
            flush_streams(engine_client)
        elif turns >= QUIET_TURNS and (
            not any(left) or (left[0] == 0 and now_s - moved_s >= SETTLE_S)
        ):
            return
        if now_s - began_s > SETTLE_AT_MOST_S:  # vLLM's own task may have ended
            return
        await asyncio.sleep(0)


def _outputs_under_way(engine_client: Any, gate: OutputGate | None) -> tuple[int, int] | None:
    """Number of outputs before the collectors, and of filled collectors.

    None: this vLLM hides them.
    """
    waiting = getattr(getattr(engine_client, "engine_core", None), "outputs_queue", None)
    states = _request_states(engine_client)
    if waiting is None or states is None:
        return None
    full = sum(map(_is_full, states.values()))
    return (waiting.qsize() if gate is None else gate.left), full


def flush_streams(engine_client: Any) -> None:
    """Hand streams the tokens that vLLM holds back for their next event (`stream_interval`)."""
    for state in (_request_states(engine_client) or {}).values():
        every, sent = getattr(state, "stream_interval", 1), getattr(state, "sent_tokens_offset", 0)
        # Only streams count what they sent, and they send their first token immediately.
        if every == 1 or sent == 0 or sent == state.detokenizer.num_output_tokens():
            continue
        state.stream_interval = 1
        try:
            output = state.make_request_output(
                state.detokenizer.output_token_ids[sent:], None, None, None
            )
        finally:
            state.stream_interval = every
        state.sent_tokens_offset = state.detokenizer.num_output_tokens()
        if output is not None:
            state.queue.put(output)


def is_behind(engine_client: Any, request_id: str) -> bool:
    """Whether a request has output that its client has not taken."""
    return _is_full(_request_state(engine_client, request_id))


def stream_every(engine_client: Any, request_id: str, tokens: int) -> None:
    """Have each event of a stream bring this many tokens: a request's `stream_interval`.

    Versions before 0.32 have it only for the whole server.
    """
    state = _request_state(engine_client, request_id)
    if getattr(state, "detokenizer", None) is not None:  # pooling has none
        state.stream_interval = max(tokens, state.stream_interval)


def keep_logprobs_flat(engine_client: Any, request_id: str) -> None:
    """Keep a new request's log-probs in a few flat lists: vLLM's `flat_logprobs`, which the OpenAI
    routes do not offer.

    Otherwise vLLM keeps two objects for each token, and Python's garbage collector visits all of
    them in a pause.
    """
    state = _request_state(engine_client, request_id)
    processor: Any = getattr(state, "logprobs_processor", None)
    if getattr(processor, "logprobs", None) == []:
        from vllm.logprobs import FlatLogprobs

        processor.logprobs = FlatLogprobs()


def leave_logprobs_undecoded(engine_client: Any, request_id: str) -> None:
    """Decode no token of a new request's log-probs. vLLM decodes each one, also where the answer
    names it by id; without the text, chat answers have no `bytes` of it.
    """
    state = _request_state(engine_client, request_id)
    processor: Any = getattr(state, "logprobs_processor", None)
    if processor is not None and processor.num_prompt_logprobs is None:  # these have text
        processor.tokenizer = None


def _request_states(engine_client: Any) -> Any:
    """Request id -> its state in vLLM's API process. None: this vLLM hides it."""
    return getattr(getattr(engine_client, "output_processor", None), "request_states", None)


def _request_state(engine_client: Any, request_id: str) -> Any:
    """State of a request in vLLM's API process; None if there is none, or if this vLLM hides it."""
    return (_request_states(engine_client) or {}).get(request_id)


def _is_full(state: Any) -> bool:
    """Whether a request's collector has output."""
    return getattr(getattr(state, "queue", None), "output", None) is not None


def has_output(engine_client: Any, request_id: str) -> bool | None:
    """Whether the engine has answered a request that it runs.

    None: it does not run the request. True if this cannot be seen.
    """
    if _request_states(engine_client) is None:
        return True
    state = _request_state(engine_client, request_id)
    return None if state is None else not getattr(state, "is_prefilling", False)


def adapter(engine_client: Any) -> Any:
    """What names the served version's adapter in a request; None without --enable-lora.

    The workers hold it, so nothing is ever read from its path.
    """
    if getattr(getattr(engine_client, "vllm_config", None), "lora_config", None) is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(names.ADAPTER_NAME, names.ADAPTER_ID, names.ADAPTER_NAME)


def forget_request(engine_client: Any, request_id: str) -> None:
    """Drop the API process's state of a request that never reached the engine.

    0.26 to 0.32 drop it only for requests that did.
    """
    abort = engine_client.output_processor.abort_requests
    own_id = {"internal": True} if "internal" in inspect.signature(abort).parameters else {}
    abort((request_id,), **own_id)


async def prompt_logprobs(engine_client: Any, tokens: list[int], *, request_id: str) -> list[float]:
    """Log-prob of each token given those before it, 0.0 for the first.

    The engine itself is asked, past every alias.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    rows: Any = None
    async for output in engine_client.generate(
        TokensPrompt(prompt_token_ids=tokens), params, request_id
    ):
        rows = output.prompt_logprobs or rows
    if rows is None:
        raise RuntimeError("the engine gave no log-probs of the prompt")
    return [
        0.0,
        *(float(row[token].logprob) for row, token in zip(rows[1:], tokens[1:], strict=True)),
    ]


def resume_as(engine_client: Any, version: int) -> asyncio.Future[Any]:
    """Resume, and tell the engine the version that it writes into its outputs (0.28 and later).

    Both are sent at the event loop's next turn; the future is for their answers.
    """
    tell = getattr(engine_client, "update_weight_version", None)
    return asyncio.gather(
        *([] if tell is None else [tell(str(version))]), engine_client.resume_generation()
    )
