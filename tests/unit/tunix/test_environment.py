"""Where Tunix's environment is, and what is said where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.tunix import environment
from groupwise.tunix.environment import MADE, VARIABLE, home, install, python


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


class Pip:
    """Installs nothing, or fails."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.words: list[list[str]] = []

    def __call__(self, words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.words.append(words)
        failed = self.code if "-r" in words else 0
        return subprocess.CompletedProcess(words, failed, "", "no network, says pip")


def test_without_one_it_is_said_how_to_make_it() -> None:
    with pytest.raises(UsageError, match="groupwise fetch-tunix --accelerator tpu") as error:
        python()
    assert str(home()) in str(error.value)


def test_one_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert python() == Path(sys.executable)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no such file"):
        python()


def test_it_is_made_with_what_the_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip()
    monkeypatch.setattr(environment.subprocess, "run", pip)
    made = install("tpu", say=False)
    assert made == python() == home() / "bin" / "python"
    assert pip.words[-1][-1] == "jax[tpu]"
    assert str(made) in pip.words[-1]


def test_one_of_another_version_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.subprocess, "run", Pip())
    install("cpu", say=False)
    (home() / MADE).write_text(json.dumps({"requirements": "before"}))
    with pytest.raises(UsageError, match="another version"):
        python()


def test_one_that_was_cut_off_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.subprocess, "run", Pip(code=1))
    with pytest.raises(UsageError, match="no network, says pip"):
        install("cpu", say=False)
    with pytest.raises(UsageError, match="there is none"):
        python()


def test_what_it_holds_is_pinned() -> None:
    lines = environment.REQUIREMENTS.read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all("==" in line for line in pinned)
    assert "google-tunix==0.1.7" in pinned
