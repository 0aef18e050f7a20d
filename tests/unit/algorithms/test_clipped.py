"""The contract of the clipped surrogate.

1. It equals a plain loop over tokens, and its gradient finite differences.
2. The clip acts on the side of the gain only, with a bound of its own on each side.
3. The KL penalty has the value and the gradient that were computed by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from groupwise.algorithms.base import LossResult, TokenBatch
from groupwise.algorithms.grpo import Grpo


def _gradient(result: LossResult, batch: TokenBatch) -> torch.Tensor:
    loss = torch.stack(list(result.components.values())).sum()
    (gradient,) = torch.autograd.grad(loss, batch.policy_logprobs_BT)
    return gradient


@dataclass(frozen=True)
class Case:
    """A random problem as numpy arrays."""

    algorithm: Grpo
    policy: np.ndarray
    sampling: np.ndarray
    reference: np.ndarray
    entropies: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    scales: np.ndarray

    def batch(self) -> TokenBatch:
        tensor = torch.from_numpy
        return TokenBatch(
            policy_logprobs_BT=tensor(self.policy).clone().requires_grad_(),
            sampling_logprobs_BT=tensor(self.sampling),
            mask_BT=tensor(self.mask),
            advantages_B=tensor(self.advantages),
            scales_B=tensor(self.scales),
            entropies_BT=tensor(self.entropies),
            reference_logprobs_BT=tensor(self.reference),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ratios on both sides of both clips, masks with holes, no two tokens alike."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    epsilon = draw(st.floats(0.05, 1.5))
    epsilon_high = draw(st.none() | st.floats(0.05, 1.5))
    policy = -rng.exponential(1.5, shape)
    return Case(
        algorithm=Grpo(
            beta=draw(st.sampled_from([0.0, 0.04, 1.0])),
            kl_gradient="estimator",
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            delta=draw(st.sampled_from([None, 3.0])),
        ),
        policy=policy,
        sampling=policy + rng.normal(0, 0.4, shape),
        reference=policy + rng.normal(0, 0.7, shape),
        entropies=rng.uniform(0, 3, shape),
        mask=rng.integers(0, 2, shape),
        advantages=rng.normal(0, 1, shape[0]),
        scales=rng.uniform(0.1, 1, shape[0]),
    )


def _loop(case: Case, policy: np.ndarray) -> dict[str, float]:
    """The loss once more, token by token: every sum by its name, components with `loss_` before it."""
    low, high = case.algorithm.clip
    delta = case.algorithm.delta or math.inf
    names = (
        "tokens", "ratio", "clip_low", "clip_high", "clip_delta", "logprob_gap", "kl", "entropy",
    )  # fmt: skip
    sums: dict[str, Any] = dict.fromkeys((*names, "loss_policy", "loss_kl"), 0.0)
    for b, t in zip(*np.nonzero(case.mask), strict=True):
        gap = policy[b, t] - case.sampling[b, t]
        ratio, advantage = math.exp(gap), case.advantages[b]
        behind = case.reference[b, t] - policy[b, t]
        kl = math.exp(behind) - behind - 1
        gain = min(min(ratio, delta) * advantage, min(max(ratio, low), high) * advantage)
        sums["tokens"] += 1
        sums["ratio"] += ratio
        sums["clip_low"] += ratio < low and advantage < 0
        sums["clip_high"] += ratio > high and advantage > 0
        sums["clip_delta"] += ratio > delta and advantage < 0
        sums["logprob_gap"] += abs(gap)
        sums["kl"] += kl
        sums["entropy"] += case.entropies[b, t]
        sums["loss_policy"] -= case.scales[b] * gain
        sums["loss_kl"] += case.algorithm.beta * case.scales[b] * kl
    return sums


@given(cases())
def test_sums_equal_those_of_a_loop_over_tokens(case: Case) -> None:
    result = case.algorithm.loss(case.batch())
    found = {name: value.item() for name, value in result.stats.items()}
    found |= {f"loss_{name}": value.item() for name, value in result.components.items()}
    expected = _loop(case, case.policy)
    if case.algorithm.beta == 0:
        del expected["loss_kl"]
    if case.algorithm.delta is None:
        del expected["clip_delta"]
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


@given(cases())
def test_gradient_equals_finite_differences(case: Case) -> None:
    ratio = np.exp(case.policy - case.sampling)
    edges = (*case.algorithm.clip, case.algorithm.delta or 3.0)
    assume(all(np.abs(ratio - edge).min() > 1e-4 for edge in edges))
    batch = case.batch()
    found = _gradient(case.algorithm.loss(batch), batch).numpy()
    step = 1e-6
    for index in np.ndindex(case.policy.shape):
        nudge = np.zeros_like(case.policy)
        nudge[index] = step
        above, below = _loop(case, case.policy + nudge), _loop(case, case.policy - nudge)
        rise = sum(above[name] - below[name] for name in ("loss_policy", "loss_kl"))
        assert found[index] == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "clipped"),
    [
        (1.0, 0.5, 0.5, None),  # a good token became unlikely: pull it back
        (1.0, 1.4, 1.4, None),  # still within the upper bound of its own
        (1.0, 1.6, 1.5, "clip_high"),
        (-1.0, 0.9, -0.9, None),
        (-1.0, 0.7, -0.8, "clip_low"),
        (-1.0, 1.6, -1.6, None),  # a bad token became likely: push it down
        (0.0, 1.6, 0.0, "none"),
    ],
)
def test_clip_acts_on_the_side_of_the_gain(
    batch, advantage: float, ratio: float, value: float, clipped: str | None
) -> None:
    token = batch([[math.log(ratio) - 2]], [[-2.0]], advantages=[advantage])
    result = Grpo(epsilon=0.2, epsilon_high=0.5).loss(token)
    assert result.components["policy"].item() == pytest.approx(-value)
    free = 0.0 if clipped else -ratio * advantage
    assert _gradient(result, token).item() == pytest.approx(free)
    for name in ("clip_low", "clip_high"):
        assert result.stats[name].item() == (name == clipped)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("policy", "sampling"), [(-1e-3, -200.0), (-200.0, -1e-3)])
def test_token_of_an_extreme_ratio_leaves_the_others_their_gradient(
    batch, policy: float, sampling: float, advantage: float
) -> None:
    rows = batch([[policy, -1.0]], [[sampling, -1.0]], advantages=[advantage])
    single = replace(
        rows,
        **{
            name: getattr(rows, name).float()
            for name in ("sampling_logprobs_BT", "advantages_B", "scales_B")
        },
        policy_logprobs_BT=rows.policy_logprobs_BT.detach().float().requires_grad_(),
    )
    result = Grpo().loss(single)
    assert all(value.isfinite() for value in (result.components | result.stats).values())
    assert _gradient(result, single).tolist() == [[0.0, -advantage]]


def test_kl_by_hand(batch) -> None:
    rows = batch(
        [[math.log(0.5), math.log(0.25)], [math.log(0.1), -9.0]],
        mask=[[1, 1], [1, 0]],
        advantages=[0.0, 0.0],
        scales=[0.5, 1.0],
        reference=[[math.log(0.25), math.log(0.5)], [math.log(0.1), -1.0]],
    )
    result = Grpo(beta=0.1, kl_gradient="estimator").loss(rows)
    halved, doubled = 0.5 + math.log(2) - 1, 2 - math.log(2) - 1
    assert result.stats["kl"].item() == pytest.approx(halved + doubled)
    assert result.components["kl"].item() == pytest.approx(0.1 * 0.5 * (halved + doubled))
    # beta · scale · (1 − reference / policy): up where the reference thinks more of the token
    expected = [[0.05 * (1 - 0.5), 0.05 * (1 - 2.0)], [0.0, 0.0]]
    assert _gradient(result, rows).tolist() == [pytest.approx(row) for row in expected]
