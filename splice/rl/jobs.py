"""The jobs of a loop: train a step and publish it, again after a loss, or do without the batch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from orchestrator.errors import ConfigError, ErrorCode, JobFailed, ProtocolError
from orchestrator.protocol.frames import encode
from orchestrator.protocol.messages import (
    WAITING,
    ForwardResult,
    JobOf,
    KlSpec,
    LossSpec,
    OptimParams,
    Progress,
    Publish,
    PublishResult,
    SubmitJob,
    TrainMerged,
    TrainMergedResult,
)
from splice.client.batches import Batch, Completion, sft_batch
from splice.client.clients import SpliceClient, forward_of
from splice.client.preferences import kl_of
from splice.rl import decisions
from splice.rl.asking import Context
from splice.rl.balance import Meter
from splice.rl.rollouts import Group, Rollouts

log = logging.getLogger("splice.rl")
Answered = Completion | Sequence[Completion]
"""One sequence, or several of the same rollout."""
Parts = list[list[tuple[Answered, float]]]
"""Groups of answers and rewards."""
MakeBatch = Callable[[Sequence[Sequence[tuple[Any, float]]]], Batch]
"""From groups of (`Answered`, reward)."""
Call = Callable[..., Awaitable[Any]]
"""Calls the client, which blocks, on a thread."""
Line = dict[str, Any]
Result = TypeVar("Result", PublishResult, TrainMergedResult, ForwardResult)
WAIT_TURN_S = 1.0
"""A wait for a job on a thread ends this soon after the loop is cancelled."""
BATCH_IS_WHY = (ErrorCode.TRAINER_KILLED, ErrorCode.TOO_LONG)
"""Codes of jobs that fail again with the same batch, but not with the next one."""


class StepJobs:
    """Sends the steps' batches.

    Args:
        optim: returns a step's optimizer parameters, given its number.
    """

    def __init__(
        self,
        context: Context,
        rollouts: Rollouts,
        client: SpliceClient,
        folder: Path,
        *,
        call: Call,
        loss: LossSpec,
        optim: Callable[[int], OptimParams],
        make_batch: MakeBatch,
    ) -> None:
        self._config, self._past, self._log = context.config, context.past, context.log
        self._meter, self._rollouts = context.meter, rollouts
        self._client, self._folder, self._call = client, folder, call
        self._loss, self._optim, self._make_batch = loss, optim, make_batch
        in_reward = loss.kl is not None and loss.kl.in_reward and loss.value is None
        self._kl = loss.kl if in_reward else None
        """What is taken from the rewards before they become advantages."""
        self._announced: dict[int, Batch] = {}
        """Step -> its batch, which the trainer knows before the job."""
        self._asides = 0
        """Batches set aside since the last step."""

    # ------------------------------------------------------------ the batch

    async def batch_of(
        self, number: int, groups: Sequence[Group]
    ) -> tuple[Batch, dict[str, float]]:
        """Return the step's batch, and the metrics of its making.

        Raises:
            ConfigError: no message can carry it; names the step and the remedy.
            JobFailed: the reference's forward pass.
        """
        parts = self._parts_of(groups)
        metrics: dict[str, float] = {}
        if self._kl is not None:
            parts, metrics["kl_mean"] = await self._less_kl(number, parts, self._kl)
        batch = self._announced.pop(number, None) or self._make_batch(parts)
        try:
            job = self._job_of(batch, OptimParams())
            encode(SubmitJob(job_id="x", job=job), batch.buffers)
        except ProtocolError as error:
            raise ConfigError(
                f"the batch of step {number} cannot be sent: {error}. Lower groups_per_step or "
                "group_size, or correct make_batch; then start the loop again"
            ) from error
        return batch, metrics

    def _parts_of(self, groups: Sequence[Group]) -> Parts:
        masks = self._config.overlong == "mask"
        if masks and all(rollout.is_cut for group in groups for rollout in group):
            raise ConfigError(
                'every answer of the step was cut off, and overlong = "mask" leaves all of them '
                "out; raise sampling.max_tokens, then start the loop again"
            )
        parts = [part for group in groups for part in _answers_by_name(group, masks=masks)]
        return without_mixed(parts) if self._config.mixed == "mask" else parts

    async def _less_kl(self, number: int, parts: Parts, kl: KlSpec) -> tuple[Parts, float]:
        """Take from each answer's reward its distance to the base model. Returns also the mean
        distance of a token."""
        every = [s for part in parts for answer, _ in part for s in _sequences(answer)]
        reference = await self._reference(number, sft_batch(every))
        found = kl_of(every, reference, estimator=kl.estimator)
        tokens = sum(sum(s.sampled) if s.sampled else len(s.answer_ids) for s in every)
        each = iter(found)
        less = [
            [
                (answer, reward - kl.coefficient * sum(next(each) for _ in _sequences(answer)))
                for answer, reward in part
            ]
            for part in parts
        ]
        return less, sum(found) / tokens

    async def _reference(self, number: int, batch: Batch) -> Sequence[float]:
        """The base model's log-probs of a batch. A trainer that is lost computes them again."""
        job, buffers = forward_of(
            batch, adapters=False, allowed_token_ids=self._loss.allowed_token_ids
        )
        left = self._config.train_attempts
        while True:
            left -= 1
            job_id = f"loop-{self._past.loop}-{number}-reference-{uuid.uuid4().hex[:8]}"
            try:
                with self._meter.during("training"):
                    return (await self._run(job, job_id, buffers)).logprobs
            except JobFailed as error:
                if error.code is not ErrorCode.NODE_LOST or not left:
                    raise
                log.warning("step %d asks the reference again: %s", number, error)

    def _job_of(self, batch: Batch, optim: OptimParams) -> TrainMerged:
        loss = self._loss
        if self._kl is not None:
            loss = loss.model_copy(update={"kl": None})
        if self._config.max_staleness:
            loss = loss.model_copy(update={"off_policy": True})
        return TrainMerged(
            loss=loss,
            optim=optim,
            tensors=batch.specs,
            mini_batch_sequences=self._config.mini_batch_sequences,
            epochs=self._config.epochs,
        )

    @contextlib.asynccontextmanager
    async def _announcing(self, number: int) -> AsyncIterator[None]:
        """Announce the step within the block, if it gets that far."""
        announcing = asyncio.create_task(self._announce(number))
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.wait([announcing])

    async def _announce(self, number: int) -> None:
        """Tell the trainer of the step's batch as soon as its rollouts are there.

        If something is wrong with them, the step itself reports it.
        """
        never_begun = self._config.mini_batch_sequences or self._loss.needs_other_passes
        if number not in self._rollouts or never_begun:
            return
        try:
            groups = await self._rollouts.of_step(number)
            batch = self._announced.get(number) or self._make_batch(self._parts_of(groups))
            self._announced[number] = batch
            job = self._job_of(batch, OptimParams())
            await self._call(self._client.announce, job, buffers=batch.buffers)
        except Exception as error:  # noqa: BLE001  - a user's reward or make_batch raises anything
            log.info("step %d is not announced: %s", number, error)

    # ------------------------------------------------------------ its job

    async def train(self, line: Line, batch: Batch, *, attempt: int) -> TrainMergedResult | None:
        """Train and publish. A trainer that was lost before the step gets the same batch again.

        Returns: the job's result. None: the batch fails every time, and was set aside.

        Args:
            attempt: counts over all starts of the loop, because a job's id has one outcome.
        """
        number = line["step"]
        job = self._job_of(batch, self._optim(number))
        # The batch is part of the id: an older folder's step is not another batch's outcome.
        digest = hashlib.sha256()
        for buffer in batch.buffers:
            digest.update(buffer)
        last = attempt + self._config.train_attempts - 1
        while True:
            self._log.write("train", durable=True, **line, attempt=attempt)
            try:
                with self._meter.during("training"):
                    place = f"{self._past.loop}-{number}-{attempt}"
                    job_id = f"loop-{place}-{digest.hexdigest()[:8]}"
                    async with self._announcing(number + 1):
                        result = await self._run(job, job_id, batch.buffers)
                self._asides = 0
                return result
            except JobFailed as error:
                is_lost = error.code == ErrorCode.NODE_LOST and not error.steps_taken
                if self._note_failure(line, error, attempt):
                    return None
                if not is_lost or attempt >= last:
                    raise
                attempt += 1
                log.warning("step %d is sent again: %s", number, error)

    def _note_failure(self, line: Line, error: JobFailed, attempt: int) -> bool:
        """Log a failed job, and continue without its batch if that is why. Returns whether it is.

        Raises:
            JobFailed: `most_aside` batches in a row were.
        """
        number = line["step"]
        is_aside = error.code in BATCH_IS_WHY and self._config.on_trainer_killed == "set_aside"
        prompts = sorted(set(line["prompts"]))
        self._log.write(
            "failed",
            durable=True,
            step=number,
            attempt=attempt,
            code=error.code.value,
            steps_taken=error.steps_taken,
            why=str(error)[:1000],
            **({"aside": prompts} if is_aside else {}),
        )
        if not is_aside:
            return False
        self._past.ended(number)
        file = decisions.set_aside(self._folder, number)
        log.error(
            "step %d makes no version: its batch was set aside (%s), with the prompts %s. %s",
            *(number, file, prompts, error),
        )
        self._asides += 1
        if self._asides >= self._config.most_aside:
            raise error
        return True

    async def publish_again(self) -> None:
        """The last step was taken, but no replica serves it: publish it under the next name.

        If the trainer has lost that step since, its batch is sent again.
        """
        job_id = f"loop-{self._past.loop}-{self._past.done}-publish-{uuid.uuid4().hex[:8]}"
        try:
            result = await self._run(Publish(), job_id, ())
        except JobFailed as error:
            if error.code is not ErrorCode.WORK_LOST:
                raise
            log.warning("step %d is made again: %s", self._past.done, error)
            why = str(error)[:1000]
            self._log.write("reopened", durable=True, step=self._past.done, why=why)
            self._past.reopen()
            return
        self._past.made.add(result.version)
        self._past.published = True
        self._log.write(
            "trained", durable=True, step=self._past.done, version=result.version, seconds={}
        )

    async def _run(
        self, job: JobOf[Result], job_id: str, buffers: Sequence[bytes | memoryview]
    ) -> Result:
        """Run a job; a cancelled loop leaves it to the orchestrator."""
        deadline_s = time.monotonic() + self._config.train_timeout_s
        running = asyncio.get_running_loop()
        with _Outage(self._meter) as outage:

            def on_progress(progress: Progress) -> None:  # on the thread that waits
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    running.call_soon_threadsafe(outage.hear, progress)

            given = {"job_id": job_id, "buffers": buffers, "on_progress": on_progress}
            await self._call(self._client.submit, job, **given)
            while True:
                try:
                    result = await self._call(self._client.wait, job_id, timeout_s=WAIT_TURN_S)
                    return cast(Result, result)
                except TimeoutError:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(
                            f"job {job_id} has no outcome after "
                            f"{self._config.train_timeout_s:.0f} s (train_timeout_s); read the "
                            "trainer's log, then start the loop again"
                        ) from None


class _Outage:
    """Meters the time that a job waits for nodes, within a `with` block."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._waiting, self._is_over = meter, contextlib.ExitStack(), False

    def __enter__(self) -> _Outage:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._waiting.close()

    def hear(self, progress: Progress) -> None:
        """Take the job's progress."""
        self._waiting.close()
        if progress.phase == WAITING and not self._is_over:
            log.warning("the job is %s: %s", WAITING, progress.detail.get("text", ""))
            self._waiting.enter_context(self._meter.during("no_node"))


def _sequences(answer: Answered) -> Sequence[Completion]:
    return (answer,) if isinstance(answer, Completion) else answer


def _answers_by_name(group: Group, *, masks: bool) -> Parts:
    """A group's answers and rewards, those of each role apart.

    Args:
        masks: answers that were cut off have no tokens.
    """
    found: dict[str, list[tuple[Answered, float]]] = {}
    for rollout in group:
        several = rollout.sequences
        answer: Answered = several[0] if len(several) == 1 else several
        if masks and rollout.is_cut:
            answer = replace(
                rollout.completion, answer_ids=(), logprobs=(), sampled=(), made_by=(), routing=None
            )
        found.setdefault(rollout.name, []).append((answer, rollout.reward))
    return list(found.values())


def without_mixed(parts: Parts) -> Parts:
    """The same without loss on tokens after an update within their sequence, unless no other token
    has any."""
    left = [[(_unmixed(answer), reward) for answer, reward in part] for part in parts]
    has_loss = any(
        any(s.sampled) if s.sampled else bool(s.answer_ids)
        for part in left
        for answer, _ in part
        for s in _sequences(answer)
    )
    return left if has_loss else parts


def _unmixed(answer: Answered) -> Answered:
    found = []
    for sequence in _sequences(answer):
        if any(version < 0 for version in sequence.made_by):
            sampled = sequence.sampled or (True,) * len(sequence.answer_ids)
            pairs = zip(sampled, sequence.made_by, strict=True)
            sequence = replace(sequence, sampled=tuple(s and made >= 0 for s, made in pairs))
        found.append(sequence)
    return found[0] if isinstance(answer, Completion) else found
