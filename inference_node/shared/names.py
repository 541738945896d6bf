"""Names that the node and the processes it starts agree on.

This module stays light, because the node imports neither torch nor vLLM.
"""

from __future__ import annotations

ENGINE_NAME = "splice"
"""Name of the weight-transfer engine."""
MIDDLEWARE = "inference_node.server.middleware.SpliceMiddleware"
WORKER_EXTENSION = "inference_node.worker.extension.SpliceWorkerExtension"

SUPERVISED = "SPLICE_SUPERVISED"
"""Environment variable: the node's pid, in the processes that it started."""
SECRET = "SPLICE_CONTROL_SECRET"
"""Environment variable: the secret of the control routes."""
MODEL_NAME = "SPLICE_MODEL_NAME"
"""Environment variable: the alias."""
MAX_BODY_BYTES = "SPLICE_MAX_BODY_BYTES"
"""Environment variable: the largest body of a request."""
WATCHDOG = "SPLICE_WATCHDOG"
"""Environment variable: the node's PUB socket, e.g. tcp://127.0.0.1:40123."""
ALLOW_UNVERIFIED = "SPLICE_ALLOW_UNVERIFIED"
"""Environment variable: "1" if quantised weights may be reloaded that cannot be verified."""
EXACT = "SPLICE_EXACT"
"""Environment variable: "1" if vLLM computes with `weight_transfer.exact`."""
EXACT_BACKEND = "FLASH_ATTN"
"""vLLM's attention backend on a GPU that `worker.exact` replaces."""
EXACT_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Of vLLM on a GPU then: this runner's sampler has torch's log-softmax, as the trainer."""
RUN_TOKEN = "SPLICE_RUN_TOKEN"
"""Environment variable: the run's token, which only the node gets."""

ADAPTER_ID, ADAPTER_NAME = 1, "splice"
"""The only adapter that vLLM knows with --enable-lora: the served version's."""

SECRET_HEADER = "x-splice-secret"
CONTROL_PREFIX = "/splice/v1/"
