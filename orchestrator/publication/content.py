"""The content of a version as one digest, whatever the order in which its tensors were sent. Pure.

The digest is taken during the pause, so tensors are kept in hashing order.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence

from orchestrator.protocol.messages import Manifest


class Content:
    """The newest digest of each tensor of a manifest. N = tensors, ordered by name.

    Args:
        manifest: all tensors of the model.
        before: of another manifest, as that of another adapter. What both have keeps its digest,
            because a partial update does not bring it.
    """

    def __init__(self, manifest: Manifest, before: Content | None = None) -> None:
        self.manifest = manifest
        names = [f"{t.name} {t.dtype} {t.shape}" for t in manifest.tensors]
        self._by_name = sorted(range(len(names)), key=names.__getitem__)
        self._place = {index: place for place, index in enumerate(self._by_name)}
        self._sorted_N = sorted(names)
        self._names = hashlib.sha256("\n".join(self._sorted_N).encode()).digest()
        known = dict[str, int]()
        if before is not None:
            known.update(zip(before._sorted_N, before._digests_N, strict=True))
        self._digests_N: array.array[int] = array.array(
            "q", (known.get(name, 0) for name in self._sorted_N)
        )

    def take(self, sent: bytes, indices: Sequence[int] | None) -> str:
        """Note the int64 digests of these tensors of the manifest; None: of all.

        Returns: SHA-256, in hexadecimal, of the names, dtypes, shapes and digests of all tensors.
        """
        self._digests_N = self._with(array.array("q", sent), indices)
        return self._hash(self._digests_N)

    def would_be(self, digests: bytes, indices: Sequence[int] | None) -> str:
        """What `take` would return."""
        return self._hash(self._with(array.array("q", digests), indices))

    def _with(self, arrived: array.array[int], indices: Sequence[int] | None) -> array.array[int]:
        if indices is None:
            return array.array("q", map(arrived.__getitem__, self._by_name))
        digests_N = self._digests_N[:]
        for index, digest in zip(indices, arrived, strict=True):
            digests_N[self._place[index]] = digest
        return digests_N

    def _hash(self, digests_N: array.array[int]) -> str:
        return hashlib.sha256(self._names + digests_N.tobytes()).hexdigest()
