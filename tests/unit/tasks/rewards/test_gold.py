"""Where a gold answer is found, and the forms in which it is accepted."""

from typing import Any, cast

import numpy as np
import pytest

from groupwise.tasks.rewards.gold import at_mark, gold_answers, gold_of_row, marked_answer
from groupwise.tasks.rewards.registry import get_reward_funcs

GSM8K = "He has 36 + 36 = <<36+36=72>>72 clips.\n#### 72"
MATH = r"We have $x = \frac{2}{4}$, so $x = \boxed{1/2}$."


def refused(columns, count=1, column=None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — the text is looked at
        gold_answers(columns, count, column)
    return str(caught.value)


def test_the_first_column_that_holds_something_counts_in_each_row():
    columns = {
        "label": ["l1", "l2", "l3"], "answer": ["a1", None, ""], "gold": [None, "g2", None], "prompt_id": [1, 2, 3],
    }  # fmt: skip
    assert gold_answers(columns, 3) == [("a1",), ("g2",), ("l3",)]


def test_a_named_column_is_the_only_one():
    assert gold_of_row({"answer": "a", "capital": "Paris"}, "capital") == ("Paris",)
    message = refused({"answer": ["a"], "level": [1]}, 1, "capital")
    assert "no column `capital`" in message
    assert "answer, level" in message
    assert "`capital` is empty" in refused({"capital": [None], "answer": ["a"]}, 1, "capital")


@pytest.mark.parametrize(("value", "forms"), [
    (" Paris\n", ("Paris",)), (["Paris", " paris ", "Paris"], ("Paris", "paris")),
    (("1", 2, None), ("1", "2")), (np.array(["a", "b"]), ("a", "b")), (np.int64(7), ("7",)),
    (42, ("42",)), (42.0, ("42",)), (0, ("0",)), (2.5, ("2.5",)), (True, ("True",)),
    ("<think>2</think><answer> 4 </answer>", ("4",)),
    (["<answer>4</answer>", "four"], ("4", "four")), (GSM8K, ("72",)),
    ("so\n#### 1,000", ("1,000", "1000")), ("#### -1,000.5 \n", ("-1,000.5", "-1000.5")),
    ("1,000", ("1,000",)), ("#### 3\n#### 4", ("4",)), ("<answer>5</answer>\n#### 4", ("5",)),
    ("First.\n#### Notes\nOne.\nTwo.", ("First.\n#### Notes\nOne.\nTwo.",)), (MATH, (MATH,)),
])  # fmt: skip
def test_forms(value, forms):
    assert gold_answers({"answer": [value]}, 1) == [forms]


@pytest.mark.parametrize(("text", "answer"), [
    (MATH, "1/2"), (r"\boxed{1}, no: \boxed{ 2 }", "2"), (r"\boxed{1}" + "\n#### 2", "2"),
    (r"<answer>\boxed{1}</answer> \boxed{2}", r"\boxed{1}"), (r"\boxed{1", None), ("72", None),
])  # fmt: skip
def test_a_box_marks_an_answer_where_it_is_asked_for(text, answer):
    assert marked_answer(text, boxes=True) == answer
    assert gold_of_row({"solution": text}, boxes=True) == (answer or text,)


@pytest.mark.parametrize(("text", "divided"), [
    ("a\nb\n#### 7", ("a\nb\n", "7")), ("  ####7\r\n", ("  ", "7")), ("####\n7", ("", "7")),
    ("#### 7\n\n#### Note\nIt is so.", None), ("so #### 7", ("so ", "7")), ("so#### 7", None),
    ("##### 7", None), ("#### " + "7" * 121, None), ("7", None),
])  # fmt: skip
def test_the_mark_stands_before_the_end(text, divided):
    assert at_mark(text) == divided


@pytest.mark.parametrize(("column", "gold", "answer"), [
    ("answer", GSM8K, "72"), ("answer", "so\n#### 1,000", "1000"),
    ("answer", "so\n#### 1,000", "1,000"), ("solution", MATH, "1/2"), ("solution", MATH, "0.5"),
])  # fmt: skip
def test_worked_solutions_of_public_sets_are_graded(column, gold, answer):
    names = ["math_answer", "pure_accuracy_math", "correctness_xml"]
    for name in names[: 3 if column == "answer" else 2]:
        ((reward, _),) = get_reward_funcs([name], {})
        cast("Any", reward).check_row({column: gold})
        texts = [f"<think>hm</think><answer>{each}</answer>" for each in (answer, "71", gold)]
        right, wrong, _ = reward(prompts=["?"] * 3, completions=texts, **{column: [gold] * 3})
        assert (right > 0, wrong) == (True, 0.0), name


@pytest.mark.parametrize(
    "nothing", [None, "", "  ", [], [None, ""], float("nan"), "<answer></answer>", "so\n####"]
)
def test_a_row_without_gold_is_refused_with_the_columns_there_are(nothing):
    message = refused({"answer": ["1", nothing], "level": [1, 2]}, 2)
    assert message.startswith("completion 1: there is no gold answer in answer, reference, ")
    assert "has: answer, level." in message
    assert "rewards.answer_column" in message


@pytest.mark.parametrize("name", ["math_answer", "pure_accuracy_math", "length"])
def test_an_empty_box_is_refused_before_the_run(name):
    ((reward, _),) = get_reward_funcs([name], {})
    with pytest.raises(ValueError, match="no gold answer"):
        cast("Any", reward).check_row({"solution": r"so \boxed{}"})
