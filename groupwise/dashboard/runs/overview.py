"""One run: its state and last numbers, its plots, its warnings, its checkpoints, evaluations and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from groupwise.core.errors import GroupwiseError, StoreError
from groupwise.dashboard.pages import Page, Visit, live_url, page_route
from groupwise.dashboard.runs.archive import files_of
from groupwise.dashboard.runs.curves import names_of, plots_of
from groupwise.dashboard.sources.evaluations import evaluations_of
from groupwise.dashboard.sources.runs import RunEntry
from groupwise.runs import checkpoints
from groupwise.runs.advice import advice_on
from groupwise.runs.curves import WARM_UP
from groupwise.runs.find import ENDS, RunInfo, final_step
from groupwise.runs.folder import (
    CHECKPOINTS,
    FINAL,
    RECORD,
    flatten,
    is_served,
    read_config,
    read_summary,
)
from groupwise.runs.lock import holder
from groupwise.runs.records import WarningRecord
from groupwise.runs.store import Store
from groupwise.training.evaluation.statistics import welch_difference

MAX_WARNINGS = 20
"""Most warnings listed, the newest."""
NEWEST_FAILURES = 5_000
"""Most rollouts without a score whose reasons are read, the newest."""
LOG = "log.txt"
LOG_BYTES = 16_384
"""Bytes shown from the end of the log."""


def run(visit: Visit) -> Page:
    """The page of a run."""
    path = visit.context.run(visit.path_part("run"))
    data = overview_of(path, visit.context.runs.entry(path))
    return Page("run.html", data, live=live_url(path.name))


def overview_of(path: Path, entry: RunEntry) -> dict[str, Any]:
    """What the overview of a run shows, live or in a file."""
    with Store.open(path / RECORD, readonly=True) as store:
        names = names_of(store)
        last_step = store.last_step()
        meta, warnings, advice = store.get_meta(), store.warnings(), advice_on(store)
        data: dict[str, Any] = {
            **_run_header(path, entry),
            "served": is_served(meta),
            "kind": meta.get("kind", "rl"),
            "metrics": {} if last_step is None else store.step_metrics(last_step),
            "plots": {
                section: [asdict(plot) for plot in plots]
                for section, plots in plots_of(names, store.reward_ranges()).items()
            },
            "advice": advice,
            "change": _change_of_reward(store, entry.info),
            "problems": _problems(entry.info, meta.get("error"), advice, warnings),
            "warnings": [asdict(warning) for warning in warnings[-MAX_WARNINGS:]],
            "all_warnings": len(warnings),
            "failures": [asdict(failure) for failure in store.failures(newest=NEWEST_FAILURES)],
            "newest_failures": NEWEST_FAILURES,
            "evaluations": [asdict(evaluation) for evaluation in evaluations_of(path, store)],
            "resumes": [asdict(resume) for resume in store.resumes()],
            "error": meta.get("error"),
            "warm_up": meta.get(WARM_UP),
            "left_seconds": _seconds_left(store, entry.info),
            "curve": entry.curve,
            "metric": entry.metric,
        }
    summary = None
    with suppress(StoreError):  # the page shows everything else
        summary = read_summary(path)
    data |= {
        "checkpoints": _checkpoint_rows(path),
        "final_step": final_step(path) if (path / FINAL).is_dir() else None,
        "final_bytes": _folder_size(path / FINAL),
        "summary": summary,
        "log": _log_tail(path / LOG),
    }
    return data


def config(visit: Visit) -> Page:
    """All settings of a run, resolved."""
    path = visit.context.run(visit.path_part("run"))
    tree = read_config(path)
    data = {**run_header(visit, path), "config": tree, "settings": flatten(tree)}
    return Page("config.html", data)


def run_header(visit: Visit, path: Path) -> dict[str, Any]:
    """Data for the header of every page of a run."""
    return _run_header(path, visit.context.runs.entry(path))


def _run_header(path: Path, entry: RunEntry) -> dict[str, Any]:
    info = entry.info
    lock_holder = holder(path) if info.state == "running" else None
    return {
        "run": {
            "name": info.name,
            "state": info.state or "broken",
            "broken": info.broken,
            "steps": info.steps,
            "max_steps": info.max_steps,
            "reward_first": info.reward_first,
            "reward_last": info.reward_last,
            "loss_first": info.loss_first,
            "loss_last": info.loss_last,
            "started": info.started,
            "written": entry.written,
            "model": info.model,
            "task": info.task,
            "folder": str(path),
            "process": None if lock_holder is None else lock_holder.pid,
        }
    }


def _change_of_reward(store: Store, info: RunInfo) -> dict[str, float] | None:
    """How much more the last steps earn than the first, with its 95 % interval over their groups. None while that cannot be told."""
    steps = store.step_count()
    if min(steps, info.steps) < 2:
        return None
    count = min(ENDS, info.steps // 2)
    before = [group.mean for group in store.group_rewards(1, count)]
    after = [group.mean for group in store.group_rewards(steps - count + 1, steps)]
    interval = welch_difference(before, after)
    if interval is None:
        return None
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _problems(
    info: RunInfo,
    error: Any,
    advice: Sequence[Mapping[str, Any]],
    warnings: Sequence[WarningRecord],
) -> list[str]:
    """What is wrong, in a few words each: the end of the run, signals that are on, and metrics that ask for advice."""
    ended_badly = {"failed": "it failed", "crashed": "its process is gone"}.get(info.state or "")
    kinds = {warning.name: warning.kind for warning in warnings}
    active = [name.replace("_", " ") for name, kind in kinds.items() if kind == "begins"]
    asking = [entry["problem"] for entry in advice if entry["problem"]]
    return [
        *filter(None, [ended_badly or (error and "it failed")]),
        *dict.fromkeys(active + asking),
    ]


def _seconds_left(store: Store, info: RunInfo) -> float | None:
    """Estimated seconds until the end of a running run, from when its last steps were done; a pause among them does not count."""
    if info.state != "running" or not info.steps or info.max_steps is None:
        return None
    done = store.seconds_after(range(max(1, info.steps - ENDS), info.steps + 1))
    between = [later - earlier for earlier, later in pairwise(sorted(done.values()))]
    if not between:
        _, between = store.curve_ends("time/step", 1)
    return median(between) * max(0, info.max_steps - info.steps) if between else None


def _checkpoint_rows(path: Path) -> list[dict[str, Any]]:
    with suppress(GroupwiseError, FileNotFoundError):  # it may be pruned meanwhile
        scan = checkpoints.complete(path / CHECKPOINTS)
        complete = [
            {"step": checkpoint.step, "bytes": size, "damaged": None}
            for checkpoint in scan
            if (size := _folder_size(checkpoint.path)) is not None
        ]
        damaged = [
            {"step": None, "bytes": None, "damaged": str(skipped)} for skipped in scan.skipped
        ]
        return [*complete, *damaged]
    return []


def _folder_size(folder: Path) -> int | None:
    """Size of all files in a folder; None if it was just removed, as happens to old checkpoints."""
    try:
        folder.stat()
        return sum(file.stat().st_size for file in files_of(folder))
    except OSError:
        return None


def _log_tail(file: Path) -> str:
    """The last complete lines of a log, or the end of the last line if that is very long. Empty if there is no log."""
    with suppress(OSError), file.open("rb") as log:
        offset = max(0, file.stat().st_size - LOG_BYTES)
        log.seek(offset)
        data = log.read()
        whole_lines = data.partition(b"\n")[2] if offset else data
        return (whole_lines or data).decode("utf-8", "replace")
    return ""


ROUTES = (page_route("/runs/{run}", run), page_route("/runs/{run}/config", config))
