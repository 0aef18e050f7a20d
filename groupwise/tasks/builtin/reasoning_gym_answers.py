"""Decides which answers the graders of reasoning-gym may see: some evaluate what a model wrote, as Python or through sympy.

Such a grader gets an answer only if it is plain data, or a formula that comes to no large numbers; one that simplifies formulas gets
those that agree with the problem at one point, because there is no telling how long it takes to find out that others do not.
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
"""Datasets whose graders evaluate the answer as Python, in the hope of a list."""
READ_AS_NUMBER = frozenset({"countdown", "puzzle24"})
"""Datasets whose graders evaluate the answer as arithmetic, through sympy and so as Python too."""
SIMPLIFIED = frozenset({"intermediate_integration", "simple_integration"})
"""Datasets whose graders read it as a formula, likewise, and simplify it, which may take for ever unless it is right."""
READ_AS_FORMULA = SIMPLIFIED | {"polynomial_multiplication"}
"""All whose graders read it as a formula."""
_CHANCE = re.compile(r"(\d{1,20}(\.\d{1,20})?|\.\d{1,20})([eE][-+]?\d\d?)?(/\d{1,20})?")
CHANCE_TOLERANCE = 1e-4
"""Largest difference of equal probabilities, as in the package; at most a hundredth of the right one, so that 0 never matches it."""
RELATIVE_TOLERANCE = 1e-3
"""Largest relative difference of two values that are one number, rounded."""
POINT = 1.37
"""Point at which a formula is compared before it is simplified: no special place of any function."""
MOST_LOGIC = 300
"""Characters of a formula of logic, which its grader parses in quadratic time; right ones have some dozens."""
FUNCTIONS = frozenset(
    "sin cos tan sec csc cot sinh cosh tanh asin acos atan asinh acosh atanh exp log ln sqrt".split()
)
"""Functions that a formula may call. Not Abs: sympy takes powers in it apart, which may never end."""


def is_harmless(answer: str, name: str) -> bool:
    """True if the dataset's grader, should it evaluate the answer as Python, finds nothing but data or a small formula in it."""
    if name in READ_AS_DATA:
        return re.fullmatch(r"[\w\s.,-]*", answer) is not None or _is_literal(answer)
    if name in READ_AS_NUMBER:
        return is_small_formula(answer, (), letters=False)
    if name in READ_AS_FORMULA:
        return is_small_formula(answer, FUNCTIONS)
    if name == "propositional_logic" and len(answer) > MOST_LOGIC:
        return False
    # To the grader of complex numbers nan, even with spaces in it, is as near to the answer as can be.
    return name != "complex_arithmetic" or "n" not in answer.lower()


def is_same_word(answer: str, right: str) -> bool:
    """True if both are the same, apart from upper and lower case."""
    return answer.strip().lower() == right.strip().lower()


def is_same_chance(answer: str, right: str) -> bool:
    """True if both are the same probability; the answer is a decimal number or a fraction, which takes no time to work out."""
    given = answer.strip().replace(",", "")
    if not _CHANCE.fullmatch(given):
        return False
    try:
        one, other = float(Fraction(given)), float(Fraction(right))
        return abs(one - other) <= min(CHANCE_TOLERANCE, 0.01 * other)
    except (ZeroDivisionError, ValueError):
        return False


JUDGED_HERE: Mapping[str, Callable[[str, str], bool]] = {
    "coin_flip": is_same_chance,
    "game_of_life_halting": is_same_word,
}
"""Datasets whose graders give the most for wrong answers: for "0" as for the first digit of the right one, and for any text."""


def agrees_at_a_point(answer: str, metadata: Mapping[str, Any]) -> bool:
    """True if the answer's derivative has the integrand's value at one point. Raises sympy's errors if it cannot tell."""
    sympy = importlib.import_module("sympy")  # comes with reasoning-gym, and takes half a second
    variable = sympy.Symbol(metadata["variable"])
    letters = {variable.name: variable, "C": sympy.Symbol("C")}
    slope = sympy.diff(sympy.parse_expr(answer, letters), variable)
    one, other = (
        complex(each.evalf(15, subs=dict.fromkeys(each.free_symbols, POINT)))
        for each in (sympy.parse_expr(metadata["integrand"], letters), slope)
    )
    return cmath.isfinite(other) and abs(one - other) <= RELATIVE_TOLERANCE * max(
        abs(one), abs(other)
    )


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True
