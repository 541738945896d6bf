"""An inference node whose chunks have at most 40 kB, so that a tiny model is sent in many. Its
workers import this module, too.
"""

import sys

if __name__ == "__main__":
    from inference_node import __main__
    from inference_node.shared import names

    names.WORKER_EXTENSION = "tests.inference_node.small_chunks.SpliceWorkerExtension"
    sys.exit(__main__.main())

from inference_node.worker import chunk_plan
from inference_node.worker.extension import SpliceWorkerExtension

__all__ = ["SpliceWorkerExtension"]
chunk_plan.MAX_CHUNK_BYTES = 40_000
