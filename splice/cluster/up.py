"""`splice up`: all roles of a run on this host, in the background, until it is stopped.

    splice up -> python -m splice.cluster.up CONFIG (its own session) -> Cluster -> the roles

The background process writes RUN_DIR/up.json: its pid, whether it serves, or why it ended. When it
ends, for whatever reason, the roles end too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from orchestrator.control.control_socket import check_bind_address
from orchestrator.errors import ConfigError, ErrorCode, JobFailed, NodeLost, SpliceError
from orchestrator.processes.identity import identity
from orchestrator.processes.launch import RETRY_S, Launcher
from orchestrator.processes.locks import try_lock
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.python import python_command, python_environment
from orchestrator.protocol.config import without_weights
from orchestrator.protocol.hub import is_hub_id
from orchestrator.protocol.messages import InitialSync, Resync
from orchestrator.storage import layout
from orchestrator.storage.files import replace_file
from orchestrator.storage.journal import check_protocol, kept_token
from orchestrator.storage.run_folder import RunFolder
from splice.client.clients import SpliceClient, run_watched
from splice.client.run_file import KEYS, RUN_JSON, TOKEN, RunFile, load, stop_command
from splice.cluster import disk
from splice.cluster.disk import DiskForecast
from splice.cluster.doctor import list_gpus
from splice.cluster.environments import check_environments, install
from splice.cluster.machine import with_local_models
from splice.cluster.one_host import Cluster
from splice.cluster.preflight import (
    check_adapter,
    check_cpu_attention,
    check_exact,
    check_gpus,
    check_length,
    check_parallel,
    check_port_free,
    check_quantization,
    check_targets,
    read_model_config,
)
from splice.cluster.roles import roles_of
from splice.rl import decisions, evaluations

log = logging.getLogger("splice.up")
STATE, LOCK = "up.json", "up.lock"
PUBLISH = "--publish"
ROUTER, ROUTER_STATE = "router", "/splice/router"
"""The file with the router's URL, and its own route."""
ROUTER_S, ROUTER_START_S = 5.0, 60.0
"""Time for the router to answer, and to start."""
ROUTER_RESTARTS = 5
LOOK_S, STATUS_S = 10.0, 2.0
"""Time between two looks at the served version, and for the orchestrator to answer one."""
POLL_S = 0.2
TOKEN_CHARS = 16
"""Shortest run token that a user may choose."""
END_S = 15.0
"""Time between a node's orderly end and the orchestrator's."""
SERVED_S = 600.0
"""Longest wait for a replica to serve what the run has published."""
LEAVES_S = 5.0
"""Time for the orchestrator of a killed run to end."""
STOP_S = 90.0
"""Time for all roles to end before `stop` gives up."""


def check(run: RunFile) -> None:
    """Check the file against this host, the model and both environments. Starts nothing.

    Of a model from the Hub it downloads config and tokenizer.

    Raises:
        ConfigError: names the mistake and its remedy.
    """
    if run.orchestrator.curve_dir is not None:
        raise ConfigError(
            "orchestrator.curve_dir is for roles on several hosts; start them there with "
            "`splice serve`, `splice trainer` and `splice inference`, or leave it out"
        )
    check_bind_address(run.orchestrator.endpoint, has_keys=False)
    is_from_hub = is_hub_id(run.trainer.model)
    for role, section in (("trainer", run.trainer), ("inference", run.inference)):
        if shutil.which(section.python) is None:
            raise ConfigError(f"{role}.python: no interpreter at {section.python}")
    nodes = [run.inference_config(i) for i in range(run.inference.replicas)]
    if "cuda" in (run.trainer.device, run.inference.device):
        check_gpus(
            trainer_gpus=run.trainer.gpus,
            inference_gpus=[node.gpus for node in nodes],
            available=len(list_gpus()),
            transport=run.trainer.transport,
        )
        if run.trainer.device == "cuda" and not run.trainer.gpus:
            raise ConfigError("trainer.gpus is empty; name the trainer's GPUs, such as [0]")
    run = with_local_models(run, weights=False)
    nodes = [run.inference_config(i) for i in range(run.inference.replicas)]
    model_config = read_model_config(run.trainer.model)
    has_weights = is_from_hub or any(run.trainer.model.glob("*.safetensors"))
    if run.trainer.init == "hf" and not has_weights:
        raise ConfigError(without_weights(run.trainer.model, random='trainer.init = "random"'))
    read_model_config(run.inference.model)
    check_parallel(model_config, trainer=run.trainer_config(), inference=nodes)
    for node in nodes:
        check_quantization(node)
        check_length(node)
    check_exact(run.trainer, model_config)
    if run.inference.device == "cpu":
        check_cpu_attention(model_config)
    for node in nodes:
        check_port_free(node.host, node.port)
    if run.has_router:
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                "the router in front of several inference nodes needs aiohttp: "
                f"{install('router')}, or set router.enabled = false"
            )
        check_port_free(run.router.host, run.router.port)
    check_adapter(run.trainer.adapter)
    check_targets(run.trainer)
    check_environments(run)


def start(run: RunFile, *, resume: bool, publish: bool = True) -> int:
    """Start the background process; returns its pid.

    Args:
        publish: publish @0 once every node is ready, if nothing is served.

    Raises:
        ConfigError: the run is up, or its folder was used and `resume` is False.
    """
    _refuse_living(run.run_dir)
    check(run)
    refuse_used(run, resume=resume)
    run = with_local_models(run)
    run.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = _take_lock(run.run_dir)
    try:
        return _start(run, lock, publish=publish)
    finally:
        os.close(lock)  # the background process has it


def _refuse_living(run_dir: Path) -> None:
    """Refuse a folder in which a run lives. The orchestrator of a killed one may take a moment."""
    state, deadline_s = read_state(run_dir), time.monotonic() + LEAVES_S
    while not is_alive(state):
        if not RunFolder.is_in_use(run_dir):
            return
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"an orchestrator lives in {run_dir}; `{stop_command(run_dir)}` ends it"
            )
        time.sleep(POLL_S)
    raise ConfigError(
        f"the run in {run_dir} is up already (pid {state['pid']}); "
        f"`{stop_command(run_dir)}` ends it"
    )


def _take_lock(run_dir: Path) -> int:
    """Return the descriptor with the folder's lock, which lasts as long as a process has it."""
    lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(lock):
        os.close(lock)
        raise ConfigError(
            f"another `splice up` has started the run in {run_dir}; "
            f"`{stop_command(run_dir)}` ends it"
        )
    return lock


def _start(run: RunFile, lock: int, *, publish: bool) -> int:
    # `bound` is for an orchestrator whose nodes live on; these nodes begin again.
    for name in (STATE, ROUTER, "bound"):
        (run.run_dir / name).unlink(missing_ok=True)
    shutil.rmtree(run.run_dir / KEYS, ignore_errors=True)  # of a launcher for several hosts
    config = run.run_dir / RUN_JSON
    config.write_text(run.model_dump_json(indent=1))
    logs = run.run_dir / "logs"
    logs.mkdir(exist_ok=True)
    token = some_token(run.run_dir)
    with (logs / "up.log").open("ab") as out:
        process = subprocess.Popen(
            python_command(sys.executable, "-m", "splice.cluster.up", config, *[PUBLISH] * publish),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=python_environment({**os.environ, TOKEN: token}),
            pass_fds=[lock],
            start_new_session=True,
        )
    return process.pid


def refuse_used(run: RunFile, *, resume: bool) -> None:
    """Refuse a folder that holds an earlier run, or one that this version cannot continue.

    Raises:
        ConfigError: it does, and `resume` is False; or its layout or open jobs are of another
            version of splice.
    """
    layout.check(run.run_dir)
    journal = run.run_dir / "journal.sqlite"
    check_protocol(journal)
    if journal.exists() and not resume:
        raise ConfigError(
            f"{run.run_dir} holds an earlier run; continue it with `splice up --resume`, or "
            "choose another run_dir"
        )


def some_token(run_dir: Path) -> str:
    """Return the token of the run in this folder, or that of the environment, or a new one.

    Raises:
        ConfigError: that of the environment is too short.
    """
    path = run_dir / "token"
    kept = path.read_text().strip() if path.exists() else ""
    # A power loss may leave an empty file; the journal has it for sure.
    kept = kept or kept_token(run_dir / "journal.sqlite")
    given = os.environ.get(TOKEN, "")
    if not kept and given and len(given) < TOKEN_CHARS:
        raise ConfigError(f"{TOKEN} has {len(given)} characters; at least {TOKEN_CHARS} are needed")
    return kept or given or secrets.token_hex(16)


def wait_until_up(
    run_dir: Path, pid: int, *, timeout_s: float, on_wait: Callable[[str], None]
) -> dict[str, Any]:
    """Wait until the run serves its API; returns its state.

    Raises:
        ConfigError: the run could not start; says why.
        NodeLost: it did not start in time, or a node died.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        state = read_state(run_dir)
        if state.get("pid") == pid and state["phase"] == "up":
            return state
        if state.get("pid") == pid and state["phase"] == "failed":
            raise (ConfigError if state["is_config"] else NodeLost)(state["text"])
        if not is_running(pid):
            lines = (run_dir / "logs" / "up.log").read_text(errors="replace").splitlines()
            raise NodeLost("the background process ended:\n" + "\n".join(lines[-25:]))
        on_wait(state.get("text", "starting"))
        time.sleep(POLL_S)
    raise NodeLost(
        f"not up within {timeout_s:.0f} s; read {run_dir / 'logs'}, then `{stop_command(run_dir)}`"
    )


def follow(run_dir: Path, pid: int) -> int:
    """Wait until the run that this process has started ends. SIGTERM and Ctrl-C end it in order.

    Returns: 0 if it was stopped, 2 if a restart would change nothing, 1 if it failed otherwise.
    """
    told_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_end.set())
    while is_running(pid):
        if told_to_end.wait(POLL_S):
            stop(run_dir)
    state = read_state(run_dir)
    if state.get("pid") == pid and state.get("phase") == "ended":
        return 0
    log.error("the run has ended: %s", state.get("text", "its background process was killed"))
    return 2 if state.get("is_config") else 1


def read_state(run_dir: Path) -> dict[str, Any]:
    """Return what the background process wrote last, or nothing."""
    try:
        state: dict[str, Any] = json.loads((run_dir / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state


def is_alive(state: dict[str, Any]) -> bool:
    """Whether the background process of this state runs, and is not another one with its pid."""
    return state.get("identity") is not None and identity(state["pid"]) == state["identity"]


def is_running(pid: int) -> bool:
    """Whether this process runs. A child of ours that has ended does not."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
    return psutil.pid_exists(pid)


def status(run_dir: Path) -> dict[str, Any]:
    """Return what there is to know about the run: whether it is up, versions, nodes, URLs, loop.

    Raises:
        NodeLost: the orchestrator does not answer although it should run.
        ConfigError: the folder has another layout.
    """
    layout.check(run_dir)
    state = read_state(run_dir)
    answer: dict[str, Any] = {"run_dir": str(run_dir), "up": is_alive(state)}
    if state:
        answer |= {"phase": state["phase"], "pid": state["pid"], "text": state["text"]}
        warnings = [_retry_text(name, how) for name, how in state.get("given_up", {}).items()]
        if full := disk.warning(state.get("disk", {})):
            warnings.append(full)
        if warnings:
            answer["warning"] = "; ".join(warnings)
    if not answer["up"] and state.get("phase") in ("starting", "up"):
        answer |= {
            "phase": "ended",
            "text": "its background process was killed; `splice up FOLDER --resume` continues",
        }
    if (loop := decisions.status(run_dir)) is not None:
        answer["loop"] = loop
    if (best := evaluations.best_kept(run_dir)) is not None:
        answer["best"] = asdict(best)
    if not _has_orchestrator(run_dir, state):
        return answer
    with SpliceClient.of_run(run_dir) as client:
        found = client.status()
    answer["endpoint"] = (run_dir / "endpoint").read_text()
    answer |= found.model_dump(mode="json", exclude={"kind", "nodes", "dropped"})
    answer["alias"] = None if found.version is None else f"{found.name}@{found.version}"
    answer["nodes"] = [node.model_dump(mode="json") for node in found.nodes]
    answer["base_urls"] = [n.detail["base_url"] for n in found.nodes if "base_url" in n.detail]
    answer["router"] = _router_status(run_dir)
    return answer


def _retry_text(name: str, how: str) -> str:
    return (
        f"{name} {how} and was given up; the others serve. It starts again every "
        f"{RETRY_S / 60:.0f} minutes; `splice logs {name}` says why it ended"
    )


def _router_status(run_dir: Path) -> dict[str, Any] | None:
    """Return the router's URL, whether it answers, and the replicas that it knows."""
    try:
        url = (run_dir / ROUTER).read_text().strip()
    except OSError:
        return None
    try:
        found = httpx.get(url + ROUTER_STATE, timeout=ROUTER_S, trust_env=False).json()
        states = {replica["state"] for replica in found["replicas"].values()}
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Another program may have its port.
        return {"url": url, "state": "lost", "text": str(error), "replicas": {}}
    is_ready = "ready" in states
    return {"url": url, "state": "ready" if is_ready else "no replica is ready", **found}


def _has_orchestrator(run_dir: Path, state: dict[str, Any]) -> bool:
    """Whether an orchestrator should answer. A killed one leaves its endpoint."""
    if not (run_dir / "endpoint").exists():
        return False
    may_be_elsewhere = not state  # `splice up` starts it on this host
    return may_be_elsewhere or is_alive(state) or RunFolder.is_in_use(run_dir)


def stop(run_dir: Path) -> bool:
    """End the run and all of its roles on this host. False: nothing ran.

    Raises:
        NodeLost: the processes do not end.
    """
    state = read_state(run_dir)
    was_up = is_alive(state)
    if not was_up and not _has_orchestrator(run_dir, state):
        return False
    if was_up:  # it tells the orchestrator
        os.kill(state["pid"], signal.SIGTERM)
    else:
        with SpliceClient.of_run(run_dir) as client:
            client.stop_run()
    deadline_s = time.monotonic() + STOP_S
    while is_alive(state) or (not was_up and (run_dir / "endpoint").exists()):
        if time.monotonic() > deadline_s:
            raise NodeLost(f"the run in {run_dir} has not ended within {STOP_S:.0f} s")
        time.sleep(POLL_S)
    return True


# ---------------------------------------------------------------- the background process


class _State:
    """up.json. Each write replaces the file, so that a reader finds a whole one."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATE
        self._own = {"pid": os.getpid(), "identity": identity(os.getpid())}

    def write(self, phase: str, text: str, **more: object) -> None:
        """Phase: starting, up, failed or ended."""
        found = {**self._own, "phase": phase, "text": text, **more}
        replace_file(self._path, json.dumps(found, indent=1))


def supervise(config: Path, *, publish: bool) -> int:
    """Run all roles until a client or a signal ends the run. Returns the exit code."""
    run = load(config)
    state = _State(run.run_dir)
    state.write("starting", "starting the orchestrator")
    told_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_end.set())
    token = os.environ[TOKEN]
    try:
        with (
            Cluster(
                run,
                file=config,
                run_token=token,
                needs_all=False,
                on_wait=lambda text: _wait(state, text, told_to_end),
            ) as cluster,
            Launcher() as launcher,
        ):

            def wait(text: str) -> None:
                cluster.launcher.check()
                _wait(state, text, told_to_end)

            if publish:
                publish_first(cluster.client, wait)
            urls = replicas = cluster.base_urls
            _wait_served(cluster.client, urls, wait)
            if run.has_router:
                urls = [_start_router(run, launcher, config=config, token=token, wait=wait)]
            text = f"serving on {', '.join(urls)}"
            given_up = cluster.launcher.given_up()
            up = partial(state.write, "up", text, base_urls=urls, replica_urls=replicas)
            up(given_up=given_up)
            log.info("up: %s", ", ".join(urls))
            forecast, progress = DiskForecast(run.run_dir), _Progress(cluster.client)

            def look() -> None:
                nonlocal given_up
                if progress.look(time.monotonic()):
                    cluster.launcher.renew()
                    launcher.renew()
                before, given_up = given_up, cluster.launcher.given_up()
                if forecast.look(time.monotonic()) or given_up != before:
                    up(disk=forecast.found(), given_up=given_up)

            _watch(cluster, launcher, told_to_end, look)
    except _Told:
        state.write("ended", "stopped while it started")
        return 0
    except (SpliceError, OSError) as error:
        log.error("%s", error)
        state.write("failed", str(error), is_config=isinstance(error, ConfigError))
        return 1
    state.write("ended", "stopped")
    return 0


def publish_first(client: SpliceClient, wait: Callable[[str], None]) -> None:
    """Publish @0 of a new run to the replicas that are ready, or again what was served before a
    publication that failed."""
    status = client.status(timeout_s=30.0)
    if status.version is not None:
        return
    if status.publication == "poisoned":
        try:
            run_watched(client, Resync(), look=lambda: wait("publishing the last version again"))
            return
        except JobFailed as error:
            if error.code is not ErrorCode.BAD_INPUT:
                raise
            log.info("%s", error)  # nothing was ever served
    ready = sum(node.role == "inference" and node.state == "ready" for node in status.nodes)
    first = InitialSync(replicas=ready or None)
    run_watched(client, first, look=lambda: wait(f"publishing {status.name}@0"))


def _wait_served(client: SpliceClient, urls: list[str], wait: Callable[[str], None]) -> None:
    """Wait until a replica answers with the run's version: after a restart they receive it again.

    One that does not come in time is not waited for any longer.

    Raises:
        ConfigError: none can get it, until somebody changes something; says why.
    """
    deadline_s = time.monotonic() + SERVED_S
    # Asked each time: a job that a crash had interrupted may publish the next version meanwhile.
    name, trouble = "", ""
    while time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError, NodeLost):  # it may be starting again
            status = client.status(timeout_s=30.0)
            if status.is_final or (status.version is None and status.trouble):
                what = name or "the last version"
                raise ConfigError(f"{what} cannot be served again: {status.trouble}")
            if status.version is not None:
                name = f"{status.name}@{status.version}"
            elif not name:
                log.warning("nothing is served: publication %s", status.publication)
                return
            trouble = f" (the last attempt failed: {status.trouble})" if status.trouble else ""
        wait(f"waiting until {name or 'a version'} is served{trouble}")
        for url in urls:
            with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
                reply = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
                if reply.status_code in (401, 403):  # it asks for a key, so it serves
                    return
                if any(model["id"] == name for model in reply.json()["data"]):
                    return
        time.sleep(POLL_S)
    log.warning("no replica serves %s within %.0f s", name, SERVED_S)


def _start_router(
    run: RunFile, launcher: Launcher, *, config: Path, token: str, wait: Callable[[str], None]
) -> str:
    """Start the router; returns its URL.

    Raises:
        NodeLost: it ended, or did not bind in time.
    """
    path = run.run_dir / ROUTER
    path.unlink(missing_ok=True)
    router = roles_of(run, config)[-1]
    launcher.start(router.process(run.run_dir, env={TOKEN: token}, restarts=ROUTER_RESTARTS))
    deadline_s = time.monotonic() + ROUTER_START_S
    while not path.exists():
        wait("starting the router")
        launcher.check()
        if time.monotonic() > deadline_s:
            raise NodeLost(f"the router did not bind within {ROUTER_START_S:.0f} s")
        time.sleep(POLL_S)
    return path.read_text().strip()


class _Progress:
    """Whether the run has published a version since the last look."""

    def __init__(self, client: SpliceClient) -> None:
        self._client, self._next_s = client, 0.0
        self._version: int | None = None

    def look(self, now_s: float) -> bool:
        """Ask for the served version, if it is time to."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + LOOK_S
        try:
            version = self._client.status(timeout_s=STATUS_S).version
        except (TimeoutError, NodeLost):  # it may be starting again
            return False
        before = self._version
        self._version = before if version is None else version
        return before is not None and version is not None and version > before


class _Told(Exception):
    """The process was told to end while it started."""


def _wait(state: _State, text: str, told_to_end: threading.Event) -> None:
    if told_to_end.is_set():
        raise _Told
    state.write("starting", text)


def _watch(
    cluster: Cluster,
    launcher: Launcher,
    told_to_end: threading.Event,
    look: Callable[[], None],
) -> None:
    """Return when the run is to end. It continues without a router: replicas have their own URLs.

    Raises:
        NodeLost: a role died and will not start again.
    """
    has_router = True
    while not told_to_end.wait(POLL_S) and not cluster.has_ended:
        with contextlib.suppress(OSError):  # a full disk is what it tells of
            look()
        try:
            if has_router:
                launcher.check()
        except NodeLost as error:
            has_router = False
            log.error("the run continues without its router: %s", error)
        try:
            cluster.launcher.check()
        except NodeLost:  # or it ended in order, and the orchestrator is about to
            deadline_s = time.monotonic() + END_S
            while not cluster.has_ended:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(POLL_S)


if __name__ == "__main__":
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look at a replica
    sys.exit(supervise(Path(sys.argv[1]), publish=PUBLISH in sys.argv))
