"""The plug-in, and what the light half of the package may import."""

from __future__ import annotations

import subprocess
import sys


def test_register_is_idempotent_and_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from inference_node.plugin import register

    others = set(WeightTransferEngineFactory._registry) - {"splice"}
    register()
    register()
    assert set(WeightTransferEngineFactory._registry) == others | {"splice"}
    assert WeightTransferEngineFactory._registry["splice"]().__name__ == "SpliceEngine"


def test_the_node_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, inference_node.node.node; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        == "[]"
    )
