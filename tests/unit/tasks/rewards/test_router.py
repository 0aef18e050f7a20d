"""Rewards by task.

1. A row's label: column `task`, known or not; where that is empty a known `dataset_name`, then the default.
2. A mixed batch is scored row by row: each label's rewards see their own rows, and fail nobody else's.
3. Every part stands under its label and does not apply to other rows.
4. Rows without rewards are refused before a run, and are failures in one.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def right(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def breaks(completions, **columns):
    raise RuntimeError("no grader")


ROUTER = Router.of({"math": [right, (length, 0.5)], "words": [length]})
NUMBERED = Router.of({"1": length, "math": length, "words": length})


def request(rows, completions=None):
    """A request for rows of columns; all rows have the same ones."""
    names = list(rows[0]) if rows else []
    return ScoreRequest(
        draw=0,
        prompts=[f"p{number}" for number in range(len(rows))],
        completions=completions or ["ab"] * len(rows),
        completion_ids=[[number] for number in range(len(rows))],
        columns={name: [row[name] for row in rows] for name in names},
        global_step=3,
        max_steps=10,
    )


def score(router, rows, completions=None):
    return asyncio.run(router.score(request(rows, completions)))


def parts_of(member):
    return {part.name: part.value for part in member.parts}


def refused(call) -> str:
    with pytest.raises(TaskError) as caught:
        call()
    return str(caught.value)


# 1. labels


@pytest.mark.parametrize(("row", "label"), [
    ({"task": "math"}, "math"), ({"task": 1}, "1"), ({"task": "math", "dataset_name": "words"}, "math"),
    ({"task": None, "dataset_name": "words"}, "words"), ({"task": "", "dataset_name": "words"}, "words"),
    ({"task": float("nan"), "dataset_name": "words"}, "words"), ({"dataset_name": "words"}, "words"),
    ({"dataset_name": "other"}, None), ({"task": " "}, None), ({}, None),
])  # fmt: skip
def test_label_of_a_row(row, label):
    assert NUMBERED.label_of(row) == label
    assert NUMBERED.with_default("math").label_of(row) == (label or "math")


@pytest.mark.parametrize("row", [{"task": "other"}, {"task": "other", "dataset_name": "words"}])
def test_an_unknown_label_gets_no_other_rewards(row):
    assert ROUTER.label_of(row) is None
    router = ROUTER.with_default("math")
    assert router.label_of(row) is None
    assert "`other`" in refused(lambda: router.check_rows({0: row}))
    (member,) = score(router, [row]).members
    assert (member.outcome, member.reward) == ("failed", None)
    assert "`other`" in str(member.reason)


# 2. and 3. mixed batches


def test_mixed_batch_row_by_row():
    rows = [
        {"task": "math", "answer": "7"},
        {"task": "words", "answer": None},
        {"task": "math", "answer": "ab"},
    ]
    found = score(ROUTER, rows, ["7", "abc", "abcd"])
    assert [member.reward for member in found.members] == [1.5, 3.0, 2.0]
    assert ROUTER.names == ("math/right", "math/length", "words/length")
    assert ROUTER.weights == (1.0, 0.5, 1.0)
    assert [parts_of(member) for member in found.members] == [
        {"math/right": 1.0, "math/length": 1.0, "words/length": None},
        {"math/right": None, "math/length": None, "words/length": 3.0},
        {"math/right": 0.0, "math/length": 4.0, "words/length": None},
    ]


def test_functions_see_their_own_rows_in_every_argument():
    seen = {}

    async def watches(
        prompts, completions, completion_ids, trainer_state, log_metric, log_extra, hint
    ):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, hint=hint)
        seen["state"] = (trainer_state.global_step, trainer_state.max_steps)
        log_metric("hints", len(hint))
        log_extra("hint", hint)
        return [1.0] * len(completions)

    router = Router.of({"a": watches, "b": length})
    rows = [
        {"task": label, "hint": hint} for label, hint in (("b", 0), ("a", 1), ("b", 2), ("a", 3))
    ]
    found = score(router, rows, ["w", "x", "y", "z"])
    assert seen == {
        "prompts": ["p1", "p3"], "completions": ["x", "z"], "ids": [[1], [3]], "hint": [1, 3], "state": (3, 10),
    }  # fmt: skip
    assert found.metrics == {"hints": 2.0}
    assert [member.notes for member in found.members] == [{}, {"hint": 1}, {}, {"hint": 3}]


def test_a_failing_reward_of_one_task_fails_no_other_task():
    def logs(completions, log_metric, **columns):
        log_metric("m", len(completions))
        return [1.0] * len(completions)

    def more(completions, log_metric, **columns):
        log_metric("m", 4.0)
        return [1.0] * len(completions)

    heard = []
    router = Router.of({"a": [breaks, logs], "b": [more]})
    asked = request([{"task": "a"}, {"task": "b"}, {"task": "b"}])
    found = asyncio.run(router.score(asked, heard.append))
    assert [member.outcome for member in found.members] == ["failed", "scored", "scored"]
    assert "`a/breaks` raised" in str(found.members[0].reason)
    assert list(found.members[0].notes["failed_rewards"]) == ["a/breaks"]
    assert (heard, found.metrics) == (["a/breaks", "a/logs", "b/more"], {"m": 2.5})


def test_routers_within_routers():
    inner = Router.of({"x": length, "y": right}, default="x")
    outer = Router.of({"in": inner, "out": length})
    assert outer.names == ("in/x/length", "in/y/right", "out/length")
    found = score(outer, [{"task": "in"}, {"task": "out"}])
    assert [parts_of(member)["in/x/length"] for member in found.members] == [2.0, None]
    found = score(outer, [{"task": "in", "dataset_name": "y", "answer": "ab"}])
    assert parts_of(found.members[0])["in/y/right"] == 1.0
    assert inner.label_of({"task": "in"}) is None  # by itself it does not know of it


LABELS = st.lists(
    st.tuples(st.sampled_from(["math", "words", "none"]), st.text("ab", max_size=3)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(LABELS, st.randoms(use_true_random=False))
def test_a_batch_is_its_rows_one_by_one_in_any_order(drawn, order):
    rows = [{"task": label, "answer": "ab"} for label, _ in drawn]
    texts = [text for _, text in drawn]
    together = score(ROUTER, rows, texts).members
    alone = [score(ROUTER, [row], [text]).members[0] for row, text in zip(rows, texts, strict=True)]
    assert list(together) == alone
    places = list(range(len(rows)))
    order.shuffle(places)
    shuffled = score(ROUTER, [rows[p] for p in places], [texts[p] for p in places]).members
    assert list(shuffled) == [together[place] for place in places]


# 4. rows without rewards


def test_rows_without_rewards_are_refused_with_the_labels_there_are():
    rows = {3: {"task": "math", "answer": "1"}, 4: {"task": "mth"}, 9: {"task": "mth"}, 11: {}}
    message = refused(lambda: ROUTER.check_rows(rows))
    for part in (
        "3 of 4 rows",
        "row 4 first",
        "2 × ",
        "`mth`. Did you mean math?",
        "1 × ",
        "math, words",
    ):
        assert part in message
    given = Router.of({"a": length}, where="rewards.router")
    for router, where in ((ROUTER, "task.py: get_reward_funcs"), (given, "rewards.router")):
        rubric = Rubric.of(router, where="task.py: get_reward_funcs")
        assert refused(lambda rubric=rubric: rubric.check_rows({0: {}})).startswith(
            f"{where}: 1 of 1"
        )


def test_a_row_without_rewards_has_failed_and_others_have_not():
    found = score(ROUTER, [{"task": "mth"}, {"task": "words"}])
    assert [member.outcome for member in found.members] == ["failed", "scored"]
    assert "label `mth`" in str(found.members[0].reason)
    assert set(parts_of(found.members[0]).values()) == {None}


def test_columns_are_asked_of_the_rows_of_a_label_alone():
    ROUTER.check_rows({0: {"task": "math", "answer": "1"}, 1: {"task": "words"}})
    message = refused(
        lambda: ROUTER.check_rows({0: {"task": "math"}, 1: {"task": "words", "answer": "1"}})
    )
    assert message.startswith("Router, math: `right` asks for `answer`")


def test_rewards_may_refuse_rows():
    class Needs:
        def check_row(self, row):
            if not row.get("answer"):
                raise ValueError("there is no answer.")

        def __call__(self, completions, **columns):
            return [1.0] * len(completions)

    rubric = Rubric([Needs()], where="here")
    rubric.check_rows({5: {"answer": "a"}})
    message = refused(lambda: rubric.check_rows({5: {"answer": "a"}, 8: {"answer": ""}}))
    assert message == "here: `Needs` cannot score 1 of 2 rows.\n  row 8: there is no answer."
    routed = Router.of({"a": [Needs()], "b": length}, where="there")
    message = refused(lambda: routed.check_rows({1: {"task": "b"}, 7: {"task": "a"}}))
    assert message.startswith("there, a: `a/Needs` cannot score 1 of 1 rows.\n  row 7: ")


# construction


def test_weights_come_in_the_order_of_the_parts():
    router = ROUTER.reweighted([1, 2, 3])
    assert router.weights == (1.0, 2.0, 3.0)
    rows = [{"task": "math", "answer": "ab"}, {"task": "words", "answer": ""}]
    assert [member.reward for member in score(router, rows).members] == [5.0, 6.0]
    assert Rubric.of(ROUTER, [1, 2, 3], where="t").weights == (1.0, 2.0, 3.0)
    assert Router.of({"a": length}, [2]).weights == (2.0,)
    assert "2 weights for 3" in refused(lambda: ROUTER.reweighted([1, 2]))
    assert "every weight is 0" in refused(lambda: ROUTER.reweighted([1, 2, 0]))
