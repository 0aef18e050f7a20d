"""Result files of evaluations. Each is JSON and is never overwritten.

    format, kind      1, "evaluation"
    policy            the evaluated policy; `fingerprint` is that of its weights
    task, config      the task's name, the resolved configuration
    finished_at       seconds since 1970
    prompts, samples  their numbers
    metrics           name -> value
    intervals_95      name -> [low, high]
    left_out          name -> number of prompts with too few scored samples for it, if any
    failures          reason -> number of samples that could not be scored for it, if any
    advice            what to do before training, if an untrained model solves hardly anything
    other_settings    key -> its value, and that of the run whose weights were evaluated, if they differ
    details           the complete return value of the task's compute_metrics
    rows              one per sample; see `groupwise.training.evaluation.measures.rows_of`, and `columns`, the other columns of the
                      prompt's row of data

The files are in `results/` of the run whose weights were evaluated; for other weights, in a folder `results` next to the folder of runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.runs.folder import add_result, result_file

FORMAT = 1
KIND = "evaluation"

LONGEST_NAME = 100
"""Largest number of characters of the task's name, and of the policy's, in the name of a file."""

REQUIRED_KEYS = {"policy": str, "metrics": dict, "rows": list}
REQUIRED_ROW_KEYS = (
    "example",
    "sample",
    "prompt",
    "completion",
    "reward",
    "parts",
    "outcome",
    "tokens",
)
"""Keys that a file and each of its rows must have to be compared."""


def result_name(task: str, policy: str) -> str:
    """Task and policy in characters and a length that every file system accepts; of a long path, the end is kept."""
    safe_policy = re.sub(r"[^\w.@+-]+", "_", policy.strip("./"))
    return f"{task[:LONGEST_NAME]}-{safe_policy[-LONGEST_NAME:]}"


def check_writable(folder: Path, name: str, output: Path | None) -> None:
    """Raise UsageError before long work if its result could not be written."""
    if output is not None and output.is_dir():
        raise UsageError(
            f"--output {output} is a folder; give the name of a file, such as {output / f'{name}.json'}."
        )
    if output is not None and output.exists():
        raise UsageError(
            f"{output} exists, and results are never overwritten. Give another --output."
        )
    atomic_files.check_can_write(output or result_file(folder, name))


def write_result(content: Mapping[str, Any], folder: Path, name: str, output: Path | None) -> Path:
    """Write an evaluation to `output`, or as a new file into `folder/results`. Returns the file.

    If another process has written `output` since it was checked, the name becomes `NAME-2`, so that finished work is not lost.
    """
    document = {"format": FORMAT, "kind": KIND, **content}
    if output is None:
        return add_result(folder, name, document)
    with atomic_files.explaining_disk_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        file = output if number == 1 else output.with_stem(f"{output.stem}-{number}")
        with suppress(FileExistsError):
            atomic_files.write_json(file, document, replace=False)
            return file
    raise AssertionError("unreachable")


def read_result(path: Path) -> dict[str, Any]:
    """Read an evaluation's result. Raises UsageError if it is something else, or has a newer format."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read as a result of `groupwise eval`: {error}."
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a result of `groupwise eval`: it holds no JSON object.")
    content = cast("dict[str, Any]", content)
    kind = content.get("kind", KIND)
    if kind != KIND:
        raise UsageError(
            f"{path} holds the result of a {kind}; what can be compared is an evaluation."
        )
    format_version = content.get("format", FORMAT)
    if not isinstance(format_version, int) or format_version > FORMAT:
        raise UsageError(
            f"{path} has format {format_version!r:.100}; this version of Groupwise knows formats up to {FORMAT}. Upgrade it."
        )
    missing = [
        name for name, type_ in REQUIRED_KEYS.items() if not isinstance(content.get(name), type_)
    ]
    if missing := missing or _missing_in_rows(content["rows"]):
        raise UsageError(
            f"{path} is not a result of `groupwise eval`: it has no {' and no '.join(missing)}."
        )
    return content


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics; files of other programs may contain other values as well."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _missing_in_rows(rows: Sequence[Any]) -> list[str]:
    """Keys that a row lacks; if none are missing, keys whose values have the wrong type."""
    if not rows:
        return ["rows"]
    missing = [
        f"`{name}` in each row"
        for name in REQUIRED_ROW_KEYS
        if not all(isinstance(row, dict) and name in row for row in rows)
    ]
    return missing or [
        f"{type_name} as `{name}` in each row"
        for name, (type_name, is_valid) in ROW_KEY_TYPES.items()
        if not all(is_valid(row[name]) for row in rows)
    ]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _has_numbers(parts: Any) -> bool:
    return isinstance(parts, dict) and all(map(_is_number, cast("dict[str, Any]", parts).values()))


ROW_KEY_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "example": ("number or text", lambda value: isinstance(value, int | float | str | None)),
    "reward": ("number or null", _is_number),
    "parts": ("object of numbers", _has_numbers),
    "tokens": ("number or null", _is_number),
}
"""Required types of the values that are used in computations: key -> name of the type, check."""
