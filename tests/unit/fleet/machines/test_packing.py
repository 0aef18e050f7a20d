"""Groupwise as a wheel: the same bytes from the same code, and pip takes it."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import groupwise
from groupwise.errors import UsageError
from groupwise.fleet.machines import packing
from groupwise.fleet.machines.packing import pack


def test_the_same_code_makes_the_same_bytes() -> None:
    one, other = pack(), pack()
    assert one.data == other.data
    assert one.file_name == f"groupwise-{groupwise.__version__}-py3-none-any.whl"


def test_it_holds_the_code_and_nothing_that_python_made() -> None:
    with zipfile.ZipFile(io.BytesIO(pack().data)) as archive:
        names = set(archive.namelist())
        runner = archive.read("groupwise/hosts/runner.py")
    assert runner == (Path(groupwise.__file__).parent / "hosts/runner.py").read_bytes()
    assert "groupwise/fleet/machines/builder.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.soak(suite="fleet")
def test_pip_installs_it_with_its_commands(tmp_path: Path) -> None:
    packed = pack()
    wheel = tmp_path / packed.file_name
    wheel.write_bytes(packed.data)
    target = tmp_path / "installed"
    options = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "-q")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), wheel]
    subprocess.run(command, check=True, capture_output=True)
    assert (target / "groupwise" / "cli" / "main.py").is_file()
    assert (target / "bin" / "groupwise-train-grpo").is_file()
    shown = (target / f"groupwise-{packed.version}.dist-info" / "METADATA").read_text()
    assert "Requires-Dist: pydantic" in shown


def test_code_that_was_updated_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "version", lambda: "9.9.9")
    with pytest.raises(UsageError, match=r"9\.9\.9, and its metadata say"):
        pack()
