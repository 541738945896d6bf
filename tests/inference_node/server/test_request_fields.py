"""The fields that splice lets a loop send are those that the installed vLLM reads."""

from __future__ import annotations

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from splice.rl.bodies import CHAT, COMPLETIONS, FIELDS


def test_the_lists_of_fields_are_vllms() -> None:
    for route, request in ((COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)):
        assert FIELDS[route] == request.model_fields.keys()
