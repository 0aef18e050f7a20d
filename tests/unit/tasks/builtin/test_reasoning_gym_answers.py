"""Which answers graders of reasoning-gym get: no code, nothing that hangs them, and every answer that they accept."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from groupwise.tasks.builtin import reasoning_gym_answers
from groupwise.tasks.builtin.reasoning_gym import grade_answer
from groupwise.tasks.builtin.reasoning_gym_answers import agrees_at_a_point, is_harmless
from groupwise.tasks.builtin.reasoning_gym_problems import RIGHT, dataset_of, entry_as_text

EVALUATED = sorted(reasoning_gym_answers.READ_AS_NUMBER | reasoning_gym_answers.READ_AS_FORMULA)
TOWERS = [
    "9**9**9**9", "(9**9)**(9**9)", "2**(99*99*99*99)", "9**-99999999", "9**9_999_999",
    "9**0xffffff", "9**99999999.0", "(" * 150 + "9**9" + "**9)" * 150, "1/9**(9**9)",
]  # fmt: skip
"""Numbers that nobody can write down."""
UNLIKE = "sqrt((x - (C - x)**2)/(y/(C - x) + tanh(x)))"
"""A small formula that nobody simplifies in a minute."""
HANGING = {
    "propositional_logic": ["\u00ac" * 2000 + "A"],
    "countdown": ["exp(exp(exp(9)))", "asin(9)**(9**-2)"],
    "puzzle24": ["exp(exp(exp(9)))", "asin(9)**(9**-2)"],
    "polynomial_multiplication": ["exp(9)**9999999 + x", "((x**999)**999)**999"],
    "simple_integration": ["(x+1)**9999", "cosh(x**4000)", "Abs(x**4000/12)", UNLIKE],
    "intermediate_integration": ["(x+1)**9999", "tanh(exp(x**99))", "Abs(x - C**4000)", UNLIKE],
}
"""Formulas of a dataset that it takes for ever to evaluate or to simplify."""


def named(name: str, level: int | None = None) -> dict[str, Any]:
    return {"name": name, "level": level, "parameters": {}}


@cache
def problem(name: str, level: int | None = None) -> dict[str, Any]:
    return dataset_of(named(name, level), 7)[0]


def earned(name: str, answer: str, level: int | None = None) -> float:
    return grade_answer(answer, named(name, level), entry_as_text(problem(name, level)))


@pytest.mark.timeout(20)  # one of them would take for ever
@pytest.mark.parametrize("name", EVALUATED)
def test_no_answer_hangs_a_grader(name: str) -> None:
    for answer in [*TOWERS, *HANGING[name]]:
        assert earned(name, answer) == 0.0, answer


@pytest.mark.parametrize("name", EVALUATED)
def test_gold_answers_pass(name: str) -> None:
    assert earned(name, problem(name)["answer"]) == 1.0


@pytest.mark.timeout(20)  # one of them takes a minute in the package
@pytest.mark.parametrize("name", ["coin_flip", "complex_arithmetic", "game_of_life_halting"])
def test_graders_that_give_the_most_for_wrong_answers_are_not_asked(name: str) -> None:
    gold = str(problem(name)["answer"])
    assert earned(name, gold.upper()) == 1.0
    for answer in ["n an", gold[:3], *"0. 1e-400 1e30000000 1/0 nan nani inf".split()]:
        assert earned(name, answer) < RIGHT, answer


def test_a_long_product_of_polynomials_passes() -> None:
    gold = problem("polynomial_multiplication", 3)["answer"]
    assert len(gold) > 1000
    assert earned("polynomial_multiplication", gold, 3) == 1.0


@pytest.mark.parametrize(("answer", "right"), [
    ("x**3/3 + sin(2*x)/2 + C", True), ("sin(x)*cos(x) + x**3/3 - 10**12", True), ("x**3/3 + sin(2*x)/2.01 + C", False),
    ("x**4000", False),
])  # fmt: skip
def test_a_derivative_is_compared_at_a_point(answer: str, right: bool) -> None:
    integral = {"variable": "x", "integrand": "x**2 + cos(2*x)"}
    assert agrees_at_a_point(answer, integral) is right


@pytest.mark.parametrize(("name", "answer"), [
    ("spiral_matrix", "__import__('os').system('true')"), ("spiral_matrix", "[print(1)]"), ("n_queens", "open('x')"),
    ("string_insertion", "(lambda: 1)()"), ("countdown", "__import__('os').getpid()"), ("countdown", "sqrt(4)"),
    ("countdown", "x"), ("simple_integration", "x.__class__"), ("simple_integration", "sympify('1')"),
    ("puzzle24", "factorial(4)"), ("polynomial_multiplication", "S.One"),
    ("polynomial_multiplication", "x if x else y"),
])  # fmt: skip
def test_graders_that_evaluate_answers_get_no_code(name: str, answer: str) -> None:
    assert not is_harmless(answer, name)
    assert earned(name, answer) == 0.0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("spiral_matrix", "[1, 2, 3]"),
        ("n_queens", "Q _ _\n_ _ Q"),
        ("string_insertion", "['A', 'B']"),
        ("countdown", "(1 + 2)*3 - 4.5/2"),
        ("simple_integration", "x**3/3 + sin(2*x) + C"),
        ("chain_sum", "__import__"),  # its grader only compares
    ],
)
def test_data_and_formulas_pass(name: str, answer: str) -> None:
    assert is_harmless(answer, name)


def test_datasets_whose_graders_evaluate_are_all_known() -> None:
    """A release of the package may add some."""
    package = Path(sys.modules[dataset_of(named("chain_sum")).__module__].__file__ or "").parents[1]
    found = subprocess.run(
        ["grep", "-rlE", r"\beval\((answer|user|predict)|parse_expr\((answer|user)", package],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {Path(line).stem for line in found.stdout.splitlines() if line.endswith(".py")}
    assert names == reasoning_gym_answers.READ_AS_DATA | set(EVALUATED)
