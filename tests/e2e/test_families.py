"""Families of models from the trainer to a real vLLM: two versions published, each compared with
transformers on the exported checkpoint, and with PEFT on the written adapter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import peft
import pytest
import torch
import transformers

from orchestrator.protocol.config import FinetuningType
from orchestrator.protocol.messages import (
    InitialSync,
    LossSpec,
    OptimParams,
    TrainMerged,
    batch_specs,
)
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from splice.smoke import served
from splice.smoke.config import TAU
from tests.e2e.batches import PROMPT, as_batch
from tests.e2e.conftest import INFERENCE_PYTHON, TRAINER_PYTHON
from tests.serving import BFLOAT16, SERVED, UNLISTED, UNSERVED
from tests.trainer_node.families import FAMILIES, make
from trainer_node.tools.make_checkpoint import VOCAB_SIZE, write_tokenizer
from trainer_node.tools.reference import with_single_experts

pytestmark = pytest.mark.timeout(600)
ANSWER = [3, 4, 5, 6, 7, 8]


def checkpoint(family: str, folder: Path) -> Path:
    make(family, folder, vocab_size=VOCAB_SIZE, **SERVED.get(family, {}))
    write_tokenizer(folder)
    return folder


def reference(folder: Path, adapter: Path | None = None) -> torch.nn.Module:
    """transformers' model of a checkpoint, with PEFT's adapter."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is None:
        return model
    if config.model_type != "minimax_m2":  # PEFT itself fits these names to stacked experts
        model = with_single_experts(model)
    return peft.PeftModel.from_pretrained(model, str(adapter))


@torch.no_grad()
def scored(model: torch.nn.Module, sequences: list[list[int]]) -> served.Logprobs:
    found = []
    for ids in sequences:
        row = torch.tensor([ids])
        logprobs = model.eval()(input_ids=row, use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append([0.0, *logprobs.gather(-1, row[0, 1:, None])[:, 0].tolist()])
    return found


def ask(cluster: Cluster, model: str, sequences: list[list[int]]) -> served.Logprobs:
    async def go() -> served.Logprobs:
        url = cluster.base_urls[0]
        async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as http:
            return await served.prompt_logprobs(http, model=model, sequences=sequences)

    return asyncio.run(go())


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNLISTED])
def test_two_publications(family: str, kind: FinetuningType, tmp_path: Path) -> None:
    model = checkpoint(family, tmp_path / "model")
    dtype = "bfloat16" if family in BFLOAT16 else "float32"
    run = RunFile(
        name="tiny",
        model=model,
        run_dir=tmp_path / "run",
        dtype=dtype,
        publication={"canary": family not in UNSERVED},  # a canary is a request
        trainer={
            "python": TRAINER_PYTHON,
            "admission": "skip",
            "finetuning_type": kind,
            "lora": {"rank": 4, "alpha": 8.0},
        },
        inference={"python": INFERENCE_PYTHON, "load_format": "dummy", "max_model_len": 128},
    )
    sequences = served.probe_sequences(vocab_size=VOCAB_SIZE, prompts=[PROMPT], count=4)
    specs = batch_specs(num_sequences=1, num_tokens=len(PROMPT) + len(ANSWER))
    before: served.Logprobs | None = None
    with Cluster(run) as cluster:
        for version in range(3):
            job = TrainMerged(
                loss=LossSpec(name="cross_entropy"), optim=OptimParams(lr=5e-3), tensors=specs
            )
            result = (
                cluster.client.run(job, buffers=as_batch(ANSWER))
                if version
                else cluster.client.run(InitialSync())
            )
            assert result.unverified == {}
            assert result.num_verified == result.num_tensors
            export = tmp_path / f"export-{version}"
            cluster.client.export_hf(str(export))
            theirs = scored(reference(export), sequences)
            if kind == "lora" and dtype == "float32":
                adapted = reference(model, Path(result.checkpoint_dir) / "adapter")
                assert served.max_difference(theirs, scored(adapted, sequences)) < TAU
            if family in UNSERVED:
                continue
            ours = ask(cluster, f"tiny@{version}", sequences)
            if dtype == "float32":
                assert served.max_difference(ours, theirs) < TAU
                assert before is None or served.max_difference(ours, before) > 10 * TAU
            elif before is not None:
                # vLLM rounds activations, transformers none; both have the same weights.
                moved = served.median_difference(ours, before)
                assert served.median_difference(ours, theirs) < moved / 2
            before = ours
