"""Rollouts of a few tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from groupwise.core.types import Example, Group, Rollout, SamplingParams, Segment

MakeGroup = Callable[..., Group]
PARAMS = SamplingParams(max_tokens=8, temperature=0.7)


def policy_segment(*token_ids: int, finish: str = "stop") -> Segment:
    """What the policy wrote, each token with its own log-probability."""
    return Segment(
        "policy",
        token_ids,
        tuple(-token / 10 for token in token_ids),
        policy_version=3,
        fingerprint="f",
        params=PARAMS,
        seed=9,
        finish_reason=finish,  # type: ignore[arg-type]
    )


@pytest.fixture
def make_group() -> MakeGroup:
    """A group of rollouts with these segments."""

    def make(*members: tuple[Segment, ...], prompt: object = "ask", **columns: object) -> Group:
        rollouts = tuple(
            Rollout(4, index, 0, (50, 51), segments, f"text {index}")
            for index, segments in enumerate(members)
        )
        return Group(4, Example(2, prompt, columns), rollouts)  # type: ignore[arg-type]

    return make


@pytest.fixture
def written() -> Callable[..., Segment]:
    return policy_segment
