"""Closed forms of GRPO: standardised advantages, mean over a rollout's tokens, then over rollouts."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.grpo import Grpo
from tests.unit.algorithms.closed_forms import FLAT, LENGTHS, A


def test_weights_and_denominators(pair) -> None:
    good, bad = Grpo().weights([pair])[0]
    assert good is not None
    assert bad is not None
    assert (good.advantage, bad.advantage) == pytest.approx((A, -A))
    assert (good.scale, bad.scale) == (1 / 2, 1 / 4)
    assert Grpo().denominators([pair, pair], 99) == {"policy": 4.0}
    assert Grpo(beta=0.1, kl_gradient="estimator").denominators([pair], 99) == {
        "policy": 2.0,
        "kl": 2.0,
    }


def test_on_policy_loss_is_zero_however_long_the_rollouts(pair, weighted, total) -> None:
    algorithm = Grpo()
    rows = weighted(algorithm.weights([pair])[0], FLAT, mask=LENGTHS)
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-15)
    good, bad = A / (2 * 2), A / (2 * 4)
    expected = torch.tensor([[-good, -good, 0, 0], [bad] * 4], dtype=torch.float64)
    torch.testing.assert_close(rows.policy_logprobs_BT.grad, expected)


def test_off_policy_loss_with_penalty(pair, weighted, total) -> None:
    algorithm = Grpo(beta=0.1, kl_gradient="estimator")
    ratios = [[1.1, 1.3, 1.0, 1.0], [0.9, 0.7, 1.0, 1.3]]
    rows = weighted(
        algorithm.weights([pair])[0],
        [[math.log(ratio) - 1 for ratio in row] for row in ratios],
        sampling=FLAT,
        mask=LENGTHS,
        reference=[[math.log(2 * ratio) - 1 for ratio in row] for row in ratios],
    )
    loss = total(algorithm, rows, algorithm.denominators([pair], 8))
    good = A * (1.1 + 1.2) / 2  # 1.3 is clipped
    bad = -A * (0.9 + 0.8 + 1.0 + 1.3) / 4  # 0.7 is clipped
    penalty = 0.1 * (2 - math.log(2) - 1)
    assert loss.item() == pytest.approx(-(good + bad) / 2 + penalty)


def test_tokens_of_the_environment_count_nowhere(rollout, group, weighted, total) -> None:
    talk = group(rollout(0, 1.0, tokens=2, observed=2), rollout(1, 0.0, tokens=4))
    algorithm = Grpo()
    weights = algorithm.weights([talk])[0]
    assert weights[0] is not None
    assert weights[0].scale == 1 / 2
    rows = weighted(weights, FLAT, mask=[[0, 0, 1, 1], [1, 1, 1, 1]])
    loss = total(algorithm, rows, algorithm.denominators([talk], 8))
    assert loss.item() == pytest.approx(0, abs=1e-15)


def test_failed_members_have_no_weight_and_no_share(group) -> None:
    mixed = group(1.0, None, 0.0)
    weights = Grpo().weights([mixed])[0]
    assert weights[1] is None
    assert [weight.advantage for weight in weights if weight] == pytest.approx([A, -A])
    assert Grpo().denominators([mixed, group(None, None)], 8) == {"policy": 2.0}
    assert Grpo().denominators([], 8) == {"policy": 0.0}


def test_truncated_members_teach_unless_masked(rollout, group) -> None:
    cut = group(rollout(0, 0.0, truncated=True), 1.0, 1.0)
    plain = Grpo().weights([cut])[0]
    masked = Grpo(mask_truncated_completions=True).weights([cut])[0]
    assert plain[0] is not None
    assert masked[0] is None
    assert masked[1:] == plain[1:]  # its reward still counts in mean and spread
    assert Grpo(mask_truncated_completions=True).denominators([cut], 8) == {"policy": 3.0}


def test_rollout_without_a_token_counts_but_has_no_row(rollout, group) -> None:
    silent = group(rollout(0, 0.0, tokens=0), 1.0)
    weights = Grpo().weights([silent])[0]
    assert weights[0] is None
    assert weights[1] is not None
    assert weights[1].advantage == pytest.approx(A)
    assert Grpo().denominators([silent], 8) == {"policy": 2.0}
