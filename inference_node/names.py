"""Names that the supervisor and the processes it starts agree on. Light on purpose: the supervisor imports neither torch nor vLLM."""

from __future__ import annotations

ENGINE_NAME = "splice"
"""Of the weight-transfer engine."""
MIDDLEWARE = "inference_node.middleware.SpliceMiddleware"
WORKER_EXTENSION = "inference_node.worker_extension.SpliceWorkerExtension"

SUPERVISED = "SPLICE_SUPERVISED"
"""Environment variable: the supervisor's pid, in the processes that it started."""
SECRET = "SPLICE_CONTROL_SECRET"
"""Environment variable: what the control routes ask for."""
MODEL_NAME = "SPLICE_MODEL_NAME"
"""Environment variable: the alias."""
MAX_BODY_BYTES = "SPLICE_MAX_BODY_BYTES"
"""Environment variable: the largest body of a request."""
WATCHDOG = "SPLICE_WATCHDOG"
"""Environment variable: the supervisor's PUB socket, e.g. tcp://127.0.0.1:40123."""
RUN_TOKEN = "SPLICE_RUN_TOKEN"
"""Environment variable: the run's token, for the supervisor alone."""

SECRET_HEADER = "x-splice-secret"
CONTROL_PREFIX = "/splice/v1/"
