"""Entry point of `vllm.general_plugins`: vLLM calls `register` in the API process, the engine core and every worker.

It registers the weight-transfer engine "splice" and, in processes that our supervisor started, asks the kernel to end the
process when its parent ends, because an EngineCore otherwise outlives a killed API server. In any other vLLM process the name
is registered and nothing else happens.
"""

from __future__ import annotations

import os
import signal

from inference_node.names import ENGINE_NAME, SUPERVISED
from orchestrator.protocol.parent import die_with_parent


def register() -> None:
    """Register the engine; safe to call any number of times."""
    if SUPERVISED in os.environ:
        die_with_supervisor()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, "inference_node.engine", "SpliceEngine")


def die_with_supervisor() -> None:
    """SIGKILL this process when its parent ends; at once if it has ended already."""
    die_with_parent()
    # A parent that is pid 1 is the one that adopts orphans, unless our supervisor is pid 1 itself, as in a container.
    if os.getppid() == 1 and os.environ.get(SUPERVISED) != "1":
        os.kill(os.getpid(), signal.SIGKILL)
