"""Decides if a training equals an earlier one, by fingerprints of its rows, its marks and its rewards with everything that they
use.

Rewards may collect things in lists, dictionaries and objects. What a training itself changed in this way (`Collected`) does not
count as a difference between two trainings. Each run lists the changed names in a file of its folder, whenever it saves and when it
ends, because the user's code may load the collected values from a file in another kernel.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.fingerprint import FunctionDescription, digest
from groupwise.tasks.data.chat import Row
from groupwise.tasks.rewards.nesting import unwrap_reward
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

REWARDS = "rewards"
"""The fact with the weight and the code fingerprint of each reward part."""
USED = "used by rewards"
"""The fact with everything that the rewards use, by name: helpers, values, contents of objects."""
UNSEEN = "known by type alone"
"""Objects of libraries that rewards use, by name, with their types only. There is no content to compare: the types are in `USED`."""
ROWS = ("rows to train on", "rows to test")
"""The facts that depend on the train/test split."""


def facts_of(
    config: TrainingConfig, train: Sequence[Row], test: Sequence[Row], rewards: Rubric | None = None
) -> dict[str, Any]:
    """Facts, in addition to the core's config, that must be equal for two trainings to count as the same; with those of `rewards`
    if they are known.

    For rewards this follows everything that they use (helpers, values, objects).
    """
    facts: dict[str, Any] = {
        **{name: digest(list(rows)) for name, rows in zip(ROWS, (train, test), strict=True)},
        "marks": digest([config.tags.reasoning, config.tags.answer]),
    }
    if rewards is not None:
        facts |= reward_facts(rewards)
    return facts


def reward_facts(rewards: Rubric) -> dict[str, Any]:
    """The part of `facts_of` about rewards, including objects that are known by type only (`UNSEEN`)."""
    parts = zip(rewards.names, rewards.weights, rewards.functions, strict=True)
    looks = [
        (name, weight, FunctionDescription(unwrap_reward(function)))
        for name, weight, function in parts
    ]
    return {
        REWARDS: {name: digest([weight, look.fingerprints[""]]) for name, weight, look in looks},
        USED: {
            f"{path} of the reward {name}": fingerprint
            for name, _, look in looks
            for path, fingerprint in look.fingerprints.items()
            if path
        },
        UNSEEN: {
            " ".join([*([path] if path else []), f"of the reward {name}"]): kind
            for name, _, look in looks
            for path, kind in look.unseen.items()
        },
    }


def differences(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Differences of the facts in `current`, in words; parts of the reward by their names."""
    # Rewards that only one of the two trainings has: the reward itself is the difference, so its parts are not listed.
    with_reward = tuple(
        f" of the reward {reward_name}"
        for reward_name in {*previous.get(REWARDS, ())} ^ {*current.get(REWARDS, ())}
    )
    differing_names: list[str] = []
    for name, value in current.items():
        previous_value = previous.get(name) if name != UNSEEN else value
        if isinstance(value, Mapping) and isinstance(previous_value, Mapping):
            previous_parts, current_parts = (
                cast("Mapping[str, str]", previous_value),
                cast("Mapping[str, str]", value),
            )
            parts = sorted(
                part
                for part in {*previous_parts, *current_parts}
                if previous_parts.get(part) != current_parts.get(part)
            )
            if name == REWARDS:
                differing_names += [f"the reward {part}" for part in parts]
            else:
                differing_names += [part for part in parts if not part.endswith(with_reward)]
        elif previous_value != value:
            differing_names.append(name)
    return differing_names


COLLECTED_FILE = "collected.json"
_CHANGED_NAMES: dict[str, set[str]] = {}
"""Names that this process's trainings changed, by the fingerprint of their rewards: a model that one training loaded is still
loaded for the next.
"""


class Collected(Callback):
    """Records which of the objects used by rewards have changed since the start."""

    def __init__(self, rewards: Rubric, facts: Mapping[str, Any]) -> None:
        """`facts`: those at the start of the training (`facts_of`)."""
        self._rewards, self._facts = rewards, facts

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """See `Callback`."""
        self._record_changes(run.folder)

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """See `Callback`."""
        self._record_changes(run.folder)

    def _record_changes(self, run: Path) -> None:
        known_names = collected_names(run)
        all_names = known_names | _changed_here(self._rewards, self._facts)
        if all_names != known_names:
            atomic_files.write_json(run / COLLECTED_FILE, sorted(all_names))


def collected_names(run: Path) -> set[str]:
    """Names of the objects that the rewards of a run changed."""
    try:
        return set(json.loads((run / COLLECTED_FILE).read_bytes()))
    except (OSError, ValueError):
        return set()


@contextmanager
def note_changes(rewards: Rubric, facts: Mapping[str, Any]) -> Generator[None]:
    """Records changes that rewards make inside the `with` block, as in an evaluation before any training: they do not count as a
    difference for this process's trainings.

    `facts`: those at the start, as for `Collected`.
    """
    try:
        yield
    finally:
        _changed_here(rewards, facts)


def _changed_here(rewards: Rubric, facts: Mapping[str, Any]) -> set[str]:
    """Names that this process's trainings by these rewards have changed until now. `facts`: those at the start."""
    initial, current = facts[USED], reward_facts(rewards)[USED]
    names = _CHANGED_NAMES.setdefault(digest(facts[REWARDS]), set())
    names |= {name for name in {*initial} & {*current} if initial[name] != current[name]}
    # A name that appeared or disappeared is marked: if both trainings have it later, it must be the same.
    names |= {_transient_mark(name) for name in {*initial} ^ {*current}}
    return names


def _transient_mark(name: str) -> str:
    """The mark of a name that appeared or disappeared during a training."""
    return f"({name})"


def comparable(
    previous: Mapping[str, Any], current: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of both trainings, without the things that the first training's rewards changed (`names`, from `collected_names`)."""
    used_facts = [facts.get(USED, {}) for facts in (previous, current)]
    transient = {
        name for name in {*used_facts[0]} ^ {*used_facts[1]} if _transient_mark(name) in names
    }
    left_out = transient.union(names)
    remaining = ({name: used[name] for name in used if name not in left_out} for used in used_facts)
    first, second = (
        {**facts, USED: used} if USED in facts else dict(facts)
        for facts, used in zip((previous, current), remaining, strict=True)
    )
    return first, second
