"""What each training request does, as jobs of the orchestrator.

Each job's id follows from the request's id, so that a repeated request gets the first outcome.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tinker import types

from orchestrator.errors import REFUSED, ConfigError, ErrorCode, JobFailed
from orchestrator.protocol.config import LoraConfig
from orchestrator.protocol.messages import OptimParams
from splice.client.clients import SpliceClient
from splice.tinker import losses, wire
from splice.tinker.adapters import of_model
from splice.tinker.books import INITIAL, UNKNOWN, Books, Request, Result, json_result
from splice.tinker.config import TinkerConfig
from splice.tinker.jobs import Jobs
from splice.tinker.refused import malformed, unsupported

log = logging.getLogger("splice.tinker")
FOLDER = "tinker"
"""Folder of the server's checkpoints, within the run's."""
ASIDE = f"{FOLDER}/aside"
"""The trainer's state while an old snapshot is served again."""
WHOLE = f"{FOLDER}/whole"
"""The trainer's state without the gradients of a part of a batch."""


class Training:
    """Carries out training requests, on one thread at a time.

    Args:
        lora: the run's adapter; None: the run trains all parameters.
    """

    def __init__(
        self,
        client: SpliceClient,
        books: Books,
        *,
        lora: LoraConfig | None,
        config: TinkerConfig,
    ) -> None:
        self._jobs, self._books, self._lora = Jobs(client, config.job_timeout_s), books, lora
        self._config, self._temperature = config, config.temperature
        self.publishing: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        """Around a publication: waits for samples whose version must not change."""
        self._trainer = threading.Condition()
        """Held by whoever uses the trainer: a request, or an old snapshot."""
        self._asked = 0
        """Old snapshots that wait for the trainer."""
        self._folders = threading.Lock()
        self._kinds: dict[str, Callable[[Request], Result]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._pass,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._publish,
        }

    def prepare(self) -> None:
        """At the first start: keep the run's state for later models, and serve it.

        Another client may have left gradients, or steps that are not served, so the state is
        published again.
        """
        if self._books.fact("initial") is not None:
            self._check_served()
            return
        at = time.time_ns()
        folder = f"{FOLDER}/{INITIAL}-{at}"
        self._save_to(f"tinker-save-{at}", folder)
        self._load_from(f"tinker-load-{at}", folder)  # drops pending gradients
        version = self._jobs.serve_first(f"tinker-serve-{at}")
        is_base = self._lora is not None and self._jobs.is_untrained()
        self._books.set_fact("state", INITIAL)
        self._books.set_served(version, INITIAL)
        self._books.set_fact("newest", version)
        initial = {"folder": folder, "is_base": is_base, "version": version}
        self._books.set_fact("initial", initial)
        self._set_lora(self._lora)

    def work(self, request: Request) -> Result:
        """Carry out a request.

        Raises:
            SpliceError: it was refused, or failed.
        """
        model = self._books.model(request.model_id)
        if model["ended"] is not None:
            raise unsupported(f"model {request.model_id} does not train any more: {model['ended']}")
        publishes = request.kind == "save_weights_for_sampler"
        with self.publishing() if publishes else contextlib.nullcontext(), self._trainer:
            if request.kind == "forward_backward" and not self._books.fact("pending"):
                self._trainer.wait_for(lambda: not self._asked)
            self._put_back()
            try:
                return self._kinds[request.kind](request)
            finally:
                self._trainer.notify_all()

    # ------------------------------------------------------------ the requests

    def _create(self, request: Request) -> Result:
        initial = self._books.fact("initial")
        asked = types.CreateModelRequest.model_validate_json(request.body).lora_config
        seed = None if asked is None or not initial["is_base"] else asked.seed
        try:
            with self._moves_to(INITIAL):
                self._load_from(request.request_id, initial["folder"])
                self._set_lora(self._lora)
                self._adopt(request, seed=seed)
        except JobFailed as error:
            self._books.end_model(request.model_id, f"it was not made ({error.message})")
            raise
        log.info("model %s trains", request.model_id)
        return json_result(type="create_model", model_id=request.model_id)

    def _pass(self, request: Request) -> Result:
        asked = wire.read_pass(wire.parsed_pass(request.body))
        plan = losses.plan(asked, temperature=self._temperature)
        if asked.is_forward_only:
            logprobs = plan.by_datum(self._jobs.logprobs(request.request_id, plan))
            metrics = losses.forward_metrics(plan, logprobs)
        else:
            self._books.set_unsaved(request.model_id, True)
            pending = bool(self._books.fact("pending"))
            self._books.set_fact("pending", True)
            try:
                found, result = self._jobs.backward(request.request_id, plan)
            except JobFailed as error:
                self._books.set_fact("pending", pending and error.code in REFUSED)
                raise
            logprobs = plan.by_datum(found)
            metrics = losses.metrics_of(result, is_linear=plan.is_linear)
        body = wire.pass_output(logprobs, metrics)
        return Result(body=body, media="application/x-protobuf")

    def _step(self, request: Request) -> Result:
        asked = types.OptimStepRequest.model_validate_json(request.body)
        self._check_whole(request)
        self._books.set_unsaved(request.model_id, True)
        with self._moves_to(request.request_id):
            metrics = self._jobs.step(request.request_id, optim_params(asked.optim_params))
        return json_result(type="optim_step", metrics=metrics)

    def _save(self, request: Request) -> Result:
        asked = types.SaveWeightsRequest.model_validate_json(request.body)
        name = asked.path or f"{request.seq_id:06}"
        folder = f"{FOLDER}/{request.request_id}"
        self._save_to(request.request_id, folder)
        path = f"tinker://{request.model_id}/weights/{name}"
        replaced = self._books.find_checkpoint(path)
        self._note(request, path, "training", asked, folder=folder)
        if replaced is not None and replaced["folder"] not in (None, folder):
            self.delete_folder(replaced["folder"])
        self._books.set_unsaved(request.model_id, False)
        return json_result(type="save_weights", path=path)

    def _load(self, request: Request) -> Result:
        asked = types.LoadWeightsRequest.model_validate_json(request.body)
        folder = self._books.checkpoint(asked.path)["folder"]
        with self._moves_to(request.request_id):
            if asked.optimizer:
                self._load_from(request.request_id, folder)
                self._set_lora(self._lora_of(request))
            else:
                self._adopt(request)
                self._jobs.load_weights_alone(request.request_id, folder)
        self._books.forget_failed_passes(request.model_id, before=request.seq_id)
        return json_result(type="load_weights", path=asked.path, model_id=request.model_id)

    def _publish(self, request: Request) -> Result:
        asked = types.SaveWeightsForSamplerRequest.model_validate_json(request.body)
        version = self._snapshot(request.request_id)
        kind = "inflight" if asked.kind == "inflight" else "snapshot"
        if asked.path is None:
            session = self._books.model(request.model_id)["session_id"]
            sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
            self._books.add_sampler(sampler, session_id=session, kind=kind, version=version)
            return json_result(type="save_weights_for_sampler", sampling_session_id=sampler)
        path = f"tinker://{request.model_id}/sampler_weights/{asked.path}"
        self._note(request, path, "sampler", asked, version=version)
        return json_result(type="save_weights_for_sampler", path=path)

    # ------------------------------------------------------------ inside

    @contextlib.contextmanager
    def _moves_to(self, state: str) -> Iterator[None]:
        """Mark a change of the trainer in the block. If the change fails, the trainer's state is
        unknown, so no served version counts as that state."""
        self._books.set_fact("state", f"{state}, unless that failed")
        try:
            yield
        except JobFailed as error:
            if error.code is not ErrorCode.BAD_INPUT:  # no gradients, or they were dropped
                self._books.set_fact("pending", False)
            raise
        self._books.set_fact("state", state)
        self._books.set_fact("pending", False)

    def _lora_of(self, request: Request) -> LoraConfig | None:
        return of_model(self._books.model(request.model_id)["facts"], self._lora)

    def _set_lora(self, lora: LoraConfig | None) -> None:
        """Note which adapter the trainer has."""
        self._books.set_fact("lora", None if lora is None else lora.model_dump(mode="json"))

    def _adopt(self, request: Request, *, seed: int | None = None) -> None:
        """Have the trainer hold an adapter as the model's; a fresh one if it had another, or if
        there is a seed."""
        lora = self._lora_of(request)
        present = self._books.fact("lora")
        if lora is None or (seed is None and present in (None, lora.model_dump(mode="json"))):
            return
        self._jobs.new_adapter(f"{request.request_id}.adapter", lora, seed=seed)
        self._set_lora(lora)

    def _serve(self, request_id: str) -> int:
        """Return the version that serves the trainer's state; publish it if none does."""
        served, state = self._books.fact("served"), self._books.fact("state")
        if served["state"] == state and served["version"] == self._jobs.served_version():
            return int(served["version"])
        return self._publish_state(request_id, state)

    def _publish_state(self, job_id: str, state: str, *, snapshot: int | None = None) -> int:
        """Publish what the trainer holds; returns the version.

        Args:
            snapshot: the version under which these weights were served first; None: this one.
        """
        self._books.forget_served()
        version = self._jobs.publish(job_id)
        if version != self._jobs.served_version():
            # The outcome of an earlier try. Something else was published since.
            version = self._jobs.publish(f"{job_id}-{time.time_ns()}")
        self._books.set_served(version, state, snapshot=snapshot)
        self._durable(None)
        log.info("version %d is served", version)
        return version

    def _check_whole(self, request: Request) -> None:
        """Refuse a step on a part of a batch, and drop the gradients of that part.

        The SDK sends a batch in several passes, and then the step, before it has an answer.

        Raises:
            Refused: a pass since the last step was refused or failed.
        """
        failed = self._books.failed_pass(request.model_id, before=request.seq_id)
        if failed is None:
            return
        if self._books.fact("pending"):
            self._save_to(f"{request.request_id}.whole", WHOLE)
            self._load_from(f"{request.request_id}.drop", WHOLE)
            self._books.set_fact("pending", False)
        self._books.forget_failed_passes(request.model_id, before=request.seq_id)
        raise malformed(
            f"no step was made: forward_backward (request {failed}) was refused or failed since "
            "the last one, so a step would train on a part of the batch. All gradients since then "
            "are dropped; send the whole batch again"
        )

    # ------------------------------------------------------------ folders

    def _save_to(self, job_id: str, folder: str) -> None:
        self._jobs.save(job_id, folder)
        self._durable(folder)

    def _load_from(self, job_id: str, folder: str) -> None:
        self._jobs.load(job_id, folder)
        self._durable(folder)

    def _durable(self, folder: str | None) -> None:
        """Note which of our folders a restarted trainer loads, and delete those that waited."""
        with self._folders:
            doomed = self._books.fact("doomed") or []
            self._books.set_fact("durable", folder)
            self._books.set_fact("doomed", [d for d in doomed if d == folder])
        for name in doomed:
            if name != folder:
                shutil.rmtree(self._config.run_dir / name, ignore_errors=True)

    def delete_folder(self, folder: str) -> None:
        """Delete a checkpoint's folder where this host has it; one that a restarted trainer would
        load goes after the next save, load or publication."""
        with self._folders:
            if folder == self._books.fact("durable"):
                self._books.set_fact("doomed", [*(self._books.fact("doomed") or []), folder])
                return
        shutil.rmtree(self._config.run_dir / folder, ignore_errors=True)

    # ------------------------------------------------------------ snapshots

    def _snapshot(self, request_id: str) -> int:
        """Serve the trainer's state, and keep what serves it again later. Returns the version under
        which it was served first."""
        self._serve(request_id)
        version, keep = self._books.served_snapshot(), self._config.old_snapshots
        self._books.set_fact("newest", version)
        if keep and self._books.snapshot(version) is None:
            folder = f"{FOLDER}/{request_id}.snapshot"
            self._save_to(f"{request_id}.snapshot", folder)
            facts = {"folder": folder, "state": self._books.fact("state")}
            for old in self._books.add_snapshot(version, facts, keep=keep):
                self.delete_folder(old)
        return version

    def serve_again(self, snapshot: int) -> None:
        """Publish an old snapshot's weights as the next version; the trainer keeps its state.

        It waits for the optimizer step of pending gradients, which a load would drop. If the
        process ends meanwhile, the next request puts the trainer's state back.

        Raises:
            Refused: the snapshot is too old, or no optimizer step came.
        """
        found = self._books.snapshot(snapshot)
        if found is None:
            keep = self._config.old_snapshots
            raise unsupported(
                f"this sampler's version {snapshot} cannot be served again: the newest {keep} "
                "snapshots are kept (--old-snapshots). Make a new sampler "
                "(save_weights_and_get_sampling_client)"
            )
        with self._trainer:
            self._asked += 1
            try:
                if not self._trainer.wait_for(self._has_no_gradients, self._config.gap_timeout_s):
                    raise unsupported(
                        f"version {snapshot} cannot be served again while gradients wait for "
                        "optim_step"
                    )
                self._put_back()
                self._again(found)
                self._put_back()
            finally:
                self._asked -= 1
                self._trainer.notify_all()

    def _has_no_gradients(self) -> bool:
        return not self._books.fact("pending")

    def _again(self, found: dict[str, Any]) -> None:
        job = f"tinker-again-{time.time_ns()}"
        if found["state"] != self._books.fact("state"):
            self._save_to(f"{job}-save", ASIDE)
            self._books.set_fact("aside", ASIDE)
            self._load_from(f"{job}-load", found["folder"])
        version = self._publish_state(f"{job}-publish", found["state"], snapshot=found["version"])
        log.info("version %d is served again, as %d", found["version"], version)

    def _put_back(self) -> None:
        """Give the trainer its state back, if an old snapshot has its place."""
        aside = self._books.fact("aside")
        if aside is not None:
            self._load_from(f"tinker-back-{time.time_ns()}", aside)
            self._books.set_fact("aside", None)

    def _check_served(self) -> None:
        """After a restart: the process may have ended between a publication and its note."""
        version = self._jobs.served_version()
        if version is not None and version != self._books.fact("served")["version"]:
            self._books.set_served(version, "unknown", snapshot=UNKNOWN)

    def _note(self, request: Request, path: str, kind: str, asked: Any, **where: Any) -> None:
        self._books.add_checkpoint(
            path,
            model_id=request.model_id,
            kind=kind,
            ttl_s=asked.ttl_seconds,
            facts={"user_metadata": asked.user_metadata},
            **where,
        )


def optim_params(params: Any) -> OptimParams:
    """Return the parameters of a step.

    Raises:
        Refused: an optimizer other than AdamW, or values that AdamW does not take.
    """
    if not isinstance(params, types.AdamParams):
        raise unsupported(f"optimizer {getattr(params, 'type', None)!r}: only AdamW is supported")
    if not params.learning_rate > 0:
        raise unsupported(f"learning_rate is {params.learning_rate}; it must be above 0")
    try:
        return OptimParams(
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm or None,
        )
    except ConfigError as error:
        raise malformed(f"adam_params: {error}") from error
