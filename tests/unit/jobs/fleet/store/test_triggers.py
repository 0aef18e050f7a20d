"""What the database refuses, whoever asks. `tests/integration/fleet/test_triggers.py` asks PostgreSQL the same.

1. A new job is queued, held or failed; a new attempt is reserved.
2. From each state exactly the states of the table follow; all other pairs are tried, and refused.
3. From failed and cancelled a job is queued again only with generation + 1, and generation changes at no other time.
4. How a job or an attempt ended does not change; lease, owner and cleanup of an attempt still may.
5. One live attempt for each job, with an epoch above all earlier ones.
6. A GPU is held once as a whole, or by shares that fit; reservations are released once.
7. Events are only appended.
8. A row of a machine can be read, and named: its documents are documents.
9. No row begins with what admission writes, or is admitted without it.
10. SQLite's REPLACE gets around none of it.
11. A job that runs stays so until its attempt has ended.
12. A card is held once, also where two machines of the fleet are one; and a machine stays the place where its jobs run.
13. What an attempt needs stays as long as it may hold anything, also for who asks SQLite for no references.
14. A job that waits is cancelled, not asked to end.
"""

import sqlite3
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from groupwise.api.schemas.fleet import MAX_INTEGER
from groupwise.jobs.fleet.operations.machines import VM_ID
from groupwise.jobs.fleet.store import triggers
from groupwise.jobs.fleet.store.database import Database
from tests.unit.jobs.fleet.queue_helpers import execute

JOBS = {
    "queued": ["pending", "running", "held", "cancelled", "failed"], "pending": ["queued", "held", "cancelled"],
    "held": ["queued", "cancelled"], "running": ["completed", "failed", "cancelled", "queued"], "completed": [], "failed": ["queued"],
    "cancelled": ["queued"],
}  # fmt: skip
WAY_TO_JOB = {
    "queued": [], "pending": ["pending"], "held": ["held"], "running": ["running"],
    "completed": ["running", "completed"], "failed": ["running", "failed"],
    "cancelled": ["cancelled"],
}  # fmt: skip
ATTEMPTS = {
    "reserved": ["launching", "ended"], "launching": ["running", "ended"], "running": ["collecting", "ended"],
    "collecting": ["ended"], "ended": [],
}  # fmt: skip
ORDER = list(ATTEMPTS)


def value(database: Database, statement: str, **values: Any) -> Any:
    return database.read(lambda session: session.execute(text(statement), values).scalar_one())


def refused(database: Database, words: str, statement: str, **values: Any) -> None:
    """The refusal names the rule, and nothing has changed."""
    with pytest.raises(IntegrityError, match=words):
        execute(database, statement, **values)


NEW_JOB = (
    "INSERT INTO jobs (job_id, model, dataset, reward_function) VALUES (:id, 'm', 'org/d', 'exact')"
)
NEW_ATTEMPT = "INSERT INTO attempts (job_id, generation, number, created_at) VALUES (:id, 0, 0, 1) RETURNING epoch"


def job(database: Database, job_id: str, status: str = "queued") -> str:
    """A job that has come to this status along the table."""
    execute(database, NEW_JOB, id=job_id)
    for step in WAY_TO_JOB[status]:
        set_job(database, job_id, step)
    return job_id


def set_job(database: Database, job_id: str, status: str, more: str = "") -> None:
    execute(database, f"UPDATE jobs SET status = :s {more} WHERE job_id = :id", s=status, id=job_id)


def attempt(database: Database, job_id: str, state: str = "reserved") -> int:
    """An attempt that has come to this state along the table; its epoch."""

    epoch = database.run(lambda s: s.execute(text(NEW_ATTEMPT), {"id": job_id}).scalar_one())
    for step in ORDER[1 : ORDER.index(state) + 1]:
        set_attempt(database, epoch, step)
    return epoch


def set_attempt(database: Database, epoch: int, state: str) -> None:
    outcome = ", outcome = 'failed'" if state == "ended" else ""
    execute(
        database, f"UPDATE attempts SET state = :s {outcome} WHERE epoch = :e", s=state, e=epoch
    )


def machine(database: Database, vm_id: str = "v1", gpus: int = 1) -> list[int]:
    """A machine with GPUs of 1000 MB; their ids."""
    made = 'INSERT INTO gpus (vm_id, "index", uuid, memory_mb) VALUES (:v, :n, :u, 1000) RETURNING gpu_id'

    def insert(session: Any) -> list[int]:
        session.execute(
            text("INSERT INTO vms (vm_id, ip_address) VALUES (:v, '127.0.0.1')"), {"v": vm_id}
        )
        given = [{"v": vm_id, "n": n, "u": f"GPU-{n}"} for n in range(gpus)]
        return [session.execute(text(made), each).scalar_one() for each in given]

    return database.run(insert)


RESERVE = (
    "INSERT INTO reservations (vm_id, gpu_id, slot, share_mb, epoch, rank, reserved_at) "
    "VALUES (:v, :g, :slot, :share, :e, 0, 1)"
)


def reservation(
    epoch: int, gpu: int | None = None, slot: int | None = None, share: int | None = None
) -> dict[str, Any]:
    return {"v": "v1", "g": gpu, "slot": slot, "share": share, "e": epoch}


# --- jobs -----------------------------------------------------------------------------------------


def test_a_new_job_is_queued_held_or_failed_and_a_new_attempt_reserved(database: Database) -> None:
    statement = "INSERT INTO jobs (job_id, status) VALUES (:s, :s)"
    for status in JOBS:
        if status in ("queued", "held", "failed"):
            execute(database, statement, s=status)
        else:
            refused(database, "a new job is failed, held or queued", statement, s=status)
    new = "INSERT INTO attempts (job_id, generation, number, created_at, state) VALUES ('held', 0, 0, 1, :s)"
    for state in ORDER[1:]:
        refused(database, "a new attempt is reserved", new, s=state)


def test_every_pair_of_job_statuses(database: Database) -> None:
    for before in JOBS:
        for after in (*JOBS, "lost"):
            job_id = job(database, f"{before}-{after}", before)
            again = ", generation = 1" if before in ("failed", "cancelled") else ""
            if after == before or after in JOBS[before]:
                set_job(database, job_id, after, again if after == "queued" else "")
                expected = after
            else:
                with pytest.raises(IntegrityError, match=f"a job that is {before} "):
                    set_job(database, job_id, after)
                expected = before
            found = value(database, "SELECT status FROM jobs WHERE job_id = :j", j=job_id)
            assert found == expected


def test_a_job_is_retried_with_the_next_generation_which_changes_at_no_other_time(
    database: Database,
) -> None:
    for status in JOBS:
        job(database, status, status)
        change = "UPDATE jobs SET generation = generation + 1 WHERE job_id = :s"
        refused(database, "only when a job is retried", change, s=status)
    for status in ("failed", "cancelled"):
        for generation in (0, 2):
            with pytest.raises(IntegrityError, match="only with generation"):
                set_job(database, status, "queued", f", generation = {generation}")
        set_job(database, status, "queued", ", generation = 1")


def test_how_a_job_ended_does_not_change(database: Database) -> None:
    job(database, "j", "running")
    ended = ", failure_reason = 'a', exit_code = 1, end_time = CURRENT_TIMESTAMP"
    set_job(database, "j", "failed", ended)
    for change in ("failure_reason = 'b'", "exit_code = 2", "end_time = NULL"):
        refused(database, "does not change any more", f"UPDATE jobs SET {change}")
    execute(database, "UPDATE jobs SET log_path = 'elsewhere', failure_reason = 'a'")
    set_job(database, "j", "queued", ", generation = 1, failure_reason = NULL, exit_code = NULL")


def test_the_spec_of_an_admitted_job_cannot_be_changed(database: Database) -> None:
    job(database, "j")
    execute(database, "UPDATE jobs SET spec_hash = 'a'")
    refused(database, "stop it and submit another", "UPDATE jobs SET spec_hash = 'b'")
    for column, before, after in (
        ("spec", '{"arguments": ["a"]}', '{"arguments": ["b"]}'),
        ("resources", '{"gpus": 1}', '{"gpus": 2}'),
        ("admitted_at", 1.0, None),
    ):
        change = f"UPDATE jobs SET {column} = :value"
        execute(database, change, value=before)
        refused(database, "stop it and submit another", change, value=after)
    for column in triggers.ASKED[1:]:
        other = {"use_unsloth": True, "hyperparams": '{"a": 1}', "priority": 7}.get(column, 7)
        words = ("job_type", "model", "dataset", "reward_function", "project", "output_dir")
        changed = "other" if column in (*words, "preprocessing_pipeline") else other
        refused(database, "what was asked", f"UPDATE jobs SET {column} = :value", value=changed)
    refused(database, "the id of a job", "UPDATE jobs SET job_id = 'k'")


# --- attempts -------------------------------------------------------------------------------------


def test_every_pair_of_attempt_states(database: Database) -> None:
    for before in ATTEMPTS:
        for after in (*ATTEMPTS, "lost"):
            epoch = attempt(database, job(database, f"{before}-{after}"), before)
            if after == before or after in ATTEMPTS[before]:
                set_attempt(database, epoch, after)
                expected = after
            else:
                with pytest.raises(IntegrityError, match=f"an attempt that is {before} "):
                    set_attempt(database, epoch, after)
                expected = before
            found = value(database, "SELECT state FROM attempts WHERE epoch = :e", e=epoch)
            assert found == expected


def test_a_job_has_at_most_one_live_attempt(database: Database) -> None:
    job(database, "j")
    first = attempt(database, "j")
    with pytest.raises(IntegrityError):
        attempt(database, "j")
    set_attempt(database, first, "ended")
    assert attempt(database, "j") > first


def test_epochs_rise_and_stay(database: Database) -> None:
    job(database, "j")
    epoch = attempt(database, "j", "ended")
    again = attempt(database, "j", "ended")
    refused(
        database,
        "higher than those of all earlier",
        "INSERT INTO attempts (epoch, job_id, generation, number, created_at) VALUES (:e, 'j', 0, 0, 1)",
        e=epoch - 1,
    )
    refused(database, "do not change", "UPDATE attempts SET epoch = 99 WHERE epoch = :e", e=again)
    live = attempt(database, "j")
    refused(database, "do not change", "UPDATE attempts SET number = 9 WHERE epoch = :e", e=live)


def test_how_an_attempt_ended_does_not_change(database: Database) -> None:
    job(database, "j")
    attempt(database, "j", "running")
    for outcome in ("", ", outcome = 'fine'"):
        refused(database, "has an outcome", f"UPDATE attempts SET state = 'ended' {outcome}")
    refused(database, "cleanup is", "UPDATE attempts SET cleanup = 'dirty'")
    execute(
        database,
        "UPDATE attempts SET state = 'ended', outcome = 'failed', failure_class = 'crashed', charged = (1 = 1), ended_at = 5",
    )
    changes = (
        *("outcome = 'succeeded'", "outcome = NULL", "failure_class = 'network'"),
        *("charged = NULL", "ended_at = 7"),
    )
    words = "(does not change any more|has an outcome)"
    for change in changes:
        refused(database, words, f"UPDATE attempts SET {change}")
    later = "cleanup = 'leaking', owner = 'another', lease_until = 7, contact = 'unreachable'"
    execute(database, f"UPDATE attempts SET {later}")
    execute(database, "UPDATE attempts SET cleanup = 'clean'")


def test_an_attempt_that_may_hold_something_is_not_deleted(database: Database) -> None:
    """Nor is the number of one that was deleted given again."""
    job(database, "j")
    epoch = attempt(database, "j", "running")
    refused(database, "is not deleted", "DELETE FROM attempts")
    set_attempt(database, epoch, "ended")
    refused(database, "is not deleted", "DELETE FROM attempts")
    execute(database, "UPDATE attempts SET cleanup = 'clean'")
    execute(database, "DELETE FROM attempts")
    assert attempt(database, "j") > epoch


# --- reservations ---------------------------------------------------------------------------------


@pytest.fixture
def gpu(database: Database) -> int:
    """Of machine v1, beside which v2 stands."""
    machine(database, "v2")
    return machine(database)[0]


@pytest.fixture
def epochs(database: Database) -> list[int]:
    return [attempt(database, job(database, f"j{n}")) for n in range(3)]


def test_a_slot_and_a_whole_gpu_are_held_once(
    database: Database, gpu: int, epochs: list[int]
) -> None:
    execute(database, RESERVE, **reservation(epochs[0], gpu))
    execute(database, RESERVE, **reservation(epochs[0], slot=0))
    for taken in (reservation(epochs[1], gpu), reservation(epochs[1], slot=0)):
        with pytest.raises(IntegrityError):
            execute(database, RESERVE, **taken)
    execute(database, RESERVE, **reservation(epochs[1], slot=1))
    refused(database, "no room", RESERVE, **reservation(epochs[1], gpu, share=10))
    execute(database, "UPDATE reservations SET released_at = 2")
    execute(database, RESERVE, **reservation(epochs[1], gpu, share=10))
    refused(database, "no room", RESERVE, **reservation(epochs[2], gpu))


def test_shares_fit_into_the_memory(database: Database, gpu: int, epochs: list[int]) -> None:
    execute(database, RESERVE, **reservation(epochs[0], gpu, share=600))
    refused(database, "no room", RESERVE, **reservation(epochs[1], gpu, share=401))
    execute(database, RESERVE, **reservation(epochs[1], gpu, share=400))
    refused(database, "no room", RESERVE, **reservation(epochs[2], gpu, share=1))
    execute(database, "UPDATE reservations SET released_at = 2")
    execute(database, "UPDATE gpus SET memory_mb = NULL")
    refused(database, "no room", RESERVE, **reservation(epochs[2], gpu, share=1))
    execute(database, RESERVE, **reservation(epochs[2], gpu))


def test_a_reservation_is_of_something_of_its_machine(
    database: Database, gpu: int, epochs: list[int]
) -> None:
    words = "a GPU, of some of its memory, or of a CPU slot"
    for held in (
        reservation(epochs[0]),
        reservation(epochs[0], gpu, slot=1),
        reservation(epochs[0], slot=1, share=5),
        reservation(epochs[0], gpu, share=0),
    ):
        refused(database, words, RESERVE, **held)
    refused(database, "one of its machine", RESERVE, **{**reservation(epochs[0], gpu), "v": "v2"})


def test_a_reservation_is_released_once(database: Database, gpu: int, epochs: list[int]) -> None:
    execute(database, RESERVE, **reservation(epochs[0], gpu))
    refused(database, "nothing else of it changes", "UPDATE reservations SET share_mb = 5")
    refused(database, "released, not deleted", "DELETE FROM reservations")
    execute(database, "UPDATE reservations SET released_at = 2")
    for change in ("NULL", "3"):
        refused(database, "released once", f"UPDATE reservations SET released_at = {change}")
    execute(database, "DELETE FROM reservations")


# --- events ---------------------------------------------------------------------------------------


def test_events_are_only_appended(database: Database) -> None:
    execute(
        database, "INSERT INTO events (at, actor, kind) VALUES (1, 'user:ada', 'job.submitted')"
    )
    refused(database, "only ever appended", "UPDATE events SET actor = 'nobody'")
    refused(database, "only ever appended", "DELETE FROM events")
    if database.dialect == "postgresql":
        for table in triggers.NEVER_EMPTIED:
            refused(database, f"{table}: TRUNCATE would take", f"TRUNCATE {table} CASCADE")
    assert value(database, "SELECT actor FROM events") == "user:ada"


def test_a_machine_that_could_not_be_read_hides_no_others(database: Database) -> None:
    for column in ("labels", "facts", "jump", "engine", "probe"):
        right = "[]" if column == "probe" else "{}"
        insert = f"INSERT INTO vms (vm_id, {column}) VALUES ('{column}', :said)"
        if database.dialect == "postgresql":
            insert = insert.replace(":said", "CAST(:said AS jsonb)")
        for said in {'"text"', "5", "null", "[]", "{}"} - {right}:
            refused(database, f"{column} of a machine: a JSON", insert, said=said)
        execute(database, insert, said=right)


@pytest.mark.parametrize(("table", "column"), triggers.RANGES)
def test_a_number_that_cannot_be_heeded_is_no_value_of_a_column(
    database: Database, table: str, column: str
) -> None:
    least, most = triggers.RANGES[table, column]
    key, words = "vm_id" if table == "vms" else "name", f"{column} of {table}: a "
    insert = f"INSERT INTO {table} ({key}, {column}) VALUES (:key, :given)"
    wrong: list[object] = [0 if least else -1, -1]
    wrong += [] if most == MAX_INTEGER else [most + 1]  # PostgreSQL itself refuses a larger one
    if database.dialect == "sqlite":
        wrong += ["", "x", b"5"]
        wrong += [] if column in ("weight", "deadman") else [1.5]
    elif column in ("weight", "deadman"):
        wrong += [float("nan"), float("inf")]
    for number, given in enumerate((least, most)):
        execute(database, insert, key=f"right-{number}", given=given)
    for given in wrong:
        refused(database, words, insert, key="wrong", given=given)
        refused(database, words, f"UPDATE {table} SET {column} = :given", given=given)


NO_NAMES = [
    *("", " ", "odd name; x", "-rf", ".hidden", "_x", "a b", "a/b", "a\n", "\na", "a\x1b", "a\x7f"),
    *("é", "aé", "a:b", "a,b", "a'b", 'a"b', "a%b", "a[b", "a]b", "a^b", "a\\b"),
    *("x" * 64, "x" * 9999),
]


def test_a_machine_has_a_name_that_commands_can_say(database: Database) -> None:
    statement = "INSERT INTO vms (vm_id) VALUES (:name)"
    for name in ("a", "7", "gpu-1", "A.b_c-", "x" * 63):
        assert VM_ID.fullmatch(name)
        execute(database, statement, name=name)
        assert value(database, "SELECT count(*) FROM vms WHERE vm_id = :name", name=name) == 1
    rename = "UPDATE vms SET vm_id = :name WHERE vm_id = 'a'"
    for name in NO_NAMES:
        assert not VM_ID.fullmatch(name)
        refused(database, "letters, digits, `.`, `_` and `-` are wanted", statement, name=name)
        refused(database, "since commands name it", rename, name=name)
    execute(database, "UPDATE vms SET vm_id = 'right-too', port = 23 WHERE vm_id = 'a'")


def test_names_that_are_not_plain_text_are_refused(database: Database) -> None:
    only_sqlite(database)
    for name in (b"bytes", "a\0b", "\0"):
        statement = "INSERT INTO vms (vm_id) VALUES (:name)"
        refused(database, "since commands name it", statement, name=name)
    for given in (b"\xff\xfe", b"text"):
        statement = "INSERT INTO jobs (job_id) VALUES (:given)"
        refused(database, "job_id: text is wanted", statement, given=given)


# --- what a row may begin with, and be replaced by ------------------------------------------------


def test_a_row_does_not_begin_admitted(database: Database) -> None:
    forged: tuple[tuple[str, Any], ...] = (
        *(("admitted_at", 1.0), ("rank", 0.0), ("not_before", 1e12), ("cancel_requested_at", 1.0)),
        *(("generation", 1), ("retry_count", 7), ("gpu_index", 0), ("exit_code", 0)),
        *(("spec", '{"arguments": ["true"]}'), ("resources", '{"gpus": 0}')),
        *(("spec_hash", "abc"), ("shape", "s"), ("blocked_on", "x"), ("assigned_vm", "v")),
    )
    for column, given in forged:
        statement = f"INSERT INTO jobs (job_id, {column}) VALUES ('forged', :value)"
        refused(database, "control plane's to write", statement, value=given)
    columns = "job_id, status, generation, retry_count, not_before, spec, rank"
    execute(database, f"INSERT INTO jobs ({columns}) VALUES ('j', 'queued', 0, 0, 0, NULL, NULL)")


def only_sqlite(database: Database) -> None:
    if database.dialect != "sqlite":
        pytest.skip("PostgreSQL has columns of one type, and no REPLACE")


REPLACED = ("jobs", "attempts", "attempt_members", "reservations", "events")


@pytest.fixture
def full(database: Database) -> Database:
    """Of each table that is never rewritten, a row."""
    only_sqlite(database)
    [gpu, *_] = machine(database)
    epoch = attempt(database, job(database, "j"))
    execute(database, RESERVE, **reservation(epoch, gpu))
    execute(
        database, "INSERT INTO attempt_members (epoch, rank, vm_id) VALUES (:e, 0, 'v1')", e=epoch
    )
    execute(database, "INSERT INTO events (at, actor, kind) VALUES (1, 'me', 'test')")
    return database


def test_no_row_is_replaced_by_its_key_or_by_another_that_it_shares(full: Database) -> None:
    for table in REPLACED:
        info = text(f"PRAGMA table_info({table})")
        columns = ", ".join(full.read(lambda s, info=info: [row[1] for row in s.execute(info)]))
        statement = f"INSERT OR REPLACE INTO {table} ({columns}) SELECT {columns} FROM {table}"
        refused(full, "not replaced", statement)
        refused(full, "not replaced", statement.replace("INSERT OR REPLACE", "REPLACE"))
    live = "INSERT OR REPLACE INTO attempts (job_id, generation, number, created_at) VALUES ('j', 0, 1, 1)"
    refused(full, "job_id in attempts already", live)
    held = RESERVE.replace("INSERT", "INSERT OR REPLACE", 1)
    [gpu, epoch] = [value(full, f"SELECT {c} FROM reservations") for c in ("gpu_id", "epoch")]
    refused(full, "gpu_id in reservations already", held, **reservation(epoch, gpu))
    execute(full, "UPDATE jobs SET idempotency_key = 'k'")
    again = "INSERT OR REPLACE INTO jobs (job_id, idempotency_key) VALUES ('other', 'k')"
    refused(full, "idempotency_key in jobs already", again)


# --- one card, one place --------------------------------------------------------------------------


def test_a_card_that_two_machines_show_is_held_once(
    database: Database, gpu: int, epochs: list[int]
) -> None:
    [twin] = machine(database, "twin")  # its GPU has the same UUID
    execute(database, RESERVE, **reservation(epochs[0], gpu))
    other = reservation(epochs[1], twin) | {"v": "twin"}
    refused(database, "stands in the fleet twice", RESERVE, **other)
    execute(database, "UPDATE reservations SET released_at = 2")
    execute(database, RESERVE, **other)
    refused(database, "stands in the fleet twice", RESERVE, **reservation(epochs[2], gpu, share=1))


def test_a_machine_stays_the_place_where_something_runs(
    database: Database, gpu: int, epochs: list[int]
) -> None:
    refused(database, "`ssh` or `local`", "UPDATE vms SET transport = 'other'")
    refused(database, "`ssh` or `local`", "INSERT INTO vms (vm_id, transport) VALUES ('x', '')")
    other = {"transport": "local", "user": "other", "workdir": "other"}
    changes = [f"UPDATE vms SET \"{column}\" = '{value}'" for column, value in other.items()]
    execute(database, RESERVE, **reservation(epochs[0], gpu))
    for change in changes:
        refused(database, "drain it first", change)
    execute(database, "UPDATE vms SET ip_address = '10.0.0.9', port = 2222")
    execute(database, "UPDATE reservations SET released_at = 2")
    for change in changes:
        execute(database, change)


def test_a_job_runs_as_long_as_its_attempt(database: Database) -> None:
    for status in ("queued", "completed", "failed", "cancelled"):
        epoch = attempt(database, job(database, status, "running"), "collecting")
        change = f"UPDATE jobs SET status = '{status}' WHERE job_id = '{status}'"
        refused(database, "as long as its attempt does", change)
        set_attempt(database, epoch, "ended")
        execute(database, change)


# --- what attempts are about ----------------------------------------------------------------------


def by_hand(database: Database, statement: str) -> None:
    """As at a prompt, where SQLite keeps no references."""
    if database.dialect == "postgresql":
        execute(database, statement)
        return
    with closing(sqlite3.connect(str(database.engine.url.database))) as prompt, prompt:
        prompt.execute(statement)


INNERMOST_FIRST = ("reservations", "attempt_members", "attempts", "jobs", "gpus", "vms")
MEMBER = "INSERT INTO attempt_members (epoch, rank, vm_id) VALUES (:e, 0, 'v1')"


@pytest.fixture
def held(database: Database) -> int:
    """The epoch of an attempt that runs, and holds a GPU."""
    [gpu] = machine(database)
    epoch = attempt(database, job(database, "j", "running"), "running")
    execute(database, MEMBER, e=epoch)
    execute(database, RESERVE, **reservation(epoch, gpu))
    return epoch


def test_rows_that_an_attempt_needs_cannot_be_deleted(database: Database, held: int) -> None:
    words = r"not deleted|as long as|violates foreign key|keeps its"
    renamed = ["UPDATE vms SET vm_id = 'other'", "UPDATE gpus SET gpu_id = 99"]
    for state in ("running", "ended"):
        set_attempt(database, held, state)
        for statement in (*(f"DELETE FROM {table}" for table in INNERMOST_FIRST), *renamed):
            with pytest.raises((IntegrityError, sqlite3.IntegrityError), match=words):
                by_hand(database, statement)
        for table in INNERMOST_FIRST:
            assert value(database, f"SELECT count(*) FROM {table}") == 1
    execute(database, "UPDATE attempts SET cleanup = 'clean'")
    execute(database, "UPDATE reservations SET released_at = 2")
    for table in INNERMOST_FIRST:
        by_hand(database, f"DELETE FROM {table}")
        assert value(database, f"SELECT count(*) FROM {table}") == 0


def test_only_a_job_that_runs_is_asked_to_end(database: Database) -> None:
    for status in JOBS:
        job(database, status, status)
        change = "UPDATE jobs SET cancel_requested_at = 5 WHERE job_id = :s"
        if status in ("queued", "pending", "held"):
            refused(database, "groupwise fleet stop ends one that waits", change, s=status)
        else:
            execute(database, change, s=status)
    again = "UPDATE jobs SET status = 'queued', generation = generation + :n"
    for status in ("running", "cancelled"):
        where, more = f" WHERE job_id = '{status}'", int(status == "cancelled")
        words = "cancel_requested_at is for a job that runs"
        refused(database, words, again + where, n=more)
        execute(database, f"{again}, cancel_requested_at = NULL{where}", n=more)
