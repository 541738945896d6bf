"""Requests long enough to span a swap."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from tests.inference_node.harness import Node

LONG = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "temperature": 1.0}


class Request(threading.Thread):
    """One long request; notes when its first bytes came."""

    def __init__(self, node: Node, model: str, *, stream: bool, **more: Any) -> None:
        super().__init__()
        self.node, self.body, self.stream = (
            node,
            {**LONG, "model": model, "stream": stream, **more},
            stream,
        )
        self.first = threading.Event()
        self.events: list[Any] = []
        self.status, self.headers, self.json, self.done = 0, {}, None, False  # type: ignore[var-annotated]
        self.start()

    def run(self) -> None:
        with httpx.stream(
            "POST", self.node.url + "/v1/completions", json=self.body, timeout=60.0, trust_env=False
        ) as response:
            self.status, self.headers = response.status_code, response.headers
            if not self.stream:
                response.read()
                self.json = response.json()
                return
            for line in response.iter_lines():
                self.first.set()
                self.done = self.done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
