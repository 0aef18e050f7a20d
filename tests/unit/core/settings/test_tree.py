"""The reader of YAML files."""

from pathlib import Path

import pytest

from groupwise.core.errors import ConfigError
from groupwise.core.settings.tree import read_yaml
from tests.unit.core.settings.shapes import problems, write


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
base: &b {x: 0x10}
sub:
  <<: *b
  y: 2
"""
    values = read_yaml(write(tmp_path, text)).values
    assert values == {
        "rate": 1e-5, "lang": "no", "clock": "12:30", "octal": 10, "day": "2026-01-02", "hex": 31, "flag": True, "nothing": None,
        "quoted": "1", "block": "two\nlines\n", "nested": {"a": [1, 2.5, "x", None]}, "base": {"x": 16}, "sub": {"x": 16, "y": 2},
    }  # fmt: skip
    kinds = [float, str, str, int, str, int, bool, type(None), str, str, dict, dict, dict]
    assert [type(value) for value in values.values()] == kinds


def test_duplicate_keys_name_the_line_and_hide_the_value(tmp_path: Path) -> None:
    path = write(tmp_path, "title: a\nengine:\n  name: torch\n  slots: 1\n  name: s3cret\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:5: `name` .*twice") as caught:
        read_yaml(path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", r'holds \["a", "b"\]'),
        ("title: [1, 2\n", r"c\.yaml:\d: "),
        ("a: 1\n---\nb: 2\n", r"c\.yaml:2: "),
        ("a: *nowhere\n", r"c\.yaml:1: "),
        ("\udcff\udcfe\0", "UTF-8"),
        (f"a: {'9' * 5_000}", "of the kind"),
        ('a: !!int "abc"', "of the kind"),
        ('a: !!float ""', "of the kind"),
        ('a: !!bool "abc"', "of the kind"),
        ('a: "\\U00110000"', "of the kind"),
        (f"a: {'[' * 5_000}", "nested more"),
        (f"# {']' * 5_000}\na: {'[' * 5_000}", "nested more"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(("text", "message"), [
    ("a: " + "[" * 5000 + "]" * 5000, "nested more than 100 deep"),
    ("a: " + "{b: " * 120 + "1" + "}" * 120, "nested more than 100 deep"),
    ("a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)), "more than 100,000 values"),
])  # fmt: skip
def test_files_that_grow_when_they_are_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "large.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(tmp_path / "large.yaml")


def test_missing_file_names_the_nearest_and_all_there_are(tmp_path: Path) -> None:
    write(tmp_path, "a: 1", "wordle.yaml")
    write(tmp_path, "a: 1", "math.yaml")
    for name, told in (
        ("wordl.yaml", f"{tmp_path}/wordle.yaml.*math.yaml, wordle.yaml"),
        (".", "is a folder"),
        ("none/x.yaml", "no folder"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_yaml(tmp_path / name)


def test_values_that_json_cannot_hold_are_reported_with_their_line(tmp_path: Path) -> None:
    text = "title: a\ntask:\n  a: .nan\n  b: !odd x\n  c: {1: one}\n  d: !!binary aGk=\n"
    assert problems(text, tmp_path) == [
        "c.yaml:3: task.a is nan; it must be a finite number.",
        "c.yaml:4: task.b carries the YAML tag !odd; use plain values.",
        'c.yaml:5: task.c.1 has a key that is not text; write "1": with quotes.',
        "c.yaml:6: task.d is b'hi', which a config cannot hold (bytes).",
    ]
