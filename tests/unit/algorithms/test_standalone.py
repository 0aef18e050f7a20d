"""`step_loss`: the gradients computed by hand, as in `test_closed_forms.py`, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.standalone import step_loss

A = 0.5 / (math.sqrt(0.5) + 1e-4)
"""The advantage of the better of two members whose rewards differ by 1, divided by their spread."""
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])


def gradient(algorithm: str, rewards: list[list[float]], mask: torch.Tensor, **knobs) -> list:
    policy = torch.full(mask.shape, -1.0, dtype=torch.float64, requires_grad=True)
    loss, stats = step_loss(
        algorithm, torch.tensor(rewards), policy, policy.detach(), mask, **knobs
    )
    loss.backward()
    assert stats["ratio"] == 1.0
    assert policy.grad is not None
    return policy.grad.tolist()


@pytest.mark.parametrize(
    ("algorithm", "good", "bad"),
    [("grpo", A / 4, A / 8), ("dr_grpo", 0.5 / 16, 0.5 / 16), ("dapo", A / 6, A / 6)],
)
def test_the_gradient_is_that_of_the_whole_step(algorithm: str, good: float, bad: float) -> None:
    found = gradient(algorithm, [[1.0, 0.0]], MASK, max_completion_length=8)
    assert found[0] == pytest.approx([-good, -good, 0, 0])
    assert found[1] == pytest.approx([bad] * 4)


def test_a_member_without_a_reward_teaches_nothing_and_is_in_no_mean() -> None:
    mask = torch.ones(3, 4)
    with_failed = gradient("grpo", [[1.0, 0.0, math.nan]], mask)
    assert with_failed[:2] == gradient("grpo", [[1.0, 0.0]], mask[:2])
    assert with_failed[2] == [0.0] * 4


def test_shapes_and_what_is_missing_are_errors() -> None:
    with pytest.raises(ValueError, match="1 × 3 rewards and 2 rows"):
        gradient("grpo", [[1.0, 0.0, 0.5]], MASK)
    with pytest.raises(ValueError, match="reference_logprobs_BT"):
        gradient("grpo", [[1.0, 0.0]], MASK, beta=0.1)
    with pytest.raises(ValueError, match="teacher"):
        gradient("distillation", [[1.0, 0.0]], MASK)
