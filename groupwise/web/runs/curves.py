"""Which plots a run has, and the curves in them, thinned to the width of a screen before they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from groupwise.errors import UsageError
from groupwise.runs.durable import without_nan
from groupwise.runs.folder import RECORD
from groupwise.runs.records import CurvePoint
from groupwise.runs.store import Store
from groupwise.web.pages import Query, Visit, shown

MOST_COLUMNS = 2000
MOST_STEPS = 2**53
"""More than any run has; beyond them numbers of a page are no longer exact."""
PART, MEAN, SPREAD = "rewards/", "/mean", "/std"


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a plot."""

    metric: str
    label: str
    spread: str = ""
    """A metric that says how far the values lie from it, shown as a band."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Some curves with one axis."""

    title: str
    lines: tuple[Line, ...]
    says: str = ""
    """What it means, and what is good, in a sentence."""
    section: str = "More"
    stacked: bool = False
    """Whether the curves add up to a whole."""


def _one(section: str, title: str, metric: str, says: str, spread: str = "") -> Plot:
    return Plot(title, (Line(metric, title.lower(), spread),), says, section)


PLOTS = (
    _one("Reward", "Reward", "reward", "Mean of the scored rollouts, and how far a group's members lie apart.", "reward_std"),
    _one("Reward", "Groups without signal", "frac_reward_zero_std", "Share whose members all earned the same: they teach nothing."),
    Plot(
        "Rollouts without a score",
        (Line("rollouts/failed", "failed"), Line("rollouts/timed_out", "timed out")),
        "They are no low rewards: they are left out. The reasons stand below.",
        "Reward",
        stacked=True,
    ),
    _one("Reward", "Held-out reward", "eval/reward", "On prompts that are not trained."),
    _one("Policy", "Entropy", "entropy", "How undecided the policy is. At 0 all members of a group are the same."),
    _one("Policy", "KL from the reference", "kl", "How far the policy has gone from where it began (algorithm.beta)."),
    Plot(
        "Clipped tokens",
        (Line("clip_ratio/low_mean", "from below"), Line("clip_ratio/high_mean", "from above")),
        "Share of tokens that the clip kept from teaching.",
        "Policy",
    ),
    _one("Policy", "Log-probability gap", "sampling/logprob_gap", "Learner against sampler, in nats: near 0, or they compute differently."),
    Plot(
        "Completion length",
        (
            Line("completions/mean_length", "mean"),
            Line("completions/min_length", "shortest"),
            Line("completions/max_length", "longest"),
        ),
        "Tokens that the policy wrote.",
        "Completions",
    ),
    _one("Completions", "Truncated", "completions/clipped_ratio", "Share that the length limit cut off."),
    _one("Completions", "Distinct completions", "signals/distinct_completions", "1: no two members of a group are the same."),
    _one("Completions", "Repetition", "signals/repetition", "Share of repeated word triples within a completion."),
    _one("Update", "Gradient norm", "grad_norm", "Before it is clipped (training.max_grad_norm)."),
    _one("Update", "Learning rate", "learning_rate", ""),
    _one("Update", "Loss", "loss", "In RL it says little by itself."),
    _one("Update", "Tokens right", "mean_token_accuracy", "Share of the trained tokens that the model finds likeliest itself."),
    Plot(
        "Tokens per second",
        (
            Line("perf/sampling_tokens_per_second", "sampling"),
            Line("perf/learning_tokens_per_second", "learning"),
        ),
        "",
        "Time",
    ),
    Plot(
        "Where the time went",
        tuple(Line(f"time/{part}", part) for part in ("sampling", "scoring", "learning", "publishing")),
        "Seconds of each step. Sampling of the next step may overlap with learning.",
        "Time",
        stacked=True,
    ),
)  # fmt: skip
"""The plots that are known by name, in the order in which they are shown; a run has those whose metrics it has."""
SECTIONS = ("Reward", "Policy", "Completions", "Update", "Time", "Task", "More")
_LEFT_OUT = frozenset({"time/step", "clip_ratio/region_mean", "rollouts/scored", "num_tokens"})
"""Metrics that other plots show, or that no picture is needed for."""


def plots_of(names: Sequence[str]) -> dict[str, list[Plot]]:
    """All plots of a run with these metrics, by section; each metric is in one of them."""
    there = set(names)
    found = [made for plot in PLOTS if (made := _with(plot, there))]
    found[1:1] = _parts(names)
    taken = {each for plot in found for line in plot.lines for each in (line.metric, line.spread)}
    for name in names:
        if name not in taken and name not in _LEFT_OUT:
            section = "Task" if name.startswith("task/") else "More"
            found.append(Plot(name, (Line(name, name.rpartition("/")[2]),), "", section))
    sections = {
        section: [each for each in found if each.section == section] for section in SECTIONS
    }
    return {section: plots for section, plots in sections.items() if plots}


def _with(plot: Plot, names: set[str]) -> Plot | None:
    """The plot with the curves that there are; None: none."""
    lines = tuple(_known(line, names) for line in plot.lines if line.metric in names)
    return Plot(plot.title, lines, plot.says, plot.section, plot.stacked) if lines else None


def _known(line: Line, names: set[str]) -> Line:
    return line if line.spread in names else Line(line.metric, line.label)


def _parts(names: Sequence[str]) -> list[Plot]:
    """One for each part of the reward."""
    parts = [n for n in names if n.startswith(PART) and n.endswith(MEAN)]
    return [
        Plot(
            f"Part: {part.removeprefix(PART).removesuffix(MEAN)}",
            (_known(Line(part, "mean", part.removesuffix(MEAN) + SPREAD), set(names)),),
            "Mean of the part's own value, and its spread over all rollouts.",
            "Reward",
        )
        for part in parts
    ]


class Asked(Query):
    """Which curves."""

    run: list[str] = Field(default_factory=list, max_length=20)
    name: list[str] = Field(default_factory=list, max_length=64)
    total: list[str] = Field(default_factory=list, max_length=64)
    """Metrics of a stack, whose sums are wanted as well."""
    times: bool = False
    """Whether it is wanted when each column was done, too."""
    columns: int = Field(600, ge=2, le=MOST_COLUMNS)
    begin: int | None = Field(None, ge=0, le=MOST_STEPS, alias="from")
    end: int | None = Field(None, ge=0, le=MOST_STEPS, alias="to")
    """Steps between which the curves are wanted; by default all."""


def curves(visit: Visit) -> Response:
    """Curves of some runs, each as columns: `first` and `last` step, `mean`, `low` and `high` of the finite values, how many others there
    are (`lost`), and `at`, by which those of a run belong together. Beside `runs`, `totals` has the sums of those that were asked for, and
    `times` when the steps of each column were done, in seconds since the run was made."""
    asked = visit.query(Asked)
    if not asked.run or not (asked.name or asked.total):
        raise UsageError(
            "Say which curves: ?run=RUN&name=METRIC, each as often as wanted, with columns=, from= and to= as needed."
        )
    totals: dict[str, Any] = {}
    times: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for run in asked.run:
        path = visit.place.run(run)
        with Store.open(path / RECORD, readonly=True) as store:
            within = _within(store, asked)
            found[run] = {
                name: _columns(store.thinned_curve(name, asked.columns, within))
                for name in asked.name
            }
            if asked.total:
                totals[run] = _columns(store.thinned_sum(asked.total, asked.columns, within))
            if asked.times:
                since = visit.place.runs.one(path).info.started
                times[run] = _columns(store.thinned_times(since, asked.columns, within))
    return JSONResponse(without_nan({"runs": found, "totals": totals, "times": times}))


def _within(store: Store, asked: Asked) -> tuple[int, int] | None:
    """The same for all curves of a run, so that their columns are, too."""
    there = store.range_of([*asked.name, *asked.total])
    if there is None:
        return None
    begin, end = asked.begin, asked.end
    return (
        there[0] if begin is None else max(begin, there[0]),
        there[1] if end is None else min(end, there[1]),
    )


def _columns(points: Sequence[CurvePoint]) -> dict[str, list[Any]]:
    fields: Iterable[str] = ("at", "first", "last", "mean", "low", "high", "lost")
    return {field: [getattr(point, field) for point in points] for field in fields}


ROUTES = (shown("/curves", curves),)
