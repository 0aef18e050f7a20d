"""The KL penalty to the reference: its estimators, its gradient, and the adaptation of beta.

With d = policy − reference log-probability of a sampled token, Schulman's estimators
(http://joschu.net/blog/kl-approx.html) of KL(policy ‖ reference) are

    k1 = d        k2 = d² / 2        k3 = exp(−d) − 1 + d

The mean of k1 and of k3 over the policy's own samples is the divergence; that of k2 is close to it if the two policies are close. The
gradients differ, because the samples themselves have none:

    estimator   gradient of k2: d, which is that of KL(policy ‖ reference) on policy
                gradient of k3: 1 − exp(−d), which is that of KL(reference ‖ policy), the other direction
                gradient of k1: 1, whose mean is 0 and which does not depend on the reference: refused
    exact       ratio · d for all three, the gradient of KL(policy ‖ reference), off policy as well; the value is ratio · k. For k3 TRL
                calls this `use_bias_correction_kl`, and DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556) the unbiased estimate

each times the gradient of the token's log-probability. The ratio is that of the policy to the sampler. With an importance correction it is
the product of the ratio to the proximal policy and the correction's weight. It is then exact except for weights above the cap, which are
truncated or masked in the same way as for the policy loss. As usual, a token's effect on the tokens after it is ignored.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from groupwise.algorithms import ops
from groupwise.algorithms.base import Tensor

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
KlGradient: TypeAlias = Literal["exact", "estimator"]

FIRST_BETA, TARGET = 0.12, 0.05
"""Default start of an adaptive beta, and the default KL (nats per token) that it aims at."""

MAX_ERROR = 0.2
"""Largest relative error of the KL that the controller uses; larger errors are clipped to it."""


def estimate(
    policy_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, estimator: KlEstimator
) -> Tensor:
    """The estimate (nats) for each token, with the estimator's own gradient; 0 outside the mask."""
    ahead_BT = ops.bound_log_ratio(ops.masked_difference(policy_BT, reference_BT.detach(), mask_BT))
    if estimator == "k1":
        return ahead_BT
    if estimator == "k2":
        return ahead_BT.square() / 2
    return (-ahead_BT).expm1() + ahead_BT


def penalty(
    policy_BT: Tensor,
    reference_BT: Tensor,
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    estimator: KlEstimator,
    gradient: KlGradient,
    weights_BT: Tensor = 1.0,
) -> Tensor:
    """The penalty of each token before beta; the module's docstring gives its value and gradient.

    `log_ratio_BT` is the policy's log-probability less an old one. If the old one is not the sampler's, the detached `weights_BT` are the
    ratios from the old one to the sampler's.
    """
    value_BT = estimate(policy_BT, reference_BT, mask_BT, estimator)
    if gradient == "estimator":
        return value_BT
    beyond_BT = log_ratio_BT.abs() > ops.MAX_LOG_RATIO
    slope_BT = estimate(policy_BT, reference_BT, mask_BT, "k2").masked_fill(beyond_BT, 0.0)
    ratio_BT = ops.bound_log_ratio(log_ratio_BT).exp().detach()
    return weights_BT * ratio_BT * (value_BT.detach() + slope_BT - slope_BT.detach())


def adapted_beta(beta: float, kl: float, target: float, horizon: float, rollouts: int) -> float:
    """Beta for the next step: larger if the KL was above its target, smaller if it was below.

    This is the proportional controller of Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593, section 2.2) in the form of its code:
    beta · (1 + clip(kl / target − 1, ± 0.2) · rollouts / horizon). A step counts as one horizon at most, and a step without a finite KL
    does not change beta.
    """
    if not math.isfinite(kl):
        return beta
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return beta * (1 + error * min(rollouts / horizon, 1.0))
