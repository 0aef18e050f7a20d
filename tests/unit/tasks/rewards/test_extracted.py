"""The answers that rewards record for majority votes: one text for equal answers, None without an answer."""

import asyncio

import pytest

from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.registry import get_reward_funcs
from groupwise.tasks.rewards.rubric import Rubric


def tagged(answer):
    return f"<think>hm</think><answer>{answer}</answer>"


def recorded(names, texts, **columns):
    """What is kept beside each rollout, as a run asks for it."""
    every = {name: [value] * len(texts) for name, value in columns.items()}
    ids = [[1]] * len(texts)
    asked = ScoreRequest(0, ["?"] * len(texts), texts, ids, every, 0, 1)
    score = asyncio.run(Rubric(get_reward_funcs(names)).score(asked))
    assert {member.outcome for member in score.members} == {"scored"}, score
    return [member.notes["extracted_answer"] for member in score.members]


MATHS = [
    (tagged("0.5"), "1/2"), (tagged(r"$\frac{1}{2}$"), "1/2"), (tagged("4.0 km"), "4"),
    (tagged(r"\boxed{1,000}"), "1000"), (tagged("50%"), "50"), (tagged("y = x^{2}"), "x^2"),
    (tagged("x²."), "x^2"), (tagged("2√2"), r"2\sqrt2"), (tagged("4") + tagged("5"), "5"),
    (tagged(" "), None), (tagged("$$"), "$"), (tagged("9" * 3000), None), ("It is 4.", None),
]  # fmt: skip


@pytest.mark.parametrize("name", ["math_answer", "pure_accuracy_math", "length"])
def test_mathematical_answers(name):
    texts, answers = zip(*MATHS, strict=True)
    assert recorded([name], list(texts), answer="4") == list(answers)


def test_an_answer_in_a_box():
    texts = [r"so \boxed{4.0}", r"\boxed{}"]
    assert recorded(["math_answer"], texts, answer="4") == ["4", None]
    assert recorded(["pure_accuracy_math"], texts, answer="4") == [None, None]


def test_accepted_forms_are_one_answer():
    texts = [tagged(each) for each in ("NYC", " New York ", "nyc", "")]
    found = recorded(["correctness_xml"], [*texts, "NYC"], answer=["New York", "NYC"])
    assert found == ["New York", "New York", "nyc", None, None]


def test_letters():
    texts = [tagged("Crème & Co."), tagged("creme and co"), tagged("cat5"), tagged("-"), "a cat"]
    spelt = ["CREMEANDCO", "CREMEANDCO", "CAT5", None]
    assert recorded(["pure_accuracy"], texts, answer="cat") == [*spelt, None]
    assert recorded(["crossword_accuracy"], texts, answer="cat") == [*spelt, "ACAT"]


@pytest.mark.parametrize("name", ["rush_solution_exact", "rush_solution_shaped"])
def test_moves(name):
    texts = [tagged("Bv1, c>1,A>1,A>1"), "hm</think>B D 1; C>1; A>2.", tagged("slide B"), "no"]
    found = recorded([name], texts, answer="Bv1,C>1,A>2", board="ooCoAABoooBooooo")
    assert found == ["Bv1,C>1,A>2", "Bv1,C>1,A>2", None, None]


def test_the_answer_of_the_last_reward_that_read_one_is_taken():
    texts = [r"<answer>4 km</answer>", r"\boxed{4.0}", "four"]
    both = ["math_answer", "correctness_xml"]
    assert recorded(both, texts, answer="4") == ["4 km", "4", None]
    assert recorded(both[::-1], texts, answer="4") == ["4", "4", None]
