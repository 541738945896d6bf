"""The HTTP server: who may ask, how much and how long, and what a refusal looks like."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.errors import ConfigError
from orchestrator.storage import layout
from splice.tinker import endpoints
from splice.tinker.config import TinkerConfig
from splice.tinker.refused import SLOW, TOO_LARGE, UNAUTHORIZED, Refused
from splice.tinker.service import Service, read_trainer, running
from splice.tinker.training import FOLDER

log = logging.getLogger("splice.tinker")
OPEN = frozenset({"/api/v1/healthz"})
"""Paths that need no key."""
GRACE_S = 2
"""Time for open requests at the end. Clients poll again."""
KEY_VARIABLE, KEY_FILE, URL_FILE = "SPLICE_TINKER_API_KEY", "api_key", "url"


class Guard:
    """ASGI middleware: checks the key, then reads the body within its bounds.

    The application gets a request only when its body is whole, so a slow client holds up nobody.
    """

    def __init__(self, app: ASGIApp, config: TinkerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            async with asyncio.timeout(self._config.body_timeout_s):
                body = await self._body(receive)
        except Refused as error:
            await refusal(error)(scope, receive, send)
            return
        except TimeoutError:
            text = f"the body took longer than {self._config.body_timeout_s:.0f} s"
            await refusal(Refused(SLOW, text))(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        if scope["path"] in OPEN:
            return
        given = dict(scope["headers"]).get(b"x-api-key", b"")
        if not hmac.compare_digest(given, self._config.api_key.encode()):
            raise Refused(
                UNAUTHORIZED,
                "the API key is not this server's; set TINKER_API_KEY to the content of "
                "RUN_DIR/tinker/api_key, or to the server's SPLICE_TINKER_API_KEY",
            )

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None: the client left."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size > self._config.max_body_bytes:
                raise Refused(
                    TOO_LARGE, f"the body has more than {self._config.max_body_bytes:,} bytes"
                )
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def refusal(error: Refused) -> JSONResponse:
    """Return a refusal as the SDK shows it: status and sentence."""
    return JSONResponse({"detail": str(error)}, status_code=error.status)


async def _on_refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    log.info("refused %s: %s", request.url.path, error)
    return refusal(error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refusal(Refused(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))


def make_app(service: Service) -> FastAPI:
    """Return the application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.include_router(endpoints.router)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_middleware(Guard, config=service.config)  # type: ignore[arg-type]
    return app


def check_address(host: str, *, has_own_key: bool) -> None:
    """Refuse to listen beyond loopback with a key that nobody chose.

    Raises:
        ConfigError: says which variable sets one.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and not has_own_key:
        raise ConfigError(
            f"--host {host} is not loopback: set SPLICE_TINKER_API_KEY to a key of your own that "
            "begins with tml-, and put a TLS proxy in front (docs/tinker.md)"
        )


def api_key(run_dir: Path) -> tuple[str, bool]:
    """Return the key that clients send, and whether the user chose it.

    Without SPLICE_TINKER_API_KEY the server makes one once and keeps it in the run's folder.
    """
    own = os.environ.get(KEY_VARIABLE)
    if own:
        return own, True
    path = run_dir / FOLDER / KEY_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_text(f"tml-{secrets.token_urlsafe(32)}\n")
    return path.read_text().strip(), False


def serve(
    run_dir: Path, on_url: Callable[[str], None], *, host: str, port: int, **settings: Any
) -> None:
    """Serve until interrupted.

    Args:
        on_url: called once with the URL.
        settings: further ones of `TinkerConfig`.

    Raises:
        ConfigError: a setting will not do, the run is not up, or its folder has another layout.
    """
    layout.check(run_dir)
    read_trainer(run_dir)  # before a file is written: `splice up` takes an empty folder
    key, is_own = api_key(run_dir)
    check_address(host, has_own_key=is_own)
    try:
        config = TinkerConfig(run_dir=run_dir, host=host, port=port, api_key=key, **settings)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from None
    with listening:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        asyncio.run(_serve(config, listening, lambda: _say_url(run_dir, url, on_url)))


def _say_url(run_dir: Path, url: str, on_url: Callable[[str], None]) -> None:
    (run_dir / FOLDER / URL_FILE).write_text(f"{url}\n")
    on_url(url)


async def _serve(config: TinkerConfig, listening: socket.socket, on_up: Callable[[], None]) -> None:
    """Serve until a signal comes, or the training lane ends, which is a defect."""
    async with running(config) as service:
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(service),
                lifespan="off",
                log_level="warning",
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        on_up()
        done, _ = await asyncio.wait({serving, service.lane}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        log.info("the server has ended; start it again at any time")
        if service.lane in done:
            service.lane.result()
