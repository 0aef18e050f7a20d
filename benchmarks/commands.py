"""Processor time of small commands: `python -m benchmarks.commands --store`.

Each command runs in a fresh process, in a folder that holds a short run of the model `tiny`, and with a fleet that runs beside it. What
counts is user and system time of the process and of the processes that it waited for: unlike seconds on a clock, it hardly depends on what
else the machine does. The least of the repetitions is taken, because neighbours only ever add. A yardstick, Python importing a fixed part
of its own library, runs in turns with each command, and so says how fast the machine is at that moment.

Prints each figure beside its target. `--check` compares with the stored result of this kind of processor and fails where a command takes
more than 1.3 times as long, in yardsticks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.learning import CONFIG, ROOT, TASK, temporary
from benchmarks.start_up import environment
from benchmarks.step import RESULTS, machine, slug

WORSE = 1.3
YARDSTICK = "import asyncio, email.mime.text, http.client, sqlite3, unittest.mock, xml.dom.minidom"
TINY = "-t sort_words model.name=tiny"
SMALL = 0.5
COMMANDS: tuple[tuple[str, float | None], ...] = (
    ("--help", SMALL),
    ("rl --help", SMALL),
    ("fleet submit --help", SMALL),
    ("launch ssh --help", SMALL),
    ("environments list", SMALL),
    ("launch list", SMALL),
    ("runs list", SMALL),
    ("runs show small", SMALL),
    ("runs plot small", SMALL),
    ("runs rollouts small", SMALL),
    (f"rl {TINY} --dry-run", SMALL),
    (f"rl -c {CONFIG} -t {TASK} --dry-run", SMALL),
    (f"eval {TINY} --dry-run", SMALL),
    ("fleet list", SMALL),
    ("fleet status", SMALL),
    ("fleet vm list", SMALL),
    ("fleet submit -- true", SMALL),
    ("launch local --dry-run --project-dir project --script job.py", SMALL),
    (f"check {TINY}", 2.0),
    ("init -t sort_words -m tiny --no-measure --force", None),
)
"""Command lines and their targets in seconds; None: there is none."""


def main() -> None:
    """Measure, print, store or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="", help="commands that contain this text")
    parser.add_argument("--store", action="store_true", help="keep the result")
    parser.add_argument("--check", action="store_true", help="fail if clearly worse than stored")
    given = parser.parse_args()
    described = machine()
    file = RESULTS / f"commands-{slug(described)}.json"
    if given.check and not file.exists():
        sys.exit(f"Nothing is stored for this processor ({file}): run it once with --store.")
    stored: dict[str, Any] = json.loads(file.read_text()) if given.check else {}
    with temporary() as name, prepared(Path(name)) as (folder, variables):
        yardstick = [sys.executable, "-c", YARDSTICK]
        seconds: dict[str, float] = {}
        yardsticks: dict[str, float] = {}
        for line, target in COMMANDS:
            if given.only in line:
                words = [sys.executable, "-m", "groupwise", *shlex.split(line)]
                taken, alone = least_in_turns(
                    (words, yardstick), folder, variables, given.repetitions
                )
                name = line.replace(f"{ROOT}/", "")
                seconds[name], yardsticks[name] = taken, alone
                missed = "" if target is None or taken <= target else f"  target {target} s missed"
                print(
                    f"{taken:6.2f} s  {taken / alone:5.1f} yardsticks  {name}{missed}", flush=True
                )
    if given.store:
        result = {"machine": described, "seconds": seconds, "yardsticks": yardsticks}
        file.write_text(json.dumps(result, indent=2) + "\n")
        print(f"stored in {file}")
    if given.check:
        worse = [
            f"{line}: {now:.1f} yardsticks, stored {before:.1f}"
            for line, taken in seconds.items()
            if line in stored["seconds"]
            and (now := taken / yardsticks[line])
            > WORSE * (before := stored["seconds"][line] / stored["yardsticks"][line])
        ]
        if worse:
            sys.exit("Clearly more processor time than stored:\n" + "\n".join(worse))


@contextmanager
def prepared(folder: Path) -> Any:
    """The folder with a run in it and a project of one script, and the variables of the commands, while a fleet runs."""
    variables = environment() | {
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "GROUPWISE_FLEET": str(folder / "fleet"),
    }
    (folder / "home").mkdir()
    (folder / "project").mkdir()
    (folder / "project" / "job.py").write_text("print('done')\n")
    (folder / "fleet").mkdir()
    groupwise = [sys.executable, "-m", "groupwise"]
    words = [*groupwise, "rl", *shlex.split(TINY), "run.name=small", "training.max_steps=2"]
    subprocess.run(words, cwd=folder, env=variables, check=True, capture_output=True)
    fleet = subprocess.Popen(
        [*groupwise, "fleet", "up", "--nats-url", "off"],
        cwd=folder,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready = [*groupwise, "fleet", "status"]
        deadline = time.monotonic() + 60
        while subprocess.run(
            ready, cwd=folder, env=variables, check=False, capture_output=True
        ).returncode:
            if time.monotonic() > deadline or fleet.poll() is not None:
                sys.exit("The fleet did not start within 60 s.")
        yield folder, variables
    finally:
        fleet.terminate()
        fleet.wait(60)


def least_in_turns(
    commands: Sequence[Sequence[str]], folder: Path, variables: dict[str, str], repetitions: int
) -> list[float]:
    """The least processor time of each command, which run in turns. Raises SystemExit if one fails."""
    rounds = [
        [processor_seconds(words, folder, variables) for words in commands]
        for _ in range(repetitions + 1)
    ]
    # The first round may have had to compile byte code.
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def processor_seconds(words: Sequence[str], folder: Path, variables: dict[str, str]) -> float:
    """The processor time of a command. Raises SystemExit if it fails."""
    process = subprocess.Popen(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    shown = process.stdout.read().decode(errors="replace")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(words)}\nfailed:\n{shown}")
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
