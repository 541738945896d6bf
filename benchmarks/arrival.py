"""A training job's arrival: seconds from the last byte at the trainer to the moment when its first micro-batch lies on the device.

512 sequences of 1,024 to 3,072 tokens (2,048 in the mean), 16,384 tokens in a pack. Ours: frames decoded, sent on to nobody (one rank), the batch
checked, packed, the first pack laid out and copied. The peer unpickles the same sequences as a list of dictionaries of tensors, as trainers that
take Python objects do, pads 8 of them to one length and copies those; it checks nothing. What a running trainer measures itself is `to_first_forward` in
a job's `seconds`.

The second case is a larger batch (1,024 sequences, 2.1 million tokens) from the moment when the orchestrator sends the job, over a socket on the loopback
and the trainer's own link: sent ahead and checked while the trainer was at work (`StageBatch`), against a job that carries its batch.
"""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import zmq
from torch.nn.utils.rnn import pad_sequence

from benchmarks.harness import Case
from benchmarks.timing import seconds
from orchestrator.protocol.curve import server_keys
from orchestrator.protocol.frames import decode, encode, to_wire
from orchestrator.protocol.messages import (
    AnyMessage,
    Hello,
    LossSpec,
    OptimParams,
    StageBatch,
    TrainMerged,
    Welcome,
    batch_specs,
)
from orchestrator.protocol.node_link import NodeLink

if TYPE_CHECKING:
    from trainer_node.batch import Batch

VOCAB, LONGEST, PACK, MICRO_BATCH = 151_936, 3_072, 16_384, 8
DEADLINE_S = 60.0
TOKEN = "the-benchmark's-token"


def run(*, device: str, small: bool) -> list[Case]:
    """One process."""
    samples = 3 if small else int(os.environ.get("SPLICE_BENCH_SAMPLES", "10"))
    return [
        _alone(16 if small else 512, device=device, samples=samples),
        _ahead(32 if small else 1024, device=device, samples=samples),
    ]


def _alone(num_sequences: int, *, device: str, samples: int) -> Case:
    """From the last byte."""
    arrays, lengths = _batch(num_sequences)
    message, buffers = _job(arrays)
    frames = [bytes(f) for f in encode(message, buffers)]
    pickled, place = _pickled(arrays, lengths), torch.device(device)

    def ours() -> None:
        _lay_out(_check(message, decode(frames).buffers), device)

    def peer() -> None:
        rows = pickle.loads(pickled)[:MICRO_BATCH]
        for name in rows[0]:
            pad_sequence([r[name] for r in rows], batch_first=True).to(place)

    return Case(
        name=f"arrival/{num_sequences}x2048", metric="to_first_micro_batch_s", unit="s", samples=_times(ours, device, samples),
        peer="unpickle, pad and copy the first 8 sequences, unchecked", peer_samples=_times(peer, device, samples),
        settings=_settings(arrays, buffers),
    )  # fmt: skip


def _ahead(num_sequences: int, *, device: str, samples: int) -> Case:
    """From the orchestrator's socket, with the batch sent ahead or with the job."""
    arrays, _ = _batch(num_sequences)
    message, buffers = _job(arrays)
    pairs = []
    with _TrainersEnd() as end:
        for _ in range(samples + 2):
            end.stage(StageBatch(job_id="job", tensors=message.tensors, loss=message.loss), buffers)
            named = message.model_copy(update={"request_id": uuid.uuid4().hex, "staged": "job"})
            whole = message.model_copy(update={"request_id": uuid.uuid4().hex})
            pairs.append(
                tuple(
                    seconds(lambda m=m, b=b: _lay_out(end.run(m, b), device), device)
                    for m, b in ((named, ()), (whole, buffers))
                )
            )
    ours, theirs = zip(*pairs[2:], strict=True)
    return Case(
        name=f"arrival/staged/{num_sequences}x2048", metric="sent_to_first_micro_batch_s", unit="s", samples=ours,
        peer="the job carries its batch", peer_samples=theirs, settings=_settings(arrays, buffers),
    )  # fmt: skip


class _TrainersEnd:
    """The trainer's link and staging, on a socket of this process."""

    def __init__(self) -> None:
        from trainer_node.staging import Staging

        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        server_keys(TOKEN).secure(self._router)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._is_checked = threading.Event()
        self._staging = Staging(self._check_staged, share=lambda envelope, stop=False: envelope, is_root=True)
        hello = Hello(role="trainer", node_id="trainer", incarnation="1", run_token=TOKEN)
        endpoint = f"tcp://127.0.0.1:{port}"
        self._link = NodeLink(endpoint=endpoint, hello=hello, aside={"StageBatch": self._staging.receive})

    def __enter__(self) -> _TrainersEnd:
        starting = threading.Thread(target=self._link.start)
        starting.start()
        self._peer = self._router.recv_multipart()[0]
        self._send(Welcome(heartbeat_s=1.0))
        starting.join()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._staging.close()
        self._context.destroy(linger=0)

    def stage(self, message: StageBatch, buffers: Sequence[bytes]) -> None:
        """Until the batch is checked, as it is by the time a running job ends."""
        self._is_checked.clear()
        self._send(message, buffers)
        assert self._is_checked.wait(DEADLINE_S)

    def run(self, message: TrainMerged, buffers: Sequence[bytes]) -> Batch:
        """Send the job; the batch as its handler has it."""
        self._send(message, buffers)
        envelope = self._link.recv(timeout_s=DEADLINE_S)
        assert envelope is not None
        assert isinstance(envelope.message, TrainMerged)
        if message.staged is None:
            return _check(envelope.message, envelope.buffers)
        claimed = self._staging.claim(message.staged, timeout_s=DEADLINE_S)
        assert claimed is not None
        return claimed.result(DEADLINE_S)

    def _check_staged(self, message: StageBatch, buffers: Sequence[bytes]) -> Batch:
        batch = _check(message, buffers)
        self._is_checked.set()
        return batch

    def _send(self, message: AnyMessage, buffers: Sequence[bytes] = ()) -> None:
        self._router.send_multipart([self._peer, *to_wire(encode(message, buffers))])


def _check(message: TrainMerged | StageBatch, buffers: Sequence[bytes]) -> Batch:
    from trainer_node.batch import decode_batch

    assert message.loss is not None
    return decode_batch(specs=message.tensors, buffers=buffers, vocab_size=VOCAB, max_length=LONGEST, loss=message.loss)


def _lay_out(batch: Batch, device: str) -> None:
    from trainer_node.batch import micro_batches

    assert micro_batches(batch, budget=PACK, device=torch.device(device))[0].tokens_L.device.type == device


def _job(arrays: dict[str, np.ndarray]) -> tuple[TrainMerged, list[bytes]]:
    specs = batch_specs(num_sequences=len(arrays["sequence_lengths"]), num_tokens=len(arrays["tokens"]))
    message = TrainMerged(
        request_id="r", deadline_s=60, version=1, checkpoint_dir="v", tensors=specs, loss=LossSpec(name="grpo"), optim=OptimParams(lr=1e-4)
    )  # fmt: skip
    return message, [arrays[s.name].astype(s.dtype).tobytes() for s in specs]


def _settings(arrays: dict[str, np.ndarray], buffers: Sequence[bytes]) -> dict[str, int]:
    return {
        "sequences": len(arrays["sequence_lengths"]),
        "tokens": len(arrays["tokens"]),
        "pack_tokens": PACK,
        "bytes": sum(map(len, buffers)),
    }


def _batch(num_sequences: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(LONGEST // 3, LONGEST + 1, num_sequences)
    total = int(lengths.sum())
    mask = np.ones(total)
    mask[np.cumsum(lengths) - lengths] = 0
    values = rng.standard_normal(total) * mask
    tokens = rng.integers(0, VOCAB, total)
    return {
        "tokens": tokens,
        "sequence_lengths": lengths,
        "loss_mask": mask,
        "advantages": values,
        "sampler_logprobs": values,
    }, lengths


def _pickled(arrays: dict[str, np.ndarray], lengths: np.ndarray) -> bytes:
    names = [n for n in arrays if n != "sequence_lengths"]
    pieces = {n: torch.from_numpy(arrays[n]).float().split(lengths.tolist()) for n in names}
    return pickle.dumps([{n: pieces[n][i].clone() for n in names} for i in range(len(lengths))])


def _times(work: Callable[[], None], device: str, samples: int) -> tuple[float, ...]:
    return tuple(seconds(work, device) for _ in range(samples + 2))[2:]
