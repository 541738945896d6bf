"""Pack virtual environments into parts for a GPU host that reaches no package registry.

    python -m benchmarks.hosts.bundle OUT trainer=.venv-trainer inference=.venv-inference
    OUT/y0/ ... OUT/yN/    part.NN each; y0 also has unpack.sh and the parts' checksums

The environments come from `make envs-cuda`, on a machine of the host's kind: x86-64, the same
Python. A file that two environments have in common travels once, as a hard link. Code for other
GPUs is zeroed (`prune`), and what nothing loads at run time stays behind (`DROP`). On the host,
copy the parts into one folder, in any order and at any time, and run there

    bash unpack.sh PARTS /opt/stack [SOURCE]     SOURCE: where the project is on the host

It unpacks each part as soon as it has arrived whole, and makes /opt/stack/trainer/bin/python and
so on. Only the checked parts are unpacked; /opt/stack/whole is written last.
"""

from __future__ import annotations

import filecmp
import fnmatch
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.hosts.prune import prune_file

DROP = (
    "*.a",
    "*/__pycache__/*",
    "*/site-packages/pip/*",
    "*/site-packages/*/tests/*",
    "*/nvidia/*/include/*",  # the host's nvcc has its own
    "*/nvidia/*/bin/*",
    "*/nvidia/*/nvvm/*",
    "*/torch/include/*",
    "*/torch/test/*",
    "*/triton/backends/nvidia/bin/ptxas-blackwell",
    "*/triton/backends/nvidia/lib/cupti/*",
    "*/vllm/vllm-rs",
    "*/vllm/vllm_flash_attn/_vllm_fa2_C*",  # FlashAttention 2: for older GPUs
    "*/vllm/third_party/fmha_sm100/*",
    "*/nvidia_cutlass_dsl/*cu12*",
)
"""What no process on a Hopper GPU loads."""
LEAST_BYTES = 1_000_000
"""Smaller libraries are not pruned."""
UNPACK = Path(__file__).with_name("unpack.sh")
NAMES = "# NAMES"
"""A line of `UNPACK`: the environments take its place."""


def main(
    out: Path,
    environments: Annotated[list[str], typer.Argument(help="NAME=FOLDER each.")],
    arch: Annotated[int, typer.Option(help="The GPUs' architecture: 90 for Hopper.")] = 90,
    part_bytes: Annotated[int, typer.Option(help="Size of a part.")] = 60 * 2**20,
    drop: Annotated[list[str], typer.Option(help="More of what stays behind.")] = [],  # noqa: B006
    level: Annotated[int, typer.Option(help="Of xz.")] = 5,
) -> None:
    """Pack the environments into parts; prints their number and size."""
    found = dict(each.split("=", 1) for each in environments)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as folder:
        stage = Path(folder)
        for name, environment in found.items():
            copy(Path(environment), stage / name, (*DROP, *drop))
        link_equal(stage, list(found))
        print(f"zeroed {prune_all(stage, arch) / 1e9:.1f} GB of other architectures")
        parts = pack(stage, out, part_bytes=part_bytes, level=level)
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in parts]
    (out / "y0" / "parts.sha256").write_text("".join(sums))
    script = UNPACK.read_text().replace(NAMES, f"names='{' '.join(found)}'")
    (out / "y0" / "unpack.sh").write_text(script)
    print(f"{len(parts)} parts, {sum(p.stat().st_size for p in parts) / 1e6:.0f} MB, in {out}")


def copy(environment: Path, into: Path, patterns: tuple[str, ...]) -> None:
    """Copy an environment's packages and scripts without what stays behind."""
    for root, _, names in os.walk(environment):
        for name in names:
            path = Path(root, name)
            below = path.relative_to(environment)
            is_wanted = below.parts[0] in ("bin", "lib") and not (
                path.is_symlink() or below.match("bin/python*") or below.match("bin/*ctivate*")
            )
            if is_wanted and not any(fnmatch.fnmatch(f"/{below}", p) for p in patterns):
                (into / below).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, into / below)


def link_equal(stage: Path, names: list[str]) -> None:
    """Replace files that the first environment has too by hard links to them."""
    first, *others = (stage / name for name in names)
    for other in others:
        for path in other.rglob("*"):
            twin = first / path.relative_to(other)
            if path.is_file() and twin.is_file() and filecmp.cmp(twin, path, shallow=False):
                path.unlink()
                path.hardlink_to(twin)


def prune_all(stage: Path, arch: int) -> int:
    """Prune every library once, whatever links it has; returns the number of bytes zeroed."""
    libraries = {
        path.stat().st_ino: path
        for path in stage.rglob("*.so*")
        if path.is_file() and path.stat().st_size >= LEAST_BYTES
    }
    return sum(prune_file(path, arch) for path in libraries.values())


def pack(stage: Path, out: Path, *, part_bytes: int, level: int) -> list[Path]:
    """Write one compressed stream, cut into OUT/yN/part.NN; returns the parts."""
    for old in out.glob("y*"):
        shutil.rmtree(old)
    parts: list[Path] = []
    tar = subprocess.Popen(
        ["tar", "-C", str(stage), "--sort=name", "-cf", "-", "."], stdout=subprocess.PIPE
    )
    xz = subprocess.Popen(["xz", "-T2", f"-{level}"], stdin=tar.stdout, stdout=subprocess.PIPE)
    assert tar.stdout is not None
    assert xz.stdout is not None
    tar.stdout.close()  # xz has it
    while chunk := xz.stdout.read(part_bytes):
        part = out / f"y{len(parts)}" / f"part.{len(parts):02}"
        part.parent.mkdir(parents=True)
        part.write_bytes(chunk)
        parts.append(part)
    if tar.wait() or xz.wait():
        raise RuntimeError(f"tar or xz failed ({tar.returncode}, {xz.returncode}); see above")
    return parts


if __name__ == "__main__":
    typer.run(main)
