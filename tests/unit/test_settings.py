"""The reader, the overrides, the messages, the view and the comparison, on small schemas of their own."""

import copy
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from groupwise.errors import ConfigError
from groupwise.settings import (
    Strict,
    View,
    compare,
    document,
    leaves,
    override,
    parse_override,
    read_yaml,
    setting,
    tree_of,
    validate,
)


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
    foreign: ClassVar[Mapping[str, str]] = {"lr": "here it is rate", "vllm_*": "there is no vllm"}

    title: str = setting(..., "What it is called.", min_length=1)
    rate: float = setting(1e-5, "Step size | peak.", gt=0, le=1, on_resume="free")
    big: bool = setting(False, "Whether it is big.")
    engine: Engine = Engine()
    spare: Engine | None = setting(None, "A second engine; null: none.")
    shape: Annotated[Circle | Square, Field(discriminator="type")] = Circle()
    task: dict[str, Any] = setting({}, "Free.")


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


# --- the reader


def test_yaml_1_2_types(tmp_path: Path) -> None:
    text = """
rate: 1e-5
lang: no
clock: 12:30
octal: 010
day: 2026-01-02
hex: 0x1F
flag: &anchor true
nothing: ~
quoted: "1"
block: |
  two
  lines
nested: {a: [1, 2.5, x, null]}
"""
    assert read_yaml(write(tmp_path, text)).values == {
        "rate": 1e-5,
        "lang": "no",
        "clock": "12:30",
        "octal": 10,
        "day": "2026-01-02",
        "hex": 31,
        "flag": True,
        "nothing": None,
        "quoted": "1",
        "block": "two\nlines\n",
        "nested": {"a": [1, 2.5, "x", None]},
    }


def test_values_are_plain_python(tmp_path: Path) -> None:
    values = read_yaml(write(tmp_path, "a: &x 0x10\nb: 1e-5\nc: &t true\nd: 'q'\ne: [1]\n")).values
    assert [type(value) for value in values.values()] == [int, float, bool, str, list]


def test_merge_keys_and_anchors_are_resolved(tmp_path: Path) -> None:
    tree = read_yaml(write(tmp_path, "base: &b {x: 1}\nsub:\n  <<: *b\n  y: 2\n"))
    assert tree.values["sub"] == {"x": 1, "y": 2}


def test_duplicate_keys_name_the_line_and_hide_the_value(tmp_path: Path) -> None:
    path = write(tmp_path, "title: a\nengine:\n  name: torch\n  slots: 1\n  name: s3cret\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:5: `name` is written twice") as caught:
        read_yaml(path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", r'holds \["a", "b"\]; a config is a mapping'),
        ("title: [1, 2\n", r"c\.yaml:\d: cannot be read as YAML"),
        ("a: 1\n---\nb: 2\n", r"c\.yaml:2: cannot be read as YAML"),
        ("a: *nowhere\n", r"c\.yaml:1: cannot be read as YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(write(tmp_path, text))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        read_yaml(tmp_path / "c.yaml")


def test_missing_file_names_the_nearest_and_all_there_are(tmp_path: Path) -> None:
    write(tmp_path, "a: 1", "wordle.yaml")
    write(tmp_path, "a: 1", "math.yaml")
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "wordl.yaml")
    assert f"Did you mean {tmp_path}/wordle.yaml?" in str(caught.value)
    assert "holds: math.yaml, wordle.yaml." in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder, not a config file; there are no .yaml files"),
        ("x.yaml", "There is no file .*; there are no .yaml files in"),
        ("none/x.yaml", "There is no file .*, and no folder .*none either"),
    ],
)
def test_missing_files_and_folders(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / name)


def test_what_json_cannot_hold_is_told_with_its_line(tmp_path: Path) -> None:
    text = "title: a\ntask:\n  a: .nan\n  b: !odd x\n  c: {1: one}\n  d: !!binary aGk=\n"
    assert problems(text, tmp_path) == [
        "c.yaml:3: task.a is nan; it must be a finite number.",
        "c.yaml:4: task.b carries the YAML tag !odd; use plain values.",
        'c.yaml:5: task.c.1 has a key that is not text; write "1": with quotes.',
        "c.yaml:6: task.d is b'hi', which a config cannot hold (bytes).",
    ]


# --- overrides

SCALARS = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.sampled_from(["1e-5", "yes", "true", "null", "~", "010", "0x1f", "1_000", "12:30", ".5"]),
    st.sampled_from(["2026-01-02", "[a, 1, null]", "{a: 1, b: [2]}", "'1'", '"x # y"', "a #b"]),
    st.sampled_from(["a: b", "- a", "{", "[1", "@x", "%y", "*z", "!t x", "#c", "a=b", "|", "''"]),
    st.text(alphabet="abc01.-+e:,#'\"[]{} ", min_size=1, max_size=8),
)


@given(text=SCALARS)
def test_an_override_is_typed_as_in_a_file(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "typed.yaml"
    path.write_text(f"k: {text}\n")
    expected: Any = None
    try:
        tree = read_yaml(path)
        expected = tree.values["k"]
        readable = not tree.problems and (expected is not None or text.strip()[:1] in ("n", "~"))
    except ConfigError:
        readable = False
    if not readable:
        with pytest.raises(ConfigError):
            parse_override(f"k={text}")
        return
    value = parse_override(f"k={text}")[1]
    assert (type(value), value) == (type(expected), expected)


def test_overrides_set_values_and_the_last_one_wins() -> None:
    tree = tree_of({"title": "a", "engine": {"slots": 1}, "spare": None})
    words = ["rate=1e-3", "engine.slots=2", "rate=1e-4", "spare.slots=3", "task.my-key.deep=[x, 1]"]
    root = validate(Root, override(tree, words))
    assert root.rate == 1e-4
    assert root.engine.slots == 2
    assert root.spare is not None
    assert root.spare.slots == 3
    assert root.task == {"my-key": {"deep": ["x", 1]}}
    assert tree.values == {"title": "a", "engine": {"slots": 1}, "spare": None}


def test_an_override_splits_at_the_first_equals_sign() -> None:
    assert parse_override("task.rule=a=b") == (("task", "rule"), "a=b")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rate", "override rate: write it as key=value, for example training.seed=1."),
        ("rate=", "override rate=: nothing is given after `=`; write rate=null for no value."),
        ("rate= # x", "override rate= # x: nothing is given after `=`; write rate=null"),
        ("+rate=1", "override +rate=…: keys take no `+`; write rate=value."),
        ("~rate=1", "override ~rate=…: keys take no `~`; write rate=value."),
        ("engine.stop.0=a", "a list is given whole, engine.stop=[first, second]"),
        ("engine.stop[0]=a", "a list is given whole, engine.stop=[first, second]"),
        ("=1", "override =…: there is no key before `=`"),
        ("a..b=1", "override a..b=…: `a..b` is not a key; keys are words joined by dots."),
        ("title=[a", "override title=[a: the value cannot be read as YAML"),
        ("title=a\nrate: 2", "one override sets one key"),
        ("title.x=1", 'override title.x=1: title is "a", which has no keys inside.'),
    ],
)
def test_overrides_that_cannot_be(word: str, message: str) -> None:
    tree = override(tree_of({"title": "a"}), [word])
    with pytest.raises(ConfigError) as caught:
        validate(Root, tree)
    assert message in str(caught.value)


def test_messages_about_an_override_name_it_instead_of_the_file(tmp_path: Path) -> None:
    found = problems("title: a\nrate: 0.5\n", tmp_path, "rate=2", "engine.slot=1", "big=yes")
    assert found == [
        "override rate=2: rate is 2; it must be a number (above 0, at most 1).",
        'override big=yes: big is "yes"; it must be true or false.',
        "override engine.slot=1: engine.slot is not a key; did you mean engine.slots?",
    ]


# --- messages


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
        "c.yaml: title is required: What it is called.",
        'c.yaml:1: rate is "fast"; it must be a number (above 0, at most 1).',
        "c.yaml:2: big is 1; it must be true or false.",
        "c.yaml:4: engine.nam is not a key; did you mean engine.name?",
        "c.yaml:5: engine.slots is 2.5; it must be a whole number (at least 1) or null.",
        'c.yaml:6: engine.stop is ["a", 1]; it must be a list of texts.',
        "c.yaml:7: engine.top_p is not in this version.",
        "c.yaml:10: shape.radius is -1; it must be a number (above 0).",
        "c.yaml:11: titel is not a key; did you mean title?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: ''", 'title is ""; it must be text (of length at least 1).'),
        ("title: 3", "title is 3; it must be text (of length at least 1)."),
        ("rate: '1e-5'", "Write it without quotes."),
        ("rate: null", "rate is null; it must be a number"),
        ("engine:", "engine is null; it must be a section with keys of its own."),
        ("engine: torch", 'engine is "torch"; it must be a section with keys of its own.'),
        ("engine: {name: warp}", "engine.name: warp is not in this version; it must be one of"),
        ("engine: {name: steam}", 'engine.name is "steam"; it must be one of torch, fake.'),
        ("task: 3", "task is 3; it must be a section with keys of its own."),
        ("lr: 1", "lr is not a key; here it is rate."),
        ("engine: {lr: 1}", "engine.lr is not a key; here it is rate."),
        ("vllm_mode: x", "vllm_mode is not a key; there is no vllm."),
        ("slots: 1", "slots is not a key; did you mean engine.slots or spare.slots?"),
        ("top_p: 1", "top_p is not a key; engine.top_p would be, but it is not in this version."),
        ("slotz: 1", "slotz is not a key; did you mean spare.slots?"),
        ("qqq: 1", "qqq is not a key; the keys at the top are: title, rate, big, engine, spare,"),
        ("engine: {qqq: 1}", "the keys in engine are: name, stop, slots."),
        ("api_key: x", "api_key looks like a secret"),
        ("shape: {type: circel}", "it must be one of circle, square; did you mean circle?"),
        ("shape: {radius: 2}", "shape.type is required; it must be one of circle, square."),
        ("shape: circle", 'shape is "circle"; it must be a section with keys of its own.'),
        (
            "shape: {type: circle, side_length: 1}",
            "shape.side_length is not a key of shape type circle; it is a key of square.",
        ),
        (
            "shape: {type: square, sidelength: 1}",
            "not a key of shape type square; did you mean shape.side_length (of square)?",
        ),
    ],
)
def test_what_each_mistake_is_told(tmp_path: Path, text: str, message: str) -> None:
    title = "" if text.startswith("title") else "title: a\n"
    (found,) = problems(f"{title}{text}\n", tmp_path)
    assert message in found


def test_long_values_are_cut(tmp_path: Path) -> None:
    (found,) = problems(f"title: a\nrate: {'x' * 500}\n", tmp_path)
    assert len(found) < 150


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


# --- the schema as a list


def test_leaves_carry_path_kind_and_class() -> None:
    found = {(".".join(leaf.path), leaf.kind): leaf.on_resume for leaf in leaves(Root)}
    assert found["rate", ""] == "free"
    assert found["engine.slots", "Engine"] == "warn"
    assert found["shape.radius", "circle"] == "fixed"
    assert found["spare", ""] == "fixed"
    assert ("engine", "") not in found


def test_document_tells_every_key() -> None:
    lines = document(Root).splitlines()
    assert lines[0] == "| key | value | default | meaning | on resume |"
    assert (
        "| `title` | text (of length at least 1) | `required` | What it is called. | fixed |"
        in lines
    )
    assert (
        r"| `rate` | a number (above 0, at most 1) | `1e-05` | Step size \| peak. | free |" in lines
    )
    assert "| `shape.type` | one of circle, square | `circle` | The shape. | fixed |" in lines
    assert (
        "| `shape.radius` | a number (above 0) | `1.0` | In metres. Only for circle. | fixed |"
        in lines
    )
    assert len({line.split("|")[1] for line in lines}) == len(lines)


def test_json_schema_has_descriptions_and_resume_classes() -> None:
    schema = json.loads(json.dumps(Root.model_json_schema()))
    assert schema["properties"]["rate"]["description"] == "Step size | peak."
    assert schema["properties"]["rate"]["on_resume"] == "free"
    assert schema["additionalProperties"] is False


# --- comparing


def plain(**changes: Any) -> dict[str, Any]:
    return {**Root(title="a").model_dump(mode="json"), **changes}


def test_compare_sorts_changes_by_what_a_resume_does() -> None:
    new = plain(rate=0.5, title="b", engine={"name": "fake", "stop": [], "slots": 4})
    found = compare(plain(), new, Root)
    assert found.free == {"rate": (1e-5, 0.5)}
    assert found.warned == {"engine.slots": (None, 4)}
    assert found.fixed == {"title": ("a", "b"), "engine.name": ("torch", "fake")}


def test_compare_finds_nothing_in_equal_configs() -> None:
    found = compare(plain(), plain(), Root)
    assert (found.free, found.warned, found.fixed) == ({}, {}, {})


def test_compare_takes_the_default_for_a_key_that_the_old_config_did_not_have() -> None:
    old = plain()
    del old["rate"], old["engine"]
    assert compare(old, plain(), Root).free == {}
    assert compare(old, plain(rate=0.5), Root).free == {"rate": (1e-5, 0.5)}
    assert compare(old, plain(engine={"slots": 2}), Root).warned == {"engine.slots": (None, 2)}


def test_compare_sees_sections_that_come_and_go_and_keys_inside_free_ones() -> None:
    whole = {"name": "torch", "stop": [], "slots": None}
    assert compare(plain(), plain(spare=whole), Root).fixed == {"spare": (None, whole)}
    assert compare(plain(spare=whole), plain(), Root).fixed == {"spare": (whole, None)}
    changed = compare(plain(task={"a": {"b": 1}}), plain(task={"a": {"b": 2}, "c": 3}), Root)
    assert changed.fixed == {"task.a.b": (1, 2), "task.c": (None, 3)}


# --- the view

CONTENT: dict[str, Any] = {
    "task": {"words": 3, "langs": ["en", {"x": 1}]},
    "lora": None,
    "items": 7,
}


def test_a_view_reads_as_mapping_and_by_attribute() -> None:
    view = View(CONTENT)
    assert view["task"]["words"] == view.task.words == 3
    assert view.task.get("absent", 5) == 5
    assert "task" in view
    assert "words" not in view
    assert list(view) == ["task", "lora", "items"]
    assert len(view) == 3
    assert view["items"] == 7
    assert view.lora is None
    assert view.task.langs[1].x == 1
    assert {**view.task} == {"words": 3, "langs": ["en", {"x": 1}]}
    assert "words" in dir(view.task)


def test_a_view_equals_its_dict_and_shows_it() -> None:
    assert View(CONTENT) == CONTENT
    assert View(CONTENT) == View(CONTENT)
    assert View(CONTENT).task != {"words": 4}
    assert View(CONTENT) != 3
    assert repr(View({"a": [1]})) == "View({'a': [1]})"
    assert json.loads(json.dumps(View(CONTENT).to_dict())) == CONTENT


def test_a_view_cannot_be_changed_even_through_what_it_gives_out() -> None:
    original = copy.deepcopy(CONTENT)
    view: Any = View(original)
    with pytest.raises(AttributeError, match="config can only be read; task cannot be set"):
        view.task = 1
    with pytest.raises(AttributeError, match=r"config\.task can only be read"):
        del view["task"].words
    with pytest.raises(TypeError):
        view["task"] = 1
    view["task"].langs.append("de")
    view.to_dict()["task"]["words"] = 9
    original["task"]["words"] = 8
    assert view == CONTENT


def test_a_missing_name_is_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"config\.task has no `word`\. Did you mean words\?"):
        _ = View(CONTENT).task.word
    with pytest.raises(KeyError, match=r"config has no `zzz`\. It has: task, lora, items\."):
        _ = View(CONTENT)["zzz"]
    assert not hasattr(View(CONTENT), "__array__")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_view_can_be_pickled_and_copied(protocol: int) -> None:
    view = View(CONTENT)
    assert pickle.loads(pickle.dumps(view, protocol)) == CONTENT
    assert copy.deepcopy(view).task.words == 3
    with pytest.raises(AttributeError, match=r"config\.task has no"):
        _ = pickle.loads(pickle.dumps(view.task, protocol)).zzz
