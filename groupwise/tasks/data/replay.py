"""The replay buffer: prompts that have been solved before, kept to be drawn again.

Each entry has the statistics of its prompt's groups: their number n, the running mean μ of their mean rewards, and the variance
(Welford 1962). Entries are chosen by the upper confidence bound (UCB1; Auer, Cesa-Bianchi, Fischer 2002, §2)

    score = μ + exploration · √(ln Σn / n)        entries with n = 0 first, the older of equals first

or, with probability `mix_exploit_ratio`, by the best μ only. Failures are credited like successes, so an entry that was solved by
luck sinks. A full buffer evicts the entry with the smallest μ, and only for a new entry that is strictly better. Evicted or refused
prompts may be added later.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal

from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.core.types import Prompt
from groupwise.tasks.data.order import Stream

CAPACITY = 4000
EXPLORATION = 1.0
EXPLOIT_RATIO = 0.7


class ReplayConfig(Strict):
    """The section `data.replay`; `{}` takes all defaults."""

    refused: ClassVar[Mapping[str, str]] = {"warmup": "here it is data.replay.warmup_entries"}

    mode: Literal["prompts", "completions"] = setting(
        "prompts",
        "prompts: a solved prompt is answered again. completions: the group that last solved it is trained again, with the "
        "log-probabilities with which it was sampled.",
    )
    capacity: int = setting(CAPACITY, "Maximum number of prompts that are kept.", ge=1)
    exploration: float = setting(
        EXPLORATION,
        "C of the upper confidence bound: the weight of prompts that are rarely drawn.",
        ge=0,
    )
    mix_exploit_ratio: float = setting(
        EXPLOIT_RATIO,
        "Probability of drawing the prompt with the best mean instead of that with the best upper confidence bound.",
        ge=0,
        le=1,
    )
    success_threshold: float | None = setting(
        0.999,
        "A prompt is kept if a member of its group reaches this; see success_part. null: only callbacks choose what is kept.",
    )
    success_part: str | None = setting(
        None,
        "Name of the reward part that success_threshold is about; null: the first whose name contains accuracy, else the total.",
    )
    max_share: float = setting(
        0.5, "Maximum share of a step's prompts that are drawn again.", gt=0, le=1
    )
    warmup_entries: int = setting(500, "Prompts that must be kept before any is drawn again.", ge=1)
    at_temperature_floor: bool = setting(
        False, "Draw nothing again until sampler.temperature_schedule has reached its floor."
    )

    def conflicts(self) -> Iterator[Conflict]:
        """A warm-up that never ends, and a threshold of an unknown part."""
        if self.warmup_entries > self.capacity:
            yield Conflict(
                f"warmup_entries is {self.warmup_entries}, but capacity is {self.capacity}, so that nothing would ever be drawn "
                "again. Lower the one or raise the other.",
                ("warmup_entries", "capacity"),
            )
        if self.success_part is not None and self.success_threshold is None:
            yield Conflict(
                f"success_part is {self.success_part}, which has no effect while success_threshold is null. Set a threshold, or "
                "leave the part out.",
                ("success_part", "success_threshold"),
            )


@dataclass(slots=True)
class Entry:
    """A prompt with the statistics of its groups."""

    key: str
    payload: Any
    """The caller's data for the prompt, as plain JSON; the buffer only keeps it."""
    count: int = 0
    """Number n of groups (or single rewards) that were credited."""
    mean: float = 0.0
    """Mean of these rewards: μ."""
    squares: float = 0.0
    """Σ (reward − μ)², by Welford's recurrence."""

    @property
    def variance(self) -> float:
        """Population variance of the rewards seen; 0 with fewer than two."""
        return self.squares / self.count if self.count > 1 else 0.0

    def credit(self, reward: float) -> None:
        """Add one reward to the statistics."""
        self.count += 1
        delta = reward - self.mean
        self.mean += delta / self.count
        self.squares += delta * (reward - self.mean)


def key_of(prompt: Prompt) -> str:
    """Equal for prompts with the same roles and the same text up to white space: 32 hexadecimal digits."""
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    messages_key = [
        [m.get("role", ""), " ".join(str(m.get("content") or "").split())] for m in messages
    ]
    return hashlib.sha256(json.dumps(messages_key).encode()).hexdigest()[:32]


class ReplayBuffer:
    """Prompts with reward statistics. It is deterministic; randomness comes only from the stream passed to `sample`."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        exploration: float = EXPLORATION,
        mix_exploit_ratio: float = EXPLOIT_RATIO,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1.")
        if not 0 <= mix_exploit_ratio <= 1:
            raise ValueError(f"mix_exploit_ratio is {mix_exploit_ratio}; it is a probability.")
        self.capacity = capacity
        self.exploration = exploration
        self.mix_exploit_ratio = mix_exploit_ratio
        self.evicted = 0
        """Entries evicted for better ones."""
        self.refused = 0
        """New entries that were not added: reward not finite, or no better than the worst entry."""
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, prompt: object) -> bool:
        return key_of(prompt) in self._entries  # pyright: ignore[reportArgumentType]

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries, oldest first."""
        return tuple(self._entries.values())

    def add(self, prompt: Prompt, reward: float | None = None, payload: Any = None) -> bool:
        """Add a prompt; `reward` is None if it is not known yet. Returns True if it is a new entry.

        If the prompt is already in the buffer, it is credited with the reward and gets the new payload.
        """
        key = key_of(prompt)
        if reward is not None and not math.isfinite(reward):
            self.refused += 1
            return False
        existing = self._entries.get(key)
        if existing is not None:
            existing.payload = payload if payload is not None else existing.payload
            if reward is not None:
                existing.credit(reward)
            return False
        if len(self) >= self.capacity and not self._made_room(reward):
            self.refused += 1
            return False
        entry = self._entries[key] = Entry(key, payload)
        if reward is not None:
            entry.credit(reward)
        return True

    def add_group(self, prompt: Prompt, rewards: Iterable[float], payload: Any = None) -> bool:
        """Add the prompt of a scored group, with the mean of its rewards; see `add`."""
        values = list(rewards)
        return self.add(prompt, fmean(values) if values else math.nan, payload)

    def update(self, prompt: Prompt, reward: float) -> bool:
        """Credit a prompt with a reward, high or low, if it is kept and the reward is finite. Returns True if it was credited."""
        entry = self._entries.get(key_of(prompt))
        if entry is None or not math.isfinite(reward):
            return False
        entry.credit(reward)
        return True

    def sample(self, count: int, stream: Stream) -> list[Entry]:
        """Draws `count` different entries, or all if there are fewer: each time the best remaining one, by mean or by bound."""
        # An entry without rewards sorts last (mean −∞): it is not known to be good.
        by_mean = sorted(
            self._entries.values(), key=lambda entry: -(entry.mean if entry.count else -math.inf)
        )
        total = sum(entry.count for entry in by_mean)
        in_order = list(self._entries.values())
        by_bound = sorted(in_order, key=lambda entry: -self._upper_confidence_bound(entry, total))
        selected: dict[str, Entry] = {}
        orders = {True: iter(by_mean), False: iter(by_bound)}
        while len(selected) < min(count, len(in_order)):
            exploits = stream.uniform() < self.mix_exploit_ratio
            entry = next(entry for entry in orders[exploits] if entry.key not in selected)
            selected[entry.key] = entry
        return list(selected.values())

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain JSON."""
        return {
            "entries": [
                [entry.key, entry.payload, entry.count, entry.mean, entry.squares]
                for entry in self._entries.values()
            ],
            "evicted": self.evicted,
            "refused": self.refused,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._entries = {entry[0]: Entry(*entry) for entry in state["entries"]}
        self.evicted, self.refused = state["evicted"], state["refused"]

    def _upper_confidence_bound(self, entry: Entry, total: int) -> float:
        """The upper confidence bound; infinite for an entry without rewards."""
        if entry.count == 0:
            return math.inf
        return entry.mean + self.exploration * math.sqrt(math.log(total) / entry.count)

    def _made_room(self, reward: float | None) -> bool:
        """Evict the entry with the smallest mean (the oldest of equals) if `reward` is better. Returns True if there is room."""
        rewarded = [entry for entry in self._entries.values() if entry.count]
        if reward is None or not rewarded:
            return False
        worst = min(rewarded, key=lambda entry: entry.mean)
        if reward <= worst.mean:
            return False
        del self._entries[worst.key]
        self.evicted += 1
        return True
