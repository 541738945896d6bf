"""A training job's arrival: seconds from the last byte at the trainer to the moment when its first
micro-batch is on the device.

512 sequences of 1,024 to 3,072 tokens (2,048 in the mean), 16,384 tokens in a pack. Ours: frames
decoded, sent on to nobody (one rank), the batch checked, packed, the first pack laid out and
copied. The peer unpickles the same sequences as a list of dictionaries of tensors, as trainers that
take Python objects do, pads 8 of them to one length and copies those; it checks nothing. What a
running trainer measures itself is `to_first_forward` in a job's `seconds`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.harness import Case
from benchmarks.timing import seconds
from orchestrator.protocol.frames import decode, encode
from orchestrator.protocol.messages import LossSpec, OptimParams, RunJob, TrainMerged, batch_specs

if TYPE_CHECKING:
    from trainer_node.training.batch import Batch

VOCAB, LONGEST, PACK, MICRO_BATCH = 151_936, 3_072, 16_384, 8


def run(*, device: str, small: bool) -> list[Case]:
    """One process."""
    samples = 3 if small else int(os.environ.get("SPLICE_BENCH_SAMPLES", "10"))
    num_sequences = 16 if small else 512
    arrays, lengths = _batch(num_sequences)
    message, buffers = _job(arrays)
    frames = [bytes(f) for f in encode(_request(message), buffers)]
    pickled, place = _pickled(arrays, lengths), torch.device(device)

    def ours() -> None:
        _lay_out(_check(message, decode(frames).buffers), device)

    def peer() -> None:
        rows = pickle.loads(pickled)[:MICRO_BATCH]
        for name in rows[0]:
            pad_sequence([r[name] for r in rows], batch_first=True).to(place)

    case = Case(
        name=f"arrival/{num_sequences}x2048",
        metric="to_first_micro_batch_s",
        unit="s",
        samples=_times(ours, device, samples),
        peer="unpickle, pad and copy the first 8 sequences, unchecked",
        peer_samples=_times(peer, device, samples),
        settings=_settings(arrays, buffers),
    )
    return [case]


def _check(message: TrainMerged, buffers: Sequence[bytes]) -> Batch:
    from trainer_node.training.batch import decode_batch

    return decode_batch(
        specs=message.tensors,
        buffers=buffers,
        vocab_size=VOCAB,
        max_length=LONGEST,
        loss=message.loss,
    )


def _lay_out(batch: Batch, device: str) -> None:
    from trainer_node.training.packing import micro_batches

    assert (
        micro_batches(batch, budget=PACK, device=torch.device(device))[0].tokens_L.device.type
        == device
    )


def _request(job: TrainMerged) -> RunJob:
    return RunJob(request_id="r", deadline_s=60, job=job, version=1, checkpoint_dir="v")


def _job(arrays: dict[str, np.ndarray]) -> tuple[TrainMerged, list[bytes]]:
    specs = batch_specs(
        num_sequences=len(arrays["sequence_lengths"]), num_tokens=len(arrays["tokens"])
    )
    message = TrainMerged(
        tensors=specs,
        loss=LossSpec(name="grpo"),
        optim=OptimParams(lr=1e-4),
    )
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
