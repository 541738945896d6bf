"""A run without models: a client whose jobs take a random time, and servers that stream.

Weights are a hash over every batch trained so far, and tokens follow from weights and seed. So two
runs have equal weights only if they trained on the same tokens in the same order.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import NodeStatus, Progress, Status, TrainMergedResult

NAME = "tiny"
PROMPT_LENGTH = 3


class Crash(BaseException):
    """The process is gone."""


class StandIn:
    """What `SpliceClient` is to a loop, and the servers behind it.

    Args:
        train_s, token_s: longest times of a job and of a token; drawn between 0 and these.
    """

    def __init__(self, *, seed: int = 0, train_s: float = 0.0, token_s: float = 0.0) -> None:
        self.run_id = "a-run"
        self.run_dir: Path | None = None
        self.draw = random.Random(seed)
        self.train_s, self.token_s = train_s, token_s
        self.version, self.weights = 0, b""
        self.outcomes: dict[str, TrainMergedResult | JobFailed | None] = {}
        self.trained: list[str] = []
        self.crash_at = ""
        """"before submit", "after submit" or "after outcome"."""
        self.fail_next: list[JobFailed | None] = []
        """How the next jobs fail, the last one first; None: it does not."""
        self.servers: list[Server] = []
        self.away_s = 0.0
        """How long the next job waits for nodes."""
        self.is_cut: Callable[[dict[str, Any]], bool] = lambda body: True
        """Whether the answer to a request is cut off."""

    # ------------------------------------------------------------ SpliceClient

    def status(self, *, timeout_s: float = 10.0) -> Status:
        nodes = tuple(
            NodeStatus(
                node_id=f"inference-{n}",
                role="inference",
                state=server.state,
                detail={"base_url": server.url},
            )
            for n, server in enumerate(self.servers)
        )
        return Status(
            name=NAME, version=self.version, publication="committed", nodes=nodes, queued_jobs=0
        )

    def submit(self, job: Any, *, job_id: str, buffers: Any, on_progress: Any = None) -> str:
        self.on_progress = on_progress or (lambda progress: None)
        if self.crash_at == "before submit":
            raise Crash
        if job_id not in self.outcomes:
            self.outcomes[job_id] = None
            threading.Thread(target=self._train, args=(job_id, b"".join(buffers))).start()
        if self.crash_at == "after submit":
            raise Crash
        return job_id

    def _train(self, job_id: str, batch: bytes) -> None:
        self._be_away(job_id)
        time.sleep(self.draw.uniform(0, self.train_s))
        if self.fail_next and (failure := self.fail_next.pop()) is not None:
            self.outcomes[job_id] = failure
            return
        self.weights = hashlib.sha256(self.weights + batch).digest()
        self.version += 1
        self.trained.append(job_id)
        self.outcomes[job_id] = TrainMergedResult(
            version=self.version, alias=f"{NAME}@{self.version}", metrics={"loss": 0.0}
        )

    def _be_away(self, job_id: str) -> None:
        away_s, self.away_s = self.away_s, 0.0
        for phase, seconds in (("waiting for nodes", away_s), ("training", 0.0)) if away_s else ():
            self.on_progress(
                Progress(request_id=job_id, sequence=0, phase=phase, detail={"text": "of x"})
            )
            time.sleep(seconds)

    def wait(self, job_id: str, *, timeout_s: float) -> TrainMergedResult:
        deadline_s = time.monotonic() + timeout_s
        while self.outcomes[job_id] is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError
            time.sleep(0.002)
        if self.crash_at == "after outcome":
            raise Crash
        outcome = self.outcomes[job_id]
        if isinstance(outcome, JobFailed):
            raise outcome
        assert outcome is not None
        return outcome

    # ------------------------------------------------------------ tokens

    def token(self, seed: int, place: int) -> int:
        said = hashlib.sha256(self.weights + f"{seed}/{place}".encode()).digest()
        return said[0]


def npy(tokens: list[int]) -> str:
    """Experts of two layers, two for each token, as vLLM sends them."""
    experts = np.array([[[t % 251, k] for k in range(2)] for t in tokens], dtype=np.uint8)
    with io.BytesIO() as file:
        np.save(file, experts)
        return base64.b64encode(file.getvalue()).decode()


class Server:
    """A replica's API. `shows`: the version it is stuck at."""

    def __init__(self, run: StandIn) -> None:
        self.run, self.state, self.name = run, "ready", NAME
        self.shows: int | None = None
        self.answers: int | None = None
        """Status that it answers instead of tokens."""
        self.served = 0
        self.asked: list[dict[str, Any]] = []
        """Every request's body."""
        self.is_silent = False
        self.routes = True
        """It was started with --enable-return-routed-experts."""
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()
        run.servers.append(self)

    async def start(self) -> Server:
        """Listen."""
        self._server = await asyncio.start_server(self._on_request, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    def kill(self) -> None:
        """Every connection ends, and no new one is taken."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _on_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            await self._answer(body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """vLLM's route of token ids, with routed experts: (token, place) in each layer."""
        sampling, prompt = body["sampling_params"], body["token_ids"]
        made: list[int] = []
        for place in range(sampling["max_tokens"]):
            made.append(self.run.token(sampling.get("seed", 0), place))
            choice = {
                "index": 0,
                "text": "x",
                "token_ids": made[-1:],
                "logprobs": {"content": [{"token": "x", "logprob": -1.0}]},
                "finish_reason": None,
            }
            if len(made) == sampling["max_tokens"]:
                choice |= {"finish_reason": "length"}
                if self.routes:
                    choice["routed_experts"] = npy([*prompt, *made][:-1])
            event = {"choices": [choice], "versions": [self.run.version]}
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.asked.append(body)
        status = self.answers or 200
        writer.write(f"HTTP/1.1 {status} x\r\nconnection: close\r\n\r\n".encode())
        if status != 200:
            writer.write(b'{"error": {"message": "not now"}}')
            return
        if "token_ids" in body:
            await self._generate(body, writer)
            return
        if "max_tokens" not in body:  # /tokenize
            writer.write(b'{"tokens": [7, 7, 7]}')
            return
        count = body["max_tokens"]
        for place in range(count):
            if self.is_silent:
                await asyncio.sleep(3600)
            if self.run.token_s:
                await asyncio.sleep(self.run.draw.uniform(0, self.run.token_s))
            version = self.run.version if self.shows is None else self.shows
            choice = {
                "index": 0,
                "text": "\u2028",
                "token_ids": [self.run.token(body.get("seed", 0), place)],
                "logprobs": {"token_logprobs": [-1.0]},
                "finish_reason": None,
            }
            if place == count - 1:
                choice["finish_reason"] = "length" if self.run.is_cut(body) else "stop"
            if place == 0:
                choice["prompt_token_ids"] = body["prompt"]
            event = {"model": f"{self.name}@{version}", "choices": [choice]}
            writer.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        self.served += 1
