"""The read-only mapping that user code receives as the config, and the section of it that is a task's own."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Self, cast

from groupwise.core.settings.schema import Strict
from groupwise.core.settings.tree import copy_plain


class View(Mapping[str, Any]):  # noqa: PLW1641 - unhashable like the dict that it equals
    """A config that can only be read: `config["task"]["words"]`, `config.task.words`, `config.task.get("words", 3)`.

    Inner mappings are views too; lists come as copies. Equal to a dict with the same content.
    """

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, Any], path: str = "config") -> None:
        object.__setattr__(self, "_values", copy_plain(values))
        object.__setattr__(self, "_path", path)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise KeyError(self._missing_key_message(key))
        return self._wrap(self._values[key], f"{self._path}.{key}")

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key not in self._values:
            raise AttributeError(self._missing_key_message(key))
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise AttributeError(f"{self._path} can only be read; {key} cannot be set.")

    def __delattr__(self, key: str) -> None:
        raise AttributeError(f"{self._path} can only be read; {key} cannot be deleted.")

    def _missing_key_message(self, key: str) -> str:
        close_matches = difflib.get_close_matches(str(key), self._values, n=1)
        hint = f" Did you mean {close_matches[0]}?" if close_matches else ""
        keys = ", ".join(self._values) or "nothing"
        return f"{self._path} has no `{key}`.{hint} It has: {keys}."

    def _wrap(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return View(cast("dict[str, Any]", value), path)
        if isinstance(value, list):
            return [self._wrap(item, path) for item in cast("list[Any]", value)]
        return value

    def to_dict(self) -> dict[str, Any]:
        """A plain, independent copy, for `json.dumps` and the like."""
        return copy_plain(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return self._values == copy_plain(cast("Mapping[str, Any]", other))
        return NotImplemented

    def __repr__(self) -> str:
        return f"View({self._values!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __reduce__(self) -> tuple[type[View], tuple[dict[str, Any], str]]:
        return View, (self._values, self._path)


class TaskSection(Strict):
    """A task's own schema of the config's section `task`."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The section of the config that a hook gets; keys that it lacks have their defaults. Raises ValidationError."""
        return cls.model_validate(copy_plain(config.get("task") or {}))
