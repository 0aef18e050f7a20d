"""Earlier runs of an experiment: the run of its name, and those that began beside it, `name-2`, `name-3` …"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from groupwise.config import RunConfig, resolved
from groupwise.notebook.identity import differences
from groupwise.runs import find
from groupwise.runs.find import RunInfo
from groupwise.runs.folder import RECORD, read_config
from groupwise.runs.store import Store
from groupwise.settings.comparison import compare

FACTS = "notebook"
"""The fact about a run that holds `groupwise.notebook.identity.facts_of`."""


def runs_of(core: RunConfig) -> list[RunInfo]:
    """All that can be read, the newest first."""
    name = re.compile(rf"{re.escape(str(core.run.name))}(-\d+)?")
    found = find.list_runs(Path(core.run.dir))
    return [each for each in reversed(found) if each.broken is None and name.fullmatch(each.name)]


def newest_alike(
    core: RunConfig, facts: Mapping[str, Any], say: Callable[[str], None] | None = None
) -> RunInfo | None:
    """The newest run that agrees with config and facts. `say` is told of unfinished ones that are passed over."""
    for run in runs_of(core):
        found = changes(run, core, facts)
        if not found:
            return run
        if say is not None and run.state != "finished":
            say(f"{run.path} was cut off, but differs in {', '.join(found)}: it is left as it is.")
    return None


def changes(run: RunInfo, core: RunConfig, facts: Mapping[str, Any]) -> Sequence[str]:
    """In what a run differs: keys of the config, and facts."""
    found = compare(read_config(run.path), resolved(core), RunConfig)
    length = [key for key in found.free if key == "training.max_steps"]
    before = Store.facts(run.path / RECORD).get(FACTS, {})
    return [*found.fixed, *length, *differences(before, facts)]


def free_name(core: RunConfig) -> str:
    """The first that no folder has."""
    wanted, runs = str(core.run.name), Path(core.run.dir)
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(each for each in names if not (runs / each).exists())


def described(run: RunInfo) -> str:
    """For a table."""
    if run.state == "finished":
        return f"{run.path}: finished after {run.steps} steps"
    return f"{run.path}: cut off after {run.steps} of {run.max_steps} steps; train_grpo goes on"
