"""Updates of changed elements: whether the next one may be such, and what the trainer encoded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.protocol.messages import EncodeChanges
from orchestrator.publication.answers import EncodeAnswer, digests_of, valid
from orchestrator.publication.choice import GAIN, Rates, choose, remembers
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.ledger import Ledger
from orchestrator.publication.members import Members
from orchestrator.publication.planner import Wire
from orchestrator.publication.rests import Rests


@dataclass(slots=True, kw_only=True)
class Elements:
    """Decides for each update, and outlives it."""

    members: Members
    ledger: Ledger
    config: PublicationConfig
    rates: Rates = field(default_factory=Rates)
    _encode_s: float = 0.0
    """Seconds of the last encoding."""
    rests: Rests = field(default_factory=Rests)
    """Whole tensors travel meanwhile."""

    def resume(self) -> None:
        """Continue with what another orchestrator measured."""
        self.rates.restore(self.ledger.rates)

    def remembers(self, wire: Wire) -> bool:
        """Whether the trainer keeps what this update brings, for the next one."""
        return remembers(self.config.send, wire.manifest.nbytes, self.rates)

    def note(self, wire: Wire, version: int, seconds: float) -> None:
        """Note how long a transfer took that has succeeded. A proof of the served version, which
        has no bytes, says nothing of others."""
        if wire.encoded is None:
            self.rates.sent(wire.nbytes, seconds)
        elif wire.base != version:
            self.rests.succeeded()
            self.rates.coded(wire.manifest.nbytes, wire.nbytes, self._encode_s + seconds)
        self.ledger.rates = self.rates.kept()

    async def encode(
        self,
        wire: Wire,
        version: int,
        replicas: Sequence[str],
        *,
        serves: Mapping[str, int | None],
        is_due: bool,
        proves: bool,
    ) -> tuple[Wire, str]:
        """Have the trainer encode changed elements, if they may be sent and are worth it.

        Args:
            serves: the version that each replica says it serves.
            is_due: a full update is.
            proves: it may be the served version, to prove that the replicas hold it.

        Returns: what travels, and why.

        Raises:
            JobFailed | NodeLost: the trainer failed. Nothing has paused.
        """
        base, folder = self.ledger.version, self.ledger.folder
        may = self.ledger.may_send_elements(
            version, lives=self.members.lives(replicas), serves=serves, proves=proves
        )
        if base is None or is_due or not may:
            return wire, (
                "not every replica holds the served version, a publication failed, or a full "
                "update is due"
            )
        if self.rests.take():
            return wire, f"changed elements failed {self.rests.failures} times in succession"
        whole_bytes = wire.manifest.nbytes
        choice = choose(self.config.send, whole_bytes, self.rates)
        if not choice.elements:
            return wire, choice.why
        began = time.monotonic()
        unread, specs = self.ledger.unread or (), wire.manifest.tensors
        request = EncodeChanges(
            deadline_s=self.config.transfer_timeout_s,
            version=version,
            base_version=base,
            base_dir=folder,
            prove=self.ledger.is_resumed or version == base,
            changed_only=wire.is_part,
            unread=tuple(i for i, spec in enumerate(specs) if spec.name in unread),
            most_bytes=int(GAIN * whole_bytes),
        )
        completed, buffers = await self.members.router.request(
            "trainer", request, phase="encoding changed elements"
        )
        answer = valid("trainer", EncodeAnswer, completed.result)
        self._encode_s = time.monotonic() - began
        if answer.why_not is not None:
            if answer.nbytes:
                self.rates.coded(whole_bytes, answer.nbytes, self._encode_s)
            return wire, answer.why_not
        if buffers or request.prove:
            olds = digests_of("trainer", (completed, buffers), count=len(specs))
            if not self.ledger.is_content(base, olds, wire.indices):
                why = f"the trainer's adapters of version {base} do not make what is served"
                return wire, f"{why}; they are in {folder}"
        return replace(wire, base=base, encoded=answer), choice.why
