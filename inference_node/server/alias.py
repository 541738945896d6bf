"""The alias's rules: which name is served, and how requests under other names are refused. Pure.

`name` is always the current version. `name@N` is served only while N is current. Nothing is served
before `@0`, or while the replica is poisoned. A request for `name@N` is *pinned*: N answers it, or
nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RETRY_AFTER_S = 2
KINDS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    503: "ServiceUnavailableError",
}
"""Status -> OpenAI's type of the error. Others are a BadRequestError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An OpenAI-style error."""

    status: int
    message: str
    retry_after_s: int | None = None
    param: str | None = None

    def body(self) -> dict[str, Any]:
        """The body that OpenAI clients parse."""
        return {
            "error": {
                "message": self.message,
                "type": KINDS.get(self.status, "BadRequestError"),
                "param": self.param,
                "code": self.status,
            }
        }


class Refused(Exception):
    """A request is refused; carries the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True, kw_only=True)
class Alias:
    """One replica's alias. Only `Traffic` changes it, on the event loop's thread."""

    name: str
    version: int | None = None
    poisoned: str | None = None
    """Why the replica serves nothing. None: it serves `version`."""
    moving_to: int | None = None
    """The version that replaces the current one: from the drain until commit, resume or poison."""

    def versioned(self, version: int) -> str:
        """`name@N`."""
        return f"{self.name}@{version}"

    @property
    def current(self) -> str:
        """`name@N` of the current version, or `name` before the first."""
        return self.name if self.version is None else self.versioned(self.version)

    def is_pinned(self, model: str | None) -> bool:
        """Whether a request's model asks for one version."""
        return model is not None and model.startswith(f"{self.name}@")

    def refuse(self, model: str | None) -> Refusal | None:
        """Why a request for `model` (None: the alias) is not served. None: it is admitted."""
        if model is not None and model != self.name and not self.is_pinned(model):
            return self._unknown(model)
        if self.poisoned is not None:
            return self.not_served()
        if self.version is None:
            return Refusal(
                status=503,
                retry_after_s=RETRY_AFTER_S,
                message=f"{self.name} has no version yet: "
                f"the first publication, {self.versioned(0)}, is not done",
            )
        if self.is_pinned(model) and model != self.current:
            return self._unknown(model or "")
        if self.is_pinned(model) and self.moving_to is not None:
            return self.moving()
        return None

    def not_served(self) -> Refusal:
        """The answer to every request while the replica is poisoned."""
        return Refusal(
            status=503,
            retry_after_s=RETRY_AFTER_S,
            message=f"{self.name} is not served here until a full resync: {self.poisoned}",
        )

    def moving(self) -> Refusal:
        """The answer to a pinned request whose version is about to be replaced."""
        return Refusal(
            status=409,
            retry_after_s=1,
            param="model",
            message=f"{self.current} is being replaced by {self.versioned(self.moving_to or 0)}; "
            f"ask for {self.name}, or for the new version",
        )

    def unread(self) -> Refusal:
        """The end of a stream that was not read while the alias moved."""
        return Refusal(
            status=409,
            retry_after_s=1,
            message=f"{self.name} became {self.current} while this stream was not read, so its "
            "tokens could no longer be told apart; ask again, and read faster",
        )

    def _unknown(self, model: str) -> Refusal:
        return Refusal(
            status=404,
            param="model",
            message=f"The model `{model}` does not exist here; "
            f"the current version is `{self.current}` (alias `{self.name}`).",
        )

    # ------------------------------------------------------------ transitions

    def commit(self, version: int) -> None:
        """The replica now serves `version`."""
        self.version, self.poisoned, self.moving_to = version, None, None

    def poison(self, reason: str) -> None:
        """The replica serves nothing."""
        self.poisoned, self.moving_to = reason, None
