"""Fleets for the tests of `groupwise fleet`: folders in which nothing runs, copied from one that is made once.

To build the commands of the program takes longer than most of them do; they have no state, so that it is done once as well.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from groupwise.cli.main import main
from groupwise.jobs.fleet.operations import machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.database import check_schema, connect, database_time
from groupwise.jobs.fleet.store.tables import VM

Command = Callable[..., tuple[int, str, str]]
"""Runs `groupwise fleet …`; returns exit code, stdout and stderr."""
BUILT = functools.cache(typer.main.get_command)


def _call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["fleet", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a fleet that is not there yet."""
    place = tmp_path / "fleet"
    _is_meant(place, monkeypatch)
    return place


def _is_meant(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.main, "get_command", BUILT)
    monkeypatch.setenv("GROUPWISE_FLEET", str(place))
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")


@pytest.fixture
def fleet(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Commands where there is no fleet yet."""
    return functools.partial(_call, capsys)


@pytest.fixture(scope="session")
def fleet_with_a_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy: a fleet whose machine, without GPUs, has been looked at."""
    place = tmp_path_factory.mktemp("fleets") / "fleet"
    place.mkdir()
    database = connect(f"sqlite:///{place / 'fleet.db'}")

    def write(session: Any) -> None:
        machines.add(session, Actor("test"), machines.NewMachine("vm-1", user="u"))
        vm = session.get_one(VM, "vm-1")
        vm.contact, vm.observed_round = "ok", database_time(session)

    check_schema(database)
    database.run(write)
    database.close()
    return place


@pytest.fixture
def seen(folder: Path, fleet: Command, fleet_with_a_machine: Path) -> Command:
    """A fleet of the test's own, with a machine."""
    shutil.copytree(fleet_with_a_machine, folder)
    return fleet


@pytest.fixture
def still(
    fleet_with_a_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """The fleet that is copied, for commands that change nothing."""
    _is_meant(fleet_with_a_machine, monkeypatch)
    return functools.partial(_call, capsys)
