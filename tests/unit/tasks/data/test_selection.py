"""The examples of draws: the order of the examples, the easy pool, the replay buffer, the curriculum; also after a resume."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.types import Example, Group, RewardPart, Rollout
from groupwise.tasks.data.config import DataConfig
from groupwise.tasks.data.order import Order, example_of_draw
from groupwise.tasks.data.replay import ReplayBuffer
from groupwise.tasks.data.selection import Choice, Selection, Sizes

SEED = 5
SIZES = Sizes(Order(10, SEED), easy=4, block=4)
EASY = {"dataset_name": "easy.jsonl", "schedule": ((0, 1.0), (3, 0.5), (6, 0.0))}
REPLAY = {"warmup_entries": 1}


def selection(sizes: Sizes = SIZES, replay_from: int = 0, **data: Any) -> Selection:
    return Selection(DataConfig.model_validate(data), SEED, sizes, replay_from=replay_from)


class Course:
    """A run that draws steps, whose groups are rewarded by `reward(choice)`."""

    def __init__(self, chosen: Selection, reward: Any = lambda choice: 0.0) -> None:
        self.chosen = chosen
        self.reward = reward
        self.draw = 0

    def step(self, step: int, slots: int = 4, used: int = 4) -> list[Choice]:
        self.chosen.plan(step, step, slots)
        choices = [self.chosen.take(step, slot, self.draw + slot) for slot in range(used)]
        groups = [self.group(self.draw + slot, each) for slot, each in enumerate(choices)]
        self.chosen.observe(groups)
        self.chosen.finish(step, used)
        self.draw += used
        return choices

    def run(self, steps: int) -> Course:
        for step in range(steps):
            self.step(step)
        return self

    def group(self, draw: int, choice: Choice) -> Group:
        rewards = self.reward(choice)
        values = rewards if isinstance(rewards, list) else [rewards] * 2
        members = tuple(
            Rollout(draw, n, 0, (), (), "", "scored", reward=v, parts=(RewardPart("r", v),))
            for n, v in enumerate(values)
        )
        prompt = f"{choice.pool} {choice.index}"
        return Group(draw, Example(choice.index, prompt), members, origin=choice.origin)


def indexes(choices: list[Choice]) -> list[int]:
    return [choice.index for choice in choices]


def kept(course: Course) -> ReplayBuffer:
    assert course.chosen.replay is not None
    return course.chosen.replay


def origins(choices: list[Choice]) -> Counter[str]:
    return Counter(choice.origin for choice in choices)


# --- in order ------------------------------------------------------------------------------------


def test_without_more_the_examples_come_in_the_order_of_their_epochs():
    course = Course(selection())
    found = [index for step in range(10) for index in indexes(course.step(step))]
    assert found == [example_of_draw(draw, 10, SEED) for draw in range(40)]
    assert course.chosen.turns == 40
    assert course.chosen.metrics([], 0) == {}


@given(st.lists(st.integers(4, 8), min_size=1, max_size=12))
def test_examples_that_a_step_did_not_use_go_to_the_next_step(used):
    """Of the slots for groups that are drawn anew, few may be used; still every example has its turn once an epoch, in order."""
    course = Course(selection())
    found = [index for step, n in enumerate(used) for index in indexes(course.step(step, 8, n))]
    assert found == [example_of_draw(draw, 10, SEED) for draw in range(sum(used))]
    assert course.chosen.turns == sum(used)


def test_a_step_that_begins_before_another_ends_takes_other_examples():
    chosen = selection()
    chosen.plan(0, 0, 4)
    chosen.plan(1, 1, 4)
    both = [chosen.take(step, slot, 4 * step + slot) for step in (0, 1) for slot in range(4)]
    assert len(set(indexes(both))) == 8


# --- the easy pool -------------------------------------------------------------------------------


def test_the_probability_of_easy_examples_is_the_schedules():
    big = Sizes(Order(10, SEED), easy=4, block=500)
    course = Course(selection(big, easy_pool=EASY))
    shares = [origins(course.step(step, 500, 500))["easy"] / 500 for step in (0, 3, 6)]
    assert shares == [1.0, pytest.approx(0.5, abs=0.06), 0.0]


def test_easy_examples_take_no_turn_of_the_others():
    course = Course(selection(easy_pool=EASY))
    fresh = [c.index for step in range(8) for c in course.step(step) if c.origin == "fresh"]
    assert fresh == [example_of_draw(draw, 10, SEED) for draw in range(len(fresh))]
    assert 8 < len(fresh) < 32
    first = Course(selection(easy_pool=EASY)).step(0)
    assert {choice.pool for choice in first} == {"easy"}
    assert all(0 <= index < 4 for index in indexes(first))


# --- replay --------------------------------------------------------------------------------------


def solved_if_even(choice: Choice) -> list[float]:
    return [1.0, 0.0] if choice.index % 2 == 0 else [0.2, 0.2]


def test_solved_prompts_enter_the_replay_with_the_mean_of_their_group():
    course = Course(selection(replay={"warmup_entries": 100}), solved_if_even).run(5)
    entries = kept(course).entries
    assert sorted(entry.payload[1] for entry in entries) == [0, 2, 4, 6, 8]
    assert {entry.mean for entry in entries} == {0.5}


def test_replayed_groups_fill_at_most_half_of_a_step():
    course = Course(selection(replay=REPLAY), solved_if_even)
    course.step(0)
    for step in range(1, 6):
        most = min(2, len(kept(course)))
        choices = course.step(step)
        assert origins(choices)["replay"] == most
        assert {choice.again for choice in choices} == {None}, "prompts are answered anew"
    by_hand = Course(selection(replay={**REPLAY, "success_threshold": None}), lambda choice: 1.0)
    by_hand.step(0)
    assert len(kept(by_hand)) == 0, "without a threshold nothing enters by itself"


@pytest.mark.parametrize(("share", "most"), [(0.25, 1), (0.9, 3), (1.0, 4), (0.2, 0)])
def test_max_share_limits_the_replayed_prompts(share, most):
    course = Course(selection(replay={**REPLAY, "max_share": share}), lambda choice: 1.0).run(3)
    assert origins(course.step(3))["replay"] == most


@pytest.mark.parametrize(
    "chosen",
    [selection(replay={"warmup_entries": 6}), selection(replay=REPLAY, replay_from=2)],
    ids=["enough is kept", "the temperature is at its floor"],
)
def test_nothing_is_drawn_again_before(chosen):
    course = Course(chosen, lambda choice: 1.0)
    assert [origins(course.step(step))["replay"] for step in range(3)] == [0, 0, 2]


def test_failures_are_debited_to_the_prompt_that_was_drawn_again():
    answers = iter([1.0] * 4 + [0.0] * 100)
    course = Course(selection(replay={**REPLAY, "max_share": 1.0}), lambda choice: next(answers))
    course.step(0)
    again = course.step(1)
    assert origins(again)["replay"] == 4
    assert {(e.count, e.mean) for e in kept(course).entries} == {(2, 0.5)}


def test_fresh_failures_of_a_prompt_that_is_kept_are_debited_too():
    """Its completions stay those that solved it."""
    answers = iter([1.0] * 10 + [0.0] * 30)
    course = Course(
        selection(replay={"warmup_entries": 100, "mode": "completions"}), lambda c: next(answers)
    )
    course.run(5)
    assert {(e.count, e.mean) for e in kept(course).entries} == {(2, 0.5)}
    assert {entry.payload[2] for entry in kept(course).entries} == set(range(10))


def test_completions_are_those_of_the_draw_that_solved_it_last():
    course = Course(
        selection(replay={**REPLAY, "mode": "completions", "max_share": 1.0}), lambda choice: 1.0
    )
    first = course.step(0)
    again = course.step(1)
    assert {c.again for c in again} == {0, 1, 2, 3}
    assert all(first[c.again or 0].index == c.index for c in again)
    assert {c.again for c in course.step(2)} == {0, 1, 2, 3}, (
        "a replayed draw does not count as new"
    )


# --- the curriculum ------------------------------------------------------------------------------


def only_some_teach(choice: Choice) -> list[float]:
    """0 to 4 are solved half of the time, the others never."""
    return [1.0, 0.0] if choice.index < 5 else [0.0, 0.0]


def test_examples_that_teach_nothing_are_not_drawn_again():
    course = Course(selection(curriculum={"revisit": 0.0}), only_some_teach).run(3)
    assert {i for step in range(3, 8) for i in indexes(course.step(step))} == {0, 1, 2, 3, 4}
    nothing = Course(selection(curriculum={"revisit": 0.0}), lambda choice: 0.0)
    assert [len(nothing.step(step)) for step in range(5)] == [4] * 5, "where nothing teaches"


def test_easy_answers_say_nothing_of_the_examples_beside():
    """An easy example has the index of another one of the data; only that one's own answers are noted."""
    course = Course(
        selection(easy_pool=EASY, curriculum={}),
        lambda choice: [float(choice.pool == "easy"), 1.0],
    )
    course.step(0)
    assert course.chosen.curriculum is not None
    assert course.chosen.curriculum.state() == [], "the schedule begins with easy ones alone"
    found = [choice for step in range(1, 5) for choice in course.step(step)]
    main = {choice.index for choice in found if choice.pool == "main"}
    assert {
        entry[0]: entry[1] / entry[2] for entry in course.chosen.curriculum.state()
    } == dict.fromkeys(main, 0.5)


def test_completions_that_are_trained_again_say_nothing_new():
    replay = {**REPLAY, "mode": "completions", "max_share": 1.0}
    course = Course(selection(replay=replay, curriculum={}), lambda choice: [1.0, 0.0])
    course.step(0)
    assert course.chosen.curriculum is not None
    before = course.chosen.curriculum.state()
    assert {choice.again is not None for choice in course.step(1)} == {True}
    assert course.chosen.curriculum.state() == before


def test_unsolved_prompts_are_revisited_at_the_configured_rate():
    course = Course(selection(curriculum={"revisit": 0.2}), only_some_teach).run(3)
    found = Counter(i >= 5 for step in range(3, 203) for i in indexes(course.step(step)))
    assert found[True] / found[False] == pytest.approx(0.2, abs=0.06)
    passed = course.chosen.metrics([], 203)["curriculum/passed_over"]
    assert passed == course.chosen.turns - 4 * 203 > 0


# --- a checkpoint --------------------------------------------------------------------------------

ALL = {"easy_pool": EASY, "replay": REPLAY, "curriculum": {}}


@given(st.integers(0, 9), st.booleans())
def test_a_selection_restored_from_a_checkpoint_continues_unchanged(at, ahead):
    """Also where the next step has been chosen for already, when less was known."""

    def reward(choice: Choice) -> list[float]:
        return [float(choice.index % 3 == 0), float(choice.index % 2)]

    whole, cut = Course(selection(**ALL), reward), Course(selection(**ALL), reward)
    for step in range(at):
        for course in (whole, cut):
            course.step(step)
    if ahead:
        whole.chosen.plan(at, at, 4)
        cut.chosen.plan(at, at, 4)
        cut.chosen.take(at, 0, cut.draw)
    again = Course(selection(**ALL), reward)
    again.chosen.load_state(json.loads(json.dumps(cut.chosen.state())))
    again.draw = cut.draw
    for step in range(at, at + 6):
        assert again.step(step) == whole.step(step)
    assert again.chosen.state() == whole.chosen.state()


def test_draws_chosen_ahead_are_kept():
    """The step was planned when nothing was kept; a resume, which knows more, must not choose otherwise."""
    course = Course(selection(replay=REPLAY), lambda choice: 1.0)
    course.chosen.plan(1, 1, 4)
    course.step(0)
    again = selection(replay=REPLAY)
    again.load_state(json.loads(json.dumps(course.chosen.state())))
    again.plan(1, 1, 4)
    assert {again.take(1, slot, 4 + slot).origin for slot in range(4)} == {"fresh"}


def test_a_checkpoint_of_an_earlier_version_knows_its_place_in_the_order():
    chosen = selection()
    chosen.load_state({"cursor": 7})
    assert Course(chosen).step(0)[0].index == example_of_draw(7, 10, SEED)


def test_the_easy_pool_in_numbers():
    course = Course(selection(easy_pool=EASY), lambda c: 1.0 if c.origin == "easy" else 0.25)
    course.chosen.plan(3, 3, 4)
    groups = [course.group(slot, course.chosen.take(3, slot, slot)) for slot in range(4)]
    easy = sum(group.origin == "easy" for group in groups)
    assert 0 < easy < 4
    assert course.chosen.metrics(groups, 3) == {
        "data/easy_probability": 0.5, "data/easy_share": easy / 4, "reward/easy": 1.0, "reward/fresh": 0.25,
    }  # fmt: skip


def test_the_replay_buffer_in_numbers():
    course = Course(selection(replay=REPLAY), lambda choice: 1.0)
    course.step(0)
    course.chosen.plan(1, 1, 4)
    groups = [course.group(4 + s, course.chosen.take(1, s, 4 + s)) for s in range(4)]
    assert course.chosen.metrics(groups, 1) == {
        "data/replay_share": 0.5, "reward/fresh": 1.0, "reward/replay": 1.0, "replay/size": 4.0,
        "replay/evicted": 0.0, "replay/refused": 0.0, "replay/mean_reward": 1.0,
    }  # fmt: skip
