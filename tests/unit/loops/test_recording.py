"""What is said where no rollout could be scored: how often, why, and whose code is to be mended."""

from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.errors import NothingScoredError
from groupwise.loops.recording import check_something_scored
from groupwise.types import Example, Group, Rollout


def run_of(kind: str, limit: int | None = 1, max_steps: int = 9) -> Any:
    config = SimpleNamespace(rollout=SimpleNamespace(type=kind))
    return SimpleNamespace(
        config=config,
        step=0,
        max_steps=max_steps,
        unscored_steps=0,
        unscored=[],
        unscored_limit=limit,
    )


def failed(*endings: Any) -> list[Group]:
    """A group whose rollouts failed, in the environment where nothing ended them."""
    rollouts = tuple(
        Rollout(0, member, 0, (1,), (), "", "failed", "it raised", ended_by=ending)
        for member, ending in enumerate(endings)
    )
    return [Group(0, Example(0, "p"), rollouts)]


@pytest.mark.parametrize(
    ("kind", "endings", "culprit"),
    [
        ("single", [None], "the reward functions"),
        ("environment", [None, None], "the environment"),
        ("environment", ["environment", "turns"], "the reward functions"),
        ("environment", [None, "tokens"], "the environment and the reward functions"),
    ],
)
def test_whoever_failed_is_to_be_mended(kind, endings, culprit):
    with pytest.raises(NothingScoredError) as stopped:
        check_something_scored(run_of(kind), failed(*endings))
    assert "No rollout could be scored in 1 step (rewards" in str(stopped.value)
    assert (
        f"{len(endings)} × it raised\nMend {culprit}, then start the run again; it goes on"
        in str(stopped.value)
    )


def test_a_short_run_in_which_nothing_was_scored_fails_at_its_end():
    run = run_of("single", limit=3, max_steps=2)
    check_something_scored(run, failed(None))
    with pytest.raises(NothingScoredError, match=r"in 2 steps in a row \(the whole run\)"):
        check_something_scored(run, failed(None))
    run = run_of("single", limit=3, max_steps=2)
    run.unscored_steps, run.step = 0, 1  # the first step had a reward
    check_something_scored(run, failed(None))
    served = run_of("single", limit=None, max_steps=1)
    check_something_scored(served, failed(None))
