"""The free schedule's choice: full steps, no group too old, none left behind, whichever finishes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.types import Example, Group
from groupwise.engine.learner.config import TrainingConfig
from groupwise.training.loops.learning import update_ranges
from groupwise.training.loops.schedules import choose, fill_step

FRESH = dict.fromkeys(range(6), 0)
FOUR = dict.fromkeys([1, 2, 4, 5], 0)
OLDER = {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("finished", "since", "step", "lag", "more", "chosen"),
    [
        ([4, 2, 5], FRESH, 0, 2, {}, [4, 2]),  # nobody is due: those that were finished first
        ([2, 3, 1, 0], OLDER, 1, 1, {}, [1, 0]),  # who would become too old goes first
        ([2, 3, 1], OLDER, 1, 1, {}, None),  # and is waited for
        # With a lag of 2, four groups of step 0 need steps 1 and 2 for themselves.
        ([4, 5, 0, 1], {**dict.fromkeys(range(4), 0), 4: 1, 5: 1}, 1, 2, {}, [0, 1]),
        ([4, 5, 0], {**dict.fromkeys(range(4), 0), 4: 1, 5: 1}, 1, 2, {}, None),
        # Replayed groups make their share of a step at most, unless they would become too old.
        ([4, 2, 5, 1], FOUR, 0, 2, {"replayed_draws": {4, 2, 5}, "max_replayed": 1}, [4, 1]),
        ([4, 2, 5], FOUR, 0, 2, {"replayed_draws": {4, 2, 5}, "max_replayed": 1}, None),
        ([2, 3, 1, 0], OLDER, 1, 1, {"replayed_draws": {0, 1}, "max_replayed": 1}, [1, 0]),
    ],
)
def test_choose_takes_the_groups_that_are_due_first(finished, since, step, lag, more, chosen):
    assert choose(finished, since, step, lag, size=2, **more) == chosen


@given(
    lag=st.integers(1, 4),
    size=st.integers(1, 3),
    steps=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)
def test_every_draw_is_trained_once_and_none_is_too_old(lag, size, steps, order):
    since: dict[int, int] = {}
    finished: list[int] = []
    trained: list[int] = []
    drawn = 0
    for step in range(steps):
        while len(since) < size * min(lag + 1, steps - step):
            since[drawn] = step
            drawn += 1
        while (chosen := choose(finished, since, step, lag, size)) is None:
            running = [draw for draw in since if draw not in finished]
            assert running, "everything is finished, and still no choice"
            finished.append(order.choice(running))
        assert len(chosen) == size
        for draw in chosen:
            assert step - since.pop(draw) <= lag
            finished.remove(draw)
        trained += chosen
    assert sorted(trained) == list(range(steps * size))


def test_rejected_groups_fill_a_step_that_found_too_few():
    groups = [Group(draw, Example(0, "x"), ()) for draw in range(5)]
    drawn = fill_step(groups[:1], groups[1:], size=3)
    assert [group.draw for group in drawn.groups] == [0, 1, 2]
    assert [group.draw for group in drawn.rejected] == [3, 4]
    assert [group.draw for group in drawn.all] == [0, 1, 2, 3, 4]


def test_every_pass_cuts_the_groups_alike_and_loses_none():
    training = TrainingConfig(prompts_per_step=7, minibatches=3, num_iterations=2)
    cut = list(update_ranges(7, training))
    assert [list(part) for part in cut] == [[0, 1], [2, 3], [4, 5, 6]] * 2
    assert training.updates_per_step == 6
