"""How `@N` becomes `@N+1`: the publication's states, as a pure function.

    idle -> planned -> durable -> [shadowed] -> paused     nothing changed: after a failure @N
                                                  |        continues (idle)
                                                  v
        applying -> finished -> verified -> committed      after a failure: poisoned, serves
                                                  |        nothing, rolls forward
                                                  v
                                                 idle

Only shadow mode passes `shadowed`: every replica has received and verified the update next to its
live tensors, and still serves @N.

From `applying` on, the live tensors are a mixture of two versions, so the only way is forward: a
full resync of the version whose parts are durable on disk. `poisoned -> planned` is that resync.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from orchestrator.errors import PublicationError


class State(StrEnum):
    """How far a publication is."""

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
"""After a failure in these states @N continues, unless the replica was poisoned before."""


def advance(state: State, to: State) -> State:
    """The next state.

    Raises:
        PublicationError: `to` does not follow `state`.
    """
    if to not in _FORWARD[state]:
        allowed = " or ".join(_FORWARD[state])
        raise PublicationError(
            f"publication cannot go from {state} to {to}; the next step is {allowed}"
        )
    return to


def after_failure(state: State, *, was_poisoned: bool) -> State:
    """Where a failure in `state` leaves the replicas: `idle` (@N continues) or `poisoned`.

    `verified` and `committed` also lead to `poisoned`, because a replica may show either alias.
    """
    if state in REVERSIBLE and not was_poisoned:
        return State.IDLE
    return State.POISONED


def after_restart(steps: Iterable[tuple[int, str]]) -> tuple[int | None, State]:
    """The served version and the state of a restarted orchestrator.

    A publication that had begun to pause replicas counts as poisoned, because they may be in any
    state by now. It counts as committed only if that was its last step. Even then some replicas may
    not know, so all are resynced after a restart.

    Args:
        steps: the journaled versions, each with its state or "failed:<state>".
    """
    served: int | None = None
    begun, poisoned, in_doubt = -1, False, False
    for version, step in steps:
        failed, _, where = step.partition(":")
        state = State(where if failed == "failed" else step)
        if failed == "failed":
            poisoned = after_failure(state, was_poisoned=poisoned) is State.POISONED
            in_doubt = False
        elif state is State.COMMITTED:
            served, poisoned, in_doubt = version, False, False
        elif state not in (State.IDLE, State.PLANNED, State.DURABLE, State.SHADOWED):
            in_doubt = True
        begun = version
    if not poisoned and not in_doubt:
        return served, State.IDLE
    return (served if served == begun else None), State.POISONED
