"""One OpenAI URL in front of several inference nodes.

    request -> the ready replica with the fewest requests in flight -> its answer, streamed through
                    | no connection, 503, or 404 for `name@N`
                    v
               the next one

A replica refuses a version that it does not serve, before it computes anything. Asking the next
one is therefore exact, even while versions move. The orchestrator's status says which replicas are
ready, and a lost one gets no request. An answer that has begun is never asked for again.

It runs where the orchestrator does, and needs aiohttp (the extra `router`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web
from aiohttp.cookiejar import DummyCookieJar
from yarl import URL

from orchestrator.errors import SpliceError
from orchestrator.processes.interfaces import reachable_url
from orchestrator.processes.logs import log_to_stderr
from orchestrator.protocol.messages import NodeStatus
from orchestrator.storage.files import replace_file
from splice.client.clients import AsyncSpliceClient
from splice.client.replicas import Replica, Replicas
from splice.client.run_file import load

log = logging.getLogger("splice.router")
URL_FILE = "router"
"""File in the run's folder with the router's URL."""
STATE_ROUTE = "/splice/router"
REPLICA_HEADER = "x-splice-replica"
POLL_S = 0.25
STATUS_S = 5.0
CONNECT_S = 2.0
KEEP_ALIVE_S = 2.0
"""Below the 5 s after which vLLM closes an idle connection."""
WAIT_S = 10.0
"""How long a request waits for a replica to be ready."""
BODY_MARGIN = 2**20
"""Over the replicas' own limit, so that a replica says what is too large."""
_OF_ONE_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade", "host", "content-length", "expect", "x-splice-secret")
)  # fmt: skip
"""Headers that end here. The last one opens a replica's control routes, which are not for clients.
"""


class ReplicaRouter:
    """Where each request goes."""

    def __init__(self) -> None:
        self.replicas = Replicas()
        self._sessions: defaultdict[Replica, ClientSession] = defaultdict(_session)
        """Closing one fails the replica's requests in flight."""
        self._answers = False
        """Whether the orchestrator answered the last time."""

    # ------------------------------------------------------------ which replicas there are

    async def update(self, nodes: Iterable[NodeStatus]) -> None:
        """Take the orchestrator's word, and end the requests of replicas that are gone."""
        for replica in self.replicas.update(nodes):
            if replica in self._sessions:
                await self._sessions.pop(replica).close()

    async def _next(self, asked: set[Replica]) -> Replica | None:
        """Return a replica that was not asked yet; the first is waited for."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            found = next(
                (replica for replica in self.replicas.ready() if replica not in asked), None
            )
            if found is not None or asked or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(POLL_S)

    # ------------------------------------------------------------ requests

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer with a replica's answer, or with 503 if none can be reached."""
        body = await request.read()
        is_pinned = "@" in _model(body)
        asked: set[Replica] = set()
        refusal: web.Response | None = None
        while replica := await self._next(asked):
            asked.add(replica)
            with self.replicas.counted(replica):
                answer = await self._answer(replica, request, body)
                if answer is None:
                    continue
                async with answer:
                    if answer.status == 503 or (is_pinned and answer.status == 404):
                        with contextlib.suppress(ClientError, OSError):
                            refusal = await _whole(answer, replica)
                        continue
                    return await _streamed(request, answer, replica)
        return refusal or _error(503, "no inference node of this run can be reached")

    async def _answer(
        self, replica: Replica, request: web.Request, body: bytes
    ) -> ClientResponse | None:
        """Return the replica's answer as it begins; None if another one is to be asked."""
        asking = asyncio.ensure_future(
            self._sessions[replica].request(
                request.method,
                URL(replica.url + request.raw_path, encoded=True),
                headers=_kept(request.headers),
                data=body or None,
                allow_redirects=False,
            )
        )
        stopping = asyncio.ensure_future(replica.stopped.wait())
        try:
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
            while not asking.done():  # perhaps for a vLLM that has ended
                if replica.state != "ready" and self.replicas.ready():
                    log.warning("%s stopped before it answered", replica.node_id)
                    return None
                await asyncio.wait((asking,), timeout=POLL_S)
            return await asking
        except (ClientError, OSError) as error:
            log.warning("%s does not answer: %s", replica.node_id, error)
            return None
        finally:
            asking.cancel()
            stopping.cancel()

    async def health(self, _: web.Request) -> web.Response:
        """200 if a replica is ready."""
        return web.Response(status=200 if self.replicas.ready() else 503)

    async def state(self, _: web.Request) -> web.Response:
        """Return each replica's URL, state and number of requests in flight."""
        replicas = {
            replica.node_id: {
                "url": replica.url,
                "state": replica.state,
                "in_flight": replica.in_flight,
            }
            for replica in self.replicas.by_id.values()
        }
        answer = {"replicas": replicas, "orchestrator_answers": self._answers}
        return web.json_response(answer)

    # ------------------------------------------------------------ its life

    async def follow(self, client: AsyncSpliceClient) -> None:
        """Ask the orchestrator for ever."""
        while True:
            try:
                status = await client.status(timeout_s=STATUS_S)
            except (SpliceError, TimeoutError) as error:  # it restarts; the replicas serve on
                if self._answers:
                    log.warning("the orchestrator does not answer: %s", error)
                self._answers = False
            else:
                self._answers = True
                await self.update(status.nodes)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """End all requests."""
        for session in self._sessions.values():
            await session.close()


def application(router: ReplicaRouter, *, max_body_bytes: int) -> web.Application:
    """Return the router as an aiohttp application."""
    app = web.Application(client_max_size=max_body_bytes + BODY_MARGIN)
    app.router.add_get(STATE_ROUTE, router.state)
    app.router.add_get("/health", router.health)
    app.router.add_route("*", "/{path:.*}", router.forward)
    return app


def _session() -> ClientSession:
    return ClientSession(
        connector=TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _model(body: bytes) -> str:
    """Return the model that a request names; "" if it names none, or no version of one."""
    if b"@" not in body:  # a list of a million tokens takes long to parse
        return ""
    try:
        values = json.loads(body)
    except ValueError:
        return ""
    return str(values.get("model", "")) if isinstance(values, dict) else ""


def _kept(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_HOP]


async def _whole(answer: ClientResponse, replica: Replica) -> web.Response:
    headers = dict(_kept(answer.headers)) | {REPLICA_HEADER: replica.node_id}
    return web.Response(status=answer.status, body=await answer.read(), headers=headers)


async def _streamed(
    request: web.Request, answer: ClientResponse, replica: Replica
) -> web.StreamResponse:
    """Pass the answer on as it comes. If it breaks off, so does the client's."""
    response = web.StreamResponse(status=answer.status)
    for name, value in _kept(answer.headers):
        response.headers.add(name, value)
    response.headers[REPLICA_HEADER] = replica.node_id
    response.content_length = answer.content_length
    await response.prepare(request)
    try:
        async for part in answer.content.iter_any():
            await response.write(part)
    except (ClientError, OSError) as error:
        log.warning("an answer of %s broke off: %s", replica.node_id, error)
        if request.transport is not None:
            request.transport.abort()  # without the end that would make it look whole
        return response
    await response.write_eof()
    return response


def _error(status: int, text: str) -> web.Response:
    error = {"message": text, "type": "ServiceUnavailableError", "code": status}
    return web.json_response({"error": error}, status=status)


async def serve(run_dir: Path, *, host: str, port: int, max_body_bytes: int) -> None:
    """Serve until cancelled. The URL is in RUN_DIR/router from the moment it is bound.

    Args:
        port: 0: any, but after a restart the same one as before.
    """
    router = ReplicaRouter()
    runner = web.AppRunner(
        application(router, max_body_bytes=max_body_bytes),
        access_log=None,
        handler_cancellation=True,  # a client that leaves frees the replica
    )
    await runner.setup()
    path = run_dir / URL_FILE
    try:
        bound = await _bind(runner, host, port or _last_port(path), may_be_another=port == 0)
        replace_file(path, reachable_url(f"http://{host}:{bound}"))
        log.info("the router listens on %s:%d", host, bound)
        async with AsyncSpliceClient.of_run(run_dir) as client:
            await router.follow(client)
    finally:
        await router.close()
        await runner.cleanup()


async def _bind(runner: web.AppRunner, host: str, port: int, *, may_be_another: bool) -> int:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        if not may_be_another:
            raise
        await web.TCPSite(runner, host, 0).start()  # another program has the port from before
    return int(runner.addresses[0][1])


def _last_port(path: Path) -> int:
    try:
        return URL(path.read_text().strip()).port or 0
    except (OSError, ValueError):
        return 0


def main() -> None:
    """Command line of the router's process."""
    parser = argparse.ArgumentParser(prog="splice.replica_router", description=__doc__)
    parser.add_argument("file", type=Path, help="run.toml, or the run.json of `splice up`")
    run = load(parser.parse_args().file)
    log_to_stderr()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            serve(
                run.run_dir,
                host=run.router.host,
                port=run.router.port,
                max_body_bytes=run.inference.max_body_bytes,
            )
        )


if __name__ == "__main__":
    main()
