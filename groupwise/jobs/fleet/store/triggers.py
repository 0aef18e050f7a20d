"""Rules that the database itself enforces: which state may follow which, which values never change, which rows may not overlap.

`states.py` has the table of states; here each line of it becomes a trigger, in the SQL of either database, so no program of any version
and no user at a prompt can break it. A refusal is an integrity error whose message names the rule. `schema.py` drops and recreates the
triggers at each migration, so they always agree with the code.

SQLite needs three more kinds. It stores any type in any column, and one unreadable row would hide all others. Its `INSERT OR REPLACE`
deletes conflicting rows without firing delete triggers, so inserting a row with an existing key is refused. And it enforces foreign keys
only for connections that enable them, which is rare at a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Constraint,
    Float,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeEngine

from groupwise.api.schemas.fleet import (
    MAX_INTEGER,
    MAX_SECONDS,
    MAX_SLOTS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    NAME,
)
from groupwise.jobs.fleet import states
from groupwise.jobs.fleet.store.tables import Attempt, Base, Event, Job, Member, Moment, Reservation

Word = TypeVar("Word", bound=StrEnum)

PREFIX = "fleet_"
"""Prefix of the names of our triggers and their functions; other triggers in the database are not ours."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: a condition that no row may fulfil."""

    name: str
    table: str
    on: str
    """INSERT, UPDATE or DELETE; for SQLite also UPDATE OF a column."""
    refused: str
    """Condition on NEW and OLD, in SQL that both databases read; `<~>` means "differs from", with NULL as an ordinary value."""
    message: str
    about: str = ""
    """Optional cheap filter on the row alone: `refused` is evaluated only for rows that fulfil it."""
    early: bool = False
    """Check before the row is inserted. By default the check comes after, since SQLite assigns the row's number only then."""
    lock: str = ""
    """A statement for PostgreSQL that locks rows first, to see rows that others write at the same time; SQLite has a single writer."""


def rules() -> tuple[Rule, ...]:
    """The rules that both databases share, in the order of their checks; PostgreSQL fires triggers by name."""
    return (
        *_job_rules(),
        *_attempt_rules(),
        *_reservation_rules(),
        *_event_rules(),
        *_location_rules(),
        *_range_rules(),
    )


def statements(dialect: str) -> Iterator[str]:
    """The statements that create all triggers."""
    only_sqlite = (_value_rules, _replacement_rules, _reference_rules)
    dialect_rules = (
        [rule for kind in only_sqlite for rule in kind()] if dialect == "sqlite" else _time_rules()
    )
    for rule in (*rules(), *_machine_rules(dialect), *_document_rules(dialect), *dialect_rules):
        yield from _sqlite_trigger(rule) if dialect == "sqlite" else _postgresql_trigger(rule)
    if dialect == "postgresql":
        for table in NEVER_EMPTIED:
            yield from _no_truncation(table)


# --- the rules ------------------------------------------------------------------------------------

OF_THE_CONTROL_PLANE = (
    *((column, "0") for column in ("generation", "retry_count", "not_before")),
    *(
        (column, "NULL")
        for column in (
            *(
                "admitted_at",
                "spec",
                "spec_hash",
                "resources",
                "shape",
                "rank",
                "due",
                "waiting_since",
            ),
            *("blocked_reasons", "blocked_on", "cancel_requested_at", "assigned_vm", "gpu_index"),
            *("start_time", "exit_code"),
        )
    ),
    ("spent", "'{}'"),
)
"""Columns of a job that only the control plane writes, with the values of a new row: they decide which command runs, and when."""


FROZEN = ("spec", "spec_hash", "resources", "admitted_at")
"""Columns that admission writes, and writes again after a retry."""
ASKED = (
    *("request", "job_type", "model", "dataset", "reward_function", "preprocessing_pipeline"),
    *("hyperparams", "use_unsloth", "output_dir", "max_steps", "learning_rate", "batch_size"),
    *("num_generations", "priority", "project"),
)
"""Columns that the submitter writes and admission reads."""


def _job_rules() -> Iterator[Rule]:
    retried = f"OLD.status IN {_sql_list(states.RETRIED_FROM)} AND NEW.status = '{states.JobStatus.QUEUED}'"
    yield Rule(
        "job_begins",
        "jobs",
        "INSERT",
        f"NEW.status NOT IN {_sql_list(states.JOB_BEGINS)}",
        f"a new job is {_join_states(states.JOB_BEGINS)}; status is written by the control plane",
    )
    yield Rule(
        "job_unadmitted",
        "jobs",
        "INSERT",
        " OR ".join(f"NEW.{column} <~> {default}" for column, default in OF_THE_CONTROL_PLANE),
        f"{', '.join(column for column, _ in OF_THE_CONTROL_PLANE)} of a new job are the control plane's to write: leave them out",
    )
    yield from _transition_rules("job", "jobs", "status", states.JOB_MOVES)
    yield Rule(
        "job_in_motion",
        "jobs",
        "UPDATE",
        f"EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = NEW.job_id AND attempts.state <> '{states.AttemptState.ENDED}')",
        "a job runs as long as its attempt does: groupwise fleet stop ends both",
        about=f"OLD.status = '{states.JobStatus.RUNNING}' AND NEW.status <> OLD.status",
    )
    yield Rule(
        "job_retried",
        "jobs",
        "UPDATE",
        f"{retried} AND NEW.generation <> OLD.generation + 1",
        f"a job that is {_join_states(states.RETRIED_FROM)} is queued again only with generation + 1: groupwise fleet resume",
    )
    yield Rule(
        "job_generation",
        "jobs",
        "UPDATE",
        f"NEW.generation <> OLD.generation AND NOT ({retried})",
        "generation changes only when a job is retried",
    )
    yield Rule(
        "job_final",
        "jobs",
        "UPDATE",
        f"OLD.status IN {_sql_list(states.FINAL)} AND NEW.status = OLD.status AND "
        f"({' OR '.join(_set_once(column) for column in ('failure_reason', 'exit_code', 'end_time'))})",
        "how a job ended does not change any more",
    )
    yield Rule(
        "job_frozen",
        "jobs",
        "UPDATE",
        f"({' OR '.join(map(_set_once, FROZEN))}) AND NEW.generation = OLD.generation",
        "what an admitted job runs does not change: stop it and submit another",
    )
    yield Rule(
        "job_request",
        "jobs",
        "UPDATE",
        f"OLD.admitted_at IS NOT NULL AND ({' OR '.join(f'NEW.{name} <~> OLD.{name}' for name in ASKED)})",
        "what was asked of an admitted job does not change: stop it and submit another",
    )
    yield Rule(
        "job_asked_to_end",
        "jobs",
        "UPDATE",
        f"NEW.cancel_requested_at IS NOT NULL AND NEW.status NOT IN {_sql_list({states.JobStatus.RUNNING, *states.FINAL})}",
        "cancel_requested_at is for a job that runs: groupwise fleet stop ends one that waits at once",
    )
    yield Rule(
        "job_named", "jobs", "UPDATE", "NEW.job_id <> OLD.job_id", "the id of a job does not change"
    )


def _attempt_rules() -> Iterator[Rule]:
    ended_state = states.AttemptState.ENDED
    columns = ("epoch", "job_id", "generation", "number")
    final_columns = ("outcome", "failure_class", "charged", "ended_at")
    yield Rule(
        "attempt_begins",
        "attempts",
        "INSERT",
        f"NEW.state NOT IN {_sql_list(states.ATTEMPT_BEGINS)}",
        f"a new attempt is {_join_states(states.ATTEMPT_BEGINS)}",
    )
    yield Rule(
        "attempt_epoch",
        "attempts",
        "INSERT",
        "EXISTS (SELECT 1 FROM attempts AS other WHERE other.job_id = NEW.job_id AND other.epoch > NEW.epoch)",
        "the epoch of an attempt is higher than those of all earlier attempts of its job; leave it to the database",
    )
    yield from _transition_rules("attempt", "attempts", "state", states.ATTEMPT_MOVES)
    yield Rule(
        "attempt_kept",
        "attempts",
        "UPDATE",
        " OR ".join(f"NEW.{column} <~> OLD.{column}" for column in columns),
        f"{', '.join(columns)} of an attempt do not change",
    )
    yield Rule(
        "attempt_outcome",
        "attempts",
        "UPDATE",
        f"NEW.state = '{ended_state}' AND COALESCE(NEW.outcome, '') NOT IN {_sql_list(states.Outcome)}",
        f"an attempt that has ended has an outcome: {_join_states(states.Outcome)}",
    )
    yield Rule(
        "attempt_final",
        "attempts",
        "UPDATE",
        f"OLD.state = '{ended_state}' AND ({' OR '.join(f'NEW.{column} <~> OLD.{column}' for column in final_columns)})",
        "how an attempt ended does not change any more",
    )
    yield Rule(
        "attempt_cleanup",
        "attempts",
        "UPDATE",
        f"NEW.cleanup NOT IN {_sql_list(states.Cleanup)}",
        f"cleanup is {_join_states(states.Cleanup)}",
    )
    yield Rule(
        "attempt_over",
        "attempts",
        "DELETE",
        _may_hold("OLD"),
        "an attempt that has not ended, or may hold a GPU, is not deleted",
    )
    yield Rule(
        "member_over",
        "attempt_members",
        "DELETE",
        f"EXISTS (SELECT 1 FROM attempts WHERE attempts.epoch = OLD.epoch AND ({_may_hold('attempts')}))",
        "the members of an attempt that has not ended, or may hold a GPU, are not deleted",
    )


def _may_hold(attempt: str) -> str:
    return f"{attempt}.state <> '{states.AttemptState.ENDED}' OR {attempt}.cleanup <> '{states.Cleanup.CLEAN}'"


def _reservation_rules() -> Iterator[Rule]:
    columns = ("vm_id", "gpu_id", "slot", "share_mb", "epoch", "rank", "reserved_at")
    holds_gpu = "NEW.gpu_id IS NOT NULL AND NEW.released_at IS NULL"
    # `vm_id` is in these conditions for the index of open reservations, whose first column it is.
    open_reservations = (
        "FROM reservations WHERE vm_id = NEW.vm_id AND gpu_id = NEW.gpu_id AND released_at IS NULL"
    )
    yield Rule(
        "reservation_what",
        "reservations",
        "INSERT",
        "(NEW.gpu_id IS NULL AND (NEW.slot IS NULL OR NEW.share_mb IS NOT NULL)) OR (NEW.gpu_id IS NOT NULL AND NEW.slot IS NOT NULL) "
        "OR NEW.share_mb <= 0",
        "a reservation is of a GPU, of some of its memory, or of a CPU slot",
    )
    yield Rule(
        "reservation_where",
        "reservations",
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM gpus WHERE gpus.gpu_id = NEW.gpu_id AND gpus.vm_id = NEW.vm_id)",
        "the GPU of a reservation is one of its machine",
        about="NEW.gpu_id IS NOT NULL",
    )
    yield Rule(
        "reservation_room",
        "reservations",
        "INSERT",
        f"((SELECT count(*) {open_reservations}) > 1 AND "
        f"EXISTS (SELECT 1 {open_reservations} AND share_mb IS NULL)) OR (SELECT sum(share_mb) {open_reservations}) > "
        "COALESCE((SELECT memory_mb FROM gpus WHERE gpus.gpu_id = NEW.gpu_id), 0)",
        "the GPU has no room for this reservation: shares never exceed its memory, and a whole one stands alone",
        about=holds_gpu,
        lock="PERFORM 1 FROM gpus WHERE gpu_id = NEW.gpu_id FOR NO KEY UPDATE",
    )
    yield Rule(
        "reservation_twin",
        "reservations",
        "INSERT",
        "EXISTS (SELECT 1 FROM gpus AS own JOIN gpus AS twin "
        "ON twin.uuid = own.uuid AND twin.gpu_id <> own.gpu_id "
        "JOIN reservations AS held ON held.vm_id = twin.vm_id AND held.gpu_id = twin.gpu_id AND held.released_at IS NULL "
        "WHERE own.gpu_id = NEW.gpu_id)",
        "this GPU stands in the fleet twice, under two machines, and is reserved as that of the other one",
        about=holds_gpu,
        lock="PERFORM 1 FROM gpus WHERE uuid = (SELECT uuid FROM gpus WHERE gpu_id = NEW.gpu_id) ORDER BY gpu_id FOR NO KEY UPDATE",
    )
    yield Rule(
        "reservation_kept",
        "reservations",
        "UPDATE",
        f"{_set_once('released_at')} OR {' OR '.join(f'NEW.{column} <~> OLD.{column}' for column in columns)}",
        "a reservation is released once, and nothing else of it changes",
    )
    yield Rule(
        "reservation_over",
        "reservations",
        "DELETE",
        "OLD.released_at IS NULL",
        "an open reservation is released, not deleted",
    )


def _event_rules() -> Iterator[Rule]:
    for operation in ("UPDATE", "DELETE"):
        yield Rule(
            f"event_{operation.lower()}",
            "events",
            operation,
            "1 = 1",
            "events are only ever appended",
        )


_IN_USE = "EXISTS (SELECT 1 FROM reservations WHERE vm_id = NEW.vm_id AND released_at IS NULL)"


def _location_rules() -> Iterator[Rule]:
    """An address may change with the network. The columns that would make it another place for the runner may not, while something runs."""
    place_columns = ("transport", "user", "workdir")
    has_changed = " OR ".join(f'NEW."{column}" <~> OLD."{column}"' for column in place_columns)
    yield Rule(
        "vm_place",
        "vms",
        "UPDATE",
        _IN_USE,
        f"{', '.join(place_columns)} of a machine do not change while something runs there: drain it first, and wait for its jobs",
        about=has_changed,
    )
    for operation, changes in (("INSERT", ""), ("UPDATE", "NEW.transport <~> OLD.transport")):
        yield Rule(
            f"vm_transport_{operation.lower()}",
            "vms",
            operation,
            "NEW.transport NOT IN ('ssh', 'local')",
            "transport of a machine: `ssh` or `local` is wanted",
            about=changes,
        )


MACHINE_DOCUMENTS = {
    **dict.fromkeys(("labels", "facts", "jump", "engine"), "object"),
    "probe": "array",
}


JOB_DOCUMENTS = {
    "spent": "object",
    "spec": "object",
    "resources": "object",
    "blocked_reasons": "array",
}
"""JSON columns of a job that the control plane writes, and reads for all waiting jobs."""


def _document_rules(dialect: str) -> Iterator[Rule]:
    for column, kind in JOB_DOCUMENTS.items():
        message = f"{column} of a job: a JSON {kind} is wanted"
        yield Rule(
            f"job_{column}_is_{kind}", "jobs", "UPDATE", _no_json(dialect, column, kind), message
        )


def _time_rules() -> Iterator[Rule]:
    """PostgreSQL stores times that no program can represent: infinity, and years before 1."""
    time_columns = [
        c.name
        for c in Base.metadata.tables[Job.__tablename__].columns
        if isinstance(c.type, Moment)
    ]
    is_out_of_range = " OR ".join(
        f"NEW.{name} NOT BETWEEN '1970-01-01' AND '9999-01-01'" for name in time_columns
    )
    for operation in ("INSERT", "UPDATE"):
        message = f"{', '.join(time_columns)} of a job: a time from 1970 to 9998 is wanted"
        yield Rule(f"job_times_{operation.lower()}", "jobs", operation, is_out_of_range, message)


def _machine_rules(dialect: str) -> Iterator[Rule]:
    """Rows of machines are written by hand and read all at once, so one unreadable row would hide all others."""
    conditions = {name: _no_json(dialect, name, kind) for name, kind in MACHINE_DOCUMENTS.items()}
    # SQL condition: the id is not a name by the pattern of `api/schemas/fleet.py`.
    no_name = f"NEW.vm_id !~ '{NAME}'"
    # SQLite stores any type in any column; its GLOB stops at a NUL and cannot count bytes.
    if dialect == "sqlite":
        no_name = (
            "typeof(NEW.vm_id) <> 'text' OR length(CAST(NEW.vm_id AS BLOB)) NOT BETWEEN 1 AND 63 OR instr(NEW.vm_id, char(0)) > 0 "
            "OR NEW.vm_id GLOB '[._-]*' OR NEW.vm_id GLOB '*[^A-Za-z0-9._-]*'"
        )
        conditions |= {
            name: f"typeof(NEW.{name}) NOT IN {kinds}" for name, kinds in _NUMBERS.items()
        }
        conditions["last_polled"] = (
            "NEW.last_polled IS NOT NULL AND julianday(NEW.last_polled) IS NULL"
        )
    # SQL condition: the name of the engine changes. A new engine cannot report on jobs that the old one started.
    engine_name = (
        "json_extract({}.engine, '$.name')" if dialect == "sqlite" else "{}.engine ->> 'name'"
    )
    another_engine = f"({engine_name.format('NEW')}) <~> ({engine_name.format('OLD')})"
    yield Rule(
        "vm_engine_stays",
        "vms",
        "UPDATE",
        _IN_USE,
        "what begins jobs on a machine does not change while something runs there: drain it first, and wait for its jobs",
        about=another_engine,
    )
    for operation in ("INSERT", "UPDATE"):
        for column, condition in conditions.items():
            kind = MACHINE_DOCUMENTS.get(column)
            expected = f"a JSON {kind} is wanted" if kind else "this is not a valid value"
            message = f"{column} of a machine: {expected}"
            yield Rule(f"vm_{column}_{operation.lower()}", "vms", operation, condition, message)
        yield Rule(
            f"vm_named_{operation.lower()}",
            "vms",
            operation,
            no_name,
            "vm_id of a machine: letters, digits, `.`, `_` and `-` are wanted, at most 63, a letter or digit first, since commands name it",
            about="" if operation == "INSERT" else "NEW.vm_id <~> OLD.vm_id",
        )


_NUMBERS = {
    **dict.fromkeys(("active", "draining", "degraded", "misses", "launch_failures"), "('integer')"),
    **dict.fromkeys(
        ("lost_at", "unreachable_since", "observed_round"), "('integer', 'real', 'null')"
    ),
}
RANGES: Mapping[tuple[str, str], tuple[float, float]] = {
    ("vms", "port"): (1, 65535),
    ("vms", "cpu_slots"): (0, MAX_SLOTS),
    ("vms", "idle_memory_mb"): (0, MAX_INTEGER),
    ("vms", "deadman"): (1, MAX_SECONDS),
    ("projects", "weight"): (MIN_WEIGHT, MAX_WEIGHT),
    ("projects", "max_gpus"): (0, MAX_INTEGER),
    ("projects", "max_waiting"): (0, MAX_INTEGER),
}
"""Smallest and largest value of columns that people write by hand. The API's are the same, but for a longer least `deadman`."""


def _range_rules() -> Iterator[Rule]:
    for (table, column), (least, most) in RANGES.items():
        is_whole = isinstance(Base.metadata.tables[table].columns[column].type, Integer)
        value, kind = f"NEW.{column}", "whole number" if is_whole else "number"
        fits = f"{value} BETWEEN {least:g} AND {most:.0f}"
        if is_whole:  # SQLite stores 1.5 in such a column
            fits += f" AND {value} = CAST({value} AS INTEGER)"
        for operation, changes in (("INSERT", ""), ("UPDATE", f"{value} <~> OLD.{column}")):
            yield Rule(
                f"{table}_{column}_range_{operation.lower()}",
                table,
                operation,
                f"{value} IS NOT NULL AND NOT ({fits})",
                f"{column} of {table}: a {kind} from {least:g} to {most:.0f} is wanted",
                about=changes,
            )


KEPT_WHOLE: tuple[Table, ...] = tuple(
    Base.metadata.tables[model.__tablename__]
    for model in (Job, Attempt, Member, Reservation, Event)
)
"""Tables whose rows are never replaced."""
_KINDS: tuple[tuple[type[TypeEngine[Any]], str, str], ...] = (
    (Boolean, "{} NOT IN (0, 1)", "true or false"),
    (Integer, "typeof({}) <> 'integer'", "a whole number"),
    (Float, "typeof({}) NOT IN ('integer', 'real')", "a number"),
    (Text, "typeof({}) <> 'text'", "text"),
    (JSON, "NOT json_valid({})", "JSON"),
    (Moment, "julianday({}) IS NULL", "a time"),
)


def _value_rules() -> Iterator[Rule]:
    """Rules for changes to the columns of a job. New rows may hold anything but a wrong id: admission reads them and reports problems."""
    jobs = Base.metadata.tables[Job.__tablename__]
    yield _type_rule(
        "job_id_text", "INSERT", [jobs.columns["job_id"]], "typeof({}) <> 'text'", "text"
    )
    for kind, condition, type_name in _KINDS:
        columns = [column for column in jobs.columns if isinstance(column.type, kind)]
        yield _type_rule(f"job_{kind.__name__.lower()}", "UPDATE", columns, condition, type_name)


def _type_rule(
    name: str, operation: str, columns: Sequence[Column[Any]], condition: str, type_name: str
) -> Rule:
    any_condition = " OR ".join(
        f"(NEW.{column.name} IS NOT NULL AND ({condition.format(f'NEW.{column.name}')}))"
        for column in columns
    )
    names = [column.name for column in columns]
    *other_names, last_name = names
    message = (
        f"{', '.join(other_names)} and {last_name}: {type_name} is wanted in each"
        if other_names
        else f"{last_name}: {type_name} is wanted"
    )
    return Rule(name, columns[0].table.name, operation, any_condition, message)


def _replacement_rules() -> Iterator[Rule]:
    for table in KEPT_WHOLE:
        for number, (columns, index_condition) in enumerate(_unique_keys(table)):
            is_same_row = " AND ".join(f"other.{column} = NEW.{column}" for column in columns)
            yield Rule(
                f"{table.name}_replaced_{number}",
                table.name,
                "INSERT",
                f"EXISTS (SELECT 1 FROM {table.name} AS other WHERE {is_same_row}{index_condition})",
                f"there is a row of this {' and '.join(columns)} in {table.name} already, and it is not replaced",
                early=True,
            )


def _unique_keys(table: Table) -> Iterator[tuple[Sequence[str], str]]:
    """Sets of columns that no two rows share, each with a condition for the rows concerned. An autoincremented number is NULL before it is
    assigned, and so conflicts with nothing. The order is the same in every process, although SQLAlchemy keeps them as sets."""
    yield [column.name for column in table.primary_key.columns], ""
    for constraint in sorted(table.constraints, key=_constraint_name):
        if isinstance(constraint, UniqueConstraint):
            yield [column.name for column in constraint.columns], ""
    for index in sorted(table.indexes, key=_constraint_name):
        if index.unique:
            yield [column.name for column in index.columns], _partial_index_condition(index)


def _constraint_name(constraint: Constraint | Index) -> str:
    return str(constraint.name)


def _partial_index_condition(index: Index) -> str:
    """SQL: both rows fulfil the condition of a partial index."""
    index_condition = index.dialect_options["sqlite"]["where"]
    if index_condition is None:
        return ""
    columns = (
        "|".join(column.name for column in index.table.columns) if index.table is not None else ""
    )
    conditions = (
        re.sub(rf"\b({columns})\b", rf"{row}.\1", str(index_condition)) for row in ("other", "NEW")
    )
    return "".join(f" AND {condition}" for condition in conditions)


def _reference_rules() -> Iterator[Rule]:
    """Rules that a referenced row stays: an attempt whose job or machine is deleted would have no owner."""
    for name, table in sorted(Base.metadata.tables.items()):
        for key in sorted(
            table.foreign_keys, key=lambda foreign_key: foreign_key.column.table.name
        ):
            referenced_table, column = key.column.table.name, key.column.name
            rows = f"EXISTS (SELECT 1 FROM {name} WHERE {name}.{key.parent.name} = OLD.{column})"
            message = f"this row of {referenced_table} stays, and keeps its {column}, as long as rows of {name} name it"
            yield Rule(
                f"{referenced_table}_named_by_{name}", referenced_table, "DELETE", rows, message
            )
            yield Rule(
                f"{referenced_table}_called_by_{name}",
                referenced_table,
                f"UPDATE OF {column}",
                f"NEW.{column} <~> OLD.{column} AND {rows}",
                message,
            )


def _no_json(dialect: str, column: str, kind: str) -> str:
    if dialect == "sqlite":
        is_one = f"CASE WHEN json_valid(NEW.{column}) THEN json_type(NEW.{column}) ELSE 'none' END"
    else:
        is_one = f"jsonb_typeof(NEW.{column})"
    return f"NEW.{column} IS NOT NULL AND {is_one} <> '{kind}'"


def _transition_rules(
    entity: str, table: str, column: str, moves: Mapping[Word, frozenset[Word]]
) -> Iterator[Rule]:
    for state, following in moves.items():
        rule_text = f"may become {_join_states(following)}" if following else "stays so"
        yield Rule(
            f"{entity}_{state}",
            table,
            "UPDATE",
            f"OLD.{column} = '{state}' AND NEW.{column} NOT IN {_sql_list({state, *following})}",
            f"{_article(entity)} that is {state} {rule_text}",
        )


def _set_once(column: str) -> str:
    return f"(OLD.{column} IS NOT NULL AND NEW.{column} <~> OLD.{column})"


def _article(entity: str) -> str:
    return f"an {entity}" if entity[0] in "aeiou" else f"a {entity}"


def _sql_list(states: Iterable[StrEnum]) -> str:
    return f"({', '.join(repr(str(state)) for state in sorted(states))})"


def _join_states(states: Iterable[StrEnum]) -> str:
    *other_states, last_state = sorted(states)
    return f"{', '.join(other_states)} or {last_state}" if other_states else str(last_state)


# --- the SQL of the rules -------------------------------------------------------------------------


def _timing(rule: Rule) -> str:
    return "AFTER" if rule.on == "INSERT" and not rule.early else "BEFORE"


def _quote(message: str) -> str:
    return "'" + message.replace("'", "''") + "'"


def _sqlite_trigger(rule: Rule) -> Iterator[str]:
    condition = f"({rule.about}) AND ({rule.refused})" if rule.about else rule.refused
    yield (
        f"CREATE TRIGGER {PREFIX}{rule.name} {_timing(rule)} {rule.on} ON {rule.table} "
        f"WHEN {condition.replace('<~>', 'IS NOT')} "
        f"BEGIN SELECT RAISE(ABORT, {_quote(rule.message)}); END"
    )


def _postgresql_trigger(rule: Rule) -> Iterator[str]:
    """A condition on the row alone becomes the trigger's WHEN, so no function is called for allowed rows. WHEN may not read other rows, so
    a condition that does is checked in the function."""
    when_condition, condition = (
        text.replace("<~>", "IS DISTINCT FROM") for text in (rule.about, rule.refused)
    )
    raise_statement = (
        f"RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = {_quote(rule.message)}, "
        f"TABLE = '{rule.table}', CONSTRAINT = '{PREFIX}{rule.name}';"
    )
    if "SELECT" in condition:
        lock = f"{rule.lock}; " if rule.lock else ""
        row = "OLD" if rule.on == "DELETE" else "NEW"
        body = f"{lock}IF {condition} THEN {raise_statement} END IF; RETURN {row};"
    else:
        when_condition, body = condition, raise_statement
    yield (
        f"CREATE FUNCTION {PREFIX}{rule.name}() RETURNS trigger LANGUAGE plpgsql AS $rule$ BEGIN {body} END $rule$"
    )
    yield (
        f"CREATE TRIGGER {PREFIX}{rule.name} {_timing(rule)} {rule.on} ON {rule.table} FOR EACH ROW "
        f"{f'WHEN ({when_condition}) ' if when_condition else ''}EXECUTE FUNCTION {PREFIX}{rule.name}()"
    )


NEVER_EMPTIED = ("events", "jobs", "attempts", "attempt_members", "reservations", "vms", "gpus")
"""Tables with rows that must not be removed; TRUNCATE would not fire their delete triggers."""


def _no_truncation(table: str) -> Iterator[str]:
    name = f"{PREFIX}{table}_truncate"
    yield (
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $rule$ BEGIN "
        "RAISE EXCEPTION USING ERRCODE = 'check_violation', "
        f"MESSAGE = '{table}: TRUNCATE would take rows that no DELETE may; `groupwise fleet remove` clears jobs away'; END $rule$"
    )
    yield f"CREATE TRIGGER {name} BEFORE TRUNCATE ON {table} EXECUTE FUNCTION {name}()"
