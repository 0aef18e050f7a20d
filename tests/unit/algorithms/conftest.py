"""Groups and batches, as short as a test can write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings

from groupwise.algorithms.base import Algorithm, TokenBatch
from groupwise.core.types import Example, Group, Outcome, Rollout, RolloutCredit, Segment

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def _rollout(
    member: int,
    reward: float | None,
    tokens: int = 3,
    *,
    outcome: Outcome | None = None,
    truncated: bool = False,
    observed: int = 0,
) -> Rollout:
    """`reward` None makes a failed member; `observed` tokens of the environment come in between."""
    written = Segment(
        "policy",
        tuple(range(tokens)),
        sampling_logprobs=(-1.0,) * tokens,
        finish_reason="length" if truncated else "stop",
    )
    between = (Segment("environment", (7,) * observed),) if observed else ()
    return Rollout(
        draw=0,
        member=member,
        attempt=0,
        prompt_ids=(1,),
        segments=(*between, written),
        completion="",
        outcome=outcome or ("failed" if reward is None else "scored"),
        reward=reward,
    )


def _group(*members: float | Rollout | None) -> Group:
    """Members are rollouts, or just their rewards."""
    rollouts = [
        member if isinstance(member, Rollout) else _rollout(index, member)
        for index, member in enumerate(members)
    ]
    return Group(draw=0, example=Example(0, "?"), rollouts=tuple(rollouts))


def _batch(
    policy: Sequence[Sequence[float]],
    sampling: Sequence[Sequence[float]] | None = None,
    *,
    mask: Sequence[Sequence[int]] | None = None,
    advantages: Sequence[float],
    scales: Sequence[float] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    entropies: Sequence[Sequence[float]] | None = None,
    proximal: Sequence[Sequence[float]] | None = None,
) -> TokenBatch:
    """In float64; sampling log-probabilities are those of the policy, masks and scales 1, unless given."""

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    policy_BT = tensor(policy).requires_grad_()
    return TokenBatch(
        policy_logprobs_BT=policy_BT,
        sampling_logprobs_BT=policy_BT.detach() if sampling is None else tensor(sampling),
        mask_BT=torch.ones_like(policy_BT).long() if mask is None else torch.tensor(mask),
        advantages_B=tensor(advantages),
        scales_B=tensor([1.0] * len(policy) if scales is None else scales),
        entropies_BT=None if entropies is None else tensor(entropies),
        reference_logprobs_BT=None if reference is None else tensor(reference),
        proximal_logprobs_BT=None if proximal is None else tensor(proximal),
        teacher_logprobs_BT=policy_BT.detach(),  # agrees, so that only rewards teach
    )


def _weighted(
    weights: Sequence[RolloutCredit | None], policy: Sequence[Sequence[float]], **options: Any
) -> TokenBatch:
    """A batch whose rows carry what an algorithm gave them; every member must teach."""
    present = [weight for weight in weights if weight is not None]
    assert len(present) == len(weights)
    return _batch(
        policy,
        advantages=[weight.advantage for weight in present],
        scales=[weight.scale for weight in present],
        **options,
    )


def _total(algorithm: Algorithm, batch: TokenBatch, denominators: dict[str, float]) -> torch.Tensor:
    """What a learner minimises."""
    components = algorithm.loss(batch).components
    assert components.keys() == denominators.keys()
    return torch.stack([components[name] / denominators[name] for name in components]).sum()


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Rollout]:
    return _rollout


@pytest.fixture(scope="session")
def group() -> Callable[..., Group]:
    return _group


@pytest.fixture(scope="session")
def batch() -> Callable[..., TokenBatch]:
    return _batch


@pytest.fixture(scope="session")
def weighted() -> Callable[..., TokenBatch]:
    return _weighted


@pytest.fixture(scope="session")
def total() -> Callable[..., torch.Tensor]:
    return _total


@pytest.fixture(scope="session")
def pair() -> Group:
    """One member got 1 with two tokens, the other 0 with four."""
    return _group(_rollout(0, 1.0, tokens=2), _rollout(1, 0.0, tokens=4))
