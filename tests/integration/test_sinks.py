"""Real sinks beside real runs: without a network, and each line once however often the run was taken up."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

import groupwise
from groupwise.core import atomic_files
from groupwise.runs.store import Store
from tests.integration.toy_run import STEPS, TOY, config, die, go_on, in_child, what_must_be_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

EVALUATED = [0, 3, STEPS]


def settings(runs: Path, *sinks: str) -> dict[str, Any]:
    given = config(runs)
    given["run"]["report_to"] = list(sinks)
    return given


def recorded(run: Path, name: str) -> list[tuple[int, float]]:
    """A curve of the record, by steps done."""
    with Store.open(run / "run.db", readonly=True) as store:
        return store.metrics([name])[name]


def shown_by_tensorboard(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.fixture
def unobserved(whole_toy) -> dict[str, Any]:
    """The run without sinks."""
    return whole_toy.equal


@pytest.mark.parametrize(
    "point",
    [
        "append:metrics.jsonl:before#4",
        *(
            pytest.param(point, marks=pytest.mark.soak(suite="kills"))
            for point in (
                None,
                "commit:step:after#1",
                "commit:step:after#4",
                "append:metrics.jsonl:before#6",
            )
        ),
    ],
)
def test_files_of_the_folder_show_the_record_whatever_killed_the_run(unobserved, tmp_path, point):
    torch.set_num_threads(1)
    given = settings(tmp_path, "tensorboard", "jsonl", "parquet")
    if point is None:
        groupwise.rl(given, TOY)
    else:
        name, _, count = point.partition("#")
        left = iter(range(int(count) - 1))

        def run() -> None:
            atomic_files.on_write = lambda at: (
                die() if at == name and next(left, None) is None else None
            )
            groupwise.rl(given, TOY)

        assert in_child(run) == 17
        go_on(given)
    folder = tmp_path / "toy"
    for metric in ("reward", "learning_rate", "num_tokens"):
        shown, there = shown_by_tensorboard(folder, metric), recorded(folder, metric)
        assert [step for step, _ in shown] == [step for step, _ in there] == [1, 2, 3, 4, 5]
        assert all(
            math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(shown, there, strict=True)
        )
    assert [step for step, _ in shown_by_tensorboard(folder, "eval/reward")] == EVALUATED
    assert_jsonl_is_the_record(folder)
    exported = parquet.read_table(folder / "parquet/metrics.parquet").to_pylist()
    assert [(row["step"], row["reward"]) for row in exported] == recorded(folder, "reward")
    assert parquet.read_table(folder / "parquet/rollouts.parquet").num_rows == STEPS * 8
    assert what_must_be_equal(folder) == unobserved


def assert_jsonl_is_the_record(folder: Path) -> None:
    lines, rollouts = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_bytes().splitlines()]
        for name in ("metrics", "completions")
    )
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    with Store.open(folder / "run.db", readonly=True) as store:
        curves = store.metrics()
    for name, curve in curves.items():
        shown = [(line["step"], line[name]) for line in lines if name in line]
        assert shown == [(step, atomic_files.without_nan(value)) for step, value in curve], name
    assert [line["step"] for line in lines if "eval/reward" in line] == EVALUATED
    assert [row["step"] for row in rollouts] == [
        step for step in range(1, STEPS + 1) for _ in range(8)
    ]


TWICE = """
import json, sys
import torch
import groupwise
torch.set_num_threads(1)
given, task = json.loads(sys.argv[1]), sys.argv[2]
first = groupwise.rl(given, task)
assert first.exit_code == 130, first
assert groupwise.rl(given, task, resume=True).exit_code == 0
assert "torch" in sys.modules
"""
"""A run that is interrupted in its fourth step, and goes on."""


@pytest.mark.soak(suite="training")
def test_wandb_offline_and_trackio_have_each_line_once_without_a_network(tmp_path):
    callbacks = str(Path(__file__).with_name("toy_callbacks.py"))
    given = settings(tmp_path / "runs", "wandb", "trackio")
    writes = "import json, sys; json.dump({'score': int(sys.argv[2])}, open(sys.argv[1], 'w'))"
    given["callbacks"] = [
        {"name": f"{callbacks}:Asking", "interrupt": 3},
        {
            "name": "benchmark_on_checkpoint",
            "command": [sys.executable, "-c", writes, "{output}", "{step}"],
        },
    ]
    given["run"] |= {"num_completions_to_print": 2, "wandb_project": "p", "trackio_project": "p"}
    unreachable = "http://127.0.0.1:9"
    environment = {
        **os.environ, "WANDB_MODE": "offline", "WANDB_BASE_URL": unreachable,
        "HTTPS_PROXY": unreachable, "HTTP_PROXY": unreachable,
        "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", TWICE, json.dumps(given), TOY],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    run = tmp_path / "runs/toy"
    assert "is left out from now on" not in (run / "log.txt").read_text()
    identity = json.loads((run / "sinks.json").read_bytes())["id"]
    rewards = dict(recorded(run, "reward"))
    for rows in (history_of_wandb(run, identity), history_of_trackio(tmp_path, identity)):
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        assert {row["step"]: row["reward"] for row in rows if "reward" in row} == rewards
        assert [row["step"] for row in rows if "eval/reward" in row] == EVALUATED
        assert [row["step"] for row in rows if "completions" in row] == [1, 2, 3, 4, 5]
        assert benchmarked(rows) <= {2, 3, 4, 5}, "of all checkpoints, or the newest of several"
        assert 5 in benchmarked(rows)


def benchmarked(rows: list[dict[str, Any]]) -> set[int]:
    """After which steps a benchmark's policy stood."""
    name = "eval/benchmark"
    found = [(row[f"{name}/step"], row[f"{name}/score"]) for row in rows if f"{name}/step" in row]
    assert all(step == score for step, score in found)
    assert len(set(found)) == len(found)
    return {int(step) for step, _ in found}


def history_of_wandb(run: Path, identity: str) -> list[dict[str, Any]]:
    """The rows of the newest session; there is no other one."""
    from wandb.proto import wandb_internal_pb2

    (file,) = (run / "wandb").glob(f"offline-run-*/run-{identity}.wandb")
    rows: list[dict[str, Any]] = []
    for data in records_of_wandb(file.read_bytes()):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = [([*i.nested_key, i.key][0], i.value_json) for i in record.history.item]
            row = {name: json.loads(value) for name, value in items}
            rows.append({**row, "step": record.history.step.num})
    return rows


def records_of_wandb(log: bytes) -> Iterator[bytes]:
    """What a log in LevelDB's format holds: blocks of 32 KiB with pieces of records, each after checksum, length and kind."""
    block, header = 1 << 15, 7
    place, record = header, b""  # the file begins with a header of the same size
    while place + header <= len(log):
        if block - place % block < header:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        record += log[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def history_of_trackio(place: Path, identity: str) -> list[dict[str, Any]]:
    import sqlite3

    with sqlite3.connect(place / "trackio/p.db") as database:
        found = database.execute(
            "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (f"toy-{identity}",)
        ).fetchall()
    return [{**json.loads(metrics), "step": step} for step, metrics in found]
