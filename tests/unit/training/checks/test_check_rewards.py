"""Judging rewards by their values for completions of known quality."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from groupwise.core.reward_call.request import GroupScore, MemberScore
from groupwise.core.types import Example, RewardPart
from groupwise.tasks.rewards.rubric import NO_REWARD
from groupwise.training.checks.check_gold import Gold
from groupwise.training.checks.check_rewards import (
    Trial,
    Verdict,
    judge_alone,
    judge_order,
    judge_parts,
    judge_spread,
)

GOLD = Gold("answer", "as plain text")


def verdict(kind: str, reward: float | None, row: int = 0, **parts: float | None) -> Verdict:
    if reward is None:
        return Verdict(row, kind, kind, MemberScore("failed", "it raised"))
    made = tuple(RewardPart(name, value) for name, value in (parts or {"p": reward}).items())
    return Verdict(row, kind, kind, MemberScore("scored", None, reward, made))


async def test_a_completion_that_is_tried_again_is_tokenised_once():
    texts, asked = [], []

    async def score(request):
        asked.append([*map(tuple, request.completion_ids)])
        request.completion_ids[0].clear()  # as a reward of this process may
        return GroupScore(())

    def tokenizer(text, **_):
        return {"input_ids": [len(text), texts.append(text) or 0]}

    scorer: Any = SimpleNamespace(score=score)
    trial = Trial(scorer, tokenizer)
    for _ in range(2):
        await trial.score(Example(0, "?", {}), ["a", "bb", "a"])
    assert (texts, asked) == (["a", "bb"], [[(1, 0), (2, 0), (1, 0)]] * 2)


def test_a_reward_that_never_varies_is_a_problem():
    for gold in (0.3, 0.1 + 0.2):
        tried = [[verdict("gold", gold), verdict("empty", 0.3)]] * 3
        assert judge_spread(tried, GOLD).level == "problem"
    unread = replace(GOLD, is_read=False)
    assert judge_spread(tried, unread).level == "warning", "right ones may look otherwise"
    assert judge_order(tried, unread).level == "warning"


def test_gold_that_was_never_scored_is_not_called_unread():
    tried = [[verdict("gold", None), verdict("empty", None)]]
    assert judge_order(tried, replace(GOLD, is_read=False)).level == "skipped"


def test_a_completion_that_failed_with_its_group_does_not_depend_on_it():
    def scored(reward: float | None, reason: str | None = None) -> MemberScore:
        return MemberScore(
            "failed" if reason else "scored", reason, reward, (RewardPart("p", reward),)
        )

    one = scored(1.0)
    assert judge_alone([scored(None, "it raised")], [one]).level == "skipped"
    assert judge_alone([scored(None, "it raised"), one], [one, one]).level == "ok"
    assert judge_alone([one], [scored(None, NO_REWARD)]).level == "warning", "a mean of one"


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


def test_parts_are_distinguished_with_their_share_of_none():
    broken = MemberScore(
        "scored",
        None,
        1.0,
        (RewardPart("novel", None),),
        {"failed_rewards": {"novel": "it raised"}},
    )
    given = [
        Verdict(0, "gold", "gold", broken),
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
    assert said["part novel"].level == "warning"
