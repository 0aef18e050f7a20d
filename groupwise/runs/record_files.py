"""A run's record as files for other programs, as JSON lines or Parquet: what `KINDS` names, each a file.

The command `groupwise runs export` writes them anywhere, and a run that reports to `parquet` into its own folder. Both formats have the
same rows; only for a number that is none, which JSON does not have, JSON lines say null. What has no columns of its own (those of a data
set, messages, notes of an environment) is JSON text in both.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from itertools import count, islice, starmap
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.runs.records import RolloutDetail, RolloutFilter, RolloutView
from groupwise.runs.store import Store

RecordFormat = Literal["jsonl", "parquet"]

Row = dict[str, Any]

KINDS = ("rollouts", "metrics", "evaluations", "evaluation_rows", "warnings")
"""The files, by what they hold."""
ROWS_AT_ONCE = 512
"""Rows of a file that are in memory together, beside those of one step or evaluation."""


def check_can_write(to: RecordFormat) -> None:
    """UsageError if the package that writes this format is not installed."""
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError("Parquet needs the package pyarrow: pip install 'groupwise[train]'.")


def steps_of(store: Store) -> int:
    """How many steps were recorded."""
    last = store.last_step()
    return 0 if last is None else last + 1


def write_record(store: Store, to: RecordFormat, folder: Path, steps: int) -> None:
    """Everything that was recorded of the first so many steps, into a folder that is there.

    Rows are read as they are written, a step or an evaluation at a time.
    """
    # The column of each metric of the run: its name, but never that of the step's own column.
    names = store.metric_names()
    free = next(name for n in count() if (name := f"metric{'s' * n}/step") not in names)
    names = {name: free if name == "step" else name for name in names}
    columns = {**_COLUMNS, "metrics": {"step": "whole", **dict.fromkeys(names.values(), "number")}}
    for kind in KINDS:
        rows = map(_encodable, _rows(store, kind, steps, names))
        _write(folder / f"{kind}.{to}", to, columns[kind], rows)


# --- rows ----------------------------------------------------------------------------------------

_COLUMNS: dict[str, dict[str, str]] = {
    "rollouts": {
        **dict.fromkeys(("id", "step", "draw", "member", "attempt", "example"), "whole"),
        **dict.fromkeys(("outcome", "reason"), "text"),
        **dict.fromkeys(("reward", "advantage"), "number"),
        "parts": "parts",
        "truncated": "yes or no",
        "completion_tokens": "whole",
        **dict.fromkeys(("prompt", "completion", "ended_by", "task", "origin"), "text"),
        "again": "whole",
        **dict.fromkeys(("columns", "messages", "notes"), "text"),
    },
    "evaluations": {
        "step": "whole",
        **dict.fromkeys(("name", "policy", "metric"), "text"),
        "value": "number",
    },
    "evaluation_rows": {
        "step": "whole",
        **dict.fromkeys(("name", "policy"), "text"),
        "position": "whole",
        "row": "text",
    },
    "warnings": {
        "step": "whole",
        **dict.fromkeys(("name", "kind", "message", "values"), "text"),
    },
}
"""Meaning of each kind's columns, in their order; those of metrics are the run's own."""


def _rows(store: Store, kind: str, steps: int, metrics: Mapping[str, str]) -> Iterator[Row]:
    """The rows of one kind, of the first `steps` steps. `metrics`: the columns of metrics by their names.

    rollouts         a row each
    metrics          a row for each step, with every name that the run has
    evaluations      a row for each metric of each evaluation
    evaluation_rows  a row for each prompt or sample of each evaluation, its content as JSON text
    warnings         a row for each signal that begins or ends, its numbers as JSON text
    """
    if kind == "warnings":
        for warning in store.warnings():
            if warning.step <= steps:
                yield {**asdict(warning), "values": _as_json(dict(warning.values))}
    elif kind in ("evaluations", "evaluation_rows"):
        yield from _evaluation_rows(store, kind, steps)
    else:
        for step in range(steps):
            if kind == "rollouts":
                with closing(store.every_rollout(RolloutFilter(step=step))) as found:
                    yield from starmap(_rollout, found)
            else:
                values = store.step_metrics(step)
                yield {
                    "step": step,
                    **{column: values.get(name) for name, column in metrics.items()},
                }


def _evaluation_rows(store: Store, kind: str, steps: int) -> Iterator[Row]:
    """The rows of `evaluations`, or of `evaluation_rows`."""
    for record in store.evaluations(rows=False):
        if record.step > steps:
            continue
        key = {"step": record.step, "name": record.name, "policy": record.policy}
        if kind == "evaluations":
            for name, value in record.metrics.items():
                yield {**key, "metric": name, "value": value}
        else:
            rows = store.evaluation_rows(record.step, record.name, record.policy)
            for position, row in enumerate(rows):
                yield {**key, "position": position, "row": _as_json(row)}


def rollout_lines(store: Store, filters: RolloutFilter) -> Generator[str]:
    """The lines that `rollouts.jsonl` would have of these rollouts."""
    with closing(store.every_rollout(filters)) as found:
        for row in starmap(_rollout, found):
            yield _line(_COLUMNS["rollouts"], _encodable(row))


def _rollout(view: RolloutView, detail: RolloutDetail) -> Row:
    """A row with the example's columns and the environment's notes as JSON text."""
    return {
        **asdict(view),
        **asdict(detail),
        "columns": _plain_json(detail.columns),
        "messages": _plain_json(detail.messages),
        "notes": _plain_json(detail.notes),
    }


def _as_json(value: Any) -> str:
    """JSON that every reader takes."""
    return json.dumps(atomic_files.without_nan(value), allow_nan=False)


def _plain_json(stored: str | None) -> str | None:
    """The record's own JSON, which may name numbers that JSON does not have."""
    if stored is None or not ("NaN" in stored or "Infinity" in stored):
        return stored
    return _as_json(json.loads(stored))


def _encodable(row: Mapping[str, Any]) -> Row:
    """Without halves of characters, which a model may write and UTF-8 has not."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }


# --- files ---------------------------------------------------------------------------------------


def _line(columns: Iterable[str], row: Row) -> str:
    """The row as a line of JSON."""
    plain = atomic_files.without_nan({name: row[name] for name in columns})
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"


def _write(file: Path, to: RecordFormat, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
    """Write a file. Parquet has a given schema, so that an empty file has its columns too."""
    if to == "jsonl":
        with file.open("w", encoding="utf-8") as opened:
            for row in rows:
                opened.write(_line(columns, row))
        return
    import pyarrow  # pyright: ignore[reportMissingTypeStubs]
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    arrow, tables = cast("Any", pyarrow), cast("Any", parquet)
    text, number, whole = arrow.string(), arrow.float64(), arrow.int64()
    part = [("name", text), ("value", number), ("weight", number), ("turn", whole)]
    types = {
        "text": text,
        "number": number,
        "whole": whole,
        "yes or no": arrow.bool_(),
        "parts": arrow.list_(arrow.struct(part)),
    }
    schema = arrow.schema([(name, types[kind]) for name, kind in columns.items()])
    left = iter(rows)
    with tables.ParquetWriter(file, schema) as writer:
        while some := list(islice(left, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(some, schema=schema))
