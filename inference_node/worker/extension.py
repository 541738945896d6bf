"""Methods that `--worker-extension-cls` adds to every vLLM worker; called through `collective_rpc`.

Each returns plain data. A failure is an answer {"error": {"code", "message"}}, because vLLM passes
on only an exception's text, and one worker's exception hides the other answers. Each argument
`request` is a message as JSON.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ParamSpec

import torch

from inference_node.shared import names
from inference_node.shared.reports import Findings, packed
from inference_node.worker.engine import SpliceEngine
from orchestrator.errors import ManifestError, code_and_remedy
from orchestrator.protocol.messages import (
    ErrorCode,
    Fp8Weights,
    JoinTransferGroup,
    LayoutOrder,
    Manifest,
    OpenRelay,
    PrepareShadow,
    ReceiveWeights,
    SwapWeights,
)
from weight_transfer import edges

_log = logging.getLogger("vllm.splice")
_P = ParamSpec("_P")


def _failure(error: Exception, default: ErrorCode) -> dict[str, Any]:
    """The answer for an exception, with the protocol's code if it is one of ours."""
    code, _ = code_and_remedy(error)
    code = default if code == ErrorCode.INTERNAL else code
    message = f"{type(error).__name__}: {error}"[:3000]
    return {"error": {"code": code.value, "message": message}}


def _answers(
    default: ErrorCode,
) -> Callable[[Callable[_P, dict[str, Any]]], Callable[_P, dict[str, Any]]]:
    """Turn exceptions into answers. Catches all, because this is the edge of the process."""

    def wrap(method: Callable[_P, dict[str, Any]]) -> Callable[_P, dict[str, Any]]:
        @functools.wraps(method)
        def answer(*args: _P.args, **kwargs: _P.kwargs) -> dict[str, Any]:
            began = time.monotonic()
            try:
                worker: Any = args[0]
                with worker._splice_engine.checkpoint_tree():
                    answered = method(*args, **kwargs)
                return {**answered, "seconds": time.monotonic() - began}
            except Exception as error:  # noqa: BLE001 - see the module: every failure is an answer
                _log.exception("splice: %s failed", method.__name__)
                return _failure(error, default)

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
        """Position, device and versions of this worker."""
        engine = self._splice_engine
        packages = {"torch": str(torch.__version__)}
        if engine.device.type == "cuda":
            from inference_node.worker.nccl_group import nccl_version

            packages["nccl"] = nccl_version()
        return {
            "position": engine.position,
            "device": str(engine.device),
            "model_dtype": str(engine.model_config.dtype).removeprefix("torch."),
            "packages": packages,
            "refusals": engine.refusals(),
            "holds_static_fp8": engine.plan.holds_static_fp8(),
        }

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_open_relay(self, request: str) -> dict[str, Any]:
        """Listen for the same worker of the next replica; `request`: an `OpenRelay`."""
        engine = self._splice_engine
        opened = engine.open_relay(OpenRelay.model_validate_json(request))
        return {"rendezvous": opened.model_dump_json(), "position": engine.position}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_join_transfer_group(self, request: str) -> dict[str, Any]:
        """Join the trainer's group; `request`: a `JoinTransferGroup`."""
        message = JoinTransferGroup.model_validate_json(request)
        self.init_weight_transfer_engine({"request": message})  # type: ignore[attr-defined]
        return {}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_leave_transfer_group(self) -> dict[str, Any]:
        """Leave the group."""
        self._splice_engine.leave_transfer_group()
        return {}

    # ------------------------------------------------------------ PrepareUpdate

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_prepare_update(self, manifest: str) -> dict[str, Any]:
        """This worker's `Findings` about a manifest (JSON), and tensors that it cannot place.

        `fp8` has the groups of matrices that it keeps in FP8.
        """
        plan = self._splice_engine.plan
        found = plan.prepare_update(Manifest.model_validate_json(manifest))
        groups = plan.fp8_groups(may_be_unverified=os.environ.get(names.ALLOW_UNVERIFIED) == "1")
        return {**self._planned(found), "fp8": [group.model_dump() for group in groups]}

    def _planned(self, found: Findings) -> dict[str, Any]:
        reasons: dict[str, list[int]] = {}
        for index, why in self._splice_engine.plan.obstacles().items():
            reasons.setdefault(why, []).append(index)
        return {"findings": asdict(found), "obstacles": reasons}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_use_fp8(self, weights: str) -> dict[str, Any]:
        """Answer as `splice_prepare_update`, if these weights travel as FP8.

        Args:
            weights: `Fp8Weights` of all workers as JSON.
        """
        plan = self._splice_engine.plan
        return self._planned(plan.use_fp8(Fp8Weights.model_validate_json(weights)))

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_whole_layers(self, indices: list[int]) -> dict[str, Any]:
        """The indices, with those of all tensors that share a layer with them on this worker."""
        return {"indices": self._splice_engine.plan.whole_layers(indices)}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_lay_out(
        self, reload_indices: list[int], part: list[int] | None, order: LayoutOrder
    ) -> dict[str, Any]:
        """Plan updates of the planned manifest or of a part; `chunks` has [kind, indices] rows."""
        chunks = self._splice_engine.plan.lay_out(
            reload_indices, None if part is None else tuple(part), order=order
        )
        return {"chunks": [[c.kind, list(c.tensors)] for c in chunks]}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_keeps(self) -> dict[str, Any]:
        """What this worker keeps of the planned manifest (`edges.keeps_table`; None: it has no
        boxes), and its number."""
        engine = self._splice_engine
        keeps = engine.plan.keeps()
        text = None if keeps is None else edges.to_text(keeps)
        return {"keeps": text, "position": engine.position}

    @_answers(ErrorCode.PLAN_REFUSED)
    def splice_use_edges(self, tables: list[str], changed_only: bool) -> dict[str, Any]:
        """Receive each update from the trainer's ranks; `tables`: each worker's."""
        engine = self._splice_engine
        if len(tables) <= engine.position:
            raise ManifestError(
                f"the trainer plans for {len(tables)} workers; this is number {engine.position}"
            )
        table = edges.from_text(tables[engine.position], columns=edges.TABLE_COLUMNS)
        engine.plan.use_edges(table, changed_only=changed_only)
        return {}

    # ------------------------------------------------------------ the update

    @_answers(ErrorCode.APPLY_FAILED)
    def splice_receive_weights(self, request: str) -> dict[str, Any]:
        """Receive and load an update, also on top of one that failed. See `_update`.

        In shadow mode: begin to receive on a thread, and return immediately.

        Args:
            request: a `ReceiveWeights`.
        """
        engine, message = self._splice_engine, ReceiveWeights.model_validate_json(request)
        if message.mode == "shadow":
            return self._receive_into_shadow(message)
        engine.drop_shadow()
        engine.plan.choose(changed_only=message.is_part)
        engine.is_elements = message.elements
        return self._update(message)

    @_answers(ErrorCode.APPLY_FAILED)
    def splice_swap_weights(self, request: str) -> dict[str, Any]:
        """Copy the shadow into the live tensors, digest those, free the shadow. See `_update`.

        Args:
            request: a `SwapWeights`.
        """
        try:
            return self._update(SwapWeights.model_validate_json(request))
        finally:
            self._splice_engine.drop_shadow()

    def _update(self, request: ReceiveWeights | SwapWeights) -> dict[str, Any]:
        """Make vLLM's own three calls, then digest the live tensors.

        One call does all four, because each call costs a round trip to this process.
        `phases` has the seconds of each. After an error, `phase` names the step, and `tensors`
        counts the tensors loaded by then.
        """
        engine, seconds, answer = self._splice_engine, dict[str, float](), dict[str, Any]()
        self._end_update()
        steps: dict[str, Callable[[], Any]] = {
            "start": self.start_weight_update,  # type: ignore[attr-defined]
            "apply": lambda: self.update_weights({"request": request}),  # type: ignore[attr-defined]
            "finish": self.finish_weight_update,  # type: ignore[attr-defined]
            "verify": lambda: answer.update(engine.digests().answer()),
        }
        for phase, step in steps.items():
            began = time.monotonic()
            try:
                step()
            except Exception as error:  # noqa: BLE001 - see the module
                _log.exception("splice: an update failed in its phase %s", phase)
                is_last = phase == "verify"
                default = ErrorCode.VERIFICATION_FAILED if is_last else ErrorCode.APPLY_FAILED
                tensors = 0 if phase == "start" else engine.applied.tensors
                self.splice_reset()
                return {**_failure(error, default), "phase": phase, "tensors": tensors}
            seconds[phase] = time.monotonic() - began
        applied = engine.applied
        return {
            **answer,
            "tensors": applied.tensors,
            "nbytes": applied.nbytes,
            "phases": {**applied.seconds, **seconds},
        }

    def _end_update(self) -> None:
        self._splice_engine.reset_weight_update_target()
        self._weight_update_active = False

    @_answers(ErrorCode.INTERNAL)
    def splice_reset(self) -> dict[str, Any]:
        """Put kernel tensors back in place and end the update."""
        layers = self._splice_engine.reset()
        self._end_update()
        return {"layers": layers}

    # ------------------------------------------------------------ shadow mode

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_prepare_shadow(self, request: str) -> dict[str, Any]:
        """Make room for a second copy of what an update brings; `why_not`: why there is none.

        Args:
            request: a `PrepareShadow`.
        """
        message = PrepareShadow.model_validate_json(request)
        self._splice_engine.plan.choose(changed_only=message.is_part)
        self._splice_engine.is_elements = message.elements
        return {"why_not": self._splice_engine.prepare_shadow(message)}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def _receive_into_shadow(self, message: ReceiveWeights) -> dict[str, Any]:
        self._splice_engine.receive_into_shadow(message)
        return {}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_poll_shadow(self) -> dict[str, Any]:
        """`digests` (int64, base64) of what arrived, in manifest order; None while bytes arrive."""
        arrived = self._splice_engine.poll_shadow()
        if arrived is None:
            return {"digests": None}
        return {"digests": packed(arrived.digests), "phases": arrived.seconds}

    @_answers(ErrorCode.TRANSFER_FAILED)
    def splice_drop_shadow(self) -> dict[str, Any]:
        """Drop what the shadow holds or receives."""
        self._splice_engine.drop_shadow()
        return {}
