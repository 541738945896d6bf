"""A family's tiny checkpoint in a real vLLM engine of this process, and publications to it.

Each engine runs in a separate process: `test_families.py` forks it from one that has imported
vLLM. Weights travel over a real transfer group into the worker extension that the node uses.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from safetensors.torch import load_file, save_file

from inference_node.server import all_workers
from inference_node.shared.reports import Findings, WorkerDigests
from inference_node.worker import chain, chunk_plan
from orchestrator.protocol import messages as m
from tests.inference_node import tiny
from tests.inference_node.harness import new
from tests.serving import BFLOAT16, LATENT_ON_GPUS, SERVED
from tests.trainer_node import families, towers
from weight_transfer.chunks import ChunkSender
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import open_listener

CUDA = vllm.platforms.current_platform.is_cuda()
PROMPT_TOKENS = 40
DECODED_TOKENS = 6
VERSIONS = 2


def register_without_torchvision(architecture: str, module: str) -> None:
    """Register a model whose module in vLLM also imports the image processors.

    They want torchvision, which the CPU environment lacks and text never calls.
    """
    there = transformers.utils.is_torchvision_available()  # remembered
    for name in () if there else ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        made = sys.modules[f"torchvision{name}"] = types.ModuleType(f"torchvision{name}")
        parent, _, child = made.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    vllm.ModelRegistry.register_model(architecture, getattr(found, architecture))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of a family."""

    refused: str = ""
    """Why vLLM does not load it, or the plan refuses it."""
    unserved: str = ""
    """The line of vLLM that refuses its requests; versions are published anyway."""
    direct: int = 0
    reloaded: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """Why tensors are reloaded -> one of them."""
    unverified: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Tensors whose live digests differ from the sent ones."""
    differences: list[float] = field(default_factory=list)
    """Largest log-prob difference from transformers: of the loaded version, then the published."""
    moved: float = 0.0
    """Largest log-prob difference between two versions."""
    logprobs: list[list[float]] = field(default_factory=list)


def dtype_of(name: str) -> str:
    """What a family is served in."""
    return "bfloat16" if CUDA or name in BFLOAT16 else "float32"


def through_the_cpu(worker_group: Any) -> Any:
    """A worker's tcp group for buffers on a GPU: NCCL wants a GPU for each end."""
    receive = worker_group.broadcast

    def broadcast(buffer_B: torch.Tensor, *, deadline_s: float) -> torch.cuda.Event:
        beside_B = torch.empty(buffer_B.shape, dtype=torch.uint8)
        receive(beside_B, deadline_s=deadline_s)
        buffer_B.copy_(beside_B)
        arrived = torch.cuda.Event()
        arrived.record()
        return arrived

    worker_group.broadcast = broadcast
    return worker_group


def checkpoint(
    name: str, folder: Path, dtype: str | None = None, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write the family's checkpoint; returns its tensors."""
    dtype = dtype or dtype_of(name)
    settings = SERVED.get(name, {}) | changes
    if CUDA and "v_head_dim" in settings:
        settings = settings | LATENT_ON_GPUS
    families.make(name, folder, dtype, **settings)
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def moved(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same tensors, each changed everywhere, by far enough to show in the log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def of(tensor: torch.Tensor) -> torch.Tensor:
        scale = 0.1 if tensor.dim() == 1 else 0.5 * tensor.float().std()
        return (tensor + scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

    return {n: of(t) for n, t in tensors.items()}


def write_like(folder: Path, tensors: Mapping[str, torch.Tensor], out: Path) -> Path:
    """A checkpoint with the config of `folder` and these tensors."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    shutil.copy(folder / "config.json", out / "config.json")
    save_file(dict(tensors), out / "model.safetensors", metadata={"format": "pt"})
    return out


class Engine:
    """vLLM in this process, as the node starts its workers."""

    def __init__(
        self, name: str, folder: Path, tensors: dict[str, torch.Tensor], **options: Any
    ) -> None:
        self._folder = folder
        (self._architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
        sees = self._architecture.endswith("ForConditionalGeneration")
        if sees or name.startswith("qwen3_5"):
            register_without_torchvision(self._architecture, "gemma3_mm" if sees else "qwen3_5")
        more: dict[str, Any] = {"attention_backend": "CPU_MLA"}  # AMX's knows no float32
        join = chain.join_tcp
        if CUDA:
            more = {"gpu_memory_utilization": 0.05}
            if "linear_key_head_dim" in SERVED.get(name, {}):  # else FlashInfer, where it is not
                more["additional_config"] = {"gdn_prefill_backend": "triton"}
            chain.join_tcp = lambda *a, **k: through_the_cpu(join(*a, **k))
        self._llm = vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=not sees,
            dtype=options.pop("dtype", dtype_of(name)),
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**26,
            weight_transfer_config={"backend": "splice"},
            worker_extension_cls="inference_node.worker.extension.SpliceWorkerExtension",
            **(more | options),
        )
        self.manifest = tiny.manifest_of(tensors)
        generator = torch.Generator().manual_seed(5)
        self._prompt = torch.randint(
            3, families.VOCAB, (PROMPT_TOKENS,), generator=generator
        ).tolist()
        self._groups: dict[str, Any] = {}
        self.chunks: list[tuple[str, list[int]]] = []

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        answer = self._llm.collective_rpc(method, args=args)[0]
        assert "error" not in answer, answer["error"]["message"]
        return answer

    def plan(self) -> dict[str, str]:
        """Check and lay out the manifest; returns why tensors are reloaded."""
        found = self.call("splice_prepare_update", self.manifest.model_dump_json())
        self._findings = Findings(**found["findings"])
        all_workers.judge(self.manifest, [self._findings])
        stuck = sorted({i for indices in found["obstacles"].values() for i in indices})
        self.reloaded = self.call("splice_whole_layers", stuck)["indices"]
        self.lay_out(self.reloaded)
        everything = range(len(self.manifest.tensors))
        return all_workers.explain(
            self.manifest, found["obstacles"], self.reloaded, within=everything
        )

    def lay_out(self, reload: Sequence[int], *, order: str = "own") -> None:
        self.chunks = self.call("splice_lay_out", list(reload), None, order)["chunks"]

    def join(self) -> None:
        listener = open_listener(
            transport="tcp", host="127.0.0.1", world_size=2, device=torch.device("cpu")
        )
        joined: list[Any] = []
        thread = threading.Thread(target=lambda: joined.append(listener.join(30.0)))
        thread.start()
        request = new(m.JoinTransferGroup, rendezvous=listener.rendezvous)
        self.call("splice_join_transfer_group", request.model_dump_json())
        thread.join(30.0)
        self._groups = {"inference-0": joined[0]}

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[list[str], dict[str, str]]:
        """Send and load a version; returns (tensors with wrong digests, `unverified`)."""
        specs = self.manifest.tensors

        def fill(chunk: int, out_B: torch.Tensor) -> None:
            parts = [tensors[specs[i].name].reshape(-1) for i in self.chunks[chunk][1]]
            out_B.copy_(torch.cat([p.view(torch.uint8) for p in parts]))

        order = [tuple(indices) for _, indices in self.chunks]
        sender = ChunkSender(
            groups=self._groups, manifest=self.manifest, chunks=order, fill=fill, device="cpu"
        )
        thread = threading.Thread(target=lambda: sender.send(deadline_s=30.0))
        thread.start()
        request = new(m.ReceiveWeights, version=version)
        answer = self.call("splice_receive_weights", request.model_dump_json())
        thread.join(30.0)
        sender.release()
        arriving = [i for kind, indices in self.chunks if kind != "reload" for i in indices]
        digests, unverified = all_workers.combine(
            self.manifest,
            [WorkerDigests.of(answer)],
            all_workers.Arrivals(self.manifest, arriving, [self._findings.loaded]),
        )
        wrong = [
            s.name
            for s, digest in zip(specs, digests, strict=True)
            if s.name not in unverified and digest != int(tensor_digest(tensors[s.name]))
        ]
        return wrong, unverified

    def logprobs(self) -> tuple[list[int], torch.Tensor]:
        """(tokens, log-prob of each after the first): a prompt, then tokens that are decoded."""
        params = vllm.SamplingParams(
            max_tokens=DECODED_TOKENS,
            temperature=0.0,
            prompt_logprobs=0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        prompt: Any = {"prompt_token_ids": self._prompt}
        output = self._llm.generate([prompt], params, use_tqdm=False)[0]
        answer = output.outputs[0]
        tokens = [*self._prompt, *answer.token_ids]
        rows = [*output.prompt_logprobs[1:], *answer.logprobs]
        found = [row[t].logprob for row, t in zip(rows, tokens[1:], strict=True)]
        return tokens, torch.tensor(found)

    def expected(self, tokens: list[int], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same by transformers in fp32."""
        folder = write_like(self._folder, tensors, self._folder.with_suffix(".reference"))
        cls = getattr(transformers, self._architecture)
        model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        with torch.no_grad():
            logits_TV = model.eval()(torch.tensor([tokens])).logits[0, :-1].float()
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        return logprobs_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def kinds(name: str, folder: Path) -> tuple[set[str], set[str]]:
    """Kinds of chunks in a replica's own layout and in the shared one, if no tensor is small."""
    chunk_plan.SMALL_BYTES = 1
    engine = Engine(name, folder, checkpoint(name, folder))
    engine.plan()
    own = {kind for kind, _ in engine.chunks}
    engine.lay_out(engine.reloaded, order="shared")
    return own, {kind for kind, _ in engine.chunks}


def run_with_tower(name: str, folder: Path) -> Served:
    """`run` with a checkpoint that has a tower."""
    towers.write_processor(towers.make(name, folder))
    return run(name, folder, load_file(folder / "model.safetensors"))


def run(name: str, folder: Path, base: dict[str, torch.Tensor] | None = None) -> Served:
    """Load, publish versions, publish the first weights again; compare after each.

    The last one takes the layout in which every tensor is reloaded.

    Args:
        base: the tensors of a checkpoint that `folder` has already.
    """
    base = base or checkpoint(name, folder)
    try:
        engine = Engine(name, folder, base)
        reasons = engine.plan()
    except Exception as error:  # noqa: BLE001 - the reason is the result
        at = traceback.extract_tb(error.__traceback__)[-1]
        return Served(refused=f"{type(error).__name__}: {error} ({at.name}: {at.line})")
    engine.join()
    reloaded = sum(len(i) for kind, i in engine.chunks if kind == "reload")
    wrong: set[str] = set()
    unverified: dict[str, str] = {}
    differences: list[float] = []
    logprobs: list[list[float]] = []
    unserved = ""
    far = 0.0
    try:
        tokens, served = engine.logprobs()
    except AssertionError as error:
        unserved = traceback.extract_tb(error.__traceback__)[-1].line or ""
    else:
        first = engine.expected(tokens, base)
        differences, logprobs = [float((served - first).abs().max())], [served.tolist()]
    for version, tensors in enumerate([*(moved(base, n + 1) for n in range(VERSIONS)), base]):
        if version == VERSIONS:
            engine.lay_out(range(len(base)))
        found_wrong, found_unverified = engine.publish(version, tensors)
        wrong |= set(found_wrong)
        unverified |= found_unverified
        if unserved:
            continue
        now, served = engine.logprobs()
        differences.append(float((served - engine.expected(now, tensors)).abs().max()))
        logprobs.append(served.tolist())
        far = max(far, float((engine.expected(tokens, tensors) - first).abs().max()))
    return Served(
        unserved=unserved,
        direct=len(engine.manifest.tensors) - reloaded,
        reloaded=reloaded,
        reasons=reasons,
        unverified=unverified,
        wrong=sorted(wrong),
        differences=differences,
        moved=far,
        logprobs=logprobs,
    )


def loaded(name: str, folder: Path, version: int) -> list[float]:
    """The log-probs of an engine that loads a published version as its checkpoint."""
    tensors = moved(checkpoint(name, folder), version + 1)
    engine = Engine(name, write_like(folder, tensors, folder.with_suffix(".loaded")), tensors)
    return engine.logprobs()[1].tolist()


def answer(connection: Any, function: Callable[..., Any], *args: Any) -> None:
    """In a separate process: send what the function returns."""
    connection.send(function(*args))
    connection.close()


if __name__ == "__main__":  # by hand: python -m tests.inference_node.family_engine FAMILY ...
    for family_name in sys.argv[1:]:
        print(run(family_name, Path(tempfile.mkdtemp()) / family_name))
