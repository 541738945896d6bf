"""The chain of versions in an S3 server that runs here, with readers that are slow, cut off or
killed, and with a store that lies.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from orchestrator.processes.python import python_command
from tests.chaos.links import Link, Links
from tests.weight_transfer.made_versions import PUBLIC, published, same
from weight_transfer import store as stores
from weight_transfer.store import Store, StoreError

BUCKET, CHAIN = "bucket", "s3://bucket/run/chain"
REGION = "us-east-1"
READER = """
import sys
from pathlib import Path
from weight_transfer import store as stores
stores.PIECE_BYTES = 4096
stores.Store(sys.argv[1]).fetch(2, Path(sys.argv[2]), have=None, public_key=sys.argv[3])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def link(server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """What readers and writers reach the server through, named as users do: by variables."""
    monkeypatch.setattr(stores, "PIECE_BYTES", 4096)
    links = Links()
    link = links.add("s3", server.get_host_and_port()[1])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
    S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield link
    link.heal()
    for found in boto3.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        boto3.client("s3").delete_object(Bucket=BUCKET, Key=found["Key"])
    links.close()


def test_readers_follow_the_chain(link: Link, tmp_path: Path) -> None:
    store = Store(CHAIN)
    assert store.newest() is None and store.versions() == []
    folders = published(store, tmp_path / "made", versions=7, full_every=3)
    away, have = Store(CHAIN), None
    for number, folder in enumerate(folders):
        assert away.newest() == 6 and away.versions() == list(range(7))
        have = away.fetch(number, tmp_path / f"next-{number}", have=have, public_key=PUBLIC)
        alone = away.fetch(number, tmp_path / f"alone-{number}", have=None, public_key=PUBLIC)
        assert same(have.folder, folder) and same(alone.folder, folder)
    assert store.prune(keep=2) == [0, 1, 2] and away.versions() == [3, 4, 5, 6]
    with pytest.raises(StoreError, match="has no link 2"):
        away.fetch(2, tmp_path / "gone", have=None, public_key=PUBLIC)
    found = away.fetch(6, tmp_path / "newest", have=None, public_key=PUBLIC)
    assert same(found.folder, folders[6])


def test_a_bucket_that_lies_is_refused_by_name_and_the_next_full_version_mends_it(
    link: Link, tmp_path: Path
) -> None:
    store, s3 = Store(CHAIN), boto3.client("s3")
    folders = published(store, tmp_path / "made", versions=4, full_every=3)
    have = store.fetch(0, tmp_path / "0", have=None, public_key=PUBLIC)

    def get(key: str) -> bytes:
        body: bytes = s3.get_object(Bucket=BUCKET, Key=f"run/chain/{key}")["Body"].read()
        return body

    def put(key: str, body: bytes) -> None:
        s3.put_object(Bucket=BUCKET, Key=f"run/chain/{key}", Body=body)

    def refused(says: str) -> None:
        with pytest.raises(StoreError, match=says):
            store.fetch(2, tmp_path / "x", have=have, public_key=PUBLIC)
        assert not list(tmp_path.glob("x*"))

    first, second = get("links/00000001.json"), get("links/00000002.json")
    put("links/00000002.json", second.replace(b'\\"version\\":2', b'\\"version\\":3'))
    refused("link 2 is not signed by the key")
    put("links/00000002.json", first)
    refused("link 2 is that of version 1")
    put("links/00000002.json", second)
    _, sha256 = store._chain(2, have, PUBLIC)[0]
    part = next(
        p.part for f in store._chain(2, have, PUBLIC)[0][0].files for p in f.pieces if p.part
    )
    key = f"parts/{part[:2]}/{part}"
    body = get(key)
    put(key, body[:-1] + bytes([body[-1] ^ 1]))
    refused(f"part {part} has other bytes")
    s3.delete_object(Bucket=BUCKET, Key=f"run/chain/{key}")
    refused(f"part {part} is missing")
    assert sha256 != have.link_sha256
    found = store.fetch(3, tmp_path / "3", have=have, public_key=PUBLIC)
    assert same(found.folder, folders[3])


def test_a_reader_that_is_slow_or_cut_off(link: Link, tmp_path: Path) -> None:
    folders = published(Store(CHAIN), tmp_path / "made", versions=3)
    link.slow()
    found = Store(CHAIN).fetch(2, tmp_path / "slow", have=None, public_key=PUBLIC)
    assert same(found.folder, folders[2])
    link.heal()
    for nbytes in (300, 3000, 12000):
        link.cut_after(nbytes)  # within a link, within a part
        try:
            found = Store(CHAIN).fetch(2, tmp_path / str(nbytes), have=None, public_key=PUBLIC)
        except StoreError:
            assert not list(tmp_path.glob(f"{nbytes}*"))
        else:  # the file system asked again
            assert same(found.folder, folders[2])
        link.heal()
    found = Store(CHAIN).fetch(2, tmp_path / "healed", have=None, public_key=PUBLIC)
    assert same(found.folder, folders[2])


def test_a_reader_that_is_killed_begins_again(link: Link, tmp_path: Path) -> None:
    folders = published(Store(CHAIN), tmp_path / "made", versions=3)
    link.slow()
    into = tmp_path / "read"
    reader = subprocess.Popen(python_command(sys.executable, "-c", READER, CHAIN, into, PUBLIC))
    until_s = time.monotonic() + 60.0
    while not list(tmp_path.glob("read.*.part")):
        assert time.monotonic() < until_s and reader.poll() is None
        time.sleep(0.005)
    reader.kill()
    reader.wait(10.0)
    link.heal()
    assert not into.exists()
    found = Store(CHAIN).fetch(2, into, have=None, public_key=PUBLIC)
    assert same(found.folder, folders[2])
    assert not list(tmp_path.glob("read.*.part"))
