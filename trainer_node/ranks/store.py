"""The listening socket of rank 0's TCPStore. Imports no torch, for the launcher."""

from __future__ import annotations

import socket

STORE_FD = "SPLICE_STORE_FD"
"""Environment variable of rank 0: descriptor of its TCPStore's listening socket."""


def listen(host: str, port: int) -> socket.socket:
    """Listen only on this address: a TCPStore's own socket listens on all. Port 0: any."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=1024)
