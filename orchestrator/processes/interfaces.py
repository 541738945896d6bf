"""The addresses and network interfaces at which others reach this host."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

import psutil

from orchestrator.errors import ConfigError

GLOO = "GLOO_SOCKET_IFNAME"
"""Environment variable of torch's gloo process groups. Without it they listen on the address to
which the host's name resolves."""
ANY_PORT = 9
_ELSEWHERE = (("192.0.2.1",), ("2001:db8::1",))
"""Addresses of no host (RFC 5737 and 3849), for the default route; of IPv4 and of IPv6."""


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


def is_wildcard(host: str) -> bool:
    """Whether `host` means all of this host's addresses, as 0.0.0.0 and :: do."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def reachable_host(host: str, *, towards: str | None = None) -> str:
    """Return the address to hand out for a bound `host`. For a wildcard, one of this host's own.

    Args:
        towards: a host that must reach this one. Without it, or if it is this host, the address
            on the default route is taken; loopback if there is no route.
    """
    if not is_wildcard(host):
        return host
    is_6 = ipaddress.ip_address(host).version == 6
    found = "::1" if is_6 else "127.0.0.1"
    for other in (towards, *_ELSEWHERE[is_6]):
        if other is None or is_wildcard(other):
            continue
        try:
            address = address_towards(other).partition("%")[0]
        except OSError:  # no such name, or no route
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return found


def reachable_url(url: str) -> str:
    """Return a URL of scheme, host and port with `reachable_host` in place of its host."""
    parts = urlsplit(url)
    host = reachable_host(parts.hostname or "")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


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
