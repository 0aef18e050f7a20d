"""Judging rewards by what they gave to completions of known worth."""

from typing import Any

import pytest

from groupwise.checks.check_gold import LAYOUTS, Gold
from groupwise.checks.check_rewards import (
    PATIENCE,
    Trial,
    Verdict,
    find_layout,
    judge_alone,
    judge_cheap,
    judge_failures,
    judge_forms,
    judge_latency,
    judge_order,
    judge_parts,
    judge_repetition,
    judge_spread,
    table,
    try_cases,
)
from groupwise.rewards.inprocess import RubricScorer
from groupwise.rewards.rubric import NO_REWARD, Rubric
from groupwise.rewards.scoring import GroupScore, MemberScore, unscored
from groupwise.types import Example, RewardPart

GOLD = Gold("answer", "plain")


class Direct:
    """Scores at once, in this thread."""

    def __init__(self, *functions: Any) -> None:
        self.scorer = RubricScorer(Rubric(functions), lambda prompts, completions, rows: {})

    async def score(self, request):
        return await self.scorer.score(request, lambda name: None)


def trial(*functions: Any) -> Trial:
    scorer: Any = Direct(*functions)
    return Trial(scorer, None)


def verdict(kind: str, reward: float | None, row: int = 0, **parts: float | None) -> Verdict:
    if reward is None:
        return Verdict(row, kind, kind, MemberScore("failed", "it raised"))
    made = tuple(RewardPart(name, value) for name, value in (parts or {"p": reward}).items())
    return Verdict(row, kind, kind, MemberScore("scored", None, reward, made))


def member(value: float | None) -> MemberScore:
    return verdict("x", value).member


def rows(*answers: str) -> list[Example]:
    return [Example(index, f"ask {index}", {"answer": each}) for index, each in enumerate(answers)]


# Trying


async def test_gold_and_wrong_completions_are_scored_in_one_call_for_each_row():
    seen: list[list[str]] = []

    def right(completions, answer):
        seen.append(list(completions))
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    tried = await try_cases(trial(right), rows("one", "two"), GOLD)
    assert [texts[:2] for texts in seen] == [["one", "two"], ["two", "one"]]
    assert [[v.member.reward for v in each] for each in tried] == [[1, 0, 0, 0, 0, 0]] * 2


async def test_the_layout_that_earns_most_is_found():
    def tagged(completions, answer):
        return [
            float(f"<answer>{gold}</answer>" == text)
            for text, gold in zip(completions, answer, strict=True)
        ]

    layout, means = await find_layout(trial(tagged), rows("7", "8"), "answer")
    assert layout == "answer tags"
    assert means["plain"] == 0
    assert set(means) == set(LAYOUTS)


async def test_of_equal_layouts_the_first_is_taken():
    layout, _ = await find_layout(
        trial(lambda completions: [1.0] * len(completions)), rows("7"), "answer"
    )
    assert layout == next(iter(LAYOUTS))


async def test_chat_completions_come_as_messages():
    def takes_messages(completions):
        return [float(completion[0]["content"] == "a") for completion in completions]

    chat = Example(0, [{"role": "user", "content": "q"}])
    assert [m.reward for m in await trial(takes_messages).score(chat, ["a", "b"])] == [1, 0]


class Hanging:
    """Takes too long where `hangs` says so, call by call; afterwards always."""

    def __init__(self, *hangs: bool) -> None:
        self.hangs, self.calls = list(hangs), 0

    async def score(self, request):
        self.calls += 1
        if self.hangs.pop(0) if self.hangs else True:
            return unscored(len(request.prompts), "timed_out", f"call {self.calls} hung")
        return GroupScore(tuple(MemberScore("scored", None, 1.0) for _ in request.prompts))


async def test_rewards_that_time_out_again_and_again_are_called_no_more():
    hanging: Any = Hanging(True, True, False)
    timed = Trial(hanging, None)
    tried = await try_cases(timed, rows(*"123456789"), GOLD)
    assert hanging.calls == len(timed.seconds) == 3 + PATIENCE, "an answer in between starts over"
    why = f"given up after {PATIENCE} time-outs in a row; the last one: call 6 hung"
    assert timed.given_up == why
    reasons = [verdicts[0].member.reason for verdicts in tried]
    assert reasons == [
        "call 1 hung", "call 2 hung", None, "call 4 hung", "call 5 hung", "call 6 hung", *[why] * 3
    ]  # fmt: skip
    assert {v.member.outcome for v in tried[-1]} == {"timed_out"}


# Failures and spread


def test_an_exception_is_a_problem_with_its_reason_and_where_it_came():
    said = next(iter(judge_failures([verdict("gold", 1.0), verdict("empty", None)])))
    assert said.level == "problem"
    assert "1 × it raised" in said.measured
    assert "(empty)" in said.measured


def test_none_everywhere_is_a_problem_and_somewhere_a_warning():
    none = Verdict(0, "empty", "", MemberScore("failed", NO_REWARD))
    some = {each.name: each for each in judge_failures([none, verdict("gold", 1.0)])}
    assert (some["exceptions"].level, some["no reward"].level) == ("ok", "warning")
    every = {each.name: each for each in judge_failures([none, none])}
    assert every["no reward"].level == "problem"


def test_a_reward_that_never_varies_is_a_problem():
    assert (
        judge_spread([[verdict("gold", 0.3), verdict("empty", 0.3)]] * 3, with_gold=True).level
        == "problem"
    )
    assert (
        judge_spread([[verdict("gold", 0.1 + 0.2), verdict("empty", 0.3)]], with_gold=True).level
        == "problem"
    )


def test_rows_in_which_everything_earns_the_same_are_counted():
    varied = [verdict("gold", 1.0), verdict("empty", 0.0)]
    said = judge_spread([varied, [verdict("gold", 0.5), verdict("empty", 0.5)]], with_gold=True)
    assert (said.level, said.data["constant_rows"]) == ("warning", 1)
    assert judge_spread([varied], with_gold=True).level == "ok"
    assert judge_spread([[verdict("gold", None)]], with_gold=True).level == "skipped"


def test_wrong_completions_alone_may_well_earn_the_same():
    wrong = [
        verdict("garbage", 0.0, right=0.0, form=0.0),
        verdict("empty", 0.0, right=0.0, form=0.0),
    ]
    assert judge_spread([wrong], with_gold=False).level == "skipped"
    assert {each.level for each in judge_parts(wrong, with_gold=False)} == {"ok"}
    varied = [
        [verdict("garbage", 0.0), verdict("empty", 0.0)],
        [verdict("empty", 1.0), verdict("garbage", 0.0)],
    ]
    assert judge_spread(varied, with_gold=False).level == "ok"


# Order


def test_gold_below_a_wrong_completion_is_a_problem_that_shows_the_worst_row():
    tried = [
        [verdict("gold", 1.0), verdict("empty", 0.0)],
        [verdict("gold", 0.5, 1), verdict("garbage", 0.6, 1)],
        [verdict("gold", 0.5, 2), verdict("very long", 2.0, 2), verdict("empty", 0.0, 2)],
    ]
    said = judge_order(tried, GOLD)
    assert (said.level, said.data["beaten"]) == ("problem", 2)
    assert "row 2: very long 2, gold 0.5" in said.measured
    assert "gold_completion" in said.remedy


def test_a_column_of_completions_leaves_no_doubt_about_the_layout():
    tried = [[verdict("gold", 0.0), verdict("empty", 1.0)]]
    assert judge_order(tried, Gold("gold_completion", None)).remedy == "mend the reward"


def test_gold_that_earns_no_more_than_a_wrong_completion_is_a_warning():
    said = judge_order([[verdict("gold", 1.0), verdict("prompt echoed", 1.0)]], GOLD)
    assert (said.level, said.data["tied"]) == ("warning", 1)


def test_gold_that_earns_most_is_well():
    assert judge_order([[verdict("gold", 1.0), verdict("empty", 0.9)]], GOLD).level == "ok"


def test_rows_whose_gold_failed_say_nothing_about_order():
    assert judge_order([[verdict("gold", None), verdict("empty", 1.0)]], GOLD).level == "skipped"


def test_every_accepted_form_should_earn_what_the_first_does():
    equal = [verdict("gold", 1.0), verdict("gold", 1.0)]
    assert [each.level for each in judge_forms([equal])] == ["ok"]
    assert [
        each.level for each in judge_forms([equal, [verdict("gold", 1.0), verdict("gold", 0.0)]])
    ] == ["warning"]
    assert list(judge_forms([[verdict("gold", 1.0)]])) == []


def test_echoing_and_saying_nothing_are_measured_between_the_worst_and_gold():
    tried = [[verdict("gold", 3.0), verdict("empty", -1.0), verdict("prompt echoed", 1.0)]]
    said = {each.name: each for each in judge_cheap(tried)}
    assert (said["empty"].level, said["empty"].data["share_of_gold"]) == ("ok", 0)
    assert (said["prompt echoed"].level, said["prompt echoed"].data["share_of_gold"]) == (
        "warning",
        0.5,
    )


# Parts


def test_parts_are_told_apart_with_their_share_of_none():
    given = [
        verdict("gold", 1.0, right=1.0, form=0.5, never=None),
        verdict("empty", 0.5, right=None, form=0.5, never=None),
        verdict("garbage", 0.5, right=0.0, form=0.5, never=None),
        verdict("very long", 0.5, right=0.0, form=0.5, never=None),
    ]
    said = {each.name: each for each in judge_parts(given, with_gold=True)}
    assert said["part right"].level == "ok"
    assert said["part right"].data["none_share"] == 0.25
    assert said["part form"].level == "warning"
    assert said["part never"].level == "warning"


async def test_a_part_that_fails_is_not_said_to_be_none():
    def broken(completions: list[str]) -> list[float]:
        return [float("nan")] * len(completions)

    members = await trial(broken).score(rows("7")[0], ["7", "8"])
    (said,) = judge_parts([Verdict(0, "gold", "7", each) for each in members], with_gold=True)
    assert (said.level, said.measured) == ("ok", "no value; failed for 100%")
    assert (said.data["failed_share"], said.data["none_share"]) == (1.0, 0.0)


def test_a_single_part_that_is_constant_is_told_once_by_the_spread():
    assert [each.level for each in judge_parts([verdict("gold", 1.0)] * 2, with_gold=True)] == [
        "ok"
    ]


def test_the_table_has_a_row_for_each_kind():
    shown = table(
        [verdict("gold", 1.0), verdict("empty", 0.0), verdict("gold", 0.0), verdict("empty", None)]
    )
    assert [(row["completion"], row["count"], row["failed"], row["reward"]) for row in shown] == [
        ("gold", 2, 0, 0.5),
        ("empty", 2, 1, 0.0),
    ]
    assert shown[0]["parts"] == {"p": 0.5}


# The same again


def test_another_value_in_a_second_call_is_a_warning():
    assert judge_repetition([member(1.0)], [member(1.0)]).level == "ok"
    said = judge_repetition([member(1.0), member(2.0)], [member(1.0), member(2.5)])
    assert (said.level, said.data["changed"]) == ("warning", 1)
    assert "`p` 2, then 2.5" in said.measured
    assert judge_repetition([member(1.0)], [member(None)]).level == "warning"


def test_a_value_that_depends_on_the_others_is_a_warning_with_the_way_to_say_so():
    said = judge_alone([member(1.0)], [member(0.5)])
    assert said.level == "warning"
    assert "function.relative = True" in said.remedy
    assert judge_alone([member(1.0)], [member(1.0)]).level == "ok"


@pytest.mark.parametrize(
    ("seconds", "level"),
    [([9.0, 0.1, 4.9], "warning"), ([0.1, 0.1, 4.9], "ok"), ([0.1, 5.1], "warning")],
)
def test_calls_near_the_limit_are_a_warning(seconds, level):
    timed = trial(lambda completions: [0.0])
    timed.seconds, timed.most = seconds, 4
    said = judge_latency(timed, 10.0, 8)
    assert said.level == level
    assert said.data["completions"] == 4
