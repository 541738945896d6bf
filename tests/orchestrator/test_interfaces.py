"""The interface that gloo's process groups listen on."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from orchestrator.errors import ConfigError
from orchestrator.processes.interfaces import (
    GLOO,
    address_towards,
    gloo_variables,
    interface_of,
    refuse_loopback_name,
)

LISTEN = """
import psutil, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(sorted({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}))
"""  # noqa: E501

OF_THIS_HOST = sorted(
    address.address
    for name, found in psutil.net_if_addrs().items()
    for address in found
    if address.family == socket.AF_INET and psutil.net_if_stats()[name].isup
)


def test_an_addresss_interface():
    addresses = {a.address: name for name, found in psutil.net_if_addrs().items() for a in found}
    assert interface_of("127.0.0.1") == addresses["127.0.0.1"]
    assert interface_of("203.0.113.7") is None
    assert address_towards("127.0.0.1") == address_towards("localhost") == "127.0.0.1"


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.delenv(GLOO, raising=False)
    assert gloo_variables("127.0.0.1") == {GLOO: interface_of("127.0.0.1")}
    monkeypatch.setenv(GLOO, "ib0")
    assert gloo_variables("127.0.0.1") == {}


def test_a_name_that_is_loopback_here_is_not_given_to_other_hosts():
    for host in ("127.0.0.1", "::1", "no-such-host.invalid", *OF_THIS_HOST):
        refuse_loopback_name(host, what="host")
    with pytest.raises(
        ConfigError,
        match=r"host localhost is (127\.0\.0\.1|::1) on this host.* give the host's address",
    ):
        refuse_loopback_name("localhost", what="host")


@pytest.mark.parametrize("address", OF_THIS_HOST)
def test_gloo_listens_where_it_is_told(address, monkeypatch):
    monkeypatch.delenv(GLOO, raising=False)
    for name, value in gloo_variables(address).items():
        monkeypatch.setenv(name, value)
    ran = subprocess.run(
        [sys.executable, "-c", LISTEN], capture_output=True, text=True, timeout=120, check=True
    )
    expected = address_towards(address)
    assert ran.stdout.strip() == f"[{expected!r}]"
