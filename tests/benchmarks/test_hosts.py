"""Bundles for a host without a package registry: what travels, how often, and what arrives."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from benchmarks.hosts import bundle
from benchmarks.hosts.prune import CUBIN, FATBIN_MAGIC, prune

SITE = "lib/python3.12/site-packages"
PTX = 1


def image(kind: int, arch: int, content: bytes) -> bytes:
    return (
        struct.pack("<HHIQIIHHI", kind, 0, 64, len(content), 0, 0, 0, 0, arch).ljust(64) + content
    )


def fatbin(*images: bytes) -> bytes:
    body = b"".join(images)
    return FATBIN_MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("images", "kept"),
    [
        ([(CUBIN, 80, b"a" * 9), (CUBIN, 90, b"b" * 9), (PTX, 90, b"c" * 9)], b"b"),
        ([(CUBIN, 80, b"a" * 9), (PTX, 80, b"b" * 9), (PTX, 90, b"c" * 9)], b"c"),
        ([(CUBIN, 100, b"a" * 9), (PTX, 100, b"b" * 9)], b""),
    ],
)
def test_only_images_for_the_architecture_stay(images, kept):
    """Or the newest PTX that it can compile. Nothing else of the file changes."""
    before = b"ELF" + fatbin(*(image(*one) for one in images)) + b"end"
    data = bytearray(before)
    assert prune(data, 90) == 9 * (len(images) - len(kept))
    lost = bytes({content[0] for _, _, content in images} - set(kept))
    assert data == before.translate(bytes(0 if b in lost and b else b for b in range(256)))


def environment(folder: Path, own: str) -> Path:
    """One library in common, one file with other content in each, and what stays behind."""
    files = {
        f"{SITE}/torch/lib/libtorch.so.1": fatbin(
            image(CUBIN, 80, b"a" * 2**20), image(CUBIN, 90, b"b" * 99)
        ),
        f"{SITE}/own/version.py": own.encode(),
        f"{SITE}/torch/lib/libtorch.a": b"static",
        f"{SITE}/__editable__.project.pth": b"/where/it/was/built",
        "bin/tool": f"#!{folder}/bin/python\nimport own".encode(),
        "bin/python": b"another",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_environments_arrive_in_parts_that_come_in_any_order(tmp_path):
    folders = {name: environment(tmp_path / name, name) for name in ("trainer", "inference")}
    out, parts, into = (tmp_path / name for name in ("out", "parts", "into"))
    named = [f"{name}={folder}" for name, folder in folders.items()]
    bundle.main(out, named, part_bytes=300)
    made = sorted(out.glob("y*/part.*"))
    assert len(made) > 1
    assert max(part.stat().st_size for part in made) == 300

    parts.mkdir()
    unpack = ["bash", out / "y0" / "unpack.sh", parts, into, "/the/project"]
    with subprocess.Popen(list(map(str, unpack))) as unpacking:
        for part in reversed(made):
            (parts / part.name).write_bytes(part.read_bytes())
        assert unpacking.wait(timeout=60) == 0
    assert (into / "whole").exists()
    first, second = (into / name / SITE for name in folders)
    assert (first / "torch/lib/libtorch.so.1").samefile(second / "torch/lib/libtorch.so.1")
    library = (first / "torch/lib/libtorch.so.1").read_bytes()
    assert b"b" * 99 in library
    assert b"aa" not in library
    for name in folders:
        site = into / name / SITE
        assert (site / "own/version.py").read_text() == name
        assert (site / "__editable__.project.pth").read_text() == "/the/project\n"
        assert not (site / "torch/lib/libtorch.a").exists()
        assert (into / name / "bin/tool").read_text().startswith(f"#!{into}/{name}/bin/python\n")
        ran = subprocess.run([into / name / "bin/python", "-c", ""], check=False)
        assert ran.returncode == 0


def test_a_part_that_is_damaged_is_not_unpacked(tmp_path):
    named = [f"trainer={environment(tmp_path / 'trainer', 'x')}"]
    bundle.main(tmp_path / "out", named, part_bytes=2**20)
    (part,) = (tmp_path / "out").glob("y0/part.*")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / part.name).write_bytes(part.read_bytes()[:-1] + b"?")
    unpack = ["bash", tmp_path / "out/y0/unpack.sh", tmp_path / "parts", tmp_path / "into"]
    done = subprocess.run(
        list(map(str, unpack)),
        env={"WAIT_S": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "part.00 did not arrive whole" in done.stderr
    assert not (tmp_path / "into" / "whole").exists()
