"""Bodies of requests to vLLM: the fields that it knows, and a user's values as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages.mistakes import nearest

_COMMON = frozenset({
    "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params",
    "echo", "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params",
    "length_penalty", "logit_bias", "logprob_token_ids", "logprobs", "max_tokens", "min_p",
    "min_tokens", "mm_payload", "model", "n", "presence_penalty", "priority", "prompt_logprobs",
    "repetition_detection", "repetition_penalty", "request_id", "response_format",
    "return_mm_kwargs", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids",
    "routed_experts_prompt_start", "seed", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_interval",
    "stream_options", "structured_outputs", "temperature", "thinking_token_budget", "top_k",
    "top_p", "truncate_prompt_tokens", "truncation_side", "use_beam_search", "user", "vllm_xargs",
    "watermarking",
})  # fmt: skip # a list of names
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIELDS = {
    COMPLETIONS: _COMMON | {"prompt", "prompt_embeds", "suffix"},
    CHAT: _COMMON
    | {
        "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message",
        "documents", "include_reasoning", "max_completion_tokens", "media_io_kwargs", "messages",
        "mm_processor_kwargs", "parallel_tool_calls", "reasoning_effort", "return_prompt_text",
        "tool_choice", "tools", "top_logprobs",
    },
}  # fmt: skip # lists of names
"""Route -> the request fields of vLLM 0.32. vLLM ignores every other field without a word."""
_MEANT = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
    "do_sample": "temperature",
    "num_return_sequences": "LoopConfig.group_size",
    "guided_regex": 'structured_outputs = {"regex": ...}',
    "guided_json": 'structured_outputs = {"json": ...}',
    "guided_choice": 'structured_outputs = {"choice": ...}',
    "guided_grammar": 'structured_outputs = {"grammar": ...}',
}
"""Names of transformers and of older vLLMs -> what vLLM calls it now."""


def check_fields(fields: Collection[str], *, known: Collection[str], where: str = "") -> None:
    """Refuse fields that vLLM would ignore.

    Raises:
        ConfigError: names them, and for each the one that was meant.
    """
    unknown = sorted(set(fields) - set(known))
    if unknown:
        meant = (
            f"{name!r}; use {_MEANT[name]}"
            if name in _MEANT
            else f"{name!r}{nearest(name, sorted(known)).removesuffix('?')}"
            for name in unknown
        )
        raise ConfigError(
            f"{where}vLLM would ignore fields that it does not know: {', '.join(meant)}"
        )


def json_of(value: Any) -> bytes:
    """Return the value as JSON. Arrays and numbers of numpy or torch become Python's.

    Raises:
        ValueError: JSON has no such value, or no such text; says which.
    """
    try:
        text = json.dumps(value, default=_required, allow_nan=False, ensure_ascii=False)
        return text.encode()
    except UnicodeEncodeError as error:
        part = error.object[error.start : error.end]
        raise ValueError(f"{part!r} is half a character, and no text has it") from error
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def plain(value: Any) -> Any:
    """Return an array or number of numpy or torch as Python's, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _required(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return plain(value)
    raise TypeError(f"JSON has no {type(value).__name__} such as {value!r:.100}")
