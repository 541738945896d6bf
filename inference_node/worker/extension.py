"""Methods that `--worker-extension-cls` adds to every vLLM worker; called through `collective_rpc`.

Each returns plain data. A failure is an answer {"error": {"code", "message"}}, because vLLM passes
on only an exception's text, and one worker's exception hides the other answers.
"""

from __future__ import annotations

import array
import base64
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ParamSpec

import torch

from inference_node.shared import names
from inference_node.worker.engine import SpliceEngine
from orchestrator.errors import code_and_remedy
from orchestrator.protocol.messages import (
    ErrorCode,
    Fp8Weights,
    JoinTransferGroup,
    Manifest,
    PrepareShadow,
    ReceiveWeights,
    SwapWeights,
)

_log = logging.getLogger("vllm.splice")
_P = ParamSpec("_P")


def code_of(error: BaseException, default: ErrorCode) -> ErrorCode:
    """The protocol's code for an exception: its own, if it is one of ours."""
    code, _ = code_and_remedy(error)
    return default if code == ErrorCode.INTERNAL else code


def _answers(
    default: ErrorCode,
) -> Callable[[Callable[_P, dict[str, Any]]], Callable[_P, dict[str, Any]]]:
    """Turn exceptions into answers. Catches all, because this is the edge of the process."""

    def wrap(method: Callable[_P, dict[str, Any]]) -> Callable[_P, dict[str, Any]]:
        @functools.wraps(method)
        def answer(*args: _P.args, **kwargs: _P.kwargs) -> dict[str, Any]:
            began = time.monotonic()
            try:
                return {**method(*args, **kwargs), "seconds": time.monotonic() - began}
            except Exception as error:  # noqa: BLE001 - see the module: every failure is an answer
                _log.exception("splice: %s failed", method.__name__)
                code = code_of(error, default)
                return {
                    "error": {
                        "code": code.value,
                        "message": f"{type(error).__name__}: {error}"[:3000],
                    }
                }

        return answer

    return wrap


class SpliceWorkerExtension:
    """Mixed into vLLM's Worker; `self` is the worker."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    @property
    def _splice_engine(self) -> SpliceEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, SpliceEngine):
            raise RuntimeError(
                "this server was not started with "
                '--weight-transfer-config \'{"backend": "splice"}\''
            )
        return engine

    @_answers(ErrorCode.INTERNAL)
    def splice_info(self) -> dict[str, Any]:
        """Rank, device and versions of this worker."""
        engine = self._splice_engine
        packages = {"torch": str(torch.__version__)}
        if engine.device.type == "cuda":
            from inference_node.worker.nccl_group import nccl_version

            packages["nccl"] = nccl_version()
        return {
            "rank": engine.rank,
            "device": str(engine.device),
            "model_dtype": str(engine.model_config.dtype).removeprefix("torch."),
            "packages": packages,
            "refusals": engine.refusals(),
            "holds_static_fp8": engine.holds_static_fp8(),
        }

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_join(self, request: str) -> dict[str, Any]:
        """Join the trainer's group; `request`: a `JoinTransferGroup` as JSON."""
        message = JoinTransferGroup.model_validate_json(request)
        self.init_weight_transfer_engine({"request": message})  # type: ignore[attr-defined]
        return {}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_leave(self) -> dict[str, Any]:
        """Leave the group."""
        self._splice_engine.leave()
        return {}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_plan_check(self, manifest: str) -> dict[str, Any]:
        """This worker's `Findings` about a manifest (JSON), and tensors that it cannot place.

        `fp8` has the groups of matrices that it keeps in FP8.
        """
        engine = self._splice_engine
        findings = asdict(engine.plan_check(Manifest.model_validate_json(manifest)))
        may_be_unverified = os.environ.get(names.ALLOW_UNVERIFIED) == "1"
        groups = engine.fp8_groups(may_be_unverified=may_be_unverified)
        fp8 = [group.model_dump() for group in groups]
        return {"findings": findings, "obstacles": self._obstacles(), "fp8": fp8}

    def _obstacles(self) -> dict[str, list[int]]:
        reasons: dict[str, list[int]] = {}
        for index, why in self._splice_engine.obstacles().items():
            reasons.setdefault(why, []).append(index)
        return reasons

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_use_fp8(self, weights: str) -> dict[str, Any]:
        """As `splice_plan_check`, of the manifest in which these weights travel as FP8.

        Args:
            weights: `Fp8Weights` of all workers as JSON.
        """
        found = self._splice_engine.use_fp8(Fp8Weights.model_validate_json(weights))
        return {"findings": asdict(found), "obstacles": self._obstacles()}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_whole_layers(self, indices: list[int]) -> dict[str, Any]:
        """The indices, with those of all tensors that share a layer with them on this worker."""
        return {"indices": self._splice_engine.whole_layers(indices)}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_lay_out(
        self, reload_indices: list[int], part: list[int] | None, is_own: bool
    ) -> dict[str, Any]:
        """Plan updates of the planned manifest or of a part; `chunks` has [kind, indices] rows."""
        chunks = self._splice_engine.lay_out(
            reload_indices, None if part is None else tuple(part), is_own=is_own
        )
        return {"chunks": [[c.kind, list(c.tensors)] for c in chunks]}

    @_answers(ErrorCode.APPLY_FAILED)
    def splice_update(self, request: str) -> dict[str, Any]:
        """Receive and load an update, also on top of one that failed. See `_update`.

        Args:
            request: a `ReceiveWeights` as JSON.
        """
        message = ReceiveWeights.model_validate_json(request)
        self._splice_engine.drop_shadow()
        self._splice_engine.choose(changed_only=message.base_version is not None)
        return self._update(message)

    def _update(self, request: ReceiveWeights | SwapWeights) -> dict[str, Any]:
        """Make vLLM's own three calls, then digest the live tensors.

        One call of ours does all four, because each call costs a round trip to this process.
        `phases` has the seconds of each. After an error, `phase` names the step, and `tensors`
        counts the tensors loaded by then.
        """
        engine, seconds, answer = self._splice_engine, dict[str, float](), dict[str, Any]()
        engine.reset_weight_update_target()
        self._weight_update_active = False
        steps: dict[str, Callable[[], Any]] = {
            "start": self.start_weight_update,  # type: ignore[attr-defined]
            "apply": lambda: self.update_weights({"request": request}),  # type: ignore[attr-defined]
            "finish": self.finish_weight_update,  # type: ignore[attr-defined]
            "verify": lambda: answer.update(self._digests()),
        }
        for phase, step in steps.items():
            began = time.monotonic()
            try:
                step()
            except Exception as error:  # noqa: BLE001 - see the module
                _log.exception("splice: an update failed in its phase %s", phase)
                default = (
                    ErrorCode.VERIFICATION_FAILED if phase == "verify" else ErrorCode.APPLY_FAILED
                )
                message = f"{type(error).__name__}: {error}"[:3000]
                tensors = 0 if phase == "start" else engine.applied.tensors
                self.splice_reset()
                return {
                    "error": {"code": code_of(error, default).value, "message": message},
                    "phase": phase,
                    "tensors": tensors,
                }
            seconds[phase] = time.monotonic() - began
        applied = engine.applied
        return {
            **answer,
            "tensors": applied.tensors,
            "nbytes": applied.nbytes,
            "phases": {**applied.seconds, **seconds},
        }

    def _digests(self) -> dict[str, Any]:
        """`WorkerDigests` of the live tensors, as plain data.

        `parts` has [name, [[first_index, size, strides, numel, digest], ...]] rows; `arrived` is
        int64 in base64.
        """
        found = self._splice_engine.digests()
        rows = [
            [name, [[p.key[0], list(p.key[1]), list(p.key[2]), p.numel, p.digest] for p in parts]]
            for name, parts in found.parts.items()
        ]
        arrived = (
            None
            if found.arrived is None
            else base64.b64encode(array.array("q", found.arrived).tobytes()).decode()
        )
        return {"parts": rows, "unverified": found.unverified, "arrived": arrived}

    # ------------------------------------------------------------ shadow mode

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_shadow_open(self, request: str) -> dict[str, Any]:
        """Make room for an update beside the live tensors; `why_not` says why there is none.

        Args:
            request: a `PrepareShadow` as JSON.
        """
        message = PrepareShadow.model_validate_json(request)
        self._splice_engine.choose(changed_only=message.base_version is not None)
        return {"why_not": self._splice_engine.open_shadow(budget_bytes=message.budget_bytes)}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_shadow_start(self, request: str) -> dict[str, Any]:
        """Begin to receive beside the live tensors, on a thread; returns at once.

        Args:
            request: a `ReceiveWeights` as JSON.
        """
        self._splice_engine.start_shadow(ReceiveWeights.model_validate_json(request))
        return {}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_shadow_poll(self) -> dict[str, Any]:
        """`digests` (int64, base64) of what arrived, in manifest order; None while bytes arrive."""
        arrived = self._splice_engine.poll_shadow()
        if arrived is None:
            return {"digests": None}
        packed = base64.b64encode(array.array("q", arrived.digests).tobytes()).decode()
        return {"digests": packed, "phases": arrived.seconds}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_shadow_drop(self) -> dict[str, Any]:
        """Drop what arrived, or arrives, beside the live tensors."""
        self._splice_engine.drop_shadow()
        return {}

    @_answers(ErrorCode.APPLY_FAILED)
    def splice_shadow_swap(self, request: str) -> dict[str, Any]:
        """Copy what arrived into the live tensors, digest those, free the rest. See `_update`.

        Args:
            request: a `SwapWeights` as JSON.
        """
        try:
            return self._update(SwapWeights.model_validate_json(request))
        finally:
            self._splice_engine.drop_shadow()

    @_answers(ErrorCode.INTERNAL)
    def splice_reset(self) -> dict[str, Any]:
        """Put kernel tensors back in place and end the update."""
        layers = self._splice_engine.reset()
        self._splice_engine.reset_weight_update_target()
        self._weight_update_active = False
        return {"layers": layers}
