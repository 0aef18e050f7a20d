"""A curriculum by difficulty: examples are drawn near a success rate at which they teach.

The loop walks through the examples in the order of the epoch, each once. With a curriculum, an example is drawn when its turn comes
only with the probability

    revisit + (1 − revisit) · (1 − |p − target| / d),      d = target where p < target, else 1 − target

where p is the success rate that its own groups had, older ones counting less (Σ memoryᵃ · successes / Σ memoryᵃ · members, a the
age in groups). So examples that are never or always solved are drawn with probability `revisit`; examples at the target, and those
that were not drawn before, are always drawn. Filtering by the learner's own success: Bae et al. 2025, arXiv 2504.03380.
"""

from __future__ import annotations

from statistics import fmean

from groupwise.core.settings.schema import Strict, setting


class CurriculumConfig(Strict):
    """The section `data.curriculum`; `{}` takes all defaults."""

    target: float = setting(
        0.5,
        "Success rate at which examples are always drawn. At 0.5 the rewards of a group differ most.",
        gt=0,
        lt=1,
    )
    revisit: float = setting(
        0.05,
        "Probability that an example which is never or always solved is drawn when its turn comes; 0 drops it for good.",
        ge=0,
        le=1,
    )
    memory: float = setting(
        0.5, "What each later group of an example leaves of the weight of those before.", ge=0, lt=1
    )
    success_threshold: float = setting(
        0.999, "A completion succeeds if it reaches this; see success_part."
    )
    success_part: str | None = setting(
        None,
        "Name of the reward part that success_threshold is about; null: the first whose name contains accuracy, else the total.",
    )


class Curriculum:
    """The examples' success rates, and the chance of each to be drawn when its turn comes."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._seen: dict[int, tuple[float, float]] = {}
        """Weighted successes and members, by example."""

    def observe(self, example: int, successes: int, members: int) -> None:
        """A group of an example was scored."""
        before_successes, before_members = self._seen.get(example, (0.0, 0.0))
        memory = self._config.memory
        self._seen[example] = (
            memory * before_successes + successes,
            memory * before_members + members,
        )

    def success(self, example: int) -> float | None:
        """The example's success rate; None if it was never drawn."""
        seen = self._seen.get(example)
        return seen[0] / seen[1] if seen else None

    def chance(self, example: int) -> float:
        """The probability that it is drawn when its turn comes."""
        rate, target = self.success(example), self._config.target
        if rate is None:
            return 1.0
        distance = abs(rate - target) / (target if rate < target else 1 - target)
        return self._config.revisit + (1 - self._config.revisit) * (1 - distance)

    def metrics(self) -> dict[str, float]:
        """The mean success of what was seen, and how much of it is always or never solved."""
        rates = [successes / members for successes, members in self._seen.values()]
        if not rates:
            return {}
        return {
            "curriculum/success": fmean(rates),
            "curriculum/solved": fmean(rate == 1 for rate in rates),
            "curriculum/hopeless": fmean(rate == 0 for rate in rates),
            "curriculum/seen": float(len(rates)),
        }

    def state(self) -> list[list[float]]:
        """All that a checkpoint needs, as plain JSON."""
        return [[example, *seen] for example, seen in self._seen.items()]

    def load_state(self, state: list[list[float]]) -> None:
        """The inverse of `state`."""
        self._seen = {int(example): (s, m) for example, s, m in state}
