"""Decides if two mathematical expressions are equal.

They are equal if they have the same value at several points; at each point, every letter has a number derived from its name. Values
of rational expressions are exact; others are computed to 200 and to 400 digits, and a difference counts as zero if it shrinks with
the precision (see `_vanishes`). So `2^{-99}` and `2^{-98}`, or 5 and 5 + e^{-200}, are distinguished. Numbers are bounded before
they are computed (`_MAX_BITS`, `_MAX_EXPONENT`), because a tower of powers would fill the memory; an expression beyond the bounds
equals nothing.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, cast

import mpmath as untyped  # pyright: ignore[reportMissingTypeStubs]

from groupwise.tasks.rewards.math_parser import Node, number_node

mpmath: Any = cast("Any", untyped)

ROUNDING_RELATIVE = Fraction(1, 1_000_000)
"""Relative rounding error allowed between a decimal and the exact value that it represents: six digits."""
ROUNDING_ABSOLUTE = Fraction(1, 100)
"""Largest absolute rounding error allowed, for any size of number."""

_MAX_BITS = 40_000
"""Largest exact numerator or denominator that is computed, in bits."""

_MAX_EXPONENT = 1_000_000
"""Largest exponent (base e) that is computed."""
_MAX_FACTORIAL_EXACT, _MAX_FACTORIAL = 3_000, 10_000
"""The largest arguments of a factorial or binomial, computed exactly and by the gamma function."""

DIGITS, _MORE_DIGITS = 200, 400
POINTS = 3

Value: TypeAlias = Any
"""A Fraction if exact, else a number of mpmath."""


class Undecided(ArithmeticError):
    """No value can be computed: it is beyond the bounds or undefined."""


# Values


class Point:
    """A value for each letter, and the precision in digits."""

    def __init__(self, number: int, digits: int, log_base: str) -> None:
        self.number = number
        self.context = mpmath.mp.clone()
        self.context.dps = digits
        self.log_base = log_base

    def of(self, name: str) -> Fraction:
        """The value of a letter: the same for the same name, positive at the last point."""
        digest = hashlib.sha256(f"{self.number}:{name}".encode()).digest()
        size = Fraction(
            int.from_bytes(digest[:2], "big") % 997 + 101,
            int.from_bytes(digest[2:4], "big") % 499 + 211,
        )
        return -size if digest[4] & 1 and self.number < POINTS - 1 else size


def value_at(node: Node, point: Point) -> Value:
    """The value of an expression. Raises Undecided."""
    try:
        return _evaluate(node, point)
    except (
        ZeroDivisionError,
        OverflowError,
        ValueError,
        TypeError,
        mpmath.libmp.ComplexResult,
    ) as error:
        raise Undecided(str(error)) from None


def _evaluate(node: Node, point: Point) -> Value:
    evaluate = _EVALUATORS.get(node.kind)
    if evaluate is None:
        raise Undecided(f"a {node.kind} has no value")
    return evaluate(node, point)


def _evaluate_sum(node: Node, point: Point) -> Value:
    total: Value = Fraction(0)
    for part in node.parts:
        total = _require_bounded(_apply_exactly(operator.add, total, _evaluate(part, point), point))
    return total


def _evaluate_product(node: Node, point: Point) -> Value:
    product: Value = Fraction(1)
    for part in node.parts:
        product = _require_bounded(
            _apply_exactly(operator.mul, product, _evaluate(part, point), point)
        )
    return product


def _evaluate_quotient(node: Node, point: Point) -> Value:
    over, under = (_evaluate(part, point) for part in node.parts)
    if under == 0:
        raise Undecided("a division by zero")
    return _require_bounded(divide(over, under, point))


def _evaluate_constant(node: Node, point: Point) -> Value:
    context = point.context
    values = {"π": context.pi, "e": context.e, "i": context.mpc(0, 1)}
    if node.name not in values:
        raise Undecided(node.name)
    return +values[node.name]


def _to_real(value: Value, point: Point) -> Value:
    if isinstance(value, Fraction):
        return point.context.mpf(value.numerator) / value.denominator
    return value


def _apply_exactly(
    operation: Callable[[Any, Any], Any], one: Value, other: Value, point: Point
) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return operation(one, other)
    return operation(_to_real(one, point), _to_real(other, point))


def _require_bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise Undecided("too large a number")
    elif not mpmath.isfinite(value):
        raise Undecided("no finite number")
    return value


def _raise_power(base: Value, exponent: Value, point: Point) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(base) != 1 and base != 0 and bits * abs(exponent) > _MAX_BITS:
                raise Undecided("too large a power")
            if base == 0 and exponent <= 0:
                raise Undecided("zero to such a power")
            return base ** (int(exponent) % 2 if abs(base) == 1 else int(exponent))
        if base == 0:
            return Fraction(0)
    low, high = _to_real(base, point), _to_real(exponent, point)
    if low == 0:
        return Fraction(0)
    if abs(high) * (abs(point.context.log(abs(low))) + 4) > _MAX_EXPONENT:
        raise Undecided("too large a power")
    return point.context.power(low, high)


def _evaluate_call(node: Node, point: Point) -> Value:
    if node.name == "determinant":
        matrix = node.parts[0]
        rows = [[_evaluate(part, point) for part in row.parts] for row in matrix.parts]
        if any(len(row) != len(rows) for row in rows) or len(rows) > 6:
            raise Undecided("the determinant of no square")

        def expand(part: Sequence[Sequence[Value]]) -> Value:
            if len(part) == 1:
                return part[0][0]
            total: Value = Fraction(0)
            for column, factor in enumerate(part[0]):
                minor = [[*row[:column], *row[column + 1 :]] for row in part[1:]]
                term = _apply_exactly(operator.mul, factor, expand(minor), point)
                total = _apply_exactly(
                    operator.sub if column % 2 else operator.add, total, term, point
                )
            return total

        return expand(rows)
    return _call_with_numbers(node.name, [_evaluate(part, point) for part in node.parts], point)


def _call_with_numbers(name: str, values: list[Value], point: Point) -> Value:
    context = point.context
    exact = all(isinstance(value, Fraction) for value in values)
    match name, values:
        case "abs", [of]:
            return abs(of)
        case (("floor" | "ceil"), [Fraction() as of]):
            return Fraction(math.floor(of) if name == "floor" else math.ceil(of))
        case "factorial", [Fraction() as of] if (
            of.denominator == 1 and 0 <= of <= _MAX_FACTORIAL_EXACT
        ):
            return Fraction(math.factorial(int(of)))
        case "binom", [Fraction() as n, Fraction() as k] if (
            k.denominator == n.denominator == 1 and 0 <= k <= n <= _MAX_FACTORIAL_EXACT
        ):
            return Fraction(math.comb(int(n), int(k)))
        case ("factorial", [of]) if abs(of) <= _MAX_FACTORIAL:
            return context.factorial(_to_real(of, point))
        case ("binom", [n, k]) if max(abs(n), abs(k)) <= _MAX_FACTORIAL:
            return context.binomial(_to_real(n, point), _to_real(k, point))
        case (("max" | "min"), [_, *_]) if exact:
            return max(values) if name == "max" else min(values)
        case (("gcd" | "lcm"), [_, *_]) if exact and all(
            value.denominator == 1 for value in values
        ):
            return Fraction((math.gcd if name == "gcd" else math.lcm)(*map(int, values)))
        case "root", [of, degree]:
            return _take_root(of, degree, point)
        case _:
            return _call_transcendental(
                name, [_to_real(value, point) for value in values], context, point
            )


def _take_root(of: Value, degree: Value, point: Point) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 1_000:
        return _raise_power(of, 1 / degree, point)
    if isinstance(of, Fraction):
        over, under = (_whole_root(part, int(degree)) for part in (of.numerator, of.denominator))
        if over is not None and under is not None:
            return Fraction(over, under)
        if of < 0 and degree % 2:
            return -point.context.root(_to_real(-of, point), int(degree))
    return point.context.root(_to_real(of, point), int(degree))


def _whole_root(number: int, degree: int) -> int | None:
    """The root of an integer, if it is an integer too; else None."""
    if number < 0:
        root = _whole_root(-number, degree) if degree % 2 else None
        return None if root is None else -root
    root = (
        int(mpmath.nint(mpmath.root(number, degree)))
        if number.bit_length() < 150
        else math.isqrt(number)
        if degree == 2
        else 0
    )
    return root if root**degree == number else None


def _call_transcendental(name: str, values: list[Value], context: Any, point: Point) -> Value:
    if len(values) == 2 and name == "log_":
        return _logarithm(values[0], context) / _logarithm(values[1], context)
    if len(values) != 1:
        raise Undecided(f"{name} of {len(values)}")
    (argument,) = values
    if name == "degrees":
        return argument * context.pi / 180
    if name in ("ln", "log", "lg"):
        logarithm = _logarithm(argument, context)
        return (
            logarithm / context.log(10)
            if name == "lg" or (name == "log" and point.log_base == "10")
            else logarithm
        )
    if name in ("exp", "sinh", "cosh", "tanh") and abs(argument) > _MAX_EXPONENT:
        raise Undecided("too large a power")
    if name in ("sin", "cos", "tan", "cot", "sec", "csc") and abs(argument) > 10**30:
        raise Undecided("too large an angle")
    functions: dict[str, Callable[[Any], Any]] = {
        "exp": context.exp, "sin": context.sin, "cos": context.cos, "tan": context.tan, "cot": context.cot, "sec": context.sec,
        "csc": context.csc, "arcsin": context.asin, "arccos": context.acos, "arctan": context.atan, "sinh": context.sinh,
        "cosh": context.cosh, "tanh": context.tanh,
    }  # fmt: skip
    if name not in functions:
        raise Undecided(name)
    return functions[name](argument)


def _logarithm(of: Value, context: Any) -> Value:
    if of == 0:
        raise Undecided("the logarithm of zero")
    return context.log(of)


def _named_function_value(node: Node, point: Point) -> Value:
    """The value of a function that is only named, such as f: a polynomial derived from its name."""
    total: Value = point.of(f"{node.name}(0)")
    for index, part in enumerate(node.parts):
        argument = _evaluate(part, point)
        for power in (1, 2, 3):
            factor = point.of(f"{node.name}({index},{power})")
            term = _apply_exactly(
                operator.mul, factor, _raise_power(argument, Fraction(power), point), point
            )
            total = _require_bounded(_apply_exactly(operator.add, total, term, point))
    return total


_EVALUATORS: dict[str, Callable[[Node, Point], Value]] = {
    "number": lambda node, point: node.value,
    "name": lambda node, point: point.of(node.name),
    "constant": _evaluate_constant,
    "+": _evaluate_sum,
    "*": _evaluate_product,
    "/": _evaluate_quotient,
    "^": lambda node, point: _require_bounded(
        _raise_power(_evaluate(node.parts[0], point), _evaluate(node.parts[1], point), point)
    ),
    "call": lambda node, point: _require_bounded(_evaluate_call(node, point)),
    "applied": _named_function_value,
}
SCALARS = frozenset({*_EVALUATORS, "±", "group"})
"""Kinds of nodes that are a single number."""


# Equal expressions

_BASES = ("e", "10")


def expressions_equal(one: Node, other: Node, rounded: bool = False) -> bool:
    """True if two expressions have the same value at all points; `rounded`: one may be the other rounded to six digits."""
    if one == other:
        return True
    bases = _BASES if _has_log(one) or _has_log(other) else _BASES[:1]
    return any(_equal_at_points(one, other, rounded, base) for base in bases)


def _has_log(node: Node) -> bool:
    return (node.kind == "call" and node.name == "log") or any(map(_has_log, node.parts))


def names_in(node: Node) -> set[str]:
    """The letters of an expression."""
    names: set[str] = {node.name} if node.kind in ("name", "applied") else set()
    return names.union(*map(names_in, node.parts))


def numeric_value(node: Node) -> Fraction | None:
    """The number that is written in digits: an integer, a decimal, or a fraction of these, also with a power of ten; None otherwise."""
    match node.kind, node.parts:
        case "number", ():
            return node.value
        case (("percent" | "quantity"), (of,)):
            return numeric_value(of)
        case "relation", (Node(kind="name" | "applied"), of) if node.name == "=":
            return numeric_value(of)
        case "*", (sign, of) if sign == number_node(-1):
            number = numeric_value(of)
            return None if number is None else -number
        case "*", (of, Node(kind="^", parts=(ten, exponent))) if ten == number_node(10):
            number, power = numeric_value(of), numeric_value(exponent)
            small = power is not None and power.denominator == 1 and abs(power) < 1_000
            return (
                number * Fraction(10) ** int(power)
                if number is not None and power is not None and small
                else None
            )
        case "/", (over, under):
            top, bottom = numeric_value(over), numeric_value(under)
            return top / bottom if top is not None and bottom else None
        # A mixed number.
        case "+", (Node(kind="number") as whole, Node(kind="/") as part) if (
            whole.value.denominator == 1
        ):
            number = numeric_value(part)
            return None if number is None else whole.value + number
        case _:
            return None


def _equal_at_points(one: Node, other: Node, rounded: bool, base: str) -> bool:
    """True if the values agree at every point; one point suffices without letters. Undecided counts as different."""
    points = range(POINTS) if names_in(one) | names_in(other) else range(1)
    try:
        return all(_equal_at(one, other, rounded, number, base) for number in points)
    except Undecided:
        return False


def _equal_at(one: Node, other: Node, rounded: bool, number: int, base: str) -> bool:
    """Compares at one point. Inexact values are equal if their difference is only rounding error: it vanishes with twice the
    digits, while the difference of distinct numbers remains.
    """
    points = [Point(number, digits, base) for digits in (DIGITS, _MORE_DIGITS)]
    left, right = value_at(one, points[0]), value_at(other, points[0])
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right or (rounded and _within_rounding(left, right))
    coarse, size = _distance(left, right, points[0])
    if rounded and coarse <= min(size * float(ROUNDING_RELATIVE), float(ROUNDING_ABSOLUTE)):
        return True
    beside_zero = left == 0 or right == 0
    if coarse > (1 if beside_zero else size) * points[0].context.mpf(10) ** -9:
        return False
    fine, _ = _distance(value_at(one, points[1]), value_at(other, points[1]), points[1])
    return _vanishes(coarse, fine, size, points[1].context)


def _distance(left: Value, right: Value, point: Point) -> tuple[Value, Value]:
    """The distance of two values, and the size of the larger one."""
    left, right = _to_real(left, point), _to_real(right, point)
    return abs(left - right), max(abs(left), abs(right))


def divide(over: Value, under: Value, point: Point) -> Value:
    """A quotient, exact if both are."""
    return _apply_exactly(lambda left, right: left / right, over, under, point)


def nearly_equal(one: Value, other: Value) -> bool:
    """True if two values are equal; inexact ones, to half of `DIGITS`."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    point = Point(0, DIGITS, "e")
    left, right = _to_real(one, point), _to_real(other, point)
    return bool(abs(left - right) <= abs(left) * point.context.mpf(10) ** -(DIGITS // 2))


def _within_rounding(one: Fraction, other: Fraction) -> bool:
    has_integer = one.denominator == 1 or other.denominator == 1
    return not has_integer and abs(one - other) <= min(
        ROUNDING_RELATIVE * max(abs(one), abs(other)), ROUNDING_ABSOLUTE
    )


def _vanishes(coarse: Any, fine: Any, size: Any, context: Any) -> bool:
    """True if a difference is only rounding error: it shrinks as digits are added."""
    if fine == 0:
        return True
    if coarse == 0:
        return bool(fine <= size * context.mpf(10) ** -(_MORE_DIGITS - 20))
    return bool(fine <= coarse * context.mpf(10) ** -100)
