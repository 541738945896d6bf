"""The orchestrator's numbers for Prometheus, at http://HOST:PORT/metrics.

Counters and the histogram of pauses count from this process's start. The rest is read at each
scrape: the run's status, and what the loop on this host wrote into RUN_DIR/loop/status.json.

A scrape runs on its own thread. It waits for the event loop, never the other way round, and no
failure here ends the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.protocol.messages import Failed, Status, Terminal

log = logging.getLogger("splice.orchestrator")
REQUEST_S = 10.0
"""Longest time that a client may take to send its request, in seconds."""
PAUSES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the histogram's buckets."""
LOOP_STATUS = Path("loop/status.json")
"""What a loop writes into the run's folder after each step."""


class Metrics:
    """Counts what ends; `serve` shows it.

    Args:
        status: called from the server's threads; raises TimeoutError if there is no answer.
        run_dir: folder of the run.
    """

    def __init__(self, status: Callable[[], Status], run_dir: Path) -> None:
        self._registry = registry = CollectorRegistry()
        self._jobs = Counter(
            "splice_jobs", "Jobs that ended.", ["kind", "outcome"], registry=registry
        )
        self._publications = Counter(
            "splice_publications",
            "Attempts at a publication, those for a replica that joined included.",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "splice_publication_bytes", "Bytes of published weights.", registry=registry
        )
        self._pauses = Histogram(
            "splice_publication_pause_seconds",
            "How long a publication stopped generation.",
            buckets=PAUSES_S,
            registry=registry,
        )
        registry.register(_State(status, run_dir))
        self._run_dir = run_dir
        self._server: WSGIServer | None = None

    def job_ended(self, kind: str, message: Terminal) -> None:
        """Count a job under its kind and its outcome: completed, cancelled, or an error code."""
        outcome = message.code.value if isinstance(message, Failed) else message.kind.lower()
        self._jobs.labels(kind=kind, outcome=outcome).inc()

    def published(self, phase: str, detail: dict[str, Any]) -> None:
        """Take a phase of a publication."""
        if phase == "resumed":
            self._pauses.observe(float(detail["pause_s"]))
        elif phase == "served":
            self._publications.labels(outcome="served").inc()
            self._bytes.inc(detail["bytes_sent"])
        elif phase == "failed":
            self._publications.labels(outcome="failed").inc()

    def serve(self, host: str, port: int) -> None:
        """Listen; RUN_DIR/metrics has the URL. An address that is taken is only logged."""
        try:
            self._server = make_server(
                host, port, make_wsgi_app(self._registry), _Server, handler_class=_Handler
            )
        except OSError as error:
            log.error(
                "no metrics at http://%s:%d: %s. The run continues without them; choose another "
                "metrics_port",
                host,
                port,
                error,
            )
            return
        url = f"http://{host}:{self._server.server_port}/metrics"
        log.info("metrics for Prometheus: %s", url)
        self._server_thread = threading.Thread(
            target=self._server.serve_forever, name="splice-metrics", daemon=True
        )
        self._server_thread.start()
        try:
            (self._run_dir / "metrics").write_text(url)
        except OSError as error:
            log.warning("cannot write %s: %s", self._run_dir / "metrics", error)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server_thread.join(REQUEST_S)
            with contextlib.suppress(OSError):
                (self._run_dir / "metrics").unlink(missing_ok=True)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """As in WSGIServer, without its look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a log line."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is not worth a log line."""


class _State(Collector):
    """Reads the state of the run at each scrape."""

    def __init__(self, status: Callable[[], Status], run_dir: Path) -> None:
        self._status, self._loop_status = status, run_dir / LOOP_STATUS

    def describe(self) -> list[Metric]:
        return []  # else the registry collects to learn the names

    def collect(self) -> Iterator[Metric]:
        try:
            found = _of_run(self._status())
        except (TimeoutError, RuntimeError):  # the event loop is busy, or has ended
            found = [("orchestrator_answers", "1: it answered this scrape.", (), {(): 0})]
        for name, text, labels, values in (*found, *_of_loop(self._loop_status)):
            gauge = GaugeMetricFamily(f"splice_{name}", text, labels=labels)
            for of, value in values.items():
                gauge.add_metric(of, value)
            yield gauge


_Gauge = tuple[str, str, tuple[str, ...], Mapping[Any, float]]
"""Name, help, names of the labels, and labels -> value."""


def _of_run(status: Status) -> list[_Gauge]:
    nodes, device = status.nodes, ("node", "device")
    memory = {(node.node_id, use.device): use for node in nodes for use in node.memory}
    used = {of: use.used_bytes for of, use in memory.items()}
    total = {of: use.total_bytes for of, use in memory.items()}
    by_state = Count((node.role, node.state) for node in nodes)
    ready = {(node.node_id, node.role): node.state == "ready" for node in nodes}
    state = {(status.name, status.publication): 1}
    dropped = sum(status.dropped.values())
    version = {} if status.version is None else {(): status.version}
    return [
        ("orchestrator_answers", "1: it answered this scrape.", (), {(): 1}),
        ("served_version", "N of the served name@N.", (), version),
        ("jobs_waiting", "Jobs that have not started.", (), {(): status.queued_jobs}),
        ("publication_state", "1: the state of the publication.", ("alias", "state"), state),
        ("nodes", "Nodes by state.", ("role", "state"), by_state),
        ("node_ready", "1: ready.", ("node", "role"), ready),
        ("node_memory_used_bytes", "Memory of a GPU, or of a node's processes.", device, used),
        ("node_memory_total_bytes", "Of the GPU or host.", device, total),
        ("dropped_messages", "Malformed or forbidden messages so far.", (), {(): dropped}),
    ]


def _of_loop(path: Path) -> list[_Gauge]:
    try:
        found = json.loads(path.read_text())
        step, at = float(found["step"]), float(found["at"])
        idle = {(side,): float(found[f"{side}_waits"]) for side in ("trainer", "sampler")}
        ages = {(stat,): float(found[f"staleness_{stat}"]) for stat in ("mean", "max")}
    except (OSError, ValueError, LookupError, TypeError):
        return []  # no loop on this host yet
    return [
        ("loop_step", "Last step of the loop.", (), {(): step}),
        ("loop_reported_timestamp_seconds", "When that step was done.", (), {(): at}),
        ("loop_idle_ratio", "Share of its last steps that a side waited.", ("side",), idle),
        ("loop_staleness_versions", "Age of the tokens of its last step.", ("stat",), ages),
    ]
