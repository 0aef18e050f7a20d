"""Words that change single keys."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import ConfigError
from groupwise.core.settings.overrides import override, parse_override
from groupwise.core.settings.tree import read_yaml, tree_of
from groupwise.core.settings.validation import validate
from tests.unit.core.settings.shapes import Root, problems

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


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rate", "key=value"),
        ("rate=", "rate=null"),
        ("rate= # x", "rate=null"),
        ("+rate=1", "no `+`; write rate=value"),
        ("~rate=1", "no `~`; write rate=value"),
        ("engine.stop.0=a", "engine.stop=[first, second]"),
        ("engine.stop[0]=a", "engine.stop=[first, second]"),
        ("=1", "no key before `=`"),
        ("a..b=1", "`a..b` is not a key"),
        ("title=[a", "override title=[a: the value cannot be read as YAML"),
        ("title=a\nrate: 2", "one override sets one key"),
        ("engine={slots:2}", "engine has no space after the colon of slots; write '{slots: …}'"),
        ("title={a:[1]}", "write a space after each colon"),
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
