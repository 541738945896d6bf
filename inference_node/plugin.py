"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes.

It registers the weight-transfer engine "splice". In processes that our node started, it also asks
the kernel to end the process with its parent, because an EngineCore otherwise outlives a killed API
server.
"""

from __future__ import annotations

import os
import signal

from inference_node.names import ENGINE_NAME, SUPERVISED
from orchestrator.processes.parent import die_with_parent


def register() -> None:
    """Register the engine; safe to call any number of times."""
    if SUPERVISED in os.environ:
        die_with_node()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "inference_node.engine", "SpliceEngine"
        )


def die_with_node() -> None:
    """SIGKILL this process when its parent ends; at once if it has ended already."""
    die_with_parent()
    # A parent with pid 1 adopts orphans, unless our node is pid 1 itself, as in a container.
    if os.getppid() == 1 and os.environ.get(SUPERVISED) != "1":
        os.kill(os.getpid(), signal.SIGKILL)
