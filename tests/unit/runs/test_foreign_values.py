"""A record in which another program has put values of other types: readers report that, and nothing is called a bug."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from groupwise.cli.main import main
from groupwise.runs.folder import RECORD
from tests.web_runs import write_run

VALUES = ("x'ff00fe'", "x''", "1.5", "'text'")
COMMANDS = (("rollouts",), ("rollouts", "--json"), ("rollouts", "--best"), ("show",))
TABLES = {
    "groups": ("prompt_text", "prompt_seen", "columns", "metrics"),
    "rollouts": ("completion", "reason", "reward", "advantage", "outcome", "ended_by", "task"),
    "parts": ("name", "value", "weight"),
    "metrics": ("value",),
    "evaluations": ("name", "metrics"),
    "warnings": ("message", "numbers"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_run(folder := tmp_path_factory.mktemp("runs") / "r", 2)
    return folder


@pytest.mark.parametrize("table", TABLES)
def test_no_value_in_a_column_is_called_a_bug(
    table: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = 0
    for column in TABLES[table]:
        for value in VALUES:
            shutil.rmtree(tmp_path / "r", ignore_errors=True)
            shutil.copytree(run, tmp_path / "r")
            with closing(sqlite3.connect(tmp_path / "r" / RECORD)) as record:
                with suppress(sqlite3.IntegrityError):
                    record.execute(f"UPDATE {table} SET {column} = {value}")
                record.commit()
            for command, *options in COMMANDS:
                code = main(["runs", command, "r", "--dir", str(tmp_path), *options])
                said = capsys.readouterr().err
                assert "bug" not in said, (column, value, command)
                assert (code == 0) or "--resume" in said, (column, value, command, said)
                named += code != 0
    assert named
