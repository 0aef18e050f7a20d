"""Formulas that can be evaluated quickly, recognised by how they are written."""

from __future__ import annotations

import pytest

from groupwise.tasks.rewards.formulas import MAX_CHARACTERS, is_small_formula

FUNCTIONS = ("exp", "sin")


@pytest.mark.parametrize("text", [
    "1", " -x + 2*y/3 ",
    "9**9**2",  # 81 times the bits of 9: 257
    "2**4096", "2**-4096", "x**100*10**300", "(1/3)**(1/2)",
    "exp(exp(x))",  # letters stand for numbers below 2, and e**(e**2) is 1618
    "sin(2*x)**4", "1e300", " + ".join(f"7*x**{n}/3" for n in range(100)),
])  # fmt: skip
def test_formulas_that_come_to_numbers_of_some_bits_are_small(text: str) -> None:
    assert is_small_formula(text, FUNCTIONS)


@pytest.mark.parametrize("text", [
    "2**4097", "2**-4097", "(1/2)**4097", "1/2**4097", "2**(-4097)", "2**4000*2**97",
    "2**4096 + 1",  # a sum may have a bit more
    "9**9**9", "x**4097", "2**(4097 + x - x)", "(x + 1)**9999", "exp(9999)", "exp(exp(exp(x)))",
    "1e999", "1e-9999", "x*1E-9_9_99_9", "1" * (MAX_CHARACTERS + 1), "-" * 5000 + "1", "(" * 500 + "1" + ")" * 500,
])  # fmt: skip
def test_formulas_that_may_come_to_more_are_not(text: str) -> None:
    assert not is_small_formula(text, FUNCTIONS)


@pytest.mark.parametrize("text", [
    "", "1 +", "x y", "cos(x)", "exp(x, 2)", "exp(x=2)", "exp(*x)", "x.exp(2)", "x[0]", "(1, 2)",
    "1,000", "True", "'a'", "2j", "2 ^ 3", "7 // 2", "x if y else z", "lambda: 1", "\0",
])  # fmt: skip
def test_other_expressions_are_no_small_formulas(text: str) -> None:
    assert not is_small_formula(text, FUNCTIONS)


def test_formulas_have_letters_and_functions_only_if_allowed() -> None:
    assert is_small_formula("(1 + 2)*3", (), letters=False)
    assert not is_small_formula("x", (), letters=False)
    assert not is_small_formula("exp(1)", FUNCTIONS, letters=False)
