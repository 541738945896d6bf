"""A node in the trainer's place that trains nothing: it follows another run's versions in a store.

    store (`weight_transfer.store`) -> versions/N, a Hugging Face checkpoint -> the run's replicas

It fetches the newest version, joins as the trainer, and sends that version's tensors as a trainer
sends merged weights. A thread looks for newer versions. It fetches one, and asks the orchestrator
to load and publish it under its own number. What the store has wrong is logged by name, and the run
serves what it has until a later version mends it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from orchestrator.errors import (
    ConfigError,
    JobFailed,
    ManifestError,
    NodeLost,
    SpliceError,
    TransferError,
)
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.restarts import EXIT_CONFIG, EXIT_LINK_LOST
from orchestrator.protocol.config import FollowConfig, TrainerConfig
from orchestrator.protocol.messages import (
    AbortSend,
    AnyMessage,
    Cancelled,
    Completed,
    EncodeChanges,
    Failed,
    GetStatus,
    Hello,
    LeaveTransferGroup,
    LoadCheckpoint,
    Manifest,
    OpenTransferGroup,
    PlanPublication,
    Publish,
    Ready,
    ReleaseMemory,
    Resync,
    SaveCheckpoint,
    SendWeights,
    Status,
    SubmitJob,
    TensorSpec,
    UseLayout,
    new_id,
)
from orchestrator.protocol.messages.mistakes import read_json
from orchestrator.protocol.node_link import NodeLink
from trainer_node.files.generations import MARKER
from trainer_node.node import hello
from trainer_node.request import NotReady, Outcome, Request, classify
from weight_transfer.chunks import ChunkSender
from weight_transfer.groups import GroupListener, TransferGroup, open_listener
from weight_transfer.layout import chunk_offsets
from weight_transfer.store import Store, StoreError, Version

log = logging.getLogger("splice.follower")
RECV_S, STATUS_S, JOB_S = 1.0, 60.0, 3600.0
MOST_WAIT_S = 600.0
"""Longest wait between two publications that fail."""
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}


class Weights:
    """The tensors of a Hugging Face checkpoint, read where they lie.

    Raises:
        ConfigError: no tensor, or one whose type cannot be sent.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self._files: dict[str, Any] = {}
        specs = []
        for path in sorted(version.folder.glob("*.safetensors")):
            file: Any = safe_open(path, "pt")
            for name in file.offset_keys():
                found = file.get_slice(name)
                if (dtype := _DTYPES.get(found.get_dtype())) is None:
                    raise ConfigError(f"{path}: {name} is {found.get_dtype()}, which is not sent")
                self._files[name] = file
                shape = tuple(found.get_shape())
                specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))  # type: ignore[arg-type]
        if not specs:
            raise ConfigError(f"{version.folder} has no tensors")
        self.manifest = Manifest(tensors=tuple(specs))

    def copy(self, specs: Sequence[TensorSpec], out_B: torch.Tensor) -> None:
        """Write a chunk: the tensors end to end."""
        for spec, offset in zip(specs, chunk_offsets(specs), strict=True):
            tensor = self._files[spec.name].get_tensor(spec.name)
            out_B[offset : offset + spec.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))


class Follower:
    """Answers the orchestrator's requests.

    Args:
        folder: of the run; fetched versions are in `fetched`, saved ones in `versions`.
    """

    def __init__(self, config: TrainerConfig, follow: FollowConfig, folder: Path) -> None:
        self._config, self._follow, self._folder = config, follow, folder
        self._store, self._device = Store(follow.store), torch.device(config.device)
        self.weights = Weights(self._first())
        self._manifest: Manifest | None = None
        self._order: list[tuple[int, ...]] = []
        self._lock = threading.Lock()
        self._listeners: dict[str, GroupListener] = {}
        self._groups: dict[str, TransferGroup] = {}
        self._aborts: dict[str, str] = {}
        self.handlers: dict[type, Callable[[Request[Any]], Outcome]] = {
            PlanPublication: self._plan,
            UseLayout: self._use_layout,
            EncodeChanges: lambda _: Outcome(result={"why_not": "the store has whole tensors"}),
            OpenTransferGroup: self._open,
            SendWeights: self._send,
            LeaveTransferGroup: self._leave,
            ReleaseMemory: lambda _: Outcome(
                result={"offloaded_bytes": 0, "resident_bytes": 0, "seconds": {}}
            ),
            SaveCheckpoint: self._save,
            LoadCheckpoint: self._load,
        }

    # ------------------------------------------------------------ versions

    def _first(self) -> Version:
        """The newest version that is here, or the store's newest."""
        here = [*self._folder.glob("versions/*"), *self._folder.glob("fetched/*")]
        whole = [path for path in here if path.name.isdigit()]  # 7.part is being written
        found = [version for path in whole if (version := Version.read(path)) is not None]
        if found:
            return max(found, key=lambda version: version.number)
        while (newest := self._store.newest()) is None:
            log.warning("%s has no version yet; waiting for one", self._store.url)
            time.sleep(self._follow.poll_s)
        return self.fetch(newest, have=None)

    def fetch(self, number: int, *, have: Version | None) -> Version:
        """Get a version of the store, unless it is here.

        Raises:
            StoreError: the store has something wrong.
            ConfigError: it is another run's.
        """
        into = self._folder / "fetched" / str(number)
        if (version := Version.read(into)) is not None:
            return version
        began_s = time.monotonic()
        shutil.rmtree(into, ignore_errors=True)
        version = self._store.fetch(number, into, have=have, public_key=self._follow.key)
        if version.name != (self._follow.name or version.name):
            wanted = f"not of {self._follow.name} (trainer.follow.name)"
            raise ConfigError(f"{self._store.url} has versions of {version.name}, {wanted}")
        version.write()
        log.info("fetched %s@%d in %.1f s", version.name, number, time.monotonic() - began_s)
        return version

    def _save(self, request: Request[SaveCheckpoint]) -> Outcome:
        """Keep the version in a folder of the run's: with other names for the same files."""
        folder = Path(request.message.checkpoint_dir)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for path in self.weights.version.folder.iterdir():
            with contextlib.suppress(FileExistsError):
                os.link(path, part / path.name)
        (part / MARKER).touch()
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
        for gone in request.sent.delete_after:
            shutil.rmtree(gone, ignore_errors=True)
        return Outcome(result={"version": request.sent.version, "seconds": {}})

    def _load(self, request: Request[LoadCheckpoint]) -> Outcome:
        folder = Path(request.message.checkpoint_dir)
        version = Version.read(folder)
        if version is None:
            raise ConfigError(f"{folder} is no version of a store")
        self.weights = Weights(version)
        return Outcome(result={"version": version.number})

    # ------------------------------------------------------------ publication

    def _plan(self, _: Request[PlanPublication]) -> Outcome:
        return Outcome(result=self.weights.manifest.model_dump(mode="python"))

    def _use_layout(self, request: Request[UseLayout]) -> Outcome:
        message, why_not = request.message, None
        if message.keeps is not None or message.fp8 is not None or message.part is not None:
            why_not = "a run that follows a store sends whole tensors to all workers"
        else:
            self._manifest = self.weights.manifest
            self._order = [chunk.tensors for chunk in message.layout.chunks]
        return Outcome(result={"why_not": why_not})

    def _open(self, request: Request[OpenTransferGroup]) -> Outcome:
        self._close()
        deadline, message = time.monotonic() + request.message.deadline_s, request.message
        try:
            for replica, workers in message.replicas.items():
                listener = open_listener(
                    transport=message.transport,
                    host=self._config.host,
                    world_size=1 + workers,
                    device=self._device,
                )
                with self._lock:
                    self._listeners[replica] = listener
            request.check_abort()
            addresses = {
                r: x.rendezvous.model_dump(mode="python") for r, x in self._listeners.items()
            }
            request.progress("listening", rendezvous=addresses)
            for replica, listener in list(self._listeners.items()):
                group = listener.join(max(0.001, deadline - time.monotonic()))
                with self._lock:
                    self._groups[replica] = group
        except BaseException:
            self._close()
            raise
        self._close_listeners()
        return Outcome()

    def _send(self, request: Request[SendWeights]) -> Outcome:
        message, weights = request.message, self.weights
        if message.version != weights.version.number:
            raise NotReady(f"version {weights.version.number} is loaded, not {message.version}")
        if self._manifest != weights.manifest:
            raise ManifestError("this version has other tensors than the layout; plan again")
        if not self._groups:
            raise NotReady("no transfer group is open; send OpenTransferGroup first")
        request.progress("sending", version=message.version)
        manifest, order = weights.manifest, self._order
        sender = ChunkSender(
            groups=self._groups,
            manifest=manifest,
            chunks=order,
            fill=lambda k, out_B: weights.copy([manifest.tensors[i] for i in order[k]], out_B),
            device=self._device,
        )
        try:
            report = sender.send(deadline_s=message.deadline_s)
        except BaseException:
            self._close()
            raise
        digests_N = report.digests_N.contiguous()
        spec = TensorSpec(name="digests", dtype="int64", shape=tuple(digests_N.shape))
        result = {
            "version": message.version,
            "nbytes": report.nbytes,
            "seconds": {**report.seconds, "merge": 0.0},
        }
        return Outcome(result=result, tensors=(spec,), buffers=(digests_N.numpy().tobytes(),))

    def _leave(self, _: Request[LeaveTransferGroup]) -> Outcome:
        self._close()
        return Outcome()

    def abort(self, message: AbortSend) -> None:
        """End a join or a send. Called on the link's thread."""
        if message.request_id is not None:
            self._aborts[message.request_id] = message.reason
        self._close_listeners()
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group.abort(message.reason)

    def _close_listeners(self) -> None:
        with self._lock:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.close()

    def _close(self) -> None:
        self._close_listeners()
        with self._lock:
            groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()

    # ------------------------------------------------------------ the loop

    def serve(self, link: NodeLink) -> int:
        """Answer requests until told to stop."""
        detail = {
            "model": str(self._config.model),
            "memory": "resident",
            "ranks": 1,
            "version": self.weights.version.number,
            "follows": self._store.url,
        }
        link.send(Ready(node_id=link.node_id, detail=detail))
        try:
            while True:
                envelope = link.recv(timeout_s=RECV_S)
                if envelope is None:
                    continue
                if envelope.message.kind == "Shutdown":
                    return 0
                self._handle(
                    Request(
                        sent=envelope.message,
                        buffers=envelope.buffers,
                        received_s=time.monotonic(),
                        link=link,
                        aborts=self._aborts,
                    ),
                    link,
                )
        except NodeLost as error:
            log.warning("%s; the follower ends", error)
            return EXIT_LINK_LOST
        finally:
            self._close()

    def _handle(self, request: Request[Any], link: NodeLink) -> None:
        request.phase = kind = type(request.message).__name__
        try:
            handler = self.handlers.get(type(request.message))
            if handler is None:
                raise ConfigError(f"this run follows {self._store.url}: it cannot do {kind}")
            outcome = handler(request)
        except Exception as error:  # noqa: BLE001 - the boundary: it ends the request only
            code, remedy = classify(error, phase=request.phase)
            log.error("%s failed while %s: %s", kind, request.phase, error)
            link.fail(request.id, code=code, phase=request.phase, message=str(error), remedy=remedy)
        else:
            link.complete(
                request.id, result=outcome.result, tensors=outcome.tensors, buffers=outcome.buffers
            )
        self._aborts.pop(request.id, None)

    def watch(self, orchestrator: Orchestrator, stop: threading.Event) -> None:
        """Publish what is new in the store, until told to stop."""
        said, wait_s = "", self._follow.poll_s
        while not stop.wait(wait_s):
            try:
                if self._look(orchestrator):
                    said, wait_s = "", self._follow.poll_s
            except (SpliceError, TimeoutError, OSError) as error:
                # Each attempt may pause the replicas.
                longer_s = min(2 * wait_s, MOST_WAIT_S) if isinstance(error, JobFailed) else 0.0
                wait_s = max(self._follow.poll_s, longer_s)
                if str(error) != said:
                    log.error("%s; what is served stays, and the store is asked again", error)
                said = str(error)

    def _look(self, orchestrator: Orchestrator) -> bool:
        """Publish the newest version, if it is newer than what is served. Returns whether."""
        newest, status = self._store.newest(), orchestrator.status()
        if status.version is None and status.publication == "poisoned":
            orchestrator.run(Resync())
            return False
        if newest is None or status.version is None or newest <= status.version:
            return False
        version = self.fetch(newest, have=Version.read(self.weights.version.folder))
        orchestrator.run(LoadCheckpoint(checkpoint_dir=str(version.folder.absolute())))
        orchestrator.run(Publish(version=newest))
        log.info("serving %s@%d", version.name, newest)
        for path in (self._folder / "fetched").iterdir():
            if path != version.folder:
                shutil.rmtree(path, ignore_errors=True)
        return True


class Orchestrator:
    """Asks the run's orchestrator, as a client of the run."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link

    def status(self) -> Status:
        """What is served, among others."""
        self._link.send(GetStatus())
        status = self._wait(lambda m: isinstance(m, Status), STATUS_S, again=GetStatus())
        assert isinstance(status, Status)
        return status

    def run(self, job: LoadCheckpoint | Publish | Resync) -> None:
        """Run a job.

        Raises:
            JobFailed: says why.
            TimeoutError: no outcome in time.
        """
        submit = SubmitJob(job_id=new_id("job"), job=job)
        self._link.send(submit)
        ends = (Completed, Failed, Cancelled)
        outcome = self._wait(
            lambda m: isinstance(m, ends) and m.request_id == submit.job_id, JOB_S, again=submit
        )
        if isinstance(outcome, Failed):
            raise outcome.as_error(node=outcome.node)

    def _wait(
        self, is_it: Callable[[AnyMessage], bool], timeout_s: float, *, again: AnyMessage
    ) -> AnyMessage:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            envelope = self._link.recv(timeout_s=RECV_S)
            if envelope is None:
                continue
            if is_it(envelope.message):
                return envelope.message
            if isinstance(envelope.message, Hello):  # the orchestrator is new
                self._link.send(again)
        raise TimeoutError(f"the orchestrator did not answer {again.kind} in {timeout_s:.0f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see `trainer_node.node.main`."""
    parser = argparse.ArgumentParser(prog="python -m trainer_node.follower")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--node-id", default="trainer")
    parser.add_argument("--config", type=Path, required=True, help="TrainerConfig as JSON")
    arguments = parser.parse_args(argv)
    log_to_stderr("follower")
    token = os.environ.get("SPLICE_RUN_TOKEN", "")
    try:
        config = read_json(arguments.config, TrainerConfig)
        assert config.follow is not None
        follower = Follower(config, config.follow, arguments.config.parent)
        own, stop = hello(arguments.node_id, token, config.device), threading.Event()
        link = NodeLink(
            endpoint=arguments.endpoint,
            hello=own,
            urgent={"AbortSend": lambda m: follower.abort(m) if isinstance(m, AbortSend) else None},
        )
        client_hello = Hello(
            role="client",
            node_id=new_id("follower"),
            incarnation=own.incarnation,
            run_token=token,
            pid=os.getpid(),
        )
        with link.start(), NodeLink(endpoint=arguments.endpoint, hello=client_hello) as client:
            watcher = threading.Thread(
                target=follower.watch, args=(Orchestrator(client), stop), daemon=True
            )
            watcher.start()
            code = follower.serve(link)
            stop.set()
            return code
    except (NodeLost, StoreError, TransferError) as error:
        log.error("%s; this node can be started again", error)
        return EXIT_LINK_LOST
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the watcher may wait for the orchestrator, which has ended
