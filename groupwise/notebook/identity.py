"""Whether a training is the same as an earlier one: its rows, its marks and the code of its rewards, each as a short fingerprint.

What is in the lists, dictionaries and variables that rewards use is told apart; `groupwise.notebook.collected` tells which of them a
training itself changed, as where a function collects or counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from groupwise.data.chat import Row
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.fingerprint import Teller, digest, second_look
from groupwise.rewards.rubric import Rubric

REWARDS = "rewards"
"""The fact that says by what each part is known."""
USED = "used by rewards"
"""The fact that says what is in their lists, dictionaries and arrays, and in variables that they store to."""
ROWS = ("rows to train on", "rows to test")
"""The facts that hang on the split."""


def facts_of(
    config: TrainingConfig, train: Sequence[Row], test: Sequence[Row], rewards: Rubric | None = None
) -> dict[str, Any]:
    """What two trainings must agree in to be one, beside the core's config; of `rewards` where they are known."""
    found: dict[str, Any] = {
        **{name: digest(list(rows)) for name, rows in zip(ROWS, (train, test), strict=True)},
        "marks": digest([config.tags.reasoning, config.tags.answer]),
    }
    if rewards is not None:
        looks = _looks(rewards)
        found |= {REWARDS: _known(rewards, looks), USED: _used(looks)}
    return found


def known_by(rewards: Rubric) -> dict[str, str]:
    """For each part its weight and code, as a fingerprint."""
    return _known(rewards, _looks(rewards))


def used_by(rewards: Rubric) -> dict[str, str]:
    """What rewards use and may change: a fingerprint of what is in each now."""
    return _used(_looks(rewards))


def unseen_by(rewards: Rubric) -> list[str]:
    """Objects of libraries that rewards use, each with its type: all that is known of them."""
    return [
        f"{path} ({kind}) of the reward {name}"
        for name, (_, teller) in _looks(rewards).items()
        for path, kind in teller.unseen.items()
    ]


def _looks(rewards: Rubric) -> dict[str, tuple[Any, Teller]]:
    """For each part what is told of it, and who told it: all of what it reaches is walked for that."""
    parts = zip(rewards.names, rewards.functions, strict=True)
    return {name: second_look(each) for name, each in parts}


def _known(rewards: Rubric, looks: Mapping[str, tuple[Any, Teller]]) -> dict[str, str]:
    weights = dict(zip(rewards.names, rewards.weights, strict=True))
    return {name: digest([weights[name], told]) for name, (told, _) in looks.items()}


def _used(looks: Mapping[str, tuple[Any, Teller]]) -> dict[str, str]:
    return {
        f"{path} of the reward {name}": content
        for name, (_, teller) in looks.items()
        for path, content in teller.used.items()
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what the facts of `now` differ, in words; parts of the reward by their names."""
    found: list[str] = []
    for name, value in now.items():
        was = before.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            one, other = cast("Mapping[str, str]", was), cast("Mapping[str, str]", value)
            parts = sorted(each for each in {*one, *other} if one.get(each) != other.get(each))
            found += parts if name == USED else [f"the reward {part}" for part in parts]
        elif was != value:
            found.append(name)
    return found
