"""Derives the seeds of all random numbers of a run.

A member's seed is a hash of what it is (config seed, draw, member, segment, attempt), never of when it was drawn. So results do not
depend on the order of arrival, repeated runs agree, and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 64-bit number from what something is: SHA-256 of the parts, separated, first 8 bytes."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def member_seed(seed: int, draw: int, member: int, segment: int = 0, attempt: int = 0) -> int:
    """The seed of one member's segment. Distinct draws of the same example have distinct seeds."""
    return derive("member", seed, draw, member, segment, attempt)


def evaluation_seed(seed: int, index: int, member: int, segment: int = 0) -> int:
    """The seed of one sample's segment in an evaluation: the same for every policy, so that they can be paired."""
    later = (segment,) if segment else ()
    return derive("evaluation", seed, index, member, *later)
