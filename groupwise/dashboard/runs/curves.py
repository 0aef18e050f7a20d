"""Chooses a run's plots, and reduces their curves to the width of a screen before they are sent."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from groupwise.core.atomic_files import without_nan
from groupwise.core.errors import UsageError
from groupwise.dashboard.pages import Query, Visit, page_route
from groupwise.dashboard.sources.evaluations import pass_at_k_names
from groupwise.dashboard.templates import line as harmless
from groupwise.runs.curves import EVAL, Curve, curves_of
from groupwise.runs.folder import RECORD
from groupwise.runs.records import CurvePoint
from groupwise.runs.store import Store

MAX_COLUMNS = 2000
MAX_PASS = 12
"""Most pass@k curves in one plot."""
MAX_STEPS = 2**53
"""Larger than the step count of any run; beyond it numbers in JavaScript are no longer exact."""
PART, MEAN, SPREAD = "rewards/", "/mean", "/std"


@dataclass(frozen=True, slots=True)
class PlottedMetric:
    """One curve of a plot."""

    metric: str
    label: str
    spread: str = ""
    """The metric with the spread of the values, shown as a band around the curve."""
    bounds: tuple[float, float] | None = None
    """The band is drawn only between these values, the lowest and the highest of any rollout; None: it is drawn whole."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Several curves with one axis."""

    title: str
    lines: tuple[PlottedMetric, ...]
    says: str = ""
    """One sentence that explains the plot, and which values are good."""
    section: str = "More"
    stacked: bool = False
    """True if the curves add up to a whole."""


def _curve(section: str, title: str, metric: str, says: str, spread: str = "") -> Plot:
    return Plot(title, (PlottedMetric(metric, title.lower(), spread),), says, section)


PLOTS = (
    _curve("Reward", "Reward", "reward", "Mean of the scored rollouts, and how far a group's rollouts lie apart.", "reward_std"),
    _curve("Reward", "Groups without signal", "frac_reward_zero_std", "Share whose rollouts all earned the same: they teach nothing."),
    Plot(
        "Rollouts without a score",
        (PlottedMetric("rollouts/failed", "failed"), PlottedMetric("rollouts/timed_out", "timed out")),
        "They do not count as low rewards: they are left out. The reasons stand below.",
        "Reward",
        stacked=True,
    ),
    _curve("Held out", "Held-out reward", "eval/reward", "On prompts that are not trained."),
    _curve("Held out", "Held-out loss", "eval/loss", "On answers that are not trained: where it rises, others are learnt by heart."),
    _curve("Held out", "Held-out tokens right", "eval/mean_token_accuracy", "Share of them that the model finds likeliest itself."),
    _curve("Policy", "Entropy", "entropy", "How undecided the policy is. At 0 all rollouts of a group are the same."),
    _curve("Policy", "KL to the teacher", "distillation/kl", "What the policy still has to learn from its teacher, nats per token."),
    _curve("Policy", "KL from the reference", "kl", "How far the policy has gone from where it began (algorithm.beta)."),
    Plot(
        "Clipped tokens",
        (PlottedMetric("clip_ratio/low_mean", "from below"), PlottedMetric("clip_ratio/high_mean", "from above")),
        "Share of tokens that the clip kept from teaching.",
        "Policy",
    ),
    _curve(
        "Policy",
        "Log-probability gap",
        "sampling/logprob_gap",
        "Learner against sampler, in nats: near 0, or they compute differently.",
    ),
    Plot(
        "Completion length",
        (
            PlottedMetric("completions/mean_length", "mean"),
            PlottedMetric("completions/min_length", "shortest"),
            PlottedMetric("completions/max_length", "longest"),
        ),
        "Tokens that the policy wrote.",
        "Completions",
    ),
    _curve("Completions", "Truncated", "completions/clipped_ratio", "Share that the length limit cut off."),
    _curve("Completions", "Distinct completions", "signals/distinct_completions", "1: no two rollouts of a group are the same."),
    _curve("Completions", "Repetition", "signals/repetition", "Share of repeated word triples within a completion."),
    _curve("Update", "Gradient norm", "grad_norm", "Before it is clipped (training.max_grad_norm)."),
    _curve("Update", "Learning rate", "learning_rate", ""),
    _curve("Update", "Loss", "loss", "In RL it says little by itself."),
    _curve("Update", "Tokens right", "mean_token_accuracy", "Share of the trained tokens that the model finds likeliest itself."),
    Plot(
        "Tokens per second",
        (
            PlottedMetric("perf/sampling_tokens_per_second", "sampling"),
            PlottedMetric("perf/learning_tokens_per_second", "learning"),
        ),
        "",
        "Time",
    ),
    Plot(
        "Where the time went",
        tuple(PlottedMetric(f"time/{part}", part) for part in ("sampling", "scoring", "learning", "publishing")),
        "Seconds of each step. Sampling of the next step may overlap with learning.",
        "Time",
        stacked=True,
    ),
)  # fmt: skip
"""The plots defined by name, in display order; a run has those whose metrics it has."""
SECTIONS = ("Reward", "Held out", "Policy", "Completions", "Update", "Time", "Task", "More")
_NOT_PLOTTED = frozenset({"time/step", "clip_ratio/region_mean", "rollouts/scored", "num_tokens", "eval/tokens"})  # fmt: skip
"""Metrics that other plots show, or that need no plot."""
_SECTION_OF = {"task": "Task", EVAL: "Held out"}
"""Sections of metrics without a plot of their own, by the prefix of their names."""


TITLES = {
    "beta": "Weight of the KL penalty",
    "clip_ratio/delta_mean": "Tokens masked by the delta clip",
    "curriculum/hopeless": "Examples never solved",
    "curriculum/passed_over": "Turns of examples passed over",
    "curriculum/seen": "Examples seen",
    "curriculum/solved": "Examples always solved",
    "curriculum/success": "Expected success of examples",
    "data/easy_probability": "Probability of an easy example",
    "groups/distinct": "Distinct completions in a group",
    "groups/with_signal": "Groups with signal",
    "num_tokens": "Tokens so far",
    "replay/evicted": "Replay: groups removed",
    "replay/mean_reward": "Replay: mean reward",
    "replay/refused": "Replay: groups refused",
    "replay/size": "Replay: groups kept",
    "rollouts/mean_length": "Length with the environment's turns",
    "rollouts/rejected_groups": "Groups rejected",
    "rollouts/solved": "Rollouts solved",
    "sampling/importance_sampling_clipped": "Importance weights clipped",
    "sampling/importance_sampling_ratio/mean": "Mean importance weight",
    "sampling/ratio_mean": "Mean ratio of learner to sampler",
    "sampling/routing_lost": "Completions without the server's choice of experts",
    "sampling/staleness": "Age of the sampling policy, in steps",
    "sampling/temperature": "Sampling temperature",
    "signals/active": "Active warnings",
    "signals/distinct_ngrams": "Distinct word triples in a group",
    "signals/length_correlation": "Correlation of length and reward",
    "signals/length_growth": "Growth of the length",
    "signals/repeated_lines": "Repeated lines",
    "signals/same_answers": "Same answer to different prompts",
    "time/step": "Seconds of a step",
    "updates/left_out": "Updates left out",
}
"""Titles of metrics that have no plot by name above."""
_FAMILIES = {
    "signals/part_share/": "Share of the reward: {}",
    "reward/": "Reward of {} examples",
    "data/": "Examples: {}",
}
"""Titles of metrics whose names end with a name of the user's or of a source."""


def title_of(name: str) -> str:
    """The title of a metric in plain words. Metrics that the program does not know, such as a user's own, keep their names."""
    if name in TITLES:
        return TITLES[name]
    for plot in PLOTS:
        for line in plot.lines:
            if line.metric == name:
                return plot.title if len(plot.lines) == 1 else f"{plot.title}: {line.label}"
    if name.startswith(PART) and name.endswith(MEAN):
        return f"Part: {name.removeprefix(PART).removesuffix(MEAN)}"
    if name.startswith(f"{EVAL}/"):
        evaluated = name.removeprefix(f"{EVAL}/")
        title, (label, _, metric) = title_of(evaluated), evaluated.partition("/")
        return f"{label}: {metric}" if metric and title == evaluated else f"Held out: {title}"
    for prefix, title in _FAMILIES.items():
        if name.startswith(prefix):
            return title.format(name.removeprefix(prefix).replace("_", " "))
    return name


def plots_of(
    names: Sequence[str], ranges: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, list[Plot]]:
    """All plots of a run with these metrics, by section; each metric is in exactly one. `ranges`: see `Store.reward_ranges`."""
    available = set(names)
    all_plots: list[Plot] = []
    for plot in PLOTS:
        lines = tuple(
            _without_unknown_spread(line, available)
            for line in plot.lines
            if line.metric in available
        )
        if lines:
            all_plots.append(replace(plot, lines=lines))
    reward_parts = [
        Plot(
            f"Part: {name.removeprefix(PART).removesuffix(MEAN)}",
            (
                _without_unknown_spread(
                    PlottedMetric(name, "mean", name.removesuffix(MEAN) + SPREAD), available
                ),
            ),
            "Mean of the part's own value, and its spread over all rollouts.",
            "Reward",
        )
        for name in names
        if name.startswith(PART) and name.endswith(MEAN)
    ]
    all_plots[1:1] = reward_parts  # after the plot of the reward
    metrics_by_k = list(pass_at_k_names(names, f"{EVAL}/").items())
    lines = tuple(
        PlottedMetric(name, f"pass@{k}")
        for k, name in metrics_by_k[:: 1 + len(metrics_by_k) // MAX_PASS]
    )
    says = "Share of held-out prompts that at least one of k answers solves."
    all_plots += [Plot("Held-out pass@k", lines, says, "Held out")] if lines else []
    plotted = {
        metric for plot in all_plots for line in plot.lines for metric in (line.metric, line.spread)
    }
    for name in names:
        if name not in plotted and name not in _NOT_PLOTTED:
            section = _SECTION_OF.get(name.partition("/")[0], "More")
            title = title_of(name)
            line = PlottedMetric(name, harmless(title[:1].lower() + title[1:]))
            says = "" if title == name else f"Recorded as {harmless(name)}."
            all_plots.append(Plot(title, (line,), says, section))
    for index, plot in enumerate(all_plots):
        bounded = (
            replace(line, bounds=(ranges or {}).get(line.metric) if line.spread else None)
            for line in plot.lines
        )
        all_plots[index] = replace(plot, lines=tuple(bounded))
    sections = {
        section: [plot for plot in all_plots if plot.section == section] for section in SECTIONS
    }
    return {section: plots for section, plots in sections.items() if plots}


def _without_unknown_spread(line: PlottedMetric, names: set[str]) -> PlottedMetric:
    """The curve, without its spread if the run has no such metric."""
    return line if line.spread in names else PlottedMetric(line.metric, line.label)


class CurvesQuery(Query):
    """Parameters of a request for curves."""

    run: list[str] = Field(default_factory=list, max_length=20)
    name: list[str] = Field(default_factory=list, max_length=64)
    total: list[str] = Field(default_factory=list, max_length=64)
    """Metrics of a stack, whose sums are wanted as well."""
    times: bool = False
    """True if the times at which the steps of each column were done are wanted, too."""
    columns: int = Field(600, ge=2, le=MAX_COLUMNS)
    begin: int | None = Field(None, ge=0, le=MAX_STEPS, alias="from")
    end: int | None = Field(None, ge=0, le=MAX_STEPS, alias="to")
    """Steps between which the curves are wanted; by default all."""


def curves(visit: Visit) -> Response:
    """Curves of some runs, each as columns: `first` and `last` step, `mean`, `low` and `high` of the finite values, how many others there
    are (`lost`), and `at`, by which those of a run belong together. In addition to `runs`, `totals` has the requested sums.
    Steps count from 1; curves of evaluations (`eval/…`) are placed after that many steps.

    With `times` each curve has `time`, when its steps of each column were done (the mean, in seconds since the run was made), and `times`
    has the same for all steps, or for all evaluated steps if only evaluations are requested."""
    query = visit.query(CurvesQuery)
    if not query.run or not (query.name or query.total):
        raise UsageError(
            "Say which curves: ?run=RUN&name=METRIC, each as often as wanted, with columns=, from= and to= as needed."
        )
    curves_by_run: dict[str, dict[str, Any]] = {}
    for run in query.run:
        with Store.open(visit.context.run(run) / RECORD, readonly=True) as store:
            curves_by_run[run] = curves_of_run(store, query)
    answer = {
        key: {run: curve[key] for run, curve in curves_by_run.items() if key in curve}
        for key in ("runs", "totals", "times")
    }
    return JSONResponse(without_nan(answer))


StepRange = tuple[int, int] | None
"""The first and the last step of all columns; None if there are none."""


def curves_of_run(store: Store, query: CurvesQuery) -> dict[str, Any]:
    """Curves of one run: `runs` by their names, and if requested `totals` and `times`."""
    with store.snapshot():
        of_evaluations = [name for name in query.name if name.startswith(f"{EVAL}/")]
        all_evaluated = evaluated_curves(store) if of_evaluations else {}
        evaluated = {name: all_evaluated[name] for name in query.name if name in all_evaluated}
        steps = {step for curve in evaluated.values() for step in curve}
        within_steps = _step_range(store, query, steps)

        def when_evaluated(steps: Iterable[int]) -> list[CurvePoint]:
            seconds = store.seconds_after(steps)
            points = {step: seconds.get(step, math.nan) for step in steps}
            return store.thinned_points(points, query.columns, within_steps)

        curves: dict[str, dict[str, list[Any]]] = {}
        for name in query.name:
            points = evaluated.get(name)
            if points is not None:
                curves[name] = _as_columns(
                    store.thinned_points(points, query.columns, within_steps)
                )
            else:
                curves[name] = _as_columns(store.thinned_curve(name, query.columns, within_steps))
            if query.times and points is not None:
                curves[name]["time"] = [bucket.mean for bucket in when_evaluated(points)]
            elif query.times:
                times = store.thinned_times(query.columns, within_steps, name)
                curves[name]["time"] = [bucket.mean for bucket in times]
        data: dict[str, Any] = {"runs": curves}
        if query.total:
            data["totals"] = _as_columns(
                store.thinned_sum(query.total, query.columns, within_steps)
            )
        if query.times:
            only_evaluations = len(of_evaluations) == len(query.name) and not query.total
            times = (
                when_evaluated(steps)
                if only_evaluations
                else store.thinned_times(query.columns, within_steps)
            )
            data["times"] = _as_columns(times)
        return data


def _step_range(store: Store, query: CurvesQuery, evaluated: Collection[int]) -> StepRange:
    """The range of steps that is common to all curves of a run, which gives them the same columns. `evaluated`: the steps of its
    evaluations.
    """
    ranges = [bounds for bounds in (store.range_of([*query.name, *query.total]),) if bounds]
    ranges += [(min(evaluated), max(evaluated))] if evaluated else []
    if not ranges:
        return None
    first, last = min(first for first, _ in ranges), max(last for _, last in ranges)
    return (
        first if query.begin is None else max(query.begin, first),
        last if query.end is None else min(query.end, last),
    )


def names_of(store: Store) -> list[str]:
    """All curves of a run."""
    return list(dict.fromkeys([*store.metric_names(), *evaluated_curves(store)]))


def evaluated_curves(store: Store) -> dict[str, Curve]:
    """Results on held-out prompts and benchmarks over the training, under their names in plots."""
    return curves_of(store.evaluations(rows=False))


def _as_columns(points: Sequence[CurvePoint]) -> dict[str, list[Any]]:
    fields: Iterable[str] = ("at", "first", "last", "mean", "low", "high", "lost")
    return {field: [getattr(point, field) for point in points] for field in fields}


ROUTES = (page_route("/curves", curves),)
