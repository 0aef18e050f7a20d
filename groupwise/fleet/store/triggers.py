"""Rules that the database itself enforces: which state may follow which, what never changes again, what may not overlap.

`states.py` is the table; here each line of it becomes a trigger, in the words of either database, so that no program of any version and
no person at a prompt can break it. A refusal is an integrity error whose message names the rule. `schema.py` drops and makes them anew at
each migration, so they always agree with the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from groupwise.fleet import states

Word = TypeVar("Word", bound=StrEnum)

PREFIX = "fleet_"
"""Of the names of triggers and of their functions; what is called otherwise belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a row may not be or become."""

    name: str
    table: str
    on: str
    """INSERT, UPDATE or DELETE."""
    refused: str
    """Condition on NEW and OLD, in SQL that both databases read; `<~>` is "differs from", NULL being a value like others."""
    message: str
    lock: str = ""
    """A statement for PostgreSQL, so that rows which others write at the same time are seen; SQLite has one writer."""


def rules() -> tuple[Rule, ...]:
    """Those that are the same in both databases, in the order in which they are asked: PostgreSQL goes by name."""
    return (*_of_jobs(), *_of_attempts(), *_of_reservations(), *_of_events())


def statements(dialect: str) -> Iterator[str]:
    """What makes them all."""
    for rule in (*rules(), *_of_machines(dialect)):
        yield from _sqlite(rule) if dialect == "sqlite" else _postgresql(rule)
    if dialect == "postgresql":
        yield from _no_truncation("events")


# --- the rules ------------------------------------------------------------------------------------


def _of_jobs() -> Iterator[Rule]:
    retried = (
        f"OLD.status IN {_list(states.RETRIED_FROM)} AND NEW.status = '{states.JobStatus.QUEUED}'"
    )
    yield Rule(
        "job_begins",
        "jobs",
        "INSERT",
        f"NEW.status NOT IN {_list(states.JOB_BEGINS)}",
        f"a new job is {_words(states.JOB_BEGINS)}; status is written by the control plane",
    )
    yield from _moves("job", "jobs", "status", states.JOB_MOVES)
    yield Rule(
        "job_retried",
        "jobs",
        "UPDATE",
        f"{retried} AND NEW.generation <> OLD.generation + 1",
        f"a job that is {_words(states.RETRIED_FROM)} is queued again only with generation + 1: groupwise fleet retry",
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
        f"OLD.status IN {_list(states.FINAL)} AND NEW.status = OLD.status AND "
        f"({' OR '.join(_set_once(column) for column in ('failure_reason', 'exit_code', 'end_time'))})",
        "how a job ended does not change any more",
    )
    yield Rule(
        "job_frozen",
        "jobs",
        "UPDATE",
        f"{_set_once('spec_hash')} AND NEW.generation = OLD.generation",
        "what an admitted job runs does not change: cancel it and submit another",
    )
    yield Rule(
        "job_named", "jobs", "UPDATE", "NEW.job_id <> OLD.job_id", "the id of a job does not change"
    )


def _of_attempts() -> Iterator[Rule]:
    ended = states.AttemptState.ENDED
    kept = ("epoch", "job_id", "generation", "number")
    final = ("outcome", "failure_class", "charged", "ended_at")
    yield Rule(
        "attempt_begins",
        "attempts",
        "INSERT",
        f"NEW.state NOT IN {_list(states.ATTEMPT_BEGINS)}",
        f"a new attempt is {_words(states.ATTEMPT_BEGINS)}",
    )
    yield Rule(
        "attempt_epoch",
        "attempts",
        "INSERT",
        "EXISTS (SELECT 1 FROM attempts AS other WHERE other.job_id = NEW.job_id AND other.epoch > NEW.epoch)",
        "the epoch of an attempt is higher than those of all earlier attempts of its job; leave it to the database",
    )
    yield from _moves("attempt", "attempts", "state", states.ATTEMPT_MOVES)
    yield Rule(
        "attempt_kept",
        "attempts",
        "UPDATE",
        " OR ".join(f"NEW.{column} <~> OLD.{column}" for column in kept),
        f"{', '.join(kept)} of an attempt do not change",
    )
    yield Rule(
        "attempt_outcome",
        "attempts",
        "UPDATE",
        f"NEW.state = '{ended}' AND COALESCE(NEW.outcome, '') NOT IN {_list(states.Outcome)}",
        f"an attempt that has ended has an outcome: {_words(states.Outcome)}",
    )
    yield Rule(
        "attempt_final",
        "attempts",
        "UPDATE",
        f"OLD.state = '{ended}' AND ({' OR '.join(f'NEW.{column} <~> OLD.{column}' for column in final)})",
        "how an attempt ended does not change any more",
    )
    yield Rule(
        "attempt_cleanup",
        "attempts",
        "UPDATE",
        f"NEW.cleanup NOT IN {_list(states.Cleanup)}",
        f"cleanup is {_words(states.Cleanup)}",
    )
    yield Rule(
        "attempt_over",
        "attempts",
        "DELETE",
        f"OLD.state <> '{ended}' OR OLD.cleanup <> '{states.Cleanup.CLEAN}'",
        "an attempt that has not ended, or may hold a GPU, is not deleted",
    )


def _of_reservations() -> Iterator[Rule]:
    kept = ("vm_id", "gpu_id", "slot", "share_mb", "epoch", "rank", "reserved_at")
    # vm_id stands in these for the index of open reservations, which begins with it.
    beside = (
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
        "NEW.gpu_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM gpus WHERE gpus.gpu_id = NEW.gpu_id AND gpus.vm_id = NEW.vm_id)",
        "the GPU of a reservation is one of its machine",
    )
    yield Rule(
        "reservation_room",
        "reservations",
        "INSERT",
        f"NEW.gpu_id IS NOT NULL AND NEW.released_at IS NULL AND (((SELECT count(*) {beside}) > 1 AND "
        f"EXISTS (SELECT 1 {beside} AND share_mb IS NULL)) OR (SELECT sum(share_mb) {beside}) > "
        "COALESCE((SELECT memory_mb FROM gpus WHERE gpus.gpu_id = NEW.gpu_id), 0))",
        "the GPU has no room for this reservation: shares never exceed its memory, and a whole one stands alone",
        lock="PERFORM 1 FROM gpus WHERE gpu_id = NEW.gpu_id FOR NO KEY UPDATE",
    )
    yield Rule(
        "reservation_kept",
        "reservations",
        "UPDATE",
        f"{_set_once('released_at')} OR {' OR '.join(f'NEW.{column} <~> OLD.{column}' for column in kept)}",
        "a reservation is released once, and nothing else of it changes",
    )
    yield Rule(
        "reservation_over",
        "reservations",
        "DELETE",
        "OLD.released_at IS NULL",
        "an open reservation is released, not deleted",
    )


def _of_events() -> Iterator[Rule]:
    for on in ("UPDATE", "DELETE"):
        yield Rule(f"event_{on.lower()}", "events", on, "1 = 1", "events are only ever appended")


MACHINE_DOCUMENTS = {"labels": "object", "facts": "object", "jump": "object", "probe": "array"}


def _of_machines(dialect: str) -> Iterator[Rule]:
    """Rows of machines are written by hand and read all at once, so that one which cannot be read would hide all others."""
    wrong = {name: _no_json(dialect, name, kind) for name, kind in MACHINE_DOCUMENTS.items()}
    if dialect == "sqlite":  # which keeps anything in any column
        wrong |= {name: f"typeof(NEW.{name}) NOT IN {kinds}" for name, kinds in _NUMBERS.items()}
        wrong["last_polled"] = "NEW.last_polled IS NOT NULL AND julianday(NEW.last_polled) IS NULL"
    for on in ("INSERT", "UPDATE"):
        for column, refused in wrong.items():
            kind = MACHINE_DOCUMENTS.get(column)
            wanted = f"a JSON {kind} is wanted" if kind else "this is no value for it"
            message = f"{column} of a machine: {wanted}"
            yield Rule(f"vm_{column}_{on.lower()}", "vms", on, refused, message)


_WHOLE, _ANY = "('integer')", "('integer', 'real', 'null')"
_NUMBERS = {
    **dict.fromkeys(("port", "idle_memory_mb", "misses", "launch_failures"), _WHOLE),
    **dict.fromkeys(("active", "draining", "degraded"), _WHOLE),
    **dict.fromkeys(("deadman", "lost_at", "unreachable_since", "observed_round"), _ANY),
    "cpu_slots": "('integer', 'null')",
}


def _no_json(dialect: str, column: str, kind: str) -> str:
    if dialect == "sqlite":
        is_one = f"CASE WHEN json_valid(NEW.{column}) THEN json_type(NEW.{column}) ELSE 'none' END"
    else:
        is_one = f"jsonb_typeof(NEW.{column})"
    return f"NEW.{column} IS NOT NULL AND {is_one} <> '{kind}'"


def _moves(
    thing: str, table: str, column: str, moves: Mapping[Word, frozenset[Word]]
) -> Iterator[Rule]:
    for state, following in moves.items():
        may = f"may become {_words(following)}" if following else "stays so"
        yield Rule(
            f"{thing}_{state}",
            table,
            "UPDATE",
            f"OLD.{column} = '{state}' AND NEW.{column} NOT IN {_list({state, *following})}",
            f"{_article(thing)} that is {state} {may}",
        )


def _set_once(column: str) -> str:
    return f"(OLD.{column} IS NOT NULL AND NEW.{column} <~> OLD.{column})"


def _article(thing: str) -> str:
    return f"an {thing}" if thing[0] in "aeiou" else f"a {thing}"


def _list(words: Iterable[StrEnum]) -> str:
    return f"({', '.join(repr(str(word)) for word in sorted(words))})"


def _words(words: Iterable[StrEnum]) -> str:
    *others, last = sorted(words)
    return f"{', '.join(others)} or {last}" if others else str(last)


# --- their SQL ------------------------------------------------------------------------------------


def _when(rule: Rule) -> str:
    """Inserted rows are looked at when they stand there: only then SQLite has given them their number."""
    return "AFTER" if rule.on == "INSERT" else "BEFORE"


def _quoted(message: str) -> str:
    return "'" + message.replace("'", "''") + "'"


def _sqlite(rule: Rule) -> Iterator[str]:
    yield (
        f"CREATE TRIGGER {PREFIX}{rule.name} {_when(rule)} {rule.on} ON {rule.table} "
        f"WHEN {rule.refused.replace('<~>', 'IS NOT')} "
        f"BEGIN SELECT RAISE(ABORT, {_quoted(rule.message)}); END"
    )


def _postgresql(rule: Rule) -> Iterator[str]:
    """A function for each, since the condition of a trigger itself may not look at other rows."""
    row = "OLD" if rule.on == "DELETE" else "NEW"
    lock = f"{rule.lock}; " if rule.lock else ""
    yield (
        f"CREATE FUNCTION {PREFIX}{rule.name}() RETURNS trigger LANGUAGE plpgsql AS $rule$ BEGIN {lock}"
        f"IF {rule.refused.replace('<~>', 'IS DISTINCT FROM')} THEN "
        f"RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = {_quoted(rule.message)}, "
        f"TABLE = '{rule.table}', CONSTRAINT = '{PREFIX}{rule.name}'; END IF; RETURN {row}; END $rule$"
    )
    yield (
        f"CREATE TRIGGER {PREFIX}{rule.name} {_when(rule)} {rule.on} ON {rule.table} "
        f"FOR EACH ROW EXECUTE FUNCTION {PREFIX}{rule.name}()"
    )


def _no_truncation(table: str) -> Iterator[str]:
    name = f"{PREFIX}{table}_truncate"
    yield (
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $rule$ BEGIN "
        f"RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = '{table} are only ever appended'; END $rule$"
    )
    yield f"CREATE TRIGGER {name} BEFORE TRUNCATE ON {table} EXECUTE FUNCTION {name}()"
