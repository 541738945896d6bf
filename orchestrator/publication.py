"""How `@N` becomes `@N+1`: the publication's states, as a pure function.

    idle -> planned -> durable -> [shadowed] -> paused -> applying -> finished -> verified -> committed -> idle
               |          |            |           |          |           |           |
               +----------+------------+-----------+          +-----------+-----------+
                nothing changed: @N goes on                    poisoned: serves nothing, roll forward

`shadowed` is passed in shadow mode only: every replica has received and verified the update beside its live tensors, and still serves @N.

From `applying` on the live tensors are a mixture of two versions, so the only way is forward: a full resync of the version whose
parts are durable on disk. `poisoned -> planned` is that resync.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from orchestrator.errors import PublicationError


class State(StrEnum):
    """Where a publication stands."""

    IDLE = "idle"
    PLANNED = "planned"
    DURABLE = "durable"
    SHADOWED = "shadowed"
    PAUSED = "paused"
    APPLYING = "applying"
    FINISHED = "finished"
    VERIFIED = "verified"
    COMMITTED = "committed"
    POISONED = "poisoned"


_FORWARD: dict[State, tuple[State, ...]] = {
    State.IDLE: (State.PLANNED,),
    State.POISONED: (State.PLANNED,),
    State.PLANNED: (State.DURABLE,),
    State.DURABLE: (State.PAUSED, State.SHADOWED),
    State.SHADOWED: (State.PAUSED,),
    State.PAUSED: (State.APPLYING,),
    State.APPLYING: (State.FINISHED,),
    State.FINISHED: (State.VERIFIED,),
    State.VERIFIED: (State.COMMITTED,),
    State.COMMITTED: (State.IDLE,),
}
REVERSIBLE = frozenset({State.IDLE, State.PLANNED, State.DURABLE, State.SHADOWED, State.PAUSED})
"""A failure here leaves @N serving, unless the replica was poisoned before."""


def advance(state: State, to: State) -> State:
    """The next state.

    Raises:
        PublicationError: `to` does not follow `state`; a step was left out.
    """
    if to not in _FORWARD[state]:
        raise PublicationError(f"publication cannot go from {state} to {to}; the next step is {' or '.join(_FORWARD[state])}")
    return to


def after_failure(state: State, *, was_poisoned: bool) -> State:
    """Where a failure in `state` leaves the replicas: `idle` (@N goes on) or `poisoned`.

    `committed` and `verified` count as poisoned too: a replica may or may not show the new alias.
    """
    if state in REVERSIBLE and not was_poisoned:
        return State.IDLE
    return State.POISONED


def after_restart(steps: Iterable[tuple[int, str]]) -> tuple[int | None, State]:
    """(version served, state) of an orchestrator that was restarted, from the journaled (version, state or "failed:<state>") steps.

    Replicas that a publication had begun to pause may be in any state by now, so it counts as poisoned. It is committed only where that
    was the last word; whether every replica heard it is not known, which is why all are resynced after a restart in any case.
    """
    served: int | None = None
    begun, poisoned, in_doubt = -1, False, False
    for version, said in steps:
        failed, _, where = said.partition(":")
        state = State(where if failed == "failed" else said)
        if failed == "failed":
            poisoned, in_doubt = after_failure(state, was_poisoned=poisoned) is State.POISONED, False
        elif state is State.COMMITTED:
            served, poisoned, in_doubt = version, False, False
        elif state not in (State.IDLE, State.PLANNED, State.DURABLE, State.SHADOWED):
            in_doubt = True
        begun = version
    if not poisoned and not in_doubt:
        return served, State.IDLE
    return (served if served == begun else None), State.POISONED
