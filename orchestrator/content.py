"""What a version is made of, as one digest that is the same whatever order its tensors were sent in. Pure."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

from orchestrator.protocol.messages import Manifest


class Content:
    """The tensors of a manifest and the digest of each one as it was sent last. N = tensors.

    Args:
        manifest: all tensors of the model.
    """

    def __init__(self, manifest: Manifest) -> None:
        names = [f"{t.name} {t.dtype} {t.shape}" for t in manifest.tensors]
        self._by_name = sorted(range(len(names)), key=names.__getitem__)
        self._names = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
        self._digests_N = array.array("q", bytes(8 * len(names)))

    def take(self, sent: bytes, indices: Sequence[int] | None) -> None:
        """Note the int64 digests of these tensors; None: of all."""
        for index, digest in zip(
            range(len(self._digests_N)) if indices is None else indices, array.array("q", sent), strict=True
        ):
            self._digests_N[index] = digest

    def digest(self) -> str:
        """SHA-256, in hexadecimal, over names, dtypes, shapes and digests in the order of the names."""
        ordered = array.array("q", map(self._digests_N.__getitem__, self._by_name))
        return hashlib.sha256(self._names + ordered.tobytes()).hexdigest()
