"""`metrics.jsonl` and `completions.jsonl`: each line whole and once, whatever a dead process left."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from groupwise.core import atomic_files
from groupwise.core.settings.view import View
from groupwise.training.callbacks.jsonl_sink import JsonlSink
from groupwise.training.callbacks.sinks import Finding, MetricsRow, ReportedRun

ROW = {"step": 7, "prompt": "p", "completion": "half \ud800\n", "parts": {"right": 1.0}}


def begun(folder: Path, steps: int = 0) -> tuple[JsonlSink, int]:
    sink = JsonlSink()
    sink.check(View({}))
    return sink, sink.begin(ReportedRun("r", "1a2b3c4d", folder, View({}), steps, 0.0))


def written(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_bytes().splitlines()]


def steps_of(folder: Path, name: str = "metrics") -> list[int]:
    return [row["step"] for row in written(folder, name)]


def three_lines(folder: Path) -> None:
    sink, held = begun(folder)
    assert held == -1
    for steps in range(3):
        sink.write_row(MetricsRow(steps, {"reward": steps / 4}, 100.5 + steps, [ROW, ROW]))
    sink.end("interrupted")


def test_a_line_is_one_flat_object(tmp_path):
    sink, _ = begun(tmp_path)
    values = {"reward": 0.5, "kl": math.nan, "grad_norm": math.inf, "step": 9.0}
    sink.write_row(MetricsRow(3, values, 100.5))
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 3, "wall_time": 100.5, "reward": 0.5, "kl": null, "grad_norm": null, "task/step": 9.0}\n'
    )
    assert not (tmp_path / "completions.jsonl").exists()


def test_a_run_that_continues_adds_what_is_missing(tmp_path):
    three_lines(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    sink, held = begun(tmp_path, steps=2)
    assert held == 2
    sink.write_row(MetricsRow(3, {"reward": 1.0}, 200.0))
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
def test_half_a_line_is_cut_off_with_its_rollouts(tmp_path, kept):
    three_lines(tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2][:kept]]))
    sink, held = begun(tmp_path, steps=5)
    assert held == 1
    assert steps_of(tmp_path, "completions") == [0, 0, 1, 1]
    sink.write_row(MetricsRow(2, {"reward": 0.5}, 102.5, [ROW]))
    assert steps_of(tmp_path) == [0, 1, 2]
    assert steps_of(tmp_path, "completions") == [0, 0, 1, 1, 2]


def test_steps_that_are_drawn_again_are_written_again(tmp_path):
    three_lines(tmp_path)
    assert begun(tmp_path, steps=1)[1] == 1
    assert steps_of(tmp_path) == [0, 1]
    assert steps_of(tmp_path, "completions") == [0, 0, 1, 1]


@pytest.mark.parametrize("line", [b"\x00\x00\n", b"[1]\n", b'{"reward": 1}\n', b'{"step": 0}\n'])
def test_lines_after_an_invalid_one_are_written_again(tmp_path, line):
    three_lines(tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], line, lines[2]]))
    assert begun(tmp_path, steps=2)[1] == 1
    assert steps_of(tmp_path) == [0, 1]


def test_findings_are_in_a_file_of_their_own_under_the_steps_that_they_are_of(tmp_path):
    sink, _ = begun(tmp_path)
    for steps in (4, 5):
        found = [Finding("eval/benchmark", steps - 2, {"x": 0.5, "y": math.nan})]
        sink.write_row(MetricsRow(steps, {"reward": 1.0}, 100.0, findings=found))
    first = {"step": 2, "known_after": 4, "eval/benchmark/x": 0.5, "eval/benchmark/y": None}
    assert written(tmp_path, "evaluations") == [first, {**first, "step": 3, "known_after": 5}]
    assert begun(tmp_path, steps=4)[1] == 4
    assert steps_of(tmp_path, "evaluations") == [2], "its line is gone"


class Died(BaseException):
    pass


@pytest.mark.parametrize("point", ["append:completions.jsonl", "append:metrics.jsonl"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_death_between_the_files_costs_nothing(tmp_path, monkeypatch, point, moment):
    sink, _ = begun(tmp_path)
    sink.write_row(MetricsRow(1, {"reward": 1.0}, 1.0, [ROW]))

    def die(name: str) -> None:
        if name == f"{point}:{moment}":
            raise Died

    with monkeypatch.context() as dying:
        dying.setattr(atomic_files, "on_write", die)
        with pytest.raises(Died):
            sink.write_row(MetricsRow(2, {"reward": 1.0}, 2.0, [ROW]))
    sink, held = begun(tmp_path, steps=2)
    for steps in range(held + 1, 4):
        sink.write_row(MetricsRow(steps, {"reward": 1.0}, float(steps), [ROW]))
    assert steps_of(tmp_path) == steps_of(tmp_path, "completions") == [1, 2, 3]
