"""Publications of a whole model, splice against vLLM's unmodified `nccl` engine, both under a
running stream, in one run.

    SHAPE/lora-all/1to1                `Resync`: every tensor is sent
    SHAPE/lora-attn/1to1               `Publish`: what training changed, as far as the
                                       orchestrator leaves the rest out (`settings["sent"]` and
                                       `bytes_sent` say so)
    SHAPE/lora-attn/1to1-keep-kv       the same in pause mode keep_kv: the running request is not
                                       prefilled again
    SHAPE/lora-attn/1to1-all-tensors   `Resync`
    SHAPE/lora-all/ep2-tp2             `Resync` from two expert parallel ranks to two tensor
                                       parallel workers; see `clusters.Topology`

The peer sends the same tensors: all of them, or where ours sent the changed ones those that have an
adapter. It is measured once for both LoRAs of a shape. `pause_to_resume_s` is the largest gap
between tokens of the running stream: from the last token before the pause to the first one after
the resume, so re-prefill and verification are inside. Ours exports, merges and verifies; the peer
only sends random bytes and checks nothing. Memory is watched during the first two publications,
which are not timed. Last, the trainer makes a step and publishes it (`first_step_s`), and more
steps under the stream: `step_pause_to_resume_s` is the gap that a step's publication makes. Of
several replicas, one vLLM is killed while it receives: `death_pause_to_resume_s` is the gap of the
first one's stream, and `whole_again_s` the time until all serve the version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks import clusters, memory, turns
from benchmarks.harness import Case, inference_python
from benchmarks.stream import TokenStream, warm_prefill
from orchestrator.processes.child import descendants, kill_family
from orchestrator.protocol.messages import (
    InitialSync,
    JobSpec,
    LossSpec,
    Manifest,
    OptimParams,
    Publish,
    Resync,
    TensorSpec,
    TrainMergedResult,
)
from splice.cluster import Cluster

WARM = 4
LONGEST = 256
"""Tokens of the running stream before another begins: what is prefilled again after a pause
(`pause` measures that for long ones). Lengths up to it are warm on both servers.
"""
SEQS = 256
"""Both servers' `--max-num-seqs`. vLLM captures CUDA graphs for up to twice as many tokens, 512 at
most; with fewer sequences what is prefilled again would run without them.
"""
PLANS = ("30b-a3b/lora-all", "30b-a3b/lora-attn", "8b/lora-all")


@dataclass(slots=True)
class Seen:
    """One way of publishing: gaps of the stream, and each publication's report."""

    gaps: list[float] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def phases(self) -> list[dict[str, float]]:
        """Seconds of each publication's phases."""
        return [{k: round(v, 5) for k, v in result["seconds"].items()} for result in self.results]


Peers = dict[tuple[tuple[str, ...], bool], Seen]
"""Linears that were sent, and whether the KV cache was kept -> the stock engine's."""


def run(*, device: str, small: bool) -> Iterator[Case]:
    """SHAPE/LORA from SPLICE_BENCH_SYNC (comma-separated; default
    30b-a3b/lora-all,30b-a3b/lora-attn,8b/lora-all, or tiny's two with --small and on a cpu);
    samples from SPLICE_BENCH_SAMPLES; trainer and inference GPU from SPLICE_BENCH_GPUS (0,1);
    SPLICE_BENCH_EAGER=1: both vLLMs without compiling and CUDA graphs;
    SPLICE_BENCH_TOPOLOGIES: 1to1 (the default), or more names of `clusters.Topology`; beyond 1to1
    without the peer, on GPUs 0, 1 and so on: first the trainer's.
    SPLICE_BENCH_CHAIN=1: replicas pass the bytes on (`publication.chain`).
    SPLICE_BENCH_ROUNDING: stochastic (the default) or nearest.
    SPLICE_BENCH_QUANTIZATION: `--quantization` of our vLLM, such as fp8, or blocks: it serves a
    checkpoint in block-scaled FP8. The peer's stays bf16. SPLICE_BENCH_STOCK=0: no peer.
    `benchmarks.turns` says how several benchmarks share a host.
    """
    usual = (
        ("tiny/lora-attn",)
        if small
        else ("tiny/lora-all", "tiny/lora-attn")
        if device == "cpu"
        else PLANS
    )
    plans = usual if small else os.environ.get("SPLICE_BENCH_SYNC", ",".join(usual)).split(",")
    samples = int(os.environ.get("SPLICE_BENCH_SAMPLES", "3" if small else "7"))
    for shape in dict.fromkeys(plan.partition("/")[0] for plan in plans):
        with TemporaryDirectory(prefix="splice-bench-") as folder:
            loras = [plan.partition("/")[2] for plan in plans if plan.startswith(f"{shape}/")]
            for name in os.environ.get("SPLICE_BENCH_TOPOLOGIES", "1to1").split(","):
                topology = clusters.Topology(name)
                yield from _shape(
                    shape, loras, Path(folder), topology, device=device, samples=samples
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of publishing: the end of its case's name, the job, and what the peer
    does next to it.
    """

    end: str
    job: JobSpec
    linears: tuple[str, ...] = ()
    """Whose weights such a job ought to bring; (): all tensors."""
    keep_kv: bool = False


def _ways(lora: str) -> list[Way]:
    # With an adapter on every linear the changed tensors are nearly all, and each `Publish`
    # would first save gigabytes of adapters.
    if lora == "lora-all":
        return [Way(end="", job=Resync())]
    changed = clusters.TARGETS[lora]
    return [
        Way(end="", job=Publish(), linears=changed),
        Way(end="-all-tensors", job=Resync()),
        Way(end="-keep-kv", job=Publish(), linears=changed, keep_kv=True),
    ]


def _shape(
    shape: str,
    loras: Sequence[str],
    folder: Path,
    topology: clusters.Topology,
    *,
    device: str,
    samples: int,
) -> Iterator[Case]:
    """All of the peer's on one server, then ours for each kind of LoRA in its own cluster."""
    wanted = dict.fromkeys((way.linears, way.keep_kv) for lora in loras for way in _ways(lora))
    clusters.model_in(folder, shape)
    with ThreadPoolExecutor(1) as thread:
        compared = tuple(wanted) if topology.name == "1to1" else ()
        peer = thread.submit(_peer, device, shape, folder, samples, compared)
        if not turns.is_shared():  # the two servers do not fit on a GPU together
            peer.result()
        for lora in loras:
            yield from _ours(
                shape, lora, folder, topology, device=device, samples=samples, peer=peer
            )


def _peer(
    device: str,
    shape: str,
    folder: Path,
    samples: int,
    wanted: Sequence[tuple[tuple[str, ...], bool]],
) -> Peers:
    """What the stock engine did; nothing on a CPU, without SPLICE_BENCH_STOCK, or if it failed."""
    if device != "cuda" or not wanted or os.environ.get("SPLICE_BENCH_STOCK", "1") == "0":
        return {}
    try:
        return _stock(shape, folder, samples=samples, wanted=wanted)
    except (RuntimeError, TimeoutError, httpx.HTTPError) as error:
        print(f"stock {shape} failed: {error}", flush=True)
        return {}


def _cases(
    name: str, lora: str, seen: Seen, peer: Seen | None, more: Mapping[str, Any]
) -> list[Case]:
    last = seen.results[-1]
    settings = {
        "bytes_sent": last["bytes_sent"],
        "num_tensors": last["num_tensors"],
        "sent": last.get("sent", "full"),
        "lora_rank": clusters.RANK,
        "lora_targets": clusters.TARGETS[lora],
        "verification": "on",
        "quantization": clusters.quantization() or "none",
        "rounding": clusters.rounding(),
        "unverified": last["unverified"],
        "phases": seen.phases,
        "peer_phases": peer.phases if peer else [],
        **more,
    }
    return [
        Case(
            name=name,
            metric="pause_to_resume_s",
            unit="s",
            samples=tuple(seen.gaps),
            peer="stock nccl" if peer else None,
            peer_samples=tuple(peer.gaps) if peer else (),
            settings=settings,
        ),
        Case(name=name, metric="pause_s", unit="s", samples=tuple(p["pause"] for p in seen.phases)),
        Case(
            name=name, metric="verify_s", unit="s", samples=tuple(p["verify"] for p in seen.phases)
        ),
    ]


def _ours(
    shape: str,
    lora: str,
    folder: Path,
    topology: clusters.Topology,
    *,
    device: str,
    samples: int,
    peer: Future[Peers],
) -> Iterator[Case]:
    """One cluster's cases, each as soon as it and the peer's are measured."""
    config = clusters.cluster_config(
        shape,
        folder,
        device=device,
        run=f"run-{lora}-{topology.name}",
        lora=lora,
        max_num_seqs=SEQS,
        topology=topology,
    )
    name = f"{shape}/{lora}/{topology.name}"

    def said(log: str, after: str) -> list[str]:
        lines = (config.run_dir / "logs" / log).read_text().splitlines()
        return [line.partition(after)[2] for line in lines if after in line]

    with turns.started(Cluster(config)) as cluster:
        readers = clusters.memory_readers(cluster, device, topology)
        with turns.alone(), memory.watched(readers, poll_s=0.02) as peaks:
            cluster.client.run(InitialSync())
            cluster.client.run(Resync())  # the first one in a layout pays for making its tables
        for side, peak in peaks.items():
            yield Case(
                name=name,
                metric=f"{side}_memory_bytes",
                unit="B",
                samples=(float(peak.beyond),),
                settings={
                    "measured": clusters.MEMORY_SETTINGS[device],
                    "before_bytes": peak.before,
                    "trainer_said": said("trainer.log", "GPU bytes: ")[:3],
                },
            )
        url = cluster.base_urls[0]
        warm_prefill(url, clusters.NAME, longest=LONGEST)
        for way in _ways(lora):
            if way.keep_kv:
                clusters.restart_orchestrator(
                    cluster, pause_mode="keep_kv", mode=config.publication.mode
                )
            with turns.alone():
                cluster.client.run(way.job)
                with TokenStream(base_url=url, model=clusters.NAME, max_tokens=LONGEST) as stream:
                    seen = _sampled(stream, samples, partial(_publish, cluster, way.job))
            print(
                f"{name}{way.end}: pause to resume {[round(gap, 4) for gap in seen.gaps]} s",
                flush=True,
            )
            sent = clusters.TARGETS[lora] if seen.results[-1].get("sent") == "changed" else ()
            more = {
                "layout": next(iter(said("orchestrator.log", "layout: ")), ""),
                "eager": clusters.is_eager(device),
                "stream_tokens": LONGEST,
                "max_num_seqs": SEQS,
                "pause_mode": "keep_kv" if way.keep_kv else "keep",
                # Kernels that vLLM compiled when it first met a length: what a gap of a second is.
                "compiled_while_serving": [
                    line[:200] for line in said("inference-0.vllm.log", "JIT compilation")
                ][:50],
            }
            stock = peer.result().get((sent, way.keep_kv))
            yield from _cases(f"{name}{way.end}", lora, seen, stock, more)
        yield from _trained(cluster, name, samples)
        if topology.served[0] > 1:
            yield from _death(cluster, name)


def _trained(cluster: Cluster, name: str, samples: int) -> Iterator[Case]:
    """Steps on random tokens, and the publications of what they made: not the speed of a step."""
    is_tiny = clusters.SHAPES[name.partition("/")[0]][1] == "tiny"
    batch = clusters.random_batch(4, 64) if is_tiny else clusters.random_batch(16, 512)
    optim = OptimParams(lr=1e-4)

    def step() -> TrainMergedResult:
        return cluster.client.train_merged(batch, LossSpec(name="cross_entropy"), optim)

    with turns.alone():
        began = time.monotonic()
        result = step()
        ended = time.monotonic()
        step()
        with TokenStream(
            base_url=cluster.base_urls[0], model=clusters.NAME, max_tokens=LONGEST
        ) as stream:
            seen = _sampled(stream, min(samples, 5), lambda: step().model_dump(), warm=1)
    print(f"{name}: in a step {[round(gap, 4) for gap in seen.gaps]} s", flush=True)
    settings = {
        "alias": result.alias,
        "bytes_sent": result.bytes_sent,
        "seconds": result.seconds,
        "unverified": result.unverified,
        "metrics": result.metrics,
        "warnings": result.warnings,
    }
    yield Case(
        name=name, metric="first_step_s", unit="s", samples=(ended - began,), settings=settings
    )
    yield Case(
        name=name,
        metric="step_pause_to_resume_s",
        unit="s",
        samples=tuple(seen.gaps),
        settings={"phases": seen.phases},
    )


def _death(cluster: Cluster, name: str) -> Iterator[Case]:
    """The last replica's vLLM is killed while a `Resync` is on the wire."""
    node = f"inference-{len(cluster.base_urls) - 1}"
    pid = cluster.launcher.nodes[node].pid
    assert pid is not None
    server = next(p for p in descendants(pid) if "inference_node.server" in p.cmdline())
    with (
        turns.alone(),
        TokenStream(
            base_url=cluster.base_urls[0], model=clusters.NAME, max_tokens=LONGEST
        ) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        usual = cluster.client.run(Resync()).seconds
        stream.wait_for_token_after(time.monotonic())
        began = time.monotonic()
        job = pool.submit(_publish, cluster, Resync())
        time.sleep(max(usual["total"] - usual["verify"] - usual["send"] / 2, 0.0))
        killed = time.monotonic()
        kill_family(server.pid)
        result = job.result()
        ended = time.monotonic()
        stream.wait_for_token_after(ended)
        gap = stream.gap_s(start_s=began, end_s=ended)
    while not _all_serve(cluster, f"{clusters.NAME}@{result['version']}"):
        if time.monotonic() > killed + 600:
            raise TimeoutError(f"{name}: {node} does not serve again after 600 s")
        time.sleep(0.1)
    settings = {n: result[n] for n in ("seconds", "replicas", "left_out", "unverified")}
    settings |= {"killed_after_s": killed - began, "answered_after_s": ended - began}
    whole = time.monotonic() - killed
    print(f"{name}: {gap:.3f} s with a death, whole again after {whole:.1f} s", flush=True)
    yield Case(
        name=name, metric="death_pause_to_resume_s", unit="s", samples=(gap,), settings=settings
    )
    yield Case(name=name, metric="whole_again_s", unit="s", samples=(whole,))


def _all_serve(cluster: Cluster, alias: str) -> bool:
    nodes = [n for n in cluster.client.status(timeout_s=60).nodes if n.role == "inference"]
    if any(n.state != "ready" for n in nodes):
        return False
    try:
        answers = [
            httpx.get(f"{n.detail['base_url']}/v1/models", timeout=10.0, trust_env=False)
            for n in nodes
        ]
    except httpx.TransportError:
        return False
    return all(a.is_success and a.json()["data"][0]["id"] == alias for a in answers)


def _stock(
    shape: str, folder: Path, *, samples: int, wanted: Sequence[tuple[tuple[str, ...], bool]]
) -> Peers:
    """The peer, sending the weights of these linears ((): all tensors), and whether it keeps the KV
    cache.
    """
    from benchmarks.stock import StockSender, StockServer
    from trainer_node.tools.make_checkpoint import real_shapes

    shapes = real_shapes(clusters.SHAPES[shape][1])
    everything = tuple(TensorSpec(name=n, dtype="bfloat16", shape=s) for n, s in shapes.items())
    model = clusters.model_in(folder, shape)
    trainer_gpu, inference_gpu = clusters.gpus()
    seen: Peers = {}
    stock = StockServer(
        python=inference_python(),
        model=model,
        gpu=inference_gpu,
        log=folder / "stock.log",
        more=("--max-num-seqs", str(SEQS)),
        eager=clusters.is_eager("cuda"),
        kv_cache_bytes=clusters.kv_cache_bytes(),
    )
    with turns.started(stock) as server, turns.alone():
        warm_prefill(server.base_url, "stock", longest=LONGEST)
        sender = StockSender(server, Manifest(tensors=everything), device=f"cuda:{trainer_gpu}")
        try:
            for linears, keep_kv in wanted:
                changed = tuple(t for t in everything if t.name.split(".")[-2] in linears)
                sender.use(Manifest(tensors=changed or everything))
                publish = partial(sender.publish, keep_kv=keep_kv)
                publish()
                with TokenStream(
                    base_url=server.base_url, model="stock", max_tokens=LONGEST
                ) as stream:
                    found = _sampled(stream, samples, partial(_peer_publication, publish))
                seen[linears, keep_kv] = found
                what = f"{linears or 'all tensors'}{', KV cache kept' if keep_kv else ''}"
                print(
                    f"stock {shape} {what}: {[round(gap, 4) for gap in found.gaps]} s", flush=True
                )
        finally:
            sender.close()
    return seen


def _publish(cluster: Cluster, job: JobSpec) -> dict[str, Any]:
    return cluster.client.run(job).model_dump()


def _peer_publication(publish: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """The peer's publication, reported as a job's result."""
    return {"seconds": publish()}


def _sampled(stream: TokenStream, samples: int, publish: Any, *, warm: int = WARM) -> Seen:
    """Publish `samples` times under the stream, after `warm` times that do not count: what a server
    compiles for a prefill of a new length is not what is measured.
    """
    seen = Seen()
    for _ in range(warm):
        time.sleep(0.5)
        publish()
        stream.wait_for_token_after(time.monotonic())
    for _ in range(samples):
        time.sleep(0.5)
        began = time.monotonic()
        seen.results.append(publish())
        ended = time.monotonic()
        stream.wait_for_token_after(ended)
        seen.gaps.append(stream.gap_s(start_s=began, end_s=ended))
    if stream.errors:
        raise RuntimeError(f"the stream broke: {stream.errors}")
    return seen
