"""The signal `held_out`: the training reward rises while a metric of the held-out prompts falls.

At some point of an optimisation, the reward and the intended quality diverge (Gao et al. 2022, arXiv 2210.10760); this shows first
on held-out prompts, in a metric other than the reward. The last evaluation is compared with the best one before it, over the same
prompts:

    tolerance    z(1 − 0.025 / pairs) · standard error of the mean difference of a prompt

where `pairs` is the number of pairs that the evaluations so far make, because the best of many is partly best by luck (Bonferroni).
The training rewards of the steps between the two count as risen if the mean of their last third exceeds that of the first third by
more than 1.96 standard errors. Fewer than nine steps are not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

from groupwise.tasks.data.drift import MANY
from groupwise.tasks.data.reward_hacking_detectors import Finding

LEVEL = 0.025
"""One-sided significance level: half of what a 95 % interval leaves out."""
RISE = 1.96
"""Standard errors by which the training reward must have risen."""
LEAST = 3
"""Fewest steps of a third of the training rewards."""


@dataclass(frozen=True, slots=True)
class HeldOutDrop:
    """The last evaluation, compared with the best one before it."""

    metric: str
    best: Sequence[float]
    """Values of the best evaluation, one for each prompt that both evaluations have; `last` likewise."""
    last: Sequence[float]
    evaluations: int
    """Number of evaluations so far, including these two."""


def divergence(fall: HeldOutDrop, rewards: Sequence[float]) -> Finding | None:
    """Compares the two; `rewards` are those of the steps between the evaluations. None if there is too little data."""
    differences = [last - best for best, last in zip(fall.best, fall.last, strict=True)]
    third = len(rewards) // 3
    if len(differences) < 2 or third < LEAST:
        return None
    first, last = rewards[:third], rewards[-third:]
    rise = _standard_errors(
        fmean(last) - fmean(first), variance(first) / third + variance(last) / third
    )
    drop = _standard_errors(-fmean(differences), variance(differences) / len(differences))
    values = {
        f"best {fall.metric}": fmean(fall.best),
        f"last {fall.metric}": fmean(fall.last),
        "reward then": fmean(first),
        "reward now": fmean(last),
    }
    text = "the training reward rises and the held-out prompts do worse: what is learnt may not be what is meant"
    return Finding(min(drop / tolerance(fall.evaluations), rise / RISE), text, values)


def tolerance(evaluations: int) -> float:
    """How far the mean over the prompts may fall by chance, in standard errors."""
    pairs = evaluations * (evaluations - 1) // 2
    return NormalDist().inv_cdf(1 - LEVEL / pairs)


def _standard_errors(difference: float, squared_error: float) -> float:
    if not difference:
        return 0.0
    error = math.sqrt(squared_error)
    return difference / error if error else math.copysign(MANY, difference)
