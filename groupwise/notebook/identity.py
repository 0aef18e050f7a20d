"""Fingerprints that show if a training equals an earlier one: its rows, its marks and its rewards with all that they use.

`groupwise.notebook.reward_state` finds which of these a training itself changed, for example a list that a function fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.fingerprint import Look, digest
from groupwise.tasks.data.chat import Row
from groupwise.tasks.rewards.nesting import stood_for
from groupwise.tasks.rewards.rubric import Rubric

REWARDS = "rewards"
"""The fact that says by its weight and its code what each part is."""
USED = "used by rewards"
"""The fact that says what they use, by name: helpers, values, what is in objects."""
UNSEEN = "known by type alone"
"""Names objects of libraries that rewards use, with their types; nothing to compare, since the types are in `USED`."""
ROWS = ("rows to train on", "rows to test")
"""The facts that hang on the split."""


def facts_of(
    config: TrainingConfig, train: Sequence[Row], test: Sequence[Row], rewards: Rubric | None = None
) -> dict[str, Any]:
    """Facts that two trainings must share to be the same, beside the core's config; those of `rewards` if they are known.

    A look at rewards follows all that they use.
    """
    found: dict[str, Any] = {
        **{name: digest(list(rows)) for name, rows in zip(ROWS, (train, test), strict=True)},
        "marks": digest([config.tags.reasoning, config.tags.answer]),
    }
    if rewards is not None:
        found |= reward_facts(rewards)
    return found


def reward_facts(rewards: Rubric) -> dict[str, Any]:
    """The facts of `facts_of` about rewards, and things in them that are known by type alone (`UNSEEN`)."""
    parts = zip(rewards.names, rewards.weights, rewards.functions, strict=True)
    looks = [(name, weight, Look(stood_for(function))) for name, weight, function in parts]
    return {
        REWARDS: {name: digest([weight, look.found[""]]) for name, weight, look in looks},
        USED: {
            f"{path} of the reward {name}": each
            for name, _, look in looks
            for path, each in look.found.items()
            if path
        },
        UNSEEN: {
            " ".join([*([path] if path else []), f"of the reward {name}"]): kind
            for name, _, look in looks
            for path, kind in look.unseen.items()
        },
    }


def _of_one_alone(*facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Endings of the names of things that belong to rewards which only one of both has."""
    one, other = (set[str](each.get(REWARDS, ())) for each in facts)
    return tuple(f" of the reward {each}" for each in one ^ other)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of the facts in `now`, in words; parts of the reward by their names."""
    found: list[str] = []
    for name, value in now.items():
        was = before.get(name) if name != UNSEEN else value
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            one, other = cast("Mapping[str, str]", was), cast("Mapping[str, str]", value)
            parts = sorted(each for each in {*one, *other} if one.get(each) != other.get(each))
            if name == REWARDS:
                found += [f"the reward {part}" for part in parts]
            else:
                found += [part for part in parts if not part.endswith(_of_one_alone(before, now))]
        elif was != value:
            found.append(name)
    return found
