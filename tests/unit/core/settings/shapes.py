"""A small schema of its own for the tests of the settings, and what the validation says of a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, Field

from groupwise.core.errors import ConfigError
from groupwise.core.settings.overrides import override
from groupwise.core.settings.schema import ForeignKey, Strict, setting
from groupwise.core.settings.tree import read_yaml
from groupwise.core.settings.validation import validate


class Engine(Strict):
    not_yet: ClassVar[frozenset[str]] = frozenset({"top_p", "name=warp"})

    name: Literal["torch", "fake"] = setting("torch", "What samples.")
    stop: tuple[str, ...] = setting((), "Texts that end a completion.")
    slots: int | None = setting(None, "Rows decoded together.", on_resume="warn", ge=1)


class Circle(Strict):
    type: Literal["circle"] = setting("circle", "The shape.")
    radius: float = setting(1.0, "In metres.", gt=0)


class Square(Strict):
    type: Literal["square"] = setting("square", "The shape.")
    side_length: float = setting(1.0, "In metres.", gt=0)


class Root(Strict):
    title: str = setting(..., "What it is called.", min_length=1)
    rate: float = setting(1e-5, "Step size | peak.", gt=0, le=1, on_resume="free")
    big: bool = setting(False, "Whether it is big.")
    engine: Engine = Engine()
    spare: Engine | None = setting(None, "A second engine; null: none.")
    shape: Annotated[Circle | Square, Field(discriminator="type")] = Circle()
    task: dict[str, Any] = setting({}, "Free.")

    @classmethod
    def foreign_keys(cls) -> Mapping[str, ForeignKey]:
        return {
            "lr": ForeignKey("renamed", "here it is rate"),
            "vllm_*": ForeignKey("other", "there is no vllm"),
        }


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(text: str, folder: Path, *words: str, model: type[BaseModel] = Root) -> list[str]:
    """The messages for a file, its folder cut off."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        validate(model, override(read_yaml(path), words))
    return str(caught.value).replace(f"{folder}/", "").split("\n")
