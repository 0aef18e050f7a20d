"""How large a formula may get before somebody works it out, told from how it is written.

Graders that give answers to sympy evaluate them: `9**9**9` then fills the memory, and to multiply `(x + 1)**9999` out takes hours. So a
formula is read as Python reads it, and an upper bound is computed for each of its parts: for the bits of its numbers, for its degree,
and for the terms that it has when it is multiplied out. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection
from dataclasses import dataclass

MOST_BITS = 4096
"""Of a numerator or denominator."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a formula may have at the most."""

    characters: int
    degree: int
    terms: int

    def hold(self, size: Size) -> bool:
        """Whether a formula of this size keeps to them."""
        bits = max(size.numerator, size.denominator)
        return bits <= MOST_BITS and size.degree <= self.degree and size.terms <= self.terms


@dataclass(frozen=True, slots=True)
class Size:
    """Upper bounds for a formula."""

    numerator: float = 0.0
    """Bits of the numerator of any number in it, or of its value."""
    denominator: float = 0.0
    degree: float = 0.0
    """In its letters and functions."""
    terms: int = 1
    """Multiplied out."""


class TooLarge(Exception):
    """A formula is beyond the bounds, or is none."""


def is_small_formula(text: str, functions: Collection[str], bounds: Bounds) -> bool:
    """Whether it is a formula of numbers, names, `+ - * / **` and calls of these functions, and keeps to the bounds."""
    if len(text) > bounds.characters:
        return False
    try:
        _size(ast.parse(text.strip(), mode="eval").body, functions, bounds)
    except (SyntaxError, ValueError, MemoryError, RecursionError, TooLarge):
        return False
    return True


def _size(node: ast.expr, functions: Collection[str], bounds: Bounds) -> Size:
    """Raises TooLarge as soon as a part is beyond the bounds, so that no bound has to be computed from another that is huge."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            size = _of_number(value)
        case ast.Name():
            size = Size(degree=1)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            size = _size(operand, functions, bounds)
        case ast.BinOp(left=left, op=op, right=right):
            size = _joined(op, _size(left, functions, bounds), _size(right, functions, bounds))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions:
            size = _of_call(name, _size(argument, functions, bounds))
        case _:
            raise TooLarge
    if not bounds.hold(size):
        raise TooLarge
    return size


def _of_number(value: float) -> Size:
    bits = math.log2(abs(value)) if value else 0.0
    return Size(max(bits, 0.0), max(-bits, 0.0))


def _joined(op: ast.operator, left: Size, right: Size) -> Size:
    match op:
        case ast.Add() | ast.Sub():
            apart = (left.numerator + right.denominator, right.numerator + left.denominator)
            return Size(
                max(apart) + 1,
                left.denominator + right.denominator,
                max(left.degree, right.degree),
                left.terms + right.terms,
            )
        case ast.Mult():
            return _product(left, right)
        case ast.Div():
            return _product(left, Size(right.denominator, right.numerator, right.degree, right.terms))
        case ast.Pow():
            return _power(left, right)
        case _:
            raise TooLarge


def _product(left: Size, right: Size) -> Size:
    return Size(
        left.numerator + right.numerator,
        left.denominator + right.denominator,
        left.degree + right.degree,
        left.terms * right.terms,
    )


def _power(base: Size, exponent: Size) -> Size:
    """The exponent counts as the largest number that it may be, in one with letters too: they may cancel."""
    times = _largest(exponent)
    bits = max(base.numerator, base.denominator) * times
    whole = math.ceil(times)
    return Size(
        bits,
        bits,
        max(base.degree * times, exponent.degree),
        math.comb(base.terms + whole - 1, whole) * exponent.terms,
    )


def _of_call(name: str, argument: Size) -> Size:
    """A function is a letter for the formula around it; exponential ones make large numbers of small ones."""
    bits = max(argument.numerator, argument.denominator) + 1
    if name in ("exp", "sinh", "cosh", "tanh"):
        bits = math.log2(math.e) * _largest(argument) + 1
    return Size(bits, bits, max(argument.degree, 1), argument.terms)


def _largest(size: Size) -> float:
    """The largest number that a formula of this size may be. Raises TooLarge where nothing of that size could be worked out."""
    if size.numerator > math.log2(MOST_BITS):
        raise TooLarge
    return 2.0**size.numerator
