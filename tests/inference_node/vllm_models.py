"""Real vLLM models of tiny checkpoints without a server: for tests of placement, verification and
the reload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def start_distributed(*, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
    """vLLM's process groups, over gloo; `port` is a TCPStore's, 0 for a world of one."""
    from vllm.distributed import init_distributed_environment

    # vLLM's CPU worker does the same: without an accelerator these raise.
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.synchronize = lambda *_: None
    method = f"tcp://127.0.0.1:{port}" if port else f"file://{_store_file()}"
    init_distributed_environment(world_size, rank, method, rank, "gloo")


def _store_file() -> str:
    import tempfile

    return str(Path(tempfile.mkdtemp()) / "store")


def load(
    folder: Path,
    *,
    dtype: str = "float32",
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    quantization: str | None = None,
) -> tuple[torch.nn.Module, Any]:
    """(model, its vLLM config), loaded as a worker loads it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    args = EngineArgs(
        model=str(folder),
        dtype=dtype,
        quantization=quantization,
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=tensor_parallel,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp" if tensor_parallel > 1 else None,
        kv_cache_memory_bytes=2**26,
        attention_backend="CPU_MLA",  # for MLA only: the one for AMX knows no float32
    )
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(tensor_parallel, 1)
        return get_model(vllm_config=config), config


def update(model: torch.nn.Module, config: Any, tensors: dict[str, torch.Tensor]) -> None:
    """One whole update through our reload."""
    from vllm.config import set_current_vllm_config

    from inference_node.worker import reload

    with set_current_vllm_config(config), torch.no_grad():
        reload.start(model)
        reload.load(model, [(n, t.clone()) for n, t in tensors.items()])
        reload.finish(model, config.model_config)
