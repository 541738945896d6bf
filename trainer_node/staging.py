"""Batches that come ahead of their jobs: received, shared with the other ranks and checked while another job runs.

    link's thread, rank 0   receive -> queue
    a thread on each rank   shared over a process group of its own -> decoded and checked (numpy, which lets the main thread run) -> held
    main thread             claim, when the job comes and names the batch

The group carries nothing else, so its collectives cannot mix with those of the job that runs. A batch that is refused stays refused: its job raises
what the check raised. What goes wrong with the staging itself costs the head start only: the job is then sent with its batch.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import StageBatch

if TYPE_CHECKING:
    from trainer_node.batch import Batch

log = logging.getLogger("splice.trainer")
MOST_HELD = 2
"""Staged batches that no job has claimed. The orchestrator stages one ahead; another may be left by an orchestrator that was restarted."""
KEEPALIVE_S = 5.0
END_S = 10.0
Check = Callable[[StageBatch, Sequence[bytes]], "Batch"]


class Share(Protocol):
    """`Control.share`: what rank 0 gives, all get; None: nothing yet; StopIteration: rank 0 stops."""

    def __call__(self, envelope: Envelope | None, *, stop: int | None = None) -> Envelope | None:
        """A collective."""
        ...


class Staging:
    """One rank's staged batches; ends with `close`.

    Args:
        check: decodes and checks a batch; runs on this object's thread.
        share: hands a message to every rank; must use a process group that nothing else uses.
        is_root: whether this is rank 0, which has the link and calls `receive`.
    """

    def __init__(self, check: Check, *, share: Share, is_root: bool) -> None:
        self._check, self._share, self._is_root = check, share, is_root
        self._inbox: queue.SimpleQueue[tuple[Envelope, Future[Batch]] | None] = queue.SimpleQueue()
        self._held: OrderedDict[str, Future[Batch]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="splice-staging", daemon=True)
        self._thread.start()

    def receive(self, envelope: Envelope) -> None:
        """A `StageBatch` or `DropBatch` has come; never blocks. Rank 0."""
        if not self._is_open:  # nobody would take it from the inbox
            return
        self._inbox.put((envelope, self._note(envelope)))

    def holds(self, job_id: str) -> bool:
        """Whether the job's batch is here or on its way to the other ranks."""
        with self._changed:
            return self._is_open and job_id in self._held

    def claim(self, job_id: str, *, timeout_s: float) -> Future[Batch] | None:
        """The job's batch, which nothing replaces any more, or the error of its check; None: it did not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: job_id in self._held or not self._is_open, timeout_s)
            return self._held.pop(job_id, None) if self._is_open else None

    def close(self) -> None:
        """End the thread; on rank 0 this ends the others'."""
        self._inbox.put(None)
        self._thread.join(END_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                taken = self._next()
                if taken is not None and isinstance(taken[0].message, StageBatch):
                    self._decode(taken[0].message, taken[0].buffers, taken[1])
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001  - of a process group whose other ends are gone, or of memory: jobs come with their batches then
            log.warning("batches are no longer staged ahead: %s", error)
        finally:
            with self._changed:
                self._is_open = False
                self._held.clear()
                self._changed.notify_all()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._inbox.get_nowait()

    def _next(self) -> tuple[Envelope, Future[Batch]] | None:
        """What came, shared with the other ranks; None: nothing within a few seconds."""
        if not self._is_root:
            envelope = self._share(None)
            return None if envelope is None else (envelope, self._note(envelope))
        try:
            taken = self._inbox.get(timeout=KEEPALIVE_S)
        except queue.Empty:
            self._share(None)
            return None
        self._share(None if taken is None else taken[0], stop=0 if taken is None else None)
        if taken is None:
            raise StopIteration
        return taken

    def _note(self, envelope: Envelope) -> Future[Batch]:
        """Hold what comes, forget what is dropped."""
        job_id: str = envelope.message.job_id  # type: ignore[union-attr]
        future: Future[Batch] = Future()
        with self._changed:
            self._held.pop(job_id, None)
            if isinstance(envelope.message, StageBatch):
                self._held[job_id] = future
            while len(self._held) > MOST_HELD:
                self._held.popitem(last=False)
            self._changed.notify_all()
        return future

    def _decode(self, message: StageBatch, buffers: Sequence[bytes], future: Future[Batch]) -> None:
        try:
            future.set_result(self._check(message, buffers))
        except Exception as error:  # noqa: BLE001 - the job raises it, as it would have without staging
            future.set_exception(error)
