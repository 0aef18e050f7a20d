"""The replay buffer: statistics, choice by upper confidence bound, what enters a full one, what comes back."""

from __future__ import annotations

import json
import math
from statistics import fmean, pvariance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.tasks.data.order import Stream
from groupwise.tasks.data.replay import Entry, ReplayBuffer, key_of

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=20)


def only(buffer: ReplayBuffer) -> Entry:
    (entry,) = buffer.entries
    return entry


def payloads(entries: list[Entry]) -> list[object]:
    return [entry.payload for entry in entries]


def filled(*means: float, **options: Any) -> ReplayBuffer:
    """An entry for each mean, its payload its place."""
    buffer = ReplayBuffer(**options)
    for place, mean in enumerate(means):
        buffer.add(f"prompt {place}", mean, place)
    return buffer


# --- statistics ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(rewards)
def test_count_mean_and_variance_are_those_of_all_rewards(values):
    buffer = ReplayBuffer()
    for value in values:
        buffer.add("p", value)
    entry = only(buffer)
    assert entry.count == len(values)
    assert entry.mean == pytest.approx(fmean(values), abs=1e-9)
    assert entry.variance == pytest.approx(pvariance(values), abs=1e-9)


def test_success_and_failure_are_credited():
    buffer = filled(1.0)
    assert buffer.update("prompt 0", 0.0)
    assert (only(buffer).count, only(buffer).mean, only(buffer).variance) == (2, 0.5, 0.25)
    assert buffer.update("prompt 0", 1.0)
    assert only(buffer).mean == pytest.approx(2 / 3)
    assert not buffer.update("another", 1.0), "nobody is credited for what is not kept"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_not_buffered(reward):
    buffer = filled(0.5)
    assert not buffer.add("other", reward)
    assert not buffer.add("prompt 0", reward)
    assert not buffer.update("prompt 0", reward)
    assert not buffer.add_group("third", [1.0, reward])
    assert (len(buffer), only(buffer).count, buffer.refused) == (1, 1, 3)
    assert not buffer.add_group("empty", [])


# --- duplicates ----------------------------------------------------------------------------------


def test_the_same_text_up_to_white_space_is_the_same_prompt():
    buffer = ReplayBuffer()
    assert buffer.add([{"role": "user", "content": "two  words\n"}], 1.0, "old")
    assert not buffer.add([{"role": "user", "content": " two words"}], 0.0, "new")
    assert (only(buffer).count, only(buffer).mean, only(buffer).payload) == (2, 0.5, "new")


def test_prompts_that_differ_in_roles_have_different_keys():
    asked = [{"role": "user", "content": "hello"}]
    assert key_of(asked) != key_of([{"role": "system", "content": "hello"}])
    assert key_of(asked) != key_of("hello")
    assert key_of(asked) != key_of([*asked, {"role": "user", "content": ""}])
    apart = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert key_of(apart) != key_of([{"role": "user", "content": "a b"}])


# --- choosing ------------------------------------------------------------------------------------


def test_the_upper_confidence_bound_by_hand():
    """μ + √(ln 6 / n): 0.9 + 0.669 for the one seen four times, 0.3 + 1.339 for each seen once."""
    buffer = filled(0.9, 0.3, 0.2, mix_exploit_ratio=0.0)
    for _ in range(3):
        buffer.update("prompt 0", 0.9)
    assert payloads(buffer.sample(3, Stream("x"))) == [1, 0, 2]
    means = filled(0.1, 0.9, 0.5, mix_exploit_ratio=0.0, exploration=0.0)
    assert payloads(means.sample(3, Stream("x"))) == [1, 2, 0]


def test_the_unseen_come_first_and_in_order():
    buffer = filled(1.0, mix_exploit_ratio=0.0)
    buffer.add("unseen", payload="a")
    buffer.add("unseen too", payload="b")
    assert payloads(buffer.sample(3, Stream("x"))) == ["a", "b", 0]
    exploiting = filled(-5.0, mix_exploit_ratio=1.0)
    exploiting.add("unseen", payload="a")
    assert payloads(exploiting.sample(1, Stream("x"))) == [0]


def test_the_mix_follows_its_ratio():
    buffer = filled(0.9, 0.3, mix_exploit_ratio=0.7)
    for _ in range(99):
        buffer.update("prompt 0", 0.9)
    firsts = [buffer.sample(1, Stream("mix", n))[0].payload for n in range(2000)]
    assert firsts.count(0) / len(firsts) == pytest.approx(0.7, abs=0.04)


@given(st.integers(0, 30), st.integers(0, 12), st.floats(0, 1))
def test_no_entry_is_chosen_twice(entries, count, ratio):
    buffer = filled(*(n % 3 for n in range(entries)), mix_exploit_ratio=ratio)
    found = payloads(buffer.sample(count, Stream("x")))
    assert len(found) == len(set(found)) == min(entries, count)


# --- a full one ----------------------------------------------------------------------------------


def test_the_worst_entry_is_replaced_only_by_a_strictly_better_one():
    buffer = filled(0.5, 0.2, 0.9, capacity=3)
    assert not buffer.add("as good", 0.2)
    assert buffer.add("better", 0.3)
    assert "prompt 1" not in buffer
    assert [entry.mean for entry in buffer.entries] == [0.5, 0.9, 0.3]
    assert (buffer.evicted, buffer.refused) == (1, 1)
    assert not buffer.add("unseen"), "which pushes nobody out"
    assert not buffer.add("prompt 0", 0.0), "a known prompt needs no room"
    assert (len(buffer), buffer.entries[0].count) == (3, 2)
    equals = filled(0.5, 0.5, capacity=2)
    equals.add("better", 1.0, "c")
    assert payloads(list(equals.entries)) == [1, "c"], "the oldest goes"


# --- a checkpoint --------------------------------------------------------------------------------


def test_its_state_survives_json_to_the_last_bit():
    buffer = filled(0.1, 0.3, 1 / 3, capacity=3)
    buffer.update("prompt 1", 0.1)
    buffer.add("better", 0.7)
    again = ReplayBuffer(capacity=3)
    again.load_state(json.loads(json.dumps(buffer.state())))
    assert again.state() == buffer.state()
    assert payloads(again.sample(3, Stream("x"))) == payloads(buffer.sample(3, Stream("x")))
    assert [again.add("x", 0.65), again.evicted] == [buffer.add("x", 0.65), buffer.evicted]


def test_a_group_enters_with_its_mean():
    buffer = ReplayBuffer()
    assert buffer.add_group("p", [1.0, 0.0, 0.0, 1.0])
    assert (only(buffer).count, only(buffer).mean) == (1, 0.5)


def test_exploiting_takes_the_best_mean():
    buffer = filled(0.9, 0.3, 0.2, mix_exploit_ratio=1.0)
    for _ in range(9):
        buffer.update("prompt 0", 0.9)
    assert payloads(buffer.sample(2, Stream("x"))) == [0, 1]


def test_an_evicted_or_refused_prompt_can_be_added_again():
    buffer = filled(0.1, 0.5, capacity=2)
    buffer.add("better", 0.6)
    assert "prompt 0" not in buffer
    assert buffer.add("prompt 0", 0.8)
    assert not buffer.add("late", 0.1)
    assert buffer.add("late", 0.9)
    assert len(buffer) == 2
