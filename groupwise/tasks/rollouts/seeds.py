"""Derives the seeds of all random numbers of a run.

A member's seed is a hash of its identity (config seed, draw, member, segment, attempt), not of the time of sampling. So results do
not depend on the order of arrival, repeated runs agree, and a resumed run samples the same as an uninterrupted one.
"""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 64-bit number from an identity: the first 8 bytes of the SHA-256 of the parts, with separators."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def member_seed(seed: int, draw: int, member: int, segment: int = 0, attempt: int = 0) -> int:
    """The seed of one member's segment. Distinct draws of the same example have distinct seeds."""
    return derive("member", seed, draw, member, segment, attempt)


def evaluation_seed(seed: int, index: int, member: int, segment: int = 0) -> int:
    """The seed of one sample's segment in an evaluation: the same for every policy, so that evaluations can be compared sample by
    sample.
    """
    suffix = (segment,) if segment else ()
    return derive("evaluation", seed, index, member, *suffix)
