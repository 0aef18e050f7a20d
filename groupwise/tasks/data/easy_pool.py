"""The easy pool: a second source of examples, mixed in with a probability that falls as the run goes on.

Each prompt of a step is drawn from the pool with probability p(step), on its own; the whole group is then an easy one. p is a table
of steps: the value of the last step in it that has been reached.
"""

from __future__ import annotations

from pydantic import field_validator

from groupwise.core.settings.schema import Strict, setting

EASY = "EASY"
"""The task label of easy examples that have none, by which the router gives them rewards of their own."""

SCHEDULE: tuple[tuple[int, float], ...] = (
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
        "Hub id or local file of the easy examples; null takes the environment's EASY_DATASET_NAME.",
    )
    dataset_config: str | None = setting(None, "Configuration of a hub set.")
    dataset_split: str = setting("train", "Split of a hub set.")
    columns: dict[str, str] = setting(
        {}, "What its columns are called: `prompt: question` takes the prompt from `question`."
    )
    schedule: tuple[tuple[int, float], ...] = setting(
        SCHEDULE, "Pairs of a step and the probability of an easy example from then on."
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
        return [chance for reached, chance in self.schedule if reached <= step][-1]
