"""Exports a run's record for other programs, as JSON lines or Parquet: one file for each of `KINDS`.

The command `groupwise runs export` writes the files to any folder; a run that reports to `parquet` writes them to its own. Both formats
have the same rows, except that NaN and infinities, which JSON does not have, are null in JSON lines. Values without a fixed schema
(a dataset's columns, messages, an environment's notes) are JSON text in both.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from itertools import count, islice, starmap
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.core import atomic_files
from groupwise.core.extras import require_packages
from groupwise.runs.records import RolloutDetail, RolloutFilter, RolloutView
from groupwise.runs.store import Store

RecordFormat = Literal["jsonl", "parquet"]

Row = dict[str, Any]

KINDS = ("rollouts", "metrics", "evaluations", "evaluation_rows", "warnings")
"""The names of the files, by content."""
ROWS_AT_ONCE = 512
"""Rows of a file that are in memory at once, in addition to those of one step or evaluation."""


def check_can_write(to: RecordFormat) -> None:
    """UsageError if the package that writes this format is not installed."""
    if to == "parquet":
        require_packages("Parquet", "train", "pyarrow")


def write_record(store: Store, to: RecordFormat, folder: Path, steps: int) -> None:
    """Write everything recorded of the first `steps` steps to an existing folder.

    Rows are read while they are written, one step or evaluation at a time.
    """
    # The column of each metric: its name. A metric called `step` gets another one, because the step's own column has that name.
    names = store.metric_names()
    free_name = next(name for n in count() if (name := f"metric{'s' * n}/step") not in names)
    names = {name: free_name if name == "step" else name for name in names}
    columns = {**_COLUMNS, "metrics": {"step": "whole", **dict.fromkeys(names.values(), "number")}}
    for kind in KINDS:
        rows = map(_encodable, _rows_of_kind(store, kind, steps, names))
        _write_rows(folder / f"{kind}.{to}", to, columns[kind], rows)


# --- rows ----------------------------------------------------------------------------------------

_COLUMNS: dict[str, dict[str, str]] = {
    "rollouts": {
        **dict.fromkeys(("id", "step", "group", "rollout", "attempt", "example"), "whole"),
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
"""The types of each kind's columns, in their order; `metrics` has the run's own columns."""


def _rows_of_kind(store: Store, kind: str, steps: int, metrics: Mapping[str, str]) -> Iterator[Row]:
    """The rows of one kind, of the first `steps` steps. `metrics`: the columns of metrics by their names.

    rollouts         one row each
    metrics          one row for each step, with a column for every metric of the run
    evaluations      one row for each metric of each evaluation
    evaluation_rows  one row for each prompt or sample of each evaluation, its content as JSON text
    warnings         one row for each signal that starts or ends, its numbers as JSON text
    """
    if kind == "warnings":
        for warning in store.warnings():
            if warning.step <= steps:
                yield {**asdict(warning), "values": _as_json(dict(warning.values))}
    elif kind in ("evaluations", "evaluation_rows"):
        yield from _evaluation_rows(store, kind, steps)
    else:
        for step in range(1, steps + 1):
            if kind == "rollouts":
                with closing(store.every_rollout(RolloutFilter(step=step))) as rollouts:
                    yield from starmap(_rollout_row, rollouts)
            else:
                values = store.step_metrics(step - 1)
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
    """These rollouts as lines of `rollouts.jsonl`."""
    with closing(store.every_rollout(filters)) as rollouts:
        for row in starmap(_rollout_row, rollouts):
            yield _json_line(_COLUMNS["rollouts"], _encodable(row))


def _rollout_row(view: RolloutView, detail: RolloutDetail) -> Row:
    """A row with the example's columns and the environment's notes as JSON text."""
    return {
        **asdict(view),
        **asdict(detail),
        "columns": _plain_json(detail.columns),
        "messages": _plain_json(detail.messages),
        "notes": _plain_json(detail.notes),
    }


def _as_json(value: Any) -> str:
    """Strict JSON, without NaN or infinities."""
    return json.dumps(atomic_files.without_nan(value), allow_nan=False)


def _plain_json(stored: str | None) -> str | None:
    """The record's stored JSON as strict JSON: the stored form may contain NaN or Infinity."""
    if stored is None or not ("NaN" in stored or "Infinity" in stored):
        return stored
    return _as_json(json.loads(stored))


def _encodable(row: Mapping[str, Any]) -> Row:
    """The row with lone surrogates replaced: a model may write them, and UTF-8 cannot."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }


# --- files ---------------------------------------------------------------------------------------


def _json_line(columns: Iterable[str], row: Row) -> str:
    """The row as a line of JSON."""
    values = atomic_files.without_nan({name: row[name] for name in columns})
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _write_rows(
    file: Path, to: RecordFormat, columns: Mapping[str, str], rows: Iterable[Row]
) -> None:
    """Write a file. Parquet gets an explicit schema, so an empty file has its columns too."""
    if to == "jsonl":
        with file.open("w", encoding="utf-8") as output:
            for row in rows:
                output.write(_json_line(columns, row))
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
    remaining = iter(rows)
    with tables.ParquetWriter(file, schema) as writer:
        while batch := list(islice(remaining, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
