"""Gold answers found in rows, written as completions, and wrong completions beside them."""

import pytest

from groupwise.core.types import Example
from groupwise.training.checks.check_gold import (
    LAYOUTS,
    LONG_CHARACTERS,
    Gold,
    answer_in,
    cases_of,
    format_answer,
)


def rows(*columns: dict) -> list[Example]:
    return [Example(index, f"ask {index}", each) for index, each in enumerate(columns)]


@pytest.mark.parametrize(("stored", "answer"), [
    ("42", "42"), ("so\n#### 42", "42"), ("<answer>1</answer> <ANSWER> 2 </ANSWER>", "2"),
    (r"so \boxed{1/2}.", "1/2"), (r" \boxed{3}", r"\boxed{3}"),
    ("a\n#### Notes\nb", "a\n#### Notes\nb"),
])  # fmt: skip
def test_the_answer_within_a_text(stored, answer):
    assert answer_in(stored) == answer


def test_layouts_hold_the_answer_and_nothing_of_the_pattern():
    for layout in LAYOUTS:
        text = format_answer("7", layout)
        assert "7" in text
        assert "answer}" not in text
        assert "stored" not in text
    assert format_answer("so\n#### 7", "in \\boxed{}") == "\\boxed{7}"
    assert format_answer("so\n#### 7", "as it stands in the column") == "so\n#### 7"
    assert format_answer("{answer}", "as plain text") == "{answer}"


def test_cases_are_gold_and_wrong_ones():
    first, *others = rows({"answer": "1"}, {"answer": "2"}, {"answer": "3"}, {"answer": "4"})
    cases = cases_of(first, others, Gold("answer", "as plain text"), str)
    kinds = [case.kind for case in cases]
    assert kinds == [
        "gold", "another's gold", "another's gold", "empty", "garbage", "prompt echoed", "very long",
    ]  # fmt: skip
    assert [case.text for case in cases[:3]] == ["1", "2", "3"]
    assert len(cases[-1].text) > 0.9 * LONG_CHARACTERS


def test_other_gold_answers_that_are_right_for_a_row_are_not_tried_as_wrong():
    answers = (["Yes", "y"], "YES", "Y", "no")
    first, *others = rows(*({"answer": each} for each in answers))
    cases = cases_of(first, others, Gold("answer", "as plain text"), str)
    texts = [case.text for case in cases if case.kind == "another's gold"]
    assert texts == ["no"]
