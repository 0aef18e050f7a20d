"""The base of every config: how it is read, checked, explained, shown and compared.

A config is a YAML 1.2 file. `read_yaml` turns it into a `Tree`: plain values, and for each of them where it was written
(file and line). `override` lays `a.b=value` words over it, typed as the same text in the file would be. `validate` checks the
tree once against a `Strict` model and, if anything is wrong, raises one `ConfigError` that lists every problem with its
place, what was given and what is allowed, in words. An unknown key is told the nearest known one; a key that other
frameworks use is told its name here; a key of a part that does not exist yet is told so.

Keys live beside the code that they configure, as fields made by `setting`: default, meaning, limits, and whether the
value may change when a run is resumed. `document` turns them into a table, `compare` tells two configs apart by that class,
and `View` is the read-only mapping that user code receives.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, TaggedScalar
from ruamel.yaml.constructor import DuplicateKeyError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from groupwise.errors import ConfigError

OnResume = Literal["free", "warn", "fixed"]
"""What a resume does with a changed value: `free` takes it, `warn` takes it and says so, `fixed` refuses."""

KeyPath = tuple[str, ...]
"""The keys from the root to a value, `("training", "learning_rate")`."""

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A section of a config: unknown keys are refused, values are never converted, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    not_yet: ClassVar[frozenset[str]] = frozenset()
    """Keys (`top_p`) and values (`engine=vllm`) of parts that are not in this version."""
    foreign: ClassVar[Mapping[str, str]] = {}
    """On the root: names that other frameworks use for a key, and what to write here. `vllm_*` matches by its beginning."""


def setting(
    default: Any, description: str, *, on_resume: OnResume = "fixed", **constraints: Any
) -> Any:
    """A key of a `Strict` section. `constraints` are pydantic's (`ge`, `gt`, `le`, `lt`, `min_length`); `...` = required."""
    return Field(
        default, description=description, json_schema_extra={"on_resume": on_resume}, **constraints
    )


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tree:
    """A config as it was written, not yet validated."""

    source: str
    """What the messages call it, `configs/wordle.yaml`."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Where each key was given: `configs/wordle.yaml:12` or `override training.seed=1`."""
    problems: list[str] = field(default_factory=list[str])
    """What was wrong before any schema is looked at; `validate` reports it with the rest."""

    def origin(self, path: KeyPath) -> str:
        """Where the value at `path`, or the nearest section around it, was given."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.source

    def value(self, path: KeyPath) -> Any:
        """What was given at `path`; None where nothing was."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, Mapping):
                return None
            value = cast("Mapping[str, Any]", value).get(key)
        return value


class _Yaml12(RoundTripConstructor):
    """YAML 1.2 with line numbers; a date stays the text that was written."""


def _as_written(constructor: Any, node: Any) -> str:
    return node.value


cast("Any", _Yaml12).add_constructor("tag:yaml.org,2002:timestamp", _as_written)


def _parse(text: str) -> Any:
    reader: Any = YAML()
    reader.Constructor = _Yaml12
    return reader.load(text)


def read_yaml(path: Path) -> Tree:
    """The tree of a file. Raises ConfigError where there is no such file or it is not a YAML mapping with unique keys."""
    source = str(path)
    content = _load_file(path)
    if content is None:
        raise ConfigError(f"{source} is empty; a config needs at least `model:` with a `name:`.")
    if not isinstance(content, CommentedMap):
        raise ConfigError(
            f"{source} holds {_shown(content)}; a config is a mapping of sections, `model:`, `training:` and so on."
        )
    tree = Tree(source)
    tree.values.update(_plain(cast("Any", content), (), tree))
    return tree


def _load_file(path: Path) -> Any:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        raise ConfigError(_yaml_message(path, error)) from None
    except YAMLError as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8.") from None
    except OSError as error:
        raise ConfigError(_missing_file_message(path, error)) from None


def _yaml_message(path: Path, error: Any) -> str:
    where = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
    if not isinstance(error, DuplicateKeyError):
        return f"{where}: cannot be read as YAML: {error.problem}."
    found = re.search(r'duplicate key "(.*?)"', str(cast("Any", error).problem))
    key = f"`{found[1]}`" if found else "a key"
    return f"{where}: {key} is written twice in the same section; keep one of the two."


def _missing_file_message(path: Path, error: OSError) -> str:
    folder = path if path.is_dir() else path.parent
    if path.exists() and not path.is_dir():
        return f"{path} cannot be read: {error.strerror}."
    what = f"{path} is a folder, not a config file" if path.is_dir() else f"There is no file {path}"
    if not folder.is_dir():
        return f"{what}, and no folder {folder} either."
    there = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    if not there:
        return f"{what}; there are no .yaml files in {folder}/."
    near = difflib.get_close_matches(path.name, there, n=1)
    hint = f" Did you mean {folder / near[0]}?" if near else ""
    return f"{what}.{hint} {folder}/ holds: {', '.join(there)}."


def tree_of(values: Mapping[str, Any], source: str = "config") -> Tree:
    """The tree of a mapping given from Python."""
    tree = Tree(source)
    tree.values.update(_plain(values, (), tree))
    return tree


def _plain(value: object, path: KeyPath, tree: Tree) -> Any:
    """The value as JSON knows it, noting lines and whatever JSON cannot hold on the way."""
    if isinstance(value, TaggedScalar):
        return _problem(tree, path, f"carries the YAML tag {_tag_of(value)}; use plain values")
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {
            key: _plain(item, (*path, key), tree)
            for key, item in mapping.items()
            if _is_key(mapping, key, path, tree)
        }
    if isinstance(value, list | tuple):
        return [_plain(item, path, tree) for item in cast("Sequence[Any]", value)]
    return _plain_scalar(value, path, tree)


def _tag_of(scalar: Any) -> str:
    return str(scalar.tag.value)


def _is_key(mapping: Mapping[Any, Any], key: Any, path: KeyPath, tree: Tree) -> bool:
    lines: Any = cast("Any", mapping).lc.data if isinstance(mapping, CommentedMap) else {}
    if lines and key in lines:
        tree.origins[(*path, str(key))] = f"{tree.source}:{lines[key][0] + 1}"
    if isinstance(key, str):
        return True
    _problem(tree, (*path, str(key)), f'has a key that is not text; write "{key}": with quotes')
    return False


def _plain_scalar(value: Any, path: KeyPath, tree: Tree) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, ScalarBoolean):
        return bool(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return _problem(tree, path, f"is {float(value)}; it must be a finite number")
    if isinstance(value, Path):
        return str(value)
    return _problem(
        tree, path, f"is {_shown(value)}, which a config cannot hold ({type(value).__name__})"
    )


def _problem(tree: Tree, path: KeyPath, what: str) -> None:
    tree.problems.append(f"{tree.origin(path)}: {'.'.join(path) or 'the config'} {what}.")


# --- overrides -----------------------------------------------------------------------------------


def override(tree: Tree, words: Sequence[str]) -> Tree:
    """The tree with `a.b=value` words laid over it, the later ones winning. What is wrong with them joins `problems`."""
    result = Tree(tree.source, _copied(tree.values), dict(tree.origins), list(tree.problems))
    for word in words:
        try:
            path, value = parse_override(word)
            _set(result, path, value, word)
        except ConfigError as error:
            result.problems.append(error.message)
    return result


def parse_override(word: str) -> tuple[KeyPath, Any]:
    """`training.learning_rate=1e-5` as path and value. Raises ConfigError with the right way to write it."""
    name, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"override {word}: write it as key=value, for example training.seed=1.")
    path = tuple(name.split("."))
    for key in path:
        _check_override_key(key, name, word)
    origin = _override_origin(path, word)
    value = _override_value(text, name, origin)
    holder = Tree(origin)
    plain = _plain(value, path, holder)
    if holder.problems:
        raise ConfigError(holder.problems[0])
    return path, plain


def _check_override_key(key: str, name: str, word: str) -> None:
    origin = f"override {word.partition('=')[0]}=…"
    if re.fullmatch(r"[A-Za-z_][\w-]*", key):
        return
    if not name:
        raise ConfigError(f"{origin}: there is no key before `=`; write key=value.")
    if name[0] in "+~":
        bare = name.lstrip("+~")
        raise ConfigError(f"{origin}: keys take no `{name[0]}`; write {bare}=value.")
    if key.isdigit() or "[" in key:
        whole = re.split(r"\.\d|\[", name)[0]
        raise ConfigError(
            f"{origin}: a list is given whole, {whole}=[first, second]; single items cannot be set."
        )
    raise ConfigError(f"{origin}: `{name}` is not a key; keys are words joined by dots.")


def _override_value(text: str, name: str, origin: str) -> Any:
    stripped = text.strip()
    try:
        read = _parse(f"value: {text}")
    except YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{origin}: the value cannot be read as YAML ({problem}); for plain text, quote it: {name}='\"text\"'."
        ) from None
    value = cast("Mapping[str, Any]", read)["value"]
    if len(cast("Mapping[str, Any]", read)) > 1:
        raise ConfigError(
            f"{origin}: one override sets one key; give the others as words of their own."
        )
    if value is None and not re.match(r"(null|Null|NULL|~)(\s|$)", stripped):
        raise ConfigError(f"{origin}: nothing is given after `=`; write {name}=null for no value.")
    return value


def _override_origin(path: KeyPath, word: str) -> str:
    shown = f"{'.'.join(path)}=…" if _is_secret(path[-1]) else " ".join(word.split())
    return f"override {shown}"


def _set(tree: Tree, path: KeyPath, value: Any, word: str) -> None:
    section = tree.values
    origin = _override_origin(path, word)
    for depth, key in enumerate(path[:-1], start=1):
        inner = section.get(key)
        if inner is None:
            inner = section[key] = {}
            tree.origins[path[:depth]] = origin
        if not isinstance(inner, dict):
            there = ".".join(path[:depth])
            raise ConfigError(f"{origin}: {there} is {_shown(inner)}, which has no keys inside.")
        section = cast("dict[str, Any]", inner)
    section[path[-1]] = value
    for stale in [known for known in tree.origins if known[: len(path)] == path]:
        del tree.origins[stale]
    tree.origins[path] = origin


def _copied(value: Any) -> Any:
    """A copy of plain nested data that shares nothing with the original."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in cast("Sequence[Any]", value)]
    return value


# --- validating and explaining -------------------------------------------------------------------


def validate(
    model: type[Model],
    tree: Tree,
    at: KeyPath = (),
    check: Callable[[Tree], Sequence[str]] | None = None,
) -> Model:
    """The tree (or its section `at`) as a `model`. Raises one ConfigError with every problem, each with its place.

    `check` looks at the raw tree for what no schema can say and returns further problems.
    """
    problems = [*tree.problems, *(check(tree) if check else ())]
    section = tree.value(at) if at else tree.values
    try:
        result = model.model_validate_json(
            json.dumps({} if section is None else section), extra=_extra_keys(model)
        )
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        problems += [line for detail in details for line in _explain(model, detail, tree, at)]
        raise ConfigError(_listed(problems, tree.source)) from None
    if problems:
        raise ConfigError(_listed(problems, tree.source))
    return result


def _extra_keys(model: type[BaseModel]) -> Literal["forbid"] | None:
    """Unknown keys are refused also by a model that does not say what it does with them."""
    return None if model.model_config.get("extra") else "forbid"


def _listed(problems: Sequence[str], source: str) -> str:
    """One below the other: those of the file in its order, then those of overrides."""

    def line(problem: str) -> float:
        found = re.match(rf"{re.escape(source)}(:\d+)?: ", problem)
        return int((found[1] or ":0")[1:]) if found else math.inf

    return "\n".join(sorted(dict.fromkeys(problems), key=line))


@dataclass(frozen=True, slots=True)
class _Place:
    """A spot in the schema: where an error is, seen from the schema instead of from pydantic's location."""

    path: KeyPath
    """Within the model, without the labels that pydantic puts in for unions and lists."""
    section: type[BaseModel]
    """The model that holds the last key, or would hold it."""
    key: FieldInfo | None
    """None where the section has no such key."""
    variants: Mapping[str, type[BaseModel]]
    """All models that could stand where `section` stands, as `sections_in` names them."""


def _locate(root: type[BaseModel], location: Sequence[int | str]) -> _Place:
    variants: Mapping[str, type[BaseModel]] = {"": root}
    place = _Place((), root, None, variants)
    section = root
    for part in location:
        if len(variants) > 1 and part in variants:
            section = variants[str(part)]
            continue
        if not variants:
            break
        key = keys_of(section).get(str(part))
        place = _Place((*place.path, str(part)), section, key, variants)
        if key is None:
            break
        variants = sections_in(key.annotation)
        section = next(iter(variants.values()), section)
    return place


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in the file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def sections_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models that an annotation admits, by the value of their `type` key, else by class name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {_tag(annotation): annotation}
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        found: dict[str, type[BaseModel]] = {}
        for member in get_args(annotation):
            found |= sections_in(member)
        return found
    return {}


def _tag(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("type")
    named = get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()
    return str(named[0]) if len(named) == 1 else model.__name__


def _explain(
    model: type[BaseModel], detail: ErrorDetails, tree: Tree, at: KeyPath
) -> Iterator[str]:
    place = _locate(model, detail["loc"])
    path = at + place.path
    if detail["type"] == "extra_forbidden":
        yield f"{tree.origin(path)}: {_explain_unknown(model, place, at)}"
    elif detail["type"] == "missing":
        origin = tree.origin(path[:-1])
        yield from (f"{origin}: {text}" for text in _explain_missing(place, at))
    elif detail["type"].startswith("union_tag"):
        yield f"{tree.origin((*path, 'type'))}: {_explain_type(place, tree, at)}"
    else:
        yield f"{tree.origin(path)}: {_explain_value(place, detail, tree, at)}"


def _explain_missing(place: _Place, at: KeyPath) -> Iterator[str]:
    assert place.key is not None
    inner = sections_in(place.key.annotation)
    if len(inner) != 1:
        meaning = f": {place.key.description}" if place.key.description else "."
        yield f"{'.'.join(at + place.path)} is required{meaning}"
        return
    (section,) = inner.values()
    for name, info in keys_of(section).items():
        if info.is_required():
            yield from _explain_missing(_Place((*place.path, name), section, info, inner), at)


def _explain_type(place: _Place, tree: Tree, at: KeyPath) -> str:
    assert place.key is not None
    path = ".".join(at + place.path)
    variants = sections_in(place.key.annotation)
    given = tree.value(at + place.path)
    if not isinstance(given, Mapping):
        return f"{path} is {_shown(given)}; it must be a section, with {path}.type one of {', '.join(variants)}."
    kind = cast("Mapping[str, Any]", given).get("type")
    if any(f"type={kind}" in _not_yet(variant) for variant in variants.values()):
        return f"{path}.type: {kind} is not in this version; there are {', '.join(variants)}."
    if kind is None:
        return f"{path}.type is required; it must be one of {', '.join(variants)}."
    near = difflib.get_close_matches(str(kind), variants, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{path}.type is {_shown(kind)}; it must be one of {', '.join(variants)}{hint}"


def _explain_value(place: _Place, detail: ErrorDetails, tree: Tree, at: KeyPath) -> str:
    path = at + place.path
    dotted = ".".join(path) or tree.source
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{dotted}: {detail.get('ctx', {}).get('error', detail['msg'])}"
    given = tree.value(path)
    if place.key is not None and f"{path[-1]}={given}" in _not_yet(place.section):
        return f"{dotted}: {given} is not in this version; it must be {describe(place.key)}."
    shown = "…" if path and _is_secret(path[-1]) else _shown(given)
    allowed = describe(place.key) if place.key is not None else None
    if allowed is None:
        return f"{dotted} is {shown}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."
    return f"{dotted} is {shown}; it must be {allowed}.{_quotes_hint(given)}"


def _quotes_hint(given: Any) -> str:
    if isinstance(given, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|null", given):
        return " Write it without quotes."
    return ""


_SECRET = re.compile(
    r"^token$|(^|_)(api_?key|passwd|password|secret|secret_key)$"
    r"|(^|_)(access|api|auth|bearer|hf|hub|wandb)_token$",
    re.IGNORECASE,
)


def _is_secret(key: str) -> bool:
    return _SECRET.search(key) is not None


def secrets_in(tree: Tree, at: KeyPath) -> list[str]:
    """A problem for each key below `at` that looks like a credential: configs are stored and shared, secrets are not."""
    return _secrets(tree, tree.value(at), at)


def _secrets(tree: Tree, section: Any, at: KeyPath) -> list[str]:
    if isinstance(section, list):
        return [found for item in cast("list[Any]", section) for found in _secrets(tree, item, at)]
    if not isinstance(section, Mapping):
        return []
    problems: list[str] = []
    for key, value in cast("Mapping[str, Any]", section).items():
        path = (*at, key)
        if _is_secret(key) and isinstance(value, str):
            problems.append(f"{tree.origin(path)}: {_explain_secret(path)}")
        problems += _secrets(tree, value, path)
    return problems


def _explain_secret(path: KeyPath) -> str:
    return (
        f"{'.'.join(path)} looks like a secret; secrets never stand in a config, which is stored with the run. "
        "Set it as an environment variable and read it from there."
    )


def _explain_unknown(root: type[BaseModel], place: _Place, at: KeyPath) -> str:
    """What to say of a key that is not there, the most certain advice first."""
    *above, key = at + place.path
    dotted = ".".join((*above, key))
    if any(key in _not_yet(variant) for variant in place.variants.values()):
        return f"{dotted} is not in this version."
    if advice := _foreign_name(root, key):
        return f"{dotted} is not a key; {advice}."
    if _is_secret(key):
        return _explain_secret((*above, key))
    if elsewhere := _explain_variant(place, at):
        return elsewhere
    unknown = f"{dotted} is not a key"
    if found := _paths_named(root, key):
        return f"{unknown}; did you mean {' or '.join(found)}?"
    if late := _late_path(root, key):
        return f"{unknown}; {late} would be, but it is not in this version."
    if near := _nearest(root, place, at):
        return f"{unknown}; did you mean {near}?"
    section = f"in {'.'.join(above)}" if above else "at the top"
    return f"{unknown}; the keys {section} are: {', '.join(keys_of(place.section))}."


def _foreign_name(root: type[BaseModel], key: str) -> str | None:
    if not issubclass(root, Strict):
        return None
    by_start = (
        advice
        for name, advice in root.foreign.items()
        if name.endswith("*") and key.startswith(name[:-1])
    )
    return root.foreign.get(key) or next(by_start, None)


def _not_yet(model: type[BaseModel]) -> frozenset[str]:
    return model.not_yet if issubclass(model, Strict) else frozenset()


def _explain_variant(place: _Place, at: KeyPath) -> str | None:
    """For a section that comes in several types: whether another type has the key."""
    if len(place.variants) < 2:
        return None
    *above, key = at + place.path
    owners: dict[str, list[str]] = {}
    for kind, variant in place.variants.items():
        for name in keys_of(variant):
            owners.setdefault(name, []).append(kind)
    near = difflib.get_close_matches(key, owners, n=1)
    if not near:
        return None
    kind, who = _tag(place.section), ", ".join(owners[near[0]])
    found = f"a key of {who}" if near[0] == key else f"{'.'.join((*above, near[0]))} (of {who})"
    question = f"it is {found}." if near[0] == key else f"did you mean {found}?"
    return f"{'.'.join((*above, key))} is not a key of {'.'.join(above)} type {kind}; {question}"


def _paths_named(root: type[BaseModel], key: str) -> list[str]:
    return list(dict.fromkeys(".".join(leaf.path) for leaf in leaves(root) if leaf.path[-1] == key))


def _late_path(root: type[BaseModel], key: str) -> str | None:
    for leaf in leaves(root):
        if key in _not_yet(leaf.section):
            return ".".join((*leaf.path[:-1], key))
    return None


def _nearest(root: type[BaseModel], place: _Place, at: KeyPath) -> str | None:
    key = place.path[-1]
    known = keys_of(place.section)
    near = difflib.get_close_matches(key, known, n=1)
    near = near or [name for name in known if len(key) > 2 and name.startswith(key)]
    if near:
        return ".".join((*at, *place.path[:-1], near[0]))
    everywhere = {leaf.path[-1]: leaf.path for leaf in leaves(root)}
    far = difflib.get_close_matches(key, everywhere, n=1, cutoff=0.75)
    return ".".join(at + everywhere[far[0]]) if far else None


# --- what a key is, in words ---------------------------------------------------------------------

_WORDS = {
    bool: ("true or false", "lists of true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}

_LIMITS = {
    "gt": "above",
    "ge": "at least",
    "lt": "below",
    "le": "at most",
    "min_length": "of length at least",
    "max_length": "of length at most",
}


def describe(key: FieldInfo) -> str | None:
    """What a key accepts: `a number above 0 or null`. None for a type that these words do not cover."""
    return _describe(key.annotation, key.metadata)


def _describe(annotation: Any, constraints: Sequence[Any]) -> str | None:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation][0] + _range(constraints)
    if annotation in (None, NoneType):
        return "null"
    if origin is Annotated:
        return _describe(arguments[0], [*constraints, *arguments[1:]])
    if origin is Literal:
        return _choices(arguments)
    if origin in (Union, UnionType):
        members = [_describe(member, constraints) for member in arguments]
        return None if None in members else " or ".join(dict.fromkeys(cast("list[str]", members)))
    if origin in (list, tuple) and arguments and arguments[0] in _WORDS:
        return f"a list of {_WORDS[arguments[0]][1]}"
    if origin in (list, tuple) and arguments:
        inner = _describe(arguments[0], ())
        return f"a list, each {inner}" if inner else None
    if origin is dict or sections_in(annotation):
        return "a section with keys of its own"
    return None


def _choices(values: Sequence[Any]) -> str:
    names = ", ".join(str(value) for value in values)
    return names if len(values) == 1 else f"one of {names}"


def _range(constraints: Sequence[Any]) -> str:
    words = [
        f"{phrase} {getattr(limit, name):g}"
        for limit in constraints
        for name, phrase in _LIMITS.items()
        if getattr(limit, name, None) is not None
    ]
    return f" ({', '.join(words)})" if words else ""


def _shown(value: Any) -> str:
    """A given value as one would write it, cut where it is long."""
    if isinstance(value, str | int | float | bool | list | dict | None):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- the schema as a list ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key of the schema that holds a value."""

    path: KeyPath
    section: type[BaseModel]
    key: FieldInfo
    kind: str = ""
    """The `type` of the section that has it, where the section comes in several types."""

    @property
    def on_resume(self) -> OnResume:
        extra = self.key.json_schema_extra
        return cast("Any", extra).get("on_resume", "fixed") if isinstance(extra, dict) else "fixed"


def leaves(model: type[BaseModel], above: KeyPath = (), kind: str = "") -> Iterator[Leaf]:
    """Every key in the order of the schema; a key that several types of a section share comes once for each.

    A section that may be null is a key as well as its contents.
    """
    for name, info in keys_of(model).items():
        inner = sections_in(info.annotation)
        if not inner or NoneType in get_args(info.annotation):
            yield Leaf((*above, name), model, info, kind)
        for tag, section in inner.items():
            yield from leaves(section, (*above, name), tag)


def document(model: type[BaseModel]) -> str:
    """A Markdown table of all keys: path, what it accepts, default, meaning, and what a resume allows."""
    rows = ["| key | value | default | meaning | on resume |", "|---|---|---|---|---|"]
    by_path: dict[KeyPath, list[Leaf]] = {}
    for leaf in leaves(model):
        by_path.setdefault(leaf.path, []).append(leaf)
    rows += [_row(model, path, same) for path, same in by_path.items()]
    return "\n".join(rows) + "\n"


def _row(model: type[BaseModel], path: KeyPath, same: Sequence[Leaf]) -> str:
    first = same[0]
    kinds = [leaf.kind for leaf in same]
    accepts, default = describe(first.key) or "any value", _default(first.key)
    place = _locate(model, path[:-1])
    all_kinds = list(sections_in(place.key.annotation)) if place.key else kinds
    meaning = first.key.description or ""
    if path[-1] == "type" and len(kinds) > 1 and place.key is not None:
        accepts = _choices(kinds)
        default = getattr(place.key.get_default(call_default_factory=True), "type", default)
    elif len(kinds) < len(all_kinds):
        meaning = f"{meaning} Only for {', '.join(kinds)}."
    cells = [f"`{'.'.join(path)}`", accepts, f"`{default}`", meaning, first.on_resume]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(key: FieldInfo) -> str:
    if key.is_required():
        return "required"
    value = key.get_default(call_default_factory=True)
    return "as below" if isinstance(value, BaseModel) else json.dumps(value, ensure_ascii=False)


# --- comparing -----------------------------------------------------------------------------------

Change = tuple[Any, Any]
"""Old and new value of a key; None also where a side does not have it."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What changed between two configs, by dotted path, sorted by what a resume does about it."""

    free: dict[str, Change] = field(default_factory=dict[str, Change])
    warned: dict[str, Change] = field(default_factory=dict[str, Change])
    fixed: dict[str, Change] = field(default_factory=dict[str, Change])


def compare(old: Mapping[str, Any], new: Mapping[str, Any], model: type[BaseModel]) -> Differences:
    """Differences of two resolved configs. A key that the old one does not have yet counts as its default."""
    schema = {leaf.path: leaf for leaf in leaves(model)}
    result = Differences()
    by_class = {"free": result.free, "warn": result.warned, "fixed": result.fixed}
    for path, change in _changes(old, new, (), schema):
        leaf = _leaf_above(path, schema)
        by_class[leaf.on_resume if leaf else "fixed"][".".join(path)] = change
    return result


_ABSENT: Any = object()


def _changes(
    old: Any, new: Any, path: KeyPath, schema: Mapping[KeyPath, Leaf]
) -> Iterator[tuple[KeyPath, Change]]:
    if isinstance(new, Mapping) and (old is _ABSENT or isinstance(old, Mapping)):
        before = cast("Mapping[str, Any]", {} if old is _ABSENT else old)
        after = cast("Mapping[str, Any]", new)
        for key in dict.fromkeys([*after, *before]):
            sides = before.get(key, _ABSENT), after.get(key, _ABSENT)
            yield from _changes(*sides, (*path, key), schema)
        return
    if old is _ABSENT:
        old = _default_at(path, schema)
    change = _copied(old), None if new is _ABSENT else _copied(new)
    if change[0] != change[1]:
        yield path, change


def _default_at(path: KeyPath, schema: Mapping[KeyPath, Leaf]) -> Any:
    if path not in schema or schema[path].key.is_required():
        return None
    return schema[path].key.get_default(call_default_factory=True)


def _leaf_above(path: KeyPath, schema: Mapping[KeyPath, Leaf]) -> Leaf | None:
    found = (schema[path[:n]] for n in range(len(path), 0, -1) if path[:n] in schema)
    return next(found, None)


# --- the config as user code sees it -------------------------------------------------------------


class View(Mapping[str, Any]):  # noqa: PLW1641 - unhashable like the dict that it equals
    """A config that can only be read: `config["task"]["words"]`, `config.task.words`, `config.task.get("words", 3)`.

    Inner mappings are views too; lists come as copies. Equal to a dict with the same content.
    """

    __slots__ = ("_path", "_values")

    def __init__(self, values: Mapping[str, Any], path: str = "config") -> None:
        object.__setattr__(self, "_values", _copied(values))
        object.__setattr__(self, "_path", path)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise KeyError(self._missing(key))
        return self._wrapped(self._values[key], f"{self._path}.{key}")

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key not in self._values:
            raise AttributeError(self._missing(key))
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise AttributeError(f"{self._path} can only be read; {key} cannot be set.")

    def __delattr__(self, key: str) -> None:
        raise AttributeError(f"{self._path} can only be read; {key} cannot be deleted.")

    def _missing(self, key: str) -> str:
        near = difflib.get_close_matches(str(key), self._values, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        there = ", ".join(self._values) or "nothing"
        return f"{self._path} has no `{key}`.{hint} It has: {there}."

    def _wrapped(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return View(cast("dict[str, Any]", value), path)
        if isinstance(value, list):
            return [self._wrapped(item, path) for item in cast("list[Any]", value)]
        return value

    def to_dict(self) -> dict[str, Any]:
        """A plain, independent copy, for `json.dumps` and the like."""
        return _copied(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return self._values == _copied(cast("Mapping[str, Any]", other))
        return NotImplemented

    def __repr__(self) -> str:
        return f"View({self._values!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __reduce__(self) -> tuple[type[View], tuple[dict[str, Any], str]]:
        return View, (self._values, self._path)
