"""Runs one vLLM server as a child process, and calls our routes inside it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from inference_node.shared import names
from orchestrator.errors import ConfigError, NodeLost, SpliceError
from orchestrator.processes.aside import call_aside
from orchestrator.processes.child import ChildProcess
from orchestrator.processes.interfaces import gloo_variables, reachable_host
from orchestrator.processes.python import python_command
from orchestrator.protocol.config import InferenceConfig
from orchestrator.protocol.messages import ErrorCode
from orchestrator.protocol.messages.base import Request

LOG_LINES = 2000
"""Lines of the log that are searched for vLLM's first error."""
_ERROR = re.compile(r"ERROR\b.*?\b((?:\w+\.)*\w*(?:Error|Exception): .+)")
HEALTH_POLL_S = 0.25
DEATH_POLL_S = 0.2
QUICK_S = 60.0
"""Timeout for calls that move no weights."""
CALL_GRACE_S = 10.0
"""Seconds added to a request's deadline, so that the worker's watchdog answers before a timeout."""
LOOPBACK = "127.0.0.1"


class CallFailed(SpliceError):
    """An action inside vLLM answered with an error."""

    def __init__(self, *, action: str, code: str, message: str, answer: Mapping[str, Any]) -> None:
        super().__init__(f"{action}: {message}")
        self.code = ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL
        self.answer = dict(answer)


def bind(host: str, port: int) -> socket.socket:
    """The API's listening address, bound and kept; port 0 lets the kernel choose.

    Raises:
        ConfigError: the port is taken, or the host does not belong to this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot serve on {host}:{port}: {error.strerror}; choose another port, or 0"
        ) from error
    return listener


def arguments(config: InferenceConfig) -> list[str]:
    """vLLM's command line for a node's configuration."""
    args = [
        "--model", str(config.model), "--served-model-name", config.name, "--dtype", config.dtype,
        "--load-format", config.load_format,
        "--tensor-parallel-size", str(config.tensor_parallel), "--max-model-len",
        str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs), "--api-server-count", "1",
        "--weight-transfer-config", json.dumps({"backend": names.ENGINE_NAME}),
        "--worker-extension-cls", names.WORKER_EXTENSION,
        "--middleware", names.MIDDLEWARE,
        # Rollouts may restrict the tokens. Their log-probs must be of the sampled distribution.
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip # a command line
    given = " ".join(config.extra_args).replace("-", "_")
    if not re.search(r"(?:^| )__(?:generation_)?config\b", given):
        # Else the model's generation_config.json sets top_p and the like for every request that
        # names none, and nobody trains on that distribution. Its end tokens still apply.
        args += ["--generation-config", "vllm"]
    if config.enforce_eager:
        args.append("--enforce-eager")
    if config.device == "cpu":
        args += ["--kv-cache-memory-bytes", str(int(config.cpu_kv_cache_gb * 2**30))]
    else:
        args += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
        if config.exact:
            args += exact_options(eager=config.enforce_eager)
        if not _has_flashinfer() and "gdn_prefill_backend" not in given:
            # On Hopper vLLM takes FlashInfer for gated delta nets, also where it is missing.
            args += ["--gdn-prefill-backend", "triton"]
    return [*args, *config.extra_args]


def exact_options(*, eager: bool) -> list[str]:
    """Options of `worker.exact` on a GPU, which replaces this backend: no compiler, but CUDA graphs
    of decoding."""
    graphs = {"mode": 0, "cudagraph_mode": "NONE" if eager else "FULL_DECODE_ONLY"}
    backend = ["--attention-backend", names.EXACT_BACKEND]
    return [*backend, "--compilation-config", json.dumps(graphs)]


def _search_path() -> str:
    """PATH of vLLM's processes: this environment's programs first, ninja among them."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def _has_flashinfer() -> bool:
    """Whether FlashInfer is installed and can compile its kernels, as vLLM 0.33 looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    compilers = (f"{home}/bin/nvcc",) if home else ("nvcc", "/usr/local/cuda/bin/nvcc")
    return (
        importlib.util.find_spec("flashinfer") is not None
        and any(map(shutil.which, compilers))
        and shutil.which("ninja", path=_search_path()) is not None
    )


def environment(config: InferenceConfig, *, secret: str, watchdog_endpoint: str) -> dict[str, str]:
    """Return vLLM's environment: ours without the run's token, plus our settings for plug-in,
    workers and middleware."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPLICE_")}
    env |= {
        names.SUPERVISED: str(os.getpid()),
        names.SECRET: secret,
        names.MODEL_NAME: config.name,
        names.MAX_BODY_BYTES: str(config.max_body_bytes),
        names.WATCHDOG: watchdog_endpoint,
        names.ALLOW_UNVERIFIED: str(int(config.allow_unverified)),
        names.EXACT: str(int(config.exact)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    # All vLLM processes of a node are on this host.
    env.setdefault("VLLM_HOST_IP", LOOPBACK)
    env |= gloo_variables(LOOPBACK)
    if env.get("VLLM_PLUGINS") and names.ENGINE_NAME not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] += f",{names.ENGINE_NAME}"
    if config.device == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env["CUDA_VISIBLE_DEVICES"] = ""
        return env
    env["PATH"] = _search_path()
    # The measured runs sample with PyTorch, without FlashInfer's sampler.
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if config.exact:
        env |= names.EXACT_ENVIRONMENT
    if config.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpus))
    return env


class VllmProcess:
    """Starts, watches, calls and ends one vLLM server. Use it from the main thread: the child dies
    with the thread.

    Args:
        listener: the bound socket of the API, which outlives a restart.
        watchdog_endpoint: where the workers listen for aborts.
    """

    def __init__(
        self, config: InferenceConfig, *, listener: socket.socket, watchdog_endpoint: str
    ) -> None:
        self._config, self._listener = config, listener
        self._watchdog_endpoint = watchdog_endpoint
        self._secret = ""
        host, port = listener.getsockname()[:2]
        reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._reached_at = f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}"
        given = config.advertised_host or reachable_host(host)
        self.base_url = f"http://[{given}]:{port}" if ":" in given else f"http://{given}:{port}"
        self._http = httpx.Client(trust_env=False)
        self._child = ChildProcess(
            argv=(),
            env={},
            log_file=config.log_file,
            inherits_env=False,
            dies_with_parent=False,  # our plug-in inside vLLM does it
        )

    # ------------------------------------------------------------ the process

    def start(self) -> None:
        """Start the server.

        The listener's queue outlives a server. Each server has its own secret, so the next one
        refuses requests that were queued for the last one.
        """
        self._secret = secrets.token_urlsafe(32)
        self._http.close()
        # One connection for each call: the server may drop a kept one just as the next call takes
        # it.
        self._http = httpx.Client(
            base_url=self._reached_at,
            trust_env=False,
            headers={names.SECRET_HEADER: self._secret},
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        fd = self._listener.fileno()
        self._child.argv = [
            *python_command(sys.executable, "-m", "inference_node.server", "--listen-fd", str(fd)),
            *arguments(self._config),
        ]
        self._child.env = environment(
            self._config, secret=self._secret, watchdog_endpoint=self._watchdog_endpoint
        )
        self._child.pass_fds = [fd]
        self._child.start()

    @property
    def is_running(self) -> bool:
        """Whether the API process lives."""
        return self._child.is_running

    def rotate_log(self) -> None:
        """Rotate the log; a full disk does not end the node."""
        with contextlib.suppress(OSError):
            self._child.rotate_log()

    def wait_healthy(self, *, deadline_s: float, on_tick: Callable[[], None]) -> None:
        """Wait until the server answers.

        Args:
            on_tick: called between polls; what it raises ends the wait.

        Raises:
            NodeLost: the server ended, or did not answer in time; with the end of its log.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            if not self.is_running:
                code = self._child.exit_code
                raise NodeLost(
                    f"vLLM ended with exit code {code} while starting.\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise NodeLost(
                    f"vLLM did not answer within {deadline_s:.0f} s "
                    f"(startup_timeout_s).\n{self.log_tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health", timeout=2.0).status_code == 200:
                    return
            on_tick()
            time.sleep(HEALTH_POLL_S)

    def log_tail(self) -> str:
        """Return the last lines of the log and vLLM's first error, for an error message."""
        return self._with_cause(self._child.log_tail())

    def _with_cause(self, text: str) -> str:
        cause = first_error(self._child.log_tail(LOG_LINES))
        return text if cause is None else f"{text}\nvLLM's first error: {cause}"

    def stop(self) -> None:
        """End the server and all of its processes. Safe to call twice."""
        self._child.stop()
        self._child.process = None

    def close(self) -> None:
        """`stop`, and free the HTTP client."""
        self.stop()
        self._http.close()

    # ------------------------------------------------------------ calls

    def request(
        self,
        message: Request,
        *,
        on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Have a request of the orchestrator done inside the server.

        Args:
            on_progress: called on another thread with each object that comes before the answer.
            on_poll: called on this thread every `DEATH_POLL_S` during the wait.

        Raises:
            CallFailed: the action answered with an error.
            NodeLost: no answer. The server has ended (noticed at once) or is stuck.
        """
        timeout_s = message.deadline_s + CALL_GRACE_S
        body = message.model_dump_json()
        return self._post(
            type(message).__name__, body, timeout_s, on_progress=on_progress, on_poll=on_poll
        )

    def call(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Run an action of the node's own inside the server; raises as `request`."""
        return self._post(action, json.dumps(arguments), QUICK_S)

    def insist(self, action: str, **arguments: Any) -> None:
        """Make a call that must succeed, because otherwise it is unknown what vLLM serves.

        Raises:
            NodeLost: the call failed, so vLLM must be ended.
        """
        try:
            self.call(action, **arguments)
        except CallFailed as error:
            raise NodeLost(f"vLLM failed a call that must succeed: {error}") from error

    def _post(
        self,
        action: str,
        body: str,
        timeout_s: float,
        *,
        on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        url = f"{names.CONTROL_PREFIX}{action}"

        def post() -> tuple[int, dict[str, Any]]:
            with self._http.stream("POST", url, content=body, timeout=timeout) as response:
                for line in map(json.loads, response.iter_lines()):
                    if "progress" in line:
                        on_progress(line)
                    elif "answer" in line:
                        return int(line["status"]), line["answer"]
                    else:
                        return response.status_code, line
            raise ValueError("it ended without an answer")

        until_s = time.monotonic() + timeout_s + 1.0

        def check() -> None:
            # A dead server's connections do not always break: those that it had not accepted wait
            # in our listener's queue.
            if not self.is_running:
                raise NodeLost(f"vLLM has ended ({action})")
            if time.monotonic() > until_s:  # the client's timeout restarts with each line
                raise NodeLost(f"vLLM runs but did not answer ({action})")
            on_poll()

        try:
            status, answer = call_aside(post, check=check, poll_s=DEATH_POLL_S, name="splice-call")
        except (httpx.HTTPError, ValueError) as error:
            state = "runs but did not answer" if self.is_running else "has ended"
            raise NodeLost(f"vLLM {state} ({action}: {type(error).__name__}: {error})") from error
        if status != 200:
            problem = answer.get("error", {})
            if problem.get("code") == ErrorCode.NODE_LOST:
                raise NodeLost(self._with_cause(str(problem.get("message"))))
            raise CallFailed(
                action=action,
                code=str(problem.get("code")),
                message=str(problem.get("message", str(answer)[:500])),
                answer=answer,
            )
        return answer


def first_error(log: str) -> str | None:
    """The first exception in vLLM's log: the cause, which others wrap. None: it names none."""
    found = _ERROR.search(log)
    return None if found is None else found.group(1)
