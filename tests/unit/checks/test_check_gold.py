"""Gold answers found in rows, written as completions, and wrong completions beside them."""

import pytest

from groupwise.checks.check_gold import (
    LAYOUTS,
    LONG_CHARACTERS,
    Gold,
    answer_in,
    cases_of,
    echo,
    gold_column,
    laid_out,
)
from groupwise.types import Example


def rows(*columns: dict) -> list[Example]:
    return [Example(index, f"ask {index}", each) for index, each in enumerate(columns)]


def test_a_column_of_completions_comes_before_one_of_answers():
    assert gold_column(rows({"answer": "1", "gold_completion": "<a>1</a>"})) == "gold_completion"
    assert gold_column(rows({"label": "1", "reference": "2"})) == "reference"
    assert gold_column(rows({"text": "x"})) is None
    assert gold_column(rows({"answer": None, "solution": "x"})) == "solution"
    assert gold_column(rows({"answer": "1", "capital": "2"}), "capital") == "capital"


@pytest.mark.parametrize(
    ("stored", "answer"),
    [
        ("42", "42"),
        ("so\n#### 42", "42"),
        ("<answer>1</answer> <ANSWER> 2 </ANSWER>", "2"),
        (r"so \boxed{1/2}.", "1/2"),
        (r" \boxed{3}", r"\boxed{3}"),
        ("a\n#### Notes\nb", "a\n#### Notes\nb"),
    ],
)
def test_the_answer_within_a_text(stored, answer):
    assert answer_in(stored) == answer


def test_layouts_hold_the_answer_and_nothing_of_the_pattern():
    for layout in LAYOUTS:
        text = laid_out("7", layout)
        assert "7" in text
        assert "answer}" not in text
        assert "stored" not in text
    assert laid_out("so\n#### 7", "boxed") == "\\boxed{7}"
    assert laid_out("so\n#### 7", "as it stands in the column") == "so\n#### 7"
    assert laid_out("{answer}", "plain") == "{answer}"


def test_cases_are_gold_and_wrong_ones():
    first, *others = rows({"answer": "1"}, {"answer": "2"}, {"answer": "3"}, {"answer": "4"})
    cases = cases_of(first, others, Gold("answer", "plain"))
    kinds = [case.kind for case in cases]
    assert kinds == [
        "gold", "another's gold", "another's gold", "empty", "garbage", "prompt echoed", "very long",
    ]  # fmt: skip
    assert [case.text for case in cases[:3]] == ["1", "2", "3"]
    assert len(cases[-1].text) > 0.9 * LONG_CHARACTERS


def test_what_is_right_for_this_row_is_not_tried_as_wrong():
    answers = (["Yes", "y"], "YES", "Y", "no")
    first, *others = rows(*({"answer": each} for each in answers))
    cases = cases_of(first, others, Gold("answer", "plain"))
    texts = [case.text for case in cases if case.kind == "another's gold"]
    assert texts == ["no"]


def test_a_prompt_or_silence_that_is_right_is_no_wrong_completion():
    copy = Example(0, "Say it.", {"answer": ["say it.", ""]})
    kinds = [case.kind for case in cases_of(copy, [], Gold("answer", "plain"))]
    assert kinds == ["gold", "gold", "garbage", "very long"]


def test_an_echo_repeats_the_last_question():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert echo(Example(0, chat)) == "q"
    assert echo(Example(0, "text")) == "text"
    assert echo(Example(0, chat[:1])) == "[system] s"
