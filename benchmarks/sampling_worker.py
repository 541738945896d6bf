"""One contender of `benchmarks.exact`: tokens per second of vLLM in this process, as JSON on the
last line, a list for each number of prompts.

    python -m benchmarks.sampling_worker --model FOLDER --device {cpu,cuda} --prompts N,N --tokens N
        --rounds N [--exact]

Random weights; N prompts of `--prompt-tokens` random tokens are answered together, each with
`--tokens` tokens and their log-probs. The first round of each is not counted. With `--exact` vLLM
computes as under `trainer.numerics = "exact"`, else with its own compiler and CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from inference_node.bits import use_this_process
from inference_node.node.vllm_process import exact_options
from inference_node.shared import names


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--prompts", type=lambda s: [int(n) for n in s.split(",")], default=[64])
    for name, default in (("prompt-tokens", 32), ("tokens", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    use_this_process(options.device, is_exact=options.exact)
    more: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 8 << 30}
    if options.device == "cpu":
        more = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}
    elif options.exact:
        os.environ.update(names.EXACT_ENVIRONMENT)
        given = exact_options(eager=False)
        chosen = dict(zip(given[::2], given[1::2], strict=True))
        more["attention_backend"] = chosen["--attention-backend"]
        more["compilation_config"] = json.loads(chosen["--compilation-config"])
    sys.stdout.write(f"{json.dumps(_rates(options, more))}\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine in this process leaves threads that join slowly


def _rates(options: argparse.Namespace, more: dict[str, Any]) -> list[list[float]]:
    from vllm import LLM, SamplingParams, TokensPrompt

    length = options.prompt_tokens + options.tokens
    llm = LLM(
        model=str(options.model), load_format="dummy", max_model_len=length, seed=0,
        max_num_seqs=max(options.prompts), generation_config="vllm", enable_prefix_caching=False,
        **more,
    )  # fmt: skip # options
    dice, vocab = random.Random(1), llm.llm_engine.model_config.get_vocab_size()
    params = SamplingParams(
        max_tokens=options.tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    found = []
    for count in options.prompts:
        prompts = [
            TokensPrompt(prompt_token_ids=dice.choices(range(3, vocab), k=options.prompt_tokens))
            for _ in range(count)
        ]
        rates = []
        for _ in range(1 + options.rounds):
            began = time.perf_counter()
            answers = llm.generate(prompts, params, use_tqdm=False)
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            rates.append(tokens / (time.perf_counter() - began))
        found.append(rates[1:])
    return found


if __name__ == "__main__":
    main()
