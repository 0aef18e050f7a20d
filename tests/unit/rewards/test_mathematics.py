"""Answers that are right however they are written, wrong ones that only look right, and expressions that would take for ever."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import mathematics
from groupwise.rewards.inprocess import InProcessScorer
from groupwise.rewards.mathematics import MathAnswer, PureAccuracyMath, answer_of, is_right
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import ScoreRequest


def tagged(answer):
    return f"<answer>{answer}</answer>"


def value(reward, text, gold):
    (one,) = reward([text], answer=[gold])
    return one


RIGHT = [
    ("x+1", "1+x"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("1,2", "2, 1"),
    ("(1,2)", "( 1, 2 )"),
    ("x<3", "3>x"),
    ("1+2i", "2i+1"),
    ("3", r"\sqrt{9}"),
    ("3", "1+2"),
    ("2^{10}", "1024"),
    ("10!", "3628800"),
    (r"\pi", "3.14159265"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\text{Even}", "EVEN"),
    (r"\frac{x}{y}", "$x/y$"),
    ("50%", r"\frac{1}{2}"),
    *(
        ("72", each)
        for each in ("72 apples", "72 hours", "72 miles", "$72", "**72**", "72 km", "72.")
    ),
    (r"\emptyset", r"\varnothing"),
    (r"\infty", "infinity"),
    ("1000", "1 000"),
    ("2,3", "2 and 3"),
    ("2√2", "2*sqrt(2)"),
    (r"2\sqrt{2}", "√8"),
    (r"\sqrt{(x+1)^2}", "√((x+1)²)"),
    ("n²", "n*n"),
    ("2³", "8"),
    ("x^{10}", "x¹⁰"),
    ("72", "72km"),
    ("72", "72m²"),
    ("3", "√9"),
]
WRONG = [
    ("3", "4"), ("3", "x"), ("x", "y"), ("x+1", "x-1"), ("x^2-1", "(x-1)(x+2)"), ("(1,2)", "(2,1)"),
    ("[0,1)", "[0,1]"), ("even", "neve"), ("no", "on"), ("abc", "cab"), ("12", "twelve"),
    ("5", "5 apples or 6"), ("3", r"3\text{ no, 4}"), ("3", "3 not"), ("3", "3 x"), ("2", "2³"),
    ("2", "2½"), ("2", "2√2"), ("2", "2√-1"), ("2", "2∛5"), ("2", "2ⁿ"), ("5", "5₈"), ("22", "2²"),
    ("9", "√9"), ("72km", "72 miles"), ("3456", "3 and 456"), ("1234567.89", "1234567.12"),
    (r"\pm 2", "2"), ("0", "0.0000001"), ("x+1", ""),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_what_is_right_however_it_is_written(gold, answer):
    assert is_right(answer, [gold])


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_what_is_wrong_however_alike_it_looks(gold, answer):
    assert not is_right(answer, [gold])


@pytest.mark.parametrize(("text", "answer"), [
    (tagged("3"), "3"), (tagged("4") + tagged(" 3 "), "3"), (tagged("4") + r"\boxed{3}", "4"),
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (tagged("") + r"\boxed{3}", None),
    (r"\boxed{ }", None), ("the answer is 3", None),
])  # fmt: skip
def test_the_answer_is_in_the_last_tag_or_box(text, answer):
    assert answer_of(text, "answer") == answer


# What math-verify is given, and where

SLOW = [
    "9^{9^{9}}", "9^9^9", "10^{99999}", "(((9^9)^9)^9)^9", "(x+y+z)^{60}",
    r"\frac{1}{1+" * 40 + "1" + "}" * 40, "(" * 50 + "1" + ")" * 50, "1+" * 200 + "1", "(9!)!",
    "99999!", r"\sum_{n=1}^{9} n", r"\int_0^1 x dx",
]  # fmt: skip


@pytest.mark.parametrize("answer", SLOW)
def test_what_would_take_long_is_compared_as_it_is_written(answer, monkeypatch):
    def never():
        raise AssertionError("math-verify was asked")

    monkeypatch.setattr(mathematics, "_math_verify", never)
    assert not is_right(answer, ["x+7"])
    assert is_right(f" {answer} ", [answer])


async def test_it_scores_in_the_thread_of_the_run():
    request = ScoreRequest(
        draw=0,
        prompts=["p", "p"],
        completions=[tagged("1+x"), tagged("2+x")],
        completion_ids=[[1], [1]],
        columns={"answer": ["x+1", "x+1"]},
        global_step=0,
        max_steps=1,
    )
    scorer = InProcessScorer(Rubric([MathAnswer()]), lambda prompts, completions, rows: {})
    score = await asyncio.wait_for(scorer.score(request), 30)
    await scorer.close()
    assert [member.reward for member in score.members] == [1.0, 0.0]
    assert is_right("1+x", ["y", "x+1"]), "any accepted form is right"


def test_long_repetitions_are_read_quickly():
    for sign in ("$", "{", r"\boxed{", "^", "(", " ", r"\text{", "1", "a", "<", "√(", "√((a)", "²"):
        begun = time.process_time()
        value(MathAnswer(), tagged(sign * 20_000), "x+1")
        value(PureAccuracyMath(), "<think>x</think>" + tagged(sign * 20_000), "x+1")
        value(MathAnswer(), sign * 20_000, "x+1")
        assert time.process_time() - begun < 2.0, sign


# math_answer


def test_right_or_wrong():
    texts = [tagged("0.5"), r"\boxed{1/2}", tagged("0.6"), "0.5", tagged("")]
    assert MathAnswer()(texts, answer=["1/2"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("answer", "expected"), [
    ("100", 3.0), (" 100 ", 1.5), ("100.0", 1.5), (r"\frac{200}{2}", 1.5), ("99+1", 1.5),
    ("110", 0.5), ("90.0", 0.5), ("111", 0.25), ("80", 0.25), ("121", -1.0), ("-100", -1.0),
    ("many", -0.5), ("", -0.5),
])  # fmt: skip
def test_tolerant_grades(answer, expected):
    assert value(MathAnswer(tolerant=True), tagged(answer), "100") == expected


def test_tolerant_grades_without_a_number_or_near_zero():
    tolerant = MathAnswer(tolerant=True)
    assert value(tolerant, "100", "100") == -0.5
    assert value(tolerant, tagged("x+2"), "x+1") == -0.5
    assert value(tolerant, tagged("2"), "x+1") == -0.5
    assert value(tolerant, tagged("1+x"), "x+1") == 1.5
    assert value(tolerant, tagged("0.001"), "0") == -1.0
    assert value(tolerant, tagged("104"), ["200", "100"]) == 0.5
    assert value(tolerant, tagged("4") + tagged(" 4 "), "4") == 1.5


# pure_accuracy_math


@pytest.mark.parametrize(("text", "expected"), [
    ("<think>hm</think><answer>3</answer>", 1.0),
    ("<think>hm</think>\n<answer> \\boxed{3.0} </answer> Done.", 1.0),
    ("\n<THINK>hm</THINK><ANSWER>3</ANSWER>", 1.0), ("<think>hm</think><answer>4</answer>", 0.0),
    ("<think>hm</think><answer>x</answer>", 0.0), ("<think>hm</think><answer>1+2</answer>", 0.0),
    ("<think>hm</think><answer>3</answer><answer>4</answer>", 0.0),
    ("<think>hm</think><answer></answer>", 0.0), ("<think> </think><answer>3</answer>", 0.0),
    ("So <think>hm</think><answer>3</answer>", 0.0), ("hm</think><answer>3</answer>", 0.0),
    ("<answer>3</answer>", 0.0), ("3", 0.0),
])  # fmt: skip
def test_the_structure_and_the_answer(text, expected):
    assert value(PureAccuracyMath(), text, "3") == expected


def test_a_reasoning_tag_that_the_prompt_opened():
    reward = PureAccuracyMath(reasoning_opened=True)
    assert value(reward, "hm</think><answer>3</answer>", "3") == 1.0
    assert value(reward, "<answer>3</answer>", "3") == 0.0


@given(st.integers(), st.integers())
def test_numbers_never_agree_by_letters(gold, answer):
    text = f"<think>{gold}</think>{tagged(answer)}"
    for reward in (MathAnswer(), PureAccuracyMath()):
        assert value(reward, text, gold) == float(gold == answer)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["3", " 3.0 ", "4", "", "x"]), min_size=1, max_size=4))
def test_a_batch_equals_its_rows_one_by_one(answers):
    texts = [f"<think>hm</think>{tagged(answer)}" for answer in answers]
    for reward in (MathAnswer(), MathAnswer(tolerant=True), PureAccuracyMath()):
        values = reward(texts, answer=["3"] * len(texts))
        assert values == [value(reward, text, "3") for text in texts]
        spaced = reward([f"\n{text.swapcase()} " for text in texts], answer=["3"] * len(texts))
        assert values == spaced


@given(st.integers(1, 10_000), st.integers(0, 20_000), st.integers(0, 20_000))
def test_nearer_never_earns_less(gold, one, other):
    nearer, farther = sorted((one, other), key=lambda given: abs(given - gold))
    tolerant = MathAnswer(tolerant=True)
    values = tolerant([tagged(nearer), tagged(farther)], answer=[gold, gold])
    assert 3.0 >= values[0] >= values[1] >= -1.0
