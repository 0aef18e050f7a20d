import importlib.util
import sys
from pathlib import Path

import pytest

from groupwise.core.errors import UsageError
from groupwise.core.extras import extra_of, require_packages


def test_only_what_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    require_packages("The dashboard", "web", "pydantic")
    with pytest.raises(UsageError) as error:
        require_packages("The dashboard", "web", "pydantic", *(f"no_such_{x}" for x in "abc"))
    assert error.value.message == (
        "The dashboard needs no_such_a, no_such_b and no_such_c, which are not installed: pip install 'groupwise[web]'."
    )


def test_the_extra_of_a_package_is_read_from_what_is_installed() -> None:
    assert [extra_of(package) for package in ("peft", "boto3", "pydantic", "trl")] == [
        "train",
        "aws",
        None,  # always installed
        None,  # for tests alone
    ]


@pytest.mark.parametrize(
    ("note", "command"),
    [
        ("pipx_metadata.json", "pipx runpip groupwise install 'groupwise[web]'"),
        ("pyvenv.cfg", "uv pip install --python {folder} 'groupwise[web]'"),
    ],
)
def test_an_environment_of_pipx_or_uv_is_extended_by_its_own_program(
    note: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / note).touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(UsageError) as error:
        require_packages("The dashboard", "web", "no_such_a")
    assert command.format(folder=tmp_path) in error.value.message


def test_in_a_notebook_the_command_can_be_run_in_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with pytest.raises(UsageError, match="installed: %pip install 'groupwise"):
        require_packages("The dashboard", "web", "no_such_a")
