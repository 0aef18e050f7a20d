"""How fast the dashboard answers: `make bench SUITE=web`, `python -m benchmarks.web --check`.

    first page    the list of a folder with 1,000 runs: as soon as it listens, and later
    rollouts      a run with 1,000,000 rollouts: its overview, curves, pages and filters of its rollouts
    old           a run with 320,000 rollouts, as it was recorded before rollouts had tasks and ratios
    answers       two runs that have answered 20,000 prompts each, twice: what they answered to the same ones

The data is generated (a quarter of an hour of it; `--data FOLDER` keeps it for the next time), the dashboard is a process of its own, asked
over HTTP. Of each page the median and the worst of so many tries are told; what is asked for the first time, with nothing in SQLite's
cache, stands by itself. With --check the exit code is 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import urlopen

from benchmarks.step import RESULTS, machine, slug
from groupwise.runs.store import Store
from tests.web_runs import add_step, plainly, write_run

RUNS = 1000
STEPS_OF_EACH = 200
ROLLOUTS = 1_000_000
GROUPS, MEMBERS = 16, 8
"""Of each step of the large run."""
OLD_ROLLOUTS = 320_000
OLD_FORMAT = 8
AS_BEFORE = f"""
    DROP INDEX rollouts_by_length; DROP INDEX rollouts_by_truncated; DROP INDEX parts_of_turns;
    DROP TABLE prompt_index; DROP TABLE completion_index;
    CREATE VIRTUAL TABLE prompt_index USING fts5 (prompt, content='prompts', content_rowid='draw');
    CREATE VIRTUAL TABLE completion_index USING fts5 (completion, content='rollouts', content_rowid='id');
    INSERT INTO prompt_index (prompt_index) VALUES ('rebuild');
    INSERT INTO completion_index (completion_index) VALUES ('rebuild');
    DROP INDEX groups_by_task; DROP INDEX rollouts_by_task; DROP INDEX rollouts_by_task_and_reward;
    ALTER TABLE groups DROP COLUMN task; ALTER TABLE rollouts DROP COLUMN task; ALTER TABLE segments DROP COLUMN learner_logprobs;
    PRAGMA user_version = {OLD_FORMAT};
"""
"""What makes a record of now one of then."""
EXAMPLES = 20_000
"""Of each of the two runs that are compared."""
TRIES = 15
FIRST_PAGE, PAGE, OLD_PAGE = 0.2, 0.3, 0.4
"""Seconds: the targets; a record of an earlier format has its indexes once it is written to again."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A page, and how long it took: seconds."""

    name: str
    first: float
    median: float
    worst: float
    most: float

    @property
    def ok(self) -> bool:
        """The usual time is within the target."""
        return self.median <= self.most


PAGES_OF_EVEN_COST = (
    ("newest rollouts", "/rollouts"),
    ("page 100", "/rollouts?page=100"),
    ("one step", "/rollouts?step={step}&order=draw"),
    ("one example", "/rollouts?example=3"),
    ("highest rewards", "/rollouts?order=best"),
    ("rewards between", "/rollouts?low=0.4&high=0.41"),
    ("by a part", "/rollouts?part=correct&order=best"),
    ("by a part, newest", "/rollouts?part=correct"),
    ("failed", "/rollouts?outcome=failed"),
    ("a rare text", "/rollouts?text=step+{step}"),
    ("a phrase", "/rollouts?text=%22step+{step}%22"),
    ("several common words", "/rollouts?text=answer+of+step"),
    ("a common word", "/rollouts?text=answer"),
    ("a word in Chinese", "/rollouts?text=%E7%AD%94%E6%A1%88"),
    ("rare words in Chinese", "/rollouts?text=%E7%AC%AC{step}%E6%AD%A5"),
    ("signs", "/rollouts?text=%2B%3D"),
    ("signs, best", "/rollouts?text=%2B%3D&order=best"),
    ("signs that none has", "/rollouts?text=%3D%3D%3D"),
    ("cut off", "/rollouts?truncated=yes"),
    ("cut off, best", "/rollouts?truncated=yes&order=best"),
    ("lengths that none has", "/rollouts?shortest=500"),
    ("lengths that all have, best", "/rollouts?shortest=1&order=best"),
    ("scored ones", "/rollouts?outcome=scored"),
    ("rewards from 0", "/rollouts?low=0"),
    ("a part's values, newest", "/rollouts?part=correct&low=0.1"),
    ("a part that none has", "/rollouts?part=style"),
    ("failed ones, best", "/rollouts?outcome=failed&order=best"),
    ("a task", "/rollouts?task=sums"),
    ("a task, best", "/rollouts?task=sums&order=best"),
    ("a task, worst", "/rollouts?task=sums&order=worst"),
    ("a task, as drawn", "/rollouts?task=sums&order=draw"),
    ("a task, one step", "/rollouts?task=sums&step={step}"),
    ("a task by a part, best", "/rollouts?task=sums&part=correct&order=best"),
    ("a task, failed", "/rollouts?task=sums&outcome=failed"),
    ("a task, a rare text", "/rollouts?task=sums&text=step+{step}"),
    ("a task, a common word", "/rollouts?task=sums&text=answer"),
    ("a task that none has", "/rollouts?task=riddles"),
    ("a rollout", "/rollouts/{rollout}"),
    ("a group", "/groups/{draw}"),
    ("evaluation", "/evaluations"),
)
GROWING_PAGES = (
    ("overview", ""),
    ("page 4000", "/rollouts?page=4000"),
    ("a common word, best", "/rollouts?text=answer&order=best"),
    ("Chinese that none has", "/rollouts?text=%E6%9D%B1%E4%BA%AC"),
    ("a rare sign", "/rollouts?text=%E2%89%88"),
    ("failed ones by a part, best", "/rollouts?outcome=failed&part=correct&order=best"),
    ("cut off and failed, none", "/rollouts?outcome=failed&truncated=yes"),
    ("a task, cut off and failed", "/rollouts?task=sums&outcome=failed&truncated=yes"),
    ("words of failed ones, best", "/rollouts?text=answer+3&order=best"),
    ("a phrase of failed ones, scored", "/rollouts?text=%22answer+3%22&outcome=scored"),
    ("words of other examples", "/rollouts?text=question+1&example=2"),
    ("signs that never meet", "/rollouts?text=%22%2B%3D+**%22"),
    ("a part's values, page 2000", "/rollouts?part=correct&low=0.1&high=0.2&page=2000"),
    ("a common word, page 4000", "/rollouts?text=answer&page=4000"),
    ("a task, page 1000", "/rollouts?task=sums&page=1000"),
    ("a task, page 4000, best", "/rollouts?task=sums&page=4000&order=best"),
    ("page 4000, best", "/rollouts?page=4000&order=best"),
    ("page 4000, a part, best", "/rollouts?page=4000&order=best&part=correct"),
    ("a task, another's words", "/rollouts?task=sums&text=question+1"),
    ("a rare task", "/rollouts?task=proofs"),
    ("a rare task, best", "/rollouts?task=proofs&order=best"),
    ("a rare task, as drawn", "/rollouts?task=proofs&order=draw"),
    ("a rare task by a part, best", "/rollouts?task=proofs&part=correct&order=best"),
    ("a rare task by a part, drawn", "/rollouts?task=proofs&part=correct&order=draw"),
    ("a rare task, a common word", "/rollouts?task=proofs&text=answer"),
    ("an example", "/examples/3"),
)
"""Pages that take longer with more rollouts: they have more to show, skip what stands before them, or read much to find little."""
PAGES = PAGES_OF_EVEN_COST + GROWING_PAGES
NEW = (
    "a task, page 4000, best",
    "a task by a part, best",
    "page 4000, a part, best",
    "signs that none has",
    "signs that never meet",
    "a task, a common word",
)


def main() -> int:
    """Generate, measure, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    parser.add_argument("--data", type=Path, help="keep what is generated there")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    words = parser.parse_args()
    print(f"{'milliseconds':<34} {'first':>7}   {'median':>7}   {'worst':>7}")
    with _folder(words.data) as folder:
        make_runs(folder / "many")
        make_large(folder / "large", words.rollouts)
        make_old(folder / "old")
        make_two(folder / "two")
        figures = [
            *of_the_list(folder / "many"),
            *of_the_run(folder / "large", words.rollouts),
            *of_the_old(folder / "old"),
            *of_answers(folder / "two"),
        ]
    for each in figures:
        times = (each.first, each.median, each.worst)
        shown_times = "   ".join(f"{1000 * seconds:7.1f}" for seconds in times)
        verdict = "" if each.ok else f"   more than {each.most * 1000:.0f} ms"
        print(f"{each.name:<34} {shown_times}{verdict}")
    document = {
        "machine": machine(),
        "rollouts": words.rollouts,
        "figures": [asdict(f) for f in figures],
    }
    (RESULTS / f"web-{slug(machine())}.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(words.check and not all(each.ok for each in figures))


@contextmanager
def _folder(kept: Path | None) -> Generator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="gw-web-") as made:
        yield Path(made)


def make_runs(folder: Path) -> None:
    """A thousand, alike but for their names."""
    if folder.exists():
        return
    first = write_run(folder / "run-0000", STEPS_OF_EACH)
    for number in range(1, RUNS):
        shutil.copytree(first, folder / f"run-{number:04}")


def make_large(folder: Path, rollouts: int) -> None:
    """One run with so many."""
    path = folder / "large"
    if path.exists():
        return
    steps = -(-rollouts // (GROUPS * MEMBERS))
    write_run(path, 0, facts={"max_steps": steps})
    began = time.monotonic()
    with Store.open(path / "run.db") as store:
        for step in range(steps):
            add_step(store, step, write=in_several_scripts, groups=GROUPS, members=MEMBERS)
            if step % 500 == 0:
                print(f"step {step} of {steps}, {time.monotonic() - began:.0f} s", file=sys.stderr)


def in_several_scripts(step: int, member: int) -> str:
    """Most are English, some Chinese, some have signs, and a few one that is rare."""
    if member == 2:
        return f"第{step}步的答案是：{member * step}。"
    signs = {5: f"; **x** += {step}", 6: " ≈ it" if step % 1000 == 7 else ""}
    return plainly(step, member) + signs.get(member, "")


def make_old(folder: Path) -> None:
    """One that an earlier version has written."""
    if folder.exists():
        return
    make_large(folder, OLD_ROLLOUTS)
    with closing(sqlite3.connect(folder / "large" / "run.db")) as record:
        record.executescript(AS_BEFORE)


def make_two(folder: Path) -> None:
    """Two runs of the same data."""
    for name in ("one", "other"):
        path = folder / name
        if path.exists():
            continue
        steps = 2 * EXAMPLES // GROUPS
        write_run(path, 0, facts={"max_steps": steps})
        with Store.open(path / "run.db") as store:
            for step in range(steps):
                add_step(store, step, groups=GROUPS, members=MEMBERS, examples=EXAMPLES)


@contextmanager
def shown(folder: Path) -> Iterator[str]:
    """A dashboard of its own; yields its address."""
    command = [sys.executable, "-m", "groupwise", "web", "--port", "0", "--dir", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        [address] = re.findall(r"http://\S+:\d+", process.stderr.readline())
        try:
            yield address
        finally:
            process.send_signal(signal.SIGINT)


def seconds_of(address: str) -> float:
    """How long an answer took, to its last byte."""
    began = time.perf_counter()
    with urlopen(address) as page:
        page.read()
    return time.perf_counter() - began


def measured(name: str, address: str, most: float) -> Figure:
    """A page, asked again and again."""
    first, *later = [seconds_of(address) for _ in range(TRIES + 1)]
    return Figure(name, first, statistics.median(later), max(later), most)


def of_the_list(folder: Path) -> list[Figure]:
    """The first page."""
    with shown(folder) as address:
        return [
            measured("1,000 runs", f"{address}/runs", FIRST_PAGE),
            measured("1,000 runs, searched", f"{address}/runs?q=run-09&sort=reward", FIRST_PAGE),
        ]


def of_the_run(folder: Path, rollouts: int) -> list[Figure]:
    """All pages of the large one."""
    with shown(folder) as address:
        run = f"{address}/runs/large"
        pages = _pages(run, rollouts)
        names = "&name=".join(("reward", "reward_std", "entropy", "time/sampling"))
        curves = f"{address}/curves?run=large&name={names}&columns=700"
        over_time = measured("four curves over time", f"{curves}&times=yes", PAGE)
        return [*pages, measured("four curves", curves, PAGE), over_time]


def of_the_old(folder: Path) -> list[Figure]:
    """The same of a record of an earlier format, but for what needs the indexes of this one and takes half a second and more without."""
    pages = tuple(each for each in PAGES if each[0] not in NEW)
    with shown(folder) as address:
        return _pages(f"{address}/runs/large", OLD_ROLLOUTS, pages, "old: ", OLD_PAGE)


def _pages(
    run: str,
    rollouts: int,
    pages: tuple[tuple[str, str], ...] = PAGES,
    prefix: str = "",
    most: float = PAGE,
) -> list[Figure]:
    return [measured(prefix + name, run + filled(path, rollouts), most) for name, path in pages]


def filled(path: str, rollouts: int) -> str:
    """The address with a step, a group and a rollout from the middle of a run with so many rollouts."""
    middle = {
        "rollout": rollouts // 2,
        "draw": rollouts // MEMBERS // 2,
        "step": rollouts // MEMBERS // GROUPS // 2,
    }
    return path.format(**middle)


def of_answers(folder: Path) -> list[Figure]:
    """What two policies answered."""
    with shown(folder) as address:
        pages = (
            ("answers of two runs", "a=one&b=other"),
            ("of a run, first and now", "a=one&b=one"),
            ("of a step and now", "a=one@1000&b=other&page=20"),
            ("to one example", "a=one&b=other&example=77"),
            ("of a task", "a=one&b=other&task=products&order=worse"),
        )
        return [
            measured(name, f"{address}/rollouts/compare?{query}", PAGE) for name, query in pages
        ]


if __name__ == "__main__":
    sys.exit(main())
