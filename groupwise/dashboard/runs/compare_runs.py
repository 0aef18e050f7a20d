"""Compares several runs: one metric of all in one plot, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import Field

from groupwise.core.errors import StoreError, UsageError
from groupwise.dashboard.pages import Page, Query, Visit, live_url, page_route
from groupwise.dashboard.runs.curves import names_of, title_of
from groupwise.runs.folder import RECORD, flatten, read_config
from groupwise.runs.store import Store
from groupwise.training.review.compare import IGNORED_KEYS

MAX_RUNS = 12
DEFAULT_METRICS = (
    "reward",
    "eval/reward",
    "loss",
    "eval/loss",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/clipped_ratio",
    "entropy",
    "kl",
    "sampling/logprob_gap",
    "grad_norm",
    "time/step",
)
"""Metrics shown for several runs unless one is requested; those that at least one of the runs has."""


class CompareQuery(Query):
    """Parameters of a comparison: runs and a metric."""

    run: list[str] = Field(default_factory=list)
    metric: str = ""


def compare(visit: Visit) -> Page:
    """The page."""
    query = visit.query(CompareQuery)
    names = list(dict.fromkeys(query.run))
    if len(names) < 2:
        raise UsageError("Choose at least two runs in the list, then press Compare.")
    if len(names) > MAX_RUNS:
        raise UsageError(
            f"{len(names)} runs are chosen; {MAX_RUNS} of them can be told apart in a plot."
        )
    entries = {name: visit.context.runs.entry(visit.context.run(name)) for name in names}
    configs: dict[str, Mapping[str, Any]] = {name: {} for name in names}
    metrics: list[str] = []
    for name in names:
        path = visit.context.run(name)
        with Store.open(path / RECORD, readonly=True) as store:
            metrics += names_of(store)
        with suppress(StoreError):  # a run may end before it has a config
            configs[name] = read_config(path)
    metrics = sorted({*metrics})
    if query.metric and query.metric not in metrics:
        raise UsageError(
            f"None of these runs has a metric {query.metric[:100]!r}. There are: {', '.join(metrics[:100]) or 'none'}."
        )
    default_metrics = [metric for metric in DEFAULT_METRICS if metric in metrics] or metrics[:1]
    data: dict[str, Any] = {
        "names": names,
        "runs": {
            name: {
                "state": run.info.state,
                "steps": run.info.steps,
                "metric": run.metric,
                "first": run.ends[0],
                "last": run.ends[1],
                "model": run.info.model,
                "task": run.info.task,
            }
            for name, run in entries.items()
        },
        "metric": query.metric,
        "shown": [query.metric] if query.metric else default_metrics,
        "metrics": metrics,
        "titles": {metric: title_of(metric) for metric in metrics},
        "differences": differences(configs),
    }
    return Page("compare.html", data, live=live_url(*names))


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs: dotted key -> the value in each run, in their order."""
    flat = {name: flatten(config) for name, config in configs.items()}
    keys = sorted({key for values in flat.values() for key in values} - IGNORED_KEYS)
    rows = {key: [values.get(key, "") for values in flat.values()] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


ROUTES = (page_route("/compare", compare),)
