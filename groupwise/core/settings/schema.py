"""How the keys of a config are declared, and what keys a schema has.

Keys live beside the code that they configure, as fields made by `setting`: default, meaning, limits, and whether the value
may change when a run is resumed. A section is a `Strict` model; `leaves` lists all keys of a schema, and `locate` finds a
spot in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

OnResume = Literal["free", "warn", "fixed"]
"""A resume takes a changed value (`free`), takes it and says so (`warn`), or refuses it (`fixed`)."""

KeyPath = tuple[str, ...]
"""The keys from the root to a value, `("training", "learning_rate")`."""


EACH_VALUE_ALONE = {"conflicts": "are looked for during validation"}
"""A context of pydantic's validation in which sections are made whose keys do not go together."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Keys that are right each by itself, but do not go together."""

    message: str
    keys: tuple[str, ...]
    """Every key whose value decides about it, from the section that says so: `samples_per_prompt`, `rollout.type`."""


class Strict(BaseModel):
    """A section of a config: unknown keys are refused, values are never converted, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    not_yet: ClassVar[frozenset[str]] = frozenset()
    """Keys (`top_p`) and values (`engine=vllm`) of parts that are not in this version."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Keys that one might look for in this section, and why it has none."""
    foreign_values: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Set on the root: values that people write elsewhere, by key and how Python writes them, and what they are here."""
    type_from: ClassVar[tuple[str, ...]] = ("type",)
    """The keys that decide the type of a section that comes in several types."""

    @classmethod
    def foreign_keys(cls) -> Mapping[str, str]:
        """Of the root: names that other frameworks use for a key, and what to write here. `vllm_*` matches by its beginning."""
        return {}

    def conflicts(self) -> Iterable[Conflict]:
        """Conflicts between its keys. Each key is right by itself, whatever else is wrong in the config."""
        return ()

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo) -> Self:
        if info.context is not EACH_VALUE_ALONE:
            refuse(conflict.message for conflict in self.conflicts())
        return self


class Problems(ValueError):
    """Several things that are wrong with one value, or with a section; each has a line of its own."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def refuse(problems: Iterable[str | None]) -> None:
    """Raise `Problems` in a validator if there are any; None stands for none."""
    if found := [problem for problem in problems if problem is not None]:
        raise Problems(found)


def setting(
    default: Any, description: str, *, on_resume: OnResume = "fixed", **constraints: Any
) -> Any:
    """A key of a `Strict` section. `constraints` are pydantic's (`ge`, `gt`, `le`, `lt`, `min_length`); `...` = required."""
    return Field(
        default, description=description, json_schema_extra={"on_resume": on_resume}, **constraints
    )


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section as they are written in the file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def sections_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models that an annotation admits, by the value of their `type` key, else by class name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {tag_of(annotation): annotation}
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        found: dict[str, type[BaseModel]] = {}
        for member in get_args(annotation):
            found |= sections_in(member)
        return found
    return {}


def tag_of(model: type[BaseModel]) -> str:
    """The name of a section where several are possible: the value of its `type` key, else its class name."""
    kind = model.model_fields.get("type")
    values = get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()
    return str(values[0]) if len(values) == 1 else model.__name__


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


@dataclass(frozen=True, slots=True)
class SchemaLocation:
    """A spot in the schema: where an error is, seen from the schema instead of from pydantic's location."""

    path: KeyPath
    """Within the model, without the labels that pydantic puts in for unions and lists."""
    section: type[BaseModel]
    """The model that holds the last key, or would hold it."""
    key: FieldInfo | None
    """None if the section has no such key."""
    variants: Mapping[str, type[BaseModel]]
    """All models that could stand where `section` stands, as `sections_in` names them."""


def locate(root: type[BaseModel], location: Sequence[int | str]) -> SchemaLocation:
    """The spot in a schema that pydantic's location of an error means."""
    variants: Mapping[str, type[BaseModel]] = {"": root}
    place = SchemaLocation((), root, None, variants)
    section = root
    for part in location:
        if part in variants and (len(variants) > 1 or part not in keys_of(section)):
            section = variants[str(part)]
            continue
        if not variants:
            break
        key = keys_of(section).get(str(part))
        place = SchemaLocation((*place.path, str(part)), section, key, variants)
        if key is None:
            break
        variants = sections_in(key.annotation)
        section = next(iter(variants.values()), section)
    return place


def refused_keys(model: type[BaseModel]) -> Mapping[str, str]:
    """The keys that people look for in this model although it has none, and why: the class attribute `refused`, as of `Strict`."""
    return cast("Mapping[str, str]", getattr(model, "refused", {}))


def foreign_advice(root: type[BaseModel], key: str) -> str | None:
    """What to write in place of another framework's key; None for a name that no framework is known to use."""
    if not issubclass(root, Strict):
        return None
    foreign = root.foreign_keys()
    by_start = (
        advice
        for name, advice in foreign.items()
        if name.endswith("*") and key.startswith(name[:-1])
    )
    return foreign.get(key) or next(by_start, None)


def later_keys(model: type[BaseModel]) -> frozenset[str]:
    """`Strict.not_yet` of a section; empty for a model that is not ours."""
    return model.not_yet if issubclass(model, Strict) else frozenset()
