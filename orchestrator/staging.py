"""The batch of the next job in line goes to the trainer while a job is running there; at most one, and nothing is journaled.

A job whose batch the trainer has names it (`staged`) instead of carrying it. Whatever happens to it there, or to the trainer, the job is then sent
with its batch: the journal has that until the job's end. So staging changes when a batch travels, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from orchestrator.errors import NodeLost
from orchestrator.protocol.messages import (
    DropBatch,
    ForwardBackwardJob,
    ForwardJob,
    JobSpec,
    StageBatch,
    TrainLoraJob,
    TrainMergedJob,
)
from orchestrator.router import ControlRouter

log = logging.getLogger("splice.orchestrator")
STAGE_BYTES = 256 * 2**20


class BatchAhead:
    """Sends one batch ahead of its job.

    Args:
        most_bytes: of a batch that is sent ahead; 0: none is.
    """

    def __init__(self, *, router: ControlRouter, most_bytes: int) -> None:
        self._router, self._most_bytes = router, most_bytes
        self._job_id, self._incarnation = "", ""

    def wants(self, spec: JobSpec) -> bool:
        """Whether a job of this kind has a batch."""
        return isinstance(spec, TrainMergedJob | TrainLoraJob | ForwardBackwardJob | ForwardJob) and self._most_bytes > 0

    async def stage(self, job_id: str, spec: Any, buffers: Sequence[bytes]) -> None:
        """Send the job's batch, unless the trainer's process has it, or it is too large. Never fails: without it the job takes its batch along."""
        peer = self._router.peers.get("trainer")
        if peer is None or peer.state != "ready" or sum(map(len, buffers)) > self._most_bytes:
            return
        if (job_id, peer.hello.incarnation) == (self._job_id, self._incarnation):
            return
        self._job_id, self._incarnation = job_id, peer.hello.incarnation
        is_forward = isinstance(spec, ForwardJob)
        message = StageBatch(
            job_id=job_id,
            tensors=spec.tensors,
            loss=None if is_forward else spec.loss,
            allowed_token_ids=spec.allowed_token_ids if is_forward else None,
        )
        try:
            await self._router.send("trainer", message, buffers)
        except NodeLost as error:
            self._job_id = ""
            log.info("the batch of %s was not sent ahead: %s", job_id, error)

    async def drop(self, job_id: str) -> None:
        """The job will not run: the trainer need not keep its batch."""
        if job_id != self._job_id:
            return
        self._job_id = ""
        try:
            await self._router.send("trainer", DropBatch(job_id=job_id))
        except NodeLost as error:
            log.info("the trainer could not be told that %s was cancelled: %s", job_id, error)

    def take(self, job_id: str, incarnation: str | None) -> str | None:
        """The id under which this process of the trainer was sent the job's batch; asked once, when the job is sent."""
        if job_id != self._job_id:
            return None
        self._job_id = ""
        return job_id if incarnation == self._incarnation else None
