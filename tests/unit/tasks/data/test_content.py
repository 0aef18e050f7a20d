"""The digest of unusual values: equal for equal ones, different for different ones; values that cannot be compared are reported."""

import datetime as dt
import json
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel

from groupwise.core.plugins import load
from groupwise.core.types import Example
from groupwise.tasks.data import examples
from groupwise.tasks.data.content import canonical, unsupported_parts
from groupwise.tasks.data.examples import fingerprint


class Colour(Enum):
    RED = 1
    BLUE = 2


class Level(IntEnum):
    LOW = 1


@dataclass
class Board:
    cells: list[str]
    solver: Any = field(default=None, repr=False)


class Point(NamedTuple):
    x: int
    y: int


class Clue(BaseModel):
    text: str


class Bare:
    def __init__(self, content: int) -> None:
        self.content = content


class Talkative(Bare):
    """Its own words would follow the order of a set."""

    def __repr__(self) -> str:
        return f"Talkative({self.content})"


class Mute(Bare):
    def __repr__(self) -> str:
        raise RuntimeError("nothing to say")


class Shut(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("not now")


class Bag(BaseModel):
    """A model that redefines what `dict` takes of it."""

    entries: list[str]

    def __iter__(self) -> Any:
        return iter(self.entries)


class Attributed:
    """What the decorator of attrs leaves in a class."""

    __attrs_attrs__ = (SimpleNamespace(name="x"),)

    def __init__(self, x: object) -> None:
        self.x, self.cache = x, object()


@dataclass(eq=False)
class Node:
    name: str
    parent: Any = None
    children: list[Any] = field(default_factory=list[Any])
    later: str = field(init=False)


def family() -> Node:
    root = Node("root")
    root.children = [Node("a", root), Node("b", root)]
    return root


def loop() -> list[Any]:
    entries: list[Any] = [1]
    entries.append(entries)
    return entries


def nested(levels: int) -> list[Any]:
    entries: list[Any] = []
    for _ in range(levels - 1):
        entries = [entries]
    return entries


DIFFERENT = [
    None, True, 1.5, "a", "1", ["a"], {"a": 1}, {"a": 2}, b"a", b"b", {"a"}, {"b"}, {1}, Colour.RED,
    Colour.BLUE, Level.LOW, Board(["x"]), Board(["y"]), Board(["x"], solver="z"), Clue(text="a"),
    Clue(text="b"), Bag(entries=["a"]), Bag(entries=["b"]), Attributed(1), Attributed({"a"}),
    Node("a"), family(), family().children[0], loop(), [[1]], {1: "a"}, {"1": "a"},
    {frozenset({"a", "b"}): 1}, {("a", "b"): 1}, re.compile("a" * 300 + "b"),
    re.compile("a" * 300 + "c"), re.compile("a" * 300 + "b", re.IGNORECASE), deque([1, 2]),
    deque([1, 2], maxlen=2), 10**5000, 10**5000 + 1, nested(100), pd.Timestamp("2020-01-01"),
    pd.Timestamp("2020-01-01") + pd.Timedelta(1, "ns"),
    pd.Timestamp("2020-01-01", tz="Europe/Berlin"), pd.Timedelta(1, "ns"), pd.Timedelta(2, "ns"),
    pd.NaT, pd.NA, dt.datetime(2020, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")),
    dt.datetime(2020, 1, 2, tzinfo=ZoneInfo("Europe/Rome")), dt.datetime(2020, 1, 2, fold=1),
    dt.date(2020, 1, 2), dt.datetime(2020, 1, 2), dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    dt.time(1), dt.timedelta(1), Decimal("1.5"), Decimal("1.50"), Fraction(1, 3), 1j, range(3),
    UUID(int=1), PurePosixPath("a"), PurePosixPath("b"), np.array([1, 2]), np.array([1, 3]),
    np.array([{"a"}], dtype=object), SimpleNamespace(a=1), SimpleNamespace(a=2),
]  # fmt: skip


def test_different_values_are_distinguished():
    shared = [Node("a")] * 20_000
    assert not list(unsupported_parts(canonical([*shared, Colour.RED]))), (
        "many references are allowed"
    )
    told = [json.dumps(canonical(value)) for value in DIFFERENT]
    assert len(set(told)) == len(told)
    assert not [what for value in DIFFERENT for what in unsupported_parts(canonical(value))]


@pytest.mark.parametrize(("one", "other"), [
    ({"b", "a", "c"}, frozenset({"c", "a", "b"})), ((1, 2), [1, 2]), (np.array([1, 2]), [1, 2]),
    (np.float32(0.5), 0.5), (bytearray(b"a"), memoryview(b"a")),
    ({"b": 1, "a": 2}, {"a": 2, "b": 1}), (Board(["x"]), Board(["x"])), (family(), family()),
    (loop(), loop()), (Attributed(1), Attributed(1)), (Point(1, 2), (1, 2)),
    ([(node := Node("a")), node], [Node("a"), Node("a")]),
])  # fmt: skip
def test_equal_values_are_told_alike(one, other):
    assert canonical(one) == canonical(other)


def test_the_canonical_form_does_not_depend_on_hash_seeds():
    """Hashes of text, and so the order of sets, differ between processes; so do addresses."""
    values = (
        "words = {'a', 'b', 'c', ('d', 1)}\n"
        "class Own:\n"
        "    def __repr__(self): return f'Own({words})'\n"
        "held = SimpleNamespace(words=words)\n"
        "held.lines = {frozenset(words): held, Own: deque([words])}\n"
        "values = [words, b'x', 2j, held, Own(), {Own(), 'a', 1}, dict.fromkeys([frozenset('abc'), 'z', 1], held)]\n"
    )
    code = (
        "import json, sys; from collections import deque; from types import SimpleNamespace\n"
        f"from groupwise.tasks.data.content import canonical\n{values}"
        "print(list(words), json.dumps(canonical(values)), sep='\\n')"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "7")
    ]
    assert said[0][0] != said[1][0], "the seeds give the set one order, so this shows nothing"
    assert said[0][1] == said[1][1]


@pytest.mark.parametrize(("value", "what"), [
    (Bare(1), "objects of test_content.Bare"), (Talkative(1), "objects of test_content.Talkative"),
    (Mute(1), "objects of test_content.Mute"), (Shut(a=1), "objects of test_content.Shut"), ({Mute(1)}, "objects of test_content.Mute"),
    ({Mute(1): 1}, "objects of test_content.Mute"), (nested(200), "something nested more than 100 levels deep"),
    (threading.Lock(), "objects of _thread.lock"), (Bare, "test_content.Bare"), (fingerprint, "groupwise.tasks.data.examples.fingerprint"),
])  # fmt: skip
def test_values_without_a_stable_fingerprint_are_warned_of_once(caplog, value, what):
    examples._warn_of_untold.cache_clear()
    rows = [Example(n, "a", {"deep": [{"x": value}], "plain": {"untold": 1}}) for n in range(2)]
    assert fingerprint(rows) == fingerprint(rows)
    (warning,) = caplog.messages
    assert warning.startswith("column `deep` holds ")
    assert f"{what}, whose content cannot be told" in warning.replace("tests.unit.tasks.data.", "")


def test_a_prompt_without_a_stable_fingerprint_is_warned_of(caplog):
    examples._warn_of_untold.cache_clear()
    fingerprint([Example(0, [{"role": "user", "content": "a", "tools": Bare(1)}], {})])
    assert [message.partition(" holds ")[0] for message in caplog.messages] == ["column `prompt`"]


def test_plain_data_keep_the_fingerprint_that_recorded_runs_have():
    columns = {"s": "b", "i": 1, "f": 0.5, "l": [None, True], "d": {"x": {"y": "z"}}}
    found = fingerprint(
        [Example(0, "a", columns), Example(1, [{"role": "user", "content": "hi"}], {})]
    )
    assert found == "d60fa85bf4460159ff0db68ae005224062bb4a664d9983a838922913e62952a9"


def test_a_task_file_may_be_moved(tmp_path):
    told: list[Any] = []
    for folder in ("here", "there"):
        file = tmp_path / folder / "task.py"
        file.parent.mkdir()
        file.write_text(
            "from enum import Enum\nclass Kind(Enum):\n    A = 1\nclass Bare: pass\nVALUES = [Kind.A, Bare()]\n"
        )
        told.append(canonical(load(f"{file}:VALUES").object))
    assert told[0] == told[1]
