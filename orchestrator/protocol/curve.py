"""Who may use the control socket: CURVE keys, made from the run's token or read from the folders of
`splice keys`.

ZeroMQ checks the keys in its handshake, before it delivers any message. A stranger therefore
reaches no code of ours, and cannot read what others send.

Without key folders, every process derives the same two key pairs from the run's token, so the token
never travels to a stranger. With key folders, each node has its own key, and the orchestrator knows
the role and node id of each key.

    DIR/orchestrator/server.key_secret          `orchestrator.curve_dir`
    DIR/orchestrator/peers/ROLE.NODE_ID.key     public keys of those that may join
    DIR/NAME/server.key, ROLE.NODE_ID.key_secret    SPLICE_CURVE_DIR=DIR/NAME on that peer's host
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.utils import z85

from orchestrator.errors import ConfigError

Principal = tuple[str, str]
"""(role, node id). A client's key is valid for every client id."""
_SALT = b"splice control channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKeys:
    """What a node or client needs to connect, as Z85 text."""

    server_public: bytes
    public: bytes
    secret: bytes

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Apply the keys to a socket before it connects."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """What the orchestrator needs to bind.

    `principals`: public key -> role and node id. None: the keys come from the token.
    """

    public: bytes
    secret: bytes
    principals: Mapping[bytes, Principal] | None = None

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Apply the keys to a socket before it binds."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = (
            self.public,
            self.secret,
            True,
        )

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a key may connect. pyzmq's authenticator calls this."""
        return self.principals is None or key in self.principals


@functools.lru_cache(maxsize=8)
def _derived(token: str) -> tuple[bytes, bytes]:
    """Derive the secret keys of the orchestrator and of its peers.

    scrypt (RFC 7914), because a person may have chosen the token.

    Raises:
        ConfigError: there is no token.
    """
    if not token:
        raise ConfigError(
            "there is no run token; set SPLICE_RUN_TOKEN to the run's secret, the same on all hosts"
        )
    material = hashlib.scrypt(token.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=64)
    return z85.encode(material[:32]), z85.encode(material[32:])


def server_keys(run_token: str, curve_dir: Path | None = None) -> ServerKeys:
    """Return the orchestrator's keys, from `curve_dir` or else from the token.

    Raises:
        ConfigError: the folder lacks them.
    """
    if curve_dir is None:
        secret, _ = _derived(run_token)
        return ServerKeys(public=zmq.curve_public(secret), secret=secret)
    public, secret = _read(curve_dir / "server.key_secret", wants_secret=True)
    principals: dict[bytes, Principal] = {}
    for path in sorted((curve_dir / "peers").glob("*.key")):
        role, _, node_id = path.stem.partition(".")
        principals[_read(path)[0]] = (role, node_id)
    if not principals:
        raise ConfigError(
            f"{curve_dir}/peers has no ROLE.NODE_ID.key; make keys with `splice keys`"
        )
    return ServerKeys(public=public, secret=secret, principals=principals)


def peer_keys(run_token: str, *, role: str, node_id: str, folder: Path | None = None) -> PeerKeys:
    """Return a peer's keys, from the folder in SPLICE_CURVE_DIR, or else from this one, or else
    from the token.

    Raises:
        ConfigError: the folder lacks them.
    """
    folder = Path(own) if (own := os.environ.get("SPLICE_CURVE_DIR")) else folder
    if folder is None:
        server, peer = _derived(run_token)
        return PeerKeys(
            server_public=zmq.curve_public(server), public=zmq.curve_public(peer), secret=peer
        )
    pattern = f"{role}.*.key_secret" if role == "client" else f"{role}.{node_id}.key_secret"
    found = sorted(folder.glob(pattern))
    if not found:
        raise ConfigError(
            f"{folder} (SPLICE_CURVE_DIR) has no {pattern}; "
            "make one with `splice keys`, and copy its folder here"
        )
    public, secret = _read(found[0], wants_secret=True)
    return PeerKeys(server_public=_read(folder / "server.key")[0], public=public, secret=secret)


def _read(path: Path, *, wants_secret: bool = False) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the key {path}: {error}. `splice keys DIR` makes keys: the "
            "orchestrator's "
            "folder is DIR/orchestrator, a node's DIR/<its id>"
        ) from error
    if wants_secret and secret is None:
        raise ConfigError(f"{path} holds no secret key; make keys with `splice keys`")
    return public, secret or b""


def make_keys(directory: Path, *, hosts: Mapping[str, Sequence[Principal]]) -> None:
    """Write a folder for the orchestrator and one for each host. Folders are 0700, keys 0600.

    Args:
        directory: the new folder.
        hosts: name -> the nodes and clients that run there.

    Raises:
        ConfigError: `directory` exists; keys are never overwritten.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists; keys are never overwritten, choose a new folder")
    previous = os.umask(0o077)
    try:
        peers = directory / "orchestrator" / "peers"
        peers.mkdir(parents=True)
        server_public, _ = zmq.auth.create_certificates(peers.parent, "server")
        for host, principals in hosts.items():
            folder = directory / host
            folder.mkdir()
            (folder / "server.key").write_text(Path(server_public).read_text())
            for role, node_id in principals:
                public, _ = zmq.auth.create_certificates(folder, f"{role}.{node_id}")
                Path(public).replace(peers / Path(public).name)
    finally:
        os.umask(previous)
