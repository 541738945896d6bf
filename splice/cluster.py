"""Runs all roles on one host: orchestrator, trainer node and inference nodes.

The environment carries secrets, JSON files in the run folder the configuration. The kernel chooses
the ports.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.processes.launch import Launcher, NodeProcess
from orchestrator.processes.python import python_command
from orchestrator.processes.restarts import RestartBudget
from orchestrator.protocol.config import InferenceConfig, TrainerConfig
from orchestrator.protocol.messages import Status, Transport
from orchestrator.publication.config import PublicationConfig
from splice.client import SpliceClient

log = logging.getLogger("splice.cluster")
OnWait = Callable[[str], None]
_ENV = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The processes of a run and their interpreters.

    Attributes:
        trainer_module: module run under torchrun. Tests that inject failures pass another one.
        publication: how versions are published. `trainer.transport` overrides its `transport`.
        keep_versions: versions whose checkpoints stay on disk; None: all.
        trainer_restarts, orchestrator_restarts: restarts after crashes within an hour that came
            after the run's last progress.
        node_restarts: likewise, of a killed trainer launcher or inference node.
        run_token: the run's secret; empty: a new one.
        needs_all: whether a start waits for all replicas. Otherwise it goes on without those that
            were given up, or are not ready in time, while another one is.
        run_file: the file that the orchestrator reads instead of options; see `splice.run_file`.
            The run's folder may then exist.
    """

    run_dir: Path
    name: str
    trainer_python: Path
    inference_python: Path
    trainer: TrainerConfig
    inference: tuple[InferenceConfig, ...]
    trainer_gpus: tuple[int, ...] = ()
    trainer_module: str = "trainer_node"
    trainer_env: dict[str, str] = field(default_factory=dict)
    inference_env: dict[str, str] = field(default_factory=dict)
    publication: PublicationConfig = field(default_factory=PublicationConfig)
    keep_versions: int | None = None
    ready_timeout_s: float = 600.0
    train_timeout_s: float = 3600.0
    trainer_restarts: int = 2
    orchestrator_restarts: int = 2
    node_restarts: int = 2
    control_endpoint: str = "tcp://127.0.0.1:0"
    run_token: str = ""
    needs_all: bool = True
    run_file: Path | None = None


STOP_S = 5.0
"""Time for the orchestrator to answer `stop_run`. After it the launcher ends the nodes."""


class Cluster:
    """A running cluster, as a context manager. Entering waits until every node is ready; see
    `ClusterConfig.needs_all`.

    Raises (on enter):
        ConfigError: an interpreter is missing, or the run folder exists.
        NodeLost: a node died or was not ready in time. The text quotes its log.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        on_wait: OnWait | None = None,
        measures_memory: bool = False,
    ) -> None:
        self.config = config
        self.run_token = config.run_token or secrets.token_hex(16)
        self.launcher = Launcher(measures_memory=measures_memory)
        self.client: SpliceClient
        self._on_wait = on_wait or (lambda _: None)

    def __enter__(self) -> Cluster:
        self._check()
        is_prepared = self.config.run_file is not None
        self.config.run_dir.mkdir(parents=True, mode=0o700, exist_ok=is_prepared)
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
        """The OpenAI URLs of replicas that were ready, without /v1, in the order of
        `ClusterConfig.inference`."""
        urls = {
            n.node_id: str(n.detail["base_url"])
            for n in self.client.status().nodes
            if n.role == "inference" and "base_url" in n.detail
        }
        return [urls[name] for name in self._replicas if name in urls]

    @property
    def _replicas(self) -> list[str]:
        return [f"inference-{i}" for i in range(len(self.config.inference))]

    # ------------------------------------------------------------ inside

    def _check(self) -> None:
        pythons = {"trainer": self.config.trainer_python, "inference": self.config.inference_python}
        for what, python in pythons.items():
            if not python.exists():
                raise ConfigError(
                    f"no {what} interpreter at {python}; run `make envs`, or pass --{what}-python"
                )
        if self.config.run_dir.exists() and self.config.run_file is None:
            raise ConfigError(
                f"the run folder {self.config.run_dir} exists; choose a new one for each run"
            )

    def _start(self) -> None:
        config = self.config
        # Model folders need no hub. For a hub id the user's HF_HUB_OFFLINE decides.
        folders = all(
            model.is_dir() for model in (config.trainer.model, *(i.model for i in config.inference))
        )
        env = {**_ENV, **(_OFFLINE if folders else {}), "SPLICE_RUN_TOKEN": self.run_token}
        logs = config.run_dir / "logs"
        argv = python_command(config.trainer_python, "-m", "splice", "serve", "--resume")
        argv += self._serve_arguments()
        killed_one = _identity(config.run_dir / "endpoint")
        self.launcher.start(
            NodeProcess(
                name="orchestrator",
                argv=argv,
                env=env,
                log_file=logs / "orchestrator.log",
                restarts=RestartBudget(config.orchestrator_restarts),
            )
        )
        endpoint = self._wait_endpoint(killed_one)
        for index, inference in enumerate(config.inference):
            self._start_inference(f"inference-{index}", inference, endpoint=endpoint, env=env)
        self._start_trainer(endpoint, env)
        self.client = SpliceClient(endpoint=endpoint, run_token=self.run_token).__enter__()
        try:
            self._wait_ready()
        except BaseException:
            self.client.__exit__(None, None, None)
            raise

    def _serve_arguments(self) -> list[str]:
        config = self.config
        if config.run_file is not None:
            return [str(config.run_file)]
        argv = ["--run-dir", str(config.run_dir), "--name", config.name]
        argv += ["--endpoint", config.control_endpoint, "--replicas", str(len(config.inference))]
        argv += ["--keep-versions", str(config.keep_versions or 0)]
        argv += ["--ready-timeout-s", str(config.ready_timeout_s)]
        argv += ["--train-timeout-s", str(config.train_timeout_s)]
        return argv + _publication_options(config.publication, transport=config.trainer.transport)

    def _start_inference(
        self, node_id: str, inference: InferenceConfig, *, endpoint: str, env: dict[str, str]
    ) -> None:
        logs = self.config.run_dir / "logs"
        path = self.config.run_dir / f"{node_id}.json"
        inference = inference.model_copy(update={"log_file": logs / f"{node_id}.vllm.log"})
        path.write_text(inference.model_dump_json(indent=1))
        argv = python_command(self.config.inference_python, "-m", "inference_node")
        argv += _node_arguments(endpoint, node_id, path)
        self.launcher.start(
            NodeProcess(
                name=node_id,
                argv=argv,
                env={**env, **self.config.inference_env},
                log_file=logs / f"{node_id}.log",
                restarts=RestartBudget(self.config.node_restarts),
                is_supervisor=True,
                group="inference",
            )
        )

    def _start_trainer(self, endpoint: str, env: dict[str, str]) -> None:
        config = self.config
        path = config.run_dir / "trainer.json"
        path.write_text(config.trainer.model_dump_json(indent=1))
        argv = python_command(config.trainer_python, "-m", "splice", "trainer")
        argv += _node_arguments(endpoint, "trainer", path)
        argv += ["--module", config.trainer_module]
        argv += ["--max-restarts", str(config.trainer_restarts)]
        own = trainer_variables(config.trainer, gpus=config.trainer_gpus) | config.trainer_env
        node = NodeProcess(
            name="trainer",
            argv=argv,
            env={**env, **own},
            log_file=config.run_dir / "logs" / "trainer.log",
            restarts=RestartBudget(config.node_restarts),
            is_supervisor=True,
        )
        self.launcher.start(node)

    def _wait_endpoint(self, killed_one: tuple[int, int] | None) -> str:
        """Return the new endpoint. A killed orchestrator left its own file behind."""
        path, deadline_s = self.config.run_dir / "endpoint", time.monotonic() + 60
        while _identity(path) in (None, killed_one):
            self.launcher.check()
            if time.monotonic() > deadline_s:
                raise NodeLost(
                    "the orchestrator did not bind within 60 s:\n"
                    + self.launcher.nodes["orchestrator"].log_tail()
                )
            time.sleep(0.05)
        return path.read_text().strip()

    def _wait_ready(self) -> None:
        wanted, needs_all = {"trainer", *self._replicas}, self.config.needs_all
        deadline_s = time.monotonic() + self.config.ready_timeout_s
        while missing := wanted - _ready(self.client.status(timeout_s=30.0)):
            self.launcher.check(each=needs_all)
            may_go_on = "trainer" not in missing and len(missing) < len(self._replicas)
            is_late = time.monotonic() > deadline_s
            are_given_up = missing <= self.launcher.given_up().keys()
            if not needs_all and may_go_on and (is_late or are_given_up):
                log.warning("the run starts without %s", ", ".join(sorted(missing)))
                return
            self._on_wait(f"waiting for {', '.join(sorted(missing))}")
            if is_late:
                tails = "\n".join(
                    f"--- {n}:\n{self.launcher.nodes[n].log_tail(10)}" for n in sorted(missing)
                )
                raise NodeLost(
                    f"not ready within {self.config.ready_timeout_s:.0f} s: "
                    f"{', '.join(sorted(missing))}\n{tails}"
                )
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


def trainer_variables(trainer: TrainerConfig, *, gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment of a trainer's launcher on this host."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if trainer.device == "cuda" and gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return own


def _node_arguments(endpoint: str, node_id: str, config: Path) -> Sequence[str]:
    return ["--endpoint", endpoint, "--node-id", node_id, "--config", str(config)]


def _ready(status: Status) -> set[str]:
    return {n.node_id for n in status.nodes if n.state == "ready"}


_WITHOUT_OPTION = (
    "join_timeout_s",
    "plan_timeout_s",
    "transfer_timeout_s",
    "commit_timeout_s",
    "recovery_timeout_s",
    "attempts",
)


def _publication_options(publication: PublicationConfig, *, transport: Transport) -> list[str]:
    """`publication` as options of `splice serve`.

    Raises:
        ConfigError: a setting that has no option differs from its default.
    """
    defaults = PublicationConfig()
    for setting in _WITHOUT_OPTION:
        if getattr(publication, setting) != getattr(defaults, setting):
            raise ConfigError(f"a cluster cannot set the publication's {setting}; leave it out")
    options = ["--transport", transport, "--pause-mode", publication.pause_mode]
    options += ["--drain-s", str(publication.drain_s)]
    options += ["--mode", publication.mode, "--shadow-bytes", str(publication.shadow_bytes)]
    options += ["--canary" if publication.canary else "--no-canary"]
    if publication.full_every is not None:
        options += ["--full-every", str(publication.full_every)]
    return options
