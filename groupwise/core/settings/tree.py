"""A config as it was written: plain values, and the file and line of each.

A config is a YAML 1.2 file. `read_yaml` turns it into a `Tree`: its values with file and line. `tree_of` does the same
with a mapping from Python. Values that no config can hold are noted as problems, which the validation reports with the others.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from groupwise.core.errors import ConfigError
from groupwise.core.settings.schema import KeyPath
from groupwise.core.settings.wording import as_given

DEEPEST, LARGEST = 100, 100_000
"""Limits: nesting of sections and lists, and number of values in a file."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A config as it was written, not yet validated."""

    source: str
    """Its name in messages, e.g. `configs/wordle.yaml`."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """The origin of each key: `configs/wordle.yaml:12` or `override training.seed=1`."""
    problems: list[str] = field(default_factory=list[str])
    """Problems found before validation against a schema; `validate` reports them with the others."""
    unread: set[KeyPath] = field(default_factory=set[KeyPath])
    """The keys that `problems` are about; their values are unknown."""

    def origin(self, path: KeyPath) -> str:
        """The origin of the value at `path`, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.source

    def value(self, path: KeyPath) -> Any:
        """The value given at `path`; None if there is none."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, Mapping):
                return None
            value = cast("Mapping[str, Any]", value).get(key)
        return value


MAX_OPEN = 500
"""Limit for brackets that are open at once, counted anywhere in the text: far more than any real config has."""
_BRACKET = re.compile(r"[\[\]{}]")


class _Yaml12(RoundTripConstructor):
    """YAML 1.2 with line numbers; a date stays text."""


def _as_written(constructor: Any, node: Any) -> str:
    return node.value


cast("Any", _Yaml12).add_constructor("tag:yaml.org,2002:timestamp", _as_written)


def parse_yaml(text: str) -> Any:
    """The content of a YAML 1.2 text, with line numbers. Raises `YAMLError`."""
    reader: Any = YAML()
    reader.Constructor = _Yaml12
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    try:
        if deepest > MAX_OPEN:  # parsing it would take very long
            raise RecursionError
        content = reader.load(text)
    except RecursionError:
        raise YAMLError(f"it is nested more than {DEEPEST} deep") from None
    except (ValueError, KeyError, IndexError) as error:  # a value does not match its tag
        raise YAMLError(f"a value is not of the kind that it is said to be ({error})") from None
    # An alias counts as everything that it refers to: a short text can stand for billions of values.
    pending, count = [(content, 0)], 0
    while pending:
        part, depth = pending.pop()
        count += 1
        if depth > DEEPEST:
            raise YAMLError(f"it is nested more than {DEEPEST} deep")
        if count > LARGEST:
            raise YAMLError(
                f"it holds more than {LARGEST:,} values, counting each alias as its value"
            )
        if isinstance(part, Mapping):
            part = list(cast("Mapping[Any, Any]", part).values())
        if isinstance(part, list | tuple | Set):
            pending += [(item, depth + 1) for item in cast("Iterable[Any]", part)]
    return content


def read_yaml(path: Path, expected: str | None = None) -> Tree:
    """The tree of a file. Raises ConfigError if the file does not exist or is not a YAML mapping with unique keys.

    `expected` describes in messages what the file should hold, if it is not the config of a run.
    """
    source = str(path)
    try:
        content: Any = parse_yaml(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        yaml_error: Any = error
        location = (
            f"{path}:{yaml_error.problem_mark.line + 1}" if yaml_error.problem_mark else str(path)
        )
        message = f"{location}: cannot be read as YAML: {yaml_error.problem}."
        if isinstance(error, DuplicateKeyError):
            match = re.search(r'duplicate key "(.*?)"', str(yaml_error.problem))
            key = f"`{match[1]}`" if match else "a key"
            message = (
                f"{location}: {key} is written twice in the same section; keep one of the two."
            )
        raise ConfigError(message) from None
    except YAMLError as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8.") from None
    except OSError as error:
        raise ConfigError(_missing_file_message(path, error)) from None
    if content is None:
        requirement = expected or "a config needs at least `model:` with a `name:`"
        raise ConfigError(f"{source} is empty; {requirement}.")
    if not isinstance(content, CommentedMap):
        kind = expected or "a config is a mapping of sections, `model:`, `training:` and so on"
        raise ConfigError(f"{source} holds {as_given(content)}; {kind}.")
    tree = Tree(source)
    tree.values.update(plain_value(cast("Any", content), (), tree))
    return tree


def _missing_file_message(path: Path, error: OSError) -> str:
    folder = path if path.is_dir() else path.parent
    if path.exists() and not path.is_dir():
        return f"{path} cannot be read: {error.strerror}."
    problem = (
        f"{path} is a folder, not a config file" if path.is_dir() else f"There is no file {path}"
    )
    if not folder.is_dir():
        return f"{problem}, and no folder {folder} either."
    config_files = sorted(
        entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")
    )
    if not config_files:
        return f"{problem}; there are no .yaml files in {folder}/."
    close_matches = difflib.get_close_matches(path.name, config_files, n=1)
    hint = f" Did you mean {folder / close_matches[0]}?" if close_matches else ""
    return f"{problem}.{hint} {folder}/ holds: {', '.join(config_files)}."


def tree_of(values: Mapping[str, Any], source: str = "config") -> Tree:
    """The tree of a mapping from Python; `source` names it in messages."""
    tree = Tree(source)
    tree.values.update(plain_value(values, (), tree))
    return tree


_GLUED_KEY = re.compile(r"([A-Za-z_]\w*):\S")


def plain_value(value: object, path: KeyPath, tree: Tree) -> Any:
    """The value as plain JSON data; records lines, and a problem for each value that JSON cannot hold."""
    if isinstance(value, TaggedScalar):
        tag: Any = cast("Any", value).tag
        return _add_problem(tree, path, f"carries the YAML tag {tag.value}; use plain values")
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {
            key: plain_value(item, (*path, key), tree)
            for key, item in mapping.items()
            if _is_key(mapping, key, path, tree)
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, path, tree) for item in cast("Sequence[Any]", value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, ScalarBoolean):
        return bool(value)
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _add_problem(tree, path, f"is {float(value)}; it must be a finite number")
    if isinstance(value, float):
        return float(value)
    return _add_problem(
        tree, path, f"is {as_given(value)}, which a config cannot hold ({type(value).__name__})"
    )


def _is_key(mapping: Mapping[Any, Any], key: Any, path: KeyPath, tree: Tree) -> bool:
    lines: Any = cast("Any", mapping).lc.data if isinstance(mapping, CommentedMap) else {}
    if lines and key in lines:
        tree.origins[(*path, str(key))] = f"{tree.source}:{lines[key][0] + 1}"
    if isinstance(key, str) and mapping[key] is None and (glued := _GLUED_KEY.match(key)):
        # YAML reads `{prompt:question}` as one key without a value. The rest is not shown: it may be a secret.
        name = glued.group(1)
        _add_problem(tree, path, f"has no space after the colon of {name}; write '{{{name}: …}}'")
        return False
    if isinstance(key, str):
        return True
    _add_problem(tree, (*path, str(key)), f'has a key that is not text; write "{key}": with quotes')
    return False


def _add_problem(tree: Tree, path: KeyPath, what: str) -> None:
    tree.problems.append(f"{tree.origin(path)}: {'.'.join(path) or 'the config'} {what}.")
    tree.unread.add(path)


def copy_plain(value: Any) -> Any:
    """A copy of plain nested data that shares nothing with the original."""
    if isinstance(value, Mapping):
        return {key: copy_plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [copy_plain(item) for item in cast("Sequence[Any]", value)]
    return value
