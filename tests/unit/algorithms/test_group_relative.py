"""The contract of every algorithm's loss, with every knob that it has.

1. Undivided sums: those of the parts of a batch add up to those of the whole, gradients too.
2. On policy the gradient is that of REINFORCE with the algorithm's scale.
3. Outside the mask nothing counts, not even NaN; without any mask everything is 0, not NaN.
4. The numerator has the same tokens as the denominator.
5. The entropy bonus is the mean entropy of the step's tokens; the gradient reaches policy and entropies only.
6. Only groups with a difference by the task are accepted, where that is asked for.
7. A rollout in several rows has the loss and the gradient that it would have in one.
8. Ratios too large or small for float32 leave losses, statistics and gradients finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.algorithms.base import Algorithm, LossResult, SiblingSums, TokenBatch
from groupwise.algorithms.registry import ALGORITHMS, make
from groupwise.core.types import RolloutCredit

KNOBS: list[dict[str, Any]] = [
    {"importance_sampling_correction": "none"},
    {"beta": 0.1, "importance_sampling_correction": "sequence_mask", "importance_sampling_cap": 1.1},
    {"beta": 0.3, "kl_gradient": "estimator", "importance_sampling_correction": "token_mask"},
    {"entropy_coef": 0.2, "importance_sampling_correction": "sequence_truncate"},
    {"beta": 0.1, "kl_estimator": "k1", "importance_sampling_correction": "token_truncate"},
    {"top_entropy_quantile": 0.4, "entropy_advantage": 0.4, "importance_sampling_correction": "none"},
    {"importance_sampling_correction": "token_mask", "importance_sampling_cap": 1.2, "importance_sampling_floor": 0.9},
]  # fmt: skip
PER_TOKEN = [field.name for field in fields(TokenBatch) if field.name.endswith("logprobs_BT")]
PER_TOKEN += ["entropies_BT", "credits_BT"]


def _gradients(result: LossResult, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the summed loss, for policy log-probabilities and entropies."""
    loss = torch.stack(list(result.components.values())).sum()
    wanted: tuple[Any, Any] = (batch.policy_logprobs_BT, batch.entropies_BT)
    policy, entropies = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return policy, entropies


@st.composite
def algorithms(draw: st.DrawFn) -> Algorithm:
    return with_rewards(draw(st.sampled_from(sorted(ALGORITHMS))), draw(st.sampled_from(KNOBS)))


def with_rewards(name: str, knobs: dict[str, Any]) -> Algorithm:
    """The algorithm, which learns from rewards whatever else it learns from."""
    return make(name, {**knobs, **({"reward_weight": 1.0} if name == "distillation" else {})})


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    """Masks with holes and empty rows, ratios on both sides of every bound."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def normal(spread: float) -> torch.Tensor:
        return spread * torch.randn(rows, tokens, dtype=torch.float64, generator=rng)

    policy = -normal(1.5).abs()
    return TokenBatch(
        policy_logprobs_BT=policy.clone().requires_grad_(),
        sampling_logprobs_BT=policy + normal(0.3),
        mask_BT=torch.randint(2, (rows, tokens), generator=rng),
        advantages_B=normal(1.0)[:, 0],
        scales_B=normal(1.0)[:, 0].abs(),
        entropies_BT=normal(2.0).abs().requires_grad_(),
        reference_logprobs_BT=policy + normal(0.7),
        proximal_logprobs_BT=policy + normal(0.2),
        credits_BT=normal(1.0) if draw(st.booleans()) else None,
        teacher_logprobs_BT=policy + normal(0.5),
        others=SiblingSums(
            torch.randint(5, (rows,), generator=rng), normal(0.3)[:, 0], normal(0.3)[:, 0]
        )
        if draw(st.booleans())
        else None,
    )


def _changed(batch: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The batch with every tensor changed."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(
        batch,
        **{
            name: _changed(value, change) if name == "others" else change(name, value)
            for name, value in values.items()
            if value is not None
        },
    )


def _rows(batch: TokenBatch, chosen: list[int]) -> TokenBatch:
    return _changed(batch, lambda _, tensor: tensor[chosen])


@given(algorithms(), batches(), st.data())
def test_sums_and_gradients_do_not_depend_on_how_rows_are_cut_up(
    algorithm: Algorithm, batch: TokenBatch, data: st.DataObject
) -> None:
    whole = algorithm.loss(batch)
    count = len(batch.mask_BT)
    part_of_row = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    parts = [[row for row, part in enumerate(part_of_row) if part == wanted] for wanted in range(3)]
    results = [algorithm.loss(_rows(batch, rows)) for rows in parts]
    for name, value in (whole.components | whole.stats).items():
        summed = sum((part.components | part.stats)[name] for part in results)
        torch.testing.assert_close(summed, value)
    for pieces, expected in zip(
        zip(*(_gradients(part, batch) for part in results), strict=True),
        _gradients(whole, batch),
        strict=True,
    ):
        torch.testing.assert_close(torch.stack(pieces).sum(0), expected)


@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
@given(algorithms(), batches())
def test_garbage_outside_the_mask_has_no_effect(
    garbage: float, algorithm: Algorithm, batch: TokenBatch
) -> None:
    outside = batch.mask_BT == 0
    empty = outside.all(-1)
    soiled = {
        name: getattr(batch, name).detach().masked_fill(outside, garbage)
        for name in PER_TOKEN
        if getattr(batch, name) is not None
    }
    soiled |= {
        name: getattr(batch, name).masked_fill(empty, garbage)
        for name in ("advantages_B", "scales_B")
    }
    dirty = replace(batch, **soiled)
    dirty.policy_logprobs_BT.requires_grad_()
    dirty.entropies_BT.requires_grad_()
    expected, found = algorithm.loss(batch), algorithm.loss(dirty)
    for name, value in (expected.components | expected.stats).items():
        assert torch.equal((found.components | found.stats)[name], value), name
    for gradient, clean in zip(_gradients(found, dirty), _gradients(expected, batch), strict=True):
        assert torch.equal(gradient, clean)
        assert gradient[outside].eq(0).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_ratios_leave_everything_finite(name: str) -> None:
    policy_BT = torch.tensor([[-1e-3] * 3, [-200.0] * 3] * 2)
    old_BT = policy_BT.flip(0)
    for knobs in KNOBS:
        batch = TokenBatch(
            policy_logprobs_BT=policy_BT.clone().requires_grad_(),
            sampling_logprobs_BT=old_BT,
            mask_BT=torch.ones(4, 3),
            advantages_B=torch.tensor([1.0, 1.0, -1.0, -1.0]),
            scales_B=torch.ones(4),
            entropies_BT=torch.ones(4, 3, requires_grad=True),
            reference_logprobs_BT=old_BT,
            proximal_logprobs_BT=old_BT,
            teacher_logprobs_BT=old_BT,
        )
        result = with_rewards(name, knobs).loss(batch)
        assert all(value.isfinite() for value in (result.components | result.stats).values())
        assert all(gradient.isfinite().all() for gradient in _gradients(result, batch))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_batch_without_a_trained_token_is_zero(name: str) -> None:
    for knobs in KNOBS:
        for rows in (0, 2):
            _assert_zero(with_rewards(name, knobs), rows)


def _assert_zero(algorithm: Algorithm, rows: int) -> None:
    garbage = torch.full((rows, 3), math.nan)
    batch = TokenBatch(
        policy_logprobs_BT=garbage.clone().requires_grad_(),
        sampling_logprobs_BT=garbage,
        mask_BT=torch.zeros(rows, 3),
        advantages_B=torch.ones(rows),
        scales_B=torch.ones(rows),
        entropies_BT=garbage.clone().requires_grad_(),
        reference_logprobs_BT=garbage,
        proximal_logprobs_BT=garbage,
        teacher_logprobs_BT=garbage,
    )
    result = algorithm.loss(batch)
    assert {value.item() for value in result.components.values()} == {0.0}
    assert {value.item() for value in result.stats.values()} == {0.0}
    for gradient in _gradients(result, batch):
        assert torch.equal(gradient, torch.zeros(rows, 3))


def _cut_in_two(batch: TokenBatch, at: int, bounds: tuple[float, float]) -> TokenBatch:
    """The one row of a batch as two, the first the shorter, each of which knows the sums of the other."""
    rest = batch.mask_BT.shape[1] - at

    def two(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("_B"):
            return tensor.repeat(2)
        padded = torch.nn.functional.pad(tensor[:, :at], (0, rest - at))
        return torch.cat([padded, tensor[:, at:]])

    pair = _changed(batch, two)
    return replace(pair, others=_sums_of_the_other(pair, bounds))


def _sums_of_the_other(pair: TokenBatch, bounds: tuple[float, float]) -> SiblingSums:
    def other(values_BT: torch.Tensor | int) -> torch.Tensor:
        return (values_BT * pair.mask_BT).sum(-1).flip(0).detach()

    return SiblingSums(
        tokens_B=other(1),
        log_weights_B=other(pair.proximal_logprobs_BT - pair.sampling_logprobs_BT),
        log_ratios_B=other((pair.policy_logprobs_BT - pair.proximal_logprobs_BT).clamp(*bounds)),
    )


@pytest.mark.parametrize(
    ("mode", "cap"), [("token_truncate", 1.1), ("sequence_truncate", 1.1), ("sequence_mask", 50.0)]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_rollout_is_the_same_in_one_row_and_in_two(name: str, mode: str, cap: float) -> None:
    rng = torch.Generator().manual_seed(5)
    policy = -torch.rand(1, 7, dtype=torch.float64, generator=rng)
    near = [policy + 0.2 * torch.randn(1, 7, dtype=torch.float64, generator=rng) for _ in range(3)]
    whole = TokenBatch(
        policy_logprobs_BT=policy.clone().requires_grad_(),
        sampling_logprobs_BT=near[0],
        proximal_logprobs_BT=near[1],
        reference_logprobs_BT=near[2],
        teacher_logprobs_BT=near[2],
        mask_BT=torch.tensor([[1, 1, 0, 1, 1, 0, 1]]),
        advantages_B=torch.tensor([0.7], dtype=torch.float64),
        scales_B=torch.tensor([0.2], dtype=torch.float64),
    )
    knobs = {"importance_sampling_correction": mode, "importance_sampling_cap": cap, "beta": 0.1}
    clip = {"epsilon": 0.9, "epsilon_high": 0.1 if name == "gmpo" else 9.0}
    known = {knob.name for knob in fields(ALGORITHMS[name])}
    algorithm = make(name, knobs | {key: value for key, value in clip.items() if key in known})
    cut = _cut_in_two(whole, 3, algorithm.log_ratio_bounds(0.7))
    results = [algorithm.loss(batch) for batch in (whole, cut)]
    gradients = [
        torch.autograd.grad(
            torch.stack(list(result.components.values())).sum(), whole.policy_logprobs_BT
        )[0]
        for result in results
    ]
    torch.testing.assert_close(*[result.components for result in results])
    torch.testing.assert_close(*[result.stats for result in results])
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_gradient_is_that_of_reinforce(name: str, batch) -> None:
    policy = [[-1.0, -0.5, -0.3], [-0.7, -0.2, -1.1]]
    mask = [[1, 1, 1], [1, 0, 1]]
    rows = batch(policy, proximal=policy, mask=mask, advantages=[1.5, -0.5], scales=[0.5, 0.25])
    result = make(name, {}).loss(rows)
    gradient, _ = _gradients(result, replace(rows, entropies_BT=rows.policy_logprobs_BT))
    expected = -torch.tensor([[0.75, 0.75, 0.75], [-0.125, 0, -0.125]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert result.stats["ratio"].item() == result.stats["tokens"].item() == 5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_numerator_and_denominator_count_the_same_tokens(
    name: str, rollout, group, weighted
) -> None:
    """With every surrogate and entropy 1, whatever is divided by tokens is exactly 1."""
    knobs = {"mask_truncated_completions": True, "entropy_coef": 1.0}
    algorithm = make(name, {**knobs, "importance_sampling_correction": "none"})
    step = [group(rollout(0, 0.0, tokens=2), rollout(1, 1.0, tokens=4, truncated=True), None)]
    (weights,) = algorithm.credits(step)
    assert [weight is None for weight in weights] == [False, True, True]
    flat = [[-1.0, -1.0]]
    rows = weighted([RolloutCredit(1.0, weights[0].scale)], flat, entropies=[[1.0, 1.0]])
    denominators = algorithm.denominators(step, 8)
    result = algorithm.loss(rows)
    assert denominators["entropy"] == 2.0
    assert (result.components["entropy"] / denominators["entropy"]).item() == -1.0
    per_token = {"dapo", "cispo", "reinforce_pp", "max_rl", "pass_at_k", "gigpo", "clip_cov"}
    per_token |= {"kl_cov", "distillation"}
    assert denominators["policy"] == (
        2.0 if name in per_token else 16.0 if name == "dr_grpo" else 2.0
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=20)
@given(drawn=batches())
def test_in_the_first_update_the_policy_is_the_proximal_one(name: str, drawn: TokenBatch) -> None:
    algorithm = make(name, {"importance_sampling_correction": "sequence_mask", "beta": 0.1})
    found: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []
    for proximal in (drawn.policy_logprobs_BT.detach().clone(), None):
        leaf = drawn.policy_logprobs_BT.detach().clone().requires_grad_()
        rows = replace(drawn, policy_logprobs_BT=leaf, proximal_logprobs_BT=proximal)
        result = algorithm.loss(rows)
        torch.stack(list(result.components.values())).sum().backward()
        assert leaf.grad is not None
        found.append((result.stats, leaf.grad))
    (wanted, wanted_gradient), (stats, gradient) = found
    assert stats.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in stats.items())
    assert torch.equal(gradient, wanted_gradient)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_dynamic_sampling_accepts_what_differs(name: str, group) -> None:
    plain = make(name, {"dynamic_sampling": False})
    assert plain.resample_rounds == 0
    assert plain.accepts(group(1.0, 1.0))
    choosy = with_rewards(name, {"dynamic_sampling": True, "max_resample_rounds": 4})
    assert choosy.resample_rounds == 4
    assert choosy.accepts(group(0.0, 1.0))
    assert choosy.accepts(group(0.0, 1.0, None)), "a failed member costs its group nothing"
    for silent in (
        group(1.0, 1.0),
        group(0.1 + 0.2, 0.3),
        group(1.0),
        group(0.5, None),
        group(None),
    ):
        assert not choosy.accepts(silent)


@pytest.mark.parametrize(
    ("knobs", "need", "tensor"),
    [
        ({"beta": 0.1}, "needs_reference", "reference_logprobs_BT"),
        ({"entropy_coef": 0.1}, "needs_entropy_gradient", "entropies_BT"),
        ({"entropy_advantage": 0.1}, None, "entropies_BT"),
        ({"top_entropy_quantile": 0.1}, None, "entropies_BT"),
    ],
)
def test_a_missing_tensor_is_named_with_the_knob_that_needs_it(
    knobs: dict[str, Any], need: str | None, tensor: str, batch
) -> None:
    algorithm = make("grpo", knobs)
    (knob, value), *_ = knobs.items()
    assert need is None or getattr(algorithm, need)
    with pytest.raises(ValueError, match=rf"{knob} {value} needs {tensor}"):
        algorithm.loss(batch([[-1.0]], advantages=[1.0]))


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"kl_target": 0.05}, r"grpo\.kl_target is 0\.05, but beta is 0"),
        ({"beta": 0.1, "kl_estimator": "k1", "kl_gradient": "estimator"}, "the reference"),
        (
            {
                "importance_sampling_correction": "token_mask",
                "importance_sampling_floor": 4.0,
            },
            r"floor is 4.*cap.*3",
        ),
        ({"delta": 1.1}, r"grpo\.delta is 1\.1.*1\.2"),
    ],
)
def test_knobs_that_do_not_go_together(knobs: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make("grpo", knobs)


def test_gradient_reaches_policy_and_entropies_only() -> None:
    names = [name for name in PER_TOKEN if name not in ("policy_logprobs_BT", "entropies_BT")]
    leaf: Any = {name: torch.tensor([[-1.5]]).requires_grad_() for name in PER_TOKEN}
    leaf |= {name: torch.tensor([1.0]).requires_grad_() for name in ("advantages_B", "scales_B")}
    rows = TokenBatch(mask_BT=torch.ones(1, 1), **{**leaf, "credits_BT": None})
    for name in ALGORITHMS:
        knobs = {"beta": 0.5, "entropy_coef": 0.5, "importance_sampling_correction": "token_mask"}
        result = make(name, knobs).loss(rows)
        torch.stack(list(result.components.values())).sum().backward()
        assert all(leaf[other].grad is None for other in names)
        assert leaf["policy_logprobs_BT"].grad is not None
        assert leaf["entropies_BT"].grad.item() == -0.5
        leaf["entropies_BT"].grad = None
