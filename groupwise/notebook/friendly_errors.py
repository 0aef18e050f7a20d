"""Models that users create in a notebook: errors in their values are explained in words, all at once, as for a config file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ValidationError

from groupwise.core.errors import ConfigError
from groupwise.core.settings.schema import Strict
from groupwise.core.settings.tree import tree_of
from groupwise.core.settings.validation import validate


class Worded(Strict):
    """A `Strict` model whose constructor raises ConfigError."""

    @classmethod
    def as_shown(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The given values, as messages may show them."""
        return {name: _plain(value) for name, value in values.items()}

    def changed(self, **changes: Any) -> Self:
        """The same with other values; values that were not given are computed again."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    if not TYPE_CHECKING:  # who reads the types shall see the fields

        def __init__(self, *unnamed: Any, **values: Any) -> None:
            _refuse_unnamed(type(self), unnamed)
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise in_words(type(self), values, error) from None

        # As that of pydantic's own base: what is read from JSON does not go through it, so that `validate` finds pydantic's errors.
        __init__.__pydantic_base_init__ = True


def _refuse_unnamed(kind: type[Worded], values: Sequence[Any]) -> None:
    if values:
        some = ", ".join(list(kind.model_fields)[:3])
        preset = (
            f", or start from {kind.__name__}.preset('quick')" if hasattr(kind, "preset") else ""
        )
        raise ConfigError(
            f"{kind.__name__} takes each value by its name ({some}, …), but {len(values)} came without one. Write name=value{preset}."
        )


def in_words(kind: type[Worded], values: Mapping[str, Any], error: ValidationError) -> ConfigError:
    """Everything that is wrong with these values."""
    try:
        validate(kind, tree_of(kind.as_shown(values), kind.__name__))
    except ConfigError as told:
        return told
    told = (_told(each) for each in error.errors())
    return ConfigError("\n".join(f"{kind.__name__}: {each}" for each in told))


def plain_number(value: Any) -> Any:
    """A number of numpy or torch as one of Python; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _told(problem: Any) -> str:
    place = ".".join(map(str, problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ").removeprefix("config: ")
    return f"{place}: {message}" if place else message


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return {str(name): _plain(each) for name, each in parts.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    try:
        return json.loads(json.dumps(plain_number(value)))
    except (TypeError, ValueError):
        return repr(value)
