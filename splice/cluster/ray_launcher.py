"""`splice up --on ray`: the roles of a run.toml as actors in one placement group.

    a bundle for each role -> a detached actor in it -> the role's process

The actor starts its process again after a crash. Ray starts the actor again after the death of
actor or host, on another host if it must. All hosts see the run's folder, where the roles find
endpoint and token. The placement group goes when the orchestrator ends for good.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.errors import ConfigError, NodeLost
from orchestrator.processes.launch import Launcher
from orchestrator.protocol.messages import InitialSync
from splice.client.clients import SpliceClient, run_watched
from splice.client.run_file import CLIENT_KEYS, RunFile, stop_command
from splice.cluster.environments import install
from splice.cluster.roles import CURVE, Role, keys_of, refuse_many_hosts, roles_of

FILE, NAMESPACE = "ray.json", "splice"
RESTARTS = 5
"""Restarts of a role's process within an hour, and of its actor in all."""
ENDPOINT_S = 300.0
"""Time for the orchestrator to bind, before the other roles start."""
ROOM_S = 60.0
"""Time for the cluster to reserve CPUs and GPUs."""
GRACE_S = 20.0
"""Time for the nodes to end after the orchestrator."""
GONE_S = 60.0
"""Time for Ray to end what is left of an ended run, which includes `GRACE_S`."""
POLL_S = 0.5


def bundle_of(role: Role) -> dict[str, float]:
    """Return what Ray reserves for a role."""
    return {"CPU": 1, "GPU": role.gpus} if role.gpus else {"CPU": 1}


class RoleActor:
    """Runs a role's process on the host that Ray chose."""

    def __init__(self, role: Role, run_dir: Path, group: str) -> None:
        self._role, self._run_dir, self._group = role, run_dir, group
        self._node = role.process(run_dir, *_of_host(role), restarts=RESTARTS)
        self._launcher = Launcher().__enter__()
        # The kernel ends the process with the thread that started it.
        self._thread = threading.Thread(target=self._keep, name="splice-role", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """Return why the process will not start again; empty while it runs."""
        try:
            self._launcher.check()
        except NodeLost as error:
            return str(error)
        return ""

    def _keep(self) -> None:
        deadline_s = time.monotonic() + ENDPOINT_S
        while self._role.keys is not None and not (self._run_dir / "endpoint").exists():
            if time.monotonic() > deadline_s:  # the process will say so
                break
            time.sleep(POLL_S)
        self._launcher.start(self._node)
        while self._node.exit_code != 0 and not self.lost():
            time.sleep(POLL_S)
        if self._role.name == "orchestrator":  # the run has ended
            time.sleep(GRACE_S)
            _remove(self._group, own=f"{self._group} {self._role.name}")
        threading.Event().wait()


def _of_host(role: Role) -> Iterator[str]:
    """Yield the settings that only the role's host knows."""
    ray = _ray()
    if role.kind == "trainer":
        yield from ("--set", f"trainer.host={ray.util.get_node_ip_address()}")
    if role.gpus:
        numbers = [int(number) for number in ray.get_gpu_ids()] * role.copies
        yield from ("--set", f"{role.kind}.gpus={numbers}")


def up(
    run: RunFile,
    *,
    address: str,
    publish: bool,
    timeout_s: float,
    on_wait: Callable[[str], None],
    data_folder: Path | None = None,
) -> dict[str, Any]:
    """Place all roles, wait until they are ready, publish @0; returns the URLs by what they are.

    Args:
        address: of the Ray cluster; "auto": this host's, or RAY_ADDRESS.
        data_folder: folder of the loop's data, as in `roles_of`. The loop publishes @0, and ends
            the run.

    Raises:
        ConfigError: no cluster, no room on it, the run is up, or a role refuses its settings.
        NodeLost: a role was not ready in time.
    """
    ray, file = _ray(), run.run_dir / FILE
    placed = roles_of(run, file, is_spread=True, data_folder=data_folder)
    refuse_many_hosts(placed, launcher="ray")
    (run.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    run.run_dir.chmod(0o700)
    (run.run_dir / FILE).write_text(run.model_dump_json(indent=1))
    try:
        # Ray has its workers import from this process's current folder first. In the run's folder
        # nothing hides an installed package.
        with contextlib.chdir(run.run_dir):
            # It warns that the actors go with their group, which is meant.
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        group = f"splice {run.run_dir}"
        _wait_gone(ray, run_dir=run.run_dir, group=group, on_wait=on_wait)
        actors = _place(ray, placed, run_dir=run.run_dir, group=group)
        try:
            return _wait_ready(ray, run, actors, publish, time.monotonic() + timeout_s, on_wait)
        except BaseException:
            _remove(group)
            raise
    finally:
        ray.shutdown()


def _wait_gone(
    ray: ModuleType, *, run_dir: Path, group: str, on_wait: Callable[[str], None]
) -> None:
    """Wait until Ray has ended what is left of an ended run: its group, then the actors in it.

    Raises:
        ConfigError: the run has not ended.
    """
    deadline_s = time.monotonic() + GONE_S
    while (has_group := _group(ray, group) is not None) or _kill_actors(ray, group):
        if (has_group and (run_dir / "endpoint").exists()) or time.monotonic() > deadline_s:
            raise ConfigError(
                f"the run in {run_dir} is up on Ray already; `{stop_command(run_dir)}` ends it"
            )
        on_wait(f"waiting until Ray has ended {group!r}")
        time.sleep(POLL_S)


def _place(ray: ModuleType, wanted: list[Role], *, run_dir: Path, group: str) -> dict[str, Any]:
    bundles = [bundle_of(role) for role in wanted]
    for name in ("endpoint", "router"):
        (run_dir / name).unlink(missing_ok=True)
    placed = ray.util.placement_group(bundles, strategy="PACK", name=group, lifetime="detached")
    try:
        return _actors(ray, wanted, placed, bundles, run_dir=run_dir, group=group)
    except BaseException:  # also an interrupt: a detached group would stay forever
        ray.util.remove_placement_group(placed)
        raise


def _actors(
    ray: ModuleType,
    wanted: list[Role],
    placed: Any,
    bundles: list[dict[str, float]],
    *,
    run_dir: Path,
    group: str,
) -> dict[str, Any]:
    if not placed.wait(ROOM_S):
        free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        raise ConfigError(f"Ray has no room for {bundles} within {ROOM_S:.0f} s; free are {free}")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    make = ray.remote(RoleActor)
    return {
        role.name: make.options(
            name=f"{group} {role.name}",
            lifetime="detached",
            max_restarts=RESTARTS,
            num_cpus=1,
            num_gpus=role.gpus,
            scheduling_strategy=strategy(placed, placement_group_bundle_index=index),
        ).remote(role, run_dir, group)
        for index, role in enumerate(wanted)
    }


def _wait_ready(
    ray: ModuleType,
    run: RunFile,
    actors: dict[str, Any],
    publish: bool,
    deadline_s: float,
    on_wait: Callable[[str], None],
) -> dict[str, Any]:
    def look(text: str) -> None:
        on_wait(text)
        try:
            lost = ray.get([actor.lost.remote() for actor in actors.values()], timeout=ROOM_S)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
            lost = []  # an actor starts again
        except ray.exceptions.RayActorError as error:
            raise NodeLost(f"an actor has died for good: {error}") from error
        if why := "\n".join(filter(None, lost)):
            raise ConfigError(why)

    def wait(for_what: set[str]) -> None:
        look(f"waiting for {', '.join(sorted(for_what))}")
        if time.monotonic() > deadline_s:
            raise NodeLost(f"not ready: {', '.join(for_what)}; read {run.run_dir / 'logs'}")
        time.sleep(POLL_S)

    os.environ.setdefault(CURVE, str(keys_of(run, CLIENT_KEYS)))
    while not (run.run_dir / "endpoint").exists():
        wait({"orchestrator"})
    router = run.run_dir / "router"
    with SpliceClient.of_run(run.run_dir) as client:
        while missing := _missing(client, set(actors), router):
            wait(missing)
        if publish and client.status().version is None:
            run_watched(client, InitialSync(), look=lambda: look(f"publishing {run.name}@0"))
        replicas = [n.detail["base_url"] for n in client.status().nodes if n.role == "inference"]
    urls = [router.read_text().strip()] if run.has_router else replicas
    return {"base_urls": urls, "replica_urls": replicas}


def _missing(client: SpliceClient, roles: set[str], router: Path) -> set[str]:
    ready = {node.node_id for node in client.status().nodes if node.state == "ready"}
    return roles - ready - {"orchestrator", "loop"} - ({"router"} if router.exists() else set())


def _remove(group: str, *, own: str = "") -> None:
    """End the group's actors permanently, the caller's own last, and free the resources."""
    ray = _ray()
    _kill_actors(ray, group, but=own)
    if (found := _group(ray, group)) is not None:
        ray.util.remove_placement_group(found)


def _group(ray: ModuleType, name: str) -> Any | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def _kill_actors(ray: ModuleType, group: str, *, but: str = "") -> list[str]:
    """Kill the group's actors and return their names.

    Ray (2.60) only ends the processes of a removed group. Its actors stay "restarting" and their
    names taken, until somebody kills them (ray-project/ray pull request 57726).
    """
    named = {name for name in ray.util.list_named_actors() if name.rpartition(" ")[0] == group}
    for name in named - {but}:
        with contextlib.suppress(ValueError):  # it has gone meanwhile
            ray.kill(ray.get_actor(name))
    return sorted(named)


def _ray() -> ModuleType:
    """Return Ray, which only this launcher needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"--on ray needs Ray: {install('ray')} ({error})") from None
    return ray
