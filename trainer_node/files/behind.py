"""Writes a checkpoint's moments while the trainer continues.

    start      a thread copies the moments to host memory (pinned, where they are on a GPU) -> the
               trainer may step again -> the thread writes the copy -> the checkpoint is complete
    may_step   waits until the copy is taken
    settle     waits for the end of the save, and says how it ended

There is one save at a time. While weights are sent its threads begin no span of a file: they would
keep the sending one from its next launch, and generation pauses meanwhile. A copy or span that has
begun continues. Without room for a copy the thread reads the live moments, and `may_step` waits for
the whole save. The copy is always on the host, because packs are as large as the device's memory
takes. The thread's collectives have a separate process group, so the trainer's requests need not
wait for them. If the process ends first, the moments are not there; `remake` says what a load then
does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer_node.files.generations import CheckpointError
from trainer_node.ranks import host_memory

log = logging.getLogger("splice.trainer")
TIMEOUT_S = 3600.0
"""Longest wait for a save, in seconds; the request that waits has its own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """A complete checkpoint that equals the trainer's state at these counters."""

    folder: Path
    save: str
    """The checkpoint's id."""
    steps: int
    skipped_steps: int


@dataclass(slots=True, kw_only=True)
class _Save:
    """The save that was started last."""

    folder: Path
    thread: threading.Thread
    read: threading.Event = field(default_factory=threading.Event)
    """Nothing reads the live moments any more."""
    error: str = ""
    """Why it failed; empty: it did not."""


class Behind:
    """One rank's save in the background."""

    def __init__(self) -> None:
        self._save: _Save | None = None
        self._pinned: list[torch.Tensor] = []
        self._may_write = threading.Event()
        self._may_write.set()
        self.step_waited_s = self.save_waited_s = 0.0
        """Seconds in `may_step` and in `settle` since they were set to 0."""

    @property
    def is_writing(self) -> bool:
        """Whether a save was started and not settled."""
        return self._save is not None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Begin no copy and no span of a file within the block."""
        self._may_write.clear()
        try:
            yield
        finally:
            self._may_write.set()

    def wait_turn(self) -> None:
        """Wait while the save is held; called before each copy and each span."""
        self._may_write.wait()

    def start(
        self,
        folder: Path,
        moments: Sequence[torch.Tensor],
        write: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """Begin to write. The earlier save is settled.

        Args:
            folder: what is written, for messages.
            write: gets the copies in the order of `moments`; runs on the save's thread.
        """
        assert self._save is None, "the earlier save is not settled"
        device = moments[0].device if moments else torch.device("cpu")
        queued = None
        if device.type == "cuda":
            queued = torch.cuda.Event()
            queued.record(torch.cuda.current_stream(device))
            # Not on the save's thread: pinning holds up all launches, also those of a send.
            with _or_reads_them():
                self._pin(moments)

        def run() -> None:
            try:
                copies = None
                with _or_reads_them():
                    copies = self._copies(moments, device, queued)
                if copies is not None:
                    save.read.set()
                self.wait_turn()  # Python of this thread would hold up a send
                write(moments if copies is None else copies)
            except BaseException as error:  # noqa: BLE001  - `settle` tells of it
                save.error = f"{type(error).__name__}: {error}"
                log.warning("%s could not be written behind: %s", folder, save.error)
            finally:
                save.read.set()

        thread = threading.Thread(target=run, name="save-behind", daemon=True)
        save = self._save = _Save(folder=folder, thread=thread)
        thread.start()

    @torch.no_grad()
    def _copies(
        self,
        moments: Sequence[torch.Tensor],
        device: torch.device,
        queued: torch.cuda.Event | None,
    ) -> list[torch.Tensor] | None:
        """Return the moments in host memory, or None if there is no room."""
        if queued is None:
            is_room = _is_room(sum(t.nbytes for t in moments))
            return [t.detach().clone() for t in moments] if is_room else None
        if not self._has_pinned(moments):
            return None
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(queued)
            for copy, tensor in zip(self._pinned, moments, strict=True):
                self.wait_turn()
                copy.copy_(tensor.detach(), non_blocking=True)
        stream.synchronize()
        return self._pinned

    def _pin(self, moments: Sequence[torch.Tensor]) -> None:
        """Have pinned memory for a copy, if there is room. The first time takes seconds."""
        if not self._has_pinned(moments):
            self._pinned = []
            if _is_room(sum(t.nbytes for t in moments)):
                self._pinned = [torch.empty(t.shape, pin_memory=True) for t in moments]

    def _has_pinned(self, moments: Sequence[torch.Tensor]) -> bool:
        return [t.shape for t in self._pinned] == [t.shape for t in moments]

    def may_step(self) -> None:
        """Wait until the moments may change.

        Raises:
            CheckpointError: they are still read after `TIMEOUT_S`.
        """
        if self._save is not None:
            self.step_waited_s += self._timed(self._save.read.wait)

    def settle(self) -> str:
        """Wait for the end of the save. Returns why it failed; empty: it did not, or there was
        none. Ranks may hear different reasons.

        Raises:
            CheckpointError: it has not ended after `TIMEOUT_S`.
        """
        save = self._save
        if save is None:
            return ""
        self.save_waited_s += self._timed(lambda timeout_s: self.wait(timeout_s=timeout_s))
        self._save = None
        return save.error

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the end of the save, however it ends. Returns whether it has ended."""
        save = self._save
        if save is None:
            return True
        save.thread.join(timeout_s)
        return not save.thread.is_alive()

    def _timed(self, wait: Callable[[float], bool]) -> float:
        assert self._save is not None
        began = time.monotonic()
        if not wait(TIMEOUT_S):
            raise CheckpointError(
                f"{self._save.folder} is still being written after {TIMEOUT_S:.0f} s; see whether "
                "its disk answers"
            )
        return time.monotonic() - began


@contextlib.contextmanager
def _or_reads_them() -> Iterator[None]:
    """Continue without memory: a rank that left would keep the others waiting."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        log.warning("no memory for a copy of the moments (%s); reading them", error)


def _is_room(nbytes: int) -> bool:
    """Whether all ranks of this host, which copy at the same time, have room for as much."""
    return nbytes <= host_memory.room_bytes()
