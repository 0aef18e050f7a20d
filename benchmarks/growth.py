"""How the cost of one unit of work grows with the number of units: `python -m benchmarks.growth --store`.

Each row of the table does the same work at a small and at a large size, and compares the processor time of one unit; processor time,
because a busy neighbour hardly changes it. With --check the exit code is 1 where a unit costs more than 1.5 times as much at the large
size, unless the row says why it has to. How a whole step grows with completions and tokens of the shipped model is measured by
`scaling.py`, what a fleet costs by `fleet_claims.py`, and how fast pages answer by `web.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fleet_dispatch
from benchmarks.commands import processor_seconds
from benchmarks.step import RESULTS, config_of, machine, one_step, request, slug
from benchmarks.web import (
    GROUPS,
    GROWING_PAGES,
    MEMBERS,
    PAGES_OF_EVEN_COST,
    filled,
    in_several_scripts,
)
from benchmarks.work import Workload
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.engine.models.bundled import fetch_model
from groupwise.runs import checkpoints, recovery
from groupwise.runs.folder import CHECKPOINTS, RECORD, RunFolder
from groupwise.runs.record_segments import write_record_segment
from groupwise.runs.store import Store
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import training_parts
from groupwise.training.config import load_config
from groupwise.training.loops.resume import find_resume_point
from groupwise.training.loops.rl_prepare import prepare_rl
from tests.unit.dashboard.dashboard_client import asking
from tests.web_runs import add_step, write_run

MAX_GROWTH = 1.5
CHECKPOINT_STEPS = 100
MEASURED_STEPS = 50
"""Steps whose commits are timed, at the end of a record."""
COMMANDS = (
    "show {run}",
    "plot {run}",
    "rollouts {run}",
    "rollouts {run} --best",
    "rollouts {run} --failed",
    "rollouts {run} --text answer",
    "rollouts {run} --task proofs",
    "compare {run} {run}",
)
"""Commands `groupwise runs …` that look at a run."""
SHOWN_AGAIN = 3
"""Times that a page is measured, after it was shown once."""
DESCRIBED = ("name", "unit", "small", "large", "because")
LEAST = 0.5
"""Seconds for which short work is repeated."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of work, at two sizes."""

    name: str
    unit: str
    small: int
    large: int
    cost: Callable[[int], float]
    """Seconds of processor time of one unit at a size."""
    because: str = ""
    """Why a unit costs more at the large size, if it has to."""

    def measured(self) -> dict[str, Any]:
        """What is stored: the case with milliseconds of a unit at each size, and their ratio."""
        small, large = (1e3 * self.cost(size) for size in (self.small, self.large))
        described = {name: getattr(self, name) for name in DESCRIBED}
        return {**described, "at_small": small, "at_large": large, "times": large / small}


# --- what is measured -----------------------------------------------------------------------------


def preparing(prompts: int) -> float:
    """A prompt is read, rendered, tokenised and hashed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        rows = (
            {"prompt": f"What is {n} + {n % 97}?", "answer": str(n + n % 97)}
            for n in range(prompts)
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded = load_config(
            {
                "model": {"name": "tiny"},
                "data": {"dataset_name": str(file), "prompt_column": "prompt"},
                "rewards": {"reward_funcs": ["correctness"]},
            }
        )
        begun = time.process_time()
        prepare_rl(loaded, None)
        return (time.process_time() - begun) / prompts


def stepping(work: Workload) -> float:
    """A token of a completion is sampled and learnt from, by the tiny model with room for long texts, in this process."""
    prompt = [10 + number % 50 for number in range(work.longest)]

    async def steps(parts: Parts) -> float:
        await parts.sampler.load(await parts.learner.publish(0))
        await one_step(parts, [request(work, 0, prompt, 0)], 0)
        begun = time.process_time()
        await one_step(parts, [request(work, 1, prompt, 1)], 1)
        return time.process_time() - begun

    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(fetch_model("tiny"), Path(folder) / "model"))
        settings = json.loads((model / "config.json").read_text())
        settings["max_position_embeddings"] = 8192
        (model / "config.json").write_text(json.dumps(settings))
        config = config_of(work, "float32", threads=1, processes=1, model=str(model))
        layout = placement.choose_layout(config, longest_prompt=work.longest)
        with closing(training_parts(config, layout, "growth", Path(folder))) as parts:
            return asyncio.run(steps(parts)) / work.sampled


def recorded(rollouts: int, folder: Path) -> Path:
    """A run with a record of so many rollouts, and a checkpoint with its pieces; made once."""
    run = folder / f"{rollouts}"
    if run.exists():
        return run
    building = write_run(folder / "building", 0, state="interrupted", facts={"kind": "rl"})
    steps = rollouts // (GROUPS * MEMBERS)
    with Store.open(building / RECORD) as store:
        for step in range(steps):
            add_step(store, step, write=in_several_scripts, groups=GROUPS, members=MEMBERS)
            if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
                with checkpoints.begin(building / CHECKPOINTS, step + 1) as place:
                    write_record_segment(building, building / RECORD, place, step + 1)
                    recovery.add_run_files(building, place, step + 1)
                    checkpoints.finish(place, step + 1)
                checkpoints.prune(building / CHECKPOINTS, 2)
    building.rename(run)
    return run


def committing(rollouts: int, folder: Path) -> float:
    """A rollout is written to a record that has so many."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        record = shutil.copy(recorded(rollouts, folder) / RECORD, place)
        with Store.open(Path(record)) as store:
            first = (store.last_step() or 0) + 1
            begun = time.process_time()
            for step in range(first, first + MEASURED_STEPS):
                add_step(store, step, write=in_several_scripts, groups=GROUPS, members=MEMBERS)
            return (time.process_time() - begun) / (MEASURED_STEPS * GROUPS * MEMBERS)


def resuming(rollouts: int, folder: Path) -> float:
    """A run with so many rollouts in its record is found, checked, opened and set back."""
    run = recorded(rollouts, folder)
    words = {"model": {"name": "tiny"}, "run": {"name": run.name, "dir": str(folder)}}
    loaded = load_config(words)

    def resume() -> None:
        point = find_resume_point(loaded, True, None)
        assert point is not None
        with RunFolder.open(run) as opened:
            opened.store.rewind(point.step)

    return repeated(resume)


def showing(rollouts: int, folder: Path, growing: bool) -> float:
    """A page about a run with so many rollouts in its record."""
    run = recorded(rollouts, folder)
    paths = [
        f"/runs/{run.name}{filled(path, rollouts)}"
        for _, path in (GROWING_PAGES if growing else PAGES_OF_EVEN_COST)
    ]

    async def show() -> float:
        spent = 0.0
        async with asking(folder) as client:
            for path in paths:
                await client.get(path)
                begun = time.process_time()
                for _ in range(SHOWN_AGAIN):
                    (await client.get(path)).raise_for_status()
                spent += time.process_time() - begun
        return spent

    return asyncio.run(show()) / (SHOWN_AGAIN * len(paths))


def looking(rollouts: int, folder: Path) -> float:
    """A command that looks at a run with so many rollouts in its record."""
    run = recorded(rollouts, folder)
    lines = [line.format(run=run.name).split() for line in COMMANDS]
    words = [[sys.executable, "-m", "groupwise", "runs", *line, "--dir", "."] for line in lines]
    return sum(processor_seconds(each, folder, dict(os.environ)) for each in words) / len(words)


def listing(runs: int) -> float:
    """A run in the dashboard's list, once all have been read."""
    with tempfile.TemporaryDirectory() as folder:
        first = write_run(Path(folder) / "run-0000", 5)
        for number in range(1, runs):
            shutil.copytree(first, Path(folder) / f"run-{number:04}")
        index = RunsIndex(Path(folder))
        while index.all_runs().unread:
            pass
        return repeated(index.all_runs) / runs


def dispatching(jobs: int) -> float:
    """A job goes from the queue of a fleet on SQLite to its end."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/fleet.db"
        return asyncio.run(fleet_dispatch.measure(url, jobs, Path(folder))).cpu_per_job


def repeated(work: Callable[[], object]) -> float:
    """Seconds of processor time of one repetition."""
    work()
    begun, number = time.process_time(), 0
    while time.process_time() - begun < LEAST:
        work()
        number += 1
    return (time.process_time() - begun) / number


def cases(rollouts: int, folder: Path) -> list[Case]:
    """All of them; a record has up to so many rollouts and is kept in the folder."""
    few = rollouts // 100
    return [
        Case("prompts of a run", "prompt", 1000, 10_000, preparing),
        Case("completions of a prompt", "token", 16, 256, lambda count: stepping(Workload((64,), count, 48))),
        Case("tokens of a completion", "token", 64, 4096, lambda count: stepping(Workload((64,), 4, count)),
             "each token attends to all before it"),
        Case("rollouts in the record", "rollout", few, rollouts, partial(committing, folder=folder)),
        Case("resume, by rollouts in the record", "resume", few, rollouts, partial(resuming, folder=folder),
             "the record is read whole up to 512 MiB, which takes 0.7 s"),
        Case("pages of a run", "page", few, rollouts, partial(showing, folder=folder, growing=False)),
        Case("pages far behind, searches in vain", "page", few, rollouts, partial(showing, folder=folder, growing=True),
             "what stands before a page, and what a search goes through in vain, is read from an index"),
        Case("commands on a run", "command", few, rollouts, partial(looking, folder=folder)),
        Case("runs in the dashboard", "run", 100, 1000, listing),
        Case("jobs of a fleet", "job", 50, 500, dispatching),
    ]  # fmt: skip


# --- what is shown --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, store; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="of the largest record")
    parser.add_argument("--data", type=Path, help="keep the records there for the next time")
    parser.add_argument("--only", help="rows whose names contain this word")
    parser.add_argument("--check", action="store_true", help="fail where a unit grows too dear")
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gw-growth-") as temporary:
        folder = given.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in cases(given.rollouts, folder):
            if given.only and given.only not in case.name:
                continue
            found.append(case.measured())
            print(line(**found[-1]), flush=True)
    if given.store:  # rows that were not measured now stay
        described = machine()
        file = RESULTS / f"growth-{slug(described)}.json"
        rows = json.loads(file.read_text())["rows"] if file.exists() else {}
        rows |= {each["name"]: each for each in found}
        result = {"machine": described, "load": os.getloadavg(), "rows": rows}
        file.write_text(json.dumps(result, indent=1) + "\n")
    grown = [each for each in found if each["times"] > MAX_GROWTH and not each["because"]]
    return int(given.check and bool(grown))


def line(
    name: str,
    unit: str,
    small: int,
    large: int,
    because: str,
    at_small: float,
    at_large: float,
    times: float,
) -> str:
    """The line that is printed for a row of the table."""
    verdict = "" if times <= MAX_GROWTH else f"   {because or 'MORE THAN 1.5 TIMES'}"
    return (
        f"{name:<34} {small:>9,} {at_small:9.3f} ms a {unit:<8}"
        f"{large:>10,} {at_large:9.3f} ms   {times:5.2f} times{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
