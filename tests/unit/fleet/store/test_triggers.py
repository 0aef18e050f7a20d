"""What the database refuses, whoever asks. `tests/integration/fleet/test_triggers.py` asks PostgreSQL the same.

1. A new job is queued, held or failed; a new attempt is reserved.
2. From each state exactly the states of the table follow; all other pairs are tried, and refused.
3. From failed and cancelled a job is queued again only with generation + 1, and generation changes at no other time.
4. How a job or an attempt ended does not change; lease, owner and cleanup of an attempt still may.
5. One live attempt for each job, with an epoch above all earlier ones.
6. A GPU is held once as a whole, or by shares that fit; reservations are released once.
7. Events are only appended.
8. A row of a machine can be read, and named: its documents are documents, its numbers numbers. So can one of a job once it is changed.
9. No row begins with what admission writes, or is admitted without it.
10. SQLite's REPLACE is no way around any of it.
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

from groupwise.fleet.store import triggers
from groupwise.fleet.store.database import Database
from groupwise.fleet.verbs.machines import VM_ID
from tests.unit.fleet.small_fleet import add_machine, claim_some, submit

JOBS = {
    "queued": ["pending", "running", "held", "cancelled", "failed"],
    "pending": ["queued", "held", "cancelled"],
    "held": ["queued", "cancelled"],
    "running": ["completed", "failed", "cancelled", "queued"],
    "completed": [],
    "failed": ["queued"],
    "cancelled": ["queued"],
}
WAY_TO_JOB = {
    "queued": [],
    "pending": ["pending"],
    "held": ["held"],
    "running": ["running"],
    "completed": ["running", "completed"],
    "failed": ["running", "failed"],
    "cancelled": ["cancelled"],
}
ATTEMPTS = {
    "reserved": ["launching", "ended"],
    "launching": ["running", "ended"],
    "running": ["collecting", "ended"],
    "collecting": ["ended"],
    "ended": [],
}
ORDER = list(ATTEMPTS)


def execute(database: Database, statement: str, **values: Any) -> None:
    database.run(lambda session: session.execute(text(statement), values))


def value(database: Database, statement: str, **values: Any) -> Any:
    return database.read(lambda session: session.execute(text(statement), values).scalar_one())


def refused(database: Database, words: str, statement: str, **values: Any) -> None:
    """The refusal names the rule, and nothing has changed."""
    with pytest.raises(IntegrityError, match=words):
        execute(database, statement, **values)


def job(database: Database, job_id: str, status: str = "queued") -> str:
    """A job that has come to this status along the table."""
    execute(
        database,
        "INSERT INTO jobs (job_id, model, dataset, reward_function) VALUES (:id, 'm', 'org/d', 'exact')",
        id=job_id,
    )
    for step in WAY_TO_JOB[status]:
        set_job(database, job_id, step)
    return job_id


def set_job(database: Database, job_id: str, status: str, more: str = "") -> None:
    execute(database, f"UPDATE jobs SET status = :s {more} WHERE job_id = :id", s=status, id=job_id)


def attempt(database: Database, job_id: str, state: str = "reserved") -> int:
    """An attempt that has come to this state along the table; its epoch."""

    def insert(session: Any) -> int:
        return session.execute(
            text(
                "INSERT INTO attempts (job_id, generation, number, created_at) VALUES (:id, 0, 0, 1) RETURNING epoch"
            ),
            {"id": job_id},
        ).scalar_one()

    epoch = database.run(insert)
    for step in ORDER[1 : ORDER.index(state) + 1]:
        set_attempt(database, epoch, step)
    return epoch


def set_attempt(database: Database, epoch: int, state: str) -> None:
    outcome = ", outcome = 'failed'" if state == "ended" else ""
    execute(
        database,
        f"UPDATE attempts SET state = :s {outcome} WHERE epoch = :e",
        s=state,
        e=epoch,
    )


def machine(database: Database, vm_id: str = "v1", gpus: int = 1) -> list[int]:
    """A machine with GPUs of 1000 MB; their ids."""
    execute(
        database,
        "INSERT INTO vms (vm_id, ip_address, \"user\", ssh_key_path) VALUES (:v, '127.0.0.1', 'ada', 'key')",
        v=vm_id,
    )

    def insert(session: Any) -> list[int]:
        made = text(
            'INSERT INTO gpus (vm_id, "index", uuid, memory_mb) VALUES (:v, :n, :u, 1000) RETURNING gpu_id'
        )
        return [
            session.execute(made, {"v": vm_id, "n": n, "u": f"GPU-{n}"}).scalar_one()
            for n in range(gpus)
        ]

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


@pytest.mark.parametrize("status", JOBS)
def test_a_new_job_is_queued_held_or_failed(database: Database, status: str) -> None:
    statement = "INSERT INTO jobs (job_id, status) VALUES ('j', :s)"
    if status in ("queued", "held", "failed"):
        execute(database, statement, s=status)
        assert value(database, "SELECT status FROM jobs") == status
    else:
        refused(database, "a new job is failed, held or queued", statement, s=status)
        assert value(database, "SELECT count(*) FROM jobs") == 0


@pytest.mark.parametrize("before", JOBS)
def test_every_pair_of_job_statuses(database: Database, before: str) -> None:
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
        assert value(database, "SELECT status FROM jobs WHERE job_id = :j", j=job_id) == expected


@pytest.mark.parametrize("status", ["failed", "cancelled"])
@pytest.mark.parametrize("generation", [0, 2])
def test_a_job_is_retried_with_the_next_generation(
    database: Database, status: str, generation: int
) -> None:
    job_id = job(database, "j", status)
    with pytest.raises(IntegrityError, match="only with generation"):
        set_job(database, job_id, "queued", f", generation = {generation}")
    set_job(database, job_id, "queued", ", generation = 1")


@pytest.mark.parametrize("status", JOBS)
def test_generation_changes_at_no_other_time(database: Database, status: str) -> None:
    job(database, "j", status)
    refused(database, "only when a job is retried", "UPDATE jobs SET generation = generation + 1")


@pytest.mark.parametrize("change", ["failure_reason = 'b'", "exit_code = 2", "end_time = NULL"])
def test_how_a_job_ended_does_not_change(database: Database, change: str) -> None:
    job(database, "j", "running")
    set_job(
        database,
        "j",
        "failed",
        ", failure_reason = 'a', exit_code = 1, end_time = CURRENT_TIMESTAMP",
    )
    refused(database, "does not change any more", f"UPDATE jobs SET {change}")
    execute(database, "UPDATE jobs SET log_path = 'elsewhere', failure_reason = 'a'")
    set_job(database, "j", "queued", ", generation = 1, failure_reason = NULL, exit_code = NULL")


def test_what_an_admitted_job_runs_does_not_change(database: Database) -> None:
    job(database, "j")
    execute(database, "UPDATE jobs SET spec_hash = 'a'")
    refused(database, "cancel it and submit another", "UPDATE jobs SET spec_hash = 'b'")
    for column, before, after in (
        ("spec", '{"arguments": ["a"]}', '{"arguments": ["b"]}'),
        ("resources", '{"gpus": 1}', '{"gpus": 2}'),
        ("admitted_at", 1.0, None),
    ):
        change = f"UPDATE jobs SET {column} = :value"
        execute(database, change, value=before)
        refused(database, "cancel it and submit another", change, value=after)
    for column in triggers.ASKED[1:]:
        other = {"use_unsloth": True, "hyperparams": '{"a": 1}', "priority": 7}.get(column, 7)
        words = ("job_type", "model", "dataset", "reward_function", "project", "output_dir")
        changed = "other" if column in (*words, "preprocessing_pipeline") else other
        refused(database, "what was asked", f"UPDATE jobs SET {column} = :value", value=changed)
    refused(database, "the id of a job", "UPDATE jobs SET job_id = 'k'")


# --- attempts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ATTEMPTS)
def test_every_pair_of_attempt_states(database: Database, before: str) -> None:
    for after in (*ATTEMPTS, "lost"):
        epoch = attempt(database, job(database, f"{before}-{after}"), before)
        if after == before or after in ATTEMPTS[before]:
            set_attempt(database, epoch, after)
            expected = after
        else:
            with pytest.raises(IntegrityError, match=f"an attempt that is {before} "):
                set_attempt(database, epoch, after)
            expected = before
        assert value(database, "SELECT state FROM attempts WHERE epoch = :e", e=epoch) == expected


@pytest.mark.parametrize("state", ["launching", "running", "collecting", "ended"])
def test_a_new_attempt_is_reserved(database: Database, state: str) -> None:
    job(database, "j")
    refused(
        database,
        "a new attempt is reserved",
        "INSERT INTO attempts (job_id, generation, number, created_at, state) VALUES ('j', 0, 0, 1, :s)",
        s=state,
    )


def test_one_live_attempt(database: Database) -> None:
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


def test_numbers_of_deleted_attempts_are_not_given_again(database: Database) -> None:
    job(database, "j")
    epoch = attempt(database, "j", "ended")
    execute(database, "UPDATE attempts SET cleanup = 'clean'")
    execute(database, "DELETE FROM attempts")
    assert attempt(database, "j") > epoch


@pytest.mark.parametrize(
    "change",
    [
        "outcome = 'succeeded'",
        "outcome = NULL",
        "failure_class = 'network'",
        "charged = NULL",
        "ended_at = 7",
    ],
)
def test_how_an_attempt_ended_does_not_change(database: Database, change: str) -> None:
    job(database, "j")
    epoch = attempt(database, "j", "running")
    execute(
        database,
        "UPDATE attempts SET state = 'ended', outcome = 'failed', failure_class = 'crashed', charged = (1 = 1), ended_at = 5",
    )
    refused(database, "(does not change any more|has an outcome)", f"UPDATE attempts SET {change}")
    execute(
        database,
        "UPDATE attempts SET cleanup = 'leaking', owner = 'another', lease_until = 7, contact = 'unreachable' WHERE epoch = :e",
        e=epoch,
    )
    execute(database, "UPDATE attempts SET cleanup = 'clean'")


def test_an_end_has_an_outcome(database: Database) -> None:
    job(database, "j")
    attempt(database, "j", "running")
    for outcome in ("", ", outcome = 'fine'"):
        refused(database, "has an outcome", f"UPDATE attempts SET state = 'ended' {outcome}")
    refused(database, "cleanup is", "UPDATE attempts SET cleanup = 'dirty'")


def test_an_attempt_that_may_hold_something_is_not_deleted(database: Database) -> None:
    job(database, "j")
    epoch = attempt(database, "j", "running")
    refused(database, "is not deleted", "DELETE FROM attempts")
    set_attempt(database, epoch, "ended")
    refused(database, "is not deleted", "DELETE FROM attempts")


# --- reservations ---------------------------------------------------------------------------------


@pytest.fixture
def gpu(database: Database) -> int:
    """Of machine v1, beside which v2 stands."""
    machine(database, "v2")
    return machine(database)[0]


@pytest.fixture
def epochs(database: Database) -> list[int]:
    return [attempt(database, job(database, f"j{n}")) for n in range(3)]


def test_a_whole_gpu_is_held_once(database: Database, gpu: int, epochs: list[int]) -> None:
    execute(database, RESERVE, **reservation(epochs[0], gpu))
    with pytest.raises(IntegrityError):
        execute(database, RESERVE, **reservation(epochs[1], gpu))
    refused(database, "no room", RESERVE, **reservation(epochs[1], gpu, share=10))
    execute(database, "UPDATE reservations SET released_at = 2")
    execute(database, RESERVE, **reservation(epochs[1], gpu, share=10))
    refused(database, "no room", RESERVE, **reservation(epochs[2], gpu))


def test_shares_fit_into_the_memory(database: Database, gpu: int, epochs: list[int]) -> None:
    execute(database, RESERVE, **reservation(epochs[0], gpu, share=600))
    refused(database, "no room", RESERVE, **reservation(epochs[1], gpu, share=401))
    execute(database, RESERVE, **reservation(epochs[1], gpu, share=400))
    refused(database, "no room", RESERVE, **reservation(epochs[2], gpu, share=1))


def test_a_share_of_unknown_memory_is_refused(
    database: Database, gpu: int, epochs: list[int]
) -> None:
    execute(database, "UPDATE gpus SET memory_mb = NULL")
    refused(database, "no room", RESERVE, **reservation(epochs[0], gpu, share=1))
    execute(database, RESERVE, **reservation(epochs[0], gpu))


def test_a_slot_is_held_once(database: Database, gpu: int, epochs: list[int]) -> None:
    execute(database, RESERVE, **reservation(epochs[0], slot=0))
    with pytest.raises(IntegrityError):
        execute(database, RESERVE, **reservation(epochs[1], slot=0))
    execute(database, RESERVE, **reservation(epochs[1], slot=1))


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


@pytest.mark.parametrize("column", ["labels", "facts", "jump", "engine", "probe"])
@pytest.mark.parametrize("said", ['"text"', "5", "null", "[]", "{}"])
def test_a_machine_that_could_not_be_read_hides_no_others(
    database: Database, column: str, said: str
) -> None:
    right = "[]" if column == "probe" else "{}"
    insert = f"INSERT INTO vms (vm_id, {column}) VALUES ('a', :said)"
    if database.dialect == "postgresql":
        insert = insert.replace(":said", "CAST(:said AS jsonb)")
    if said == right:
        execute(database, insert, said=said)
    else:
        refused(database, f"{column} of a machine: a JSON", insert, said=said)


def test_sqlite_keeps_no_words_where_numbers_belong(database: Database) -> None:
    if database.dialect != "sqlite":
        return  # PostgreSQL has types
    for column in ("port", "active", "deadman", "observed_round", "cpu_slots", "last_polled"):
        insert = f"INSERT INTO vms (vm_id, {column}) VALUES ('a', 'abc')"
        refused(database, f"{column} of a machine", insert)
    refused(database, "labels of a machine", "INSERT INTO vms (vm_id, labels) VALUES ('a', '{')")
    execute(database, "INSERT INTO vms (vm_id, last_polled) VALUES ('a', '2026-01-02 03:04:05')")
    refused(database, "port of a machine", "UPDATE vms SET port = 'x'")
    execute(database, "UPDATE vms SET port = '23', draining = true, labels = '{\"a\": 1}'")
    assert value(database, "SELECT port FROM vms") == 23


NO_NAMES = [
    *("", " ", "odd name; x", "-rf", ".hidden", "_x", "a b", "a/b", "a\n", "\na", "a\x1b", "a\x7f"),
    *(
        "é",
        "aé",
        "a:b",
        "a,b",
        "a'b",
        'a"b',
        "a%b",
        "a[b",
        "a]b",
        "a^b",
        "a\\b",
        "x" * 64,
        "x" * 9999,
    ),
]


@pytest.mark.parametrize("name", ["a", "7", "gpu-1", "A.b_c-", "x" * 63, *NO_NAMES])
def test_a_machine_has_a_name_that_commands_can_say(database: Database, name: str) -> None:
    statement = "INSERT INTO vms (vm_id) VALUES (:name)"
    if name not in NO_NAMES:
        assert VM_ID.fullmatch(name)
        execute(database, statement, name=name)
        assert value(database, "SELECT vm_id FROM vms") == name
        return
    assert not VM_ID.fullmatch(name)
    refused(database, "letters, digits, `.`, `_` and `-` are wanted", statement, name=name)
    execute(database, statement, name="right")
    refused(database, "since commands name it", "UPDATE vms SET vm_id = :name", name=name)
    execute(database, "UPDATE vms SET vm_id = 'right-too', port = 23")


@pytest.mark.parametrize("name", [b"bytes", "a\0b", "\0"])
def test_nor_is_a_name_cut_short_or_no_text(database: Database, name: Any) -> None:
    only_sqlite(database)
    statement = "INSERT INTO vms (vm_id) VALUES (:name)"
    refused(database, "since commands name it", statement, name=name)


# --- what a row may begin with, and be replaced by ------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("admitted_at", 1.0), ("rank", 0.0), ("not_before", 1e12), ("cancel_requested_at", 1.0)),
        *(("generation", 1), ("retry_count", 7), ("gpu_index", 0), ("exit_code", 0)),
        *(("spec", '{"arguments": ["true"]}'), ("resources", '{"gpus": 0}')),
        *(("spec_hash", "abc"), ("shape", "s"), ("blocked_on", "x"), ("assigned_vm", "v")),
    ],
)
def test_a_row_does_not_begin_admitted(database: Database, column: str, value: Any) -> None:
    statement = f"INSERT INTO jobs (job_id, {column}) VALUES ('forged', :value)"
    refused(database, "control plane's to write", statement, value=value)


def test_what_a_row_begins_with_may_be_spelt_out(database: Database) -> None:
    columns = "job_id, status, generation, retry_count, not_before, spec, rank"
    execute(database, f"INSERT INTO jobs ({columns}) VALUES ('j', 'queued', 0, 0, 0, NULL, NULL)")


def only_sqlite(database: Database) -> None:
    if database.dialect != "sqlite":
        pytest.skip("PostgreSQL has columns of one type, and no REPLACE")


@pytest.mark.parametrize("given", [b"\xff\xfe", b"text"])
def test_the_id_of_a_job_is_text(database: Database, given: bytes) -> None:
    only_sqlite(database)
    statement = "INSERT INTO jobs (job_id) VALUES (:given)"
    refused(database, "job_id: text is wanted", statement, given=given)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("priority", "high"), ("generation", "x"), ("use_unsloth", 2), ("rank", "first")),
        *(("created_at", "yesterday"), ("request", "{"), ("spec", "no json"), ("model", b"m")),
    ],
)
def test_a_job_stays_one_that_can_be_read(database: Database, column: str, value: Any) -> None:
    only_sqlite(database)
    job(database, "j")
    statement = f"UPDATE jobs SET {column} = :value WHERE job_id = 'j'"
    refused(database, f"{column}.*wanted|changes only", statement, value=value)


REPLACED = {
    "jobs": "job_id",
    "attempts": "epoch",
    "attempt_members": "epoch, rank",
    "reservations": "reservation_id",
    "events": "event_id",
}


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


@pytest.mark.parametrize("table", REPLACED)
def test_no_row_is_replaced(full: Database, table: str) -> None:
    columns = ", ".join(
        full.read(lambda s: [row[1] for row in s.execute(text(f"PRAGMA table_info({table})"))])
    )
    statement = f"INSERT OR REPLACE INTO {table} ({columns}) SELECT {columns} FROM {table}"
    refused(full, "not replaced", statement)
    refused(full, "not replaced", statement.replace("INSERT OR REPLACE", "REPLACE"))


def test_nor_by_a_key_that_is_shared(full: Database) -> None:
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


@pytest.mark.parametrize("column", ["transport", "user", "workdir"])
def test_a_machine_stays_the_place_where_something_runs(
    database: Database, gpu: int, epochs: list[int], column: str
) -> None:
    change = f"UPDATE vms SET \"{column}\" = 'other'"
    execute(database, RESERVE, **reservation(epochs[0], gpu))
    refused(database, "drain it first", change)
    execute(database, "UPDATE vms SET ip_address = '10.0.0.9', port = 2222")
    execute(database, "UPDATE reservations SET released_at = 2")
    execute(database, change)


@pytest.mark.parametrize("status", ["queued", "completed", "failed", "cancelled"])
def test_a_job_runs_as_long_as_its_attempt(database: Database, status: str) -> None:
    job_id = job(database, "j", "running")
    epoch = attempt(database, job_id, "collecting")
    change = f"UPDATE jobs SET status = '{status}' WHERE job_id = 'j'"
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


@pytest.mark.parametrize("table", INNERMOST_FIRST)
@pytest.mark.parametrize("state", ["running", "ended"])
def test_what_an_attempt_needs_is_not_deleted(
    database: Database, held: int, table: str, state: str
) -> None:
    if state == "ended":
        set_attempt(database, held, "ended")
    with pytest.raises(
        (IntegrityError, sqlite3.IntegrityError),
        match=r"not deleted|as long as|violates foreign key",
    ):
        by_hand(database, f"DELETE FROM {table}")
    assert value(database, f"SELECT count(*) FROM {table}") == 1


def test_it_goes_once_its_machine_holds_nothing_of_it(database: Database, held: int) -> None:
    set_attempt(database, held, "ended")
    execute(database, "UPDATE attempts SET cleanup = 'clean'")
    execute(database, "UPDATE reservations SET released_at = 2")
    for table in INNERMOST_FIRST:
        by_hand(database, f"DELETE FROM {table}")
        assert value(database, f"SELECT count(*) FROM {table}") == 0


@pytest.mark.parametrize("change", ["vms SET vm_id = 'other'", "gpus SET gpu_id = 99"])
def test_nor_is_it_called_otherwise(database: Database, held: int, change: str) -> None:
    with pytest.raises(
        (IntegrityError, sqlite3.IntegrityError), match=r"keeps its|violates foreign key"
    ):
        by_hand(database, f"UPDATE {change}")


@pytest.mark.parametrize("status", JOBS)
def test_only_a_job_that_runs_is_asked_to_end(database: Database, status: str) -> None:
    job(database, "j", status)
    change = "UPDATE jobs SET cancel_requested_at = 5"
    if status in ("queued", "pending", "held"):
        refused(database, "groupwise fleet cancel ends one that waits", change)
    else:
        execute(database, change)


@pytest.mark.parametrize("status", ["running", "cancelled"])
def test_nor_does_one_wait_that_was_asked_to(database: Database, status: str) -> None:
    job(database, "j", status)
    execute(database, "UPDATE jobs SET cancel_requested_at = 5")
    again = "UPDATE jobs SET status = 'queued', generation = generation + :n"
    more = int(status == "cancelled")
    refused(database, "cancel_requested_at is for a job that runs", again, n=more)
    execute(database, f"{again}, cancel_requested_at = NULL", n=more)


def test_what_begins_jobs_stays_while_something_runs_there(database: Database) -> None:
    """Who asks the one engine cannot say what became of what the other has begun; what it is said to have may change."""
    add_machine(database, "s", engine={"name": "slurm", "slots": 2})
    submit(database, "job", gpus=0)
    claim_some(database)
    cast = "CAST(:to AS jsonb)" if database.dialect == "postgresql" else ":to"
    change = f"UPDATE vms SET engine = {cast}"
    execute(database, change, to='{"name": "slurm", "slots": 4}')
    for to in ('{"name": "another"}', None):
        refused(database, "what begins jobs on a machine does not change", change, to=to)
