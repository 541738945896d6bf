"""The alias's rules as a table."""

from __future__ import annotations

import pytest

from inference_node.server.alias import Alias


def alias(
    version: int | None = 3, *, poisoned: str | None = None, moving_to: int | None = None
) -> Alias:
    return Alias(name="tiny", version=version, poisoned=poisoned, moving_to=moving_to)


@pytest.mark.parametrize(
    ("state", "model", "status"),
    [
        (alias(), "tiny", None),
        (alias(), None, None),
        (alias(), "tiny@3", None),
        (alias(), "tiny@2", 404),
        (alias(), "tiny@4", 404),
        (alias(), "tiny@", 404),
        (alias(), "tiny@3 ", 404),
        (alias(), "other", 404),
        (alias(), "tinyish", 404),
        (alias(None), "tiny", 503),
        (alias(None), "tiny@0", 503),
        (alias(None), "other", 404),
        (alias(poisoned="half a version"), "tiny", 503),
        (alias(poisoned="half a version"), "tiny@3", 503),
        (alias(moving_to=4), "tiny", None),
        (alias(moving_to=4), "tiny@3", 409),
    ],
)
def test_who_is_served(state: Alias, model: str | None, status: int | None) -> None:
    refusal = state.refuse(model)
    assert (refusal.status if refusal else None) == status


def test_404_names_the_current_version_and_503_says_why_and_when() -> None:
    missing = alias().refuse("tiny@1")
    assert (
        missing is not None
        and "`tiny@3`" in missing.message
        and missing.body()["error"]["code"] == 404
    )
    poisoned = alias(poisoned="the trainer died").refuse("tiny")
    assert (
        poisoned is not None and "the trainer died" in poisoned.message and poisoned.retry_after_s
    )


def test_a_commit_heals_and_ends_the_move() -> None:
    state = alias(poisoned="x", moving_to=4)
    state.commit(4)
    assert (state.version, state.poisoned, state.moving_to, state.current) == (
        4,
        None,
        None,
        "tiny@4",
    )
