"""A store of versions: whole ones and changes, readers that are slow, and stores that lie."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.weight_transfer.made_versions import PRIVATE, PUBLIC, published, same
from weight_transfer import store as stores
from weight_transfer.store import Store, StoreError, Version, new_keys


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(stores, "PIECE_BYTES", 4096)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))


def test_every_version_comes_from_nothing_and_from_the_one_before(store, tmp_path):
    folders = published(store, tmp_path / "made", versions=5, full_every=3)
    assert store.newest() == 4 and store.versions() == [0, 1, 2, 3, 4]
    have: Version | None = None
    for number, folder in enumerate(folders):
        alone = store.fetch(number, tmp_path / f"a{number}", have=None, public_key=PUBLIC)
        have = store.fetch(number, tmp_path / f"b{number}", have=have, public_key=PUBLIC)
        assert same(alone.folder, folder) and same(have.folder, folder)
        assert (alone.number, alone.name) == (have.number, have.name) == (number, "m")
    skipped = store.fetch(1, tmp_path / "c", have=None, public_key=PUBLIC)
    skipped = store.fetch(4, tmp_path / "d", have=skipped, public_key=PUBLIC)
    assert same(skipped.folder, folders[4]), "a slow reader leaves versions out"
    assert not list(tmp_path.glob("*.part"))


def test_a_change_is_small_and_what_is_the_same_is_no_part(store, tmp_path):
    published(store, tmp_path / "made", versions=2)
    link = json.loads(json.loads((tmp_path / "store/links/00000001.json").read_text())["link"])
    pieces = {f["name"]: f["pieces"] for f in link["files"]}
    assert pieces["model.safetensors"][3] == {"part": "", "is_code": True}
    parts = {p["part"] for p in pieces["model.safetensors"] if p["part"]}
    sizes = [(tmp_path / "store/parts" / p[:2] / p).stat().st_size for p in parts]
    assert sizes and max(sizes) < 400
    assert pieces["config.json"] == [{"part": "", "is_code": True}]


@pytest.mark.parametrize("where", ["parts", "links"])
def test_what_is_broken_is_refused_by_name_and_the_next_full_version_mends_it(
    where, store, tmp_path
):
    folders = published(store, tmp_path / "made", versions=4, full_every=3)
    have = store.fetch(0, tmp_path / "0", have=None, public_key=PUBLIC)
    link = tmp_path / "store/links/00000001.json"
    coded = [p for f in json.loads(json.loads(link.read_text())["link"])["files"]
             for p in f["pieces"] if p["part"]]  # fmt: skip
    part = coded[0]["part"]
    victim = link if where == "links" else tmp_path / "store/parts" / part[:2] / part
    name = "link 1" if where == "links" else part
    body = victim.read_bytes()
    for wrong in (body[:-1] + bytes([body[-1] ^ 1]), b"", None):
        if wrong is None:
            victim.unlink()
        else:
            victim.write_bytes(wrong)
        with pytest.raises(StoreError, match=name):
            store.fetch(2, tmp_path / "2", have=have, public_key=PUBLIC)
        assert not (tmp_path / "2").exists() and not list(tmp_path.glob("*.part"))
    mended = store.fetch(3, tmp_path / "3", have=have, public_key=PUBLIC)
    assert same(mended.folder, folders[3])


def resigned(store: Path, version: int, key: str, **changes) -> None:
    path = store / f"links/{version:08d}.json"
    link = {**json.loads(json.loads(path.read_text())["link"]), **changes}
    text = json.dumps(link)
    ed25519 = stores._ed25519()
    signer = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key))
    path.write_text(json.dumps({"link": text, "signature": signer.sign(text.encode()).hex()}))


def test_a_store_that_lies_is_refused(store, tmp_path):
    published(store, tmp_path / "made", versions=3)
    root, have = tmp_path / "store", store.fetch(0, tmp_path / "0", have=None, public_key=PUBLIC)

    def refused(says: str, number: int = 2) -> None:
        with pytest.raises(StoreError, match=says):
            store.fetch(number, tmp_path / "x", have=have, public_key=PUBLIC)
        assert not (tmp_path / "x").exists()
        shutil.rmtree(root / "links")
        shutil.copytree(tmp_path / "links", root / "links")

    shutil.copytree(root / "links", tmp_path / "links")
    resigned(root, 2, new_keys()[0])
    refused("link 2 is not signed by the key")
    shutil.copy(root / "links/00000001.json", root / "links/00000002.json")
    refused("link 2 is that of version 1")
    resigned(root, 1, PRIVATE, name="other")
    refused("link 1 is another one than version 2 was made from")
    resigned(root, 1, PRIVATE, base_sha256="0" * 64)
    refused("version 1 changes another version 0", number=1)
    file = {"name": "../../x", "nbytes": 0, "sha256": "0" * 64, "pieces": []}
    resigned(root, 2, PRIVATE, files=[file])
    refused("names files outside its folder")
    resigned(root, 2, PRIVATE, base=2, base_sha256="")
    refused("has no beginning")


def test_old_versions_go_with_what_only_they_need(store, tmp_path):
    folders = published(store, tmp_path / "made", versions=7, full_every=3)
    assert store.prune(keep=2) == [0, 1, 2]  # 5 needs 4 and 3, 6 is whole
    found = store.fetch(5, tmp_path / "5", have=None, public_key=PUBLIC)
    assert same(found.folder, folders[5])
    assert store.prune(keep=1) == [3, 4, 5] and store.prune(keep=1) == []
    found = store.fetch(6, tmp_path / "6", have=None, public_key=PUBLIC)
    assert same(found.folder, folders[6])
    parts = [p for p in (tmp_path / "store/parts").rglob("*") if p.is_file()]
    link = json.loads(json.loads((tmp_path / "store/links/00000006.json").read_text())["link"])
    assert {p.name for p in parts} == {p["part"] for f in link["files"] for p in f["pieces"]}
    with pytest.raises(StoreError, match="has no link 5"):
        store.fetch(5, tmp_path / "gone", have=None, public_key=PUBLIC)


def test_readers_follow_over_http(store, tmp_path):
    """Which cannot list: the store says its newest version."""
    folders = published(store, tmp_path / "made", versions=3)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "store"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        away = Store(f"http://127.0.0.1:{server.server_port}")
        have = away.fetch(0, tmp_path / "0", have=None, public_key=PUBLIC)
        assert away.newest() == 2
        found = away.fetch(2, tmp_path / "2", have=have, public_key=PUBLIC)
        assert same(found.folder, folders[2])
        with pytest.raises(StoreError, match="has no link 7"):
            away.fetch(7, tmp_path / "7", have=have, public_key=PUBLIC)
        server.shutdown()


def test_a_long_chain_takes_the_disk_of_two_versions(store, tmp_path, monkeypatch):
    folders = published(store, tmp_path / "made", versions=6)
    seen, original = [], store._fetch_file

    def counted(*given) -> None:
        seen.append(len(list(tmp_path.glob("*.part"))))
        original(*given)

    monkeypatch.setattr(store, "_fetch_file", counted)
    assert same(store.fetch(5, tmp_path / "5", have=None, public_key=PUBLIC).folder, folders[5])
    assert max(seen) == 2


class _Unavailable(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_has_trouble_says_nothing_of_the_store(tmp_path):
    """File systems raise errors of their own, such as aiohttp's: a reader must survive them."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Unavailable) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = Store(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(StoreError, match="503"):
            there.newest()
        with pytest.raises(StoreError, match="503"):
            there.fetch(1, tmp_path / "1", have=None, public_key=PUBLIC)
        server.shutdown()
