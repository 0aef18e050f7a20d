"""What crosses the socket: values by themselves, and errors that people can read on the other side."""

import sys
from types import ModuleType

import pytest

from groupwise.errors import ConfigError, EndpointError, OutOfMemoryError, RunError, StoreError
from groupwise.server.engine.line import packed, packed_error, unpacked, unpacked_error


def crossed(error):
    return unpacked_error(packed_error(error))


def test_values_and_errors_of_ours_come_back_as_they_are():
    assert unpacked(packed((1, {"a": None}))) == (1, {"a": None})
    for error in (ConfigError("a key"), EndpointError("busy", 503)):
        error.add_note("where")
        found = crossed(error)
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_other_errors_are_explained():
    found = crossed(ZeroDivisionError("by zero"))
    assert type(found) is RunError
    assert "ZeroDivisionError: by zero" in str(found)
    assert isinstance(crossed(MemoryError()), OutOfMemoryError)
    full = crossed(OSError(28, "No space left on device", "run.db"))
    assert isinstance(full, StoreError)
    assert "No space left on device" in str(full)
    assert type(crossed(OSError(13, "Permission denied", "run.db"))) is RunError


def test_errors_that_refuse_to_cross():
    class Lone(ConfigError):
        pass

    class Picky(RunError):
        def __init__(self, first, second):
            super().__init__(first + second)

    for error in (Lone("lone"), Picky("lo", "ne")):
        found = crossed(error)
        assert (type(found), str(found)) == (RunError, "The engine failed: lone")


def test_an_error_whose_class_is_not_known_here(monkeypatch):
    module = ModuleType("known_there_alone")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    odd = type("Odd", (RunError,), {"__module__": module.__name__})
    vars(module)["Odd"] = odd
    written = packed_error(odd("odd"))
    monkeypatch.delitem(sys.modules, module.__name__)
    found = unpacked_error(written)
    assert type(found) is RunError
    assert "No module named 'known_there_alone'" in str(found)
    with pytest.raises(ModuleNotFoundError):
        unpacked(written)
