"""What the groups of a step show, against steps small enough to do by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from groupwise.core.types import Example, Group, Outcome, RewardPart, Rollout, Segment
from groupwise.tasks.data.reward_hacking_statistics import group_statistics, lowest_part_values


def member(
    tokens: Sequence[int] = (1,),
    text: str = "",
    reward: float | None = None,
    parts: Mapping[str, tuple[float | None, float]] | None = None,
    outcome: Outcome | None = None,
    **more: Any,
) -> Rollout:
    """One rollout; `parts` as value and weight by name."""
    segments = (Segment("policy", tuple(tokens), finish_reason="stop"),)
    made = tuple(RewardPart(name, *part) for name, part in (parts or {}).items())
    ended = outcome or ("failed" if reward is None else "scored")
    return Rollout(
        0,
        0,
        0,
        (),
        **{"segments": segments, **more},
        completion=text,
        outcome=ended,
        reward=reward,
        parts=made,
    )


def group(*members: Rollout, example: int = 0) -> Group:
    return Group(0, Example(example, "p"), members)


def test_length_and_truncation_are_of_all_rollouts():
    cut = Segment("policy", (1, 2, 3, 4), finish_reason="length")
    found = group_statistics([group(member((1, 2), reward=1.0), member(segments=(cut,)))])
    assert (found["length"], found["truncated"], found["reward"]) == (3.0, 0.5, 1.0)


def test_correlation_of_length_and_reward_is_within_groups():
    """Lengths −1, 1 with rewards −½, ½; then lengths that do not differ with the same rewards: 1 / √(2 · 1).

    Between the groups, the longer ones earn less, which does not matter.
    """
    first = group(member((1,) * 2, reward=10.0), member((1,) * 4, reward=11.0))
    second = group(member((1,) * 9, reward=1.0), member((1,) * 9, reward=0.0))
    assert group_statistics([first])["length_correlation"] == pytest.approx(1.0)
    assert group_statistics([first, second])["length_correlation"] == pytest.approx(
        1 / math.sqrt(2)
    )


def test_rewards_that_are_the_same_but_for_rounding_correlate_with_nothing():
    rewards = (0.3, 0.1 + 0.2)
    found = group_statistics(
        [group(*(member((1,) * n, reward=r) for n, r in enumerate(rewards, 1)))]
    )
    assert "length_correlation" not in found


def test_repetition_of_tokens():
    """123 231 312 123: one of four; a completion without n-grams does not count as one without repetition; turns are not spanned."""
    loop = member((1, 2, 3, 1, 2, 3))
    assert group_statistics([group(loop)])["repetition"] == 0.25
    assert group_statistics([group(loop, member((1, 2)))])["repetition"] == 0.25
    assert group_statistics([group(loop, member((1, 2, 3)))])["repetition"] == 0.125
    assert "repetition" not in group_statistics([group(member((1, 2)))])
    turn, answer = Segment("policy", (1, 2, 3)), Segment("environment", (7, 8, 9))
    found = group_statistics([group(member(segments=(turn, answer, turn)))])
    assert (found["repetition"], found["length"]) == (0.5, 6.0)


def test_repeated_lines():
    """Of `a`, `a`, `b` one repeats; blank ones do not count, nor does what others say in a dialogue."""
    assert group_statistics([group(member(text="a\n a\n\n\nb"))])[
        "repeated_lines"
    ] == pytest.approx(1 / 3)
    assert "repeated_lines" not in group_statistics([group(member(text=" \n"))])
    turns = (("assistant", "up"), ("user", "bump"), ("assistant", "up"), ("user", "bump"))
    said: list[Any] = [{"role": role, "content": text} for role, text in turns]
    said.append({"role": "assistant", "content": None})
    spoken = member(messages=tuple(said), text="up bump up bump")
    assert group_statistics([group(spoken)])["repeated_lines"] == 0.5


def test_distinct_completions():
    """Two texts among four: 1 of 3; empty ones are texts, too, and space around them makes no difference."""
    texts = ("a", " a", "b", "b\n")
    assert (
        group_statistics([group(*(member(text=t) for t in texts))])["distinct_completions"] == 1 / 3
    )
    assert (
        group_statistics([group(member(text=""), member(text=""))])["distinct_completions"] == 0.0
    )
    assert (
        group_statistics([group(member(text=""), member(text="a"))])["distinct_completions"] == 1.0
    )


def test_distinct_ngrams():
    """{123, 234} and {234, 345}: three in all, four one by one, two at most: (3 − 2) / (4 − 2)."""
    first, second = member((1, 2, 3, 4)), member((2, 3, 4, 5))
    assert group_statistics([group(first, second)])["distinct_ngrams"] == 0.5
    assert group_statistics([group(first, first, first)])["distinct_ngrams"] == 0.0
    assert group_statistics([group(first, member((7, 8, 9)))])["distinct_ngrams"] == 1.0
    loop = member((1, 2, 3, 4) * 5)
    assert group_statistics([group(loop, member((7, 8, 9)))])["distinct_ngrams"] == 1.0, (
        "only repetitive"
    )


def test_same_answers_are_those_of_different_prompts():
    """`a`, `a` against `a`, `b`: two of four pairs; the pair of the first prompt is none."""
    first = group(member(text="a"), member(text="a"), example=0)
    second = group(member(text="a"), member(text="b"), example=1)
    assert group_statistics([first, second])["same_answers"] == 0.5
    assert "same_answers" not in group_statistics([first, first]), "the same prompt drawn twice"
    assert group_statistics([first, first, second])["same_answers"] == 0.5


def test_shares_of_parts_are_of_the_variance_within_groups():
    """Rewards 0 + ½, 1 + 0 differ by ½: p explains cov ¼ of variance ⅛, twice all of it, and q takes one share back."""
    parts = [{"p": (0.0, 1.0), "q": (1.0, 0.5)}, {"p": (1.0, 1.0), "q": (0.0, 0.5)}]
    found = group_statistics(
        [group(member(reward=0.5, parts=parts[0]), member(reward=1.0, parts=parts[1]))]
    )
    assert (found["share/p"], found["share/q"]) == (2.0, -1.0)
    assert (found["gain/p"], found["gain/q"]) == (0.5, 0.25)
    assert (found["value/p"], found["value/q"]) == (0.5, 0.5)
    assert found["spread/p"] == pytest.approx(math.sqrt(0.5))
    assert found["spread/q"] == pytest.approx(math.sqrt(0.125))


def test_a_part_that_does_not_apply_gives_nothing_and_a_part_of_weight_0_is_only_watched():
    parts = [{"p": (None, 1.0), "seen": (3.0, 0.0)}, {"p": (2.0, 1.0), "seen": (5.0, 0.0)}]
    found = group_statistics(
        [group(member(reward=0.0, parts=parts[0]), member(reward=2.0, parts=parts[1]))]
    )
    assert (found["gain/p"], found["gain/seen"]) == (2.0, 4.0)
    assert found["share/p"] == 1.0
    assert "share/seen" not in found
    assert "spread/p" not in found, "one value has none"


def test_parts_of_several_turns_are_added_up():
    turns = (RewardPart("p", 1.0, 0.5, turn=0), RewardPart("p", 3.0, 0.5, turn=1))
    rollout = Rollout(0, 0, 0, (), (), "", "scored", reward=2.0, parts=turns)
    assert group_statistics([group(rollout)])["gain/p"] == 2.0
    assert group_statistics([group(rollout)])["value/p"] == 4.0
    assert lowest_part_values([group(rollout)]) == {"p": 2.0}


def test_the_least_of_a_part_is_that_of_the_scored_where_it_applies():
    """Weighted, so that of a part with a negative weight the highest value is the least."""
    rollouts = [
        member(reward=0.0, parts={"p": (3.0, -0.5), "q": (None, 1.0)}),
        member(reward=0.0, parts={"p": (1.0, -0.5), "q": (2.0, 1.0), "seen": (5.0, 0.0)}),
        member(parts={"p": (9.0, -0.5)}),
        member(reward=0.0, parts={"p": (math.inf, -0.5)}),
    ]
    assert lowest_part_values([group(*rollouts[:2]), group(*rollouts[2:])]) == {
        "p": -1.5,
        "q": 2.0,
        "seen": 5.0,
    }


def test_failed_members_show_what_they_wrote_and_earn_nothing():
    part = {"p": (1.0, 1.0)}
    scored = [member((1,) * n, reward=float(n), parts=part) for n in (1, 2)]
    failed = member((1,) * 9, text="x", parts={"p": (9.0, 1.0)}, outcome="failed")
    found = group_statistics([group(*scored, failed)])
    assert found["length"] == 4.0
    assert found["reward"] == 1.5
    assert found["gain/p"] == 1.0
    assert found["length_correlation"] == pytest.approx(1.0)
    assert found["distinct_completions"] == 0.5


def test_a_rollout_in_which_the_policy_wrote_nothing_has_no_text():
    nothing = member(segments=())
    found = group_statistics([group(member(text="a"), member(text="a"), nothing)])
    assert found["distinct_completions"] == 0.0
    assert found["length"] == pytest.approx(2 / 3)


def test_groups_of_one_are_not_compared():
    assert group_statistics([]) == group_statistics([group()]) == {}
    part = {"p": (1.0, 1.0)}
    found = group_statistics(
        [group(member((1, 2, 3), reward=1.0, parts=part), example=n) for n in range(2)]
    )
    assert set(found) == {
        "length", "truncated", "reward", "repetition", "same_answers", "gain/p", "value/p",
    }  # fmt: skip
