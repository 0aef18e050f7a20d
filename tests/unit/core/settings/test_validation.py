"""Messages for everything that can be wrong in a config."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from groupwise.core.errors import ConfigError
from groupwise.core.settings.schema import Conflict, Strict
from groupwise.core.settings.tree import read_yaml
from groupwise.core.settings.validation import validate
from tests.unit.core.settings.shapes import problems, write


def test_all_problems_come_at_once_with_line_path_value_and_what_is_allowed(tmp_path: Path) -> None:
    text = """\
rate: fast
big: 1
engine:
  nam: torch
  slots: 2.5
  stop: [a, 1]
  top_p: 0.9
shape:
  type: circle
  radius: -1
titel: x
"""
    assert problems(text, tmp_path) == [
        "c.yaml: title is required: What it is called.", 'c.yaml:1: rate is "fast"; it must be a number (above 0, at most 1).',
        "c.yaml:2: big is 1; it must be true or false.", "c.yaml:4: engine.nam is not a key; did you mean engine.name?",
        "c.yaml:5: engine.slots is 2.5; it must be a whole number (at least 1) or null.",
        'c.yaml:6: engine.stop is ["a", 1]; it must be a list of texts.', "c.yaml:7: engine.top_p is not in this version.",
        "c.yaml:10: shape.radius is -1; it must be a number (above 0).", "c.yaml:11: titel is not a key; did you mean title?",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [
    ("title: ''", 'title is ""; it must be text (of length at least 1).'),
    ("title: 3", "title is 3; it must be text (of length at least 1)."), ("rate: " + "x" * 500, 'rate is "xxx'),
    ("rate: '1e-5'", "Write it without quotes."), ("rate: null", "rate is null; it must be a number"),
    ("engine:", "engine is null; it must be a section with keys of its own."),
    ("engine: torch", 'engine is "torch"; it must be a section with keys of its own.'),
    ("engine: {name: warp}", "engine.name: warp is not in this version; it must be one of"),
    ("engine: {name: steam}", 'engine.name is "steam"; it must be one of torch, fake.'),
    ("task: 3", "task is 3; it must be a section with keys of its own."), ("lr: 1", "lr is not a key; here it is rate."),
    ("engine: {lr: 1}", "engine.lr is not a key; here it is rate."), ("vllm_mode: x", "vllm_mode is not a key; there is no vllm."),
    ("slots: 1", "slots is not a key; did you mean engine.slots or spare.slots?"),
    ("top_p: 1", "top_p is not a key; engine.top_p would be, but it is not in this version."),
    ("slotz: 1", "slotz is not a key; did you mean spare.slots?"), ("qqq: 1", "qqq is not a key; of the"),
    ("engine: {qqq: 1}", "the keys in engine are: name, stop, slots."), ("api_key: x", "api_key looks like a secret"),
    ("shape: {type: circel}", "it must be one of circle, square; did you mean circle?"),
    ("shape: {radius: 2}", "shape.type is required; it must be one of circle, square."),
    ("shape: circle", 'shape is "circle"; it must be a section with keys of its own.'),
    ("shape: {type: circle, side_length: 1}", "type circle; it is a key of square."),
    ("shape: {type: square, sidelength: 1}", "did you mean shape.side_length (of square)?"),
])  # fmt: skip
def test_each_mistake_in_a_config_has_its_message(tmp_path: Path, text: str, message: str) -> None:
    title = "" if text.startswith("title") else "title: a\n"
    (found,) = problems(f"{title}{text}\n", tmp_path)
    assert message in found
    assert len(found) < 200, "long values are cut"


class Words(BaseModel):
    """A schema as a task's author writes it: neither strict nor closed."""

    count: int = Field(default=3, ge=1)
    language: str

    def model_post_init(self, context: Any) -> None:
        if self.language == "xx":
            raise ValueError("there is no language xx")


def test_a_schema_that_is_not_ours_is_explained_the_same_way(tmp_path: Path) -> None:
    path = write(tmp_path, "title: a\ntask:\n  count: 0\n  langage: en\n")
    with pytest.raises(ConfigError) as caught:
        validate(Words, read_yaml(path), at=("task",))
    assert str(caught.value).replace(f"{tmp_path}/", "").split("\n") == [
        "c.yaml:2: task.language is required.",
        "c.yaml:3: task.count is 0; it must be a whole number (at least 1).",
        "c.yaml:4: task.langage is not a key; did you mean task.language?",
    ]


def test_keys_that_do_not_go_together_are_reported_also_in_a_list_of_sections(
    tmp_path: Path,
) -> None:
    class Span(Strict):
        low: int = 0
        high: int = 1

        def conflicts(self) -> Iterator[Conflict]:
            if self.low >= self.high:
                yield Conflict(f"{self.low} is not below {self.high}.", ("low", "high"))

    class Config(Strict):
        spans: tuple[Span, ...] = ()

    text = "spans:\n  - {low: 0}\n  - {low: 3}\n"
    assert problems(text, tmp_path, model=Config) == ["c.yaml:1: spans: 3 is not below 1."]


def test_many_problems_are_reported_in_part_and_counted(tmp_path: Path) -> None:
    """Advice for one takes milliseconds, and a request may have a hundred thousand."""
    told = problems("title: x\n" + "".join(f"unknown_{n}: 1\n" for n in range(4000)), tmp_path)
    assert len(told) == 51
    assert "c.yaml: 3,950 more keys or values are wrong." in told
