"""Models that the stand-in of Unsloth has loaded."""

from __future__ import annotations

import pytest

from tests import unsloth


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import unsloth` finds the stand-in."""
    unsloth.install(monkeypatch)
