"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes.

It registers the weight-transfer engine "splice", and repairs rotary embeddings on the CPU. In
processes that our node started, it also asks the kernel to end the process with its parent, because
an EngineCore otherwise outlives a killed API server.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from inference_node.shared.names import ENGINE_NAME, EXACT, SUPERVISED
from orchestrator.processes.parent import die_with_parent


def register() -> None:
    """Register the engine and repair vLLM; safe to call any number of times."""
    if SUPERVISED in os.environ:
        die_with_node()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "inference_node.worker.engine", "SpliceEngine"
        )
    repair_rotary_on_cpu()
    if os.environ.get(EXACT) == "1":
        from inference_node.worker import exact

        exact.install()


def repair_rotary_on_cpu() -> None:
    """Rotate queries and keys of three dimensions with vLLM's own PyTorch code.

    The CPU kernel of 0.32 takes such a tensor for one head and ignores its strides. MLA with plain
    RoPE then serves wrong log-probs. This can go when the kernel reads shapes and strides.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.rotary_embedding import base

    kernel = base.RotaryEmbedding.forward_cpu
    if hasattr(kernel, "__wrapped__"):
        return

    @functools.wraps(kernel)
    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        is_flat = all(t is None or t.dim() == 2 for t in (query, key))
        return (kernel if is_flat else type(self).forward_native)(self, positions, query, key)

    base.RotaryEmbedding.forward_cpu = forward_cpu


def die_with_node() -> None:
    """SIGKILL this process when its parent ends, or now if it has ended already."""
    die_with_parent()
    # A parent with pid 1 adopts orphans, unless our node is pid 1 itself, as in a container.
    if os.getppid() == 1 and os.environ.get(SUPERVISED) != "1":
        os.kill(os.getpid(), signal.SIGKILL)
