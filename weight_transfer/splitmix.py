"""Constants of splitmix64 for digests, shared by the torch path and the Triton kernels."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the state."""
MUL_1 = 0xBF58476D1CE4E5B9
MUL_2 = 0x94D049BB133111EB
"""Multipliers of the finaliser."""
SPREAD = 0xD6E8FEB86659FD93
"""Odd factor that lifts 8..32-bit elements into 64 bits."""
