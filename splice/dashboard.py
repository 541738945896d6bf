"""`splice dashboard`: a live page over the files that loops write; several loops are compared.

    /         one loop, or the comparison of several            /loop/1    one of them
    /body...  the part that changes; 204 while it has not changed since `?tag=`

The server reads and never writes. Each answer is drawn at most once for each state of the files,
and the page asks again after ten times as long as the last answer took.
"""

from __future__ import annotations

import html
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from orchestrator.errors import ConfigError
from splice import report
from splice.client.run_file import RUN_JSON, RunFile
from splice.rl import decisions, samples

LOCAL = ("127.0.0.1", "localhost", "::1")
MOST = 5
"""Loops that are compared at once, as many as the plots have colours."""
REQUEST_S = 30.0
"""Longest time for reading a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    tag: str
    text: str


class Dashboard:
    """Serves the page from a thread, as a context manager.

    Args:
        loops: folders of loops; one may have no step yet.
        host: address. One that is not local shows the samples to everybody who reaches it.
        port: 0: the kernel chooses.

    Raises:
        OSError: the address is taken.
        ConfigError: matplotlib is not installed, or there are too many loops.
    """

    def __init__(self, loops: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0) -> None:
        if len(loops) > MOST:
            raise ConfigError(
                f"{len(loops)} loops; a plot tells {MOST} lines apart: name fewer of them"
            )
        self._loops, self._names = list(loops), _names(loops)
        self._plots, self._drawing = report.Plots(), threading.Lock()
        self._drawn: dict[str, _Body] = {}
        nonce, shown = secrets.token_urlsafe(16), self

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                shown.answer(self, nonce)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged: the page makes one every few seconds."""

        self._host = host
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="splice-dashboard", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self._host}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_S)

    # ------------------------------------------------------------ answers

    def answer(self, request: BaseHTTPRequestHandler, nonce: str) -> None:
        """Answer one request."""
        asked = urlsplit(request.path)
        is_body = asked.path.startswith("/body")
        place = asked.path.removeprefix("/body") or "/"
        # Another site's script may not read the samples by a name that leads to this host.
        name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        if self._host in LOCAL and name not in LOCAL:
            _send(request, 403, "ask for 127.0.0.1 or localhost")
            return
        try:
            body = self._body(place)
        except LookupError:
            _send(request, 404, f"there is no {place}")
            return
        except (ConfigError, OSError, ValueError) as error:
            body = _Body(tag="", text=f"<p>{html.escape(str(error))}</p>")
        if not is_body:
            title = html.escape(", ".join(self._names))
            text = _PAGE.format(
                title=title, style=report.STYLE, nonce=nonce, tag=body.tag, body=body.text
            )
            _send(request, 200, text, nonce=nonce)
        elif body.tag and parse_qs(asked.query).get("tag") == [body.tag]:
            _send(request, 204, "")
        else:
            _send(request, 200, body.text, tag=body.tag)

    def _body(self, place: str) -> _Body:
        """What is at a place, drawn again only where the files have changed.

        Raises:
            LookupError: nothing is there.
        """
        parts = place.strip("/").split("/")
        if parts == [""]:
            chosen = list(range(len(self._loops)))
        elif len(parts) == 2 and parts[0] == "loop" and parts[1].isdecimal():
            chosen = [int(parts[1]) - 1]
            if not 0 <= chosen[0] < len(self._loops):
                raise LookupError(place)
        else:
            raise LookupError(place)
        tag = "-".join(_state_of(self._loops[i]) for i in chosen)
        with self._drawing:  # matplotlib's settings belong to the process
            if (known := self._drawn.get(place)) is not None and known.tag == tag:
                return known
            text = self._one(chosen[0]) if len(chosen) == 1 else self._compared(chosen)
            self._drawn[place] = _Body(tag=tag, text=text)
            return self._drawn[place]

    def _one(self, index: int) -> str:
        loop = self._loops[index]
        back = '<p><a href="/">all loops</a></p>' if len(self._loops) > 1 else ""
        head = f"{back}<h2>{html.escape(self._names[index])}{_running(loop)}</h2>"
        history = _history(loop)
        if history is None:
            return f"{head}<p>No step has been trained yet.</p>"
        return head + report.body(loop, history, self._plots)

    def _compared(self, chosen: Sequence[int]) -> str:
        found = {i: _history(self._loops[i]) for i in chosen}
        parts = []
        for i, history in found.items():
            name = html.escape(self._names[i])
            link = f'<a href="/loop/{i + 1}">{name}</a>'
            parts.append(f"<h2>{link}{_running(self._loops[i])}</h2>")
            parts.append(
                "<p>No step has been trained yet.</p>"
                if history is None
                else report.facts(history, self._loops[i])
            )
        kept = {self._names[i]: history for i, history in found.items() if history is not None}
        figures = []
        for title, lines in _lines(kept).items():
            dots = title.endswith(_EVALUATION)
            figures.append(report.figure_of(title, self._plots.lines(lines, dots=dots)))
        grid = f'<div class="grid">{"".join(figures)}</div>'
        return "".join([*parts, "<h2>Comparison</h2>", grid])


_EVALUATION = " (evaluation)"


def _lines(loops: dict[str, report.History]) -> dict[str, dict[str, dict[int, float]]]:
    """Title of a plot -> loop -> step -> number: evaluations, then a plot's first metric."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name, history in loops.items():
        for note, values in history.notes.items():
            found.setdefault(f"{note}{_EVALUATION}", {})[name] = values
    for title, (metric, *_) in report.PLOTS.items():
        for name, history in loops.items():
            own = {step: m[metric] for step, m in history.steps.items() if metric in m}
            if own:
                found.setdefault(title, {})[name] = own
    return found


def _history(loop: Path) -> report.History | None:
    """The loop's log; None before its first step."""
    try:
        return report.read(loop / decisions.LOG)
    except ConfigError:
        return None


def _running(loop: Path) -> str:
    is_live = decisions.is_running(loop / decisions.LOG)
    return " <small>running</small>" if is_live else " <small>not running</small>"


def _state_of(loop: Path) -> str:
    """Changes whenever the loop has written a step, a note or a sample, starts or ends."""
    log = loop / decisions.LOG
    try:
        size = log.stat().st_size
    except OSError:
        size = 0
    steps = samples.steps_of(loop / samples.SAMPLES)
    return f"{size}.{len(steps)}.{int(decisions.is_running(log))}"


def _names(loops: Sequence[Path]) -> list[str]:
    """The shortest ends of the runs' folders that tell them apart, with the runs' names."""
    if len({loop.absolute() for loop in loops}) != len(loops):
        raise ConfigError("a loop is named twice; name each once")
    # A loop's folder is RUN/loop, and a run's is the folder of its run.toml, with /run.
    short = [_without_default(loop.absolute()) for loop in loops]
    whole = [of.parts for of in (short if len(set(short)) == len(loops) else loops)]
    ends = ["/".join(parts) for parts in whole]
    for count in range(1, max(map(len, whole))):
        shorter = ["/".join(parts[-count:]) for parts in whole]
        if len(set(shorter)) == len(shorter):
            ends = shorter
            break
    return [f"{end}{_name_of(loop)}" for end, loop in zip(ends, loops, strict=True)]


def _without_default(loop: Path) -> Path:
    folder = loop.parent if loop.name == decisions.LOOP_DIR else loop
    return folder.parent if folder.name == RunFile.model_fields["run_dir"].default.name else folder


def _name_of(loop: Path) -> str:
    """Return the name of the loop's run, in parentheses."""
    try:
        return f" ({json.loads((loop.parent / RUN_JSON).read_text())['name']})"
    except (OSError, ValueError, LookupError):  # its run is elsewhere
        return ""


def _send(
    request: BaseHTTPRequestHandler, status: int, text: str, *, tag: str = "", nonce: str = ""
) -> None:
    data = text.encode(errors="replace")
    script = f"script-src 'nonce-{nonce}'; connect-src 'self'; " if nonce else ""
    request.send_response(status)
    request.send_header("Content-Type", "text/html; charset=utf-8")
    request.send_header("Content-Length", str(len(data)))
    request.send_header("Cache-Control", "no-store")
    request.send_header("X-Content-Type-Options", "nosniff")
    request.send_header(
        "Content-Security-Policy", f"default-src 'none'; {script}style-src 'unsafe-inline'"
    )
    if tag:
        request.send_header("ETag", tag)
    request.end_headers()
    request.wfile.write(data)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>splice: {title}</title>
<style>{style}
small {{ font-weight: 400; color: #4a5360; }}
#state {{ position: fixed; right: 12px; bottom: 8px; font-size: 13px; color: #4a5360; }}
</style>
</head>
<body><main id="body" data-tag="{tag}">{body}</main><div id="state"></div>
<script nonce="{nonce}">
const body = document.querySelector("#body"), state = document.querySelector("#state");
let tag = body.dataset.tag;
async function refresh() {{
  const began = performance.now();
  try {{
    const place = "/body" + (location.pathname === "/" ? "" : location.pathname);
    const answer = await fetch(place + "?tag=" + encodeURIComponent(tag));
    if (answer.status === 200) {{
      const open = [...document.querySelectorAll("details")].map(d => d.open);
      body.innerHTML = await answer.text();
      document.querySelectorAll("details").forEach((d, i) => {{ d.open = open[i] || false; }});
      tag = answer.headers.get("ETag") || "";
    }}
    state.textContent = "seen " + new Date().toLocaleTimeString();
  }} catch (error) {{
    state.textContent = "splice dashboard does not answer; it is asked again";
  }}
  setTimeout(refresh, Math.max(3000, 10 * (performance.now() - began)));
}}
setTimeout(refresh, 1000);
</script>
</body>
</html>
"""
