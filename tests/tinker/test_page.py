"""docs/tinker.md against the server, and the server against the SDK."""

from __future__ import annotations

from importlib.metadata import version

from tests.tinker.page import PAGE, answered, called, page


def test_the_server_answers_every_endpoint_that_the_sdk_calls():
    assert version("tinker") == "0.38.0", "the SDK that the page speaks of"
    found = called()
    assert len(found) > 40, "the scan sees the SDK's calls"
    assert sorted(found - set(answered())) == []


def test_the_page_has_the_servers_table():
    assert PAGE.read_text() == page(), "python -m tests.tinker.page"
