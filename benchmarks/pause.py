"""64 concurrent streams (16 with --small) while versions are published to their vLLM: gaps between tokens, requests lost, tokens per second.

    SHAPE/MODE  gap_beyond_step_s   largest gap between two tokens of any stream around a publication, less the usual time for a token; peer: the
                                    same in the `window_s` before it, without a publication
                largest_gap_s       the gap itself; peer: vLLM's own `/pause?mode=keep` and `/resume`, nothing in between, on an unmodified
                                    server under the same streams
                tokens_per_s        in the second(s) after all streams go on; peer: the same before the publication
                requests_lost       ended with an error or short of tokens, in the whole run; 0 is the only good value
    SHAPE/keep  reprefill_s         what `keep` costs beyond `keep_kv`: each `keep` gap beyond the pause (the orchestrator's time from pause
                                    request to resume), less the median of the same for `keep_kv`, which keeps the KV cache
    SHAPE/lora-attn/shadow   gap_beyond_step_s    the same gap where only the attention's tensors change and are received beside the live ones;
                                                  peer: in_place, the same publication received while generation stands still
                             pause_s              pause request to resume; peer the same
                             largest_gap_s, tokens_per_s, requests_lost    as above, peer of the first: in_place

A publication of the first kind is a `Resync`: all tensors, verified. One of the second kind is a `PublishJob` of an attention-only LoRA, verified, in
pause mode keep_kv (SPLICE_BENCH_SHADOW_PAUSE names another): with `keep` the gap is mostly the re-prefill, which is measured above. The
trainer does nothing else meanwhile.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

from benchmarks import clusters
from benchmarks.harness import Case, inference_python
from benchmarks.stream import Streams, largest_gap_s, largest_gap_within_s, step_s, tokens_per_s
from orchestrator.cluster import Cluster
from orchestrator.preflight import read_model_config
from orchestrator.protocol.messages import InitialSyncJob, JobSpec, PauseMode, PublicationMode, PublishJob, ResyncJob

STOCK = "stock pause and resume"
PAUSES = ("keep", "keep_kv", "wait", "abort")
_BESIDE: tuple[PublicationMode, ...] = ("in_place", "shadow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The streams, and how often and how long things are measured. Lengths in tokens."""

    streams: int
    prompt_tokens: int
    max_tokens: int
    samples: int
    window_s: float


LOADS = {
    "small": Load(streams=16, prompt_tokens=64, max_tokens=300, samples=3, window_s=1.0),
    "cpu": Load(streams=64, prompt_tokens=128, max_tokens=300, samples=7, window_s=3.0),
    "cuda": Load(streams=64, prompt_tokens=2048, max_tokens=2000, samples=7, window_s=2.0),
}


@dataclass(slots=True)
class Seen:
    """Samples of one server. Seconds; `pauses`: what the other side says that it took."""

    gaps: list[float] = field(default_factory=list)
    quiet_gaps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    requests: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    """What the publications reported."""

    @property
    def beyond_pause(self) -> list[float]:
        """What a stream waited beyond the pause itself: the step it was in, prefill, a first step."""
        return [gap - pause for gap, pause in zip(self.gaps, self.pauses, strict=True)]


def run(*, device: str, small: bool) -> list[Case]:
    """Shape from SPLICE_BENCH_SHAPES (30b-a3b on cuda, tiny else); what is run from SPLICE_BENCH_PAUSE
    (keep,keep_kv,stock,shadow), each on a server of its own, shadow on two."""
    load = LOADS["small" if small else device]
    shape = "tiny" if small or device == "cpu" else os.environ.get("SPLICE_BENCH_SHAPES", "30b-a3b")
    servers = os.environ.get("SPLICE_BENCH_PAUSE", "keep,keep_kv,stock,shadow").split(",")
    modes = [name for name in servers if name in PAUSES]
    shadow_pause = os.environ.get("SPLICE_BENCH_SHADOW_PAUSE", "keep_kv")
    beside: dict[PublicationMode, Seen] = {}
    with TemporaryDirectory(prefix="splice-bench-") as folder:
        ours = {
            mode: _ours(shape, Path(folder), device=device, load=load, pause_mode=cast(PauseMode, mode)) for mode in modes
        }  # fmt: skip
        if "shadow" in servers:
            for mode in _BESIDE:
                beside[mode] = _ours(
                    shape, Path(folder), device=device, load=load, pause_mode=cast(PauseMode, shadow_pause), lora="lora-attn", mode=mode,
                    job=PublishJob(),
                )  # fmt: skip
        stock = _stock(Path(folder), device=device, load=load) if "stock" in servers else Seen()
    settings = {
        "streams": load.streams, "prompt_tokens": load.prompt_tokens, "max_tokens": load.max_tokens, "window_s": load.window_s,
        "verification": "on", "sent": "all tensors",
    }  # fmt: skip
    cases = [case for mode in modes for case in _cases(f"{shape}/{mode}", ours[mode], stock, settings)]
    if beside:
        name = f"{shape}/lora-attn/shadow"
        cases += _shadow_cases(name, beside["shadow"], beside["in_place"], settings | {"pause_mode": shadow_pause})
    if {"keep", "keep_kv"} <= set(modes):
        keep, keep_kv = ours["keep"].beyond_pause, ours["keep_kv"].beyond_pause
        samples = tuple(beyond - median(keep_kv) for beyond in keep)
        more = {"beyond_pause_s": {"keep": keep, "keep_kv": keep_kv}}
        cases.append(Case(name=f"{shape}/keep", metric="reprefill_s", unit="s", samples=samples, settings=settings | more))
    return cases


def _shadow_cases(name: str, seen: Seen, peer: Seen, settings: dict[str, Any]) -> list[Case]:
    last = seen.results[-1]
    said = {k: last[k] for k in ("mode", "why_in_place", "sent", "bytes_sent", "unverified")}
    settings = settings | said | {
        "step_s": median(seen.steps), "peer_step_s": median(peer.steps), "phases": [r["seconds"] for r in seen.results],
        "peer_phases": [r["seconds"] for r in peer.results], "quiet_gap_beyond_step_s": [g - median(seen.steps) for g in seen.quiet_gaps],
    }  # fmt: skip
    pairs = {
        "gap_beyond_step_s": ([g - median(s.steps) for g in s.gaps] for s in (seen, peer)),
        "largest_gap_s": (s.gaps for s in (seen, peer)),
        "pause_s": (s.pauses for s in (seen, peer)),
    }
    cases = []
    for metric, (ours, theirs) in pairs.items():
        samples = {"samples": tuple(ours), "peer": "in_place", "peer_samples": tuple(theirs)}
        cases.append(Case(name=name, metric=metric, unit="s", settings=settings, **samples))
    before = {"peer": "before the publication", "peer_samples": tuple(seen.before)}
    lost = settings | {"requests": seen.requests, "reasons": seen.lost[:10]}
    return [
        *cases,
        Case(name=name, metric="tokens_per_s", unit="tokens/s", samples=tuple(seen.after), settings=settings, **before),
        Case(name=name, metric="requests_lost", unit="requests", samples=(float(len(seen.lost)),), settings=lost),
    ]


def _cases(name: str, seen: Seen, stock: Seen, settings: dict[str, Any]) -> list[Case]:
    step = median(seen.steps)
    settings = settings | {"step_s": step, "pause_s": seen.pauses}
    counted = {"requests": seen.requests, "reasons": seen.lost[:10]}

    def seconds(metric: str, samples: list[float], peer: str | None, peer_samples: list[float]) -> Case:
        return Case(
            name=name, metric=metric, unit="s", samples=tuple(samples), peer=peer, peer_samples=tuple(peer_samples), settings=settings
        )  # fmt: skip

    return [
        seconds("gap_beyond_step_s", [g - step for g in seen.gaps], "no publication", [g - step for g in seen.quiet_gaps]),
        seconds("largest_gap_s", seen.gaps, STOCK if stock.gaps else None, stock.gaps),
        Case(
            name=name, metric="tokens_per_s", unit="tokens/s", samples=tuple(seen.after), peer="before the publication",
            peer_samples=tuple(seen.before), settings=settings,
        ),
        Case(name=name, metric="requests_lost", unit="requests", samples=(float(len(seen.lost)),), settings=settings | counted),
    ]  # fmt: skip


def _ours(
    shape: str, folder: Path, *, device: str, load: Load, pause_mode: PauseMode, lora: str = "lora-all",
    mode: PublicationMode = "in_place", job: JobSpec | None = None,
) -> Seen:  # fmt: skip
    config = clusters.cluster_config(
        shape, folder, device=device, run=f"run-{lora}-{mode}-{pause_mode}", lora=lora, pause_mode=pause_mode, mode=mode,
        max_num_seqs=load.streams,
    )  # fmt: skip
    job = job or ResyncJob()
    results: list[dict[str, Any]] = []
    with Cluster(config) as cluster:
        cluster.client.run(InitialSyncJob())
        cluster.client.run(job)  # the first one in a layout pays for making its tables

        def publish() -> float:
            results.append(cluster.client.run(job))
            return float(results[-1]["seconds"]["pause"])

        seen = _measure(cluster.base_urls[0], clusters.NAME, folder / "model", load, publish)
    seen.results = results
    return seen


def _stock(folder: Path, *, device: str, load: Load) -> Seen:
    from benchmarks.stock import StockServer

    _, gpu = clusters.gpus()
    with StockServer(
        python=inference_python(), model=folder / "model", gpu=gpu, log=folder / "stock.log", device=device,
        max_model_len=8192 if device == "cuda" else 512, more=("--max-num-seqs", str(load.streams)),
    ) as server:  # fmt: skip

        def pause() -> float:
            began = time.monotonic()
            server.post("/pause?mode=keep")
            server.post("/resume")
            return time.monotonic() - began

        return _measure(server.base_url, "stock", folder / "model", load, pause)


def _measure(base_url: str, model: str, model_dir: Path, load: Load, interrupt: Any) -> Seen:
    """Interrupt the running streams `samples` times."""
    seen = Seen()
    vocab_size = int(read_model_config(model_dir)["vocab_size"])
    streams = Streams(
        base_url=base_url, model=model, count=load.streams, prompt_tokens=load.prompt_tokens, max_tokens=load.max_tokens,
        vocab_size=vocab_size,
    )  # fmt: skip
    moments = []
    with streams:
        for _ in range(load.samples):
            time.sleep(load.window_s)
            began = time.monotonic()
            seen.pauses.append(interrupt())
            ended = time.monotonic()
            streams.wait_all_after(ended)
            again = time.monotonic()
            time.sleep(load.window_s)
            moments.append((began, ended, again))
    seen.lost, seen.requests = streams.lost(), len(streams.requests)
    for began, ended, again in moments:
        before = {"start_s": began - load.window_s, "end_s": began}
        seen.gaps.append(largest_gap_s(streams.requests, start_s=began, end_s=ended))
        seen.quiet_gaps.append(largest_gap_within_s(streams.requests, **before))
        seen.steps.append(step_s(streams.requests, **before))
        seen.before.append(tokens_per_s(streams.requests, **before))
        seen.after.append(tokens_per_s(streams.requests, start_s=again, end_s=again + load.window_s))
    return seen
