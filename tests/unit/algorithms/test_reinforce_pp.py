"""Closed forms of REINFORCE++: advantages normalised over the step, with and without the group's mean."""

from __future__ import annotations

import numpy as np
import pytest

from groupwise.algorithms.reinforce_pp import ReinforcePp


def _advantages(algorithm: ReinforcePp, groups) -> list[list[float]]:
    return [[weight.advantage for weight in row if weight] for row in algorithm.weights(groups)]


def test_plain_form_normalises_over_the_step(group) -> None:
    rewards = np.array([0.0, 1.0, 3.0, 4.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    (first, second) = _advantages(ReinforcePp(), [group(0.0, 1.0), group(3.0, None, 4.0)])
    assert [*first, *second] == pytest.approx(list(expected))


def test_group_baseline_takes_the_mean_of_the_group_first(group) -> None:
    centred = np.array([-0.5, 0.5, -1.0, 1.0])
    expected = centred / (centred.std(ddof=1) + 1e-4)
    algorithm = ReinforcePp(group_baseline=True)
    (first, second) = _advantages(algorithm, [group(0.0, 1.0), group(3.0, 5.0)])
    assert [*first, *second] == pytest.approx(list(expected))


def test_one_completion_a_prompt_is_compared_with_those_of_the_step(group) -> None:
    (first,), (second,) = _advantages(ReinforcePp(), [group(0.0), group(1.0)])
    assert first == -second
    assert second == pytest.approx(0.5 / (0.5**0.5 + 1e-4))


def test_only_the_baseline_keeps_a_group_that_agrees_silent(group) -> None:
    groups = [group(1.0, 1.0), group(0.0, 1.0), group(0.1 + 0.2, 0.3, 0.3)]
    assert _advantages(ReinforcePp(), groups)[0][0] > 0
    with_baseline = _advantages(ReinforcePp(group_baseline=True), groups)
    assert with_baseline[0] == [0.0, 0.0]
    assert with_baseline[2] == [0.0, 0.0, 0.0]


def test_scale_and_denominator_count_tokens(rollout, group) -> None:
    pair = group(rollout(0, 1.0, tokens=2), rollout(1, 0.0, tokens=4))
    assert [weight.scale for weight in ReinforcePp().weights([pair])[0] if weight] == [1.0, 1.0]
    assert ReinforcePp().denominators([pair, group(None, 2.0)], 99) == {"policy": 9.0}
