"""Answers that are right however they are written, wrong ones that only look right, and expressions that would take for ever."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.inprocess import InProcessScorer
from groupwise.tasks.rewards.mathematics import MathAnswer, PureAccuracyMath, answer_of, matches_any
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rewards.shaping import Length

PAIRS = Path(__file__).parents[3] / "fixtures" / "math_pairs.jsonl"


def tagged(answer):
    return f"<answer>{answer}</answer>"


def value(reward, text, gold):
    (one,) = reward([text], answer=[gold])
    return one


@pytest.mark.parametrize(("text", "answer"), [
    (tagged("3"), "3"), (tagged("4") + tagged(" 3 "), "3"), (tagged("4") + r"\boxed{3}", "4"),
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (tagged("") + r"\boxed{3}", None),
    (r"\boxed{ }", None), ("So the answer is 3.", "3."), ("2 + 2 = 4\n#### 72", "72"), ("**Answer:** 42\n", "42"), ("Answer: ", None),
    (r"Answer: 4, or \boxed{5}", "Answer: 4, or (5)"), ("Answer: 4\nOr 5?", None), ("I guess 3", None),
    ("The incorrect answer is 12", None), ("I don't think the answer is 12", None), ("If n is 3, the answer is 12.", "12."),
    ("The correct answer is **D**.", "D."),
    (tagged("13") + ", " + tagged("12"), "13, 12"), ("# Answer\n\n5", "5"),
    ("Final Answer: The final answer is $5$. I hope it is correct.", "The final answer is $5$."), ("<think>Answer: 3", None),
])  # fmt: skip
def test_the_answer_is_in_the_last_tag_or_box_or_in_the_last_line(text, answer):
    assert answer_of(text, "answer") == answer


@pytest.mark.parametrize(("text", "gold", "right"), [
    (tagged("#### 72"), "72", 1), (tagged("Answer: 42"), "42", 1), (tagged("The answer is 6."), "6", 1), (tagged("D. 12"), "D", 1),
    (tagged("D. 12"), "C", 0), (tagged("12"), "(B) 12", 1), ("Answer: 42", "42", 1), ("Answer: 42", "43", 0),
])  # fmt: skip
def test_forms_that_answers_are_announced_in(text, gold, right):
    assert value(MathAnswer(), text, gold) == right
    assert value(MathAnswer(untagged=False), text, gold) == (right if "<answer>" in text else 0)


def test_reasoning_that_the_prompt_began_is_no_answer():
    prompts = [[{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "<think>"}]]
    assert MathAnswer()([r"\boxed{5}"], prompts=prompts, answer=["5"]) == [0.0]
    assert MathAnswer()([r"so</think>\boxed{5}"], prompts=prompts, answer=["5"]) == [1.0]
    own = MathAnswer(reasoning_tag=("<<", ">>"))
    assert own([r"<<\boxed{5}>> no", r"<<\boxed{6}>>\boxed{5}"], answer=["5", "5"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    "case", [json.loads(line) for line in PAIRS.read_text().splitlines()], ids=str
)
def test_pairs_that_graders_got_wrong(case):
    assert value(MathAnswer(), case["completion"], case["gold"]) == case["right"]


SLOW = [
    "9^{9^{9}}", "9^9^9", "10^{99999}", "(((9^9)^9)^9)^9", "(x+y+z)^{6000}", "(9!)!", "99999!",
    r"\frac{1}{1+" * 150 + "1" + "}" * 150, "(" * 500 + "1" + ")" * 500, "1+" * 900 + "1",
    "e^{e^{e^{e^9}}}", "x^{x^{x^{x}}}", r"\sum_{n=1}^{9} n", r"\int_0^1 x dx", "-" * 900 + "1",
    r"\large{" * 250 + r"\boxed{1}",
    r"\sqrt" * 200 + "2", r"\sin" * 200 + " x", "|" * 300, r"\pm" * 200 + "1", "1," * 600 + "1", "x " * 900, "x/" * 900 + "x",
]  # fmt: skip


@pytest.mark.parametrize("answer", SLOW, ids=lambda answer: answer[:20])
def test_expressions_that_take_long_to_compute_are_soon_judged_wrong(answer):
    began = time.thread_time()
    assert not matches_any(["x+7"], answer)
    assert not matches_any([answer], "x+7")
    assert matches_any([answer], f" {answer} ")
    assert time.thread_time() - began < 10, "worked out, each would take minutes or all memory"


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
    assert matches_any(["y", "x+1"], "1+x"), "any accepted form is right"


def test_long_repetitions_are_read_quickly():
    for sign in ("$", "{", r"\boxed{", "^", "(", " ", r"\text{", "1", "a", "<", "√(", "√((a)", "²"):
        begun = time.thread_time()
        value(MathAnswer(), tagged(sign * 20_000), "x+1")
        value(PureAccuracyMath(), "<think>x</think>" + tagged(sign * 20_000), "x+1")
        value(MathAnswer(), sign * 20_000, "x+1")
        assert time.thread_time() - begun < 2.0, sign


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


@pytest.mark.parametrize("answer", [
    "$5/0", "5/0 apples", r"\frac{1}{0} km", "1/0", "/".join(["1", *["1e999"] * 5]),
    r"1e999 \cdot 10^{999} \cdot 10^{999} \cdot 10^{999} \cdot 10^{999}",
])  # fmt: skip
@pytest.mark.parametrize("reward", [MathAnswer(), PureAccuracyMath(), Length(max_length=9)])
def test_an_answer_that_cannot_be_worked_out_is_wrong_and_harms_no_other(reward, answer):
    texts = [f"<think>x</think><answer>{each}</answer>" for each in ("5", "5", answer)]
    right, too, wrong = reward(
        texts, completion_ids=[[1]] * 3, answer=["5"] * 3, log_extra=lambda _, given: list(given)
    )
    assert right == too > wrong


def test_tolerant_of_long_answers():
    reward = MathAnswer(tolerant=True)
    begun = time.thread_time()
    assert value(reward, tagged("5") * 20_000, "5") == 3.0
    assert value(reward, tagged("5") + "x" * 99 + tagged(" 5 "), "5") == 1.5
    assert time.thread_time() - begun < 2.0
