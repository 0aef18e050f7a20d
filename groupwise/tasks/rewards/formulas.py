"""Decides from a formula's text if it can be evaluated quickly.

Graders that pass answers to sympy evaluate them, and `9**9**9` would fill the memory. So a formula is parsed as Python, and an
upper bound is computed for the value of each part, from the innermost to the outermost. Nothing is evaluated. Letters represent
small numbers, such as those that a grader may try.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection
from dataclasses import dataclass

MAX_CHARACTERS = 20_000
"""Longest formula in characters: a product of polynomials with a hundred terms has some thousands."""

MAX_BITS = 4096.0
"""Most bits of a numerator or a denominator; an exponent may be as large as this itself."""

LETTER = 1.0
"""Bits of a letter, which represents a number below 2."""

_LONG_EXPONENT = re.compile(r"[eE][+-]?[\d_]{4}")
"""A long exponent of a decimal number. Python reads such a number as 0.0 if it is small enough, but sympy as a fraction."""

GROWING = frozenset({"exp", "sinh", "cosh", "tanh"})
"""Functions that turn small numbers into large ones."""


@dataclass(frozen=True, slots=True)
class Bits:
    """Upper bound, in bits, of the value of a part."""

    numerator: float = 0.0
    denominator: float = 0.0

    @property
    def more(self) -> float:
        """The larger of the two."""
        return max(self.numerator, self.denominator)


class _TooLarge(Exception):
    """A part exceeds the bounds, or is not allowed in a formula."""


def is_small_formula(text: str, functions: Collection[str], *, letters: bool = True) -> bool:
    """True for a formula of numbers, names, `+ - * / **` and calls of these functions, without large values.

    Without `letters`, names are not allowed.
    """
    if len(text) > MAX_CHARACTERS or _LONG_EXPONENT.search(text):
        return False
    try:
        formula = ast.parse(text.strip(), mode="eval").body
        if not letters and any(isinstance(part, ast.Name) for part in ast.walk(formula)):
            return False
        _bound_of(formula, functions)
    except (SyntaxError, ValueError, MemoryError, RecursionError, _TooLarge):
        return False  # Python parses only valid text that is not nested too deeply
    return True


def _bound_of(part: ast.expr, functions: Collection[str]) -> Bits:
    """The bound of a part. Raises _TooLarge as soon as a part exceeds the bounds, so no bound is computed from a huge number."""
    match part:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            bits = math.log2(abs(value)) if value else 0.0
            bits = Bits(max(bits, 0.0), max(-bits, 0.0))
        case ast.Name():
            bits = Bits(LETTER)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            bits = _bound_of(operand, functions)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            inverted = not isinstance(right, ast.Constant)  # a sign before it, or in it
            base = _bound_of(left, functions)
            exponent = _bound_of(right, functions)
            times = _largest(exponent)
            bits = (
                Bits(base.more * times, base.more * times)
                if inverted
                else Bits(base.numerator * times, base.denominator * times)
            )
        case ast.BinOp(left=left, op=op, right=right):
            bits = _combine_bits(_bound_of(left, functions), op, _bound_of(right, functions))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions:
            inner = _bound_of(argument, functions)
            growth = _largest(inner) * math.log2(math.e) if name in GROWING else inner.more
            bits = Bits(growth + 1, growth + 1)
        case _:
            raise _TooLarge
    if bits.more > MAX_BITS:
        raise _TooLarge
    return bits


def _combine_bits(left: Bits, op: ast.operator, right: Bits) -> Bits:
    match op:
        case ast.Add() | ast.Sub():
            crosswise = left.numerator + right.denominator, right.numerator + left.denominator
            return Bits(max(crosswise) + 1, left.denominator + right.denominator)
        case ast.Mult():
            return Bits(left.numerator + right.numerator, left.denominator + right.denominator)
        case ast.Div():
            return Bits(left.numerator + right.denominator, left.denominator + right.numerator)
        case _:
            raise _TooLarge


def _largest(bits: Bits) -> float:
    """The largest number with this many bits, for use as an exponent. Raises _TooLarge if it is more than MAX_BITS."""
    if bits.numerator > math.log2(MAX_BITS):
        raise _TooLarge
    return 2.0**bits.numerator
