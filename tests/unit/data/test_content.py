"""The content of odd values: equal for equal ones, different for different ones, and honest about the rest."""

import datetime as dt
import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from pydantic import BaseModel

from groupwise.data import examples
from groupwise.data.content import canonical, untold
from groupwise.data.examples import fingerprint
from groupwise.types import Example


class Colour(Enum):
    RED = 1
    BLUE = 2


class Level(IntEnum):
    LOW = 1


@dataclass
class Board:
    cells: list[str]
    solver: Any = field(default=None, repr=False)


class Clue(BaseModel):
    text: str


class Bare:
    def __init__(self, content: int) -> None:
        self.content = content


class Told(Bare):
    def __repr__(self) -> str:
        return f"Told({self.content})"


class Abridged(Bare):
    def __repr__(self) -> str:
        return "Abridged(1, 2, ...)"


DIFFERENT = [
    None,
    True,
    1.5,
    "a",
    "1",
    ["a"],
    {"a": 1},
    {"a": 2},
    b"a",
    b"b",
    {"a"},
    {"b"},
    {1},
    Colour.RED,
    Colour.BLUE,
    Level.LOW,
    Board(["x"]),
    Board(["y"]),
    Board(["x"], solver="z"),
    Clue(text="a"),
    Clue(text="b"),
    Told(1),
    Told(2),
    dt.date(2020, 1, 2),
    dt.datetime(2020, 1, 2),
    dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    dt.time(1),
    dt.timedelta(1),
    Decimal("1.5"),
    Decimal("1.50"),
    Fraction(1, 3),
    1j,
    range(3),
    UUID(int=1),
    PurePosixPath("a"),
    PurePosixPath("b"),
    np.array([1, 2]),
    np.array([1, 3]),
    np.array([{"a"}], dtype=object),
    SimpleNamespace(a=1),
    SimpleNamespace(a=2),
]


def test_different_values_are_told_apart():
    told = [json.dumps(canonical(value)) for value in DIFFERENT]
    assert len(set(told)) == len(told)
    assert not [what for value in DIFFERENT for what in untold(canonical(value))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"b", "a", "c"}, frozenset({"c", "a", "b"})),
        ((1, 2), [1, 2]),
        (np.array([1, 2]), [1, 2]),
        (np.float32(0.5), 0.5),
        (bytearray(b"a"), memoryview(b"a")),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        (Board(["x"]), Board(["x"])),
    ],
)
def test_equal_values_are_told_alike(one, other):
    assert canonical(one) == canonical(other)


def test_it_is_the_same_in_every_process():
    """Hashes of text, and so the order of sets, differ between processes."""
    code = (
        "import json; from groupwise.data.content import canonical\n"
        "print(json.dumps(canonical([{'a', 'b', 'c', ('d', 1)}, b'x', 2j])))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {json.dumps(canonical([{"a", "b", "c", ("d", 1)}, b"x", 2j])) + "\n"}


def test_pictures_are_told_by_their_pixels(monkeypatch):
    class Image:
        mode, size = "L", (1, 1)

        def __init__(self, pixel: bytes) -> None:
            self.pixel = pixel

        def tobytes(self) -> bytes:
            return self.pixel

        def getpalette(self) -> None:
            return None

    monkeypatch.setitem(sys.modules, "PIL.Image", SimpleNamespace(Image=Image))
    assert canonical(Image(b"a")) == canonical(Image(b"a")) != canonical(Image(b"b"))
    assert not list(untold(canonical(Image(b"a"))))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Bare(1), "objects of test_content.Bare"),
        (Abridged(1), "objects of test_content.Abridged"),
        (threading.Lock(), "objects of _thread.lock"),
        (Bare, "test_content.Bare"),
        (fingerprint, "groupwise.data.examples.fingerprint"),
    ],
)
def test_what_cannot_be_told_is_warned_of_once_and_stable(caplog, value, what):
    examples._warn_of_untold.cache_clear()
    rows = [Example(n, "a", {"deep": [{"x": value}], "plain": {"untold": 1}}) for n in range(3)]
    assert fingerprint(rows) == fingerprint(rows)
    (warning,) = caplog.messages
    assert warning.startswith("column `deep` holds ")
    assert f"{what}, whose content cannot be told" in warning.replace("tests.unit.data.", "")


def test_plain_data_keep_the_fingerprint_that_recorded_runs_have():
    rows = [
        Example(0, "a", {"s": "b", "i": 1, "f": 0.5, "l": [None, True], "d": {"x": {"y": "z"}}})
    ]
    chat = Example(1, [{"role": "user", "content": "hi"}], {})
    assert (
        fingerprint([*rows, chat])
        == "d60fa85bf4460159ff0db68ae005224062bb4a664d9983a838922913e62952a9"
    )
