"""CURVE keys of a run whose roles are on several hosts: made where there are none, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.protocol.curve import make_keys
from orchestrator.protocol.messages import check_node_id
from splice.client.run_file import CLIENT_KEYS, KEYS, R
from splice.cluster.roles import Role, check_several_hosts, roles_of

ENDPOINT = "tcp://0.0.0.0:40001"
"""Where the orchestrator binds if the file only says where it does on one host."""


def make(
    directory: Path, *, trainer_hosts: int, inference: Sequence[str], clients: Sequence[str]
) -> list[str]:
    """Make the keys of a run; returns the names of the folders for its nodes and clients.

    Raises:
        ConfigError: a name is taken or cannot be one, or the folder exists.
    """
    trainer = [("trainer", "trainer")]
    trainer += [("launcher", f"trainer-launcher-{rank}") for rank in range(trainer_hosts)]
    hosts = {
        "trainer": trainer,
        **{i: [("inference", i)] for i in inference},
        **{c: [("client", c)] for c in clients},
    }
    taken = ["orchestrator", *(node_id for _, node_id in trainer)]
    for name in map(check_node_id, (*inference, *clients)):
        if name in taken:
            raise ConfigError(f"the name {name} is taken; every node and client needs its own")
        taken.append(name)
    make_keys(directory, hosts=hosts)
    return list(hosts)


def spread(run: R) -> R:
    """Return the run as roles on several hosts need it: with an endpoint that other hosts can
    reach, and with keys. If the file names no keys, they are in the run's folder."""
    own = run.orchestrator
    more: dict[str, object] = {}
    if "127.0.0.1" in own.endpoint or "localhost" in own.endpoint:
        more["endpoint"] = ENDPOINT
    if own.curve_dir is None:
        more["curve_dir"] = run.run_dir / KEYS / "orchestrator"
    return run.model_copy(update={"orchestrator": own.model_copy(update=more)})


def provide(run: R) -> R:
    """Return `spread(run)`. Make its keys, or check that every role has its own.

    Raises:
        ConfigError: a role has none, or the settings cannot work on several hosts.
    """
    run = spread(run)
    check_several_hosts(run)
    folder = run.orchestrator.curve_dir
    assert folder is not None
    roles = [role for role in roles_of(run, "", is_spread=True) if role.keys is not None]
    nodes = [role.name for role in roles if role.kind == "inference"]
    hosts = next(role.hosts for role in roles if role.kind == "trainer")
    if not folder.parent.exists():
        make(folder.parent, trainer_hosts=hosts, inference=nodes, clients=[CLIENT_KEYS])
    for role in roles:
        _check(role, folder)
    return run


def _check(role: Role, folder: Path) -> None:
    assert role.keys is not None
    wanted = [f"{role.kind}.{role.name}"]
    if role.kind == "trainer":
        wanted += [f"launcher.trainer-launcher-{rank}" for rank in range(role.hosts)]
    elif role.kind != "inference":
        wanted = ["client.*"]
    for name in wanted:
        secret, public = f"{name}.key_secret", folder / "peers"
        if not any(role.keys.glob(secret)) or not any(public.glob(f"{name}.key")):
            raise ConfigError(
                f"{role.name} has no key {secret} in {role.keys}, or the orchestrator does not "
                f"know it; make new keys for this run: remove {folder.parent} and start again, or "
                "`splice keys`"
            )
