"""The contract of the KL penalty, against the exact divergence over a vocabulary of five tokens.

1. k1 and k3 have the mean of KL(policy ‖ reference); k2 is near it where the two are close. k3 is never negative.
2. The exact gradient is that of KL(policy ‖ reference) for every estimator, on and off policy, with and without the correction.
3. The gradient of k2 is that too on policy; that of k3 is the one of KL(reference ‖ policy); that of k1 is 0 in the mean.
4. Nothing outside the mask, and no extreme difference, makes anything that is not finite.
5. Beta follows Ziegler's controller: towards the target, by at most a fifth in a horizon.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms import kl
from groupwise.algorithms.base import TokenBatch
from groupwise.algorithms.kl import KlEstimator, KlGradient
from groupwise.algorithms.registry import ALGORITHMS, make

VOCABULARY = 5
ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
ALL = torch.ones(1, VOCABULARY)


def _distributions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with gradient, and the log-probabilities of reference and sampler, over five tokens."""
    logits_V = torch.tensor([0.3, -1.2, 0.8, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.5, 0.4, -0.9, 0.2, 0.7], dtype=torch.float64).log_softmax(0)
    sampling_V = torch.tensor([0.1, -0.8, 0.9, 0.4, 1.1], dtype=torch.float64).log_softmax(0)
    return logits_V, reference_V, sampling_V


def _expected(
    policy_V: torch.Tensor,
    reference_V: torch.Tensor,
    sampling_V: torch.Tensor,
    estimator: KlEstimator,
    gradient: KlGradient,
) -> torch.Tensor:
    """The expectation over tokens that the sampler draws: its weights carry no gradient."""
    log_ratio_1V = (policy_V - sampling_V)[None]
    penalty_1V = kl.penalty(
        policy_V[None], reference_V[None], log_ratio_1V, ALL, estimator, gradient
    )
    return (sampling_V.exp() * penalty_1V[0]).sum()


def _gradient(value: torch.Tensor, logits_V: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(value, logits_V, retain_graph=True)
    return gradient


def _divergence(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    return (p_V.exp() * (p_V - q_V)).sum()


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_mean_is_the_divergence(estimator: KlEstimator, on_policy: bool) -> None:
    logits_V, reference_V, sampling_V = _distributions()
    policy_V = logits_V.log_softmax(0)
    drawn_V = policy_V.detach() if on_policy else sampling_V
    found = _expected(policy_V, reference_V, drawn_V, estimator, "exact")
    assert found.item() == pytest.approx(_divergence(policy_V, reference_V).item())


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_exact_gradient_is_that_of_the_divergence(estimator: KlEstimator, on_policy: bool) -> None:
    logits_V, reference_V, sampling_V = _distributions()
    policy_V = logits_V.log_softmax(0)
    drawn_V = policy_V.detach() if on_policy else sampling_V
    found = _gradient(_expected(policy_V, reference_V, drawn_V, estimator, "exact"), logits_V)
    expected = _gradient(_divergence(policy_V, reference_V), logits_V)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cap", [1e9, 1.1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_exact_gradient_stays_exact_for_stale_samples_with_the_correction(
    name: str, cap: float
) -> None:
    """Sampler, proximal and current policy all differ; only tokens whose weight the cap cut lose some of their share."""
    logits_V, reference_V, sampling_V = _distributions()
    policy_V = logits_V.log_softmax(0)
    nudge_V = torch.tensor([0.2, 0.1, -0.3, 0.4, -0.1], dtype=torch.float64)
    proximal_V = (logits_V + nudge_V).log_softmax(0).detach()
    each_a_row = TokenBatch(
        policy_logprobs_BT=policy_V[:, None],
        sampling_logprobs_BT=sampling_V[:, None],
        proximal_logprobs_BT=proximal_V[:, None],
        reference_logprobs_BT=reference_V[:, None],
        teacher_logprobs_BT=proximal_V[:, None],
        mask_BT=torch.ones(VOCABULARY, 1),
        advantages_B=torch.zeros(VOCABULARY),
        scales_B=sampling_V.exp(),
    )
    knobs = {"importance_sampling_correction": "token_truncate", "importance_sampling_cap": cap}
    algorithm = make(name, {**knobs, "beta": 1.0, "kl_estimator": "k1"})
    found = algorithm.loss(each_a_row).components["kl"]
    weights_V = (proximal_V - sampling_V).exp()
    kept_V = weights_V.clamp(max=cap) / weights_V
    assert (kept_V < 1).any() == (cap < 2)
    share_V = kept_V * policy_V.detach().exp()
    divergence = (share_V * (policy_V - reference_V)).sum()
    assert found.item() == pytest.approx(divergence.item())
    slope = (share_V * (policy_V - reference_V).square() / 2).sum()
    torch.testing.assert_close(_gradient(found, logits_V), _gradient(slope, logits_V))
    if cap > 2:
        exact = _gradient(_divergence(policy_V, reference_V), logits_V)
        torch.testing.assert_close(_gradient(found, logits_V), exact)


def test_gradients_of_the_estimators() -> None:
    logits_V, reference_V, _ = _distributions()
    policy_V = logits_V.log_softmax(0)
    k1, k2, k3 = (
        _gradient(
            _expected(policy_V, reference_V, policy_V.detach(), estimator, "estimator"), logits_V
        )
        for estimator in ESTIMATORS
    )
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)
    torch.testing.assert_close(k2, _gradient(_divergence(policy_V, reference_V), logits_V))
    reverse = _gradient(_divergence(reference_V, policy_V), logits_V)
    torch.testing.assert_close(k3, reverse)


@given(st.lists(st.floats(-1000, 0), min_size=3, max_size=3), st.sampled_from(ESTIMATORS))
def test_always_finite_and_k2_and_k3_never_negative(
    logprobs: list[float], estimator: KlEstimator
) -> None:
    policy, reference, sampling = (torch.tensor([[value]]) for value in logprobs)
    policy.requires_grad_()
    for gradient in get_args(KlGradient):
        value = kl.penalty(
            policy, reference, policy - sampling, torch.ones(1, 1), estimator, gradient
        )
        (slope,) = torch.autograd.grad(value.sum(), policy)
        assert value.isfinite().all()
        assert slope.isfinite().all()
        assert estimator == "k1" or value.item() >= 0


@pytest.mark.parametrize("gradient", get_args(KlGradient))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_outside_the_mask_have_no_effect(
    estimator: KlEstimator, gradient: KlGradient
) -> None:
    policy = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    reference = torch.tensor([[-2.0, math.inf]])
    value = kl.penalty(
        policy, reference, torch.zeros(1, 2), torch.tensor([[1, 0]]), estimator, gradient
    )
    value.sum().backward()
    assert value[0, 1].item() == 0
    assert policy.grad is not None
    assert policy.grad[0, 1].item() == 0


@pytest.mark.parametrize(
    ("measured", "rollouts", "factor"),
    [
        (0.05, 1000, 1.0),
        (0.055, 1000, 1.01),  # a tenth above: 1 + 0.1 · 1000 / 10000
        (0.045, 1000, 0.99),
        (9.0, 1000, 1.02),  # never more than a fifth
        (0.0, 1000, 0.98),
        (-9.0, 1000, 0.98),
        (9.0, 10**9, 1.2),  # a step is one horizon at most
        (0.0, 10**9, 0.8),
        (math.nan, 1000, 1.0),
        (9.0, 0, 1.0),
    ],
)
def test_beta_moves_towards_the_target(measured: float, rollouts: int, factor: float) -> None:
    found = kl.adapted_beta(0.12, measured, 0.05, 10_000, rollouts)
    assert found == pytest.approx(0.12 * factor)


def test_an_algorithm_adapts_its_beta_and_nothing_else() -> None:
    knobs: dict[str, Any] = {"beta": 0.12, "kl_target": 0.05, "epsilon": 0.1}
    before = make("grpo", knobs)
    after = before.adapted(kl=1.0, rollouts=5000).loss_spec().knobs
    assert after.pop("beta") == pytest.approx(0.12 * 1.1)
    assert after.items() <= before.loss_spec().knobs.items()
    fixed = make("grpo", {"beta": 0.12})
    assert fixed.adapted(kl=1.0, rollouts=5000) is fixed
