"""Processes for rewards that are plain functions (`LoopConfig.reward_processes`).

A reward runs on the main thread of its own process, so it may use signals (`math_verify` does)
and hold Python's lock. At its deadline the process is killed, with all that it has started, and
another one takes its place.

The processes are spawned, never forked: the loop has threads, and may have CUDA. They therefore
import the reward, as `multiprocessing` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.errors import ConfigError, ErrorCode, SpliceError
from orchestrator.processes.child import kill_family
from orchestrator.processes.parent import die_with_parent
from splice.rl.parts import as_reward

START_S = 300.0
"""Longest start of a process, in seconds: it imports what the reward needs."""
END_S = 10.0
NAME = "splice-reward"
IMPORTABLE = (
    "Define the reward at the top level of a module, without a lambda or an inner function, and "
    'start the loop under `if __name__ == "__main__":`; or set reward_processes = 0'
)


class RewardFailed(SpliceError, RuntimeError):
    """A reward raised, returned no number, or its process ended. The text begins with a verb."""

    code = ErrorCode.BAD_INPUT


class RewardLate(RewardFailed):
    """A reward exceeded its deadline; its process was ended."""


class NoProcess(SpliceError, RuntimeError):
    """No process for rewards can be started, so every reward would fail."""

    code = ErrorCode.BAD_INPUT


def refuse_in_process() -> None:
    """Refuse a loop in a process that only imports the user's script for its reward.

    Raises:
        ConfigError: this is such a process.
    """
    if multiprocessing.current_process().name.startswith(NAME):
        raise ConfigError(
            "this script starts a loop when it is imported, and the processes for rewards import "
            f"it. {IMPORTABLE}"
        )


class RewardProcesses:
    """Calls a reward in processes, which it starts as calls need them. Callable on any thread.

    Args:
        timeout_s: longest time of a call; the start of a process does not count.

    Raises:
        ConfigError: the reward cannot be sent to a process.
    """

    def __init__(self, reward: Callable[..., Any], *, timeout_s: float) -> None:
        try:
            self._reward = pickle.dumps(reward)
        except Exception as error:  # a user's object may raise anything
            raise ConfigError(
                f"the reward cannot be sent to a process ({type(error).__name__}: {error}). "
                f"{IMPORTABLE}"
            ) from error
        self._timeout_s = timeout_s
        self._lock, self._is_closed = threading.Lock(), False
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        # A process ends with the thread that has started it, so that one lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="splice-reward-start")

    def __call__(self, row: Any, completion: Any) -> float:
        """Return the reward.

        Raises:
            RewardFailed: it raised, returned no number, or was late.
            NoProcess: no process starts, or the pool is closed.
        """
        worker = self._take()
        try:
            reward = worker.ask((row, completion), timeout_s=self._timeout_s)
        finally:
            self._give_back(worker)
        return reward

    def start(self) -> None:
        """Start one process, which shows whether it can import the reward. Raises as a call."""
        self._give_back(self._take())

    def close(self) -> None:
        """End all processes; calls under way fail."""
        with self._lock:
            self._is_closed = True
            workers = list(self._all)
        for worker in workers:
            worker.end()
        self._starter.shutdown(wait=True)

    def _take(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise NoProcess("the loop has ended")
            worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.lives:
            return worker
        if worker is not None:
            self._give_back(worker)
        try:
            worker = self._starter.submit(_Worker, self._reward).result(START_S)
        except (OSError, RuntimeError, TimeoutError) as error:
            raise NoProcess(f"a process for rewards does not start: {error}") from error
        with self._lock:
            self._all.add(worker)
            is_late = self._is_closed
        try:
            if is_late:
                raise NoProcess("the loop has ended")
            worker.wait_ready()
        except BaseException:
            worker.end()
            self._give_back(worker)
            raise
        return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker.lives and not self._is_closed:
                self._idle.append(worker)
            else:
                self._all.discard(worker)


class _Worker:
    """This process's end of one process."""

    def __init__(self, reward: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, reward, os.getpid()), name=NAME)
        self._is_ended, self._ending = False, threading.Lock()
        self._process.start()
        theirs.close()  # so that its end is an EOFError here

    @property
    def lives(self) -> bool:
        """Whether it runs and has been told to continue."""
        return not self._is_ended and self._process.is_alive()

    def wait_ready(self) -> None:
        """Wait until it has imported the reward.

        Raises:
            NoProcess: it cannot, or takes longer than `START_S`.
        """
        try:
            what, text = self._answer(START_S)
        except RewardFailed as error:
            raise NoProcess(
                f"a process for rewards {error} while it started; its own error is above. "
                f"{IMPORTABLE}"
            ) from error
        if what != "ready":
            raise NoProcess(f"a process for rewards cannot load the reward: {text}. {IMPORTABLE}")

    def ask(self, arguments: tuple[Any, ...], *, timeout_s: float) -> float:
        """Return the reward; see `RewardProcesses`."""
        try:
            self._connection.send(arguments)
        except OSError:  # `_answer` says how it ended
            pass
        what, *said = self._answer(timeout_s)
        if what == "reward":
            return as_reward(said[0])
        error = RewardFailed(said[0])
        for note in said[1:]:
            error.add_note(note)
        raise error

    def _answer(self, timeout_s: float) -> tuple[Any, ...]:
        try:
            if not self._connection.poll(timeout_s):
                self.end()
                raise RewardLate(f"took more than {timeout_s:.0f} s")
            answer: tuple[Any, ...] = self._connection.recv()
        except (EOFError, OSError):
            self.end()
            code = self._process.exitcode
            raise RewardFailed(f"ended with code {code}") from None
        return answer

    def end(self) -> None:
        """Kill it with all that it has started. Safe to call twice, on any thread."""
        with self._ending:
            if self._is_ended:
                return
            self._is_ended = True
            pid = self._process.pid
            if pid is not None and self._process.is_alive():
                kill_family(pid)
            self._process.join(END_S)


# ---------------------------------------------------------------- the process


def _work(connection: Connection, pickled: bytes, parent: int) -> None:
    """Answer calls until the connection ends."""
    die_with_parent(parent=parent)
    os.setsid()  # Ctrl-C is for the loop, and `kill_family` ends the group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        reward = pickle.loads(pickled)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", ""))
    with contextlib.suppress(EOFError, OSError):  # the loop has ended
        while True:
            connection.send(_answer_of(reward, *connection.recv()))


def _answer_of(reward: Callable[..., Any], row: Any, completion: Any) -> tuple[Any, ...]:
    """What a call came to: small, and made of what every process knows."""
    try:
        given = reward(row, completion)
        if inspect.isawaitable(given):
            given = asyncio.run(_result_of(given))
    except BaseException as error:  # noqa: BLE001 - a user's reward may raise anything
        text = f"raised {type(error).__name__}: {error}"
        return "failed", text, "".join(traceback.format_exception(error))
    try:
        return "reward", as_reward(given)
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        return "failed", f"returned {given!r:.100}, which is no number"


async def _result_of(given: Any) -> Any:
    return await given
