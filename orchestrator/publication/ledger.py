"""Journaled facts: what the replicas serve, how far the publication is, what each version was."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orchestrator.errors import ContentChanged
from orchestrator.protocol.messages import Manifest
from orchestrator.publication.content import Content
from orchestrator.publication.state import State, advance
from orchestrator.storage.journal import Journal

_FACT = "publications"


class Ledger:
    """Outlives every publication."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.state = State.IDLE
        self.version: int | None = None
        """The served version; None before @0 and while poisoned."""
        self.holding: dict[str, str] = {}
        """Replica -> its life when it took the served version."""
        self.serving: dict[str, str] | None = None
        """Replica -> its life when it began to serve the version. None: not known after a restart.
        A failure that changed nothing only takes replicas out of `holding`."""
        self._full_by: str | None = None
        """Incarnation of the trainer that last sent all tensors, or their changed elements."""
        self._since_full = 0
        self._has_failed = False
        """Whether a publication has failed since the served version."""
        self.unread: frozenset[str] | None = None
        """Tensors of the last update with all or changed tensors that could not be read back. None:
        not known."""
        self.rates: dict[str, list[float]] = {}
        """What the last publications took; see `choice.Rates`."""
        self._content: Content | None = None
        """What was sent last."""
        self._sent: tuple[int, str] | None = None
        """A version, and the digest of its content when it was first sent."""

    def resume(self, *, version: int | None, state: State) -> None:
        """Continue where another orchestrator was."""
        self.version, self.state, self._has_failed = version, state, state is State.POISONED
        if kept := self._journal.fact(_FACT):
            self.unread, self.rates = frozenset(kept["unread"]), kept["rates"]
            self._since_full = kept["since_full"]

    @property
    def is_resumed(self) -> bool:
        """Whether this orchestrator has committed nothing yet, but an earlier one has."""
        return self.serving is None and self.version is not None

    def step(
        self, to: State, version: int, *, checkpoint_dir: str | None = None, keep: bool = False
    ) -> None:
        """Enter the next state, durably; `keep`: together with the version's digest.

        A commit is journaled together with what its successor must know.

        Raises:
            PublicationError: `to` does not follow the present state.
        """
        self.state = advance(self.state, to)
        with self._journal.together():
            self._journal.record_publication(
                version=version, state=str(to), checkpoint_dir=checkpoint_dir
            )
            if keep:
                self._keep_digest(version)
            if to is State.COMMITTED and self.unread is not None:
                kept = {"unread": sorted(self.unread), "rates": self.rates}
                self._journal.set_facts({_FACT: kept | {"since_full": self._since_full}})

    def may_send_part(
        self, version: int, *, lives: Mapping[str, str], trainer: str, full_every: int | None
    ) -> bool:
        """Whether the changed tensors suffice to bring these replicas to `version`.

        The other tensors are then those of the last full update: LoRA training changes
        only adapters, whatever checkpoint was loaded since. Therefore every replica must have held
        the served version since its commit, and the same trainer process must have sent
        everything. The same version again is a resync, which needs everything.

        Args:
            lives: replica -> its life.
            trainer: the trainer's incarnation.
            full_every: as in `PublicationConfig`.
        """
        is_held = all(self.holding.get(r) == life for r, life in lives.items())
        is_next = self.version is not None and version != self.version
        return is_next and is_held and self._full_by == trainer and not self.is_due(full_every)

    def is_due(self, full_every: int | None) -> bool:
        """Whether the next update must bring all tensors."""
        return full_every is not None and self._since_full + 1 >= full_every

    def may_send_elements(
        self,
        version: int,
        *,
        lives: Mapping[str, str],
        serves: Mapping[str, int | None],
        proves: bool = False,
    ) -> bool:
        """Whether changed elements suffice: every replica has held the served version since its
        commit, and nothing failed since. A full update that is due comes as whole tensors.

        After a restart of the orchestrator the replicas' own word counts, until something is
        committed. Their digests then prove it. The served version again needs only their word.

        Args:
            serves: the version that each replica says it serves.
            proves: it may be the served version again.
        """
        if self.version is None or self._has_failed or self.unread is None:
            return False
        is_again = version == self.version
        if is_again or self.is_resumed:
            is_held = all(serves.get(replica) == self.version for replica in lives)
        else:
            is_held = all(self.holding.get(r) == life for r, life in lives.items())
        return is_held and (proves or not is_again)

    @property
    def folder(self) -> str | None:
        """Checkpoint of the served version."""
        return None if self.version is None else self._journal.checkpoint_dir(self.version)

    def verified(
        self, version: int, *, is_full: bool, unread: Collection[str] | None = None
    ) -> None:
        """What is to be committed is on the replicas.

        Args:
            is_full: it was of all tensors, whole or as changed elements.
            unread: tensors that could not be read back. None: changed elements say nothing of it.
        """
        if unread is not None:
            is_everywhere = is_full and version != self.version  # else others took it before
            if is_everywhere or self.unread is None:
                self.unread = frozenset()
            self.unread |= frozenset(unread)
        self._since_full = 0 if is_full and unread is not None else self._since_full + 1

    def committed(
        self, version: int, *, holding: dict[str, str], trainer: str, is_full: bool
    ) -> None:
        """All replicas in `holding` serve `version`."""
        self._has_failed = False
        self.version, self.state = version, advance(self.state, State.IDLE)
        self.holding, self.serving = holding, dict(holding)
        if is_full:
            self._full_by = trainer

    def failed(
        self, version: int, error: Exception, *, failed_in: State, left: State, lost: Sequence[str]
    ) -> None:
        """A publication of `version` failed; the replicas `lost` may hold anything."""
        self.state, self._has_failed = left, True
        for replica in lost:
            self.holding.pop(replica, None)
        with self._journal.together():
            self._journal.record_publication(
                version=version, state=f"failed:{failed_in}", detail=str(error)[:2000]
            )
            self._keep_digest(version)
        if self.state is State.POISONED:
            self.version, self.serving = None, {}

    # ------------------------------------------------------------ the content of a version

    def expect(self, manifest: Manifest) -> None:
        """Prepare for an update of this manifest, possibly on top of what was sent before."""
        if self._content is None or self._content.manifest != manifest:
            self._content = Content(manifest, self._content)
        self._content.manifest = manifest

    def take_digests(self, version: int, sent: bytes, indices: Sequence[int] | None) -> None:
        """Compare what the trainer sent with the version's content when it was first sent.

        Raises:
            ContentChanged: the content differs.
        """
        assert self._content is not None
        is_now = self._content.take(sent, indices)
        was = self._journal.digest(version)
        if was is None and self._sent is not None and self._sent[0] == version:
            was = self._sent[1]
        self._sent = (version, was or is_now)
        if was is not None and was != is_now:
            raise ContentChanged(
                f"version {version} is not what it was when it was first sent: the digest of its "
                f"tensors was {was[:16]} and is {is_now[:16]} now. Either its checkpoint changed "
                "on disk, or the trainer computes differently (another device or topology). It is "
                "not served again. Publish the trainer's state as a new version (Publish), or "
                "load another checkpoint first"
            )

    def is_content(self, version: int, digests: bytes, indices: Sequence[int] | None) -> bool:
        """Whether a version's tensors, of which all others were last sent, have these digests."""
        assert self._content is not None
        return self._content.would_be(digests, indices) == self._journal.digest(version)

    def _keep_digest(self, version: int) -> None:
        if self._sent is not None and self._sent[0] == version:
            self._journal.set_digest(*self._sent)

    def forget_unserved(self, version: int) -> None:
        """Allow other content for a version that nobody was ever served."""
        self._sent = None
        self._journal.forget_digest(version)
