"""Forks the ranks of `family`, as `forkserver` does for the other checks, from a process with the
CPU stand-ins of `cpu_te`.

    python -m tests.trainer_node.familyserver
"""

from __future__ import annotations

import json
import os
import sys

from tests.trainer_node import forkserver


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Megatron's modules print when they are imported
    from trainer_node.model import cpu_shims, cpu_te

    cpu_te.install()
    import megatron.bridge
    import transformers

    cpu_shims._cuda_calls_answer_the_cpu()
    cpu_shims._tensor_cuda_is_the_identity()
    cpu_shims._no_cuda_rng()
    import tests.trainer_node.family

    del megatron, transformers, tests
    for line in sys.stdin:
        codes = forkserver._run(json.loads(line))
        print(json.dumps({"codes": codes}), file=answers, flush=True)


if __name__ == "__main__":
    main()
