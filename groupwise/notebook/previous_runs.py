"""Earlier runs of an experiment: the run with its name, and those started next to it as `name-2`, `name-3` …"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from groupwise.core.errors import StoreError, UsageError
from groupwise.core.settings.comparison import compare
from groupwise.engine.models.identity import identity
from groupwise.notebook.identity import collected_names, comparable, differences
from groupwise.runs import checkpoints, find, recovery
from groupwise.runs.find import RunInfo
from groupwise.runs.folder import CHECKPOINTS, RECORD, read_config
from groupwise.runs.notebook_names import FACTS, OWN_NAMES
from groupwise.runs.store import Store
from groupwise.training.config import RunConfig, resolved_values


def number_of(run: str, name: str) -> int | None:
    """The number of an experiment's run, by its folder's name: 1, 2, 3 …; None if it is none of them."""
    match = re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", run)
    return int(match[1] or 1) if match else None


def sibling(first: Path, number: int) -> Path:
    """The folder of the experiment's run with that number, next to the first run's folder."""
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


def siblings(first: Path) -> Iterator[Path]:
    """The folders of all possible runs, in order, without end."""
    return (sibling(first, number) for number in count(1))


LENGTH = "training.max_steps"
"""The only key that a notebook's schedule depends on among the keys that may change when a run is resumed."""
PLACES = ("run.name", "run.dir")
"""Keys that do not affect a run's result."""


def newest_alike(
    core: RunConfig, facts: Mapping[str, Any], say: Callable[[str], None] | None = None
) -> RunInfo | None:
    """The newest run that agrees with config and facts. `say` receives messages about runs that are skipped: the newest, the newest
    unfinished one, and those that have lost their weights.
    """
    # A missing or damaged record is repaired from the checkpoints.
    name = str(core.run.name)
    runs = [each for each in find.list_runs(Path(core.run.dir)) if number_of(each.name, name)]
    for damaged in [each for each in runs if each.broken is not None]:
        with suppress(StoreError, UsageError):  # skip a run whose record cannot be repaired
            recovery.unpack(damaged.path)
            recovery.recover(damaged.path)
            runs.append(find.run_info(damaged.path))
    newest_first = [each for each in reversed(runs) if each.broken is None]
    newest_unfinished = next((each for each in newest_first if each.state != "finished"), None)
    for run in newest_first:
        differing = changes(run, core, facts)
        weights_missing = run.state == "finished" and find.newest_weights(run.path) is None
        if not differing and not weights_missing:
            return run
        if say is not None and not differing:
            say(f"{run.path} was finished, but its weights are gone: it is left as it is.")
        elif say is not None and run in (newest_first[0], newest_unfinished):
            names = ", ".join(OWN_NAMES.get(key, key) for key in differing)
            state = "was finished" if run.state == "finished" else "was cut off"
            say(f"{run.path} {state}, but differs in {names}: it is left as it is.")
    return None


def changes(run: RunInfo, core: RunConfig, facts: Mapping[str, Any]) -> Sequence[str]:
    """Differences between a run and this training: config keys and facts; if there are none, the weights that it started from.

    A run that resumes may have other evaluations and callbacks, or another number of processes; a finished run would have to be
    trained again for them.
    """
    config_changes = compare(read_config(run.path), resolved_values(core), RunConfig)
    if run.state == "finished":
        changed_keys = [
            key for key in {**config_changes.free, **config_changes.warned} if key not in PLACES
        ]
    else:
        changed_keys = [key for key in config_changes.free if key == LENGTH]
    run_facts = Store.facts(run.path / RECORD)
    stored_facts, current_facts = comparable(
        run_facts.get(FACTS, {}), facts, collected_names(run.path)
    )
    differing = [*config_changes.fixed, *changed_keys, *differences(stored_facts, current_facts)]
    if not differing and run_facts.get("base") not in (None, identity(core.model)):
        return ["the weights of the model"]
    return differing


def free_name(core: RunConfig, taken: Collection[str] = ()) -> str:
    """The first name that no folder has and that is not in `taken`."""
    folders = siblings(Path(core.run.dir) / str(core.run.name))
    return next(path.name for path in folders if not path.exists() and path.name not in taken)


def describe_run(run: RunInfo) -> str:
    """The run's state, for a table."""
    if run.state == "finished":
        return f"{run.path}: finished after {run.steps} steps"
    if run.state == "running":
        return (
            f"{run.path}: another kernel trains it, {run.steps} of {run.max_steps} steps are done"
        )
    saved = checkpoints.complete(run.path / CHECKPOINTS)
    resume_text = (
        f"from step {saved[-1].step}" if saved else "from its start, as there is no checkpoint yet"
    )
    return f"{run.path}: cut off after {run.steps} of {run.max_steps} steps; train_grpo goes on {resume_text}"
