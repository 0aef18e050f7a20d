"""Finds the lists, dictionaries and objects of rewards that a training itself changed: functions collect things in them.

They do not count as a difference between two trainings. Each run lists its own in a file of its folder, whenever it saves and when it
ends, because the collected values may come back from a file of the user's in another kernel.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.notebook.fingerprint import digest
from groupwise.notebook.identity import REWARDS, USED, reward_facts
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

FILE = "collected.json"
_HERE: dict[str, set[str]] = {}
"""Names changed by this process's trainings, by the fingerprint of their rewards: a model that one of them loaded is there for the next."""


class Collected(Callback):
    """Compares what rewards use with what it was at the start."""

    def __init__(self, rewards: Rubric, facts: Mapping[str, Any]) -> None:
        """`facts`: those of the start (`facts_of`)."""
        self._rewards = rewards
        self._before = facts[USED]
        self._here = _changed_here(facts)

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """See `Callback`."""
        self._note(run.folder)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """See `Callback`."""
        self._note(run.folder)

    def _note(self, run: Path) -> None:
        known = collected(run)
        self._here |= _changes(self._before, reward_facts(self._rewards)[USED])
        found = known | self._here
        if found != known:
            atomic_files.write_json(run / FILE, sorted(found))


def collected(run: Path) -> set[str]:
    """Names of what a run has changed."""
    try:
        return set(json.loads((run / FILE).read_bytes()))
    except (OSError, ValueError):
        return set()


@contextmanager
def noticed(rewards: Rubric, facts: Mapping[str, Any]) -> Generator[None]:
    """Notes changes that rewards make within, as in an evaluation before any training: they are no difference for this process's trainings.

    `facts`: those of the start, as for `Collected`.
    """
    try:
        yield
    finally:
        here = _changed_here(facts)
        here |= _changes(facts[USED], reward_facts(rewards)[USED])


def _changed_here(facts: Mapping[str, Any]) -> set[str]:
    return _HERE.setdefault(digest(facts[REWARDS]), set())


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Names of what has changed; of what came or went, marked: where both have it later, it is to be the same."""
    both = {*before} & {*now}
    passing = {*before} ^ {*now}
    changed = {name for name in both if before[name] != now[name]}
    return changed | {_passing(name) for name in passing}


def _passing(name: str) -> str:
    return f"({name})"


def comparable(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of two trainings without the things that the first one's rewards changed: `names`, as `collected` returns them."""
    used = [each.get(USED, {}) for each in (before, now)]
    passing = {name for name in {*used[0]} ^ {*used[1]} if _passing(name) in names}
    left_out = passing.union(names)
    kept = ({name: each[name] for name in each if name not in left_out} for each in used)
    one, other = (
        {**facts, USED: each} if USED in facts else dict(facts)
        for facts, each in zip((before, now), kept, strict=True)
    )
    return one, other
