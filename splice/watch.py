"""`splice watch`: one frame with the state of a run, from its status and its journal.

The journal is read through its own connection that cannot write.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgpack
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from orchestrator.protocol.frames import decode
from orchestrator.protocol.messages import Completed
from splice.cluster import up
from splice.rl.evaluations import REWARD

PUBLICATIONS = 5
"""Number of publications in a frame."""
_JOBS = 50
"""Number of finished jobs that are searched for them."""
GIB = 2**30


def frame(run_dir: Path) -> dict[str, Any]:
    """Return `up.status`, the running job, the last publications and the last training's metrics.

    Raises:
        NodeLost: the orchestrator does not answer although it should run.
    """
    return up.status(run_dir) | {"at": time.time()} | _journaled(run_dir / "journal.sqlite")


def _journaled(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"job": None, "publications": [], "training": {}}
    if not path.exists():
        return found
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as db:
        first = db.execute(
            "SELECT kind, submitted FROM jobs WHERE outcome IS NULL ORDER BY rowid LIMIT 1"
        ).fetchone()
        ended = db.execute(
            "SELECT kind, ended, outcome FROM jobs WHERE state = 'completed' AND kind != 'Forward' "
            "ORDER BY ended DESC LIMIT ?",
            (_JOBS,),
        ).fetchall()
    if first is not None:
        found["job"] = {"kind": first[0], "submitted": first[1]}
    for kind, at, outcome in ended:
        result = _result(outcome)
        if "bytes_sent" in result and len(found["publications"]) < PUBLICATIONS:
            found["publications"].append({"kind": kind, "at": at, **_publication(result)})
        if result.get("metrics") and not found["training"]:
            found["training"] = result["metrics"]
    return found


def _result(outcome: bytes) -> dict[str, Any]:
    message = decode(msgpack.unpackb(outcome)).message
    return message.result if isinstance(message, Completed) else {}


def _publication(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": result["version"],
        "mode": result["mode"],
        "bytes_sent": result["bytes_sent"],
        "pause_s": result["seconds"]["pause"],
        "num_verified": result["num_verified"],
        "num_tensors": result["num_tensors"],
    }


def render(found: dict[str, Any]) -> RenderableType:
    """Return a frame, or `up.status`, as text and tables for a terminal."""
    phase = f"{found.get('phase', 'no background process here')} {found.get('text', '')}".rstrip()
    lines = [f"{found['run_dir']}: {phase}"]
    if "warning" in found:
        lines.append(f"warning: {found['warning']}")
    if "loop" in found:
        lines.append(f"loop: {found['loop']['text']}")
    if "best" in found:
        best = found["best"]
        value = best["metrics"][REWARD]
        lines.append(f"best: version {best['version']}, {REWARD} {value:.3f}; it stays on disk")
    if "endpoint" not in found:
        return Text("\n".join(lines))
    facts = [f"serves {found['alias'] or 'nothing yet'}", f"publication {found['publication']}"]
    facts += [f"{found['queued_jobs']} jobs wait", *([_job(found)] if "job" in found else [])]
    lines.append("; ".join([*facts, f"endpoint {found['endpoint']}"]))
    if found["apart"]:
        lines.append(f"{found['apart']}; Publish serves that state")
    if found["trouble"]:
        lines.append(f"replicas lack it: {found['trouble']}")
    if found.get("training"):
        lines.append(_training(found["training"]))
    nodes = Table(
        Column("node", no_wrap=True),  # names and URLs are copied: the others are narrowed first
        "state",
        Column("host", overflow="fold"),
        "GPUs",
        "memory in use",
        Column("URL", no_wrap=True),
    )
    for node in found["nodes"]:
        memory = "\n".join(map(_memory, node["memory"]))
        gpus, url = ", ".join(node["gpus"]), str(node["detail"].get("base_url", ""))
        nodes.add_row(node["node_id"], node["state"], node["host"], gpus, memory, url)
    if router := found.get("router"):
        states = ", ".join(f"{name} {one['state']}" for name, one in router["replicas"].items())
        nodes.add_row("router", router["state"], states, "", "", router["url"])
    parts: list[RenderableType] = [Text("\n".join(lines)), nodes]
    if found.get("publications"):
        parts.append(_publications(found["publications"]))
    return Group(*parts)


def _memory(use: dict[str, Any]) -> str:
    used, total = (use[key] / GIB for key in ("used_bytes", "total_bytes"))
    return f"{use['device']}: {used:.1f} of {total:.1f} GiB"


def _job(found: dict[str, Any]) -> str:
    job = found["job"]
    if job is None:
        return "no job runs"
    return f"{job['kind']} for {found['at'] - job['submitted']:.0f} s"


def _training(metrics: dict[str, float]) -> str:
    names = ["loss", "grad_norm", "lr", "clip_fraction", "kl_mean", "entropy_mean"]
    names += ["update_ratio", "served_share"]
    texts = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
    if "tokens_per_s" in metrics:
        texts.append(f"{metrics['tokens_per_s']:.0f} tokens/s")
    if "peak_memory_bytes" in metrics:
        texts.append(f"peak memory {metrics['peak_memory_bytes'] / GIB:.1f} GiB")
    return "last training: " + ", ".join(texts)


def _publications(rows: list[dict[str, Any]]) -> Table:
    table = Table("version", "mode", "MB", "pause", "verified")
    for row in rows:
        table.add_row(
            f"@{row['version']}",
            row["mode"],
            f"{row['bytes_sent'] / 1e6:.1f}",
            f"{row['pause_s'] * 1e3:.0f} ms",
            f"{row['num_verified']} of {row['num_tensors']}",
        )
    return table
