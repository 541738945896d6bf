"""One vLLM server as a child: its command line, its environment, its process group, and calls to our routes inside it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from inference_node import names
from orchestrator.errors import ConfigError, NodeLost, SpliceError
from orchestrator.protocol.aside import call_aside
from orchestrator.protocol.config import InferenceConfig
from orchestrator.protocol.interfaces import gloo_variables
from orchestrator.protocol.messages import ErrorCode

TERM_GRACE_S = 15.0
KILL_GRACE_S = 10.0
HEALTH_POLL_S = 0.25
DEATH_POLL_S = 0.2
LOOPBACK = "127.0.0.1"
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 16384


class CallFailed(SpliceError):
    """A control action answered with an error."""

    def __init__(self, *, action: str, code: str, message: str, answer: Mapping[str, Any]) -> None:
        super().__init__(f"{action}: {message}")
        self.code = ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL
        self.answer = dict(answer)


def bind(host: str, port: int) -> socket.socket:
    """The API's listening address, bound and kept; port 0 lets the kernel choose.

    Raises:
        ConfigError: the port is taken, or the host is not one of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve on {host}:{port}: {error.strerror}; choose another port, or 0") from error
    return listener


def arguments(config: InferenceConfig) -> list[str]:
    """vLLM's command line for a node's configuration."""
    args = [
        "--model", str(config.model), "--served-model-name", config.name, "--dtype", config.dtype, "--load-format", config.load_format,
        "--tensor-parallel-size", str(config.tensor_parallel), "--max-model-len", str(config.max_model_len),
        "--max-num-seqs", str(config.max_num_seqs), "--api-server-count", "1",
        "--weight-transfer-config", json.dumps({"backend": names.ENGINE_NAME}),
        "--worker-extension-cls", names.WORKER_EXTENSION,
        "--middleware", names.MIDDLEWARE,
        # Rollouts may restrict the tokens; their log-probs must be of the distribution that was sampled from.
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    if config.enforce_eager:
        args.append("--enforce-eager")
    if config.device == "cpu":
        args += ["--kv-cache-memory-bytes", str(int(config.cpu_kv_cache_gb * 2**30))]
    else:
        args += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    return [*args, *config.extra_args]


def environment(config: InferenceConfig, *, secret: str, watchdog_endpoint: str) -> dict[str, str]:
    """vLLM's environment: ours, without the run's token, with what plug-in, workers and middleware need."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPLICE_")}
    env |= {
        names.SUPERVISED: str(os.getpid()),
        names.SECRET: secret,
        names.MODEL_NAME: config.name,
        names.MAX_BODY_BYTES: str(config.max_body_bytes),
        names.WATCHDOG: watchdog_endpoint,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    # All of a node's vLLM processes are on this host.
    env.setdefault("VLLM_HOST_IP", LOOPBACK)
    env |= gloo_variables(LOOPBACK)
    if env.get("VLLM_PLUGINS") and names.ENGINE_NAME not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] += f",{names.ENGINE_NAME}"
    if config.device == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif config.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.gpus))
    return env


class VllmProcess:
    """Starts, watches, calls and ends one vLLM server. Use from one thread, the main one: the child dies with the thread.

    Args:
        listener: the bound socket of the API; stays ours over a restart.
        watchdog_endpoint: where the workers listen for aborts.
    """

    def __init__(self, config: InferenceConfig, *, listener: socket.socket, watchdog_endpoint: str) -> None:
        self._config, self._listener = config, listener
        self._watchdog_endpoint = watchdog_endpoint
        self._secret = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        host, port = listener.getsockname()[:2]
        reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._reached_at = f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}"
        self.base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._http = httpx.Client()

    # ------------------------------------------------------------ the process

    def start(self) -> None:
        """Start the server in a process group of its own.

        The listener's queue outlives a server: what is in it is read by the next one. With another secret for each, that one refuses what was
        meant for the one before.
        """
        self._secret = secrets.token_urlsafe(32)
        self._http.close()
        # A connection for each call: one that is kept may be dropped by the server just as the next call takes it, which looks like its end.
        self._http = httpx.Client(
            base_url=self._reached_at, trust_env=False, headers={names.SECRET_HEADER: self._secret}, limits=httpx.Limits(max_keepalive_connections=0)
        )  # fmt: skip
        fd = self._listener.fileno()
        argv = [sys.executable, "-m", "inference_node.serve", "--listen-fd", str(fd), *arguments(self._config)]
        env = environment(self._config, secret=self._secret, watchdog_endpoint=self._watchdog_endpoint)
        self._log = self._open_log()
        self._process = subprocess.Popen(
            argv, env=env, pass_fds=[fd], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=self._log or sys.stderr.fileno(), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _open_log(self) -> IO[bytes] | None:
        if self._config.log_file is None:
            return None
        self._config.log_file.parent.mkdir(parents=True, exist_ok=True)
        return open(self._config.log_file, "ab")

    @property
    def is_running(self) -> bool:
        """Whether the API process lives."""
        return self._process is not None and self._process.poll() is None

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
                code = self._process.returncode if self._process is not None else None
                raise NodeLost(f"vLLM ended with exit code {code} while starting.\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise NodeLost(f"vLLM did not answer within {deadline_s:.0f} s (startup_timeout_s).\n{self.log_tail()}")
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health", timeout=2.0).status_code == 200:
                    return
            on_tick()
            time.sleep(HEALTH_POLL_S)

    def log_tail(self) -> str:
        """The last lines of the log, for an error message."""
        path: Path | None = self._config.log_file
        if path is None or not path.exists():
            return "(its output went to this process's stderr)"
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"Last lines of {path}:\n" + "\n".join(lines)

    def stop(self) -> None:
        """SIGTERM to the group, a deadline, SIGKILL; nobody is left. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            family = _family(process.pid)
            _signal_group(process.pid, signal.SIGTERM)
            _, alive = psutil.wait_procs(family, timeout=TERM_GRACE_S)
            if alive:
                _signal_group(process.pid, signal.SIGKILL)
                for straggler in alive:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        straggler.kill()
                psutil.wait_procs(alive, timeout=KILL_GRACE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_GRACE_S)
            _signal_group(process.pid, signal.SIGKILL)
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self) -> None:
        """`stop`, and free the HTTP client."""
        self.stop()
        self._http.close()

    # ------------------------------------------------------------ calls

    def call(
        self, action: str, *, timeout_s: float, on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None, **arguments: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Run a control action inside the server.

        Args:
            on_progress: called on another thread with what the action says before its end, each time one object.
            on_poll: called on this thread every `DEATH_POLL_S` meanwhile.

        Raises:
            CallFailed: it answered with an error.
            NodeLost: no answer; the server is dead (noticed at once) or stuck.
        """
        timeout = httpx.Timeout(timeout_s, connect=5.0)

        def post() -> tuple[int, dict[str, Any]]:
            with self._http.stream("POST", f"{names.CONTROL_PREFIX}{action}", json=arguments, timeout=timeout) as response:
                for said in map(json.loads, response.iter_lines()):
                    if "progress" in said:
                        on_progress(said)
                    elif "answer" in said:
                        return int(said["status"]), said["answer"]
                    else:
                        return response.status_code, said
            raise ValueError("it ended without an answer")

        try:
            status, answer = self._while_running(post, action, on_poll, until_s=time.monotonic() + timeout_s + 1.0)
        except (httpx.HTTPError, ValueError) as error:
            state = "runs but did not answer" if self.is_running else "has ended"
            raise NodeLost(f"vLLM {state} ({action}: {type(error).__name__}: {error})") from error
        if status != 200:
            problem = answer.get("error", {})
            if problem.get("code") == ErrorCode.NODE_LOST:
                raise NodeLost(str(problem.get("message")))
            raise CallFailed(
                action=action,
                code=str(problem.get("code")),
                message=str(problem.get("message", str(answer)[:500])),
                answer=answer,
            )
        return answer

    def _while_running(
        self, post: Callable[[], tuple[int, dict[str, Any]]], action: str, on_poll: Callable[[], None], *, until_s: float
    ) -> tuple[int, dict[str, Any]]:
        """The answer. A dead server's connections do not always break: one that it had not accepted waits in our listener's queue."""

        def check() -> None:
            if not self.is_running:
                raise NodeLost(f"vLLM has ended ({action})")
            if time.monotonic() > until_s:  # the client's own timeout begins anew with each line
                raise NodeLost(f"vLLM runs but did not answer ({action})")
            on_poll()

        return call_aside(post, check=check, poll_s=DEATH_POLL_S, name="splice-call")


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return [p for p in psutil.process_iter() if _group_of(p.pid) == pid]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
