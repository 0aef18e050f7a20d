"""Decides which answers are passed to the graders of reasoning-gym: some graders evaluate model output as Python or through sympy.

Such a grader gets an answer only if it is plain data, or a formula without large intermediate numbers. A grader that simplifies
formulas gets only answers that agree with the problem at one point, because simplifying a wrong one may take unboundedly long.
"""

from __future__ import annotations

import ast
import cmath
import importlib
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from groupwise.tasks.rewards.formulas import is_small_formula

READ_AS_DATA = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Datasets whose graders evaluate the answer as Python and expect a list."""
READ_AS_NUMBER = frozenset({"countdown", "puzzle24"})
"""Datasets whose graders evaluate the answer as arithmetic through sympy, and therefore as Python too."""
SIMPLIFIED = frozenset({"intermediate_integration", "simple_integration"})
"""Datasets whose graders also parse the answer as a formula and simplify it, which may not terminate unless it is correct."""
READ_AS_FORMULA = SIMPLIFIED | {"polynomial_multiplication"}
"""All datasets whose graders parse the answer as a formula."""
_CHANCE = re.compile(r"(\d{1,20}(\.\d{1,20})?|\.\d{1,20})([eE][-+]?\d\d?)?(/\d{1,20})?")
CHANCE_TOLERANCE = 1e-4
"""Largest difference between equal probabilities, as in the package; also at most 1 % of the correct one, so 0 never matches it."""
RELATIVE_TOLERANCE = 1e-3
"""Largest relative difference between two values that count as the same number, rounded."""
POINT = 1.37
"""The x at which a formula is compared before it is simplified: not a special point of any function."""
MAX_LOGIC = 300
"""Most characters of a logic formula, because its grader parses in quadratic time; correct ones have a few dozen."""
FUNCTIONS = frozenset(
    "sin cos tan sec csc cot sinh cosh tanh asin acos atan asinh acosh atanh exp log ln sqrt".split()
)
"""Functions that a formula may call. Abs is excluded: sympy expands powers in it, which may not terminate."""


def is_harmless(answer: str, name: str) -> bool:
    """True if the answer, evaluated as Python by the dataset's grader, contains only data or a small formula."""
    if name in READ_AS_DATA:
        return re.fullmatch(r"[\w\s.,-]*", answer) is not None or _is_literal(answer)
    if name in READ_AS_NUMBER:
        return is_small_formula(answer, (), letters=False)
    if name in READ_AS_FORMULA:
        return is_small_formula(answer, FUNCTIONS)
    if name == "propositional_logic" and len(answer) > MAX_LOGIC:
        return False
    # The grader of complex numbers gives nan the highest score, even with spaces in it.
    return name != "complex_arithmetic" or "n" not in answer.lower()


def is_same_word(answer: str, right: str) -> bool:
    """True if both are the same, apart from upper and lower case."""
    return answer.strip().lower() == right.strip().lower()


def is_same_chance(answer: str, right: str) -> bool:
    """True if both are the same probability; the answer is a decimal number or a fraction, which is fast to evaluate."""
    text = answer.strip().replace(",", "")
    if not _CHANCE.fullmatch(text):
        return False
    try:
        value, expected = float(Fraction(text)), float(Fraction(right))
        return abs(value - expected) <= min(CHANCE_TOLERANCE, 0.01 * expected)
    except (ZeroDivisionError, ValueError):
        return False


JUDGED_HERE: Mapping[str, Callable[[str, str], bool]] = {
    "coin_flip": is_same_chance,
    "game_of_life_halting": is_same_word,
}
"""Datasets that are graded here, because their own graders give full marks to wrong answers: to "0" like the first digit of the
right one, or to any text.
"""


def agrees_at_a_point(answer: str, metadata: Mapping[str, Any]) -> bool:
    """True if the answer's derivative has the integrand's value at one point. Raises sympy's errors if it cannot tell."""
    sympy = importlib.import_module("sympy")  # part of reasoning-gym; takes half a second
    variable = sympy.Symbol(metadata["variable"])
    letters = {variable.name: variable, "C": sympy.Symbol("C")}
    slope = sympy.diff(sympy.parse_expr(answer, letters), variable)
    integrand, derivative = (
        complex(expression.evalf(15, subs=dict.fromkeys(expression.free_symbols, POINT)))
        for expression in (sympy.parse_expr(metadata["integrand"], letters), slope)
    )
    return cmath.isfinite(derivative) and abs(integrand - derivative) <= RELATIVE_TOLERANCE * max(
        abs(integrand), abs(derivative)
    )


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True
