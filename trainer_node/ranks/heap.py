"""Keeps Python's garbage collector away from the objects that stay.

A full collection looks at every object that it tracks. A trainer has more than half a million of
them, and a collection takes 0.25 to 0.5 s. It may come at any moment, also within a send, and
generation pauses meanwhile. Frozen objects are left out.
"""

from __future__ import annotations

import gc


def freeze() -> None:
    """Leave what is there now out of later collections; called once the trainer is ready."""
    gc.collect()
    gc.freeze()


def free_replaced() -> None:
    """Free what nothing refers to any more, frozen objects too, and freeze the rest."""
    gc.unfreeze()
    freeze()
