"""Samples answers again: the sampler's side of `splice replay --sample`.

    python -m inference_node.server.resample FOLDER

    config.json      an InferenceConfig, of the version's HF folder
    requests.json    [ids of the prompt, fields of the request, whether it is a chat's] of each
    answers.json     [ids, log-probs] of each answer

vLLM runs in this process, with a node's options and environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from inference_node.node import vllm_process
from inference_node.shared import names
from orchestrator.protocol.config import InferenceConfig
from orchestrator.protocol.messages.mistakes import read_json

Request = tuple[list[int], dict[str, Any], bool]


def sample(config: InferenceConfig, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Run vLLM on all requests together, and return ids and log-probs."""
    # Late, because threads are counted when torch is imported.
    from vllm import LLM, TokensPrompt
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from inference_node.bits import ids_and_logprobs
    from inference_node.server import dialect

    _, make_arg_parser, _, _ = dialect.server_parts()
    parser = make_arg_parser(FlexibleArgumentParser())
    engine = EngineArgs.from_cli_args(parser.parse_args(vllm_process.arguments(config)))
    engine.weight_transfer_config, engine.worker_extension_cls = None, ""  # nothing is sent
    if config.device == "cpu":
        engine.enable_chunked_prefill = False  # 0.32 ends when it cuts a seeded prompt in two
    llm = LLM(**vars(engine))
    model = llm.llm_engine.model_config
    defaults = model.get_diff_sampling_param()
    params = [
        _params(fields, is_chat, room=model.max_model_len - len(ids), defaults=defaults)
        for ids, fields, is_chat in requests
    ]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _, _ in requests]
    return [ids_and_logprobs(answer) for answer in llm.generate(prompts, params, use_tqdm=False)]


def _params(fields: dict[str, Any], is_chat: bool, *, room: int, defaults: dict[str, Any]) -> Any:
    """What vLLM's server makes of a request's fields."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    if is_chat:
        message = {"role": "user", "content": "-"}  # the ids are given
        request = ChatCompletionRequest(**{**fields, "messages": [message]})
    else:
        request = CompletionRequest(**{**fields, "prompt": "-"})
    params = request.to_sampling_params(min(fields["max_tokens"], room), defaults)
    params.logprobs = 0
    return params


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    config = read_json(folder / "config.json", InferenceConfig)
    os.environ.update(vllm_process.environment(config, secret="", watchdog_endpoint=""))
    os.environ[names.SUPERVISED] = str(os.getppid())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = sample(config, json.loads((folder / "requests.json").read_text()))
    (folder / "answers.json").write_text(json.dumps(answers))
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine in this process leaves threads that join slowly


if __name__ == "__main__":
    main()
