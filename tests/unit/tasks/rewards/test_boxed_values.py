"""Values that cross between two sandboxes arrive as built-in values or as a number; nothing else is trusted."""

import collections
import datetime
import json
import math
import operator
import socket
from contextlib import closing
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.tasks.rewards.boxed_values import (
    MAX_MESSAGE,
    ConnectionLost,
    Errors,
    MessageSocket,
    NotPlainError,
    ObjectTable,
    written_error,
)

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.fractions()
PLAIN = st.recursive(
    KEYS
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9)),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(collections.deque)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
        | st.binary().map(bytearray)
    ),
    max_leaves=10,
)


def ledger() -> ObjectTable:
    return ObjectTable(stays=lambda value: True, stand_in=lambda number: Strange())


class Strange:
    """No plain value."""


def over(
    value, sender: ObjectTable | None = None, receiver: ObjectTable | None = None, *, shown=False
):
    told = json.loads(json.dumps((sender or ledger()).to_json(value, shown=shown)))
    return (receiver or ledger()).read(told)


@settings(max_examples=60)
@given(PLAIN)
def test_plain_values_arrive_as_they_are(value):
    for shown in (False, True):
        arrived = over(value, shown=shown)
        assert arrived == value
        assert type(arrived) is type(value)


def test_numbers_arrive_to_the_bit_and_what_both_sides_have_goes_by_name():
    assert math.isnan(over(math.nan))
    assert math.copysign(1, over(-0.0)) == -1
    for value in (math.inf, 0.1 + 0.2, 5e-324, Fraction(1, 3**200), datetime.timedelta.max):
        assert over(value) == value
    assert over(Decimal("0.10")).as_tuple() == Decimal("0.10").as_tuple()
    assert over([len, int, math.sqrt, operator.add]) == [len, int, math.sqrt, operator.add]


def test_subclasses_arrive_as_what_they_are_made_of():
    class Level(IntEnum):
        HIGH = 3

    class Liar(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    Pair = collections.namedtuple("Pair", "a b")
    assert [type(over(each)) for each in (Level.HIGH, Liar(1), Pair(1, 2))] == [int, int, tuple]
    assert over(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert over(collections.defaultdict(list, x=[1])) == {"x": [1]}


def test_the_rest_stays_and_is_known_again():
    here, there = ledger(), ledger()
    strange = Strange()
    stand_in = over(strange, here, there)
    assert isinstance(stand_in, Strange)
    assert stand_in is not strange
    assert over(strange, here, there) is stand_in
    assert over([stand_in], there, here)[0] is strange
    with pytest.raises(NotPlainError, match="Strange"):
        ObjectTable(stays=lambda value: False, stand_in=lambda number: None).to_json([Strange()])


def test_a_shown_list_keeps_its_identity_and_takes_changes():
    here, there = ledger(), ledger()
    row = [1, 2]
    grid = [row, row, {"k": {3}}]
    arrived = over(grid, here, there, shown=True)
    assert arrived == grid
    assert arrived[0] is arrived[1]
    assert over(arrived[0], there, here) is row
    arrived[0].append(9)
    arrived[2]["k"].clear()
    for number in sorted(here.showing):
        here.put(number, json.loads(json.dumps(there.content(there.remote_object(number)))))
    assert grid == [[1, 2, 9], [1, 2, 9], {"k": set()}]
    assert grid[0] is row
    assert grid[1] is row


@pytest.mark.parametrize("told", [
    {"yours": 5}, {"yours": "x"}, {"again": 1}, {"int": "zz"}, {"nothing": 1}, {},
    {"set": [{"list": []}]}, {"list": 3}, {"fraction": [1, 0]}, {"range": [0, 1, 0]},
    {"decimal": "x"},
    {"global": ["os", "system"]}, {"global": ["builtins", "exec"]}, {"global": ["operator", "attrgetter"]},
    {"global": ["math", "nowhere"]}, {"date": 3},
    {"list": [], "at": []},
])  # fmt: skip
def test_malformed_values_are_rejected(told):
    with pytest.raises(ConnectionLost):
        ledger().read(told)


# Exceptions


class Own(KeyError):
    """Of a solution."""


class Bye(SystemExit):
    """Ends a program."""


@pytest.mark.parametrize(("error", "base", "name", "text"), [
    (ValueError("no", 3), ValueError, "ValueError", "('no', 3)"), (Own("k"), KeyError, "Own", "'k'"),
    (Bye(0), RuntimeError, "Bye", "0"), (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt", ""),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeDecodeError, None, None),
])  # fmt: skip
def test_exceptions_arrive_as_the_nearest_that_python_has(error, base, name, text):
    made = Errors(ledger()).read(json.loads(json.dumps(written_error(ledger(), error))))
    assert isinstance(made, base)
    assert name is None or (type(made).__name__, str(made)) == (name, text)


# Lines


def test_messages_go_both_ways_unless_they_are_too_long():
    one, other = (MessageSocket(each.detach()) for each in socket.socketpair())
    with closing(one), closing(other):
        one.send({"a": "\ud800", "n": [1, 2]})
        other.send({"b": None})
        assert other.receive() == {"a": "\ud800", "n": [1, 2]}
        assert one.receive() == {"b": None}
        with pytest.raises(NotPlainError, match="too large"):
            one.send({"a": "x" * MAX_MESSAGE})


@pytest.mark.parametrize("rubbish", [
    b"", b"\0\0", (MAX_MESSAGE + 1).to_bytes(8, "big"), (3).to_bytes(8, "big") + b"[1]",
    (3).to_bytes(8, "big") + b"}}}", (3).to_bytes(8, "big") + b"{",
    (200_000).to_bytes(8, "big") + b"[" * 200_000,
])  # fmt: skip
def test_rubbish_on_the_line_is_its_end(rubbish):
    one, other = socket.socketpair()
    line = MessageSocket(one.detach())
    with other, closing(line):
        other.settimeout(5)
        other.sendall(rubbish)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost):
            line.receive()
