"""Constants of digests, shared by the torch path and the Triton kernels."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the state."""
MUL_1 = 0xBF58476D1CE4E5B9
MUL_2 = 0x94D049BB133111EB
"""Multipliers of the finaliser."""
SPREAD = 0xD6E8FEB86659FD93
"""Odd factor that lifts 32-bit elements into 64 bits."""
PLACE_1, PLACE_2, PLACE_4 = MUL_1, MUL_2, SPREAD
"""Odd factors. The factor of place j in a word is the product of those whose bits j has."""
PLACES = tuple(
    (PLACE_1 if j & 1 else 1) * (PLACE_2 if j & 2 else 1) * (PLACE_4 if j & 4 else 1) % 2**64
    for j in range(8)
)
