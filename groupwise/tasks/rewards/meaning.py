"""Decides if two parsed answers mean the same.

Expressions are compared by their values (see `equality`); intervals, inequalities in one letter and sets as sets of numbers,
equations as multiples of each other, pairs component by component, and lists in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias, cast

import mpmath as untyped  # pyright: ignore[reportMissingTypeStubs]

from groupwise.tasks.rewards.equality import (
    DIGITS,
    POINTS,
    SCALARS,
    Point,
    Undecided,
    Value,
    divide,
    expressions_equal,
    names_in,
    nearly_equal,
    value_at,
)
from groupwise.tasks.rewards.math_parser import Node, number_node
from groupwise.tasks.rewards.units import units_compatible

mpmath: Any = cast("Any", untyped)

_MANY = 30
"""More intervals, members or conditions than this are not compared: a comparison must not take long."""

# Sets of numbers

_LOW, _HIGH = Node("*", (number_node(-1), Node("constant", name="∞"))), Node("constant", name="∞")


def _infinite(node: Node) -> int:
    """1 for ∞, -1 for -∞, 0 for anything else."""
    if node == _HIGH:
        return 1
    if (
        node.kind == "*"
        and len(node.parts) == 2
        and node.parts[1] == _HIGH
        and node.parts[0].kind == "number"
    ):
        return 1 if node.parts[0].value > 0 else -1
    if node.kind == "+" and len(node.parts) == 1:
        return _infinite(node.parts[0])
    return 0


@lru_cache(maxsize=1000)
def _sort_key(node: Node) -> Any:
    """Sort key of bounds. Raises Undecided for letters and complex numbers."""
    if sign := _infinite(node):
        return mpmath.mpf("inf") * sign
    if names_in(node):
        raise Undecided("a bound with letters")
    value = value_at(node, Point(0, 60, "e"))
    value = (
        mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value
    )
    if isinstance(value, mpmath.mpc) or (hasattr(value, "imag") and value.imag != 0):
        raise Undecided("a complex bound")
    return mpmath.mpf(value.real if hasattr(value, "real") else value)


Interval: TypeAlias = tuple[Node, bool, Node, bool]
"""An interval: lower bound, whether it is included, upper bound, whether it is included."""


def intervals_of(node: Node) -> list[Interval] | None:
    """The intervals of a set of numbers, disjoint and sorted; None if it is not such a set. Raises Undecided."""
    match node.kind:
        case "interval":
            return _make_interval(node, node.name)
        case "tuple" if len(node.parts) == 2 and all(_is_scalar(part) for part in node.parts):
            return _make_interval(node, "()")
        case "set" if all(_is_scalar(part) for part in node.parts):
            return _union([(part, True, part, True) for part in node.parts])
        case "constant" if node.name == "∅":
            return []
        case "name" if node.name.translate({123: None, 125: None}) == r"\mathbbR":
            return [(_LOW, False, _HIGH, False)]
        case "∪" | "∩" | "∖":
            left, right = map(intervals_of, node.parts)
            if left is None or right is None:
                return None
            if node.kind == "∪":
                return _union(left + right)
            return _intersection(left, right if node.kind == "∩" else _complement(right))
        case _:
            return None


def _make_interval(node: Node, ends: str) -> list[Interval]:
    low, high = node.parts
    if _sort_key(low) > _sort_key(high) or (ends == "()" and _sort_key(low) == _sort_key(high)):
        raise Undecided("an interval from more to less, which may be a pair")
    return _union([(low, ends[0] == "[", high, ends[1] == "]")])


def _is_scalar(node: Node) -> bool:
    return node.kind in SCALARS


def _union(parts: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    nonempty = [
        part
        for part in parts
        if _sort_key(part[0]) < _sort_key(part[2])
        or (part[1] and part[3] and _sort_key(part[0]) == _sort_key(part[2]))
    ]
    if len(nonempty) > _MANY:
        raise Undecided("many intervals")
    for part in sorted(nonempty, key=lambda part: (_sort_key(part[0]), not part[1])):
        if merged and _touch(merged[-1], part):
            previous = merged[-1]
            farther = max(
                (previous, part), key=lambda interval: (_sort_key(interval[2]), interval[3])
            )
            merged[-1] = (previous[0], previous[1], farther[2], farther[3])
        else:
            merged.append(part)
    return merged


def _touch(left: Interval, right: Interval) -> bool:
    end, start = _sort_key(left[2]), _sort_key(right[0])
    return bool(start < end or (start == end and (left[3] or right[1])))


def _complement(parts: Sequence[Interval]) -> list[Interval]:
    gaps: list[Interval] = []
    start, closed = _LOW, False
    for low, low_closed, high, high_closed in parts:
        gaps.append((start, closed, low, not low_closed))
        start, closed = high, not high_closed
    gaps.append((start, closed, _HIGH, False))
    return _union(gaps)


def _intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    overlaps: list[Interval] = []
    for one in left:
        for other in right:
            low = max((one[:2], other[:2]), key=lambda end: (_sort_key(end[0]), not end[1]))
            high = min((one[2:], other[2:]), key=lambda end: (_sort_key(end[0]), end[1]))
            overlaps.append((*low, *high))
    return _union(overlaps)


def _solve_inequality(node: Node) -> tuple[str, list[Interval]] | None:
    """The letter that an inequality (or a chain of them) bounds, and its intervals; None if it bounds none or several."""
    if node.kind != "relation" or not set(node.name) <= set("<>≤≥≠"):
        return None
    if len(node.name) == 1 and (solution := _without_bars(node)) is not None:
        return solution
    name_indices = [index for index, part in enumerate(node.parts) if part.kind == "name"]
    bounds = [part for part in node.parts if part.kind != "name"]
    if len(name_indices) != 1 or any(names_in(part) for part in bounds):
        return None
    name = node.parts[name_indices[0]].name
    if len(node.name) > 1 and (
        len(node.name) != 2 or len({sign in "<≤" for sign in node.name}) != 1
    ):
        return None
    regions: list[list[Interval]] = []
    for index, sign in enumerate(node.name):
        left, right = node.parts[index], node.parts[index + 1]
        if left.kind != "name" and right.kind != "name":
            return None
        if left.kind != "name":
            left, right, sign = (
                right,
                left,
                _flip_relation(sign),
            )
        regions.append(
            {
                "<": [(_LOW, False, right, False)],
                "≤": [(_LOW, False, right, True)],
                ">": [(right, False, _HIGH, False)],
                "≥": [(right, True, _HIGH, False)],
                "≠": [(_LOW, False, right, False), (right, False, _HIGH, False)],
            }[sign]
        )
    region = _union(regions[0])
    for other in regions[1:]:
        region = _intersection(region, _union(other))
    return name, region


def _without_bars(node: Node) -> tuple[str, list[Interval]] | None:
    """`|x| < 3` and `|x| > 3`: the letter and its values; None for other inequalities."""
    left, right = node.parts
    sign = node.name
    if right.kind == "call":
        left, right, sign = right, left, _flip_relation(sign)
    if left.name != "abs" or left.parts[0].kind != "name" or names_in(right) or sign == "≠":
        return None
    lower, ends = Node("*", (number_node(-1), right)), sign in "≤>"
    inside = _union([(lower, ends, right, ends)])
    return left.parts[0].name, inside if sign in "<≤" else _complement(inside)


def _same_intervals(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    return len(one) == len(other) and all(
        left[1] == right[1]
        and left[3] == right[3]
        and _same_bound(left[0], right[0])
        and _same_bound(left[2], right[2])
        for left, right in zip(one, other, strict=True)
    )


def _same_bound(one: Node, other: Node) -> bool:
    if _infinite(one) or _infinite(other):
        return _infinite(one) == _infinite(other)
    return expressions_equal(one, other)


# The meaning of an answer

_ORDERED = ("x", "y", "z", "w")
"""The order of these letters in a pair or triple; other letters are in alphabetical order."""


def trees_match(gold: Node, answer: Node) -> bool:
    """True if an answer means the same as the gold one. A name on the left, `x =`, may be missing on one side."""
    try:
        expected, given = _normalise(gold), _normalise(answer)
        values = _named_value(expected), _named_value(given)
        if values[0] and not values[1] and given.kind != "relation":
            expected = _normalise(values[0][1])
        elif values[1] and not values[0] and expected.kind != "relation":
            given = _normalise(values[1][1])
        return _apply_rules(expected, given)
    except Undecided:
        return False


def _apply_rules(gold: Node, answer: Node) -> bool:
    """Applies the first of `_RULES` that handles this kind of answer. Raises Undecided."""
    verdicts = (rule(gold, answer) for rule in _RULES)
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _normalise(node: Node) -> Node:
    """The tree to compare: without brackets that only group, chains as their single value, and `±` as the list of both values.
    Raises Undecided for a chain of different values.
    """
    if node.kind == "group":
        return _normalise(node.parts[0])
    numbers = all(map(_is_scalar, node.parts)) and not names_in(node)
    if node.kind == "relation" and set(node.name) == {"="} and (numbers or len(node.parts) > 2):
        # `x = 2 + 3 = 5`: a name and one value, written several times. Raises Undecided if the values differ.
        first, *rest = node.parts
        is_name = first.kind in ("name", "applied")
        values = (
            [value for value in rest if value.kind != "name"] or rest if is_name else node.parts
        )
        if any(not expressions_equal(values[0], value) for value in values[1:]):
            raise Undecided("a chain of different values")
        return Node("relation", (first, values[-1]), name="=") if is_name else values[-1]
    if node.kind == "relation" and "≈" in node.name:
        return _approximate(node)
    if (pairs := _named_places(node)) is not None:
        return Node("list", tuple(_as_relations(pairs)), name="and")
    if node.kind == "set" or (node.kind == "list" and node.name in (",", "or", "and")):
        parts = [branch for part in node.parts for branch in _branches(_normalise(part))]
        if node.kind == "set":
            parts = list(dict.fromkeys(parts))
        return Node(node.kind, tuple(parts), name=node.name)
    if (
        (node.kind == "relation" and node.name == "=")
        or _is_scalar(node)
        or node.kind == "quantity"
    ):
        branches = _branches(node)
        return node if branches == [node] else Node("list", tuple(branches), name="or")
    return node


def _branches(node: Node) -> list[Node]:
    """Both values of an expression with `±`; other expressions unchanged. Raises Undecided for several independent `±`."""
    count = _count_kind(node, "±")
    if count == 0 or node.kind in ("list", "set"):
        return [node]
    if count > 3:
        raise Undecided("many signs")
    return [_resolve_plus_minus(node, sign) for sign in (1, -1)]


def _count_kind(node: Node, kind: str) -> int:
    return (node.kind == kind) + sum(_count_kind(part, kind) for part in node.parts)


def _resolve_plus_minus(node: Node, sign: int) -> Node:
    parts = tuple(_resolve_plus_minus(part, sign) for part in node.parts)
    if node.kind == "±":
        factor = sign if node.name == "pm" else -sign
        return parts[0] if factor > 0 else Node("*", (number_node(-1), *parts))
    return Node(node.kind, parts, node.name, node.value, node.decimal)


def _approximate(node: Node) -> Node:
    """The exact value of `1/3 ≈ 0.333` if the other is close to it."""
    if node.name == "=≈" and node.parts[0].kind == "name":
        return Node(
            "relation",
            (node.parts[0], _approximate(Node("relation", node.parts[1:], name="≈"))),
            name="=",
        )
    if node.name != "≈":
        raise Undecided("an approximation in a chain")
    exact, decimal = node.parts
    if exact.kind == "name":
        return Node("relation", (exact, decimal), name="=")
    left, right = _sort_key(exact), _sort_key(decimal)
    if abs(left - right) > abs(left) / 20:
        raise Undecided("an approximation that is none")
    return exact


def _named_value(node: Node) -> tuple[str, Node] | None:
    """The name and its value in `x = 3` and `f(x) = 2x`."""
    if node.kind != "relation" or node.name not in ("=", "∈"):
        return None
    left, right = node.parts
    for one, other in ((left, right), (right, left)):
        if one.kind == "name" and one.name not in names_in(other):
            return one.name, other
        if _is_measure(one) and not names_in(other):
            return "·".join(sorted(names_in(one))), other
        if one.kind == "applied" and all(part.kind in ("name", "number") for part in one.parts):
            return (
                f"{one.name}({','.join(part.name or str(part.value) for part in one.parts)})",
                other,
            )
        if node.name == "∈":
            break
    return None


def _named_places(node: Node) -> list[tuple[str, Node]] | None:
    """`(x, y) = (1, 2)` as a value for each name."""
    if node.kind != "relation" or node.name != "=" or len(node.parts) != 2:
        return None
    left, right = node.parts
    if left.kind != "tuple" or right.kind != "tuple" or len(left.parts) != len(right.parts):
        return None
    if any(part.kind != "name" for part in left.parts):
        return None
    return [(name.name, value) for name, value in zip(left.parts, right.parts, strict=True)]


def _is_measure(node: Node) -> bool:
    """True for `AB`, `|AB|` and `m∠A`: juxtaposed capital letters that name a length, an angle or an area."""
    if node.kind == "call" and node.name == "abs":
        return _is_measure(node.parts[0])
    if node.kind == "*":
        return all(part.name == "m" or _is_measure(part) for part in node.parts)
    return node.kind == "name" and node.name[0] in "∠ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# Rules: each handles some kinds of answers and returns None for others

Verdict: TypeAlias = bool | None


def _by_name(gold: Node, answer: Node) -> Verdict:
    gold_value, answer_value = _named_value(gold), _named_value(answer)
    if not gold_value or not answer_value:
        return None
    if gold_value[0] != answer_value[0]:
        return gold.name == answer.name == "=" and _same_equations(gold, answer)
    return _apply_rules(_normalise(gold_value[1]), _normalise(answer_value[1]))


def _by_relation(gold: Node, answer: Node) -> Verdict:
    related = any(node.kind == "relation" or _of_relations(node) for node in (gold, answer))
    return _same_relations(gold, answer) if related else None


def _by_unit(gold: Node, answer: Node) -> Verdict:
    if "quantity" not in (gold.kind, answer.kind):
        return None
    if "percent" in (gold.kind, answer.kind):
        return False
    units = [node.name if node.kind == "quantity" else "" for node in (gold, answer)]
    inner = [node.parts[0] if node.kind == "quantity" else node for node in (gold, answer)]
    return units_compatible(*units) and _apply_rules(*inner)


def _by_angle(gold: Node, answer: Node) -> Verdict:
    """Compares degrees with multiples of π, which are radians."""
    for degrees, radians in ((gold, answer), (answer, gold)):
        if degrees.kind == "quantity" and degrees.name == "°" and _has_pi(radians):
            if radians.kind == "quantity" or not _is_scalar(degrees.parts[0]):
                return None
            return _is_scalar(radians) and expressions_equal(
                Node("call", degrees.parts, name="degrees"), radians
            )
    return None


def _has_pi(node: Node) -> bool:
    return node == Node("constant", name="π") or any(map(_has_pi, node.parts))


def _by_percent(gold: Node, answer: Node) -> Verdict:
    """Compares `50 %` with a plain number: it may mean 50 or 0.5."""
    if "percent" not in (gold.kind, answer.kind):
        return None
    inner = [node.parts[0] if node.kind == "percent" else node for node in (gold, answer)]
    if not all(map(_is_scalar, inner)):
        return False
    alike = _same_value(*inner)
    if gold.kind == answer.kind:
        return alike
    if alike and not names_in(inner[0]) and abs(_sort_key(inner[0])) < 1:
        return False  # 0.5 is 50 %, and not 0.5 %
    return alike or _same_value(
        *(
            Node("/", (node.parts[0], number_node(100))) if node.kind == "percent" else node
            for node in (gold, answer)
        )
    )


def _by_value(gold: Node, answer: Node) -> Verdict:
    return _same_value(gold, answer) if _is_scalar(gold) and _is_scalar(answer) else None


def _same_value(gold: Node, answer: Node) -> bool:
    """True if the values are equal. A decimal also matches an exact value that rounds to it, unless there are letters."""
    if _infinite(gold) or _infinite(answer):
        return _infinite(gold) == _infinite(answer)
    rounded = _has_decimal(gold) != _has_decimal(answer) and not names_in(gold) | names_in(answer)
    return expressions_equal(gold, answer, rounded)


def _by_ratio(gold: Node, answer: Node) -> Verdict:
    """Compares `3:4` with the fraction 3/4."""
    one, other = (
        Node("/", node.parts) if node.kind == "ratio" and len(node.parts) == 2 else node
        for node in (gold, answer)
    )
    is_mixed = gold.kind != answer.kind and "ratio" in (gold.kind, answer.kind)
    return _by_value(one, other) if is_mixed else None


def _by_place(gold: Node, answer: Node) -> Verdict:
    kinds = {gold.kind, answer.kind}
    if kinds == {"ratio"}:
        # `3:4` and `6:8`, by cross products.
        return len(gold.parts) == len(answer.parts) and all(
            expressions_equal(Node("*", (one, answer.parts[0])), Node("*", (gold.parts[0], other)))
            for one, other in zip(gold.parts[1:], answer.parts[1:], strict=True)
        )
    if len(kinds) == 1 and kinds <= {"tuple", "matrix", "row"}:
        return _match_in_order(gold.parts, answer.parts)
    if (
        kinds == {"interval"}
        and gold.name == answer.name
        and _match_in_order(gold.parts, answer.parts)
    ):
        return True
    return False if "matrix" in kinds else None


def _by_base(gold: Node, answer: Node) -> Verdict:
    if "based" not in (gold.kind, answer.kind):
        return None
    return (
        gold.kind == answer.kind
        and gold.name.lstrip("0") == answer.name.lstrip("0")
        and gold.parts == answer.parts
    )


def _by_members(gold: Node, answer: Node) -> Verdict:
    kinds = {gold.kind, answer.kind}
    if "list" in kinds:
        if any(part.kind == "dots" for part in (*_items(gold), *_items(answer))):
            one, other = _items(gold), _items(answer)
            return len(one) == len(other) and all(
                left.kind == right.kind == "dots" or _apply_rules(left, right)
                for left, right in zip(one, other, strict=True)
            )
        if gold.kind not in ("list", "set") or answer.kind not in ("list", "set"):
            return False
        letters = any(part.kind == "name" for part in (*gold.parts, *answer.parts))
        if letters and {gold.name, answer.name} == {"or", "and"}:
            return False
        return _in_any_order(gold.parts, answer.parts)
    if "set" in kinds and (len(kinds) == 1 or _is_scalar(gold) or _is_scalar(answer)):
        return _in_any_order(_items(gold), _items(answer))
    return None


def _by_condition(gold: Node, answer: Node) -> Verdict:
    """Compares `{x | x > 2}` as the set of solutions of its condition."""
    if "such" not in (gold.kind, answer.kind):
        return None
    if gold.kind == answer.kind:
        return gold == answer
    one, other = (node.parts[1] if node.kind == "such" else node for node in (gold, answer))
    return _same_relations(_normalise(one), _normalise(other))


def _by_region(gold: Node, answer: Node) -> Verdict:
    left = intervals_of(gold)
    right = intervals_of(answer) if left is not None else None
    return left is not None and right is not None and _same_intervals(left, right)


_RULES = (
    _by_condition, _by_name, _by_relation, _by_angle, _by_unit, _by_percent, _by_value, _by_ratio, _by_place, _by_base, _by_members,
    _by_region,
)  # fmt: skip


def _items(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind in ("set", "list") else (node,)


def _match_in_order(golds: Sequence[Node], answers: Sequence[Node]) -> bool:
    return len(golds) == len(answers) and all(
        _apply_rules(_normalise(one), _normalise(other))
        for one, other in zip(golds, answers, strict=True)
    )


def _in_any_order(golds: Sequence[Node], answers: Sequence[Node]) -> bool:
    """True if each has an equal on the other side, each used once."""
    if len(golds) != len(answers) or len(golds) > _MANY:
        return False
    remaining = list(answers)
    for gold in golds:
        same_kind = ((gold.kind == "set") == (part.kind == "set") for part in remaining)
        index = next(
            (
                position
                for position, kind in enumerate(same_kind)
                if kind and _apply_rules(gold, remaining[position])
            ),
            None,
        )
        if index is None:
            return False
        del remaining[index]
    return True


def _has_decimal(node: Node) -> bool:
    return node.decimal or any(map(_has_decimal, node.parts))


# Relations


def _of_relations(node: Node) -> bool:
    return node.kind == "list" and any(part.kind == "relation" for part in node.parts)


def _same_relations(gold: Node, answer: Node) -> bool:
    gold_region = _region_of_relations(gold)
    answer_region = _region_of_relations(answer) if gold_region is not None else None
    if gold_region is not None and answer_region is not None:
        (one, left), (other, right) = gold_region, answer_region
        return (one == other or "" in (one, other)) and _same_intervals(left, right)
    if _of_relations(gold) or _of_relations(answer):
        return _same_systems(gold, answer)
    if gold.kind != "relation" or answer.kind != "relation":
        return False
    if gold.name == answer.name == "=":
        return _same_equations(gold, answer)
    # One inequality each, with letters on both sides or several letters; chains are compared part by part.
    if len(gold.name) != len(answer.name):
        return False
    if len(gold.name) > 1:
        flipped = Node(
            "relation", answer.parts[::-1], name="".join(map(_flip_relation, answer.name[::-1]))
        )
        return any(
            gold.name == candidate.name and _match_in_order(gold.parts, candidate.parts)
            for candidate in (answer, flipped)
        )
    if not all(_is_scalar(part) for node in (gold, answer) for part in node.parts):
        return gold.name == answer.name and _match_in_order(gold.parts, answer.parts)
    factor = _multiple(gold, answer)
    if factor is None or not isinstance(factor, Fraction):
        return False
    return answer.name == (gold.name if factor > 0 else _flip_relation(gold.name))


def _region_of_relations(node: Node) -> tuple[str, list[Interval]] | None:
    """The letter, if one is named, and its set of values."""
    if node.kind == "relation":
        if node.name == "∈" and node.parts[0].kind == "name":
            region = intervals_of(node.parts[1])
            return None if region is None else (node.parts[0].name, region)
        return _solve_inequality(node)
    if node.kind == "list" and node.parts and node.name in ("or", "and"):
        if len(node.parts) > _MANY:
            raise Undecided("many conditions")
        named_regions = [_region_of_relations(part) for part in node.parts]
        if any(part is None or part[0] != named_regions[0][0] for part in named_regions):  # type: ignore[index]
            return None
        regions = [part[1] for part in named_regions if part is not None]
        region = regions[0]
        for other in regions[1:]:
            region = _union(region + other) if node.name == "or" else _intersection(region, other)
        return named_regions[0][0], region  # type: ignore[index]
    region = intervals_of(node)
    return None if region is None else ("", region)


def _same_systems(gold: Node, answer: Node) -> bool:
    """Compares lists of equations: `x = 1, x = 2` with `1, 2`, and `x = 1, y = 2` with `(1, 2)`."""
    one, other = _assignments(gold), _assignments(answer)
    if one is None or other is None:
        return (
            gold.kind == answer.kind == "list"
            and (gold.name == "or") == (answer.name == "or")
            and _in_any_order(gold.parts, answer.parts)
        )
    gold_names, answer_names = [
        sorted({name for name, _ in assignments if name}) for assignments in (one, other)
    ]
    if len(gold_names) > 1 and (gold.name == "or") != (answer.name == "or"):
        return False
    if gold_names and answer_names:
        if gold_names != answer_names:
            return False
        return _in_any_order(_as_relations(one), _as_relations(other))
    names = gold_names or answer_names
    # `x = 1, x = 2` and `x_1 = 1, x_2 = 2`.
    if len({name.partition("_")[0] for name in names}) == 1:
        return _in_any_order([node for _, node in one], [node for _, node in other])
    pair = answer if gold_names else gold
    by_name = dict(one if gold_names else other)
    if pair.kind not in ("tuple", "list") or not len(by_name) == len(pair.parts) == len(names):
        return False
    in_order = _ORDERED[: len(names)] if set(names) == set(_ORDERED[: len(names)]) else names
    return _match_in_order([by_name[name] for name in in_order], pair.parts)


def _as_relations(pairs: Sequence[tuple[str, Node]]) -> list[Node]:
    return [Node("relation", (Node("name", name=name), node), name="=") for name, node in pairs]


def _assignments(node: Node) -> list[tuple[str, Node]] | None:
    """A name and a value for each part; an empty name for a bare value; None if a part is neither."""
    if node.kind != "list":
        return [("", node)]
    assignments: list[tuple[str, Node]] = []
    for part in node.parts:
        assignment = _named_value(part)
        if assignment is None and part.kind == "relation":
            return None
        assignments.append(assignment or ("", part))
    kinds = {bool(name) for name, _ in assignments}
    if kinds == {True, False}:  # `x = 1, 2`: the name is written once
        if assignments[0][0] and not any(name for name, _ in assignments[1:]):
            return [(assignments[0][0], value) for _, value in assignments]
        return None
    return assignments


def _side_difference(node: Node) -> Node:
    left, right = node.parts
    return Node("+", (left, Node("*", (number_node(-1), right))))


def _same_equations(gold: Node, answer: Node) -> bool:
    """True if one is a multiple of the other."""
    if not all(_is_scalar(part) for node in (gold, answer) for part in node.parts):
        return _match_in_order(gold.parts, answer.parts)
    return _multiple(gold, answer) is not None


def _multiple(gold: Node, answer: Node) -> Value | None:
    """The constant by which the gold equation must be multiplied to give the answer; None if there is none."""
    ratios: list[Value] = []
    for number in range(POINTS):
        one, other = (
            value_at(_side_difference(node), Point(number, DIGITS, "e")) for node in (gold, answer)
        )
        if one == 0 or other == 0:
            return None
        ratios.append(divide(other, one, Point(number, DIGITS, "e")))
    return ratios[0] if all(nearly_equal(ratios[0], ratio) for ratio in ratios[1:]) else None


def _flip_relation(sign: str) -> str:
    return {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}.get(sign, sign)
