"""A node's end of the control socket, on its own thread.

The thread answers heartbeats while the GPUs are busy. It hands requests to the main thread one at a
time. It handles urgent messages (`AbortSend`, `AbortUpdate`) at once through callbacks, because the
main thread is then inside a transfer. A repeated request gets the first outcome.

Only this thread uses the socket, so that no signal's exception leaves half a message in it. Other
threads reach it through a queue and an eventfd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq
import zmq.utils.monitor

from orchestrator.errors import ConfigError, LinkLost, ProtocolError
from orchestrator.protocol.answered import Answered
from orchestrator.protocol.curve import PeerKeys, peer_keys
from orchestrator.protocol.frames import (
    MAX_FRAME_BYTES,
    Envelope,
    Frames,
    OtherProtocolVersion,
    decode,
    encode,
    from_wire,
    to_wire,
)
from orchestrator.protocol.memory import Meter
from orchestrator.protocol.messages import (
    AnyMessage,
    Cancelled,
    Completed,
    EndedDuring,
    ErrorCode,
    Failed,
    Heartbeat,
    Hello,
    NextBatch,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    TensorSpec,
    Unready,
    Welcome,
)
from orchestrator.protocol.silence import Silence

log = logging.getLogger("splice.link")
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
Urgent = Mapping[str, Callable[[AnyMessage], None]]
_CHECK = (
    "check that the run is up (`splice up FOLDER --resume` starts a stopped one), that host and "
    "port are those of RUN_DIR/endpoint, and that no firewall is between"
)
SAY_AFTER_S, WELCOME_POLL_S = 3.0, 0.05
REFUSALS = 4
"""Refused handshakes in a row, shortly after the start, that mean a wrong token or key."""
REDIAL_AFTER_S = 10.0
"""Silence of the orchestrator after which the link opens a new connection. Neither end may notice
that the old one is cut."""
FLUSH_S = 2.0


class NodeLink:
    """Connects a node to the orchestrator. As a context manager it also starts the link if needed.

    Args:
        endpoint: the orchestrator's ROUTER, e.g. "tcp://127.0.0.1:40001".
        hello: the peer's greeting.
        urgent: kind -> callback on the link's thread, which must not block. "Hello": the
            orchestrator does not know this peer; also called for a new orchestrator's `Welcome`.
        curve: CURVE keys. None: those of `peer_keys`.
        endpoint_file: has the endpoint of a run that has ended and continues elsewhere. Each new
            connection reads it.
        lost_after_s: silence of the orchestrator after which `recv` raises `LinkLost`.
        meter: measures what heartbeats say on memory; the caller closes it.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        hello: Hello,
        urgent: Urgent | None = None,
        curve: PeerKeys | None = None,
        endpoint_file: Path | None = None,
        lost_after_s: float = 60.0,
        meter: Meter | None = None,
    ) -> None:
        self._endpoint, self._hello = endpoint, hello
        self._urgent = dict(urgent or {})
        self._curve = curve or peer_keys(hello.run_token, role=hello.role, node_id=hello.node_id)
        self._endpoint_file = endpoint_file
        self._lost_after_s, self._meter = lost_after_s, meter
        self._context = zmq.Context()
        self._outbox: queue.SimpleQueue[list[bytes | memoryview]] = queue.SimpleQueue()
        self._unsent: deque[list[bytes | memoryview]] = deque()
        self._inbox: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self._wake_fd: int | None = None
        self._wake_lock = threading.Lock()
        self._closing = threading.Event()
        self._welcomed = threading.Event()
        self._rejected: Rejected | None = None
        self._refusals = 0
        """Connections in a row that ended in their handshake."""
        self._silence, self._requests = Silence(), Answered()
        self._heartbeat_s, self._flush_ms = 1.0, int(FLUSH_S * 1000)
        self._last_word: AnyMessage | None = None
        """The latest `Ready` or `Unready`."""
        self._dialled_s = 0.0
        self.next_batch: Envelope | None = None
        """The newest `NextBatch`. Who takes it puts None here."""
        self._orchestrator = ""
        self._thread = threading.Thread(target=self._run, name="splice-control", daemon=True)

    @property
    def node_id(self) -> str:
        """This node's id."""
        return self._hello.node_id

    def start(self, *, timeout_s: float = 30.0) -> NodeLink:
        """Connect and say Hello. After `SAY_AFTER_S` without an answer, log what to check.

        Raises:
            ConfigError: the orchestrator rejected this peer; says why.
            LinkLost: no answer within `timeout_s`. At once for a token or key that the orchestrator
                does not accept.
        """
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()
        is_answered, rejected = self._wait_for_welcome(timeout_s), self._rejected
        if is_answered and rejected is None:
            return self
        was_refused = self._refusals > 0
        self.close()
        if rejected is not None and rejected.retry:
            raise LinkLost(
                f"the orchestrator at {self._endpoint} does not take in {self.node_id} yet: "
                f"{rejected.reason}"
            )
        if rejected is not None:
            raise ConfigError(
                f"the orchestrator at {self._endpoint} rejected {self.node_id}: {rejected.reason}"
            )
        if was_refused:
            raise LinkLost(
                f"{self._endpoint} ends every connection of {self.node_id} in its handshake: "
                "start both sides with the same "
                "SPLICE_RUN_TOKEN (with `splice keys`: with keys of one set), and look whether "
                "another program has the port"
            )
        raise LinkLost(
            f"no answer from the orchestrator at {self._endpoint} within {timeout_s:.0f} s; "
            f"{_CHECK}"
        )

    def _wait_for_welcome(self, timeout_s: float) -> bool:
        """Whether the orchestrator answered. Ends early if it refuses every handshake."""
        began_s = time.monotonic()
        has_said = False
        while not self._welcomed.wait(WELCOME_POLL_S):
            waited_s = time.monotonic() - began_s
            # A handshake that is only slow fails after 5 s; a wrong key at once.
            if self._refusals >= REFUSALS and waited_s < 2 * SAY_AFTER_S:
                return False
            if waited_s > timeout_s:
                return False
            if waited_s > SAY_AFTER_S and not has_said:
                has_said = True
                log.warning(
                    "no answer yet from the orchestrator at %s; waiting for %.0f s more; %s",
                    self._endpoint,
                    timeout_s - waited_s,
                    _CHECK,
                )
        return True

    @property
    def has_mail(self) -> bool:
        """Whether `recv` has something to return at once."""
        return not self._inbox.empty()

    def recv(self, *, timeout_s: float) -> Envelope | None:
        """Return the next request, `Shutdown` or `EndedDuring`, or None after `timeout_s`.

        Raises:
            LinkLost: the orchestrator was silent for `lost_after_s`, without time when this process
                was suspended.
            ConfigError: the orchestrator has rejected this peer since, or `start` was never called.
        """
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=timeout_s)
        if self._rejected is not None and self._is_rejected_for_good():
            raise ConfigError(
                f"the orchestrator at {self._endpoint} rejected {self.node_id}: "
                f"{self._rejected.reason}"
            )
        if self._thread.ident is None:
            raise ConfigError(
                f"the connection to {self._endpoint} was never opened: enter it by `with`"
            )
        if not self._thread.is_alive():
            raise LinkLost(f"the connection to the orchestrator at {self._endpoint} is closed")
        silent_s = self._silence.seconds(waited_s=timeout_s)
        if silent_s > self._lost_after_s:
            raise LinkLost(
                f"the orchestrator at {self._endpoint} has been silent for {silent_s:.0f} s; if it "
                "has ended, `splice up FOLDER --resume` brings the run back"
            )
        return None

    def is_open(self, request_id: str) -> bool:
        """Whether the request has arrived and has no outcome yet."""
        return request_id in self._requests.running

    def send(self, message: AnyMessage, buffers: Frames = ()) -> None:
        """Queue a message without blocking. A terminal message is kept for a repeated request.

        Raises:
            ProtocolError: a buffer's size differs from what the message says, or a number does not
                fit.
        """
        frames = encode(message, buffers)
        if isinstance(message, Completed | Failed | Cancelled):
            self._requests.end(message, tuple(bytes(b) for b in buffers))
        elif isinstance(message, Ready | Unready):
            self._last_word = message
        self._outbox.put(frames)
        self._wake()

    def progress(self, request_id: str, phase: str, **detail: object) -> None:
        """Number and send the request's next `Progress`."""
        sequence = self._requests.next_sequence(request_id)
        self.send(Progress(request_id=request_id, sequence=sequence, phase=phase, detail=detail))

    def complete(
        self,
        request_id: str,
        *,
        result: dict[str, object] | None = None,
        tensors: Sequence[TensorSpec] = (),
        buffers: Sequence[bytes] = (),
    ) -> None:
        """End a request with `Completed`."""
        self.send(
            Completed(request_id=request_id, result=result or {}, tensors=tuple(tensors)), buffers
        )

    def fail(
        self,
        request_id: str,
        *,
        code: ErrorCode,
        phase: str,
        message: str,
        remedy: str,
        steps_taken: int = 0,
    ) -> None:
        """End a request with `Failed`."""
        failed = Failed(
            request_id=request_id,
            code=code,
            node=self.node_id,
            phase=phase,
            message=message[:4000],
            remedy=remedy,
            steps_taken=steps_taken,
        )
        self.send(failed)

    def close(self, *, flush_s: float = FLUSH_S) -> None:
        """Flush the queue for up to `flush_s`, then end thread and sockets. Safe to call twice."""
        if self._closing.is_set():
            return
        self._flush_ms = int(flush_s * 1000)
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        with self._wake_lock:
            if self._wake_fd is not None and not self._thread.is_alive():
                os.close(self._wake_fd)
                self._wake_fd = None
        self._context.destroy(linger=0)

    def __enter__(self) -> NodeLink:
        return self if self._wake_fd is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the thread

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the control socket, and one that reports its connections."""
        if self._endpoint_file is not None:
            with contextlib.suppress(OSError):  # none while the run is stopped
                self._endpoint = self._endpoint_file.read_text().strip() or self._endpoint
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, int(FLUSH_S * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._curve.secure(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSED)
        socket.connect(self._endpoint)
        self._dialled_s = time.monotonic()
        return socket, monitor

    def _disconnect(
        self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, linger_ms: int
    ) -> None:
        with contextlib.suppress(zmq.ZMQError):
            socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=linger_ms)

    def _run(self) -> None:
        socket, monitor = self._connect()
        try:
            socket.send_multipart(to_wire(encode(self._hello)))
            while not (self._closing.is_set() and self._outbox.empty()):
                self._serve(socket, monitor)
                if self._is_cut_off() and not self._closing.is_set():
                    self._disconnect(socket, monitor, linger_ms=0)
                    socket, monitor = self._connect()
                    self._introduce(socket)
        except zmq.ZMQError as error:
            if not self._closing.is_set():
                log.warning("the connection to %s ended: %s", self._endpoint, error)
        finally:
            self._disconnect(socket, monitor, linger_ms=self._flush_ms)

    def _is_rejected_for_good(self) -> bool:
        return self._rejected is not None and not self._rejected.retry

    def _is_cut_off(self) -> bool:
        return (
            not self._is_rejected_for_good()
            and time.monotonic() - max(self._silence.last_frame, self._dialled_s) > REDIAL_AFTER_S
        )

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Send and receive until this connection is cut off or the link closes."""
        connections, wake_fd = 0, self._wake_fd
        assert wake_fd is not None
        poller = zmq.Poller()
        for source in (socket, wake_fd, monitor):
            poller.register(source, zmq.POLLIN)
        next_beat = time.monotonic() + self._heartbeat_s
        while not self._is_cut_off() and not (self._closing.is_set() and self._outbox.empty()):
            events = dict(poller.poll(max(10, int((next_beat - time.monotonic()) * 1000))))
            if wake_fd in events:
                os.eventfd_read(wake_fd)
            if monitor in events:
                event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
                self._refusals = self._refusals + 1 if event & _REFUSED else 0
                connections += not self._refusals
                if connections > 1 and not self._refusals:
                    # Messages in flight on the old connection may be lost.
                    self._introduce(socket)
            if socket in events:
                self._on_frames(socket, socket.recv_multipart())
            self._flush(socket)
            self._silence.look()
            if time.monotonic() >= next_beat and not self._is_rejected_for_good():
                is_taken_in = self._welcomed.is_set() and self._rejected is None
                memory = () if self._meter is None else self._meter.latest
                beat = Heartbeat(node_id=self.node_id, memory=memory)
                self._send_frames(socket, encode(beat if is_taken_in else self._hello))
                next_beat = time.monotonic() + self._heartbeat_s

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._unsent.append(self._outbox.get_nowait())
        while self._unsent and self._send_frames(socket, self._unsent[0]):
            self._unsent.popleft()

    @staticmethod
    def _send_frames(socket: zmq.Socket[bytes], frames: list[bytes | memoryview]) -> bool:
        try:
            socket.send_multipart(to_wire(frames), zmq.NOBLOCK)
        except zmq.Again:  # unconnected and at the high-water mark: try again later
            return False
        return True

    def _on_frames(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        self._silence.last_frame = time.monotonic()
        try:
            envelope = decode(from_wire(frames))
        except ProtocolError as error:
            if isinstance(error, OtherProtocolVersion) and not self._welcomed.is_set():
                self._rejected = Rejected(reason=str(error))
                self._welcomed.set()
                return
            log.warning("dropped a message of the orchestrator: %s", error)
            return
        message = envelope.message
        if not isinstance(message, Rejected):
            self._silence.heard()
        if self._is_rejected_for_good():
            return
        if isinstance(message, Welcome):
            self._rejected = None
            self._heartbeat_s = message.heartbeat_s
            if message.incarnation != self._orchestrator:
                if self._orchestrator:
                    self._be_forgotten(message)
                self._orchestrator = message.incarnation
            if self._last_word is not None:
                self._send_frames(socket, encode(self._last_word))
            self._welcomed.set()
        elif isinstance(message, Rejected):
            self._rejected = message
            if not message.retry:
                self._welcomed.set()
        elif isinstance(message, Hello):
            # The orchestrator restarted, or lost this peer. A refused peer repeats its Hello with
            # each beat.
            if self._rejected is None:
                self._be_forgotten(message)
                self._introduce(socket)
        elif isinstance(message, Heartbeat):
            pass
        elif message.kind in self._urgent:
            self._urgent[message.kind](message)
        elif isinstance(message, NextBatch):
            self.next_batch = envelope
        elif isinstance(message, Shutdown | EndedDuring) or self._hello.role == "client":
            self._inbox.put(envelope)
        else:
            self._on_request(socket, envelope)

    def _be_forgotten(self, message: AnyMessage) -> None:
        self._urgent.get("Hello", lambda _: None)(message)

    def _introduce(self, socket: zmq.Socket[bytes]) -> None:
        """Send `Hello` again.

        The orchestrator then repeats its open requests, and a client its jobs. Duplicates are
        harmless.
        """
        self._send_frames(socket, encode(self._hello))
        if self._hello.role == "client":
            self._inbox.put(Envelope(message=self._hello))

    def _on_request(self, socket: zmq.Socket[bytes], envelope: Envelope) -> None:
        request_id = getattr(envelope.message, "request_id", None)
        if request_id is None:
            return
        # Checked first, because `send` stores the outcome before it removes the request.
        if request_id in self._requests.running:
            return
        if (ended := self._requests.outcome(request_id)) is not None:
            self._send_frames(socket, encode(*ended))
        else:
            self._requests.running.add(request_id)
            self._inbox.put(envelope)
