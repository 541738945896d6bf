"""A running completion and the gaps between its tokens, as a user of the OpenAI API sees them."""

from __future__ import annotations

import threading
import time

import httpx


class TokenStream:
    """Streams one long completion after another on a thread; use as a context manager.

    Attributes:
        times_s: arrival of every token (`time.monotonic`).
        errors: what went wrong, if anything.
    """

    def __init__(self, *, base_url: str, model: str, max_tokens: int = 4000) -> None:
        self.times_s: list[float] = []
        self.errors: list[str] = []
        self._url, self._model, self._max_tokens = base_url, model, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> TokenStream:
        self._thread.start()
        deadline_s = time.monotonic() + 120
        while len(self.times_s) < 10 and time.monotonic() < deadline_s and not self.errors:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def gap_s(self, *, start_s: float, end_s: float) -> float:
        """The largest gap between tokens that ends or begins within the interval."""
        near = [(a, b) for a, b in zip(self.times_s, self.times_s[1:], strict=False) if b >= start_s and a <= end_s]
        return max((b - a for a, b in near), default=float("nan"))

    def wait_for_token_after(self, moment_s: float, *, timeout_s: float = 60.0) -> None:
        """Wait until a token has come after `moment_s`."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and not self.errors and not (self.times_s and self.times_s[-1] > moment_s):
            time.sleep(0.002)

    def _run(self) -> None:
        body = {
            "model": self._model, "prompt": [1, 2, 3], "max_tokens": self._max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.Client(base_url=self._url, timeout=120) as http:
            while not self._stop.is_set():
                with http.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        self.errors.append(response.read().decode()[:300])
                        return
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            self.times_s.append(time.monotonic())
                        if self._stop.is_set():
                            return
