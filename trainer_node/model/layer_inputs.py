"""Keeps the inputs of recomputed layers in host memory until the backward pass needs them.

    forward     layer n + 1 runs, and the input of layer n leaves the GPU meanwhile
    backward    layer n runs again, and the input of layer n - 1 comes back meanwhile

Megatron (0.19.2) saves a recomputed layer's arguments for the backward pass. torch calls the hooks
of this module for each of them. They move hidden states only, because all layers share the other
arguments. The final norm's go too where it saves them. The hooks are not active in the backward
pass, so what a layer saves when it runs again stays.

Copies have their own stream. The stream that computes waits for a copy before it frees what was
copied. It does so even if a pass fails between the two (`_Input.__del__`).

Nothing that exists fits. Megatron's `cpu_offloading` refuses recomputation. Its
`fine_grained_activation_offloading` moves what a layer's modules save, not a layer's input. torch's
`save_on_cpu` copies on the stream that computes, and moves every tensor.

Axes: B = bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

CHUNK_BYTES = 32 << 20
"""Largest piece of pinned memory. torch rounds each piece up to a power of two."""


class LayerInputs:
    """Moves the layers' inputs of one rank.

    Args:
        hidden_size: features of the hidden states.
    """

    def __init__(self, *, hidden_size: int, device: torch.device) -> None:
        self._hidden_size, self._device = hidden_size, device
        self._stream: torch.cuda.Stream | None = None
        self._last: _Input | None = None
        self.moved_bytes = 0
        """Bytes that have left the device so far."""

    @contextlib.contextmanager
    def on_host(self, is_on: bool = True) -> Iterator[None]:
        """Move the inputs of the layers that the block runs, until its backward pass."""
        if not is_on:
            yield
            return
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            if self._last is not None:
                self._last.leave()
        finally:
            self._last = None

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.dim() != 3 or tensor.shape[-1] != self._hidden_size:
            return tensor
        if self._last is not None:
            self._last.leave()
        self._last = _Input(tensor.contiguous(), before=self._last, stream=self._stream)
        self.moved_bytes += tensor.nbytes
        return self._last

    @staticmethod
    @torch.no_grad()
    def _unpack(saved: Any) -> torch.Tensor:
        return saved.back() if isinstance(saved, _Input) else saved


class _Input:
    """A layer's input, on its way to the host or back.

    Args:
        before: that of the layer before it, which the backward pass needs next.
        stream: of the copies. None: on a CPU.
    """

    def __init__(
        self, tensor: torch.Tensor, *, before: _Input | None, stream: torch.cuda.Stream | None
    ) -> None:
        self._copied: torch.cuda.Event | None = None
        """Comes after the last copy; None: whoever computes has waited for it."""
        self._before, self._stream = before, stream
        self._here: torch.Tensor | None = tensor
        self._like = torch.empty_like(tensor, device="meta")
        self._device = tensor.device
        pieces = _bytes_of(tensor).split(CHUNK_BYTES)
        try:
            self._chunks = [
                torch.empty(len(piece), dtype=torch.uint8, pin_memory=stream is not None)
                for piece in pieces
            ]
        except RuntimeError as error:
            error.add_note(
                "(while pinning host memory for the layers' inputs of a long pack; another process "
                "may have taken it, or use recompute = 'full')"
            )
            raise
        with self._copying():
            for chunk_B, piece_B in zip(self._chunks, pieces, strict=True):
                chunk_B.copy_(piece_B, non_blocking=True)

    def leave(self) -> None:
        """Free the device's memory, after the copy."""
        self._wait()
        self._here = None

    def back(self) -> torch.Tensor:
        """Return the input on the device, and let the one before it come."""
        here = self._come()
        self._wait()
        self._here = None
        if self._before is not None:
            self._before._come()
            self._before = None
        return here

    def _come(self) -> torch.Tensor:
        if self._here is None:
            self._here = torch.empty_like(self._like, device=self._device)
            pieces = _bytes_of(self._here).split(CHUNK_BYTES)
            with self._copying():
                for chunk_B, piece_B in zip(self._chunks, pieces, strict=True):
                    piece_B.copy_(chunk_B, non_blocking=True)
        return self._here

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Copy on the copies' stream, after what was queued to compute."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # after a CUDA fault
            self._wait()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
