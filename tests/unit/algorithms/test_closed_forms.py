"""Every algorithm by hand, on two members: one got 1 with two tokens, the other 0 with four.

GRPO standardises advantages, and takes the mean over a rollout's tokens, then over rollouts. Dr. GRPO only centres them, and divides by a
constant; DAPO by the tokens of the step. GSPO has one ratio for a rollout, the exponential of its mean. CISPO caps the ratio and detaches
it. RLOO compares with the mean of the others, and its ratio is the product. REINFORCE++ normalises over the step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.algorithms.base import Algorithm
from groupwise.algorithms.cispo import Cispo
from groupwise.algorithms.dapo import Dapo
from groupwise.algorithms.dr_grpo import DrGrpo
from groupwise.algorithms.grpo import Grpo
from groupwise.algorithms.gspo import Gspo
from groupwise.algorithms.reinforce_pp import ReinforcePp
from groupwise.algorithms.rloo import Rloo

A = 0.5 / (math.sqrt(0.5) + 1e-4)
"""The advantage of the better of two members whose rewards differ by 1."""
LENGTHS = [[1, 1, 0, 0], [1, 1, 1, 1]]
FLAT = [[-1.0] * 4, [-1.0] * 4]
KL: dict[str, Any] = {"beta": 0.1, "kl_gradient": "estimator"}


@pytest.mark.parametrize(
    ("algorithm", "advantage", "scales", "denominators"),
    [
        (Grpo(), A, (1 / 2, 1 / 4), {"policy": 3.0}), (Grpo(**KL), A, (1 / 2, 1 / 4), {"policy": 3.0, "kl": 3.0}),
        (DrGrpo(), 0.5, (1.0, 1.0), {"policy": 24.0}), (DrGrpo(**KL), 0.5, (1.0, 1.0), {"policy": 24.0, "kl": 24.0}),
        (Dapo(), A, (1.0, 1.0), {"policy": 9.0}), (Gspo(), A, (1 / 2, 1 / 4), {"policy": 3.0}),
        (Cispo(), A, (1.0, 1.0), {"policy": 9.0}), (Rloo(beta=0.1), 1.0, (1.0, 1.0), {"policy": 3.0, "kl": 3.0}),
        (ReinforcePp(), A, (1.0, 1.0), {"policy": 9.0}),
    ],
    ids=str,
)  # fmt: skip
def test_weights_and_denominators(
    pair, group, algorithm: Algorithm, advantage: float, scales, denominators
) -> None:
    weights = [weight for weight in algorithm.credits([pair])[0] if weight]
    assert [each.advantage for each in weights] == pytest.approx([advantage, -advantage])
    assert tuple(each.scale for each in weights) == scales
    assert algorithm.denominators([pair, group(1.0, None)], 8) == denominators
    assert algorithm.needs_proximal == isinstance(algorithm, Gspo | Rloo)


def _computed(algorithm: Algorithm, pair, weighted, total, policy, **given) -> tuple[float, Any]:
    """The loss of the step of the pair, and the gradient of its log-probabilities."""
    given = {"sampling": FLAT, "proximal": FLAT, "mask": LENGTHS, **given}
    rows = weighted(algorithm.credits([pair])[0], policy, **given)
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    return loss.item(), rows.policy_logprobs_BT.grad


def _of_each(good: float, bad: float) -> torch.Tensor:
    """A gradient that is the same for all tokens of a rollout."""
    return torch.tensor([[good, good, 0, 0], [bad] * 4], dtype=torch.float64)


@pytest.mark.parametrize(
    ("algorithm", "loss", "good", "bad"),
    [
        (Grpo(), 0.0, A / 4, A / 8), (DrGrpo(), -(2 * 0.5 - 4 * 0.5) / 16, 0.5 / 16, 0.5 / 16),
        (Dapo(), -(2 * A - 4 * A) / 6, A / 6, A / 6), (Gspo(), 0.0, A / 4, A / 8), (Cispo(), -(-2 * A + 4 * A) / 6, A / 6, A / 6),
        (Rloo(), 0.0, 0.5, 0.5), (ReinforcePp(), -(2 * A - 4 * A) / 6, A / 6, A / 6),
    ],
    ids=str,
)  # fmt: skip
def test_on_policy_loss_and_gradient(
    pair, weighted, total, algorithm: Algorithm, loss: float, good: float, bad: float
) -> None:
    found, gradient = _computed(algorithm, pair, weighted, total, FLAT)
    assert found == pytest.approx(loss, abs=1e-15)
    torch.testing.assert_close(gradient, _of_each(-good, bad))


def test_on_policy_loss_of_equal_lengths_is_zero(pair, weighted, total) -> None:
    assert _computed(DrGrpo(), pair, weighted, total, FLAT, mask=[[1] * 4] * 2)[0] == 0


AHEAD = 2 - math.log(2) - 1
"""The penalty of a token that the reference finds twice as likely."""
MEAN = math.sqrt(1.1 * 1.3)
CAPPED = [[1.5, 2.0, 0.0, 0.0], [0.1, 1.0, 2.0, 2.0]]
CISPO_RATIOS = [[1.5, 3.0, 1.0, 1.0], [0.1, 1.0, 5.0, 2.0]]
CISPO_GAIN = A * sum(
    sign * weight * (math.log(ratio) - 1)
    for sign, weights, ratios in zip((1, -1), CAPPED, CISPO_RATIOS, strict=True)
    for weight, ratio in zip(weights, ratios, strict=True)
)


@pytest.mark.parametrize(
    ("algorithm", "ratios", "loss", "gradient"),
    [
        (
            Grpo(**KL),  # 1.3 and 0.7 are clipped
            [[1.1, 1.3, 1.0, 1.0], [0.9, 0.7, 1.0, 1.3]],
            -(A * (1.1 + 1.2) / 2 - A * (0.9 + 0.8 + 1.0 + 1.3) / 4) / 2 + 0.1 * AHEAD,
            None,
        ),
        (
            DrGrpo(epsilon_high=0.5, **KL),  # 1.6 and 0.7 are clipped
            [[1.1, 1.6, 1.0, 1.0], [0.9, 0.7, 1.0, 1.3]],
            (-0.5 * (1.1 + 1.5) + 0.5 * (0.9 + 0.8 + 1.0 + 1.3) + 0.1 * 6 * AHEAD) / 16,
            None,
        ),
        (
            Dapo(),  # whose clip is wider above
            [[1.25, 1.4, 1.0, 1.0], [0.9, 0.7, 1.0, 1.3]],
            -A * ((1.25 + 1.28) - (0.9 + 0.8 + 1.0 + 1.3)) / 6,
            None,
        ),
        (
            Gspo(epsilon=0.5, epsilon_high=0.5),
            [[1.1, 1.3, 1.0, 1.0], [0.5, 2.0, 4.0, 0.25]],
            -(A * MEAN - A) / 2,
            _of_each(-A * MEAN / 4, A / 8),
        ),
        (
            Rloo(epsilon=0.2, epsilon_high=0.5),  # the second rollout is clipped whole
            [[1.1, 1.2, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]],
            -(1.1 * 1.2 - 0.8) / 2,
            _of_each(-1.1 * 1.2 / 2, 0.0),
        ),
        (
            Cispo(epsilon_high=1.0),  # nothing is bounded below
            CISPO_RATIOS,
            -CISPO_GAIN / 6,
            torch.tensor([[-A], [A]], dtype=torch.float64) * torch.tensor(CAPPED) / 6,
        ),
    ],
    ids=str,
)
def test_off_policy_loss_and_gradient(
    pair, weighted, total, algorithm: Algorithm, ratios, loss: float, gradient
) -> None:
    policy = [[math.log(ratio) - 1 for ratio in row] for row in ratios]
    reference = [[math.log(2 * ratio) - 1 for ratio in row] for row in ratios]
    found = _computed(algorithm, pair, weighted, total, policy, reference=reference)
    assert found[0] == pytest.approx(loss)
    if gradient is not None:
        torch.testing.assert_close(found[1], gradient)


def test_tokens_of_the_environment_count_nowhere(rollout, group, weighted, total) -> None:
    talk = group(rollout(0, 1.0, tokens=2, observed=2), rollout(1, 0.0, tokens=4))
    weights = Grpo().credits([talk])[0]
    assert weights[0] is not None
    assert weights[0].scale == 1 / 2
    rows = weighted(weights, FLAT, mask=[[0, 0, 1, 1], [1, 1, 1, 1]])
    loss = total(Grpo(), rows, Grpo().denominators([talk], 8))
    assert loss.item() == pytest.approx(0, abs=1e-15)


def test_failed_members_have_no_weight_and_no_share(group) -> None:
    mixed = group(1.0, None, 0.0)
    weights = Grpo().credits([mixed])[0]
    assert weights[1] is None
    assert [weight.advantage for weight in weights if weight] == pytest.approx([A, -A])
    assert Grpo().denominators([mixed, group(None, None)], 8) == {"policy": 2.0}


@pytest.mark.parametrize(
    ("kind", "denominator"), [(Grpo, 3.0), (DrGrpo, 24.0)], ids=["grpo", "dr_grpo"]
)
def test_truncated_members_teach_unless_masked(rollout, group, kind, denominator) -> None:
    """Their rewards still count in mean and spread, and they in the denominator."""
    cut = group(rollout(0, 0.0, truncated=True), 1.0, 1.0)
    plain = kind().credits([cut])[0]
    masked = kind(mask_truncated_completions=True).credits([cut])[0]
    assert plain[0] is not None
    assert masked == (None, *plain[1:])
    found = kind(mask_truncated_completions=True).denominators([cut], 8)
    assert found == {"policy": denominator}


def test_rollout_without_a_token_counts_but_has_no_row(rollout, group) -> None:
    silent = group(rollout(0, 0.0, tokens=0), 1.0)
    weights = Grpo().credits([silent])[0]
    assert weights[0] is None
    assert weights[1] is not None
    assert weights[1].advantage == pytest.approx(A)
    assert Grpo().denominators([silent], 8) == {"policy": 2.0}


@pytest.mark.parametrize(("log_ratio", "advantage", "slope"), [
    (3.5e-4, 1.0, -1.0), (5e-4, 1.0, 0.0), (-5e-4, 1.0, -1.0), (-3.5e-4, -1.0, 0.0), (5e-4, -1.0, 1.0),
])  # fmt: skip
def test_gspo_clips_a_rollout_as_a_whole(
    batch, log_ratio: float, advantage: float, slope: float
) -> None:
    """One token far out on each side; only their mean counts."""
    flat = [[-1.0, -1.0]]
    policy = [[-1.0 + log_ratio + 0.3, -1.0 + log_ratio - 0.3]]
    rows = batch(policy, flat, proximal=flat, advantages=[advantage], scales=[0.5])
    result = Gspo().loss(rows)
    result.components["policy"].backward()
    found = rows.policy_logprobs_BT.grad.sum().item()
    assert found == pytest.approx(slope * math.exp(log_ratio))
    clipped = result.stats["clip_low"].item() + result.stats["clip_high"].item()
    assert clipped == (2 if slope == 0 else 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_tokens_beyond_the_cap_of_cispo_keep_their_gradient_and_are_counted(
    batch, advantage: float
) -> None:
    rows = batch([[-1.0, -1.0]], [[-9.0, -1.0]], advantages=[advantage])
    result = Cispo().loss(rows)
    result.components["policy"].backward()
    assert rows.policy_logprobs_BT.grad.tolist() == [[-5.0 * advantage, -advantage]]
    assert result.stats["clip_high"].item() == 1


def test_rloo_compares_with_the_mean_of_the_others(group) -> None:
    weights = Rloo().credits([group(1.0, None, 0.0, 5.0)])[0]
    found = [weight and weight.advantage for weight in weights]
    assert found == [pytest.approx(1 - 2.5), None, pytest.approx(0 - 3), pytest.approx(5 - 0.5)]


def test_rloo_sums_its_penalty_over_the_rollout(pair, weighted, total) -> None:
    algorithm = Rloo(beta=0.03, kl_estimator="k1")
    ahead = [[-1.5] * 4, [-1.25] * 4]
    loss, gradient = _computed(algorithm, pair, weighted, total, FLAT, reference=ahead)
    assert loss == pytest.approx(0.03 * (2 * 0.5 + 4 * 0.25) / 2)
    good, bad = -0.5 + 0.03 * 0.5 / 2, 0.5 + 0.03 * 0.25 / 2
    torch.testing.assert_close(gradient, _of_each(good, bad))


def _advantages(algorithm: ReinforcePp, groups) -> list[list[float]]:
    return [[weight.advantage for weight in row if weight] for row in algorithm.credits(groups)]


def test_reinforce_pp_normalises_over_the_step(group) -> None:
    rewards = np.array([0.0, 1.0, 3.0, 4.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    first, second = _advantages(ReinforcePp(), [group(0.0, 1.0), group(3.0, None, 4.0)])
    assert [*first, *second] == pytest.approx(list(expected))
    (first,), (second,) = _advantages(ReinforcePp(), [group(0.0), group(1.0)])
    assert (first, second) == pytest.approx((-A, A)), "also where each group has one"


def test_reinforce_pp_may_take_the_mean_of_the_group_first(group) -> None:
    centred = np.array([-0.5, 0.5, -1.0, 1.0])
    expected = centred / (centred.std(ddof=1) + 1e-4)
    algorithm = ReinforcePp(group_baseline=True)
    first, second = _advantages(algorithm, [group(0.0, 1.0), group(3.0, 5.0)])
    assert [*first, *second] == pytest.approx(list(expected))
    groups = [group(1.0, 1.0), group(0.0, 1.0), group(0.1 + 0.2, 0.3, 0.3)]
    silent = _advantages(algorithm, groups)
    assert (silent[0], silent[2]) == ([0.0] * 2, [0.0] * 3)
    assert _advantages(ReinforcePp(), groups)[0][0] > 0
