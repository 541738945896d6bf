"""64 concurrent streams (16 with --small) while versions are published to their vLLM: gaps between
tokens, requests lost, tokens per second.

    SHAPE/MODE  gap_beyond_step_s   largest gap between two tokens of any stream around a
                                    publication, less the usual time for a token; peer: the same in
                                    the `window_s` before it, without a publication
                largest_gap_s       the gap itself; peer: vLLM's own `/pause?mode=keep` and
                                    `/resume`, nothing in between, on an unmodified server under the
                                    same streams
                tokens_per_s        in the second(s) after all streams resume; peer: the same before
                                    the publication
                requests_lost       ended with an error or short of tokens, in the whole run; 0 is
                                    the only good value
    SHAPE/keep  reprefill_s         what `keep` costs beyond `keep_kv`: each `keep` gap beyond the
                                    pause (the orchestrator's time from pause request to resume),
                                    less the median of the same for `keep_kv`, which keeps the KV
                                    cache
    SHAPE/lora-attn/shadow   gap_beyond_step_s    the same gap where only the attention's tensors
                                                  change and are received next to the live ones;
                                                  peer: in_place, the same publication received
                                                  while generation is stopped
                             pause_s              pause request to resume; peer the same
                             largest_gap_s        as above; peer: in_place
                             tokens_per_s, requests_lost    as above

A publication of the first kind is a `Resync`: all tensors, verified. One of the second kind is a
`Publish` of an attention-only LoRA, verified, in pause mode keep_kv (SPLICE_BENCH_SHADOW_PAUSE
names another): with `keep` the gap is mostly the re-prefill, which is measured above. The trainer
does nothing else meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

from benchmarks import clusters
from benchmarks.harness import Case, inference_python
from benchmarks.stream import Streams, largest_gap_s, largest_gap_within_s, step_s, tokens_per_s
from orchestrator.protocol.messages import (
    InitialSync,
    JobSpec,
    PauseMode,
    PublicationMode,
    Publish,
    Resync,
)
from splice.client.run_file import RunFile
from splice.cluster import Cluster
from splice.cluster.preflight import read_model_config

STOCK = "stock pause and resume"
PAUSES = ("keep", "keep_kv", "wait", "abort")
_BESIDE: tuple[PublicationMode, ...] = ("in_place", "shadow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The streams, and how often and how long things are measured. Lengths in tokens."""

    streams: int
    prompt_tokens: int
    min_tokens: int
    max_tokens: int
    samples: int
    window_s: float


LOADS = {
    "small": Load(
        streams=16, prompt_tokens=64, min_tokens=150, max_tokens=300, samples=3, window_s=1.0
    ),
    "cpu": Load(
        streams=64, prompt_tokens=128, min_tokens=150, max_tokens=300, samples=7, window_s=3.0
    ),
    "cuda": Load(
        streams=64, prompt_tokens=2048, min_tokens=1800, max_tokens=2400, samples=7, window_s=2.0
    ),
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
        """What a stream waited beyond the pause itself: the step it was in, prefill, a
        first step.
        """
        return [gap - pause for gap, pause in zip(self.gaps, self.pauses, strict=True)]


def run(*, device: str, small: bool) -> Iterator[Case]:
    """Shape from SPLICE_BENCH_SHAPES (30b-a3b on cuda, tiny else); what is run from
    SPLICE_BENCH_PAUSE (keep,keep_kv,stock,shadow): the pause modes on one cluster, shadow and its
    peer on another, stock on its own server. SPLICE_BENCH_EAGER=1: vLLM without compiling and
    CUDA graphs.
    """
    load = LOADS["small" if small else device]
    shape = "tiny" if small or device == "cpu" else os.environ.get("SPLICE_BENCH_SHAPES", "30b-a3b")
    servers = os.environ.get("SPLICE_BENCH_PAUSE", "keep,keep_kv,stock,shadow").split(",")
    modes = [cast(PauseMode, name) for name in servers if name in PAUSES]
    settings = {
        "streams": load.streams,
        "prompt_tokens": load.prompt_tokens,
        "min_tokens": load.min_tokens,
        "max_tokens": load.max_tokens,
        "window_s": load.window_s,
        "verification": "on",
        "sent": "all tensors",
        "eager": clusters.is_eager(device),
    }
    with TemporaryDirectory(prefix="splice-bench-") as name:
        folder = Path(name)
        if "shadow" in servers:
            pause_mode = cast(PauseMode, os.environ.get("SPLICE_BENCH_SHADOW_PAUSE", "keep_kv"))
            config = clusters.cluster_config(
                shape,
                folder,
                device=device,
                run="run-shadow",
                lora="lora-attn",
                pause_mode=pause_mode,
                mode=_BESIDE[0],
                max_num_seqs=load.streams,
            )
            beside = _ours(
                config,
                load,
                folder / "model",
                [(pause_mode, mode) for mode in _BESIDE],
                Publish(),
            )
            seen = {mode: beside[pause_mode, mode] for mode in _BESIDE}
            more = {"pause_mode": pause_mode}
            yield from _shadow_cases(
                f"{shape}/lora-attn/shadow", seen["shadow"], seen["in_place"], settings | more
            )
        stock = _stock(folder, shape, device=device, load=load) if "stock" in servers else Seen()
        if not modes:
            return
        config = clusters.cluster_config(
            shape,
            folder,
            device=device,
            run="run-pause",
            pause_mode=modes[0],
            max_num_seqs=load.streams,
        )
        ours = _ours(
            config, load, folder / "model", [(mode, "in_place") for mode in modes], Resync()
        )
    for mode in modes:
        yield from _cases(f"{shape}/{mode}", ours[mode, "in_place"], stock, settings)
    if {"keep", "keep_kv"} <= set(modes):
        keep, keep_kv = (
            ours[cast(PauseMode, mode), "in_place"].beyond_pause for mode in ("keep", "keep_kv")
        )
        samples = tuple(beyond - median(keep_kv) for beyond in keep)
        more = {"beyond_pause_s": {"keep": keep, "keep_kv": keep_kv}}
        yield Case(
            name=f"{shape}/keep",
            metric="reprefill_s",
            unit="s",
            samples=samples,
            settings=settings | more,
        )


def _shadow_cases(name: str, seen: Seen, peer: Seen, settings: dict[str, Any]) -> list[Case]:
    last = seen.results[-1]
    said = {k: last[k] for k in ("mode", "why_in_place", "sent", "bytes_sent", "unverified")}
    settings = (
        settings
        | said
        | {
            "step_s": median(seen.steps),
            "peer_step_s": median(peer.steps),
            "phases": [r["seconds"] for r in seen.results],
            "peer_phases": [r["seconds"] for r in peer.results],
            "quiet_gap_beyond_step_s": [g - median(seen.steps) for g in seen.quiet_gaps],
        }
    )
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
        Case(
            name=name,
            metric="tokens_per_s",
            unit="tokens/s",
            samples=tuple(seen.after),
            settings=settings,
            **before,
        ),
        Case(
            name=name,
            metric="requests_lost",
            unit="requests",
            samples=(float(len(seen.lost)),),
            settings=lost,
        ),
    ]


def _cases(name: str, seen: Seen, stock: Seen, settings: dict[str, Any]) -> list[Case]:
    step = median(seen.steps)
    settings = settings | {"step_s": step, "pause_s": seen.pauses}
    counted = {"requests": seen.requests, "reasons": seen.lost[:10]}

    def seconds(
        metric: str, samples: list[float], peer: str | None, peer_samples: list[float]
    ) -> Case:
        return Case(
            name=name,
            metric=metric,
            unit="s",
            samples=tuple(samples),
            peer=peer,
            peer_samples=tuple(peer_samples),
            settings=settings,
        )

    return [
        seconds(
            "gap_beyond_step_s",
            [g - step for g in seen.gaps],
            "no publication",
            [g - step for g in seen.quiet_gaps],
        ),
        seconds("largest_gap_s", seen.gaps, STOCK if stock.gaps else None, stock.gaps),
        Case(
            name=name,
            metric="tokens_per_s",
            unit="tokens/s",
            samples=tuple(seen.after),
            peer="before the publication",
            peer_samples=tuple(seen.before),
            settings=settings,
        ),
        Case(
            name=name,
            metric="requests_lost",
            unit="requests",
            samples=(float(len(seen.lost)),),
            settings=settings | counted,
        ),
    ]


def _ours(
    config: RunFile,
    load: Load,
    model: Path,
    ways: Sequence[tuple[PauseMode, PublicationMode]],
    job: JobSpec,
) -> dict[tuple[PauseMode, PublicationMode], Seen]:
    """One cluster, published to in each of the ways; the first one is the config's."""
    found = {}
    with Cluster(config) as cluster:
        cluster.client.run(InitialSync())
        for way in ways:
            if way != ways[0]:
                clusters.restart_orchestrator(cluster, pause_mode=way[0], mode=way[1])
            cluster.client.run(job)  # the first one in a layout pays for making its tables
            results: list[dict[str, Any]] = []

            def publish(results: list[dict[str, Any]] = results) -> float:
                results.append(cluster.client.run(job).model_dump())
                return float(results[-1]["seconds"]["pause"])

            found[way] = _measure(cluster.base_urls[0], clusters.NAME, model, load, publish)
            found[way].results = results
            print(
                f"{'/'.join(way)}: largest gaps {[round(gap, 4) for gap in found[way].gaps]} s",
                flush=True,
            )
    return found


def _stock(folder: Path, shape: str, *, device: str, load: Load) -> Seen:
    from benchmarks.stock import StockServer

    _, gpu = clusters.gpus()
    model = clusters.model_in(folder, shape)
    with StockServer(
        python=inference_python(),
        model=model,
        gpu=gpu,
        log=folder / "stock.log",
        device=device,
        max_model_len=8192 if device == "cuda" else 512,
        more=("--max-num-seqs", str(load.streams)),
        eager=clusters.is_eager(device),
    ) as server:

        def pause() -> float:
            began = time.monotonic()
            server.post("/pause?mode=keep")
            server.post("/resume")
            return time.monotonic() - began

        return _measure(server.base_url, "stock", model, load, pause)


def _measure(base_url: str, model: str, model_dir: Path, load: Load, interrupt: Any) -> Seen:
    """Interrupt the running streams `samples` times."""
    seen = Seen()
    vocab_size = int(read_model_config(model_dir)["vocab_size"])
    streams = Streams(
        base_url=base_url,
        model=model,
        count=load.streams,
        prompt_tokens=load.prompt_tokens,
        min_tokens=load.min_tokens,
        max_tokens=load.max_tokens,
        vocab_size=vocab_size,
    )
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
        seen.after.append(
            tokens_per_s(streams.requests, start_s=again, end_s=again + load.window_s)
        )
    return seen
