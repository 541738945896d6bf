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
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        names = [f"{t.name} {t.dtype} {t.shape}" for t in manifest.tensors]
        self._by_name = sorted(range(len(names)), key=names.__getitem__)
        self._place = {index: place for place, index in enumerate(self._by_name)}
        self._names = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
        self._digests_N = array.array("q", bytes(8 * len(names)))

    def take(self, sent: bytes, indices: Sequence[int] | None) -> str:
        """Note the int64 digests of these tensors of the manifest; None: of all.

        Returns: SHA-256, in hexadecimal, of the names, dtypes, shapes and digests of all tensors.
        """
        arrived = array.array("q", sent)
        if indices is None:
            self._digests_N = array.array("q", map(arrived.__getitem__, self._by_name))
        else:
            for index, digest in zip(indices, arrived, strict=True):
                self._digests_N[self._place[index]] = digest
        return hashlib.sha256(self._names + self._digests_N.tobytes()).hexdigest()
