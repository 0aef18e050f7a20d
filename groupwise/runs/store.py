"""The run's record: one SQLite file that holds every step, metric, rollout and evaluation.

The training loop is the only writer; it holds the run folder's lock. Each step is one transaction (`commit_step`): a
step is stored with its manifest, metrics and rollouts, or not at all. Finished groups that belong to no committed step
are stored without a step (`keep_unfinished`). A resume deletes everything after its checkpoint in one transaction
(`rewind`) and continues from there. Commands, the dashboard and notebooks may read while the loop writes (WAL).
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from groupwise.core.atomic_files import without_nan
from groupwise.core.errors import StoreError
from groupwise.core.types import Group, Prompt
from groupwise.runs.database import Database
from groupwise.runs.encoding import (
    label,
    moment,
    pack_json,
    plain_number,
    plain_text,
    text,
    unpack_json,
    unpack_mapping,
)
from groupwise.runs.records import (
    TIMING_PREFIXES,
    CompletedPrompt,
    CurvePoint,
    EvaluationRecord,
    FailureKind,
    GroupReward,
    GroupScore,
    ResumeRecord,
    Rewound,
    RolloutDetail,
    RolloutFilter,
    RolloutView,
    StepRecord,
    WarningRecord,
)
from groupwise.runs.search import (
    PromptFilter,
    every_rollout,
    failure_kinds,
    find_completed_prompts,
    find_rollouts,
    read_scores,
)
from groupwise.runs.tables import delete_groups, insert_group, read_groups

FINITE = "CASE WHEN abs(value) < 9e999 THEN value END"
"""SQL: the value of a metric, or NULL if it is not finite and cannot be plotted."""


class Store:
    """One open `run.db`. Use it from any thread; close it, or use it as a context manager."""

    def __init__(self, db: Database, *, keep_tokens: bool) -> None:
        self.path = db.path
        self.keep_tokens = keep_tokens
        """True if committed steps keep token ids and log-probabilities; texts, rewards and lengths are always stored."""
        self._db = db

    @classmethod
    def create(cls, path: Path, *, keep_tokens: bool = True) -> Store:
        """Make a new record; StoreError if the file exists already."""
        if path.exists():
            raise StoreError(f"{path} is there already; open it, or choose another path.")
        return cls(Database.open_for_writing(path), keep_tokens=keep_tokens)

    @classmethod
    def open(cls, path: Path, readonly: bool = False, *, keep_tokens: bool = True) -> Store:
        """Open an existing record and migrate one of an older format. `readonly` writes nothing: it reads an older one through views.

        StoreError if it is missing, is something else, or was written by a newer version of Groupwise.
        """
        try:
            exists = path.is_file()
        except OSError as error:
            raise StoreError(f"{path} cannot be looked at: {error.strerror}.") from None
        if not exists:
            raise StoreError(f"{path} does not exist: a run folder holds its record there.")
        db = Database.open_for_reading(path) if readonly else Database.open_for_writing(path)
        return cls(db, keep_tokens=keep_tokens)

    @classmethod
    def facts(cls, path: Path) -> dict[str, Any]:
        """All facts about a run, from a record of any format, old ones included; StoreError as in `open`."""
        with cls.open(path, readonly=True) as store:
            return store.get_meta()

    def close(self) -> None:
        """Close the file; committed data stays."""
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Steps

    def commit_step(
        self,
        record: StepRecord,
        groups: Sequence[Group],
        metrics: Mapping[str, float],
        warnings: Sequence[WarningRecord] = (),
    ) -> None:
        """Add the next step with its groups, metrics and warnings, in one transaction.

        `groups` are those of `record.all_draws`, in any order. A group stored by `keep_unfinished` is replaced. StoreError if `record.step`
        is not the last step + 1, or if draws and groups differ.
        """
        draws = record.all_draws
        order = {draw: position for position, draw in enumerate(draws)}
        if len(order) != len(draws) or sorted(order) != sorted(g.draw for g in groups):
            raise StoreError(
                f"step {record.step} names the draws {list(draws)}, but was given the groups of "
                f"{[group.draw for group in groups]}; each draw must come once."
            )
        with self._db.transaction("step"):
            last_step = self.last_step()
            expected = 0 if last_step is None else last_step + 1
            if record.step != expected:
                raise StoreError(
                    f"{self.path}: step {record.step} cannot be committed, the next one is {expected}. "
                    "Rewind to the checkpoint before going on from it."
                )
            self._db.insert(
                "steps",
                step=record.step,
                version_in=record.version_in,
                version_out=record.version_out,
                fingerprint_out=record.fingerprint_out,
                draws=pack_json(record.draws),
                learning_rate=record.learning_rate,
                finished_at=record.finished_at,
                rejected=pack_json(record.rejected),
            )
            for group in sorted(groups, key=lambda group: order[group.draw]):
                delete_groups(self._db, "step IS NULL AND draw = ?", (group.draw,))
                insert_group(
                    self._db,
                    group,
                    step=record.step,
                    position=order[group.draw],
                    keep_tokens=self.keep_tokens,
                )
            rows = [(label(name), record.step, float(value)) for name, value in metrics.items()]
            self._db.insert_many("metrics", ("name", "step", "value"), rows)
            for warning in warnings:
                self._insert_warning(warning)

    def keep_unfinished(self, groups: Iterable[Group]) -> None:
        """Store groups that belong to no committed step, tokens included; an earlier version of the same draw is replaced."""
        with self._db.transaction("unfinished"):
            for group in groups:
                delete_groups(self._db, "step IS NULL AND draw = ?", (group.draw,))
                insert_group(self._db, group, step=None, position=group.draw, keep_tokens=True)

    def rewind(self, to_step: int) -> Rewound:
        """Restore the record to the state after `to_step` steps, in one transaction.

        Deletes the steps with index `to_step` and higher, with their rollouts and metrics, all groups without a step, and
        the evaluations and warnings of later policies.
        """
        with self._db.transaction("rewind"):
            (steps,) = self._db.one("SELECT count(*) FROM steps WHERE step >= ?", (to_step,))
            rollouts = delete_groups(self._db, "step >= ? OR step IS NULL", (to_step,))
            self._db.execute("DELETE FROM steps WHERE step >= ?", (to_step,))
            self._db.execute("DELETE FROM evaluations WHERE step > ?", (to_step,))
            self._db.execute("DELETE FROM warnings WHERE step > ?", (to_step,))
        return Rewound(steps=steps, rollouts=rollouts)

    def last_step(self) -> int | None:
        """Index of the last committed step; None if there is none."""
        return self._db.one("SELECT max(step) FROM steps")[0]

    def step_count(self) -> int:
        """How many steps are committed, which is the number of the last one."""
        last_step = self.last_step()
        return 0 if last_step is None else last_step + 1

    def steps(self) -> list[StepRecord]:
        """The manifests of all committed steps, in order."""
        return self._read_steps("TRUE ORDER BY step")

    def step(self, step: int) -> StepRecord:
        """The manifest of one committed step."""
        return self._read_steps("step = ?", (step,))[0]

    def _read_steps(self, condition: str, values: tuple[int, ...] = ()) -> list[StepRecord]:
        rows = self._db.all(
            "SELECT step, version_in, version_out, fingerprint_out, draws, learning_rate, finished_at, rejected"
            f" FROM steps WHERE {condition}",
            values,
        )
        return [
            StepRecord(
                step,
                version_in,
                version_out,
                fingerprint,
                tuple(unpack_json(draws)),
                rate,
                finished,
                tuple(unpack_json(rejected)),
            )
            for step, version_in, version_out, fingerprint, draws, rate, finished, rejected in rows
        ]

    # Metrics

    def metric_names(self) -> list[str]:
        """The names of all metrics of the run, sorted."""
        return self._distinct_values("metrics", "name")

    def metrics(
        self, names: Sequence[str] | None = None, since: int | None = None
    ) -> dict[str, list[tuple[int, float]]]:
        """Curves: name -> (step, value), with steps from 1, of the steps after the first `since`. A name without values is left out."""
        wanted_names = self.metric_names() if names is None else names
        query = "SELECT step + 1, value FROM metrics WHERE name = ? AND step >= ? ORDER BY step"
        curves: dict[str, list[tuple[int, float]]] = {}
        for name in wanted_names:
            if rows := self._db.all(query, (label(name), since or 0)):
                curves[name] = [(step, _unpack_metric(value)) for step, value in rows]
        return curves

    def curve_ends(self, name: str, max_values: int) -> tuple[list[float], list[float]]:
        """The first and the last `max_values` values of a curve. With fewer than `2 * max_values` values, half of them each; a single
        value, twice."""
        query = "SELECT value FROM metrics WHERE name = ? ORDER BY step {} LIMIT ?"
        first, last = (
            [
                _unpack_metric(value)
                for (value,) in self._db.all(query.format(order), (label(name), 2 * max_values))
            ]
            for order in ("", "DESC")
        )
        count = max(1, min(max_values, len(first) // 2))
        return first[:count], last[:count][::-1]

    def range_of(self, names: Iterable[str]) -> tuple[int, int] | None:
        """The first and the last step, from 1, at which any of these metrics has a value; None if none has."""
        step_ranges = [
            self._db.one(
                "SELECT (SELECT min(step) + 1 FROM metrics WHERE name = ?1), (SELECT max(step) + 1 FROM metrics WHERE name = ?1)",
                (label(name),),
            )
            for name in names
        ]
        bounds = [(first, last) for first, last in step_ranges if first is not None]
        return (min(f for f, _ in bounds), max(t for _, t in bounds)) if bounds else None

    def thinned_curve(
        self, name: str, columns: int, within: tuple[int, int] | None = None
    ) -> list[CurvePoint]:
        """A curve reduced to a plot `columns` columns wide: mean, smallest and largest value of each column, which keeps outliers
        visible. A curve with at most `columns` steps gets one column per step. `within` is the range of steps that the plot shows,
        by default the curve's own."""
        return self._thin_curve(
            f"SELECT step + 1 AS step, {FINITE} AS value FROM metrics WHERE name = ?1",
            label(name),
            columns,
            within or self.range_of([name]),
        )

    def thinned_sum(
        self, names: Sequence[str], columns: int, within: tuple[int, int] | None = None
    ) -> list[CurvePoint]:
        """`thinned_curve` of the sum of several metrics in each step: the height of a stacked plot."""
        step_sums = (
            f"SELECT step + 1 AS step, sum({FINITE}) AS value FROM metrics WHERE name IN (SELECT value FROM json_each(?1))"
            " GROUP BY step"
        )
        names_json = json.dumps([label(name) for name in names])
        return self._thin_curve(step_sums, names_json, columns, within or self.range_of(names))

    def thinned_times(
        self, columns: int, within: tuple[int, int] | None, name: str | None = None
    ) -> list[CurvePoint]:
        """When the steps of each column were finished: seconds since the run was created, or since its first step if that is earlier.
        With `name`, only steps that have this metric."""
        metric_condition = " WHERE step IN (SELECT step FROM metrics WHERE name = ?5)"
        times = f"SELECT step + 1 AS step, finished_at - ?1 AS value FROM steps{metric_condition if name else ''}"
        extra_values = (label(name),) if name else ()
        return self._thin_curve(times, self._start_time(), columns, within, *extra_values)

    def seconds_after(self, steps_done: Iterable[int]) -> dict[int, float]:
        """When this many steps were finished, in seconds as in `thinned_times`; step counts that the record does not have are left out."""
        steps_asked = set(steps_done)
        rows = self._db.all(
            "SELECT step + 1, finished_at - ?1 FROM steps WHERE step IN (SELECT value - 1 FROM json_each(?2))",
            (self._start_time(), json.dumps(sorted(steps_asked))),
        )
        return ({0: 0.0} if 0 in steps_asked else {}) | dict(rows)

    def _start_time(self) -> float:
        first_step = self._db.all("SELECT finished_at FROM steps ORDER BY step LIMIT 1")
        times = (moment(self.get_meta().get("created_at")), *(at for (at,) in first_step))
        return min((seconds for seconds in times if seconds is not None), default=0.0)

    def thinned_points(
        self, points: Mapping[int, float], columns: int, within: tuple[int, int] | None
    ) -> list[CurvePoint]:
        """`thinned_curve` of points from the caller (value by step), for example those of an evaluation's metric."""
        values = "SELECT json_extract(value, '$[0]') AS step, json_extract(value, '$[1]') AS value FROM json_each(?1)"
        return self._thin_curve(
            values, json.dumps(without_nan(list(points.items()))), columns, within
        )

    def _thin_curve(
        self,
        values: str,
        key: str | float,
        columns: int,
        within: tuple[int, int] | None,
        *extra_values: str,
    ) -> list[CurvePoint]:
        if within is None:
            return []
        first, last = within
        width = max(1.0, (last - first + 1) / columns)
        rows = self._db.all(
            "SELECT CAST((step - ?2) / ?3 AS INTEGER), min(step), max(step), avg(value), min(value), max(value), count(*) - count(value)"
            f" FROM ({values}) WHERE step BETWEEN ?2 AND ?4 GROUP BY 1 ORDER BY 1",
            (key, first, width, last, *extra_values),
        )
        return [
            CurvePoint(first + (column + 0.5) * width - 0.5, *values) for column, *values in rows
        ]

    def step_metrics(self, step: int) -> dict[str, float]:
        """All metrics of one step."""
        rows = self._db.all("SELECT name, value FROM metrics WHERE step = ? ORDER BY name", (step,))
        return {name: _unpack_metric(value) for name, value in rows}

    def snapshot(self) -> AbstractContextManager[None]:
        """All reads inside the `with` block see the same state, even if the writer commits or rewinds meanwhile."""
        return self._db.snapshot()

    # Groups and rollouts

    def groups(self, step: int) -> list[Group]:
        """The complete groups of one step: those that were trained, in that order, then the rejected ones.

        Tokens that were not stored are empty tuples, and log-probabilities None.
        """
        with self._db.snapshot():
            return read_groups(self._db, "step = ? ORDER BY position", (step,))

    def unfinished_groups(self) -> list[Group]:
        """The groups that belong to no committed step, in the order of their draws."""
        with self._db.snapshot():
            return read_groups(self._db, "step IS NULL ORDER BY draw")

    def group(self, draw: int) -> Group | None:
        """The complete group of one draw; None if there is none."""
        with self._db.snapshot():
            return next(iter(read_groups(self._db, "draw = ?", (draw,))), None)

    def rollouts(self, filters: RolloutFilter, max_chars: int | None = None) -> list[RolloutView]:
        """One page of the rollouts that match the filter. Prompts and completions longer than `max_chars` characters are shortened to their
        beginning and end, half of `max_chars` each."""
        with self._db.snapshot():
            return find_rollouts(self._db, filters, max_chars)

    def draws_of(self, example: int, limit: int, offset: int = 0) -> list[int]:
        """The draws of an example, newest first."""
        rows = self._db.all(
            "SELECT draw FROM groups WHERE example = ? ORDER BY draw DESC LIMIT ? OFFSET ?",
            (example, limit, offset),
        )
        return [draw for (draw,) in rows]

    def steps_of(self, example: int) -> tuple[list[int], int]:
        """The steps that drew an example, from 1 and in order, and how many groups of it there are, those without a step included."""
        rows = self._db.all(
            "SELECT step + 1, count(*) FROM groups WHERE example = ? GROUP BY step ORDER BY step",
            (example,),
        )
        return [step for step, _ in rows if step is not None], sum(count for _, count in rows)

    def origin_of(self, draw: int) -> tuple[str, int | None, dict[str, Any]] | None:
        """A group's source, the draw whose completions it has, and the columns of its example; None if there is no such group."""
        rows = self._db.all("SELECT origin, again, columns FROM groups WHERE draw = ?", (draw,))
        return next(
            ((origin, again, unpack_json(columns)) for origin, again, columns in rows), None
        )

    def every_rollout(self, filters: RolloutFilter) -> Generator[tuple[RolloutView, RolloutDetail]]:
        """All rollouts that match the filter, one by one, from one state of the record, each with the details that lists leave out.
        The filter's limit and offset are ignored.

        Do not use the store for anything else until the generator has ended. A few hundred rollouts are in memory at a time.
        """
        return every_rollout(self._db, filters)

    def completed_prompts(self, filters: PromptFilter) -> list[CompletedPrompt]:
        """The prompts that were completed in the steps that match the filter."""
        return find_completed_prompts(self._db, filters)

    def scores(self, draws: Iterable[int]) -> dict[int, GroupScore]:
        """Rewards of these groups' members, by draw; groups without a scored member are left out."""
        return read_scores(self._db, draws)

    def draw_of(self, rollout: int) -> int | None:
        """The draw of the rollout with this id (as in lists of rollouts); None if there is no such rollout."""
        rows = self._db.all("SELECT draw FROM rollouts WHERE id = ?", (rollout,))
        return rows[0][0] if rows else None

    def failures(self, limit: int = 20, newest: int = 5_000) -> list[FailureKind]:
        """The reasons why rollouts without a score have none, by kind, the most frequent first; looks at the `newest` of them."""
        return failure_kinds(self._db, limit, newest)

    def group_rewards(self, first: int, last: int) -> list[GroupReward]:
        """The rewards of all groups of the steps `first` to `last` (from 1), in order of training; those without a score are left out."""
        rows = self._db.all(
            "SELECT g.step + 1, g.draw, g.prompt_text, avg(r.reward) FROM groups g CROSS JOIN rollouts r"
            " ON r.draw = g.draw AND +r.outcome = 'scored' AND +r.reward <= 9e999 WHERE g.step BETWEEN ? - 1 AND ? - 1"
            " GROUP BY g.step, g.position, g.draw ORDER BY g.step, g.position",
            (first, last),
        )
        return [
            GroupReward(step, draw, plain_text(prompt) or "", mean)
            for step, draw, prompt, mean in rows
        ]

    def prompts(self, draws: Iterable[int]) -> dict[int, Prompt]:
        """The prompts of these draws, as the task gave them."""
        rows = self._db.all(
            "SELECT draw, prompt FROM groups WHERE draw IN (SELECT value FROM json_each(?))",
            (json.dumps(list(draws)),),
        )
        return {draw: unpack_json(prompt) for draw, prompt in rows}

    def reward_ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest reward of any rollout, under the name of its metric: `reward`, and `rewards/PART/mean` for the
        value of each part. The indexes answer this."""
        ends = "SELECT (SELECT min({0}) FROM {1}), (SELECT max({0}) FROM {1})"
        ranges = {"reward": self._db.one(ends.format("reward", "rollouts"))}
        of_part = ends.format("value", "parts WHERE name = ?1")
        for name in self.part_names():
            ranges[f"rewards/{name}/mean"] = self._db.one(of_part, (name,))
        return {name: (low, high) for name, (low, high) in ranges.items() if low is not None}

    def part_names(self) -> list[str]:
        """The names of all reward parts in the record, sorted."""
        return self._distinct_values("parts", "name")

    def tasks(self, limit: int) -> list[str]:
        """The task labels of a mixture, sorted; at most `limit`."""
        if self._db.tasks_indexed:
            return self._distinct_values("groups", "task", limit)
        query = "SELECT DISTINCT task FROM groups WHERE task IS NOT NULL ORDER BY 1 LIMIT ?"
        return [task for (task,) in self._db.all(query, (limit,))]

    def rebuild_text_index(self) -> None:
        """Rebuild the full-text index from the tables. Does nothing if SQLite lacks FTS5: search then reads every text."""
        self._db.rebuild_text_index()

    # Evaluations, warnings, facts about the run, resumes

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Add an evaluation; an earlier one of the same step, name and policy is replaced."""
        key = (record.step, label(record.name), label(record.policy))
        with self._db.transaction("evaluation"):
            self._db.execute(
                "DELETE FROM evaluations WHERE step = ? AND name = ? AND policy = ?", key
            )
            evaluation_id = self._db.insert(
                "evaluations",
                step=record.step,
                name=label(record.name),
                policy=label(record.policy),
                metrics=pack_json(dict(record.metrics)),
                asked=record.asked,
            )
            self._db.insert_many(
                "evaluation_rows",
                ("evaluation", "position", "data"),
                [(evaluation_id, i, pack_json(dict(row))) for i, row in enumerate(record.rows)],
            )

    def evaluations(self, *, rows: bool = True) -> list[EvaluationRecord]:
        """All evaluations, by step, then in the order of insertion. Without `rows`, only their metrics."""
        return self._read_evaluations("TRUE ORDER BY step, id", (), rows)

    def evaluation(self, step: int, name: str) -> EvaluationRecord | None:
        """The last added evaluation of that name after `step` steps; None if there is none."""
        condition = "step = ? AND name = ? ORDER BY id DESC LIMIT 1"
        return next(iter(self._read_evaluations(condition, (step, label(name)), rows=True)), None)

    def _read_evaluations(
        self, condition: str, values: tuple[int | str, ...], rows: bool
    ) -> list[EvaluationRecord]:
        evaluations = self._db.all(
            f"SELECT id, step, name, policy, metrics, asked FROM evaluations WHERE {condition}",
            values,
        )
        return [
            EvaluationRecord(
                step,
                name,
                policy,
                unpack_mapping(metrics),
                self._read_evaluation_rows(evaluation) if rows else (),
                questions,
            )
            for evaluation, step, name, policy, metrics, questions in evaluations
        ]

    def evaluations_with_rows(self) -> set[tuple[int, str, str]]:
        """Step, name and policy of the evaluations that have rows; the others are only metrics."""
        query = (
            "SELECT step, name, policy FROM evaluations"
            " WHERE EXISTS (SELECT 1 FROM evaluation_rows WHERE evaluation = evaluations.id)"
        )
        return {(step, name, policy) for step, name, policy in self._db.all(query)}

    def evaluation_rows(self, step: int, name: str, policy: str) -> tuple[dict[str, Any], ...]:
        """The rows of one evaluation; empty if there is no such evaluation."""
        matches = self._db.all(
            "SELECT id FROM evaluations WHERE step = ? AND name = ? AND policy = ?",
            (step, label(name), label(policy)),
        )
        return self._read_evaluation_rows(matches[0][0]) if matches else ()

    def _read_evaluation_rows(self, evaluation: int) -> tuple[dict[str, Any], ...]:
        query = "SELECT data FROM evaluation_rows WHERE evaluation = ? ORDER BY position"
        return tuple(unpack_json(data) for (data,) in self._db.all(query, (evaluation,)))

    def set_warning(self, step: int, name: str, warning: WarningRecord | None) -> None:
        """Set or replace the warning of a signal after `step` steps; None deletes it."""
        with self._db.transaction("warning"):
            self._db.execute(
                "DELETE FROM warnings WHERE step = ? AND name = ?", (step, label(name))
            )
            if warning is not None:
                self._insert_warning(warning)

    def warnings(self, name: str | None = None) -> list[WarningRecord]:
        """All warnings, or those of one signal, by step."""
        rows = self._db.all(
            "SELECT step, name, kind, message, numbers FROM warnings WHERE ? IN (name, '') ORDER BY step, name",
            (label(name or ""),),
        )
        return [
            WarningRecord(step, signal, kind, plain_text(message) or "", unpack_mapping(numbers))
            for step, signal, kind, message, numbers in rows
        ]

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Set facts about the run (JSON), all of them in one transaction."""
        with self._db.transaction("meta"):
            for key, value in values.items():
                self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
                self._db.insert("meta", key=key, value=pack_json(value))

    def get_meta(self) -> dict[str, Any]:
        """All facts about the run."""
        rows = self._db.all("SELECT key, value FROM meta ORDER BY key")
        return {key: unpack_json(value) for key, value in rows}

    def record_resume(self, record: ResumeRecord) -> None:
        """Record that the run was resumed."""
        with self._db.transaction("resume"):
            self._db.insert(
                "resumes",
                step=record.step,
                steps_dropped=record.dropped.steps,
                rollouts_dropped=record.dropped.rollouts,
                resumed_at=record.resumed_at,
                changes=pack_json(dict(record.changes)),
            )

    def resumes(self) -> list[ResumeRecord]:
        """All resumes of the run, in order."""
        rows = self._db.all(
            "SELECT step, steps_dropped, rollouts_dropped, resumed_at, changes FROM resumes ORDER BY id"
        )
        return [
            ResumeRecord(step, Rewound(steps, rollouts), at, unpack_json(changes))
            for step, steps, rollouts, at, changes in rows
        ]

    def deterministic_dump(self) -> bytes:
        """Everything that two equal runs have in common, in canonical form: two dumps are equal iff the runs are.

        Left out: timings (metrics named in `TIMING_PREFIXES`, time stamps), facts about the run, resumes.
        """
        with self._db.snapshot():
            steps = self.steps()
            curves = self.metrics()
            content = {
                "steps": [asdict(replace(record, finished_at=0.0)) for record in steps],
                "metrics": {
                    name: curve
                    for name, curve in curves.items()
                    if not name.startswith(TIMING_PREFIXES)
                },
                "groups": [asdict(group) for record in steps for group in self.groups(record.step)],
                "unfinished": [asdict(group) for group in self.unfinished_groups()],
                "evaluations": sorted(
                    (asdict(evaluation) for evaluation in self.evaluations()),
                    key=lambda row: (row["step"], row["name"], row["policy"]),
                ),
                "warnings": [asdict(warning) for warning in self.warnings()],
            }
        return json.dumps(content, sort_keys=True, indent=1).encode()

    def _distinct_values(self, table: str, column: str, limit: int = -1) -> list[str]:
        """All values of a column that is the first of an index. Jumps from one value to the next; DISTINCT would read every row."""
        rows = self._db.all(
            f"WITH RECURSIVE names (name) AS (SELECT min({column}) FROM {table} WHERE {column} IS NOT NULL UNION ALL"
            f" SELECT (SELECT min({column}) FROM {table} WHERE {column} > names.name) FROM names"
            " WHERE names.name IS NOT NULL) SELECT CAST(name AS BLOB) FROM names WHERE name IS NOT NULL LIMIT ?",
            (limit,),
        )
        return [name.decode("utf-8", "replace") for (name,) in rows]

    def _insert_warning(self, warning: WarningRecord) -> None:
        self._db.insert(
            "warnings",
            step=warning.step,
            name=label(warning.name),
            kind=warning.kind,
            message=text(warning.message),
            numbers=pack_json(dict(warning.values)),
        )


def _unpack_metric(stored: float | None) -> float:
    value = plain_number(stored)
    return float("nan") if value is None else value
