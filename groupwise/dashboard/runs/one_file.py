"""A run as one HTML file that opens anywhere: the overview with its plots, some of its rollouts, and all settings.

`groupwise runs export RUN --html FILE` writes it. Styles, scripts and curves are in the file, and its policy forbids the browser to load
anything else. It is the page of `overview.py`, without the links to other pages of the dashboard. Without JavaScript it shows the curve of
the reward, or of the loss.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.core.terminal.page import picture
from groupwise.dashboard.runs.curves import CurvesQuery, curves_of_run
from groupwise.dashboard.runs.overview import overview_of
from groupwise.dashboard.runs.rollouts import LISTED
from groupwise.dashboard.sources.runs import read_entry, stamp_of
from groupwise.dashboard.templates import STATIC, render
from groupwise.runs.curves import svg_of
from groupwise.runs.find import resolve_run
from groupwise.runs.folder import RECORD, flatten, read_config
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store
from groupwise.training.sft_config import settings_that_differ

COLUMNS = 400
"""Columns of each curve: a file cannot fetch finer ones for a range."""
ROLLOUTS = 5
"""Most rollouts in each of the two lists."""


def write_one_file(
    run: str, output: Path, *, runs_dir: Path = Path("runs"), force: bool = False
) -> Path:
    """Write a run's page to a file. Raises UsageError for wrong arguments."""
    path, step = resolve_run(run, runs_dir)
    if step is not None:
        raise UsageError(f"--html shows a whole run: give {path.name} without @{step}.")
    if output.is_dir():
        raise UsageError(f"{output} is a folder; --html names a file, such as {path.name}.html.")
    if output.exists() and not force:
        raise UsageError(f"{output} exists. Name another file, or give --force to replace it.")
    atomic_files.check_can_write(output)
    overview = overview_of(path, read_entry(path, stamp_of(path)))
    with Store.open(path / RECORD, readonly=True) as store:
        curves = [
            _curves_of_plot(store, path.name, plot)
            for plots in overview["plots"].values()
            for plot in plots
        ]
        scored = RolloutFilter(outcome="scored", limit=ROLLOUTS)
        lists = {
            "The highest rewards of the run": replace(scored, order="best"),
            "The lowest rewards of the newest step": replace(
                scored, order="worst", step=store.step_count() or None
            ),
        }
        rollouts = {
            words: [asdict(view) for view in store.rollouts(filters, LISTED)]
            for words, filters in lists.items()
        }
        metric: str | None = overview["metric"]
        svg = "" if metric is None else svg_of(store, metric, metric)
    config = read_config(path)
    data = {
        **overview,
        "rollouts": rollouts,
        "settings": flatten(config),
        "changed": flatten(settings_that_differ(config)),
        "curves": _as_script(dict(curves)),
        "picture": picture(svg, f"Curve of the {metric}") if svg else "",
        "inline": _static_text,
    }
    page = render("one_file.html", data).encode("utf-8", "replace")
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_file(output, page, replace=force)
    return output


def _curves_of_plot(store: Store, run: str, plot: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What `/curves` answers for a plot, under the names of its metrics, by which `plots.js` looks it up."""
    names = [name for line in plot["lines"] for name in (line["metric"], line["spread"]) if name]
    total = names if plot["stacked"] else []
    query = CurvesQuery.model_construct(
        run=[run], name=names, total=total, times=True, columns=COLUMNS, begin=None, end=None
    )
    answer = curves_of_run(store, query)
    return "\n".join(names), {key: {run: value} for key, value in answer.items()}


def _static_text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _as_script(value: Any) -> str:
    """Data for an element `<script type="application/json">`, which no text in it can end."""
    text = json.dumps(atomic_files.without_nan(value), allow_nan=False)
    return text.replace("<", "\\u003c")
