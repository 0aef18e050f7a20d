"""`groupwise runs import`: makes a run of the completions that another trainer has logged, for the dashboard and `groupwise runs`.

TRL's trainers log them with `log_completions=True`: a Parquet file at each logging step in the folder `completions` of `output_dir`, whose
columns are step, prompt, completion, one for each reward function, and advantage. The metrics are in the `trainer_state.json` of the newest
checkpoint. Files of other trainers are read if they have the same columns.

Step 10 of TRL, the tenth update, is step 9 here. Steps without a file stay empty.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import UsageError
from groupwise.core.reward_call.text import completion_text
from groupwise.core.types import Example, Group, Prompt, RewardPart, Rollout
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import StepRecord
from groupwise.tasks.data.sources import read_source
from groupwise.training.loops.metrics import group_metrics

NEEDED = ("step", "prompt", "completion")
FOLDER, STATE = "completions", "trainer_state.json"
SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class Imported:
    """The run that was made."""

    run: str
    folder: Path
    steps: int
    rollouts: int
    rewards: tuple[str, ...]
    """Columns that were taken for rewards."""


def import_completions(
    source: Path | str,
    *,
    name: str | None = None,
    rewards: Sequence[str] = (),
    runs_dir: Path = Path("runs"),
) -> Imported:
    """Make the run `name` (default: the name of `source`) of logged completions: a file, or the `output_dir` of a TRL run.

    `rewards` are the columns that hold rewards; without them, those of which `trainer_state.json` has metrics, else all columns of numbers.
    The total of a rollout is their sum. Raises UsageError if the files are not such.
    """
    source = Path(source)
    rows = [row for file in _files_of(source) for row in read_source(str(file))]
    missing = [column for column in NEEDED if column not in rows[0]]
    if missing:
        raise UsageError(
            f"{source} has no column {missing[0]!r}. Logged completions have the columns {', '.join(NEEDED)} and one for each reward; "
            f"here are: {', '.join(rows[0])}."
        )
    history = _read_history(source)
    rewards = tuple(rewards) or _find_rewards(rows, history)
    unknown = [column for column in rewards if column not in rows[0]]
    if unknown or not rewards:
        named = (
            f"no column {unknown[0]!r}" if unknown else "no column of numbers other than the step"
        )
        raise UsageError(
            f"{source} has {named}. Name the rewards by --reward; columns are: {', '.join(rows[0])}."
        )
    groups: dict[int, list[Group]] = {}
    examples: dict[str, int] = {}
    by_prompt = groupby(rows, key=lambda row: (int(row["step"]), row["prompt"]))
    for draw, ((step, prompt), members) in enumerate(by_prompt):
        index = examples.setdefault(json.dumps(prompt, sort_keys=True), len(examples))
        example = Example(index, _without_nulls(prompt))
        rollouts = tuple(
            _make_rollout(row, draw, member, rewards) for member, row in enumerate(members)
        )
        groups.setdefault(max(0, step - 1), []).append(Group(draw, example, rollouts))
    folder = RunFolder.create(
        runs_dir,
        name or source.resolve().stem,
        {"run": {"name": name or source.resolve().stem}, "imported_from": str(source)},
        {"kind": "rl", "task": str(source)},
        keep_tokens=False,
    )
    last = max([*groups, *history])
    with folder:
        for step in range(last + 1):
            _commit(folder, step, groups.get(step, []), history.get(step, {}))
        folder.finish("finished")
    return Imported(folder.name, folder.path, last + 1, len(rows), rewards)


def _files_of(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    places = (source / FOLDER, source)
    files = [
        file for place in places for file in sorted(place.glob("*")) if file.suffix in SUFFIXES
    ]
    if not files:
        raise UsageError(
            f"There are no logged completions in {source}: no file {' or '.join(SUFFIXES)}, nor a folder {FOLDER!r} with such. TRL writes "
            "them with GRPOConfig(log_completions=True)."
        )
    return files


def _read_history(source: Path) -> dict[int, dict[str, float]]:
    """The metrics of a TRL run by our step, from the newest state that is there."""
    states = [*source.glob(STATE), *source.glob(f"checkpoint-*/{STATE}")]
    if not states:
        return {}
    newest = max(states, key=lambda file: file.stat().st_mtime)
    history: dict[int, dict[str, float]] = {}
    for entry in json.loads(newest.read_text(encoding="utf-8")).get("log_history", []):
        numbers = {key: float(value) for key, value in entry.items() if _is_number(value)}
        step = int(numbers.pop("step", 0)) - 1
        if step >= 0:
            history.setdefault(step, {}).update(numbers)
    return history


def _find_rewards(
    rows: Sequence[Mapping[str, Any]], history: Mapping[int, Mapping[str, float]]
) -> tuple[str, ...]:
    logged = {metric for metrics in history.values() for metric in metrics}
    columns = [column for column in rows[0] if f"rewards/{column}/mean" in logged]
    return tuple(
        columns
        or [
            column
            for column in rows[0]
            if column not in ("step", "advantage") and any(_is_number(row[column]) for row in rows)
        ]
    )


def _make_rollout(
    row: Mapping[str, Any], draw: int, member: int, rewards: Sequence[str]
) -> Rollout:
    values = {name: row[name] if _is_number(row[name]) else None for name in rewards}
    applied = [value for value in values.values() if value is not None]
    rollout = Rollout(
        draw=draw,
        member=member,
        attempt=0,
        prompt_ids=(),
        segments=(),
        completion=completion_text(_without_nulls(row["completion"])),
        outcome="scored" if applied else "failed",
        reason=None if applied else "no reward applied",
        reward=sum(applied) if applied else None,
        parts=tuple(RewardPart(name, value) for name, value in values.items()),
        notes={key: row[key] for key in row if key not in (*NEEDED, *rewards, "advantage")},
    )
    advantage = row.get("advantage")
    return replace(rollout, advantage=advantage) if _is_number(advantage) else rollout


def _commit(
    folder: RunFolder, step: int, groups: Sequence[Group], logged: Mapping[str, float]
) -> None:
    """Rewards are counted from the rollouts; numbers of tokens, which these do not have, only come from the log."""
    counted = group_metrics(groups) if groups else {}
    without_tokens = {key: counted[key] for key in counted if not key.startswith("completions/")}
    record = StepRecord(
        step=step,
        version_in=step,
        version_out=step + 1,
        fingerprint_out="",
        draws=tuple(group.draw for group in groups),
        learning_rate=logged.get("learning_rate", 0.0),
        finished_at=time.time(),
    )
    folder.store.commit_step(record, groups, {**without_tokens, **logged})


def _without_nulls(messages: Any) -> Prompt:
    """Messages without the fields that Parquet adds, empty, where another message of the column has them; text as it is."""
    if isinstance(messages, str):
        return messages
    listed = cast("Iterable[Mapping[str, Any]]", messages)
    return [{key: value for key, value in each.items() if value is not None} for each in listed]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
