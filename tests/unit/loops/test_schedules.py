"""The free schedule's choice: full steps, nobody too old, nobody left behind, whatever is finished first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from groupwise.learner.config import TrainingConfig
from groupwise.loops.learning import parts
from groupwise.loops.schedules import choose, filled
from groupwise.types import Example, Group


def test_the_first_finished_are_chosen_while_nobody_is_due():
    since = dict.fromkeys(range(6), 0)
    assert choose([4, 2, 5], since, step=0, lag=2, size=2) == [4, 2]


def test_who_would_become_too_old_goes_first():
    since = {0: 0, 1: 0, 2: 1, 3: 1}
    assert choose([2, 3, 1, 0], since, step=1, lag=1, size=2) == [1, 0]


def test_a_step_waits_for_those_that_are_due():
    since = {0: 0, 1: 0, 2: 1, 3: 1}
    assert choose([2, 3, 1], since, step=1, lag=1, size=2) is None


def test_as_many_as_later_steps_could_not_take_are_taken_now():
    """With a lag of 2, four groups of step 0 need steps 1 and 2 for themselves."""
    since = {**dict.fromkeys(range(4), 0), 4: 1, 5: 1}
    assert choose([4, 5, 0, 1], since, step=1, lag=2, size=2) == [0, 1]
    assert choose([4, 5, 0], since, step=1, lag=2, size=2) is None


def test_replayed_groups_make_their_share_of_a_step_at_most():
    since: dict[int, int] = dict.fromkeys([1, 2, 4, 5], 0)
    assert choose([4, 2, 5, 1], since, 0, 2, size=2, replayed={4, 2, 5}, most=1) == [4, 1]
    assert choose([4, 2, 5], since, 0, 2, size=2, replayed={4, 2, 5}, most=1) is None


def test_who_would_become_too_old_goes_first_though_it_is_replayed():
    since = {0: 0, 1: 0, 2: 1, 3: 1}
    assert choose([2, 3, 1, 0], since, 1, 1, size=2, replayed={0, 1}, most=1) == [1, 0]


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
    drawn = filled(groups[:1], groups[1:], size=3)
    assert [group.draw for group in drawn.groups] == [0, 1, 2]
    assert [group.draw for group in drawn.rejected] == [3, 4]
    assert [group.draw for group in drawn.all] == [0, 1, 2, 3, 4]


def test_every_pass_cuts_the_groups_alike_and_loses_none():
    training = TrainingConfig(prompts_per_step=7, minibatches=3, num_iterations=2)
    cut = list(parts(7, training))
    assert [list(part) for part in cut] == [[0, 1], [2, 3], [4, 5, 6]] * 2
    assert training.updates_per_step == 6
