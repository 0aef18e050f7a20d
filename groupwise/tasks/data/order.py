"""The order in which examples are drawn: each once per epoch, in an order that depends only on the seed and the epoch.

The sets of a mixture may occur more or less often: of a set with weight 0.5, each epoch takes the next half, so all of it is drawn
eventually.

The random generator is implemented here because a resume must reproduce the order, which therefore must not depend on the release
of Python or numpy. It is SplitMix64 (Steele, Lea, Flood 2014), seeded through SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Stream:
    """A stream of random numbers that is the same for the same words, on every machine and in every release."""

    def __init__(self, *words: int | str) -> None:
        text = "/".join(str(word) for word in words)
        self._state = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def next(self) -> int:
        """The next integer, in [0, 2**64)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def uniform(self) -> float:
        """A number in [0, 1) with 53 random bits."""
        return (self.next() >> 11) * 2.0**-53

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` − 1, each equally likely."""
        limit = (1 << 64) - (1 << 64) % bound
        while (number := self.next()) >= limit:
            pass
        return number % bound

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items in random order (the first steps of a Fisher-Yates shuffle)."""
        shuffled = list(items)
        for index in range(count):
            other = index + self.below(len(shuffled) - index)
            shuffled[index], shuffled[other] = shuffled[other], shuffled[index]
        return shuffled[:count]

    def among(self, item: Item, others: Sequence[Item], count: int) -> list[Item]:
        """`item` with `count` − 1 different ones of `others` in random order; with fewer if there are fewer."""
        rest = [other for other in others if other != item]
        sampled = self.sample(rest, min(count - 1, len(rest)))
        return self.sample([item, *sampled], len(sampled) + 1)


def example_of_draw(draw: int, examples: int, seed: int, *, shuffle: bool = True) -> int:
    """The index of the example that draw number `draw` of a run gets."""
    epoch, position = divmod(draw, examples)
    return _permutation(examples, seed, epoch)[position] if shuffle else position


@lru_cache(maxsize=4)  # the epoch in progress, and the next one when draws reach ahead
def _permutation(examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(Stream("order", seed, epoch).sample(range(examples), examples))


@dataclass(frozen=True, slots=True)
class Share:
    """A set whose examples occur more or less often than once in an epoch."""

    name: str
    """Name of the set. Its draws depend on this name, not on the other sets."""
    indices: tuple[int, ...]
    """Indices of its examples, among all examples."""
    weight: float
    """Occurrences of each example in an epoch: 0.5 half of them, 2 each twice, 1.5 each once and half of them once more."""

    @property
    def extra_examples(self) -> int:
        """Number of examples that occur once more than the others."""
        count = round(self.weight % 1 * len(self.indices))
        return count if self.weight >= 1 else max(1, count)

    def extra_draws(self, epoch: int, seed: int) -> Iterator[int]:
        """Examples that occur once more: each epoch takes the next ones in a cyclic order."""
        order = Stream("weight", seed, self.name).sample(self.indices, len(self.indices))
        return (
            order[(epoch * self.extra_examples + n) % len(order)]
            for n in range(self.extra_examples)
        )


def restrict_shares(shares: Sequence[Share], indices: Sequence[int]) -> tuple[Share, ...]:
    """The shares reduced to these indices, renumbered from 0."""
    new_index = {old: new for new, old in enumerate(indices)}
    remaining = (
        replace(s, indices=tuple(new_index[n] for n in s.indices if n in new_index)) for s in shares
    )
    return tuple(share for share in remaining if share.indices)


class Order:
    """The examples of all draws: epoch after epoch, each with every example as often as its share says, or once."""

    def __init__(
        self, examples: int, seed: int, *, shuffle: bool = True, shares: Sequence[Share] = ()
    ) -> None:
        self._examples, self._seed, self._shuffle = examples, seed, shuffle
        self._shares = tuple(shares)
        shared = {index for share in shares for index in share.indices}
        repeats = [n for share in shares for n in share.indices for _ in range(int(share.weight))]
        self._always = [n for n in range(examples) if n not in shared] + repeats
        self._epochs: dict[int, list[int]] = {}
        self.length = len(self._always) + sum(share.extra_examples for share in shares)
        """Draws per epoch."""

    def example(self, draw: int) -> int:
        """The index of the example for a draw."""
        if not self._shares:
            return example_of_draw(draw, self._examples, self._seed, shuffle=self._shuffle)
        epoch, turn = divmod(draw, self.length)
        if epoch not in self._epochs:
            adjacent = {n: order for n, order in self._epochs.items() if abs(n - epoch) == 1}
            extra = (
                index for share in self._shares for index in share.extra_draws(epoch, self._seed)
            )
            indices = sorted([*self._always, *extra])
            if self._shuffle:
                indices = Stream("order", self._seed, epoch).sample(indices, len(indices))
            self._epochs = {**adjacent, epoch: indices}
        return self._epochs[epoch][turn]
