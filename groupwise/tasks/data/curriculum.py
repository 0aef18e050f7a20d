"""A curriculum by difficulty: examples are drawn near a success rate at which they teach.

The loop walks through the examples in the order of the epoch, each once. With a curriculum, an example is drawn when its turn comes
only with the probability

    revisit + (1 − revisit) · (1 − |p − target| / d),      d = target where p < target, else 1 − target

where p is the success rate that its own groups had, older ones counting less (Σ memoryᵃ · successes / Σ memoryᵃ · members, a the
age in groups). So examples that are never or always solved are drawn with probability `revisit`; examples at the target, and those
that were not drawn before, are always drawn. Filtering by the learner's own success: Bae et al. 2025, arXiv 2504.03380.

The easy pool is a second source of examples, mixed in with a probability that falls during the run: each prompt of a step is drawn
from it independently with probability p(step), and its whole group is then an easy one. p is a table of steps: the value of the
last step in it that has been reached.
"""

from __future__ import annotations

from statistics import fmean

from pydantic import field_validator

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
        0.5,
        "Factor by which each later group of an example reduces the weight of its earlier groups.",
        ge=0,
        lt=1,
    )
    success_threshold: float = setting(
        0.999, "A completion succeeds if it reaches this; see success_part."
    )
    success_part: str | None = setting(
        None,
        "Name of the reward part that success_threshold is about; null: the first whose name contains accuracy, else the total.",
    )


class Curriculum:
    """The examples' success rates, and the probability of each to be drawn at its turn."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self._seen: dict[int, tuple[float, float]] = {}
        """Weighted successes and members, by example."""

    def observe(self, example: int, successes: int, members: int) -> None:
        """Record a scored group of an example."""
        before_successes, before_members = self._seen.get(example, (0.0, 0.0))
        memory = self._config.memory
        self._seen[example] = (
            memory * before_successes + successes,
            memory * before_members + members,
        )

    def success(self, example: int) -> float | None:
        """The example's success rate; None if it was never drawn."""
        counts = self._seen.get(example)
        return counts[0] / counts[1] if counts else None

    def chance(self, example: int) -> float:
        """The probability that the example is drawn at its turn."""
        rate, target = self.success(example), self._config.target
        if rate is None:
            return 1.0
        distance = abs(rate - target) / (target if rate < target else 1 - target)
        return self._config.revisit + (1 - self._config.revisit) * (1 - distance)

    def metrics(self) -> dict[str, float]:
        """The mean success rate of the examples seen, and the shares that are always or never solved."""
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
        return [[example, *counts] for example, counts in self._seen.items()]

    def load_state(self, state: list[list[float]]) -> None:
        """The inverse of `state`."""
        self._seen = {int(example): (s, m) for example, s, m in state}


# --- the easy pool -------------------------------------------------------------------------------


EASY = "EASY"
"""The task label for easy examples without one; the router can assign them their own rewards."""

EASY_SCHEDULE: tuple[tuple[int, float], ...] = (
    *((0, 1.00), (50, 0.90), (100, 0.80), (150, 0.70), (200, 0.60), (250, 0.55), (300, 0.53)),
    *((400, 0.51), (500, 0.49), (600, 0.47), (700, 0.44), (800, 0.42)),
    *((step, round(0.42 - 0.02 * (step - 800) / 100, 2)) for step in range(900, 2800, 100)),
    *((2800, 0.03), (2900, 0.02), (3000, 0.01)),
)
"""Steps, each with the probability from then on."""


class EasyPoolConfig(Strict):
    """The section `data.easy_pool`: where the easy examples come from, and how often they are drawn."""

    dataset_name: str | None = setting(
        None,
        "Hub id or local file of the easy examples; null: the environment variable EASY_DATASET_NAME.",
    )
    dataset_config: str | None = setting(None, "Configuration of a dataset on the hub.")
    dataset_split: str = setting("train", "Split of a dataset on the hub.")
    columns: dict[str, str] = setting(
        {},
        "Further names for its columns: with `prompt: question` the column `question` is the prompt.",
    )
    schedule: tuple[tuple[int, float], ...] = setting(
        EASY_SCHEDULE, "Pairs of a step and the probability of an easy example from then on."
    )

    @field_validator("schedule")
    @classmethod
    def _is_a_table_of_probabilities(
        cls, table: tuple[tuple[int, float], ...]
    ) -> tuple[tuple[int, float], ...]:
        steps = [step for step, _ in table]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(
                f"schedule has the steps {steps}; expected rising ones that begin with 0."
            )
        wrong = [chance for _, chance in table if not 0 <= chance <= 1]
        if wrong:
            raise ValueError(f"schedule has the probability {wrong[0]:g}; expected 0 to 1.")
        return table

    def probability(self, step: int) -> float:
        """Probability of an easy example at a step (from 0)."""
        return [chance for start, chance in self.schedule if start <= step][-1]
