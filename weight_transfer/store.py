"""Versions of a model in a store that many can read: a chain of signed links over parts.

    STORE/newest                  the number of the newest version; a hint
    STORE/links/00000042.json     {"link": "...", "signature": "..."}: a version's files
    STORE/parts/ab/abcd...        bytes, named by their SHA-256; never written again

    writer = Store(url)             a folder, or what fsspec opens: s3://bucket/path, https://...
    writer.put(files, version=42, base=previous, key=...)
    fetched = Store(url).fetch(into, have=previous, public_key=...)

A link names the files of a Hugging Face checkpoint. A file is cut into pieces of `PIECE_BYTES`. A
piece is a part as it is, or a code of what changed since the link's base version
(`weight_transfer.delta`). The link has the SHA-256 of each file, of each part, and of the base's
link, and is signed (Ed25519, RFC 8032). A link, a part or a base that is broken, missing or another
one is refused by name, and nothing of it is kept. A version without a base needs no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import ConfigError, SpliceError, TransferError
from weight_transfer import delta

ORIGIN = "splice_store.json"
"""In a version's folder: which version it is."""
PIECE_BYTES = 1 << 26
MOST_LINKS = 1000
"""Longest chain that is followed."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_HASH = r"[0-9a-f]{64}"
Bytes = npt.NDArray[np.uint8]


class StoreError(SpliceError, RuntimeError):
    """A version cannot be had from the store. Says which link, file or part is wrong."""


class Piece(BaseModel):
    """A piece of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: str = Field(pattern=rf"^({_HASH})?$")
    """SHA-256 of the part. Empty: the piece is the base's."""
    is_code: bool = False


class StoredFile(BaseModel):
    """A file of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    nbytes: int = Field(ge=0)
    sha256: str = Field(pattern=f"^{_HASH}$")
    pieces: tuple[Piece, ...]


class Link(BaseModel):
    """A version in a store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The served name."""
    version: int = Field(ge=0)
    base: int | None = None
    base_sha256: str = ""
    """Of the base's link, as text."""
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of the store in a folder of this host."""

    folder: Path
    name: str
    number: int
    link_sha256: str

    @staticmethod
    def read(folder: Path) -> Version | None:
        """The version that is in a folder. None: none, or not all of it."""
        try:
            found: dict[str, Any] = json.loads((folder / ORIGIN).read_text())
            return Version(folder=folder, **found)
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        """Note in the folder what it has, once it is complete."""
        own = {"name": self.name, "number": self.number, "link_sha256": self.link_sha256}
        part = self.folder / f".{ORIGIN}"
        part.write_text(json.dumps(own))
        part.replace(self.folder / ORIGIN)


def new_keys() -> tuple[str, str]:
    """A private and a public key, in hexadecimal."""
    key = _ed25519().Ed25519PrivateKey.generate()
    return key.private_bytes_raw().hex(), key.public_key().public_bytes_raw().hex()


def public_key_of(private_key: str) -> str:
    """The public key, in hexadecimal."""
    ed25519 = _ed25519()
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private_key))
    return str(key.public_key().public_bytes_raw().hex())


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise ConfigError(
            'signatures need the package cryptography: pip install "cryptography>=42"'
        ) from error
    return ed25519


class Store:
    """A store at a URL or in a folder.

    Raises:
        ConfigError: no file system opens the URL.
    """

    def __init__(self, url: str) -> None:
        import fsspec.core

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"the store {url} cannot be opened: {error}") from error
        self._is_local = "file" in np.atleast_1d(self._fs.protocol)

    # ------------------------------------------------------------ writing

    def put(
        self, folder: Path, *, name: str, version: int, base: Version | None, key: str
    ) -> Version:
        """Write a version: first its parts, then its link.

        Args:
            folder: a Hugging Face checkpoint.
            base: a version of this store, whose unchanged elements are left out. None: everything
                is written.
            key: the private key, in hexadecimal.

        Raises:
            StoreError: the store cannot be written.
        """
        try:
            files = tuple(
                self._put_file(path, None if base is None else base.folder / path.name)
                for path in sorted(folder.iterdir())
                if path.is_file() and path.name != ORIGIN and _PLAIN_NAME.fullmatch(path.name)
            )
            link = Link(
                name=name,
                version=version,
                base=None if base is None else base.number,
                base_sha256="" if base is None else base.link_sha256,
                files=files,
            )
            text = link.model_dump_json()
            signature = (
                _ed25519()
                .Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key))
                .sign(text.encode())
            )
            signed = json.dumps({"link": text, "signature": signature.hex()})
            self._write(_link_path(version), signed.encode())
            self._write("newest", str(version).encode())
        except OSError as error:
            raise StoreError(
                f"version {version} cannot be written to {self.url}: {error}"
            ) from error
        return Version(folder=folder, name=name, number=version, link_sha256=_sha256(text.encode()))

    def _put_file(self, path: Path, base: Path | None) -> StoredFile:
        nbytes, digest, pieces = path.stat().st_size, hashlib.sha256(), []
        if base is not None and not (base.is_file() and base.stat().st_size == nbytes):
            base = None
        for at in range(0, nbytes, PIECE_BYTES):
            new_B = _read(path, at)
            digest.update(new_B.data)
            pieces.append(self._put_piece(new_B, None if base is None else _read(base, at)))
        sha256 = digest.hexdigest()
        return StoredFile(name=path.name, nbytes=nbytes, sha256=sha256, pieces=tuple(pieces))

    def _put_piece(self, new_B: Bytes, old_B: Bytes | None) -> Piece:
        body, is_code = new_B.tobytes(), False
        if old_B is not None:
            if np.array_equal(old_B, new_B):
                return Piece(part="", is_code=True)
            words = 2 - new_B.size % 2
            pair = torch.from_numpy(old_B), torch.from_numpy(new_B)
            code, _ = delta.encode(*pair, word_bytes=words)
            if len(code) < len(body):
                body, is_code = code, True
        part = _sha256(body)
        if not self._ask(self._fs.exists, self._path(_part_path(part))):
            self._write(_part_path(part), body)
        return Piece(part=part, is_code=is_code)

    def _write(self, path: str, body: bytes) -> None:
        """Write a file whole or not at all: an object store does so by itself."""
        whole = self._path(path)
        self._ask(self._fs.makedirs, whole.rpartition("/")[0], exist_ok=True)
        if not self._is_local:
            self._ask(self._fs.pipe_file, whole, body)
            return
        part = Path(f"{whole}.{os.getpid()}.new")
        part.write_bytes(body)
        part.replace(whole)

    def prune(self, *, keep: int) -> list[int]:
        """Delete what the newest `keep` versions do not need. Returns the deleted versions."""
        numbers = self.versions()
        if len(numbers) <= keep:
            return []  # without reading each link
        links = {number: Link.model_validate_json(self._signed(number)[0]) for number in numbers}
        needed: set[int] = set()
        for number in numbers[-keep:]:
            at: int | None = number
            while at is not None and at in links and at not in needed:
                needed.add(at)
                at = links[at].base
        gone = [number for number in numbers if number not in needed]
        for number in gone:
            self._ask(self._fs.rm_file, self._path(_link_path(number)))
        parts = {p.part for n in needed for f in links[n].files for p in f.pieces}
        for path in self._ask(self._fs.find, self._path("parts")) if gone else ():
            if path.rpartition("/")[2] not in parts:
                self._ask(self._fs.rm_file, path)
        return gone

    def since_full(self) -> int:
        """Versions since the newest one that is whole."""
        count, at = 0, self.newest()
        while at is not None:
            link = Link.model_validate_json(self._signed(at)[0])
            if link.base is None:
                break
            count, at = count + 1, link.base
        return count

    def has(self, version: Version) -> bool:
        """Whether the link of this version is still the one that it was written with."""
        return _sha256(self._signed(version.number)[0].encode()) == version.link_sha256

    def versions(self) -> list[int]:
        """The versions that have a link, ascending. A server of plain HTTP cannot list them."""
        try:
            found = self._ask(self._fs.ls, self._path("links"), detail=False)
        except FileNotFoundError:
            return []
        names = (str(path).rpartition("/")[2] for path in found)
        return sorted(int(name.removesuffix(".json")) for name in names if name[:-5].isdigit())

    # ------------------------------------------------------------ reading

    def newest(self) -> int | None:
        """The newest version's number as the store says it. None: it has no version."""
        try:
            return int(self._ask(self._fs.cat_file, self._path("newest")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.url} does not say its newest version: {error}") from error

    def fetch(self, version: int, into: Path, *, have: Version | None, public_key: str) -> Version:
        """Make a version's files in a new folder, from a version that is here or from nothing.

        Raises:
            StoreError: names the link, file or part that is broken, missing or another one. The
                folder is not there then.
        """
        chain = self._chain(version, have, public_key)
        step, made = have, []
        try:
            for number, (link, sha256) in enumerate(chain):
                folder = into.with_name(f"{into.name}.{number}.part")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                made.append(folder)
                for file in link.files:
                    self._fetch_file(link, file, folder, None if step is None else step.folder)
                for before in made[:-1]:  # each takes the disk of a whole model
                    shutil.rmtree(before, ignore_errors=True)
                step = Version(
                    folder=folder, name=link.name, number=link.version, link_sha256=sha256
                )
            assert step is not None
            step.folder.replace(into)
        except OSError as error:
            raise StoreError(f"version {version} of {self.url}: {error}") from error
        finally:
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
        return Version(
            folder=into, name=step.name, number=step.number, link_sha256=step.link_sha256
        )

    def _chain(self, version: int, have: Version | None, public_key: str) -> list[tuple[Link, str]]:
        """The links from what is here, or from one without a base, to a version."""
        chain: list[tuple[Link, str]] = []
        at: int | None = version
        wanted = ""
        while at is not None:
            if have is not None and at == have.number and chain:
                if wanted != have.link_sha256:
                    raise StoreError(
                        f"{self.url}: version {chain[-1][0].version} changes another version {at} "
                        "than the one that is here"
                    )
                break
            text, signature = self._signed(at)
            link, sha256 = self._checked(at, text, signature, public_key), _sha256(text.encode())
            if wanted not in ("", sha256):
                raise StoreError(
                    f"{self.url}: link {at} is another one than version "
                    f"{chain[-1][0].version} was made from"
                )
            chain.append((link, sha256))
            at, wanted = link.base, link.base_sha256
            if len(chain) > MOST_LINKS or (at is not None and at >= link.version):
                raise StoreError(f"{self.url}: the chain of version {version} has no beginning")
        return chain[::-1]

    def _signed(self, version: int) -> tuple[str, str]:
        try:
            found = json.loads(self._ask(self._fs.cat_file, self._path(_link_path(version))))
            return str(found["link"]), str(found["signature"])
        except FileNotFoundError:
            raise StoreError(f"{self.url} has no link {version}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.url}: link {version} cannot be read: {error}") from error

    def _checked(self, version: int, text: str, signature: str, public_key: str) -> Link:
        from cryptography.exceptions import InvalidSignature

        key = _ed25519().Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        try:
            key.verify(bytes.fromhex(signature), text.encode())
            link = Link.model_validate_json(text)
        except InvalidSignature:
            raise StoreError(
                f"{self.url}: link {version} is not signed by the key {public_key[:16]}..."
            ) from None
        except (ValueError, ValidationError) as error:
            raise StoreError(f"{self.url}: link {version} cannot be read: {error}") from error
        if link.version != version:
            raise StoreError(f"{self.url}: link {version} is that of version {link.version}")
        names = [file.name for file in link.files]
        if len({*names}) != len(names) or not all(map(_PLAIN_NAME.fullmatch, names)):
            raise StoreError(f"{self.url}: link {version} names files outside its folder, or twice")
        return link

    def _fetch_file(self, link: Link, file: StoredFile, folder: Path, base: Path | None) -> None:
        what = f"{self.url}: {file.name} of version {link.version}"
        if len(file.pieces) != -(-file.nbytes // PIECE_BYTES):
            raise StoreError(f"{what} has {len(file.pieces)} pieces for {file.nbytes:,} bytes")
        old = None if base is None else base / file.name
        if any(piece.is_code for piece in file.pieces) and not (
            old is not None and old.is_file() and old.stat().st_size == file.nbytes
        ):
            raise StoreError(f"{what} is a change of a file that is not here")
        digest = hashlib.sha256()
        with (folder / file.name).open("wb") as out:
            for number, piece in enumerate(file.pieces):
                begin = number * PIECE_BYTES
                size = min(PIECE_BYTES, file.nbytes - begin)
                body = self._part(piece.part, what) if piece.part else b""
                if piece.is_code:
                    assert old is not None
                    whole_B = torch.from_numpy(_read(old, begin))
                    try:
                        delta.apply(body, whole_B)
                    except TransferError as error:
                        raise StoreError(f"{what}, part {piece.part}: {error}") from error
                    body = whole_B.numpy().tobytes()
                if len(body) != size:
                    raise StoreError(
                        f"{what}, part {piece.part}: {len(body):,} bytes, not {size:,}"
                    )
                digest.update(body)
                out.write(body)
        if digest.hexdigest() != file.sha256:
            raise StoreError(f"{what} has other bytes than its link says")

    def _part(self, sha256: str, what: str) -> bytes:
        try:
            body = bytes(self._ask(self._fs.cat_file, self._path(_part_path(sha256))))
        except FileNotFoundError:
            raise StoreError(f"{what}: part {sha256} is missing") from None
        if _sha256(body) != sha256:
            raise StoreError(f"{what}: part {sha256} has other bytes")
        return body

    def _ask(self, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Call the file system. What others raise, such as aiohttp and botocore, is an OSError."""
        try:
            return call(*given, **more)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


def _read(path: Path, at: int) -> Bytes:
    """The piece of a file that begins there."""
    return np.fromfile(path, np.uint8, count=PIECE_BYTES, offset=at)


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _link_path(version: int) -> str:
    return f"links/{version:08d}.json"


def _part_path(sha256: str) -> str:
    return f"parts/{sha256[:2]}/{sha256}"
