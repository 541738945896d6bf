"""An inference node that waits seconds for a stuck vLLM, not a minute."""

import sys

from inference_node import __main__
from inference_node.node import vllm_process

if __name__ == "__main__":
    vllm_process.QUICK_S = 15.0
    sys.exit(__main__.main())
