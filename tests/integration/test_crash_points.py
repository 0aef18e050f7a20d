"""A crash at every durable write of a run, whatever its schedule.

`test_resume` has a few writes of a synchronous run and of one that starts from another, `test_sft` of a supervised one,
`test_schedules` of one with a lag; `make soak SUITE=kills` has all of them, FIRST and LAST bound which
(numbers from 0). With `fixed_lag` the resumed run equals the one that was not disturbed, to the bit. The
free schedule promises less, because times decide which groups a step gets:

1. every draw is trained once, in one step, none is missing and none is left over;
2. no group is older than its bound, each rollout has the seed of its draw and member, the steps follow one another in versions;
3. the checkpoints that are there are whole, and the run ends as finished.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core import atomic_files
from groupwise.runs import checkpoints
from groupwise.runs.store import Store
from groupwise.tasks.rollouts.seeds import member_seed
from tests.integration.toy_run import TOY, config, crash_at, go_on, what_must_be_equal
from tests.rotation import turn

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

WAYS: dict[str, dict[str, Any]] = {
    "lag 0": {"max_off_policy_steps": 0}, "lag 1": {"max_off_policy_steps": 1}, "lag 2": {"max_off_policy_steps": 2},
    "free": {"schedule": "free", "max_off_policy_steps": 2, "max_steps": 6},
}  # fmt: skip


def undisturbed(runs: Path, way: str) -> tuple[Path, list[str]]:
    """Its folder, and its durable writes in order."""
    torch.set_num_threads(1)
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        assert groupwise.rl(config(runs, **WAYS[way]), TOY).exit_code == 0
    finally:
        atomic_files.on_write = lambda name: None
    return runs / "toy", points


def what_is_wrong(folder: Path, way: str, whole: dict[str, Any]) -> str:
    """Nothing, or what a resumed run should not be."""
    if way != "free":
        return "" if what_must_be_equal(folder) == whole else "it is another run"
    return "; ".join(broken_promises(folder, config(folder.parent, **WAYS[way])["training"]))


def broken_promises(folder: Path, training: dict[str, Any]) -> list[str]:
    """What the free schedule promises, and this run does not keep."""
    with Store.open(folder / "run.db", readonly=True) as store:
        records = store.steps()
        groups = {record.step: store.groups(record.step) for record in records}
        left_over = store.unfinished_groups()
    trained = sorted(draw for record in records for draw in record.draws)
    first = {record.version_in: record.step for record in reversed(records)}
    ages = [
        record.step - first[segment.policy_version]
        for record in records
        for group in groups[record.step]
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.policy_version is not None
    ]
    seeds = {
        (rollout.draw, rollout.member): rollout.segments[0].seed
        for members in groups.values()
        for group in members
        for rollout in group.rollouts
    }
    found = checkpoints.complete(folder / "checkpoints")
    kept = {
        "every step is there": [record.step for record in records]
        == list(range(training["max_steps"])),
        "every draw is trained once": trained
        == list(range(training["max_steps"] * training["prompts_per_step"])),
        "no group is left over": not left_over,
        "the record has the groups of each step": all(
            tuple(group.draw for group in groups[record.step]) == record.draws for record in records
        ),
        "every rollout is there, with its seed": seeds
        == {
            (draw, member): member_seed(training["seed"], draw, member, 0)
            for draw in trained
            for member in range(training["num_generations"])
        },
        "versions follow one another": all(
            before.version_out == after.version_in for before, after in pairwise(records)
        ),
        "nothing is older than its bound": max(ages) <= training["max_off_policy_steps"],
        "checkpoints are whole": not found.skipped and found[-1].step == training["max_steps"],
        "the run is finished": json.loads((folder / "summary.json").read_text())["state"]
        == "finished",
        "it has its weights": (folder / "final" / "adapter_model.safetensors").is_file(),
    }
    return [promise for promise, is_kept in kept.items() if not is_kept]


def crash(
    runs: Path, way: str, chosen: range, points: list[str], whole: dict[str, Any]
) -> list[str]:
    """Crash and resume at each chosen write; what was wrong afterwards, with its point."""
    failed = []
    for number in chosen:
        settings = config(runs / str(number), **WAYS[way])
        died = crash_at(number, lambda made=settings: groupwise.rl(made, TOY))
        go_on(settings)
        wrong = what_is_wrong(runs / str(number) / "toy", way, whole)
        # The free schedule may get by with fewer writes than the run that was counted.
        if died != 17 and not (way == "free" and died == 0):
            wrong = f"it ended with {died}; {wrong}"
        if wrong:
            point = points[number] if number < len(points) else "beyond the counted ones"
            failed.append(f"{number} {point}: {wrong}")
    return failed


@pytest.mark.soak(suite="kills")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_survives_a_crash_at_every_durable_write(tmp_path, way):
    folder, points = undisturbed(tmp_path / "whole", way)
    chosen = range(
        int(os.environ.get("FIRST", "0")), int(os.environ.get("LAST", len(points) - 1)) + 1
    )
    failed = crash(tmp_path, way, chosen, points, what_must_be_equal(folder))
    print(f"{way}: {len(chosen)} of {len(points)} durable writes, {len(failed)} runs wrong")
    assert not failed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_free_run_survives_a_crash_at_some_durable_writes(tmp_path):
    """The CI part of the soak test: two crash points, which the commit hash chooses."""
    folder, points = undisturbed(tmp_path / "whole", "free")
    assert not broken_promises(folder, config(tmp_path, **WAYS["free"])["training"])
    half = len(points) // 2
    assert not crash(tmp_path, "free", range(turn() % half, 2 * half, half), points, {})
