"""Numbers that the closed forms of several algorithms share: those of the fixture `pair`."""

from __future__ import annotations

import math

A = 0.5 / (math.sqrt(0.5) + 1e-4)
"""The advantage of the better of two members whose rewards differ by 1."""
LENGTHS = [[1, 1, 0, 0], [1, 1, 1, 1]]
FLAT = [[-1.0] * 4, [-1.0] * 4]
