"""Which network interface a library should listen on, where it takes an interface's name and not an address."""

from __future__ import annotations

import os
import socket

import psutil

GLOO = "GLOO_SOCKET_IFNAME"
"""Environment of torch's gloo process groups. Without it they listen on whatever address the host's name resolves to."""
ANY_PORT = 9


def interface_of(address: str) -> str | None:
    """Name of this host's interface that has the address; None if none has it."""
    found = (
        name for name, all_of_it in psutil.net_if_addrs().items() for a in all_of_it if a.address.partition("%")[0] == address
    )
    return next(found, None)


def address_towards(host: str) -> str:
    """This host's address on the route to `host`. Connecting a UDP socket sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def gloo_variables(host: str) -> dict[str, str]:
    """Environment for gloo to listen on the interface that leads to `host`, loopback for this host's own; what the user has set stays."""
    if GLOO in os.environ:
        return {}
    name = interface_of(address_towards(host))
    return {} if name is None else {GLOO: name}
