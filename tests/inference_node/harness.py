"""A router that speaks the control protocol, a trainer that sends tensors, and a real inference
node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import zmq

from inference_node.shared import vllm_version
from orchestrator.protocol import messages as m
from orchestrator.protocol.curve import server_keys
from orchestrator.protocol.frames import Envelope, decode, encode, from_wire, to_wire
from tests.inference_node import tiny
from weight_transfer.chunks import ChunkSender
from weight_transfer.groups import TransferGroup, open_listener

TOKEN = "a-run-token-for-tests"
TOKEN_ROUTES = ["--enable-scale-out"] if vllm_version.dialect() == "0.28" else []
"""Opens /inference/v1/generate, which 0.26 serves anyway."""
SILENCE_S = 5.0
PROMPT = [5, 17, 33, 101, 250, 7, 9, 300, 44, 12]
TAU = 1e-4
"""How far a served log-prob may be from transformers' in fp32."""


class Router:
    """The orchestrator's end of the control socket, as small as it can be. Use from one thread."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        server_keys(TOKEN).secure(self._socket)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.hello: m.Hello | None = None
        self.ready: list[m.Ready] = []
        self.unready: list[m.Unready] = []
        self.progress: dict[str, list[m.Progress]] = {}
        self.terminal: dict[str, Envelope] = {}
        self._peer = b""
        self._pumped_s = self._heard_s = time.monotonic()

    def pump(self, timeout_s: float) -> None:
        """Take what comes within `timeout_s`; returns after the first message."""
        self._pumped_s = time.monotonic()
        if not self._socket.poll(timeout_s * 1000):
            return
        peer, *frames = self._socket.recv_multipart()
        envelope = decode(from_wire(frames))
        message = envelope.message
        if isinstance(message, m.Hello):
            self.hello, self._peer = message, peer
            self.send(m.Welcome(heartbeat_s=0.5))
            return
        if peer == self._peer:
            self._heard_s = time.monotonic()
        if isinstance(message, m.Heartbeat):
            self.send(m.Heartbeat(node_id="orchestrator"))
        elif isinstance(message, m.Ready):
            self.ready.append(message)
        elif isinstance(message, m.Unready):
            self.unready.append(message)
        elif isinstance(message, m.Progress):
            self.progress.setdefault(message.request_id, []).append(message)
        elif isinstance(message, (m.Completed, m.Failed)):
            self.terminal[message.request_id] = envelope

    def send(self, message: m.AnyMessage) -> None:
        self._socket.send_multipart([self._peer, *to_wire(encode(message))])

    def wait(self, condition: Any, timeout_s: float = 60.0, alive: Any = lambda: True) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            assert alive(), "the node has ended"
            self.pump(0.1)

    def find_node(self) -> None:
        """After a silence of this end: the node has dialled again, perhaps several times, under
        other identities.
        """
        if time.monotonic() - self._pumped_s < SILENCE_S:
            return
        while self._socket.poll(0):  # of connections that may be gone
            self.pump(0.0)
        began = time.monotonic()
        self.wait(lambda: self._heard_s > began)

    def outcome(self, request_id: str, timeout_s: float = 60.0) -> Envelope:
        self.wait(lambda: request_id in self.terminal, timeout_s)
        return self.terminal[request_id]

    def request(self, message: Any, timeout_s: float = 60.0) -> Envelope:
        self.find_node()
        self.send(message)
        return self.outcome(message.request_id, timeout_s)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def new(kind: Any, deadline_s: float = 30.0, **fields: Any) -> Any:
    """A request with a fresh id."""
    return kind(request_id=uuid.uuid4().hex, deadline_s=deadline_s, **fields)


class Node:
    """A running inference node of one model kind, and the trainer's side of its publications."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        *,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        module: str = "tests.inference_node.small_chunks",
        max_restarts: int = 5,
        vllm: Sequence[str] = (),
    ) -> None:
        self.kind, self.folder, self.workers = kind, folder, tensor_parallel * data_parallel
        # Processes start one after the other, each with imports of a minute on a busy machine.
        self.startup_s = 170.0 * self.workers
        self.base = tiny.write_checkpoint(folder / "model", kind)
        self.manifest = tiny.manifest_of(self.base)
        self.router = Router()
        self.log = folder / "vllm.log"
        config = {
            "model": str(folder / "model"),
            "name": "tiny",
            "max_model_len": 1024,
            "cpu_kv_cache_gb": 0.1,
            "log_file": str(self.log),
            "max_num_seqs": 8,
            "startup_timeout_s": self.startup_s,
            "tensor_parallel": tensor_parallel,
            "max_restarts": max_restarts,
            "extra_args": [
                *TOKEN_ROUTES,
                *([] if data_parallel == 1 else ["--data-parallel-size", str(data_parallel)]),
                *vllm,
            ],
        }
        (folder / "inference.json").write_text(json.dumps(config))
        env = {
            **os.environ,
            "SPLICE_RUN_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",  # vLLM's sampler would compile for up to half a minute
        }
        argv = [
            sys.executable,
            "-m",
            module,
            "--endpoint",
            self.router.endpoint,
            "--node-id",
            "inference-0",
        ]
        self.process = subprocess.Popen(
            [*argv, "--config", str(folder / "inference.json")], env=env, start_new_session=True
        )
        self.groups: dict[str, TransferGroup] = {}
        self.sender: ChunkSender | None = None
        self.layout: m.WireLayout | None = None
        """Of the manifest that was prepared last."""
        self.version: int | None = None
        self.family: list[psutil.Process] = []

    def wait_ready(self, count: int = 1) -> None:
        try:
            self.router.wait(
                lambda: len(self.router.ready) >= count,
                self.startup_s + 5.0,
                alive=lambda: self.process.poll() is None,
            )
        except AssertionError:
            print(self.log.read_text()[-6000:] if self.log.exists() else "no log")
            raise
        self.url = self.router.ready[-1].detail["base_url"]
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def listening_addresses(self) -> set[str]:
        """Of the supervisor's and vLLM's processes."""
        family = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        return {
            c.laddr.ip
            for p in family
            for c in p.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        }

    # ------------------------------------------------------------ the trainer's side

    def join(self) -> None:
        self.leave()
        listener = open_listener(
            transport="tcp",
            host="127.0.0.1",
            world_size=1 + self.workers,
            device=torch.device("cpu"),
        )
        joined: list[Any] = []
        thread = threading.Thread(target=lambda: joined.append(listener.join(30.0)))
        thread.start()
        answer = self.router.request(
            new(m.JoinTransferGroup, rendezvous=listener.rendezvous)
        ).message
        thread.join(30.0)
        assert answer.kind == "Completed" and joined, answer
        self.groups = {"inference-0": joined[0]}

    def leave(self) -> None:
        if self.sender is not None:
            self.sender.close()
        for group in self.groups.values():
            group.close()
        self.sender, self.groups = None, {}

    def prepare(
        self, version: int, manifest: m.Manifest | None = None, *, order: m.LayoutOrder = "own"
    ) -> Any:
        request = new(
            m.PrepareUpdate, version=version, manifest=manifest or self.manifest, order=order
        )
        answer = self.router.request(request).message
        if answer.kind == "Completed":
            self.layout = m.WireLayout.model_validate(answer.result["layout"])
        return answer

    def sender_in(
        self,
        layout: m.WireLayout | None,
        manifest: m.Manifest,
        tensors: dict[str, torch.Tensor],
        *,
        before: Callable[[int], None] = lambda chunk: None,
    ) -> ChunkSender:
        """Takes the place of the sender before it. `before` is called with each chunk's number
        before it is filled.
        """
        assert layout is not None, "nothing was prepared"
        order = [c.tensors for c in layout.chunks]

        def fill(chunk: int, out_B: torch.Tensor) -> None:
            before(chunk)
            out_B.copy_(
                torch.cat(
                    [
                        tensors[manifest.tensors[i].name].reshape(-1).view(torch.uint8)
                        for i in order[chunk]
                    ]
                )
            )

        if self.sender is not None:
            self.sender.release()
        self.sender = ChunkSender(
            groups=self.groups, manifest=manifest, chunks=order, fill=fill, device="cpu"
        )
        return self.sender

    def receive(
        self,
        version: int,
        tensors: dict[str, torch.Tensor],
        *,
        mode: str = "keep",
        deadline_s: float = 30.0,
    ) -> tuple[Envelope, Any]:
        """ReceiveWeights with a sender on a thread; (outcome, send report)."""
        reports: list[Any] = []
        sender = self.sender_in(self.layout, self.manifest, tensors)
        thread = threading.Thread(target=lambda: reports.append(sender.send(deadline_s=deadline_s)))
        thread.start()
        envelope = self.router.request(
            new(m.ReceiveWeights, deadline_s, version=version, pause_mode=mode)
        )
        thread.join(deadline_s)
        return envelope, reports[0] if reports else None

    def commit(self, version: int) -> Any:
        answer = self.router.request(new(m.CommitUpdate, version=version)).message
        if answer.kind == "Completed":
            self.version = version
        return answer

    def publish(
        self, version: int, tensors: dict[str, torch.Tensor], *, mode: str = "keep"
    ) -> m.Completed:
        """The whole way; asserts that it went well and that the digests are the sender's."""
        try:
            return self._publish(version, tensors, mode=mode)
        except BaseException:
            self.leave()  # the next one joins again
            raise

    def _publish(self, version: int, tensors: dict[str, torch.Tensor], *, mode: str) -> m.Completed:
        if not self.groups:
            self.join()
        prepared = self.prepare(version)
        assert prepared.kind == "Completed", prepared
        envelope, report = self.receive(version, tensors, mode=mode)
        assert envelope.message.kind == "Completed", envelope.message
        live = torch.frombuffer(bytearray(envelope.buffers[0]), dtype=torch.int64)
        assert envelope.message.result["unverified"] == {}
        wrong = [
            s.name
            for s, same in zip(
                self.manifest.tensors, (live == report.digests_N).tolist(), strict=True
            )
            if not same
        ]
        assert not wrong, wrong
        committed = self.commit(version)
        assert committed.kind == "Completed", committed
        return envelope.message  # type: ignore[return-value]

    # ------------------------------------------------------------ the client's side

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30.0, trust_env=False, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30.0, trust_env=False)

    def prompt_logprobs(self, model: str = "tiny") -> torch.Tensor:
        """Served log-prob of each prompt token after the first. [T-1]"""
        body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        rows = answer.json()["choices"][0]["prompt_logprobs"]
        return torch.tensor(
            [row[str(t)]["logprob"] for row, t in zip(rows[1:], PROMPT[1:], strict=True)]
        )

    def expected(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The same by transformers in fp32. [T-1]"""
        logprobs_TV = tiny.reference_logprobs(self.kind, tensors, PROMPT)
        return logprobs_TV[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]

    def close(self) -> None:
        try:
            self.leave()
            self.family = (
                psutil.Process(self.process.pid).children(recursive=True)
                if self.process.poll() is None
                else self.family
            )
            with contextlib.suppress(AssertionError):  # the node ends below in any case
                if self.process.poll() is None:
                    self.router.find_node()
            self.router.send(m.Shutdown())
            try:
                assert self.process.wait(45.0) == 0
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        finally:
            self.router.close()
            _, alive = psutil.wait_procs(self.family, timeout=5.0)
            for process in alive:
                process.kill()
            assert not alive, f"left behind: {alive}"


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same tensors, each changed a little everywhere."""
    g = torch.Generator().manual_seed(seed)
    return {n: t + 0.02 * torch.randn(t.shape, generator=g) for n, t in tensors.items()}


def ensure_published(node: Node) -> int:
    """The version served, after publishing the next one if there is none yet or a failed test has
    left the replica without.
    """
    if node.version is None:
        node.publish(0, node.base)
    elif (
        node.post("/v1/completions", {"model": "tiny", "prompt": [3], "max_tokens": 1}).status_code
        != 200
    ):
        node.join()
        node.publish(node.version + 1, node.base)
    assert node.version is not None
    return node.version
