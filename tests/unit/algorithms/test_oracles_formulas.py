"""Advantages and losses against a few lines of the papers' formulas, for which no installable package has the code.

Each oracle is written in tensors and in the order of its paper, so that it shares neither code nor form with ours. Both sides compute in
float64 and agree to 1e-12, or to the small constant beside a divisor where theirs is another one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.algorithms.clip_cov import ClipCov
from groupwise.algorithms.gdpo import Gdpo
from groupwise.algorithms.gigpo import Gigpo
from groupwise.algorithms.pass_at_k import best_of_k
from groupwise.algorithms.registry import make
from groupwise.algorithms.rloo import Rloo
from groupwise.core.types import Example, Group, RewardPart, Rollout, RolloutCredit, Segment
from tests.unit.algorithms.oracle_problems import Problem, problem

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def _advantages(algorithm: Any, group: Group) -> list[float]:
    return [credit.advantage for credit in algorithm.credits([group])[0]]


# MaxRL


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [3, -1, -1, -1]),
        ([1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ([0, 0, 0, 0], [0] * 4),
        ([1, -1, -1, 0], [0] * 4),  # no positive mean, no signal
    ],
)
def test_max_rl_divides_by_the_mean(group, rewards: list[float], expected: list[float]) -> None:
    assert _advantages(make("max_rl", {}), group(*map(float, rewards))) == pytest.approx(expected)


def test_max_rl_is_the_gradient_of_the_truncated_likelihood() -> None:
    """Over all outcomes of G attempts of chance p, it is that of −Σ_{k < G} (1 − p)^k / k, which is Σ_{k < G} (1 − p)^(k − 1)."""
    chance, attempts = 0.3, 4
    expected = sum((1 - chance) ** k for k in range(attempts - 1))
    found = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=attempts):
        weight = math.prod(chance if success else 1 - chance for success in outcome)
        members = tuple(_rollout(member, reward) for member, reward in enumerate(outcome))
        advantages = _advantages(make("max_rl", {}), Group(0, Example(0, "?"), members))
        # The slope of the log-chance of an outcome: 1/p for a success, −1/(1 − p) otherwise.
        slopes = [1 / chance if success else -1 / (1 - chance) for success in outcome]
        found += weight * sum(map(math.prod, zip(advantages, slopes, strict=True))) / attempts
    assert found == pytest.approx(expected)


# Pass@k


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("successes", [1, 3, 6])
def test_pass_at_k_is_the_analytic_advantage_of_binary_rewards(successes: int, k: int) -> None:
    count = 8
    rewards = [1.0] * successes + [0.0] * (count - successes)
    rho = 1 - math.comb(count - successes, k) / math.comb(count, k)
    sigma = math.sqrt(rho * (1 - rho)) + 1e-6
    share = math.comb(count - successes - 1, k - 1) / math.comb(count - 1, k - 1)
    expected = [(1 - rho) / sigma] * successes + [(1 - rho - share) / sigma] * (count - successes)
    assert best_of_k(rewards, k, "mean") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_of_any_reward_is_the_mean_over_all_sets(k: int) -> None:
    rewards = [0.2, 1.5, -0.3, 0.2, 0.9]
    sets = list(itertools.combinations(range(5), k))
    best = torch.tensor([max(rewards[i] for i in chosen) for chosen in sets], dtype=torch.float64)
    spread = best.std(correction=0) + 1e-6
    for index in range(5):
        with_it = [chosen for chosen in sets if index in chosen]
        mean = sum(max(rewards[i] for i in chosen) for chosen in with_it) / len(with_it)
        gain = [
            max(rewards[i] for i in chosen)
            - max((rewards[i] for i in chosen if i != index), default=0.0)
            for chosen in with_it
        ]
        expected = 0.0 if k == 5 else ((mean - best.mean()) / spread).item()
        assert best_of_k(rewards, k, "mean")[index] == pytest.approx(expected)
        found = best_of_k(rewards, k, "leave_one_out")[index]
        assert found == pytest.approx(sum(gain) / len(gain))


def test_pass_at_k_of_the_whole_group_pays_the_best_its_lead() -> None:
    """The advantages of verl's `grpo_passk` without its division by the spread."""
    assert best_of_k([0.1, 0.9, 0.4], 3, "leave_one_out") == pytest.approx([0, 0.5, 0])


# GDPO


def test_gdpo_standardises_each_reward_first() -> None:
    values = torch.tensor(
        [[[1.0, 5.0], [0.0, 9.0], [1.0, 7.0]], [[0.0, 2.0], [0.0, 2.0], [1.0, 3.0]]],
        dtype=torch.float64,
    )
    weights = (1.0, 0.5)
    groups = [
        Group(
            draw,
            Example(draw, "?"),
            tuple(_with_parts(m, row, weights) for m, row in enumerate(rows)),
        )
        for draw, rows in enumerate(values.tolist())
    ]
    standardised = (values - values.mean(1, keepdim=True)) / (values.std(1, keepdim=True) + 1e-4)
    sums = (standardised * torch.tensor(weights)).sum(-1).flatten()
    expected = (sums - sums.mean()) / (sums.std() + 1e-4)
    found = [credit.advantage for credits in Gdpo().credits(groups) for credit in credits if credit]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, **CLOSE)


def _with_parts(member: int, values: list[float], weights: tuple[float, ...]) -> Rollout:
    parts = tuple(
        RewardPart(f"reward_{index}", value, weight)
        for index, (value, weight) in enumerate(zip(values, weights, strict=True))
    )
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return replace(_rollout(member, total), parts=parts)


# Turns: GiGPO, and leave-one-out


def _rollout(
    member: int, reward: float, *states: int, turn_rewards: tuple[float, ...] = ()
) -> Rollout:
    """A turn of two tokens after the prompt, and after each answer of the environment, which is one token."""
    wrote = Segment("policy", (5, 6), sampling_logprobs=(-1.0, -0.5), finish_reason="stop")
    answers = [segment for state in states for segment in (Segment("environment", (state,)), wrote)]
    parts = tuple(RewardPart("step", value, 1.0, turn) for turn, value in enumerate(turn_rewards))
    return Rollout(
        0, member, 0, (1,), (wrote, *answers), "", outcome="scored", reward=reward, parts=parts
    )


TURNS = Group(
    0,
    Example(0, "?"),
    (
        _rollout(0, 2.0, 30, 40, turn_rewards=(0.5, 0.0, 0.5)),  # 1 at the end
        _rollout(1, 0.0, 40),
        _rollout(2, 1.0, 30, 30),
    ),
)
RETURNS = [[0.5 + 0.9 * 0.9 * 1.5, 0.9 * 1.5, 1.5], [0.0, 0.0], [0.81, 0.9, 1.0]]


def _by_turn(credit: RolloutCredit | None) -> list[float]:
    assert credit is not None
    assert credit.token_advantages is not None
    assert credit.token_advantages[::2] == credit.token_advantages[1::2]
    return list(credit.token_advantages[::2])


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_compares_turns_from_the_same_state(scale: Any) -> None:
    def relative(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if len(values) == 1:
            return [0.0]
        spread = tensor.std() + 1e-4 if scale == "group" else 1.0
        return ((tensor - tensor.mean()) / spread).tolist()

    whole = relative([2.0, 0.0, 1.0])
    first = relative([returns[0] for returns in RETURNS])
    at_30 = relative([RETURNS[0][1], RETURNS[2][1], RETURNS[2][2]])
    at_40 = relative([RETURNS[0][2], RETURNS[1][1]])
    steps = [[first[0], at_30[0], at_40[0]], [first[1], at_40[1]], [first[2], at_30[1], at_30[2]]]
    algorithm = Gigpo(turn_discount=0.9, step_advantage_weight=0.7, scale_rewards=scale)
    for member, credit in enumerate(algorithm.credits([TURNS])[0]):
        expected = [whole[member] + 0.7 * step for step in steps[member]]
        assert _by_turn(credit) == pytest.approx(expected)


def test_rloo_with_turns_leaves_one_out_in_each() -> None:
    found = [_by_turn(credit) for credit in Rloo(turn_discount=0.9).credits([TURNS])[0]]
    for member, returns in enumerate(RETURNS):
        for turn, value in enumerate(returns):
            others = [r[turn] for m, r in enumerate(RETURNS) if m != member and turn < len(r)]
            assert found[member][turn] == pytest.approx(value - sum(others) / len(others))


# Losses with an advantage for each token: GSPO-token, entropy-based shaping, Clip-Cov


def _with_credits(steps: Problem, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Random advantages for each token, and the loss with them."""
    rng = torch.Generator().manual_seed(9)
    credits_BT = torch.randn(steps.mask_BT.shape, dtype=torch.float64, generator=rng)
    rows = replace(steps.batch(algorithm), credits_BT=credits_BT)
    loss = (
        algorithm.loss(rows).components["policy"]
        / algorithm.denominators(steps.groups, 12)["policy"]
    )
    return credits_BT, loss


def _assert_same(steps: Problem, found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(steps.gradients(found)[0], steps.gradients(expected)[0], **CLOSE)


def test_gspo_with_advantages_of_tokens_is_gspo_token() -> None:
    """Equation 14 with the advantage of each token, as TRL's `importance_sampling_level: sequence_token` has it."""
    steps = problem(1)
    knobs = {"importance_sampling_correction": "none", "epsilon": 0.05, "epsilon_high": 0.1}
    advantages, found = _with_credits(steps, make("gspo", knobs))
    mask = steps.mask_BT
    log_ratio = steps.policy_BT - steps.sampling_BT
    sequence = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    ratio = (steps.policy_BT - steps.policy_BT.detach() + sequence.detach()).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.95, 1.1) * advantages)
    _assert_same(steps, found, -((surrogate * mask).sum(-1) / mask.sum(-1)).mean())


@pytest.mark.parametrize("share", [0.4, 5.0])
def test_entropy_raises_the_advantage_up_to_a_part_of_it(share: float) -> None:
    """ψ(H) = min(α · H.detach(), |A| / κ), added to A."""
    steps = problem(2)
    algorithm = make("dapo", {"entropy_advantage": share, "entropy_advantage_cap": 3.0})
    mask = steps.mask_BT
    advantages = torch.tensor(
        [[w.advantage] for w in steps.weights(algorithm) if w], dtype=torch.float64
    )
    shaped = advantages + torch.min(share * steps.entropies_BT.detach(), advantages.abs() / 3)
    ratio = (steps.policy_BT - steps.sampling_BT).exp()
    surrogate = torch.min(ratio * shaped, ratio.clamp(0.8, 1.28) * shaped)
    found, _ = steps.loss(algorithm)
    _assert_same(steps, found, -(surrogate * mask).sum() / mask.sum())


def test_clip_cov_leaves_out_tokens_between_the_bounds() -> None:
    """On policy, and with a share that takes every one of them, it is verl's `clip_cov`."""
    steps = _recording(problem(4), "policy_BT")
    algorithm = ClipCov(clip_cov_ratio=1.0, clip_cov_low=0.2, clip_cov_high=1.5)
    (credits_BT, advantages_B), mask = _credits(steps, algorithm), steps.mask_BT
    values = steps.policy_BT.detach()
    mean_advantage = (advantages_B[:, None] * mask).sum() / mask.sum()
    covariance = (advantages_B[:, None] - mean_advantage) * (values - values[mask].mean())
    left_out = (covariance > 0.2) & (covariance < 1.5) & mask
    assert 3 < left_out.sum() < mask.sum() / 2
    expected = (advantages_B[:, None] * mask).masked_fill(left_out, 0.0)
    torch.testing.assert_close(credits_BT, expected, **CLOSE)


def test_clip_cov_takes_its_share_and_the_same_in_any_order() -> None:
    steps = _recording(problem(4), "policy_BT")
    algorithm = ClipCov(clip_cov_ratio=0.05, clip_cov_low=0.2, clip_cov_high=1.5)
    credits_BT, _ = _credits(steps, algorithm)
    assert (credits_BT[steps.mask_BT] == 0).sum() == int(0.05 * steps.mask_BT.sum())
    turned = [replace(g, rollouts=g.rollouts[::-1]) for g in reversed(steps.groups)]
    again = [credit for credits in algorithm.credits(turned) for credit in credits]
    known = [credit for credits in algorithm.credits(steps.groups) for credit in credits]
    assert again[::-1] == known


@pytest.mark.parametrize("share", [1e-6, 0.1])
def test_kl_cov_holds_the_tokens_of_the_largest_covariance(share: float) -> None:
    """With the choice by the sampler's log-probabilities, it is verl's `kl_cov`."""
    steps = _recording(problem(4), "sampling_BT")
    algorithm = make("kl_cov", {"kl_cov_ratio": share, "kl_cov_coef": 0.7})
    (credits_BT, advantages_B), mask = _credits(steps, algorithm), steps.mask_BT
    advantages = advantages_B[:, None].expand_as(mask)
    values = steps.sampling_BT
    covariance = (advantages - advantages[mask].mean()) * (values - values[mask].mean())
    covariance = covariance.masked_fill(~mask | (advantages == 0), -math.inf)
    chosen = torch.zeros_like(mask)
    count = max(1, int(share * mask.sum()))
    chosen.view(-1)[covariance.view(-1).topk(count).indices] = True
    log_ratio = steps.policy_BT - steps.sampling_BT
    expected = -log_ratio.exp() * advantages + 0.7 * log_ratio.abs() * chosen
    batch = replace(steps.batch(algorithm), credits_BT=credits_BT)
    found = algorithm.loss(batch).components["policy"] / mask.sum()
    _assert_same(steps, found, (expected * mask).sum() / mask.sum())


def _recording(steps: Problem, name: str) -> Problem:
    """The steps with rollouts that record these log-probabilities as the sampler's."""
    rows = iter(zip(getattr(steps, name).tolist(), steps.mask_BT.sum(-1).tolist(), strict=True))

    def recorded(rollout: Rollout) -> Rollout:
        values, length = next(rows)
        (segment,) = rollout.segments
        return replace(
            rollout, segments=(replace(segment, sampling_logprobs=tuple(values[:length])),)
        )

    groups = tuple(replace(g, rollouts=tuple(map(recorded, g.rollouts))) for g in steps.groups)
    return replace(steps, groups=groups)


def _credits(steps: Problem, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of tokens, padded, and of rollouts."""
    credits = [credit for of_group in algorithm.credits(steps.groups) for credit in of_group]
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(credit.token_advantages, dtype=torch.float64) for credit in credits],
        batch_first=True,
    )
    width = steps.mask_BT.shape[1] - padded.shape[1]
    advantages = torch.tensor([credit.advantage for credit in credits], dtype=torch.float64)
    return torch.nn.functional.pad(padded, (0, width)), advantages
