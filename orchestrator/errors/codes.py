"""The codes of failures, and what to do about each."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a job or request failed. `Failed.remedy` tells the reader what to do."""

    BAD_INPUT = "bad_input"
    TOO_LONG = "too_long"
    NOT_READY = "not_ready"
    PLAN_REFUSED = "plan_refused"
    TRAINING_FAILED = "training_failed"
    NON_FINITE_GRADIENT = "non_finite_gradient"
    LOGPROB_GAP = "logprob_gap"
    CHECKPOINT_FAILED = "checkpoint_failed"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    TRANSFER_ABORTED = "transfer_aborted"
    APPLY_FAILED = "apply_failed"
    VERIFICATION_FAILED = "verification_failed"
    NODE_LOST = "node_lost"
    TRAINER_KILLED = "trainer_killed"
    WORK_LOST = "work_lost"
    BASE_MISSING = "base_missing"
    PROTOCOL = "protocol"
    TOO_MANY_JOBS = "too_many_jobs"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


_PUBLISH_AGAIN = "Read the node's log, then submit the job under a new id to roll forward."
_JOIN_AGAIN = "Open a new transfer group and publish the version again."
REMEDIES: dict[ErrorCode, str] = {
    ErrorCode.BAD_INPUT: "Correct the request, then submit it again.",
    ErrorCode.TOO_LONG: "Leave the sequence out or cut it, or start the trainer with recompute = "
    "'auto' and more parallel.context, tensor or pipeline.",
    ErrorCode.NOT_READY: "Send the request named above first.",
    ErrorCode.PLAN_REFUSED: "Trainer and served model differ; start both from the same checkpoint "
    "and dtype, then plan the publication again.",
    ErrorCode.TRAINING_FAILED: "See the trainer's log; LoadCheckpoint the last durable version and "
    "submit again.",
    ErrorCode.NON_FINITE_GRADIENT: "Look at the batch's advantages and the learning rate; send the "
    "next batch.",
    ErrorCode.LOGPROB_GAP: "Find the cause; no step was taken. To train all the same, raise "
    "loss.max_logprob_gap.",
    ErrorCode.CHECKPOINT_FAILED: "Fix the disk or folder named above. LoadCheckpoint the last "
    "durable version before training, because the state in memory may be a step ahead of it.",
    ErrorCode.TRANSFER_FAILED: _JOIN_AGAIN,
    ErrorCode.TRANSFER_TIMEOUT: _JOIN_AGAIN,
    ErrorCode.TRANSFER_ABORTED: _JOIN_AGAIN,
    ErrorCode.APPLY_FAILED: _PUBLISH_AGAIN,
    ErrorCode.VERIFICATION_FAILED: _PUBLISH_AGAIN,
    ErrorCode.NODE_LOST: "Restart the node, then submit the job again under a new id.",
    ErrorCode.WORK_LOST: "The trainer holds its last durable state again. Make what was lost "
    "again, or load a checkpoint; then submit the job under a new id.",
    ErrorCode.TRAINER_KILLED: "The end of the trainer's log says why: host memory, a CUDA fault, "
    "your loss. Leave this batch out, or make its sequences shorter. The trainer continues from "
    "its last durable state.",
    ErrorCode.INTERNAL: "This is a defect of splice: see the node's log, and report it.",
}
"""Default remedy for each code."""
REFUSED = frozenset({ErrorCode.BAD_INPUT, ErrorCode.TOO_LONG, ErrorCode.NOT_READY})
"""Codes of requests that the trainer refused: they have changed nothing."""
