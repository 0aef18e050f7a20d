"""Compares two policies, A and B, prompt by prompt on the same held-out prompts.

A side is given as a result file, `RUN@STEP` (its evaluation recorded after so many steps), `RUN@STEP:NAME` (the evaluation of that name
at that step), `RUN:FILE.json` (a file of its results), or `RUN` (its newest evaluation after training, and its reward curve). Prompts are
paired by content (`groupwise.training.evaluation.measures.by_prompt`), never by position. Prompts without a partner are counted, and the
notes list every difference between the settings of both sides: otherwise different prompts, rewards or temperatures would look like a
difference between the policies.

Intervals are paired bootstraps over the prompts: the difficulty of a prompt affects both sides and cancels out.

Two supervised runs are compared by their losses, in training and on their common held-out rows. In a comparison with an RL run, the
answers of a supervised run are those that `groupwise eval` measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.settings.comparison import Change, compare
from groupwise.runs.find import ENDS, is_file, resolve_run, reward_ends
from groupwise.runs.folder import RECORD, RESULTS, read_config
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.training.config import LoadedConfig, RunConfig, load_config, resolved_values
from groupwise.training.evaluation.measures import (
    CLIPPED,
    LENGTH,
    REWARD,
    Row,
    by_prompt,
    measure,
    prompt_key,
)
from groupwise.training.evaluation.results import numbers_of, read_result
from groupwise.training.evaluation.statistics import Interval, paired_difference
from groupwise.training.sft_config import SftConfig, load_sft_config

UNDIRECTED_METRICS = frozenset({LENGTH, CLIPPED})
"""Metrics for which more is neither better nor worse."""

LOSS = "loss"
EVAL_LOSS = "eval_loss"

TOLERANCE = 1e-9
"""Values that differ by less count as equal."""

EVALUATION_KEYS = (
    "eval.samples_per_prompt",
    "eval.temperature",
    "eval.top_k",
    "eval.top_p",
    "eval.min_p",
    "eval.max_completion_length",
    "eval.success_threshold",
    "eval.success_part",
    "sampler.max_completion_length",
    "sampler.min_completion_length",
    "sampler.stop",
    "sampler.stop_token_ids",
)
"""Config keys that decide how held-out prompts are answered and judged."""

IGNORED_KEYS = frozenset({"run.name", "run.dir"})
"""Config keys that always differ between two runs."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: its label, its metrics and their rows."""

    label: str
    """The evaluated policy, and the source of its numbers."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    rows: Sequence[Row] = ()
    """Empty if the run has no evaluation."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    run: Path | None = None
    """The run's folder if a whole run was given: then its curve is compared as well. Otherwise None."""
    supervised: bool = False
    """True for an evaluation by `groupwise sft`: its rows are losses on given answers."""
    asked: str = ""
    """Fingerprint of the rows on which a supervised run was evaluated."""

    @property
    def samples(self) -> int:
        """Largest number of answers to one prompt."""
        return max((len(group) for group in by_prompt(self.rows).values()), default=0)

    @property
    def failed(self) -> int:
        """Number of answers that could not be scored."""
        return sum(row["outcome"] in ("failed", "timed_out") for row in self.rows)


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric on both sides, over the prompts for which both have a value."""

    name: str
    a: float
    b: float
    change: Interval | None = None
    """Mean of B − A with its interval; None for a metric without values per prompt."""
    better: int | None = None
    """Number of prompts on which B is better. None if more is neither better nor worse."""
    worse: int | None = None
    equal: int | None = None


@dataclass(frozen=True, slots=True)
class CurveChange:
    """Training rewards or losses over the steps that both runs have."""

    metric: str
    steps: int
    a: tuple[float | None, float | None]
    """Mean of the first few and of the last few of these steps."""
    b: tuple[float | None, float | None]
    change: Interval | None
    """Mean of B − A in the last few steps, over draws with the same prompt in both. None for losses, and if there are no such draws."""


@dataclass(frozen=True, slots=True)
class PromptChange:
    """A prompt on which the mean rewards of the two sides differ."""

    prompt: Any
    a: float
    b: float
    """Mean rewards of the two sides."""
    completion_a: str
    completion_b: str
    """The completions of the sample in which the two sides differ most."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing side A with side B."""

    a: Side
    b: Side
    prompts: int
    """Number of prompts that both sides have."""
    only_a: int
    only_b: int
    """Number of prompts without a partner."""
    metrics: tuple[MetricChange, ...]
    curve: CurveChange | None
    notes: tuple[str, ...]
    """Caveats that a reader must know."""
    config: dict[str, Change]
    """Config keys in which the two sides differ: dotted key -> (A, B)."""
    changed: tuple[PromptChange, ...] = field(repr=False)
    """The prompts with different rewards, largest change first."""

    def summary(self, rows: int = 0) -> dict[str, Any]:
        """The comparison as plain data for `--json`, with the first `rows` of the changed prompts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **values,
            "a": self.a.label,
            "b": self.b.label,
            "metrics": {
                change.name: {key: value for key, value in asdict(change).items() if key != "name"}
                for change in self.metrics
            },
            "curve": asdict(self.curve) if self.curve else None,
            "changed": [asdict(changed_prompt) for changed_prompt in self.changed[:rows]],
        }


def compare_references(a: str, b: str, runs_dir: Path = Path("runs")) -> Comparison:
    """Find the sides that two references name and compare them: the command `groupwise runs compare`. Raises `UsageError`."""
    side_a, side_b = find_side(a, runs_dir), find_side(b, runs_dir)
    if side_a.supervised and not side_b.supervised:
        side_a = _answers_of(a, b, side_b, runs_dir)
    elif side_b.supervised and not side_a.supervised:
        side_b = _answers_of(b, a, side_a, runs_dir)
    for side, other_side in ((side_a, side_b), (side_b, side_a)):
        if not side.rows and (other_side.rows and not (side_a.run and side_b.run)):
            raise RunNotFoundError(_no_evaluation(side.run, None))
    return compare_sides(side_a, side_b)


def compare_sides(a: Side, b: Side) -> Comparison:
    """Compare two sides. Raises UsageError if both have evaluations but no prompt in common."""
    if a.supervised and b.supervised:
        return _compare_losses(a, b)
    samples_a, samples_b = by_prompt(a.rows), by_prompt(b.rows)
    common_keys = [key for key in samples_a if key in samples_b]
    if a.rows and b.rows and not common_keys:
        prompts_shown = [str(side.rows[0]["prompt"])[:80] for side in (a, b)]
        same_text = _changed_columns(a, b)
        hint = (
            f" {same_text} prompts are the same text, but with other columns, such as another answer."
            if same_text
            else ""
        )
        raise UsageError(
            f"{a.label} and {b.label} have no held-out prompt in common, so they cannot be compared.{hint} The first ones are "
            f"{prompts_shown[0]!r} and {prompts_shown[1]!r}. Evaluate both with the same task and the same `task:` section."
        )
    config = _config_changes(a.config, b.config) if a.config and b.config else {}
    curve = _curve_change(a.run, b.run, REWARD) if a.run and b.run else None
    if not common_keys and curve is None:
        raise UsageError(_nothing_to_compare(a, b))
    names = [name for name in a.metrics if common_keys and name in b.metrics]
    metrics = [_metric_change(name, a, b, common_keys) for name in names]
    prompts = [_prompt_change(samples_a[key], samples_b[key]) for key in common_keys]
    changed_prompts = [
        change for change in prompts if change and abs(change.b - change.a) > TOLERANCE
    ]
    return Comparison(
        a=a,
        b=b,
        prompts=len(common_keys),
        only_a=len(samples_a) - len(common_keys) if b.rows else 0,
        only_b=len(samples_b) - len(common_keys) if a.rows else 0,
        metrics=tuple(change for change in metrics if change),
        curve=curve,
        notes=tuple(_notes(a, b, config)),
        config=config,
        changed=tuple(sorted(changed_prompts, key=lambda change: -abs(change.b - change.a))),
    )


def _compare_losses(a: Side, b: Side) -> Comparison:
    """Compare two supervised runs. Held-out rows are compared only if both runs have exactly the same ones, token by token."""
    losses_a, losses_b = _loss_by_example(a.rows), _loss_by_example(b.rows)
    common_examples = (
        [example for example in losses_a if example in losses_b] if a.asked == b.asked else []
    )
    curve = _curve_change(a.run, b.run, LOSS) if a.run and b.run else None
    missing = [side.label for side in (a, b) if not side.rows]
    notes: list[str] = []
    if missing:
        notes = [
            f"only losses in training are compared: no evaluation of {' and of '.join(missing)}"
        ]
    elif not common_examples:
        notes = [
            "the held-out rows of the two are not the same as tokens (other data, tokenizer, template, data.* or "
            "eval.max_examples), so their eval_loss cannot be compared"
        ]
    data = [Store.facts(side.run / RECORD).get("data") for side in (a, b) if side.run]
    if len(data) == 2 and data[0] != data[1]:
        notes.append("trained on other rows: their losses in training are of other texts")
    if not common_examples and curve is None:
        raise UsageError(". ".join([_nothing_to_compare(a, b).rstrip("."), *notes]) + ".")
    other_metrics = [
        MetricChange(name, a.metrics[name], b.metrics[name])
        for name in a.metrics
        if name in b.metrics and name != EVAL_LOSS
    ]
    return Comparison(
        a=a,
        b=b,
        prompts=len(common_examples),
        only_a=0,
        only_b=0,
        metrics=(_loss_change(losses_a, losses_b, common_examples), *other_metrics)
        if common_examples
        else (),
        curve=curve,
        notes=tuple(notes),
        config=_config_changes(a.config, b.config, SftConfig),
        changed=(),
    )


def _nothing_to_compare(a: Side, b: Side) -> str:
    return f"There is nothing to compare in {a.label} and {b.label}: neither evaluations nor steps that both have."


# --- finding the sides ---------------------------------------------------------------------------


def find_side(reference: str, runs_dir: Path) -> Side:
    """The side that a reference names: a result file, or a run with an optional step and evaluation. RunNotFoundError lists what exists."""
    if Path(reference).is_file():
        return side_of_file(Path(reference))
    if reference.endswith(".json") and ":" not in reference:
        raise RunNotFoundError(f"There is no file {reference}.")
    return side_of(*split_reference(reference, partial(resolve_run, runs_dir=runs_dir)))


def side_of(run: Path, step: int | None, name: str = "") -> Side:
    """The side of a run: its evaluation after so many steps, with that name, or from a file of its results.

    With neither step nor name: the evaluation after training, or the newest one during it; without any, only the curve.
    """
    if name.endswith(".json"):
        path = run / RESULTS / name
        if Path(name).name != name or not is_file(path):
            raise RunNotFoundError(_no_evaluation(run, None, name))
        return side_of_file(path)
    if step is None and not name:
        evaluations = [
            evaluation for evaluation in _recorded_evaluations(run) if evaluation.step > 0
        ]
        if not evaluations:
            return Side(run.name, config=read_config(run), run=run, supervised=_is_supervised(run))
        return _side_of_record(run, evaluations[-1], with_run=True)
    matches = [
        evaluation
        for evaluation in _recorded_evaluations(run)
        if step in (None, evaluation.step) and name in ("", evaluation.name)
    ]
    if matches:
        return _side_of_record(run, matches[-1])
    # Not in the record: take the newest result file of that policy.
    policy = f"{run.name}@{step} ("
    sides = [side for side in _result_files(run) if not name and side.label.startswith(policy)]
    if not sides:
        raise RunNotFoundError(_no_evaluation(run, step, name))
    return sides[-1]


def split_reference(
    reference: str, resolve: Callable[[str], tuple[Path, int | None]]
) -> tuple[Path, int | None, str]:
    """Split `RUN@STEP:EVALUATION` into the run's folder, its step and the name of the evaluation.

    Both names may contain colons; if the whole reference is a run, it means that run. Raises the errors of `resolve`.
    """
    colons = [index for index, letter in enumerate(reference) if letter == ":"]
    for end in (len(reference), *reversed(colons)):
        with suppress(RunNotFoundError):
            return *resolve(reference[:end]), reference[end + 1 :]
    return *resolve(reference), ""


def side_of_file(path: Path) -> Side:
    """Read a side from a result file of `groupwise eval`."""
    content = read_result(path)
    return Side(
        f"{content['policy']} ({path})",
        numbers_of(content["metrics"]),
        content["rows"],
        content.get("config", {}),
    )


def _side_of_record(run: Path, record: EvaluationRecord, *, with_run: bool = False) -> Side:
    label = f"{run.name}@{record.step} ({record.name})"
    return Side(
        label,
        record.metrics,
        _evaluation_rows(run, record),
        read_config(run),
        run if with_run else None,
        _is_supervised(run),
        record.asked,
    )


def _is_supervised(run: Path) -> bool:
    return Store.facts(run / RECORD).get("kind") == "sft"


def _answers_of(reference: str, other_reference: str, rl_side: Side, runs_dir: Path) -> Side:
    """The answers of a supervised run as measured by `groupwise eval`, for a comparison with an RL run."""
    run, step, _ = split_reference(reference, partial(resolve_run, runs_dir=runs_dir))
    policy = f"{run.name}@" if step is None else f"{run.name}@{step} ("
    sides = [side for side in _result_files(run) if side.label.startswith(policy)]
    if not sides:
        command = f"groupwise eval -c CONFIG -t TASK --policy {reference}"
        advice = (
            f"`{command}` lets it answer held-out prompts; then this command compares the two."
            if rl_side.rows
            else f"`{command} --policy {other_reference}` lets both answer the same held-out prompts and compares them."
        )
        raise UsageError(
            f"{reference} is a run of `groupwise sft`, which records losses on given answers, and {other_reference} is judged by the "
            f"rewards of its own answers. {advice}"
        )
    return sides[-1]


def _recorded_evaluations(run: Path) -> list[EvaluationRecord]:
    """The recorded evaluations that have rows. `_evaluation_rows` reads only the rows of the chosen one."""
    with Store.open(run / RECORD, readonly=True) as store:
        with_rows = store.evaluations_with_rows()
        evaluations = store.evaluations(rows=False)
        return [
            evaluation
            for evaluation in evaluations
            if (evaluation.step, evaluation.name, evaluation.policy) in with_rows
        ]


def _evaluation_rows(run: Path, record: EvaluationRecord) -> Sequence[Row]:
    with Store.open(run / RECORD, readonly=True) as store:
        return store.evaluation_rows(record.step, record.name, record.policy)


def _result_files(run: Path) -> list[Side]:
    """The result files of a run, oldest first. Other files in the folder are skipped."""
    sides: list[Side] = []
    for path in sorted((run / RESULTS).glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        try:
            sides.append(side_of_file(path))
        except UsageError:
            continue
    return sides


def _no_evaluation(run: Path | None, step: int | None, name: str = "") -> str:
    assert run is not None
    description = "" if step is None else f" after {step} steps"
    description += f" called {name!r}" if name else ""
    labels = [
        f"{run.name}@{evaluation.step} ({evaluation.name})"
        for evaluation in _recorded_evaluations(run)
    ]
    labels += [side.label for side in _result_files(run)]
    others = f"It has: {', '.join(labels)}" if labels else "It has no other either"
    return (
        f"The run {run.name!r} has no evaluation{description} on record. {others}. If the weights are still there, "
        f"`groupwise eval -c CONFIG -t TASK --policy {run.name}{'' if step is None else f'@{step}'}` makes one."
    )


# --- comparing -----------------------------------------------------------------------------------


def _loss_by_example(rows: Sequence[Row]) -> dict[int, tuple[float, int]]:
    """The sum of each example's losses and its number of trained tokens."""
    losses: dict[int, tuple[float, int]] = {}
    for row in rows:
        total, tokens = losses.get(row["example"], (0.0, 0))
        losses[row["example"]] = (total + row["loss"] * row["tokens"], tokens + row["tokens"])
    return losses


def _loss_change(
    a: Mapping[int, tuple[float, int]], b: Mapping[int, tuple[float, int]], examples: Sequence[int]
) -> MetricChange:
    """The change of the mean loss per token. An observation is an example, weighted by its number of tokens."""
    mean_tokens = sum(a[example][1] for example in examples) / len(examples)
    before, after = ([side[example][0] / mean_tokens for example in examples] for side in (a, b))
    pairs = [
        (x - y) * mean_tokens / a[example][1]
        for x, y, example in zip(before, after, examples, strict=True)
    ]
    return MetricChange(
        EVAL_LOSS,
        sum(before) / len(examples),
        sum(after) / len(examples),
        paired_difference(before, after),
        sum(gain > TOLERANCE for gain in pairs),
        sum(gain < -TOLERANCE for gain in pairs),
        sum(abs(gain) <= TOLERANCE for gain in pairs),
    )


def _metric_change(name: str, a: Side, b: Side, keys: Sequence[str]) -> MetricChange | None:
    measure_a, measure_b = measure(name, a.rows), measure(name, b.rows)
    if measure_a is None or measure_b is None:
        return MetricChange(name, a.metrics[name], b.metrics[name])
    pairs = [
        (measure_a.values[key], measure_b.values[key])
        for key in keys
        if key in measure_a.values and key in measure_b.values
    ]
    if not pairs:
        return None
    before, after = [x for x, _ in pairs], [y for _, y in pairs]
    has_direction = name not in UNDIRECTED_METRICS
    return MetricChange(
        name,
        sum(before) / len(pairs),
        sum(after) / len(pairs),
        paired_difference(before, after),
        sum(y - x > TOLERANCE for x, y in pairs) if has_direction else None,
        sum(x - y > TOLERANCE for x, y in pairs) if has_direction else None,
        sum(abs(y - x) <= TOLERANCE for x, y in pairs) if has_direction else None,
    )


def _prompt_change(a: Sequence[Row], b: Sequence[Row]) -> PromptChange | None:
    scored_a = [row for row in a if row["reward"] is not None]
    scored_b = [row for row in b if row["reward"] is not None]
    if not scored_a or not scored_b:
        return None
    mean_a, mean_b = (
        sum(row["reward"] for row in rows) / len(rows) for rows in (scored_a, scored_b)
    )
    change = max(
        ((x, y) for x in scored_a for y in scored_b if x["sample"] == y["sample"]),
        key=lambda pair: (pair[1]["reward"] - pair[0]["reward"]) * (1 if mean_b > mean_a else -1),
        default=(scored_a[0], scored_b[0]),
    )
    return PromptChange(
        a[0]["prompt"], mean_a, mean_b, change[0]["completion"], change[1]["completion"]
    )


def _curve_change(a: Path, b: Path, metric: str) -> CurveChange | None:
    with (
        Store.open(a / RECORD, readonly=True) as store_a,
        Store.open(b / RECORD, readonly=True) as store_b,
    ):
        curves = [dict(store.metrics([metric]).get(metric, [])) for store in (store_a, store_b)]
        steps = sorted(curves[0].keys() & curves[1].keys())
        if not steps:
            return None
        ends = [reward_ends([curve[step] for step in steps]) for curve in curves]
        last_steps = steps[-max(1, min(ENDS, len(steps) // 2)) :]
        change = None
        if metric == REWARD:
            means = [
                {
                    (group.draw, group.prompt): group.mean
                    for group in store.group_rewards(last_steps[0], last_steps[-1])
                }
                for store in (store_a, store_b)
            ]
            common_keys = [key for key in means[0] if key in means[1]]
            if common_keys:
                before, after = ([side[key] for key in common_keys] for side in means)
                change = paired_difference(before, after)
    return CurveChange(metric, len(steps), ends[0], ends[1], change)


def _config_changes(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    model: type[RunConfig] | type[SftConfig] = RunConfig,
) -> dict[str, Change]:
    load = load_config if model is RunConfig else load_sft_config
    differences = compare(_with_defaults(a, load), _with_defaults(b, load), model)
    changes = {**differences.fixed, **differences.warned, **differences.free}
    return {key: changes[key] for key in sorted(changes) if key not in IGNORED_KEYS}


def _with_defaults(
    config: Mapping[str, Any], load: Callable[[Mapping[str, Any]], LoadedConfig]
) -> Mapping[str, Any]:
    """Fill in the keys that a config of an earlier version lacks; return it unchanged if it is no longer valid, or its algorithm's file is
    gone."""
    try:
        return resolved_values(load(config).config)
    except UsageError:
        return config


# --- notes for the reader ------------------------------------------------------------------------


def _notes(a: Side, b: Side, config: Mapping[str, Change]) -> list[str]:
    missing = [side.label for side in (a, b) if not side.rows]
    if missing:
        return [
            f"only rewards in training are compared: no evaluation of {' and of '.join(missing)}"
        ]
    notes = [
        f"{name}: {side.failed} of {len(side.rows)} answers could not be scored and are left out"
        for name, side in (("A", a), ("B", b))
        if side.failed
    ]
    settings = [
        f"{key} is {config[key][0]} / {config[key][1]}" for key in EVALUATION_KEYS if key in config
    ]
    if a.samples != b.samples and "eval.samples_per_prompt" not in config:
        settings.append(f"{a.samples} / {b.samples} samples of each prompt")
    if settings:
        notes.append(f"answered or judged in different ways: {', '.join(settings)}")
    parts = [sorted({name for row in side.rows for name in row["parts"]}) for side in (a, b)]
    if parts[0] != parts[1]:
        notes.append(
            f"rewarded by different functions: {', '.join(parts[0])} / {', '.join(parts[1])}"
        )
    changed_count = _changed_columns(a, b)
    if changed_count:
        notes.append(
            f"{changed_count} prompts are in both with different columns (such as another answer); they are not paired"
        )
    return notes


def _changed_columns(a: Side, b: Side) -> int:
    """Number of prompts with the same text but different columns on the two sides."""
    unpaired = [
        {prompt_key(samples[0]) for key, samples in own_samples.items() if key not in other_samples}
        for own_samples, other_samples in (
            (by_prompt(a.rows), by_prompt(b.rows)),
            (by_prompt(b.rows), by_prompt(a.rows)),
        )
    ]
    return len(unpaired[0] & unpaired[1])
