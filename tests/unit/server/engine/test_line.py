"""What crosses the socket: values by themselves, and errors that people can read on the other side."""

import sys
from types import ModuleType

import pytest

from groupwise.errors import ConfigError, EndpointError, OutOfMemoryError, RunError, StoreError
from groupwise.server.engine.line import packed, packed_error, unpacked, unpacked_error


def crossed(error):
    return unpacked_error(packed_error(error))


def test_values_and_errors_of_ours_come_back_as_they_are_and_others_are_explained():
    assert unpacked(packed((1, {"a": None}))) == (1, {"a": None})
    for error in (ConfigError("a key"), EndpointError("busy", 503)):
        error.add_note("where")
        found = crossed(error)
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    for error, kind in (
        (ZeroDivisionError("by zero"), RunError),
        (MemoryError("by zero"), OutOfMemoryError),
        (OSError(28, "by zero", "run.db"), StoreError),
        (OSError(13, "by zero", "run.db"), RunError),
    ):
        assert type(crossed(error)) is kind
        assert kind is OutOfMemoryError or "by zero" in str(crossed(error))


def test_errors_that_refuse_to_cross_or_whose_class_is_not_known_here(monkeypatch):
    class Picky(RunError):
        def __init__(self, first, second):
            super().__init__(first + second)

    found = crossed(Picky("lo", "ne"))
    assert (type(found), str(found)) == (RunError, "The engine failed: lone")
    module = ModuleType("known_there_alone")
    vars(module)["Odd"] = odd = type("Odd", (RunError,), {"__module__": module.__name__})
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module.__name__, module)
        written = packed_error(odd("odd"))
    found = unpacked_error(written)
    assert (type(found), "known_there_alone" in str(found)) == (RunError, True)
    with pytest.raises(ModuleNotFoundError):
        unpacked(written)
