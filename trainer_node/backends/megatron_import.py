"""Imports Megatron-Bridge without its side effects on this process.

Megatron's gated delta net imports flash-linear-attention, which asks the GPU for its name. That
initialises CUDA's driver, and no fork of the process could use it (`launcher.ranks`). This module
hides flash-linear-attention; `gated_delta.use_kernels` brings it back.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from trainer_node.backends import cudnn


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the block stdout is stderr, no logger speaks below a warning, and
    flash-linear-attention cannot be found; after it the root logger is as before.

    Bridge 0.6.2 imports Megatron-LM's training loop, which gives the root logger a handler that
    writes to stdout, and level INFO. A later `logging.basicConfig` would then do nothing, and
    stdout may be a pipe of JSON. Until Bridge imports `megatron.training` where it needs it.
    """
    root = logging.getLogger()
    handlers, level, disabled = [*root.handlers], root.level, root.manager.disable
    logging.disable(max(disabled, logging.INFO))
    fla = sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)
        if fla is None:
            sys.modules.pop("fla", None)


def load() -> None:
    """Import it on a GPU's host; on a CPU `cpu_shims.apply` does.

    Raises:
        ConfigError: as `cudnn.load`.
    """
    cudnn.load()
    with quiet():
        import megatron.bridge  # noqa: F401
