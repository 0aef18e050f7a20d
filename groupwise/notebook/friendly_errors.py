"""Models that users create in a notebook: errors in their values are explained in words, all at once, like those of a config file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ValidationError

from groupwise.core.errors import ConfigError
from groupwise.core.settings.field_errors import field_errors
from groupwise.core.settings.schema import Strict
from groupwise.core.settings.tree import tree_of
from groupwise.core.settings.validation import validate


class UserModel(Strict):
    """A `Strict` model whose constructor raises ConfigError."""

    @classmethod
    def values_for_messages(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The given values in the form for messages."""
        return {name: _json_value(value) for name, value in values.items()}

    def changed(self, **changes: Any) -> Self:
        """A copy with other values; values that were not given are computed again."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**values, **changes})

    if not TYPE_CHECKING:  # type checkers read the fields instead

        def __init__(self, *unnamed: Any, **values: Any) -> None:
            if unnamed:
                kind, fields = type(self).__name__, ", ".join(list(type(self).model_fields)[:3])
                preset = (
                    f", or start from {kind}.preset('quick')"
                    if hasattr(type(self), "preset")
                    else ""
                )
                raise ConfigError(
                    f"{kind} takes each value by its name ({fields}, …), but {len(unnamed)} came without one. Write name=value{preset}."
                )
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise to_config_error(type(self), values, error) from None

        # Marks this as pydantic's own constructor: validation of JSON then bypasses it, so that `validate` gets pydantic's
        # errors.
        __init__.__pydantic_base_init__ = True


def to_config_error(
    kind: type[UserModel], values: Mapping[str, Any], error: ValidationError
) -> ConfigError:
    """An error that explains everything that is wrong with these values."""
    try:
        validate(kind, tree_of(kind.values_for_messages(values), kind.__name__))
    except ConfigError as config_error:
        return config_error
    return ConfigError(
        "\n".join(f"{kind.__name__}: {problem}" for problem in field_errors(error, kind))
    )


def plain_number(value: Any) -> Any:
    """A numpy or torch number as a Python number; other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_count(value: object) -> bool:
    """True for an int of at least 1, but not for a bool."""
    return type(value) is int and value >= 1


def _json_value(value: Any) -> Any:
    """The value in JSON form; its repr if it has no JSON form."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {str(name): _json_value(item) for name, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in cast("Sequence[Any]", value)]
    try:
        return json.loads(json.dumps(plain_number(value)))
    except (TypeError, ValueError):
        return repr(value)
