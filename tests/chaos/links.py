"""A TCP proxy for each link: reset, black hole, one way, slow, or cut after a number of bytes. What
travels is encrypted, so a fault goes by connection, direction and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["up", "down"]
SLOW_BYTES, SLOW_S = 2048, 0.02


@dataclass(slots=True)
class _Faults:
    held: set[str] = field(default_factory=set)
    """Directions in which nothing comes through, though the connection is up."""
    slow: bool = False
    cut_after: int | None = None
    """Bytes, in either direction, after which all connections are reset."""


class Link:
    """From its own port to `target`; port 0 of the target: refused until it is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int) -> None:
        self._loop, self.target, self._faults = loop, target, _Faults()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._soon(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def _soon(self, coroutine):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def reset(self) -> None:
        """Every connection, with RST."""
        self._loop.call_soon_threadsafe(self._reset)

    def hold(self, *directions: Direction) -> None:
        """Both: a black hole. One: a one-way link."""
        self._faults.held = set(directions)

    def slow(self) -> None:
        self._faults.slow = True

    def cut_after(self, nbytes: int) -> None:
        self._faults.cut_after = nbytes

    def heal(self) -> None:
        self._faults = _Faults()

    def close(self) -> None:
        self._soon(self._close())

    async def _close(self) -> None:
        self._server.close()
        self._reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reset(self) -> None:
        for pair in self._pairs:
            for writer in pair:
                with contextlib.suppress(OSError, AttributeError):
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        pair = (writer, back)
        self._pairs.add(pair)
        try:
            pumps = [
                asyncio.ensure_future(self._pump(reader, back, "up")),
                asyncio.ensure_future(self._pump(there, writer, "down")),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except asyncio.CancelledError:
            pass  # the link is closed; asyncio would log it as a defect
        finally:
            self._pairs.discard(pair)
            self._tasks.discard(task)
            for one in pair:
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(SLOW_BYTES if self._faults.slow else 65536):
                while direction in self._faults.held:
                    await asyncio.sleep(0.02)
                if self._faults.slow:
                    await asyncio.sleep(SLOW_S)
                if self._faults.cut_after is not None:
                    data, rest = data[: self._faults.cut_after], data[self._faults.cut_after :]
                    self._faults.cut_after -= len(data)
                    writer.write(data)
                    if rest or self._faults.cut_after == 0:
                        self._faults.cut_after = None
                        await asyncio.sleep(0.01)
                        self._reset()
                        return
                else:
                    writer.write(data)
                await writer.drain()


class Links:
    """The proxies, on a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self.by_name: dict[str, Link] = {}

    def add(self, name: str, target: int = 0) -> Link:
        self.by_name[name] = Link(self.loop, target)
        return self.by_name[name]

    def heal(self) -> None:
        for link in self.by_name.values():
            link.heal()

    def close(self) -> None:
        for link in self.by_name.values():
            link.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()
