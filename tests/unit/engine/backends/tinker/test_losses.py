"""The service is asked to compute our loss, in value and gradient; its results become our sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms.base import Loss
from groupwise.algorithms.registry import from_spec, make
from groupwise.core.errors import EndpointError
from groupwise.core.types import LossSpec, Row
from groupwise.engine.backends.tinker import losses
from groupwise.engine.backends.tinker.capabilities import Capabilities

SFT = from_spec(LossSpec("sft"))


def row(
    completion: tuple[int, ...], mask: tuple[int, ...], advantage: float, scale: float, **more: Any
) -> Row:
    sampled = tuple(-0.5 - 0.1 * index for index in range(len(completion)))
    return Row((5, 6, 7), completion, mask, sampled, advantage, scale, **more)


ROWS = (row((1, 2, 3), (1, 0, 1), 1.5, 0.5), row((4, 9), (1, 1), -2.0, 0.25))
CREDITED = tuple(
    row(each.completion_ids, each.mask, 0.0, 1.0, credits=credits)
    for each, credits in zip(ROWS, ((1.0, 3.0, -0.5), (0.25, -2.0)), strict=True)
)
GIVEN_LOSSES = {
    surrogate: from_spec(LossSpec("given", {"surrogate": surrogate}))
    for surrogate in ("log_probability", "ratio", "clipped_ratio", "clipped_weight")
}
NAMED: dict[str, tuple[Loss, str, tuple[Row, ...]]] = {
    "sft": (SFT, "cross_entropy", ROWS),
    "grpo": (make("grpo", {}), "ppo", ROWS),
    "dr_grpo": (make("dr_grpo", {"epsilon": 0.1, "epsilon_high": 0.3}), "ppo", ROWS),
    "dapo": (make("dapo", {}), "ppo", ROWS),
    "reinforce_pp": (make("reinforce_pp", {}), "ppo", ROWS),
    "cispo": (make("cispo", {"epsilon_high": 0.2}), "cispo", ROWS),
    "given log_probability": (GIVEN_LOSSES["log_probability"], "cross_entropy", CREDITED),
    "given ratio": (GIVEN_LOSSES["ratio"], "importance_sampling", CREDITED),
    "given clipped_ratio": (GIVEN_LOSSES["clipped_ratio"], "ppo", CREDITED),
    "given clipped_weight": (GIVEN_LOSSES["clipped_weight"], "cispo", CREDITED),
}


def by_the_service(
    named: losses.NamedLoss, numbers: Tensor, logprobs: Tensor, sampled: Tensor
) -> Tensor:
    """The loss as the client's documents define it."""
    low, high = named.settings.get(losses.LOW, 0.8), named.settings.get(losses.HIGH, 1.2)
    ratio = (logprobs - sampled).exp()
    match named.name:
        case "cross_entropy":
            value = numbers * logprobs
        case "importance_sampling":
            value = numbers * ratio
        case "ppo":
            value = torch.minimum(numbers * ratio, numbers * ratio.clamp(low, high))
        case _:
            value = numbers * ratio.detach().clamp(low, high) * logprobs
    return -value.sum()


@pytest.mark.parametrize("case", NAMED)
def test_a_named_loss_has_our_value_and_gradient(case: str) -> None:
    loss, name, rows = NAMED[case]
    denominators = {"sft": 4.0, "policy": 4.0}
    named = losses.named_loss(loss)
    assert named is not None
    assert named.name == name
    # Ratios on both sides of both bounds.
    values = ((-0.1, -0.5, -1.1), (-0.52, -0.1))
    ours = [torch.tensor(each, requires_grad=True) for each in values]
    total = losses.total_of(losses.loss_of(rows, ours, loss), denominators)
    total.backward()
    theirs = [torch.tensor(each, requires_grad=True) for each in values]
    parts = [
        by_the_service(
            named,
            torch.tensor(losses.token_numbers(each, loss, denominators)),
            logprobs,
            torch.tensor(each.sampling_logprobs),
        )
        for each, logprobs in zip(rows, theirs, strict=True)
    ]
    there = torch.stack(parts).sum()
    there.backward()
    assert there.item() == pytest.approx(total.item(), abs=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("dr_grpo", {"beta": 0.1}),
        ("dr_grpo", {"delta": 4.0}),
        ("dr_grpo", {"importance_sampling_correction": "token_truncate"}),
        ("dr_grpo", {"entropy_coef": 0.1}),
        ("cispo", {"beta": 0.1}),
        ("gspo", {"importance_sampling_correction": "none"}),
        ("rloo", {"importance_sampling_correction": "none"}),
    ],
)
def test_other_losses_are_computed_here(name: str, knobs: dict[str, Any]) -> None:
    assert losses.named_loss(make(name, knobs)) is None


MEAN = Capabilities(averages=True)


def test_where_a_service_averages_its_mean_is_our_sum() -> None:
    """Supervised, with two rows of unequal length: −1/2 Σ rows (Σ tokens) / targets, as SkyRL's engine `jax` has it."""
    named = losses.named_loss(SFT, MEAN)
    assert named is not None
    assert named == losses.WEIGHTED
    values = ((-0.1, -0.5, -1.1), (-0.52, -0.1))
    ours = [torch.tensor(each, requires_grad=True) for each in values]
    total = losses.total_of(losses.loss_of(ROWS, ours, SFT), {"sft": 4.0})
    mean = torch.zeros(())
    for each, logprobs in zip(ROWS, values, strict=True):
        numbers = losses.token_numbers(each, SFT, {"sft": 4.0})
        numbers = torch.tensor(losses.undo_averages(numbers, each, len(ROWS), MEAN))
        here = torch.tensor(logprobs)
        summed = by_the_service(named, numbers, here, torch.zeros(len(here)))
        mean = mean + summed / (len(each.prompt_ids) + len(each.completion_ids) - 1) / len(ROWS)
    assert mean.item() == pytest.approx(total.item(), abs=1e-6)
    numbers = losses.descent(total, ours)
    assert numbers[0] == pytest.approx(losses.token_numbers(ROWS[0], SFT, {"sft": 4.0}))


def test_a_loss_that_the_service_lacks_has_no_name() -> None:
    few = Capabilities(losses=frozenset({"cross_entropy", "ppo"}), sets_clips=False)
    assert losses.named_loss(make("cispo", {}), few) is None
    assert losses.named_loss(make("dr_grpo", {}), few) is not None
    assert losses.named_loss(make("dr_grpo", {"epsilon_high": 0.3}), few) is None
    assert losses.named_loss(SFT, replace(few, averages=True)) is None


class Package:
    """The two classes of the tinker package that a datum has."""

    class ModelInput:
        @staticmethod
        def from_ints(tokens: list[int]) -> list[int]:
            return tokens

    @staticmethod
    def Datum(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**fields)


def test_a_datum_has_the_next_tokens_and_nothing_at_the_prompt() -> None:
    named = losses.named_loss(make("grpo", {}))
    datum = losses.datum(Package, ROWS[0], named, (0.5, 0.0, 0.5))
    assert datum.model_input == [5, 6, 7, 1, 2]
    assert datum.loss_fn_inputs == {
        "target_tokens": [6, 7, 1, 2, 3],
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.7],
        "advantages": [0.0, 0.0, 0.5, 0.0, 0.5],
    }
    plain = losses.datum(Package, ROWS[0], None, None)
    assert plain.loss_fn_inputs == {"target_tokens": [6, 7, 1, 2, 3], "weights": [0.0] * 5}


def test_log_probabilities_are_those_of_the_completion_or_an_error() -> None:
    def output(*lengths: int) -> Any:
        values = [[-float(index) for index in range(length)] for length in lengths]
        fields = [{"logprobs": SimpleNamespace(data=each)} for each in values]
        return SimpleNamespace(loss_fn_outputs=fields)

    assert losses.completion_logprobs(ROWS, output(5, 4)) == [(-2.0, -3.0, -4.0), (-2.0, -3.0)]
    for wrong in (output(5), output(5, 3)):
        with pytest.raises(EndpointError, match="log-probabilities for datum 1 of 2"):
            losses.completion_logprobs(ROWS, wrong)


def test_sums_are_those_of_every_learner() -> None:
    result = losses.loss_of(ROWS, [torch.tensor((-0.5,) * 3), torch.tensor((-0.5,) * 2)], SFT)
    assert losses.sums_of(result) == {"loss/sft": pytest.approx(0.75), "tokens": 4.0}
