"""Runs all roles of a run on one host: orchestrator, trainer node and inference nodes.

The environment carries the run's token, files in its folder the configuration.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.processes.launch import Launcher
from orchestrator.protocol.messages import Status
from splice.client.clients import SpliceClient
from splice.client.run_file import RUN_JSON, TOKEN, RunFile, absolute
from splice.cluster.roles import Role, before_trainer, roles_of

log = logging.getLogger("splice.cluster")
OnWait = Callable[[str], None]
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


STOP_S = 5.0
"""Time for the orchestrator to answer `stop_run`. After it the launcher ends the nodes."""


class Cluster:
    """A running cluster, as a context manager. Entering waits until every node is ready; see
    `needs_all`.

    Args:
        run: what to run; `RunFile(...)`, or `splice.client.run_file.load`.
        file: the file that has it, in the run's folder. None: the folder is a new one, and the
            cluster writes the file.
        run_token: the run's secret; empty: a new one.
        trainer_module: module that the trainer's ranks run. Tests that inject failures pass another
            one.
        orchestrator_restarts: restarts of the orchestrator after crashes within an hour that came
            after the run's last progress.
        node_restarts: the same of a killed trainer launcher or inference node.
        needs_all: whether a start waits for all replicas. Otherwise it continues without those that
            were given up, or are not ready in time, while another one is.
        measures_memory: `launcher.peak_bytes` has the most memory that all processes used.

    Raises (on enter):
        ConfigError: an interpreter is missing, or the run folder exists.
        NodeLost: a node died or was not ready in time. The text quotes its log.
    """

    def __init__(
        self,
        run: RunFile,
        *,
        file: Path | None = None,
        run_token: str = "",
        trainer_module: str = "trainer_node",
        orchestrator_restarts: int = 2,
        node_restarts: int = 2,
        needs_all: bool = True,
        on_wait: OnWait | None = None,
        measures_memory: bool = False,
    ) -> None:
        self.run = run if file is not None else absolute(run)
        self.file = file or self.run.run_dir / RUN_JSON
        self.run_token = run_token or secrets.token_hex(16)
        self.launcher = Launcher(measures_memory=measures_memory)
        self.client: SpliceClient
        self._is_new = file is None
        self._trainer_module = trainer_module
        self._orchestrator_restarts, self._node_restarts = orchestrator_restarts, node_restarts
        self._needs_all = needs_all
        self._on_wait = on_wait or (lambda _: None)

    def __enter__(self) -> Cluster:
        self._check()
        self.run.run_dir.mkdir(parents=True, mode=0o700, exist_ok=not self._is_new)
        if self._is_new:
            self.file.write_text(self.run.model_dump_json(indent=1))
        self.launcher.__enter__()
        try:
            self._start()
        except BaseException:
            self.launcher.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._stop_in_order()
            self.client.__exit__(kind, error, trace)
        finally:
            self.launcher.__exit__(kind, error, trace)

    @property
    def base_urls(self) -> list[str]:
        """The OpenAI URLs of the replicas that were ready, without /v1, in order."""
        urls = {
            n.node_id: str(n.detail["base_url"])
            for n in self.client.status().nodes
            if n.role == "inference" and "base_url" in n.detail
        }
        return [urls[name] for name in self._inference_ids if name in urls]

    @property
    def _inference_ids(self) -> list[str]:
        return [f"inference-{i}" for i in range(self.run.inference.replicas)]

    # ------------------------------------------------------------ inside

    def _check(self) -> None:
        for role, python in (
            ("trainer", self.run.trainer.python),
            ("inference", self.run.inference.python),
        ):
            if shutil.which(python) is None:
                raise ConfigError(
                    f"no {role} interpreter at {python}; run `make envs`, or set {role}.python"
                )
        if self._is_new and self.run.run_dir.exists():
            raise ConfigError(
                f"the run folder {self.run.run_dir} exists; choose a new one for each run"
            )

    def _start(self) -> None:
        run = self.run
        # Model folders need no hub. For a hub id the user's HF_HUB_OFFLINE decides.
        folders = run.trainer.model.is_dir() and run.inference.model.is_dir()
        self._env = {**(_OFFLINE if folders else {}), TOKEN: self.run_token}
        killed_one = _identity(run.run_dir / "endpoint")
        orchestrator, *nodes = roles_of(run, self.file)
        self._launch(orchestrator, restarts=self._orchestrator_restarts)
        endpoint = self._wait_endpoint(killed_one)
        self.client = SpliceClient(endpoint=endpoint, run_token=self.run_token).__enter__()
        try:
            first = before_trainer(run)
            for role in sorted(nodes, key=lambda role: role.kind == "trainer"):
                if role.kind == "router":
                    continue
                if role.kind == "trainer" and first:
                    self._wait_ready(set(first), " before the trainer starts on the same GPU")
                self._launch_node(role)
            self._wait_ready({"trainer", *self._inference_ids})
        except BaseException:
            self.client.__exit__(None, None, None)
            raise

    def _launch_node(self, role: Role) -> None:
        more = ("--module", self._trainer_module)
        if role.kind == "inference":
            log_file = self.run.run_dir / "logs" / f"{role.name}.vllm.log"
            more = ("--set", f"inference.log_file={log_file}")
        self._launch(role, *more, restarts=self._node_restarts)

    def _launch(self, role: Role, *more: str, restarts: int) -> None:
        python = self.run.trainer.python
        node = role.process(
            self.run.run_dir, *more, python=python, env=self._env, restarts=restarts
        )
        node.is_supervisor = role.kind != "serve"
        node.group = "inference" if role.kind == "inference" else ""
        self.launcher.start(node)

    def _wait_endpoint(self, killed_one: tuple[int, int] | None) -> str:
        """Return the new endpoint. A killed orchestrator left its own file."""
        path, deadline_s = self.run.run_dir / "endpoint", time.monotonic() + 60
        while _identity(path) in (None, killed_one):
            self.launcher.check()
            if time.monotonic() > deadline_s:
                raise NodeLost(
                    "the orchestrator did not bind within 60 s:\n"
                    + self.launcher.nodes["orchestrator"].log_tail()
                )
            time.sleep(0.05)
        return path.read_text().strip()

    def _wait_ready(self, wanted: set[str], why: str = "") -> None:
        timeout_s = self.run.orchestrator.ready_timeout_s
        needs_all, deadline_s = self._needs_all, time.monotonic() + timeout_s
        while missing := wanted - _ready(self.client.status(timeout_s=30.0)):
            self.launcher.check(each=needs_all)
            may_go_on = "trainer" not in missing and len(missing) < self.run.inference.replicas
            is_late = time.monotonic() > deadline_s
            are_given_up = missing <= self.launcher.given_up().keys()
            if not needs_all and may_go_on and (is_late or are_given_up):
                log.warning("the run starts without %s", ", ".join(sorted(missing)))
                return
            names = ", ".join(sorted(missing)) + why
            self._on_wait(f"waiting for {names}")
            if is_late:
                tails = "\n".join(
                    f"--- {n}:\n{self.launcher.nodes[n].log_tail(10)}" for n in sorted(missing)
                )
                raise NodeLost(f"not ready within {timeout_s:.0f} s: {names}\n{tails}")
            time.sleep(0.25)

    @property
    def has_ended(self) -> bool:
        """Whether a client has ended the run."""
        return self.launcher.nodes["orchestrator"].exit_code == 0

    def _stop_in_order(self) -> None:
        """Ask the run to end and wait for its processes. The launcher then ends the others."""
        for node in self.launcher.nodes.values():
            node.stopping = True
        try:
            if not self.has_ended:
                self.client.stop_run(timeout_s=STOP_S)
        except (TimeoutError, NodeLost):
            return  # the nodes were not told to end; the launcher ends them
        deadline_s = time.monotonic() + 20
        processes = [n.process for n in self.launcher.nodes.values() if n.process is not None]
        while time.monotonic() < deadline_s and any(p.poll() is None for p in processes):
            time.sleep(0.1)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _ready(status: Status) -> set[str]:
    return {n.node_id for n in status.nodes if n.state == "ready"}
