"""What a version is made of, as one digest that is the same whatever order its tensors were sent in. Pure.

It is taken while generation stands still, so the digests are kept in the order in which they are hashed.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

from orchestrator.protocol.messages import Manifest


class Content:
    """The tensors of a manifest and the digest of each one as it was sent last. N = tensors, in the order of their names.

    Args:
        manifest: all tensors of the model.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        names = [f"{t.name} {t.dtype} {t.shape}" for t in manifest.tensors]
        self._by_name = sorted(range(len(names)), key=names.__getitem__)
        self._place = {index: place for place, index in enumerate(self._by_name)}
        self._names = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
        self._digests_N = array.array("q", bytes(8 * len(names)))

    def take(self, sent: bytes, indices: Sequence[int] | None) -> str:
        """Note the int64 digests of these tensors of the manifest, or of all (None). Returns SHA-256, in hexadecimal, over names, dtypes, shapes and
        digests of all tensors."""
        came = array.array("q", sent)
        if indices is None:
            self._digests_N = array.array("q", map(came.__getitem__, self._by_name))
        else:
            for index, digest in zip(indices, came, strict=True):
                self._digests_N[self._place[index]] = digest
        return hashlib.sha256(self._names + self._digests_N.tobytes()).hexdigest()
