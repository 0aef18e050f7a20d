"""The contract of the loss.

1. Undivided sums: those of the parts of a batch add up to those of the whole, gradients too.
2. It equals a plain loop over tokens, and its gradient finite differences.
3. On policy the gradient is that of REINFORCE; with the advantage's sign flipped it is exactly the opposite.
4. The clip acts on the side of the gain only, with a bound of its own on each side.
5. The KL penalty has the value and the gradient that were computed by hand.
6. Outside the mask nothing counts, not even NaN; without any mask everything is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from groupwise.algorithms.base import Algorithm, LossResult, TokenBatch
from groupwise.algorithms.dr_grpo import DrGrpo
from groupwise.algorithms.grpo import Grpo
from groupwise.types import Weight

PER_TOKEN = (
    "policy_logprobs_BT",
    "sampling_logprobs_BT",
    "entropies_BT",
    "reference_logprobs_BT",
)


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
        algorithm=Grpo(draw(st.sampled_from([0.0, 0.04, 1.0])), epsilon, epsilon_high),
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
    low = 1 - case.algorithm.epsilon
    epsilon_high = case.algorithm.epsilon_high
    high = 1 + (case.algorithm.epsilon if epsilon_high is None else epsilon_high)
    names = ("tokens", "ratio", "clip_low", "clip_high", "logprob_gap", "kl", "entropy")
    sums: dict[str, Any] = dict.fromkeys((*names, "loss_policy", "loss_kl"), 0.0)
    for b, t in zip(*np.nonzero(case.mask), strict=True):
        gap = policy[b, t] - case.sampling[b, t]
        ratio, advantage = math.exp(gap), case.advantages[b]
        behind = case.reference[b, t] - policy[b, t]
        kl = math.exp(behind) - behind - 1
        gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        sums["tokens"] += 1
        sums["ratio"] += ratio
        sums["clip_low"] += ratio < low and advantage < 0
        sums["clip_high"] += ratio > high and advantage > 0
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
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


@given(cases())
def test_gradient_equals_finite_differences(case: Case) -> None:
    ratio = np.exp(case.policy - case.sampling)
    edges = (
        1 - case.algorithm.epsilon,
        1 + (case.algorithm.epsilon_high or case.algorithm.epsilon),
    )
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


def _rows(batch: TokenBatch, chosen: list[int]) -> TokenBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: tensor[chosen] for name, tensor in values.items()})


@given(cases(), st.data())
def test_sums_and_gradients_do_not_depend_on_how_rows_are_cut_up(
    case: Case, data: st.DataObject
) -> None:
    batch = case.batch()
    whole = case.algorithm.loss(batch)
    part_of_row = data.draw(
        st.lists(st.integers(0, 2), min_size=len(case.mask), max_size=len(case.mask))
    )
    parts = [[row for row, part in enumerate(part_of_row) if part == wanted] for wanted in range(3)]
    results = [case.algorithm.loss(_rows(batch, rows)) for rows in parts]
    for name, value in (whole.components | whole.stats).items():
        summed = sum((part.components | part.stats)[name] for part in results)
        torch.testing.assert_close(summed, value)
    pieces = [_gradient(part, batch) for part in results]
    torch.testing.assert_close(torch.stack(pieces).sum(0), _gradient(whole, batch))


@given(cases())
def test_padding_changes_nothing(case: Case) -> None:
    batch = case.batch()
    padded = Case(
        **{
            field.name: np.pad(getattr(case, field.name), ((0, 1), (0, 3)))
            for field in fields(case)
            if field.name not in ("algorithm", "advantages", "scales")
        },
        algorithm=case.algorithm,
        advantages=np.pad(case.advantages, (0, 1)),
        scales=np.pad(case.scales, (0, 1)),
    ).batch()
    plain, wide = case.algorithm.loss(batch), case.algorithm.loss(padded)
    torch.testing.assert_close(wide.components, plain.components)
    torch.testing.assert_close(wide.stats, plain.stats)
    inside = _gradient(wide, padded)[:-1, :-3]
    torch.testing.assert_close(inside, _gradient(plain, batch))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_has_no_effect(batch, garbage: float) -> None:
    algorithm = Grpo(beta=0.1)
    mask = [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    clean = batch(
        [[-1.0, -0.5, -0.2], [-0.7, -2.0, -0.1], [-1.0, -1.0, -1.0]],
        [[-1.1, -0.5, -0.9], [-0.6, -2.2, -0.1], [-1.0, -1.0, -1.0]],
        mask=mask,
        advantages=[0.8, -0.8, 1.0],
        scales=[0.5, 0.5, 1.0],
        reference=[[-1.3, -0.5, -0.3], [-0.5, -2.0, -0.1], [-1.0, -1.0, -1.0]],
        entropies=[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]],
    )
    outside = torch.tensor(mask) == 0
    soiled = {
        name: getattr(clean, name).detach().masked_fill(outside, garbage) for name in PER_TOKEN
    }
    soiled["policy_logprobs_BT"].requires_grad_()
    empty_row = {
        name: torch.cat([getattr(clean, name)[:2], torch.tensor([garbage], dtype=torch.float64)])
        for name in ("advantages_B", "scales_B")
    }
    dirty = replace(clean, **soiled, **empty_row)
    expected, found = algorithm.loss(clean), algorithm.loss(dirty)
    for name, value in (expected.components | expected.stats).items():
        assert torch.equal((found.components | found.stats)[name], value), name
    gradient = _gradient(found, dirty)
    assert torch.equal(gradient, _gradient(expected, clean))
    assert gradient[outside].eq(0).all()


@pytest.mark.parametrize("algorithm", [Grpo(beta=0.1), DrGrpo(beta=0.1)])
@pytest.mark.parametrize("rows", [0, 2])
def test_batch_without_a_trained_token_is_zero(algorithm: Algorithm, rows: int) -> None:
    garbage = torch.full((rows, 3), math.nan)
    batch = TokenBatch(
        policy_logprobs_BT=garbage.clone().requires_grad_(),
        sampling_logprobs_BT=garbage,
        mask_BT=torch.zeros(rows, 3),
        advantages_B=torch.ones(rows),
        scales_B=torch.ones(rows),
        entropies_BT=garbage,
        reference_logprobs_BT=garbage,
    )
    result = algorithm.loss(batch)
    assert {value.item() for value in result.components.values()} == {0.0}
    assert {value.item() for value in result.stats.values()} == {0.0}
    assert torch.equal(_gradient(result, batch), torch.zeros(rows, 3))


def _on_policy(
    advantages: torch.Tensor, logits: torch.Tensor | None = None
) -> tuple[TokenBatch, torch.Tensor]:
    """Always the same tokens, sampled by the policy itself, and the logits that it is made of."""
    rng = torch.Generator().manual_seed(0)
    tokens_BT1 = torch.randint(5, (2, 4, 1), generator=rng)
    drawn = torch.randn(2, 4, 5, dtype=torch.float64, generator=rng)
    logits_BTV = drawn.requires_grad_() if logits is None else logits
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, tokens_BT1).squeeze(-1)
    batch = TokenBatch(
        policy_logprobs_BT=logprobs_BT,
        sampling_logprobs_BT=logprobs_BT.detach(),
        mask_BT=torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool(),
        advantages_B=advantages,
        scales_B=torch.tensor([1 / 3, 0.25], dtype=torch.float64),
    )
    return batch, logits_BTV


def _logit_gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    advantages_B = torch.tensor([1.5, -0.5], dtype=torch.float64)
    batch, logits_BTV = _on_policy(advantages_B)
    weights_BT = (advantages_B * batch.scales_B)[:, None] * batch.mask_BT
    reinforce = -(weights_BT * batch.policy_logprobs_BT).sum()
    expected = torch.autograd.grad(reinforce, logits_BTV, retain_graph=True)[0]
    result = DrGrpo().loss(batch)
    torch.testing.assert_close(_logit_gradient(result.components["policy"], logits_BTV), expected)
    assert result.stats["ratio"].item() == result.stats["tokens"].item() == 6
    assert result.stats["logprob_gap"].item() == 0
    assert result.components["policy"].item() == pytest.approx(-(1.5 * 3 / 3 - 0.5 * 3 / 4))


def test_flipped_advantage_flips_the_gradient_exactly() -> None:
    advantages_B = torch.tensor([0.7, -1.3], dtype=torch.float64)
    (plain, plain_logits), (flipped, flipped_logits) = map(
        _on_policy, (advantages_B, -advantages_B)
    )
    gradient = _logit_gradient(DrGrpo().loss(plain).components["policy"], plain_logits)
    opposite = _logit_gradient(DrGrpo().loss(flipped).components["policy"], flipped_logits)
    assert gradient.abs().sum() > 0
    assert torch.equal(opposite, -gradient)


def test_step_against_the_gradient_makes_the_rewarded_tokens_likelier() -> None:
    batch, logits_BTV = _on_policy(torch.tensor([1.0, -1.0], dtype=torch.float64))
    gradient = _logit_gradient(DrGrpo().loss(batch).components["policy"], logits_BTV)
    with torch.no_grad():
        logits_BTV -= 0.01 * gradient
    after, _ = _on_policy(batch.advantages_B, logits_BTV)
    change = after.policy_logprobs_BT - batch.policy_logprobs_BT
    assert (change[0][batch.mask_BT[0]] > 0).all()
    assert (change[1][batch.mask_BT[1]] < 0).all()


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


def test_upper_bound_is_the_lower_one_unless_given(batch) -> None:
    token = batch([[math.log(1.4) - 2]], [[-2.0]], advantages=[1.0])
    assert Grpo(epsilon=0.3).loss(token).components["policy"].item() == pytest.approx(-1.3)
    assert Grpo(epsilon=0.5).loss(token).components["policy"].item() == pytest.approx(-1.4)


def test_kl_by_hand(batch) -> None:
    rows = batch(
        [[math.log(0.5), math.log(0.25)], [math.log(0.1), -9.0]],
        mask=[[1, 1], [1, 0]],
        advantages=[0.0, 0.0],
        scales=[0.5, 1.0],
        reference=[[math.log(0.25), math.log(0.5)], [math.log(0.1), -1.0]],
    )
    result = Grpo(beta=0.1).loss(rows)
    halved, doubled = 0.5 + math.log(2) - 1, 2 - math.log(2) - 1
    assert result.stats["kl"].item() == pytest.approx(halved + doubled)
    assert result.components["kl"].item() == pytest.approx(0.1 * 0.5 * (halved + doubled))
    # beta · scale · (1 − reference / policy): up where the reference thinks more of the token
    expected = [[0.05 * (1 - 0.5), 0.05 * (1 - 2.0)], [0.0, 0.0]]
    assert _gradient(result, rows).tolist() == [pytest.approx(row) for row in expected]


def test_without_beta_a_reference_is_only_measured(batch) -> None:
    rows = batch([[-1.0]], advantages=[1.0], reference=[[-2.0]])
    result = Grpo().loss(rows)
    assert result.components.keys() == {"policy"}
    assert result.stats["kl"].item() == pytest.approx(math.exp(-1.0))
    assert _gradient(result, rows).item() == -1.0


def test_penalty_without_reference_says_what_to_do(batch) -> None:
    rows = batch([[-1.0]], advantages=[1.0])
    with pytest.raises(ValueError, match=r"grpo with beta 0\.1 needs the reference's"):
        Grpo(beta=0.1).loss(rows)


def test_stats_are_detached_and_say_only_what_is_known(batch) -> None:
    result = Grpo().loss(batch([[-1.0, -2.0]], mask=[[1, 0]], advantages=[1.0]))
    assert result.stats.keys() == {"tokens", "ratio", "clip_low", "clip_high", "logprob_gap"}
    assert not any(value.requires_grad for value in result.stats.values())


def test_gradient_reaches_the_policy_only(batch) -> None:
    rows = batch([[-1.0]], advantages=[1.0], reference=[[-2.0]])
    others = {
        name: torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
        for name in ("sampling_logprobs_BT", "reference_logprobs_BT")
    }
    result = Grpo(beta=0.5).loss(replace(rows, **others))
    torch.stack(list(result.components.values())).sum().backward()
    assert all(tensor.grad is None for tensor in others.values())
    assert rows.policy_logprobs_BT.grad is not None


@pytest.mark.parametrize("name", ["advantages_B", "scales_B", "sampling_logprobs_BT", "mask_BT"])
def test_shapes_that_would_broadcast_are_refused(batch, name: str) -> None:
    rows = batch([[-1.0, -1.0], [-1.0, -1.0]], advantages=[1.0, 1.0])
    with pytest.raises(AssertionError):
        replace(rows, **{name: getattr(rows, name)[:1]})
    with pytest.raises(AssertionError):
        replace(rows, **{name: getattr(rows, name).unsqueeze(-1)})


@pytest.mark.parametrize("kind", [Grpo, DrGrpo])
def test_what_teaches(kind: type[Grpo | DrGrpo]) -> None:
    silent, loud = Weight(0.0, 1.0), Weight(-0.1, 1.0)
    assert kind().teaches([None, silent, loud])
    assert not kind().teaches([None, silent, silent])
    assert kind(beta=0.01).teaches([None, silent])
    assert not kind(beta=0.01).teaches([None, None])
    assert not kind(beta=0.01).teaches([])


def test_reference_is_needed_only_for_the_penalty() -> None:
    assert not Grpo().needs_reference
    assert Grpo(beta=0.01).needs_reference
