"""Knobs: the fields of an algorithm. Each has its description and range next to its default.

The metadata of a field has `description`; `ge`, `gt` or `le` if it has a range; and `needs` if it has no effect unless another knob,
named there, is on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

ScaleRewards: TypeAlias = Literal["group", "batch", "none"]

SCALE_REWARDS = {
    "description": "group: divide centred rewards by their group's standard deviation, as "
    "published. batch: by that of all rewards of the step. none: centre only, so that the size of "
    "rewards matters."
}

TURN_DISCOUNT = {"ge": 0.0, "le": 1.0}
"""The range of a discount from one turn to the next."""

_DISABLED_VALUES: tuple[Any, ...] = (None, False, 0, "none")
"""Values at which a knob counts as off."""

_RANGES: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("greater than", operator.gt),
    "le": ("at most", operator.le),
}


@dataclass(frozen=True, slots=True)
class KnobConflict:
    """Values that are valid each by itself, but incompatible with each other."""

    message: str
    knobs: tuple[str, ...]
    """All knobs that are involved."""


class ConflictingKnobs(ValueError):
    """An algorithm was created with incompatible values; lists all conflicts."""

    def __init__(self, conflicts: tuple[KnobConflict, ...]) -> None:
        super().__init__(conflicts)
        self.conflicts = conflicts

    def __str__(self) -> str:
        return "\n".join(conflict.message for conflict in self.conflicts)


def metadata_of(kind: Any, name: str) -> Mapping[str, Any]:
    """The metadata of a knob, for an algorithm that redefines it with another default."""
    return next(knob.metadata for knob in fields(kind) if knob.name == name)


def disabled_by(knob: Field[Any], values: Mapping[str, Any]) -> str | None:
    """Name of the other knob that is off and so disables this one; None if this one has an effect."""
    other_knob = knob.metadata.get("needs")
    return other_knob if other_knob is not None and values[other_knob] in _DISABLED_VALUES else None


def check_knobs(algorithm: Any) -> None:
    """Raise ValueError with the knob's name for a value of the wrong type or out of range."""
    hints = get_type_hints(algorithm.__class__)
    for knob in fields(algorithm):
        value = getattr(algorithm, knob.name)
        expected = _expected_kind(value, hints[knob.name], knob.metadata)
        if expected is not None:
            raise ValueError(f"{algorithm.name}.{knob.name} is {value!r}; it must be {expected}.")


def _expected_kind(value: Any, hint: Any, limits: Mapping[str, Any]) -> str | None:
    """A description of the expected value; None if `value` is valid."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return None if value in options else "one of " + ", ".join(map(repr, options))
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if value is None and type(None) in options:
        return None
    if hint is str:
        return None if isinstance(value, str) else "text"
    if not {int, float} & {hint, *options}:
        return "a number, text, true or false, or one of a Literal; a knob is nothing else"
    kind, words = (
        (float, "a finite number") if float in (hint, *options) else (int, "a whole number")
    )
    if isinstance(value, bool) or not isinstance(value, int | kind) or not math.isfinite(value):
        return words + (" or null" if type(None) in options else "")
    return _out_of_range(value, limits)


def _out_of_range(value: float, limits: Mapping[str, Any]) -> str | None:
    for key, (words, holds) in _RANGES.items():
        if key in limits and not holds(value, limits[key]):
            return f"{words} {limits[key]}"
    return None
