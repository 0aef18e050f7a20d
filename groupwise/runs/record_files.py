"""A run's record as files for other programs: its rollouts, metrics and evaluations as JSON lines or Parquet.

The command `groupwise runs export` writes them anywhere, and a run that reports to `parquet` into its own folder.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.errors import UsageError
from groupwise.runs import durable
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store

RecordFormat = Literal["jsonl", "parquet"]

Row = dict[str, Any]


def check_can_write(to: RecordFormat) -> None:
    """UsageError if the package that writes this format is not installed."""
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError("Parquet needs the package pyarrow: pip install 'groupwise[train]'.")


def steps_of(store: Store) -> int:
    """How many steps were recorded."""
    last = store.last_step()
    return 0 if last is None else last + 1


def write_record(store: Store, to: RecordFormat, folder: Path, steps: int) -> None:
    """Everything that was recorded of the first so many steps, into a folder that is there."""
    write = _write_jsonl if to == "jsonl" else _write_parquet
    write(folder, "rollouts", _rollouts(store, steps))
    write(folder, "metrics", _metrics(store, steps))
    write(folder, "evaluations", _evaluations(store, steps))


def _rollouts(store: Store, steps: int) -> Iterator[list[Row]]:
    for step in range(steps):
        views = store.rollouts(RolloutFilter(step=step, limit=sys.maxsize))
        yield [asdict(view) for view in views]


def _metrics(store: Store, steps: int) -> Iterator[list[Row]]:
    """A row for each step, with every name that the run has."""
    curves = {name: dict(curve) for name, curve in store.metrics().items()}
    for step in range(steps):
        yield [{"step": step, **{name: curve.get(step) for name, curve in curves.items()}}]


def _evaluations(store: Store, steps: int) -> Iterator[list[Row]]:
    """A row for each metric of each evaluation."""
    for record in store.evaluations(rows=False):
        if record.step <= steps:
            facts = {"step": record.step, "name": record.name, "policy": record.policy}
            yield [{**facts, "metric": name, "value": v} for name, v in record.metrics.items()]


def _write_jsonl(folder: Path, name: str, parts: Iterable[list[Row]]) -> None:
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as file:
        for rows in parts:
            for row in rows:
                plain = durable.without_nan(row)
                file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(folder: Path, name: str, parts: Iterable[list[Row]]) -> None:
    import pyarrow  # pyright: ignore[reportMissingTypeStubs]
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    arrow, tables = cast("Any", pyarrow), cast("Any", parquet)
    schema = _schema(arrow, name, parts := list(parts) if name == "metrics" else parts)
    with tables.ParquetWriter(folder / f"{name}.parquet", schema) as writer:
        for rows in parts:
            writer.write_table(
                arrow.Table.from_pylist([_encodable(row) for row in rows], schema=schema)
            )


def _schema(arrow: Any, name: str, parts: Any) -> Any:
    """The columns of a file, so that an empty one has them too."""
    text, number, whole = arrow.string(), arrow.float64(), arrow.int64()
    if name == "metrics":
        names = list(parts[0][0])[1:] if parts else []
        return arrow.schema([("step", whole), *((each, number) for each in names)])
    if name == "evaluations":
        named = [(each, text) for each in ("name", "policy", "metric")]
        return arrow.schema([("step", whole), *named, ("value", number)])
    part = [("name", text), ("value", number), ("weight", number), ("turn", whole)]
    return arrow.schema(
        [
            *((each, whole) for each in ("id", "step", "draw", "member", "attempt", "example")),
            *((each, text) for each in ("outcome", "reason")),
            *((each, number) for each in ("reward", "advantage")),
            ("parts", arrow.list_(arrow.struct(part))),
            ("truncated", arrow.bool_()),
            ("completion_tokens", whole),
            *((each, text) for each in ("prompt", "completion", "ended_by")),
        ]
    )


def _encodable(row: Mapping[str, Any]) -> Row:
    """Without halves of characters, which a model may write and UTF-8 has not."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }
