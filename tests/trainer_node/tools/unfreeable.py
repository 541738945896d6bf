"""A rank whose node must not be freed: that aborts, as a tensor on a GPU does after a CUDA fault.

CASE=spoilt    the state is unknown after a failed request
CASE=lost      likewise, and the device cannot be used: its groups cannot be closed
CASE=broken    the loop itself fails
"""

from __future__ import annotations

import os
import sys
from typing import Any

from trainer_node import node
from trainer_node.ranks import gpu


class Aborts:
    """Stand-in for a tensor in use on another stream."""

    def __del__(self) -> None:
        os.write(2, b"this was freed\n")
        os.abort()


class Unfreeable(node.Node):
    """A node with such a tensor."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.tensor, self.case = Aborts(), os.environ["CASE"]
        self.trainer.is_unknown = True
        if self.case == "lost":
            gpu.works = lambda device: False
            self.transfer._groups = {"inference-0": Aborts()}  # type: ignore[dict-item]

    def serve(self) -> int:
        code = super().serve()
        self.link = None  # which refers to the node; other ranks have none
        return code

    def _dispatch(self, request: Any) -> Any:
        of_the_pass = Aborts() if self.case == "lost" else None  # noqa: F841  - its frame has it
        return super()._dispatch(request)

    def _fail(self, *given: Any, **more: Any) -> None:
        super()._fail(*given, **more)
        if self.case == "broken":
            of_the_loop = Aborts()  # noqa: F841
            raise KeyError("a test said so")


if __name__ == "__main__":
    node.Node = Unfreeable  # type: ignore[misc]
    sys.exit(node.main())
