"""Evaluations: those recorded by a run itself, those that `groupwise eval` wrote to the run's results, and those of other policies
(such as a model that was not trained here), which it writes to a folder next to the runs.

Result files hold every answer and are large; their summary is computed once and cached until the file changes.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.runs.find import is_file
from groupwise.runs.folder import RESULTS
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.training.evaluation.measures import REWARD, is_share, measure
from groupwise.training.evaluation.results import numbers_of, read_result
from groupwise.training.evaluation.statistics import interval_at_once
from groupwise.training.review.compare import EVAL_LOSS, LOSS, Side, side_of_file

PASS = re.compile(r"pass@(\d+)")
MAX_FILES = 500
"""Most result files of a run that are read, the newest."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The results of one evaluation."""

    step: int | None
    """The number of steps that the run had taken; None if unknown."""
    name: str
    policy: str
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    """95 % intervals of the metrics that have one."""
    reference: str
    """Name for comparing, after the run's name: `@STEP:NAME`, `:FILE.json`; empty if there are only metrics."""
    answers: bool
    """True if there are answers to read, not only losses on given answers."""
    file: str | None
    """Name of its result file; None if it is in the run's record."""
    at: float
    """Time at which the file was written, in seconds since 1970; 0 if unknown."""


def pass_at_k_names(names: Iterable[str], before: str = "") -> dict[int, str]:
    """The names of pass@k, the smallest k first; `before` is their prefix."""
    matches = ((PASS.fullmatch(name.removeprefix(before)), name) for name in names)
    return dict(sorted((int(k[1]), name) for k, name in matches if k and name.startswith(before)))


def evaluations_of(run: Path, store: Store, *, intervals: int = 0) -> list[EvaluationResult]:
    """Evaluations by steps, those of files after those of the record. Only the newest `intervals` of them get intervals, because
    these are slow to compute.
    """
    recorded, with_answers = store.evaluations(rows=False), store.evaluations_with_rows()
    first_with_interval = len(recorded) - intervals
    results: list[EvaluationResult] = []
    for index, evaluation in enumerate(recorded):
        with_rows = (evaluation.step, evaluation.name, evaluation.policy) in with_answers
        losses = LOSS in evaluation.metrics or EVAL_LOSS in evaluation.metrics
        results.append(
            EvaluationResult(
                evaluation.step,
                evaluation.name,
                evaluation.policy,
                dict(evaluation.metrics),
                _intervals(store, evaluation) if index >= first_with_interval else {},
                reference=f"@{evaluation.step}:{evaluation.name}" if with_rows else "",
                answers=with_rows and not losses,
                file=None,
                at=0.0,
            )
        )
    for evaluation in _read_results(run / RESULTS):
        name, _, step = evaluation.policy.rpartition("@")  # `RUN@STEP`, if it is of this run
        of_run = name == run.name and step.isdecimal() and len(step) < 16
        results.append(replace(evaluation, step=int(step) if of_run else None))
    return sorted(results, key=lambda evaluation: (evaluation.step is None, evaluation.step or 0))


def evaluations_outside_runs(runs: Path) -> list[EvaluationResult]:
    """Evaluations in the folder next to the runs, and directly in the runs' folder; the newest files first."""
    results = [
        replace(evaluation, reference=f":{prefix}{evaluation.file}" if evaluation.reference else "")
        for prefix, folder in results_folders(runs).items()
        for evaluation in _read_results(folder)
    ]
    return sorted(results, key=lambda evaluation: -evaluation.at)


def results_folders(runs: Path) -> dict[str, Path]:
    """Folders of results that belong to no run, by the prefix of the file's name in a reference."""
    return {"": runs, f"{RESULTS}/": runs.absolute().parent / RESULTS}


def side_outside_runs(runs: Path, reference: str) -> Side:
    """An evaluation outside the runs, to be compared, by its reference. Raises RunNotFoundError."""
    for prefix, folder in results_folders(runs).items():
        name = reference.removeprefix(f":{prefix}")
        names_file = reference == f":{prefix}{name}" and Path(name).name == name
        if names_file and name.endswith(".json") and is_file(folder / name):
            return side_of_file(folder / name)
    raise RunNotFoundError(f"There is no results file {reference[1:101]!r} next to the runs.")


def _intervals(store: Store, record: EvaluationRecord) -> Mapping[str, tuple[float, float]]:
    """95 % intervals of the reward and of metrics that are shares, computed from all answers once and then cached."""
    names = tuple(name for name in record.metrics if name == REWARD or is_share(name))
    values = repr([record.metrics[name] for name in names])  # repr, because NaN never equals itself
    key = (str(store.path), record.step, record.name, record.policy, names, values)
    if not names:
        return {}
    with _INTERVALS_LOCK:
        if key in _INTERVALS:
            return _INTERVALS[key]
    rows = store.evaluation_rows(*key[1:4])
    intervals: dict[str, tuple[float, float]] = {}
    for name in names:
        measured = measure(name, rows)
        finite = (
            [value for value in measured.values.values() if math.isfinite(value)]
            if measured
            else []
        )
        if finite:
            interval = interval_at_once(finite, share=is_share(name))
            intervals[name] = (interval.low, interval.high)
    with _INTERVALS_LOCK:
        while len(_INTERVALS) >= 1000:
            del _INTERVALS[next(iter(_INTERVALS))]
        _INTERVALS[key] = intervals
    return intervals


_INTERVALS: dict[tuple[Any, ...], Mapping[str, tuple[float, float]]] = {}
_INTERVALS_LOCK = threading.Lock()


def _read_results(folder: Path) -> list[EvaluationResult]:
    """Evaluations in result files, oldest first; files with other content are skipped."""
    stamped: list[tuple[int, int, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(OSError, UnicodeEncodeError):
            path.name.encode()  # a name that is not valid text has no address
            facts = path.stat()
            stamped.append((facts.st_mtime_ns, facts.st_size, path))
    results = [
        _read_result(str(path), stamp, size) for stamp, size, path in sorted(stamped)[-MAX_FILES:]
    ]
    return [evaluation for evaluation in results if evaluation is not None]


@lru_cache(maxsize=2000)
def _read_result(file: str, stamp: int, _size: int) -> EvaluationResult | None:
    path = Path(file)
    try:
        content, has_answers = read_result(path), True
    except UsageError:  # a suite, for example, has no answers
        content, has_answers = dict[str, Any](), False
        with suppress(OSError, ValueError, RecursionError):
            document = json.loads(path.read_bytes())
            content = cast("dict[str, Any]", document) if isinstance(document, dict) else content
    policy, metrics = content.get("policy"), content.get("metrics")
    if not isinstance(policy, str) or not isinstance(metrics, dict):
        return None
    intervals: dict[str, tuple[float, float]] = {}
    bounds = content.get("intervals_95")
    for name, pair in (cast("dict[str, Any]", bounds) if isinstance(bounds, dict) else {}).items():
        with suppress(TypeError, ValueError, OverflowError):
            low, high = map(float, pair)
            intervals[name] = (low, high)
    return EvaluationResult(
        None,
        str(content.get("task") or path.stem),
        policy,
        numbers_of(cast("dict[str, Any]", metrics)),
        intervals,
        f":{path.name}" if has_answers else "",
        has_answers,
        path.name,
        stamp / 1e9,
    )
