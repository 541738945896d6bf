"""The server's parts, and the rules about who may train."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker import types

from orchestrator.errors import ConfigError
from orchestrator.processes.locks import try_lock
from orchestrator.protocol.config import LoraConfig, TrainerConfig
from splice.client.clients import SpliceClient
from splice.tinker import adapters
from splice.tinker.books import Books, Request
from splice.tinker.checks import Checks
from splice.tinker.config import TinkerConfig
from splice.tinker.jobs import BaseModel
from splice.tinker.refused import BUSY, Refused, malformed, unknown, unsupported
from splice.tinker.sampling import Sampling
from splice.tinker.snapshots import Snapshots
from splice.tinker.training import FOLDER, Training
from splice.tinker.turns import Turns

log = logging.getLogger("splice.tinker")
WAIT_S = 0.25
SWEEP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that an endpoint needs."""

    config: TinkerConfig
    trainer: TrainerConfig
    books: Books
    checks: Checks
    training: Training
    turns: Turns
    sampling: Sampling
    name: str
    lane: asyncio.Task[None]
    """Carries out training requests."""

    # ------------------------------------------------------------ models

    @property
    def base_models(self) -> list[str]:
        """Names under which clients may ask for the model."""
        names = [self.config.model_name, self.name, str(self.trainer.model)]
        return [name for name in names if name]

    def lora_of(self, model: Mapping[str, Any]) -> LoraConfig | None:
        """Return a model's adapter; None: the run trains all parameters."""
        ours = self.trainer.lora if self.trainer.finetuning_type == "lora" else None
        return adapters.of_model(model["facts"], ours)

    def check_base_model(self, name: str) -> None:
        """Refuse any model but the run's.

        Raises:
            Refused: names the run's.
        """
        if name not in self.base_models:
            raise unsupported(
                f"base_model {name!r}: this run has {' or '.join(self.base_models)}; start "
                "`splice tinker` with --model-name for another name of it"
            )

    async def new_model(self, session_id: str, model_seq_id: int, facts: dict[str, Any]) -> str:
        """Make a session's model the one that trains; returns its id.

        Raises:
            Refused: another model is training.
        """
        self.books.live_session(session_id)
        model_id = f"{session_id}:train:{model_seq_id}"
        known = self.books.find_model(model_id)
        if known is None:
            await self._take_over(session_id, model_id)
            if self.books.find_model(model_id) is None:  # the request may have been repeated
                self.books.add_model(model_id, session_id, facts)
        return model_id

    async def _take_over(self, session_id: str, model_id: str) -> None:
        """Return once no other model trains; ends one whose session is dead, or that lost
        nothing."""
        began_s, is_said = time.monotonic(), False
        while (owner := self.books.open_model()) is not None:
            if owner["model_id"] == model_id:
                return
            if owner["session_id"] == session_id:
                if owner["has_unsaved"]:
                    raise unsupported(
                        f"several models at once are not supported: {owner['model_id']} has "
                        "training that is not saved; call save_state before you make another model"
                    )
                self.books.end_model(owner["model_id"], "its session made another model")
                continue
            heard_s = self.books.heard_s(owner["session_id"])
            if time.monotonic() - heard_s > self.config.session_timeout_s:
                log.warning(
                    "session %s ended, or sent no heartbeat for %.0f s; its model ends",
                    owner["session_id"],
                    self.config.session_timeout_s,
                )
                self.books.end_model(owner["model_id"], "its session sent no heartbeat")
            elif heard_s > began_s:
                raise unsupported(
                    f"several models at once are not supported: session {owner['session_id']} "
                    f'trains {owner["model_id"]}; end it (`service_client.close("success")`), or '
                    f"its process and wait {self.config.session_timeout_s:.0f} s"
                )
            else:
                if not is_said:
                    log.info(
                        "session %s waits up to %.0f s for a sign of life of session %s",
                        session_id,
                        self.config.session_timeout_s,
                        owner["session_id"],
                    )
                    is_said = True
                await asyncio.sleep(WAIT_S)

    def accept(
        self, kind: str, model_id: str, seq_id: int | None, body: bytes, *, first: int = 1
    ) -> str:
        """Take a training request; returns its future's id.

        Args:
            first: smallest number; 0 makes the model.

        Raises:
            Refused: the model is unknown or has ended, or the number is taken.
        """
        model = self.books.model(model_id)
        if model["ended"] is not None:
            raise unsupported(f"model {model_id} does not train any more: {model['ended']}")
        if seq_id is None or not first <= seq_id < 2**31:
            raise malformed(f"seq_id is {seq_id}; a model's requests count from 1")
        return self.turns.accept(_request(kind, model_id, seq_id, body))

    def repeated(self, kind: str, model_id: str, seq_id: int | None, body: bytes) -> str | None:
        """Return the future's id of a request that was accepted before, or None."""
        if seq_id is None:
            return None
        return self.turns.repeated(_request(kind, model_id, seq_id, body))

    @contextlib.contextmanager
    def numbered(self, model_id: str | None, seq_id: int | None, *, is_part: bool = False) -> Any:
        """Count a request that the block refuses, so that later ones do not wait for it.

        Args:
            is_part: it may be a part of a batch, so the step after it is refused too.
        """
        try:
            yield
        except Refused as error:
            is_known = model_id is not None and self.books.find_model(model_id) is not None
            if is_known and seq_id is not None and error.status != BUSY:
                if is_part:
                    self.books.add_failed_pass(str(model_id), seq_id)
                self.turns.skip(str(model_id), seq_id)
            raise

    def model_of(self, path: str) -> dict[str, Any]:
        """Return the model of a checkpoint's path.

        Raises:
            Refused: there is no such checkpoint.
        """
        return self.books.model(self.books.checkpoint(path)["model_id"])

    def new_sampler(self, asked: types.CreateSamplingSessionRequest) -> str:
        """Make a sampler of a checkpoint or of the base model; returns its id.

        Raises:
            Refused: neither is named, or it is not there.
        """
        self.books.live_session(asked.session_id)
        sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is None:
            if asked.base_model is None:
                raise malformed("send model_path or base_model")
            self.check_base_model(asked.base_model)
            self.books.add_sampler(sampler_id, session_id=asked.session_id, kind="base")
            return sampler_id
        checkpoint = self.books.checkpoint(asked.model_path)
        if checkpoint["version"] is None:
            raise unsupported(
                f"{asked.model_path} holds the trainer's state, which is not served; sample from a "
                "path of save_weights_for_sampler"
            )
        self.books.add_sampler(
            sampler_id,
            session_id=asked.session_id,
            kind="snapshot",
            version=checkpoint["version"],
            model_path=asked.model_path,
        )
        return sampler_id

    def delete_checkpoint(self, path: str) -> None:
        """Forget a checkpoint. Its folder goes too where this host has it.

        Raises:
            Refused: there is none.
        """
        folder = self.books.checkpoint(path)["folder"]
        self.books.forget_checkpoint(path)
        if folder is not None:
            self.training.delete_folder(folder)

    async def sweep(self) -> None:
        """Delete checkpoints whose time is over, until cancelled."""
        while True:
            for path in self.books.expired():
                log.info("checkpoint %s has expired", path)
                with contextlib.suppress(Refused):  # a client deleted it meanwhile
                    await asyncio.to_thread(self.delete_checkpoint, path)
            await asyncio.sleep(SWEEP_S)

    def training_run(self, model_id: str) -> dict[str, Any]:
        """Return what the SDK calls a training run."""
        model = self.books.model(model_id)
        newest: dict[str, dict[str, Any]] = {}
        for checkpoint in self.books.checkpoints(model_id):
            newest.setdefault(checkpoint["kind"], checkpoint_of(checkpoint))
        return {
            "training_run_id": model_id,
            "base_model": model["facts"]["base_model"],
            "model_owner": "splice",
            "is_lora": self.lora_of(model) is not None,
            "lora_rank": adapters.info(self.lora_of(model))["lora_rank"],
            "last_request_time": iso(model["used"]),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": model["facts"]["user_metadata"],
        }


def _request(kind: str, model_id: str, seq_id: int, body: bytes) -> Request:
    request_id = f"tinker-{model_id.replace(':', '-')}-{seq_id}"
    return Request(request_id=request_id, model_id=model_id, seq_id=seq_id, kind=kind, body=body)


@contextlib.contextmanager
def only_server(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock: two servers would undo each other's publications.

    Raises:
        ConfigError: another `splice tinker` serves the run.
    """
    with (run_dir / FOLDER / "lock").open("w") as file:
        if not try_lock(file.fileno()):
            raise ConfigError(f"another `splice tinker` serves the run in {run_dir}; end it first")
        yield


def iso(at: float) -> str:
    """Return a time as the SDK reads it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def checkpoint_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as the SDK reads it."""
    path = str(row["path"])
    return {
        "checkpoint_id": path.removeprefix("tinker://").partition("/")[2],
        "checkpoint_type": row["kind"],
        "time": iso(row["created"]),
        "tinker_path": path,
        "user_metadata": row["facts"]["user_metadata"],
        "expires_at": None if row["expires"] is None else iso(row["expires"]),
    }


def new_session_id() -> str:
    """Return the id of a new session."""
    return uuid.uuid4().hex


def read_trainer(run_dir: Path) -> TrainerConfig:
    """Return the trainer's settings, as its launcher wrote them into the run's folder.

    Raises:
        Refused: they are not there.
    """
    path = run_dir / "trainer.json"
    try:
        return TrainerConfig.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise unknown(
            f"cannot read {path} ({error.strerror}); start the run first, with `splice up`"
        ) from error


@contextlib.asynccontextmanager
async def running(config: TinkerConfig) -> AsyncIterator[Service]:
    """The service of a run; its training requests run meanwhile."""
    trainer = read_trainer(config.run_dir)
    (config.run_dir / FOLDER).mkdir(exist_ok=True, mode=0o700)
    with only_server(config.run_dir):
        async with _running(config, trainer) as service:
            yield service


@contextlib.asynccontextmanager
async def _running(config: TinkerConfig, trainer: TrainerConfig) -> AsyncIterator[Service]:
    books = Books(config.run_dir / FOLDER / "books.sqlite")
    client = SpliceClient.of_run(config.run_dir)
    await asyncio.to_thread(client.__enter__)
    try:
        lora = trainer.lora if trainer.finetuning_type == "lora" else None
        training = Training(client, books, lora=lora, config=config)
        status = await asyncio.to_thread(client.status)
        await asyncio.to_thread(training.prepare)
        turns = Turns(books, config, training.work)
        turns.restore()
        base = BaseModel(client, config.job_timeout_s)
        snapshots = Snapshots(books, training.serve_again) if config.old_snapshots else None
        if snapshots is not None:
            training.publishing = snapshots.publishing
        async with Sampling(client, books, config, base, snapshots) as sampling:
            lane = asyncio.create_task(turns.run())
            tasks = {lane, asyncio.create_task(turns.fail_gaps())}
            try:
                service = Service(
                    config=config,
                    trainer=trainer,
                    books=books,
                    checks=Checks(books, lora),
                    training=training,
                    turns=turns,
                    sampling=sampling,
                    name=status.name,
                    lane=lane,
                )
                tasks.add(asyncio.create_task(service.sweep()))
                yield service
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=5.0)
    finally:
        await asyncio.to_thread(client.__exit__, None, None, None)
        books.close()
