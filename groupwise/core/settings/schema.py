"""How the keys of a config are declared, and which keys a schema has.

Keys are declared next to the code that they configure, as fields made by `setting`: default, meaning, limits, and whether the value
may change when a run is resumed. A section is a `Strict` model; `leaves` lists all keys of a schema, and `locate` finds a
place in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, SchemaValidator, core_schema

OnResume = Literal["free", "warn", "fixed"]
"""Whether a resume accepts a changed value (`free`), accepts it with a warning (`warn`), or refuses it (`fixed`)."""

KeyPath = tuple[str, ...]
"""Path of keys from the root to a value, `("training", "learning_rate")`."""


SKIP_CONFLICT_CHECKS = {"conflicts": "are looked for during validation"}
"""A pydantic validation context that skips the check for conflicts, so sections with conflicting keys can be built."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Keys that are valid individually, but not together."""

    message: str
    keys: tuple[str, ...]
    """Every key whose value decides about the conflict, relative to this section: `samples_per_prompt`, `rollout.type`."""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key that belongs to another framework or to another command."""

    kind: Literal["renamed", "other_command", "other"]
    """`renamed`: the setting has another name here. `other_command`: it is a key of ours, in the config of another command."""
    advice: str
    """What to write in its place; ends the sentence "KEY is not a key; …"."""


class Strict(BaseModel):
    """A section of a config: unknown keys are refused, values are never converted, and an instance cannot be changed."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True
    )

    not_yet: ClassVar[frozenset[str]] = frozenset()
    """Keys (`top_p`) and values (`engine=vllm`) of features that are not in this version."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Keys that users might look for in this section, and why it does not have them."""
    foreign_values: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Set on the root: values that other frameworks use, by key and their Python repr, and what to write here."""
    type_from: ClassVar[tuple[str, ...]] = ("type",)
    """The keys that decide the type of a section that has several types."""

    @classmethod
    def foreign_keys(cls) -> Mapping[str, ForeignKey]:
        """Set on the root: names that other frameworks or commands use for a key, and what to write here. `vllm_*` matches by prefix."""
        return {}

    @classmethod
    def model_rebuild(
        cls,
        *,
        force: bool = False,
        raise_errors: bool = True,
        _parent_namespace_depth: int = 2,
        _types_namespace: Mapping[str, Any] | None = None,
    ) -> bool | None:
        """Build the validator, when it is first needed. pydantic's plugins do not observe it, only the user's own models."""
        with _without_plugins():
            return super().model_rebuild(
                force=force,
                raise_errors=raise_errors,
                _parent_namespace_depth=_parent_namespace_depth + 1,
                _types_namespace=_types_namespace,
            )

    def conflicts(self) -> Iterable[Conflict]:
        """Conflicts between its keys. Each key is valid on its own when this is called, even if the rest of the config is not."""
        return ()

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo) -> Self:
        if info.context is not SKIP_CONFLICT_CHECKS:
            refuse(conflict.message for conflict in self.conflicts())
        return self


@contextmanager
def _without_plugins() -> Generator[None]:
    """pydantic looks for plugins among all installed packages, which takes 20 ms, unless a variable says that there are none."""
    variable = "PYDANTIC_DISABLE_PLUGINS"
    given = os.environ.get(variable)
    os.environ[variable] = "__all__"
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]
        else:
            os.environ[variable] = given


class Problems(ValueError):
    """Several problems with one value or section; each is reported on a line of its own."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def refuse(problems: Iterable[str | None]) -> None:
    """Raise `Problems` in a validator if there are any; None entries are ignored."""
    if messages := [problem for problem in problems if problem is not None]:
        raise Problems(messages)


def setting(
    default: Any, description: str, *, on_resume: OnResume = "fixed", **constraints: Any
) -> Any:
    """A key of a `Strict` section. `constraints` are pydantic's (`ge`, `gt`, `le`, `lt`, `min_length`); `...` = required."""
    return Field(
        default, description=description, json_schema_extra={"on_resume": on_resume}, **constraints
    )


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section by their names in the file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


class SectionByType:
    """A key whose section has one of many types, as an annotation: a subclass lists them.

    It validates like a discriminated union of all sections, but builds only those that occur: a union of twenty takes 30 ms.
    """

    @staticmethod
    def tag_of(section: Any) -> str | None:
        """The tag of a section that is given as a mapping or as a model; None for anything else."""
        raise NotImplementedError

    @staticmethod
    def tags() -> tuple[str, ...]:
        """The tags of all sections."""
        raise NotImplementedError

    @staticmethod
    def section(tag: str) -> type[BaseModel]:
        """The section with this tag."""
        raise NotImplementedError

    @classmethod
    def _validate(cls, value: Any, info: ValidationInfo) -> Any:
        tag = cls.tag_of(value)
        if tag is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "type"})
        if tag not in cls.tags():
            context = {"discriminator": "type", "tag": tag, "expected_tags": ", ".join(cls.tags())}
            raise PydanticKnownError("union_tag_invalid", context)
        validator = cls._validator(tag)
        if info.mode == "json":
            return validator.validate_json(json.dumps(value), context=info.context)
        return validator.validate_python(value, context=info.context)

    @classmethod
    @cache
    def _validator(cls, tag: str) -> SchemaValidator:
        return SchemaValidator(cls._union((tag,)))

    @classmethod
    def _union(cls, tags: Sequence[str]) -> core_schema.CoreSchema:
        sections = {tag: cls.section(tag) for tag in tags}
        for section in sections.values():
            section.model_rebuild()
        choices = {tag: section.__pydantic_core_schema__ for tag, section in sections.items()}
        return core_schema.tagged_union_schema(choices, cls.tag_of)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(cls._validate)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        return handler(cls._union(cls.tags()))


def sections_in(annotation: Any, *, with_open: bool = False) -> dict[str, type[BaseModel]]:
    """The models that an annotation allows, by the value of their `type` key, else by class name.

    One of a union that takes keys of any name (`extra="allow"`) is left out, unless `with_open`: what it takes is known only to user code.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {tag_of(annotation): annotation}
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0], with_open=with_open)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    if isinstance(annotation, type) and issubclass(annotation, SectionByType):
        members = tuple(map(annotation.section, annotation.tags()))
    if members:
        sections: dict[str, type[BaseModel]] = {}
        for member in members:
            sections |= {
                name: model
                for name, model in sections_in(member).items()
                if with_open or model.model_config.get("extra") != "allow"
            }
        return sections
    return {}


def tag_of(model: type[BaseModel]) -> str:
    """The name of a section that is one of several types: the value of its `type` key, else its class name."""
    kind = model.model_fields.get("type")
    values = get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()
    return str(values[0]) if len(values) == 1 else model.__name__


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key of the schema that has a value of its own."""

    path: KeyPath
    section: type[BaseModel]
    key: FieldInfo
    kind: str = ""
    """The `type` of its section, if that has several types."""

    @property
    def on_resume(self) -> OnResume:
        extra = self.key.json_schema_extra
        return cast("Any", extra).get("on_resume", "fixed") if isinstance(extra, dict) else "fixed"


def leaves(model: type[BaseModel], above: KeyPath = (), kind: str = "") -> Iterator[Leaf]:
    """Every key in the order of the schema; a key that several types of a section share is yielded once for each type.

    A section that may be null is yielded as a key, and its keys are yielded too.
    """
    for name, info in keys_of(model).items():
        inner = sections_in(info.annotation)
        if not inner or NoneType in get_args(info.annotation):
            yield Leaf((*above, name), model, info, kind)
        for tag, section in inner.items():
            yield from leaves(section, (*above, name), tag)


@dataclass(frozen=True, slots=True)
class SchemaLocation:
    """A place in the schema: the location of an error, in terms of the schema instead of pydantic's."""

    path: KeyPath
    """Path within the model, without the labels that pydantic inserts for unions and lists."""
    section: type[BaseModel]
    """The model that has the last key, or should have had it."""
    key: FieldInfo | None
    """None if the section has no such key."""
    variants: Mapping[str, type[BaseModel]]
    """All models that are allowed in place of `section`, as `sections_in` names them."""


def locate(root: type[BaseModel], location: Sequence[int | str]) -> SchemaLocation:
    """The place in a schema that pydantic's error location refers to."""
    variants: Mapping[str, type[BaseModel]] = {"": root}
    result = SchemaLocation((), root, None, variants)
    section = root
    for part in location:
        if part in variants and (len(variants) > 1 or part not in keys_of(section)):
            section = variants[str(part)]
            continue
        if not variants:
            break
        key = keys_of(section).get(str(part))
        result = SchemaLocation((*result.path, str(part)), section, key, variants)
        if key is None:
            break
        variants = sections_in(key.annotation, with_open=True)
        section = next(iter(variants.values()), section)
    return result


def refused_keys(model: type[BaseModel]) -> Mapping[str, str]:
    """The keys that users look for in this model although it does not have them, and why: the class attribute `refused`, as in `Strict`."""
    return cast("Mapping[str, str]", getattr(model, "refused", {}))


def foreign_key(root: type[BaseModel], key: str) -> ForeignKey | None:
    """The entry for a key of another framework or command; None if the name is not known."""
    if not issubclass(root, Strict):
        return None
    foreign_names = root.foreign_keys()
    by_start = (
        foreign
        for name, foreign in foreign_names.items()
        if name.endswith("*") and key.startswith(name[:-1])
    )
    return foreign_names.get(key) or next(by_start, None)


def later_keys(model: type[BaseModel]) -> frozenset[str]:
    """`Strict.not_yet` of a section; empty for other models."""
    return model.not_yet if issubclass(model, Strict) else frozenset()
