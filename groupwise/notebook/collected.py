"""Which lists, dictionaries and objects of rewards a training itself changed: functions collect things in them.

They are no difference between two trainings. Each run notes its own in a file of its folder, whenever it saves and when it ends, because
what was collected may come back from a file of the user's in another kernel.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from groupwise.callbacks.base import Callback, RunEnd, RunHandle
from groupwise.notebook.fingerprint import digest
from groupwise.notebook.identity import REWARDS, USED, reward_facts
from groupwise.rewards.rubric import Rubric
from groupwise.runs import durable

FILE = "collected.json"
_HERE: dict[str, set[str]] = {}
"""What trainings of this process changed, by the fingerprint of their rewards: a model that the first one loaded is there for the next."""


class Collected(Callback):
    """Compares what rewards use with what it was at the start."""

    def __init__(self, rewards: Rubric, facts: Mapping[str, Any]) -> None:
        """`facts`: those of the start (`facts_of`)."""
        self._rewards = rewards
        self._before = facts[USED]
        self._here = _HERE.setdefault(digest(facts[REWARDS]), set())

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """See `Callback`."""
        self._note(run.folder)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """See `Callback`."""
        self._note(run.folder)

    def _note(self, run: Path) -> None:
        now = reward_facts(self._rewards)[USED]
        known = collected(run)
        names = {*now, *self._before}
        self._here |= {name for name in names if now.get(name) != self._before.get(name)}
        found = known | self._here
        if found != known:
            durable.write_json(run / FILE, sorted(found))


def collected(run: Path) -> set[str]:
    """Names of what a run has changed."""
    try:
        return set(json.loads((run / FILE).read_bytes()))
    except (OSError, ValueError):
        return set()


def without_collected(facts: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Facts but for what that run has changed."""
    return without(facts, collected(run))


def without(facts: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Facts but for what has these names of what rewards use."""
    if USED not in facts:
        return dict(facts)
    return {**facts, USED: {name: each for name, each in facts[USED].items() if name not in names}}
