"""What would grow for as long as a replica serves: the middleware's books of requests and versions.

`SPLICE_WEEK_STEPS` says how many publications, each with requests before, during and after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os

from tests.inference_node.scripted_server import Server, run

STEPS = int(os.environ.get("SPLICE_WEEK_STEPS", "200"))
HELD = {"model": "tiny", "hold": True, "stream": True}


async def publish(server: Server, version: int) -> None:
    """A swap under requests that continue, end early or are refused."""
    server.backend.release.clear()
    held = [asyncio.ensure_future(server.ask("/v1/completions", HELD)) for _ in range(2)]
    leaves = asyncio.Event()
    left = asyncio.ensure_future(server.ask("/v1/completions", HELD, leaves=leaves))
    while len(server.engine.output_processor.request_states) < 3:
        await asyncio.sleep(0)
    leaves.set()
    await left
    server.backend.disconnected = False  # it is for one request
    await server.pause(version)
    waiting = asyncio.ensure_future(server.ask("/v1/completions", {"model": "tiny"}))
    await server.control("CommitUpdate", version=version)
    server.backend.release.set()
    await asyncio.gather(*held, waiting)
    old = await server.ask("/v1/completions", {"model": f"tiny@{version - 1}"})
    new = await server.ask("/v1/completions", {"model": f"tiny@{version}", "stream": True})
    assert (old.status, new.status) == (404, 200)
    with contextlib.suppress(IndexError):  # it answers nothing
        await server.ask("/v1/completions", {"model": "tiny", "breaks": True})


def test_requests_and_versions_leave_nothing_behind() -> None:
    async def test() -> None:
        server, counted = Server(), list[int]()
        await server.control("reset")
        for version in range(1, STEPS + 1):
            await publish(server, version)
            for noted in (server.engine.calls, server.engine.entered, server.backend.asked):
                noted.clear()
            if version % (STEPS // 4) == 0:
                gc.collect()
                counted.append(len(gc.get_objects()))
        assert abs(counted[-1] - counted[0]) < 100, counted

    run(test)
