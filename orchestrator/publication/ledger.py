"""Journaled facts: what the replicas serve, how far the publication is, what each version was."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orchestrator.errors import ContentChanged
from orchestrator.protocol.messages import Manifest
from orchestrator.publication.content import Content
from orchestrator.publication.state import State, advance
from orchestrator.storage.journal import Journal


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
        self.unread: frozenset[str] = frozenset()
        """Tensors of the last update with all or changed tensors that could not be read back."""
        self._content: Content | None = None
        """What was sent last."""
        self._sent: tuple[int, str] | None = None
        """A version, and the digest of its content when it was first sent."""

    def step(
        self, to: State, version: int, *, checkpoint_dir: str | None = None, keep: bool = False
    ) -> None:
        """Enter the next state, durably; `keep`: together with the version's digest.

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

    def may_send_elements(self, version: int, *, lives: Mapping[str, str]) -> bool:
        """Whether changed elements suffice: every replica has held the served version since its
        commit, and nothing failed since. A full update that is due comes as whole tensors."""
        is_held = all(self.holding.get(r) == life for r, life in lives.items())
        is_next = self.version is not None and version != self.version
        return is_next and is_held and not self._has_failed

    @property
    def folder(self) -> str | None:
        """Checkpoint of the served version."""
        return None if self.version is None else self._journal.checkpoint_dir(self.version)

    def committed(
        self,
        version: int,
        *,
        holding: dict[str, str],
        trainer: str,
        is_full: bool,
        unread: Collection[str] | None = None,
    ) -> None:
        """All replicas in `holding` serve `version`.

        Args:
            is_full: it was of all tensors, whole or as changed elements.
            unread: tensors that could not be read back. None: changed elements say nothing of it.
        """
        self._has_failed = False
        if unread is not None:
            is_everywhere = is_full and version != self.version  # else others took it before
            self.unread = frozenset(unread) | (frozenset() if is_everywhere else self.unread)
        self.version, self.state = version, advance(self.state, State.IDLE)
        self.holding, self.serving = holding, dict(holding)
        self._since_full = 0 if is_full and unread is not None else self._since_full + 1
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

    def has_sent(self, digests: bytes, indices: Sequence[int] | None) -> bool:
        """Whether these tensors were last sent with these digests."""
        return self._content is not None and self._content.has(digests, indices)

    def _keep_digest(self, version: int) -> None:
        if self._sent is not None and self._sent[0] == version:
            self._journal.set_digest(*self._sent)

    def forget_unserved(self, version: int) -> None:
        """Allow other content for a version that nobody was ever served."""
        self._sent = None
        self._journal.forget_digest(version)
