"""vLLM's own `nccl` weight transfer as a peer: an unmodified server with its development routes,
and a sender that only sends.

The sender joins vLLM 0.26's group without vLLM: it serves the TCPStore, puts the pickled
`ncclUniqueId` there under the key that vLLM reads, issues the warm-up all-reduce, and broadcasts
buckets cut by vLLM's packed rule. Its tensors are random bytes made beforehand, so nothing
of an export or merge is counted: the peer's best case.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from orchestrator.protocol.messages import Manifest

_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
BUCKET_BYTES = 2**30


class StockServer:
    """An unmodified vLLM OpenAI server with its development routes, on CUDA with backend "nccl";
    use as a context manager.
    """

    def __init__(
        self,
        *,
        python: Path,
        model: Path,
        gpu: int,
        log: Path,
        max_model_len: int = 8192,
        more: Sequence[str] = (),
        device: str = "cuda",
        eager: bool = False,
        kv_cache_bytes: int | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._argv = [
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "stock",
            "--load-format",
            "dummy",
            "--port",
            str(self.port),
            "--max-model-len",
            str(max_model_len),
            *(["--enforce-eager"] if eager else []),
            *more,
        ]
        self._env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        if device == "cuda":
            self._argv += [
                "--dtype",
                "bfloat16",
                "--gpu-memory-utilization",
                "0.05" if kv_cache_bytes else "0.85",
                *(["--kv-cache-memory-bytes", str(kv_cache_bytes)] if kv_cache_bytes else []),
                "--weight-transfer-config",
                '{"backend": "nccl"}',
            ]
            self._env["CUDA_VISIBLE_DEVICES"] = str(gpu)
        else:  # as our own server is started there
            self._argv += ["--dtype", "float32", "--kv-cache-memory-bytes", str(2**29)]
            self._env |= {
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        self._log = log
        # One for all calls: a client of its own for each would load certificates first, 20 ms that
        # are not vLLM's.
        self._http = httpx.Client(base_url=self.base_url, trust_env=False)

    def __enter__(self) -> StockServer:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self._argv, env=self._env, stdout=out, stderr=out, start_new_session=True
            )
        deadline_s = time.monotonic() + 300
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"vLLM ended with {self._process.returncode}: {self._log.read_text()[-3000:]}"
                )
            try:
                if self._http.get("/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.3)
        self.__exit__()
        raise RuntimeError(f"vLLM was not ready in time: {self._log.read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        self._http.close()
        for number, grace_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=grace_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def post(self, route: str, timeout_s: float = 300.0, **body: Any) -> None:
        """POST a development route."""
        response = self._http.post(route, json=body or None, timeout=timeout_s)
        if response.status_code != 200:
            raise RuntimeError(f"{route} answered {response.status_code}: {response.text[:500]}")


def packed_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Bytes of vLLM's packed buckets: tensors are appended until their sum exceeds `limit`, the
    last one included. Pure.
    """
    packed = [0]
    for nbytes in sizes:
        if packed[-1] > limit:
            packed.append(0)
        packed[-1] += nbytes
    return packed


class StockSender:
    """Rank 0 of vLLM's group on one GPU, with one bucket of random bytes."""

    def __init__(self, server: StockServer, manifest: Manifest, *, device: str) -> None:
        import torch
        from cupy.cuda import nccl

        self._torch, self._nccl, self._server = torch, nccl, server
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        self.use(manifest)
        largest = max(self._buckets)
        self._bytes = [
            torch.randint(0, 64, (largest,), dtype=torch.uint8, device=self._device)
            for _ in range(2)
        ]
        self._stream = torch.cuda.Stream(self._device)
        self._join()

    def use(self, manifest: Manifest) -> None:
        """Publish this from now on: the first manifest or a part of it."""
        self._manifest, self._buckets = (
            manifest,
            packed_sizes([t.nbytes for t in manifest.tensors], BUCKET_BYTES),
        )

    def _join(self) -> None:
        torch, nccl = self._torch, self._nccl
        unique_id = nccl.get_unique_id()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            self._store = torch.distributed.TCPStore(
                host_name="127.0.0.1",
                port=port,
                world_size=2,
                is_master=True,
                timeout=datetime.timedelta(seconds=120),
                use_libuv=False,
                master_listen_fd=listener.detach(),
                wait_for_workers=False,
            )
        self._store.set("broadcast_from/0/0", _pickled_id(bytes(c & 0xFF for c in unique_id)))
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
        }
        joining = threading.Thread(
            target=lambda: self._server.post("/init_weight_transfer_engine", init_info=info)
        )
        joining.start()
        self._communicator = nccl.NcclCommunicator(2, unique_id, 0)
        one = torch.zeros(1, device=self._device)
        self._communicator.allReduce(
            one.data_ptr(),
            one.data_ptr(),
            1,
            nccl.NCCL_FLOAT32,
            nccl.NCCL_SUM,
            self._stream.cuda_stream,
        )
        self._stream.synchronize()
        joining.join(timeout=120)

    def publish(self, *, keep_kv: bool = False) -> dict[str, float]:
        """Pause, start, update, finish, resume; seconds of each and of the whole. `keep_kv`:
        running requests are not prefilled again.
        """
        seconds: dict[str, float] = {}
        began = time.monotonic()
        for phase, act in (
            (
                "pause",
                lambda: self._server.post(
                    f"/pause?mode=keep&clear_cache={'false' if keep_kv else 'true'}"
                ),
            ),
            ("start", lambda: self._server.post("/start_weight_update")),
            ("update", self._update),
            ("finish", lambda: self._server.post("/finish_weight_update")),
            ("resume", lambda: self._server.post("/resume")),
        ):
            clock = time.monotonic()
            act()
            seconds[phase] = time.monotonic() - clock
        seconds["total"] = time.monotonic() - began
        return seconds

    def _update(self) -> None:
        tensors = self._manifest.tensors
        info = {
            "names": [t.name for t in tensors],
            "dtype_names": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "packed": True,
            "packed_buffer_size_bytes": BUCKET_BYTES,
            "packed_num_buffers": 2,
        }
        failed: list[Exception] = []

        def update() -> None:
            try:
                self._server.post("/update_weights", update_info=info)
            except Exception as error:  # noqa: BLE001 - told to the thread that waits
                failed.append(error)

        updating = threading.Thread(target=update)
        updating.start()
        for k, nbytes in enumerate(self._buckets):
            pointer = self._bytes[k % 2].data_ptr()
            self._communicator.bcast(
                pointer, nbytes, self._nccl.NCCL_UINT8, 0, self._stream.cuda_stream
            )
        updating.join(timeout=120)
        if failed:
            raise failed[0]
        self._stream.synchronize()

    def close(self) -> None:
        """Abort the communicator; a live one can hang the exit."""
        self._communicator.abort()
        del self._store


def _pickled_id(raw: bytes) -> bytes:
    """What `pickle.dumps(vllm...ncclUniqueId)` makes, by a look-alike under its module's name."""
    module = types.ModuleType(_MODULE)

    class ncclUniqueId(ctypes.Structure):  # noqa: N801 - its name in vLLM
        _fields_ = [("internal", ctypes.c_byte * 128)]

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = _MODULE, "ncclUniqueId"
    module.ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
    parts = _MODULE.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    saved = {n: sys.modules.get(n) for n in names}
    try:
        for n in names[:-1]:
            sys.modules[n] = types.ModuleType(n)
        sys.modules[_MODULE] = module
        unique = ncclUniqueId()
        ctypes.memmove(ctypes.byref(unique), raw, 128)
        return pickle.dumps(unique)
    finally:
        for n, was in saved.items():
            if was is None:
                sys.modules.pop(n, None)
            else:
                sys.modules[n] = was
