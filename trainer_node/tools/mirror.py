"""Writes a run's versions to a store, from which runs elsewhere follow it (`trainer.follow`).

    versions/N of a run -> one rank merges -> WORK/N, a Hugging Face checkpoint -> the store

The run may be up: it is only read. Each version is written as its changes since the one before, and
every `--full-every` versions whole. A process that is killed continues where it was.

    python -m trainer_node.tools.mirror --config trainer.json --run-dir RUN --store URL --key FILE

It prints the public key. Then it reads the numbers of committed versions from stdin, a line each,
and prints a line when it is done with one. `splice mirror` asks it so.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.processes.logs import log_to_stderr
from orchestrator.protocol.config import TrainerConfig
from orchestrator.protocol.messages.mistakes import read_json
from trainer_node.files.generations import MARKER
from trainer_node.tools.export_version import Exporting
from weight_transfer import store
from weight_transfer.store import Store, StoreError, Version

log = logging.getLogger("splice.mirror")


class Mirror:
    """Writes versions, one after the other.

    Args:
        key: the private key, in hexadecimal.
        full_every: versions from one that is written whole to the next.
        keep: the newest versions that stay in the store, with what they need.
    """

    def __init__(
        self,
        config: TrainerConfig,
        run_dir: Path,
        to: Store,
        *,
        name: str,
        key: str,
        full_every: int,
        keep: int,
        device: str,
    ) -> None:
        self._config, self._run_dir, self._store, self._name = config, run_dir, to, name
        self._key, self._full_every, self._keep, self._device = key, full_every, keep, device
        self._work = run_dir / "mirror"
        self._work.mkdir(exist_ok=True)
        found = [v for path in self._work.iterdir() if (v := Version.read(path)) is not None]
        self._last = max(found, key=lambda version: version.number, default=None)
        self._exporting: Exporting | None = None

    def write(self, number: int) -> None:
        """Write a committed version, unless it is there."""
        written = self._store.newest()
        if written == number:
            return
        if written is not None and written > number:
            raise StoreError(
                f"{self._store.url} has version {written} already, so it is another run's; "
                "name another store"
            )
        began_s, out = time.monotonic(), self._work / str(number)
        shutil.rmtree(out, ignore_errors=True)
        source = self._run_dir / "versions" / str(number)
        try:
            self._export(source, out)
        except (ConfigError, OSError) as error:
            if (source / MARKER).exists():
                raise
            raise StoreError(f"the run has deleted version {number} meanwhile: {error}") from error
        base = self._base(written)
        self._last = self._store.put(out, name=self._name, version=number, base=base, key=self._key)
        self._last.write()
        for path in self._work.iterdir():
            if path != out:
                shutil.rmtree(path, ignore_errors=True)
        gone = self._store.prune(keep=self._keep)
        how = "whole" if base is None else f"as changes since {base.number}"
        seconds = time.monotonic() - began_s
        log.info("wrote %s@%d %s in %.1f s; deleted %s", self._name, number, how, seconds, gone)

    def _export(self, source: Path, out: Path) -> None:
        if self._config.finetuning_type == "full":
            # A load repairs what a crash left, and the run may be up: load a folder of links.
            links = self._work / "links"
            shutil.rmtree(links, ignore_errors=True)
            source = shutil.copytree(source, links, copy_function=os.link)
        if self._exporting is None:
            self._exporting = Exporting(self._config, source, device=self._device)
        else:
            self._exporting.take(source)
        self._exporting.write(out)

    def _base(self, written: int | None) -> Version | None:
        """The version that the next one changes. None: the next one is to be whole.

        The folder may be of a version that another mirror of this run wrote elsewhere.
        """
        base = self._last
        try:
            if base is None or base.number != written or not self._store.has(base):
                return None
            return None if self._store.since_full() + 1 >= self._full_every else base
        except StoreError as error:
            log.warning("%s; the next version is written whole", error)
            return None


def private_key(file: Path) -> str:
    """The key in a file, which is made if it is not there. Prints the public key.

    Raises:
        ConfigError: the file has no key, or nothing here can sign.
    """
    try:
        if not file.exists():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(store.new_keys()[0])
        key = file.read_text().strip()
        sys.stdout.write(f"public key: {store.public_key_of(key)}\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} has no private key: {error}") from error
    return key


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer_node.tools.mirror")
    parser.add_argument("--config", type=Path, required=True, help="TrainerConfig as JSON")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the served name")
    parser.add_argument("--store", required=True, help="a folder or a URL")
    parser.add_argument("--key", type=Path, required=True, help="file with the private key")
    parser.add_argument("--full-every", type=int, default=50)
    parser.add_argument("--keep", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(argv)
    log_to_stderr("mirror")
    try:
        mirror = Mirror(
            read_json(given.config, TrainerConfig),
            given.run_dir,
            Store(given.store),
            name=given.name,
            key=private_key(given.key),
            full_every=given.full_every,
            keep=given.keep,
            device=given.device,
        )
        failed = False
        for line in sys.stdin:
            try:
                mirror.write(int(line))
                failed = False
            except ConfigError:
                raise
            except (SpliceError, OSError) as error:
                log.error("version %s: %s; it is tried again", line.strip(), error)
                failed = True
            sys.stdout.write(line)
            sys.stdout.flush()
        return int(failed)
    except SpliceError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
