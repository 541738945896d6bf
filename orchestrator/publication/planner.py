"""What a publication sends and in which order: the manifest, and layouts that all nodes share."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from orchestrator.errors import ManifestError, PublicationError
from orchestrator.protocol.messages import (
    Fp8Weights,
    LayoutOrder,
    Manifest,
    ManifestPart,
    PlanPublication,
    PrepareUpdate,
    UseEdges,
    UseLayout,
    WireLayout,
    fp8_manifest,
)
from orchestrator.publication.answers import EncodeAnswer, LayoutAnswer, PrepareAnswer, valid
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.members import Members

log = logging.getLogger("splice.publisher")
EDGES = "every rank sends each worker its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The tensors that an update brings."""

    manifest: Manifest
    base: int | None = None
    """The version that the update completes. None: the update brings all tensors."""
    encoded: EncodeAnswer | None = None
    """Only changed elements travel, on top of `base`."""
    indices: tuple[int, ...] | None = None
    """Indices of its tensors in the whole manifest. None: it is the whole manifest."""

    @property
    def is_part(self) -> bool:
        """Whether it has only the tensors that training changes."""
        return self.indices is not None

    @property
    def nbytes(self) -> int:
        """Bytes that travel to each replica."""
        return self.manifest.nbytes if self.encoded is None else self.encoded.nbytes


class Planner:
    """Plans once for each set of processes, and keeps the plan."""

    def __init__(self, members: Members, config: PublicationConfig) -> None:
        self._members, self._config = members, config
        self._manifest: tuple[str, Manifest] | None = None
        """The trainer's incarnation, and the manifest that it gave."""
        self.planned: dict[str, str] = {}
        """The members of the transfer groups when they planned."""
        self._sent: Manifest | None = None
        """What they planned to send: the trainer's manifest, with FP8 weights if the replicas hold
        such."""
        self.part: Wire | None = None
        """An update of only the changed tensors; None: there is none."""
        self.serves: dict[str, int | None] = {}
        """Replica -> the version that it said it serves, when they planned."""

    async def plan(self, version: int, replicas: Sequence[str]) -> Manifest:
        """Have all replicas check the manifest and agree on a layout; returns what is sent.

        Raises:
            JobFailed | PublicationError: a replica refused the manifest, or no layout is shared.
        """
        manifest = await self._get_manifest()
        if self._sent is None or self.planned != self._members.joined:
            self._sent = await self._agree(version, manifest, replicas)
            self.planned = dict(self._members.joined)
        return self._sent

    def forget(self) -> None:
        """Plan again with the next publication."""
        self.planned, self._manifest, self._sent = {}, None, None

    async def _get_manifest(self) -> Manifest:
        process = self._members.trainer_process
        if self._manifest is not None and self._manifest[0] == process:
            return self._manifest[1]
        request = PlanPublication(deadline_s=self._config.plan_timeout_s)
        completed, _ = await self._members.router.request("trainer", request, phase="planning")
        manifest = valid("trainer", Manifest, completed.result)
        self._manifest = (process, manifest)
        return manifest

    async def _agree(self, version: int, manifest: Manifest, replicas: Sequence[str]) -> Manifest:
        """Find a layout that all replicas and the trainer can use, in the orders of `LayoutOrder`.

        FP8 weights are never reloaded, so they have no manifest order.

        Returns: the manifest of what is sent.

        The part that training changes has its own layout, provided that all replicas complete
        it to the same whole layers.
        """
        why, is_shared, fp8 = "", False, None
        for order in get_args(LayoutOrder):
            if order == "shared" and is_shared:  # the replicas' own is; the trainer refused it
                continue
            if order == "edges" and not self._members.has_edges(replicas):
                continue
            if order == "manifest" and fp8 is not None:
                why += "; FP8 weights have no other layout, so serve this model in bf16"
                break
            began = time.monotonic()
            answers = await self._members.ask_all(
                replicas,
                lambda _, order=order: PrepareUpdate(  # type: ignore[misc]
                    deadline_s=self._config.plan_timeout_s,
                    version=version,
                    manifest=manifest,
                    order=order,
                ),
                phase="planning",
            )
            log.info("the replicas planned in %.1f s", time.monotonic() - began)
            plans = [valid(r, PrepareAnswer, a[0].result) for r, a in answers.items()]
            self.serves = {r: plan.serves for r, plan in zip(answers, plans, strict=True)}
            fp8 = _shared_fp8(dict(zip(answers, plans, strict=True)))
            sent, part = fp8_manifest(manifest, fp8), _shared_part(plans)
            is_shared = all(
                (p.layout, p.keeps) == (plans[0].layout, plans[0].keeps)
                and part in (None, p.changed)
                for p in plans
            )
            if order == "edges" and any(p.keeps is None for p in plans):
                log.info("no edges: a worker keeps what is not rows by columns of a tensor")
                continue
            refused = (
                await self._use_plan(sent, plans[0], part, replicas)
                if is_shared
                else "the replicas planned different ones"
            )
            if refused is None:
                return sent
            log.info("the layout (%s) is not used: %s", order, why := refused)
        raise PublicationError(f"no layout for all replicas and the trainer: {why}")

    async def _use_plan(
        self,
        manifest: Manifest,
        plan: PrepareAnswer,
        part: ManifestPart | None,
        replicas: Sequence[str],
    ) -> str | None:
        """Have the trainer send as the replicas planned; None, or why that is impossible."""
        self.part = None
        why = await self._use_layout(plan, plan.layout, replicas)
        if why is None and part is not None:
            why = await self._use_layout(plan, part.layout, replicas, part.tensors)
            self.part = Wire(manifest=manifest.part(part.tensors), indices=part.tensors)
        return why

    async def _use_layout(
        self,
        plan: PrepareAnswer,
        layout: WireLayout,
        replicas: Sequence[str],
        tensors: tuple[int, ...] | None = None,
    ) -> str | None:
        """Have the trainer send the manifest, or the part of these tensors, in a layout.

        Returns: None, or why the trainer cannot.
        """
        request = UseLayout(
            deadline_s=self._config.plan_timeout_s,
            layout=layout,
            part=tensors,
            fp8=plan.fp8,
            keeps=plan.keeps,
        )
        began = time.monotonic()
        answer, _ = await self._members.router.request(
            "trainer", request, phase="planning the layout"
        )
        what = "layout" if tensors is None else f"layout of the {len(tensors)} tensors that change"
        how = "rank 0 sends whole chunks" if plan.keeps is None else EDGES
        took_s = time.monotonic() - began
        log.info("%s: %s; %s; planned in %.1f s", what, _summary(layout), how, took_s)
        planned = valid("trainer", LayoutAnswer, answer.result)
        if planned.why_not is not None:
            return f"the trainer cannot send it: {planned.why_not}"
        if planned.tables is not None:
            began = time.monotonic()
            await self._members.ask_all(
                replicas,
                lambda _: UseEdges(
                    deadline_s=self._config.plan_timeout_s,
                    changed_only=tensors is not None,
                    tables=planned.tables or (),
                ),
                phase="planning the layout",
            )
            log.info("the workers know their steps after %.1f s", time.monotonic() - began)
        return None


def _shared_fp8(plans: Mapping[str, PrepareAnswer]) -> Fp8Weights | None:
    """What all replicas hold in FP8.

    Raises:
        ManifestError: they hold different weights in FP8.
    """
    first, *others = plans
    for other in others:
        if plans[other].fp8 != plans[first].fp8:
            raise ManifestError(
                f"{first} and {other} hold different weights in FP8; give all replicas the same "
                "--quantization and restart them"
            )
    return plans[first].fp8


def _shared_part(plans: Sequence[PrepareAnswer]) -> ManifestPart | None:
    """The first replica's part, if all replicas complete the changed tensors to the same layers."""
    part = plans[0].changed
    if part is None or any(p.changed is None or p.changed.tensors != part.tensors for p in plans):
        return None
    return part


def _summary(layout: WireLayout) -> str:
    kinds = ("live", "staged", "reload")
    counts = {k: sum(len(c.tensors) for c in layout.chunks if c.kind == k) for k in kinds}
    return f"{len(layout.chunks)} chunks, tensors {counts}, not live: {layout.why_not_live}"
