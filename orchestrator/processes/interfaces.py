"""The addresses and network interfaces at which others reach this host."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from orchestrator.errors import ConfigError

GLOO = "GLOO_SOCKET_IFNAME"
"""Environment variable of torch's gloo process groups. Without it they listen on the address to
which the host's name resolves."""
ANY_PORT = 9


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with the address, or None."""
    found = (
        name
        for name, all_of_it in psutil.net_if_addrs().items()
        for a in all_of_it
        if a.address.partition("%")[0] == address
    )
    return next(found, None)


def address_towards(host: str) -> str:
    """Return this host's address on the route to `host`. Connecting a UDP socket sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def refuse_loopback_name(host: str, *, what: str) -> None:
    """Refuse a name that resolves to loopback here: Debian maps a host's own name to 127.0.1.1.

    Raises:
        ConfigError: `host` is such a name. Unknown names pass.
    """
    try:
        address = str(
            socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_STREAM)[0][4][0]
        ).partition("%")[0]
    except OSError:
        return
    if address != host and ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"{what} {host} is {address} on this host, which no other host reaches; "
            "give the host's address"
        )


def gloo_variables(host: str) -> dict[str, str]:
    """Return gloo's environment for the interface towards `host`, unless the user has set it."""
    if GLOO in os.environ:
        return {}
    name = interface_of(address_towards(host))
    return {} if name is None else {GLOO: name}
