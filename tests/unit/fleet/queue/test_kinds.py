"""From a row to a command."""

from functools import cache
from importlib import metadata
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.fleet.queue import kinds
from groupwise.hosts.spec import FileEntry, JobSpec, Limits

SHA = "0" * 64


def row(job_type: str = "COMMAND", output_dir: str = "outputs", **request: Any) -> kinds.Row:
    empty = dict.fromkeys(("model", "dataset", "reward_function", "hyperparams"))
    return {
        **empty,
        "job_id": "j",
        "job_type": job_type,
        "output_dir": output_dir,
        "request": request,
    }


class Training:
    """A kind with files, environment and artefacts of its own."""

    def expand(self, row: kinds.Row) -> JobSpec:
        return JobSpec(
            ("train",),
            environment={"A": "kind", "B": "kind"},
            files={"config": FileEntry(SHA, 0o644, 1)},
            artefacts=("out",),
            limits=Limits(time_seconds=5),
        )


def announce(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = metadata.EntryPoint("TRAIN", value, kinds.ENTRY_POINTS)
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == kinds.ENTRY_POINTS else []
    )
    monkeypatch.setattr(kinds, "_announced", cache(kinds._announced.__wrapped__))


def test_what_any_job_may_ask_for_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, f"{__name__}:Training")
    monkeypatch.setattr(kinds, "_load", lambda place: Training())
    spec = kinds.expand(
        row(
            "TRAIN",
            environment={"B": "mine"},
            files={"data": [SHA, 420, 2]},
            secrets={"TOKEN": "env:X"},
            limits={"grace_seconds": 3},
            resources={"ram_mb": 10},
            checkpoints=["out/checkpoints"],
        )
    )
    assert spec == JobSpec(
        ("train",),
        environment={"A": "kind", "B": "mine"},
        files={"config": FileEntry(SHA, 0o644, 1), "data": FileEntry(SHA, 420, 2)},
        secrets=("TOKEN",),
        artefacts=("out",),
        checkpoints=("out/checkpoints",),
        limits=Limits(time_seconds=5, grace_seconds=3, ram_mb=10),
    )


def test_a_file_of_the_kind_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, "anything:here")
    monkeypatch.setattr(kinds, "_load", lambda place: Training())
    with pytest.raises(UsageError, match="puts another file there"):
        kinds.expand(row("TRAIN", files={"config": ["1" * 64, 420, 2]}))
