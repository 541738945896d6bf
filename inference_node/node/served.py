"""A replica's state: what it serves, and which version waits for its commit. Pure.

    receive in place      ... -> received -> committed (confirmed at once)
    receive, then swap    ... -> in shadow -> received -> committed
                                        -> committed, not yet confirmed: by a single replica itself

A new update replaces what was received before, in shadow memory too. A poisoned replica serves
nothing until its next commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One replica's state; each transition returns the next one."""

    version: int | None = None
    """The version committed last. None: none yet."""
    poisoned: str | None = None
    """Why the replica serves nothing. None: it serves `version`."""
    received: int | None = None
    """The version whose verified live tensors wait for a commit."""
    in_shadow: int | None = None
    """The version in shadow memory that waits for its swap."""
    unconfirmed: int | None = None
    """The version committed with its swap, until the orchestrator confirms it."""
    is_planned: bool = False
    """A manifest is planned."""
    has_part: bool = False
    """Updates of only the changed tensors are planned."""

    # ------------------------------------------------------------ questions

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return self.version is not None and self.poisoned is None

    @property
    def is_undecided(self) -> bool:
        """Whether a version waits for the orchestrator."""
        return (self.received, self.in_shadow, self.unconfirmed) != (None, None, None)

    @property
    def held(self) -> int | None:
        """The version that is served, if nothing else waits for the orchestrator."""
        return self.version if self.is_serving and not self.is_undecided else None

    def is_committed(self, version: int) -> bool:
        """Whether `version` is served already."""
        return self.is_serving and self.version == version

    def why_no_base(self, base: int | None, *, is_part: bool = True) -> str | None:
        """Why an update on top of `base` is impossible; None if it is possible, or needs no base.

        Args:
            is_part: it brings the changed part only.
        """
        if base is None:
            return None
        if self.poisoned is not None:
            return (
                f"this partial update requires version {base}, but the replica is poisoned: "
                f"{self.poisoned}"
            )
        if self.version != base:
            serves = "nothing" if self.version is None else self.version
            return f"this partial update requires version {base}; the replica serves {serves}"
        if self.has_part or not is_part:
            return None
        return "no partial update is planned; send PrepareUpdate first"

    def why_given_up(self, reason: str) -> str | None:
        """The reason with which an abort between requests poisons the replica; None: none."""
        if self.received is not None:
            return f"version {self.received} was received but not committed: {reason}"
        if self.unconfirmed is not None:
            return (
                f"version {self.unconfirmed} was committed with its swap, then given up: {reason}"
            )
        return None

    # ------------------------------------------------------------ transitions

    def planned(self, *, has_part: bool) -> Served:
        """A manifest was planned."""
        return replace(self, is_planned=True, has_part=has_part)

    def begun(self) -> Served:
        """An update begins; the one before it no longer counts."""
        return replace(self, received=None, in_shadow=None)

    def arrived(self, version: int) -> Served:
        """The live tensors are those of `version`, verified."""
        return replace(self, received=version)

    def arrived_in_shadow(self, version: int) -> Served:
        """All of `version` is in shadow memory."""
        return replace(self, in_shadow=version)

    def dropped(self) -> Served:
        """Shadow memory is empty."""
        return replace(self, in_shadow=None)

    def swapped_and_committed(self, version: int) -> Served:
        """A replica committed `version` without the orchestrator's word."""
        return replace(self, version=version, unconfirmed=version)

    def committed(self, version: int) -> Served:
        """`version` is served."""
        return replace(self, version=version, received=None, poisoned=None, unconfirmed=None)

    def confirmed(self) -> Served:
        """The orchestrator knows what is served."""
        return replace(self, unconfirmed=None)

    def now_poisoned(self, reason: str) -> Served:
        """Nothing is served until the next commit."""
        return replace(self, poisoned=reason, received=None, unconfirmed=None)
