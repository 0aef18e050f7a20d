"""Which example a draw gets: every example once per epoch, in an order that only the seed and the epoch decide.

The generator stands here, in a few lines, because an order that a resume must find again may not depend on the release of
Python or numpy. It is SplitMix64 (Steele, Lea, Flood 2014), seeded through SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Stream:
    """A stream of random numbers that is the same for the same words everywhere and for ever."""

    def __init__(self, *words: int | str) -> None:
        text = "/".join(str(word) for word in words)
        self._state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def next(self) -> int:
        """The next number below 2**64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def uniform(self) -> float:
        """A number in [0, 1), of 53 random bits."""
        return (self.next() >> 11) * 2.0**-53

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` − 1, each equally likely."""
        limit = (1 << 64) - (1 << 64) % bound
        while (number := self.next()) >= limit:
            pass
        return number % bound

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items in random order (the first steps of a Fisher-Yates shuffle)."""
        chosen = list(items)
        for index in range(count):
            other = index + self.below(len(chosen) - index)
            chosen[index], chosen[other] = chosen[other], chosen[index]
        return chosen[:count]


def example_of_draw(draw: int, examples: int, seed: int, *, shuffle: bool = True) -> int:
    """The index of the example that draw number `draw` of a run gets, out of so many examples."""
    epoch, position = divmod(draw, examples)
    return _permutation(examples, seed, epoch)[position] if shuffle else position


@lru_cache(maxsize=4)  # the epoch that is under way, and the next one when draws reach ahead
def _permutation(examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(Stream("order", seed, epoch).sample(range(examples), examples))
