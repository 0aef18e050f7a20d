"""What an installation prints: two lines if it succeeds (in a terminal one, redrawn), all that the installer said if it fails."""

from pathlib import Path

import pytest

from groupwise.core import virtual_environments
from groupwise.core.errors import UsageError
from groupwise.core.virtual_environments import make


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, code: int) -> None:
    """Install by a `uv` that prints 150 lines and an error."""
    uv = folder / "uv"
    uv.write_text(f"#!/bin/sh\nseq -f 'Collecting p%g' 150\necho no network >&2\nexit {code}\n")
    uv.chmod(0o755)
    monkeypatch.setattr(virtual_environments, "find_spec", lambda name: None)
    monkeypatch.setattr(virtual_environments.shutil, "which", lambda name: str(uv))
    make(
        folder / "made", ["wordle"], what="wordle", say=True, environment={"PATH": "/usr/bin:/bin"}
    )


def test_an_installation_says_that_it_begins_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, code=0)
    assert capfd.readouterr() == ("", "wordle: installing\nwordle: installed\n")


def test_a_failed_installation_shows_its_whole_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as error:
        install(tmp_path, monkeypatch, code=1)
    lines = str(error.value).splitlines()
    assert lines[1:] == [*(f"Collecting p{number}" for number in range(1, 151)), "no network"]
