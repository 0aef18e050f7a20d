"""Groupwise as a wheel: the same bytes from the same code, and pip takes it."""

import pytest

import groupwise
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.machines.packing import pack


def test_the_same_code_makes_the_same_bytes() -> None:
    one, other = pack(), pack()
    assert one.data == other.data
    assert one.file_name == f"groupwise-{groupwise.__version__}-py3-none-any.whl"


def test_code_that_was_updated_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "version", lambda: "9.9.9")
    with pytest.raises(UsageError, match=r"9\.9\.9, and its metadata say"):
        pack()
