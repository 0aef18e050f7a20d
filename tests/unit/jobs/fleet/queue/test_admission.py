"""Admission to the queue, of requests and of rows written by hand.

1. Both end the same: queued with command, needs, shape and rank; or failed, with every reason at once.
2. The same request under one key or id gives one job.
3. A row that cannot be read stops nobody, and can be looked at afterwards.
4. Nothing that a row names is imported.
5. The queue is fair between projects, and priority is worth hours.
6. Many at once become what they would have become one after the other, in few statements.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.operations import jobs, machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import admission, fair_share, kinds
from groupwise.jobs.fleet.queue.request import JobRequest, from_document
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.tables import Job, Project
from groupwise.jobs.hosts.spec import JobSpec
from tests.unit.jobs.fleet.queue_helpers import (
    add_machine,
    claimed_ids,
    execute,
    job_of,
    kinds_of_events,
    submit,
)

COMMAND = '{"arguments": ["true"], "resources": {"gpus": 1}}'


def insert(database: Database, job_id: str, **columns: Any) -> None:
    """A row by hand: a command, unless it says otherwise."""
    values: dict[str, Any] = {
        "job_id": job_id,
        "job_type": "COMMAND",
        "request": COMMAND,
        **columns,
    }
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    execute(database, f"INSERT INTO jobs ({names}) VALUES ({marks})", **values)


def admit_new(database: Database, limit: int = 100) -> int:
    return database.run(lambda s: admission.admit_new(s, limit))


def failure(database: Database, job_id: str) -> str:
    job = job_of(database, job_id)
    assert job.status == "failed"
    assert job.end_time is not None
    assert job.admitted_at is None  # so that it is looked at again when somebody retries it
    return job.failure_reason or ""


# --- one end for both ways ------------------------------------------------------------------------


def test_a_row_by_hand_becomes_what_a_request_becomes(database: Database) -> None:
    submit(database, "asked", gpus=1)
    insert(database, "by-hand")
    assert admit_new(database) == 1
    asked, by_hand = job_of(database, "asked"), job_of(database, "by-hand")
    for name in ("status", "spec", "spec_hash", "resources", "shape", "output_dir", "priority"):
        assert getattr(asked, name) == getattr(by_hand, name), name
    assert asked.spec is not None
    assert asked.spec["arguments"] == ["true"]
    assert asked.rank is not None
    assert asked.waiting_since == asked.admitted_at is not None
    assert kinds_of_events(database, "asked") == ["job.submitted", "job.queued"]
    assert kinds_of_events(database, "by-hand") == ["job.queued"]
    assert admit_new(database) == 0


class Training:
    def expand(self, row: kinds.Row) -> JobSpec:
        return JobSpec(("groupwise", row["model"], str(row["max_steps"]), row["output_dir"]))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO, without what trains."""
    monkeypatch.setattr(kinds, "_entry_points", lambda: {"GRPO": "somewhere"})
    monkeypatch.setattr(kinds, "_load_entry_point", lambda place: Training())


@pytest.mark.usefixtures("training")
def test_four_columns_are_a_full_submission(database: Database) -> None:
    """What runs groupwise waits for a machine that has it."""
    add_machine(database, "vm-1", 1)
    execute(
        database,
        "INSERT INTO jobs (job_id, model, dataset, reward_function) VALUES ('j', 'm', 'd', 'r')",
    )
    admit_new(database)
    job = job_of(database, "j")
    assert (job.status, job.failure_reason) == ("queued", None)
    assert job.resources == {"gpus": 1, "prepared": True}
    assert job.spec is not None
    assert job.spec["arguments"] == ["groupwise", "m", "500", "outputs"]
    assert claimed_ids(database) == []
    assert "fleet vm prepare vm-1" in str(job_of(database, "j").blocked_reasons)
    python = "/opt/train/bin/python"
    database.run(lambda s: machines.change(s, Actor("user:ada"), "vm-1", python=python))
    assert claimed_ids(database) == ["j"]


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(("kind", "needs", "gpus"), [
    ("COMMAND", {}, 0), ("COMMAND", {"vm": "gpu-1"}, 0), ("COMMAND", {"gpu_model": "A100"}, 1),
    ("GRPO", {}, 1), ("GRPO", {"vm": "cpu-1"}, 0), ("GRPO", {"vm": "gpu-1"}, 1), ("GRPO", {"vm": "later"}, 1),
    ("GRPO", {"labels": {"disk": "fast"}}, 0), ("GRPO", {"vm": "slurm"}, 1), ("GRPO", {"gpus": 0}, 0),
])  # fmt: skip
def test_gpus_of_a_job_that_gives_no_number(
    database: Database, kind: str, needs: dict[str, Any], gpus: int
) -> None:
    """A command gets none, a kind of job one if a machine that it may run on has one."""
    add_machine(database, "gpu-1", 1)
    add_machine(database, "cpu-1", labels={"disk": "fast"})
    add_machine(database, "slurm", engine={"name": "slurm", "slots": 2, "gpus": 4})
    work = {"arguments": ["true"]} if kind == "COMMAND" else TRAINING
    job = submit_with(database, from_document({"job_type": kind, "resources": needs, **work}))
    assert (job.resources or {}).get("gpus") == gpus, job.failure_reason


TRAINING = {"model": "tiny", "dataset": "org/d", "reward_function": "correctness"}
"""A row of a training kind, but for the kind."""


def test_a_secret_that_the_operator_has_not_named_is_refused(database: Database) -> None:
    """Of both entrances; whoever reads secrets for a launch looks at it once more."""
    secrets = {"TOKEN": "env:PGPASSWORD"}
    insert(database, "j", request=json.dumps({"arguments": ["true"], "secrets": secrets}))
    admit_new(database)
    assert "TOKEN" in failure(database, "j")
    made = submit_with(database, from_document({"arguments": ["true"], "secrets": secrets}))
    assert made.status == "failed"


def test_columns_of_training_are_refused_for_a_command(database: Database) -> None:
    given: dict[str, Any] = {
        "model": "m",
        "dataset": "d",
        "reward_function": "r",
        "preprocessing_pipeline": "x",
        "hyperparams": '{"a": 1}',
        "use_unsloth": True,
        "max_steps": 7,
        "learning_rate": 0.0,
        "batch_size": 2,
        "num_generations": 1,
    }
    assert given.keys() == kinds.OF_TRAINING.keys()
    insert(database, "all", **given)
    for column, value in given.items():
        insert(database, column, **{column: value})
    admit_new(database)
    for column in given:
        assert f"leave {column} out" in failure(database, column)
        assert f"leave {column} out" in failure(database, "all")


def test_ids_that_could_not_name_a_folder(database: Database) -> None:
    for job_id in ("../x", "-x", "a b", "x" * 81, "a/b", "Ω"):
        insert(database, job_id)
        admit_new(database)
        assert "names folders" in failure(database, job_id)
        with pytest.raises(UsageError, match="names folders"):
            submit(database, job_id)


def test_dependencies_are_jobs_of_the_same_project(database: Database) -> None:
    submit(database, "theirs", project="other", gpus=1)
    submit(database, "ours", gpus=1)
    submit(database, "then", gpus=1, after=["ours:ok"])
    request = from_document({"arguments": ["true"], "resources": {"gpus": 1}, "after": ["theirs"]})
    job = database.run(lambda s: admission.submit(s, request, actor="user:x", project="default"))
    assert "has no job theirs" in (job.failure_reason or "")


def test_modules_that_a_row_names_are_not_imported(
    database: Database, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_reward.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for n, kind in enumerate(("GRPO", "evil_reward", "evil_reward.py", "evil_reward:f")):
        insert(
            database,
            f"j{n}",
            job_type=kind,
            request='{"resources": {"gpus": 1}}',
            model="org/m",
            dataset="org/d",
            reward_function="evil_reward:f",
            preprocessing_pipeline="evil_reward:f",
        )
    plain = {**TRAINING, "reward_function": "evil_reward"}
    insert(database, "plain", job_type="GRPO", request="{}", **plain)
    assert admit_new(database) == 5
    assert failure(database, "plain").startswith("reward_function: There is no reward `evil_rew")
    assert "evil_reward" not in sys.modules
    assert not (tmp_path / "ran").exists()


# --- the same twice -------------------------------------------------------------------------------


def submit_with(database: Database, request: JobRequest, **given: Any) -> Job:
    return database.run(
        lambda s: admission.submit(s, request, actor="user:x", **{"project": "default", **given})
    )


REQUEST = from_document({"arguments": ["true"], "resources": {"gpus": 1}})
OTHER = from_document({"arguments": ["false"], "resources": {"gpus": 1}})


@pytest.mark.parametrize("given", [{"idempotency_key": "k"}, {"job_id": "mine"}])
def test_one_key_one_job(database: Database, given: dict[str, str]) -> None:
    first = submit_with(database, REQUEST, **given)
    again = submit_with(database, REQUEST, **given)
    assert first.job_id == again.job_id
    assert database.run(lambda s: len(s.scalars(select(Job)).all())) == 1
    with pytest.raises((UsageError, Refusal)):
        submit_with(database, OTHER, **given)


def test_a_key_is_one_of_its_project(database: Database) -> None:
    first = submit_with(database, REQUEST, idempotency_key="k")
    other = submit_with(database, OTHER, idempotency_key="k", project="q")
    assert first.job_id != other.job_id


def test_an_admitted_job_is_not_admitted_again(database: Database) -> None:
    insert(database, "j")
    assert admit_new(database) == 1
    before = job_of(database, "j")
    with pytest.raises(IntegrityError, match="does not change"):
        execute(database, "UPDATE jobs SET request = :other", other=OTHER.model_dump_json())
    assert admit_new(database) == 0
    after = job_of(database, "j")
    assert (after.spec, after.spec_hash, after.rank) == (before.spec, before.spec_hash, before.rank)
    assert kinds_of_events(database, "j") == ["job.queued"]


# --- many at once ---------------------------------------------------------------------------------

VARIED = [
    {"arguments": ["true"], "resources": {"gpus": 1}, "name": "plain"},
    {"arguments": ["true"], "resources": {"gpus": 1}, "hold": True},
    {"arguments": ["true", "it"], "resources": {"gpus": 2, "machines": 2}, "priority": 3},
    {"arguments": ["true"], "name": "nobody knows how many GPUs"},
    {"arguments": ["true"], "resources": {"gpus": 0}, "output_dir": "out", "labels": {"a": "b"}},
    {"arguments": ["true"], "resources": {"gpus": 1}, "after": ["there:ok"]},
    {"job_type": "DANCE", "resources": {"gpus": 1}},
    {"arguments": ["true"], "resources": {"gpus": 1}, "environment": {"A": "1"}},
]


def array_of(
    database: Database, requests: Sequence[JobRequest], key: str | None = None, project: str = "p"
) -> list[Job]:
    """As a user's program submits them, with a key for all of them."""
    return database.run(
        lambda s: list(
            admission.submit_array(
                s, requests, actor="user:x", project=project, idempotency_key=key
            )
        )
    )


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PORTION", 3)


def stored_rows(database: Database, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """All that the database says of them but who and when they are."""
    whenever = {"job_id", "idempotency_key", "request_hash", "created_at", "end_time", "rank"}
    found: list[dict[str, Any]] = []
    for job in jobs:
        row = {c.name: getattr(job, c.name) for c in Job.__table__.columns}
        for name in ("admitted_at", "waiting_since", "due"):
            row[name] = row[name] is not None
        row["events"] = kinds_of_events(database, job.job_id)
        found.append({name: value for name, value in row.items() if name not in whenever})
    return found


@pytest.mark.usefixtures("small_portions")
def test_an_array_creates_the_same_jobs_as_single_submissions(database: Database) -> None:
    requests = [from_document(each) for each in VARIED]
    submit(database, "there", project="p", gpus=1)
    kept = f"UPDATE jobs SET status = 'cancelled' WHERE status IN {('queued', 'held')} AND job_id <> 'there'"
    submit_each: list[Callable[[], list[Job]]] = [
        lambda: array_of(database, requests),
        lambda: [submit_with(database, each, project="p") for each in requests],
    ]
    found: list[list[dict[str, Any]]] = []
    places: list[list[float]] = []
    for submit_them in submit_each:
        together = submit_them()
        found.append(stored_rows(database, together))
        ranks_now = ranks(database)
        known = [ranks_now[job.job_id] for job in together if ranks_now[job.job_id]]
        places.append([rank - known[0] for rank in known])
        execute(database, kept)
    assert found[0] == found[1]
    assert places[0] == pytest.approx(places[1], abs=5)
    together = array_of(database, requests)
    assert [job.status for job in together].count("failed") == 1
    assert together[0].name == "plain"


@pytest.mark.usefixtures("small_portions")
def test_one_key_one_array(database: Database) -> None:
    first = [job.job_id for job in array_of(database, [REQUEST] * 4, "k")]
    again = [job.job_id for job in array_of(database, [REQUEST] * 4, "k")]
    assert first == again
    for other in ([REQUEST] * 5, [REQUEST] * 3, [REQUEST, OTHER], [REQUEST] * 3 + [OTHER]):
        with pytest.raises(Refusal) as refused:
            array_of(database, other, "k")
        assert refused.value.code == "idempotency_key_reused"
    assert len(database.run(lambda s: s.scalars(select(Job)).all())) == 4


# --- rows that cannot be read ---------------------------------------------------------------------

BEYOND = ("[" * 5000 + "]" * 5000, "9" * 5000)
"""What no parser descends into, and a number that Python does not read."""
UNREADABLE = [
    (column, text)
    for column in ("request", "hyperparams")
    for text in ("[]", "3", '"text"', "true", *(f'{{"a": {each}}}' for each in BEYOND))
]
ON_SQLITE = [
    *(("request", "also not"), ("request", '{"a": NaN}'), ("hyperparams", '{"a": -Infinity}')),
    *(("hyperparams", "{not json"), ("created_at", "yesterday"), ("use_unsloth", "perhaps")),
    *(("max_steps", "many"), ("learning_rate", "fast")),
]
"""What PostgreSQL itself refuses."""


def test_unreadable_job_rows_do_not_block_or_hide_others(database: Database) -> None:
    """Nor does it hide others before somebody is there to admit it."""
    ada = Actor("user:ada")
    rows = [*UNREADABLE, *(ON_SQLITE if database.dialect == "sqlite" else ())]
    for n, (column, said) in enumerate(rows):
        insert(database, f"bad-{n}", status="held" if n % 2 else "queued", **{column: said})
    insert(database, "good")
    names = {"good", *(f"bad-{n}" for n in range(len(rows)))}
    listed = database.read(lambda s: jobs.listing(s, ada, jobs.filter_of()))
    assert {each["job_id"] for each in listed} == names
    assert database.read(lambda s: jobs.show(s, ada, "bad-0"))["job_id"] == "bad-0"
    assert admit_new(database) == len(names)
    for n, (column, _) in enumerate(rows):
        assert failure(database, f"bad-{n}").startswith(column)
    assert job_of(database, "good").status == "queued"


def test_rows_that_cannot_be_refused_do_not_block_other_rows(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a trigger that somebody has made for a purpose of their own; each is told of once, whatever the number of sweeps."""
    refuse = admission._refuse_row

    def refused(session: Session, row: Any, found: Sequence[str]) -> None:
        refuse(session, row, found)
        if row.job_id.startswith("stuck"):
            raise IntegrityError("UPDATE jobs", None, Exception("not in my table"))

    monkeypatch.setattr(admission, "_refuse_row", refused)
    for name in [*(f"stuck-{n}" for n in range(5)), "bad", "good-1", "good-2"]:
        kind = "COMMAND" if name.startswith("good") else "no such kind"
        insert(database, name, job_type=kind)
    assert admit_new(database, 3) == 3
    assert "no such kind" in failure(database, "bad")
    assert [job_of(database, name).status for name in ("good-1", "good-2")] == ["queued"] * 2
    assert job_of(database, "good-2").admitted_at is not None
    assert job_of(database, "stuck-0").status == "queued"
    assert kinds_of_events(database, "stuck-0") == []
    assert admit_new(database, 3) == 0
    said = [record.getMessage() for record in caplog.records]
    for number in range(5):
        assert said.count(f"job 'stuck-{number}' cannot be admitted") == 1
    assert said.count("nor can it be refused, and it stays as it is") == 5


# --- the queue ------------------------------------------------------------------------------------


def ranks(database: Database) -> dict[str, float]:
    return database.run(lambda s: {j.job_id: j.rank or 0.0 for j in s.scalars(select(Job))})


def in_order(database: Database) -> list[str]:
    found = ranks(database)
    return sorted(found, key=lambda job_id: (found[job_id], job_id))


def created(database: Database, hours: float) -> str:
    """A time as people write it into a row: so many hours ago."""
    then = datetime.fromtimestamp(database.run(database_time) - 3600 * hours, UTC)
    text_of = "%Y-%m-%d %H:%M:%S.%f"
    return then.strftime(text_of if database.dialect == "sqlite" else f"{text_of}+00:00")


@pytest.mark.parametrize("together", [True, False])
def test_the_order_within_a_project_is_by_time_less_priority(
    database: Database, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order, and by how many at once, they are admitted; and each has its own turn."""
    draw = random.Random(7)
    monkeypatch.setattr(fair_share, "TURN_SECONDS", 900.0)
    due: dict[str, float] = {}
    began = database.run(database_time)
    for n in range(60):
        hours, priority = draw.randrange(5) + n / 1000, draw.randrange(-2, 3)
        insert(database, f"j{n:02}", created_at=created(database, hours), priority=priority)
        due[f"j{n:02}"] = -hours - priority
        if not together:
            assert admit_new(database) == 1
    while admit_new(database, 7):
        pass
    found = ranks(database)
    ordered = in_order(database)
    assert ordered == sorted(due, key=lambda job_id: due[job_id])
    apart = [found[b] - found[a] for a, b in pairwise(ordered)]
    assert min(apart) > 900 - 1e-3
    assert all(found[name] - began > due[name] * 3600 - 1e-3 for name in ordered)


def test_priority_within_a_project_takes_no_turns_from_others(database: Database) -> None:
    """Of many urgent jobs no more go before another project's than an hour is worth."""
    worth = int(fair_share.PRIORITY_SECONDS / fair_share.TURN_SECONDS)
    for n in range(30):
        submit(database, f"plain-{n}", project="many", gpus=1)
    urgent = from_document(
        {"arguments": ["true"], "resources": {"gpus": 1, "machines": 6}, "priority": 1}
    )
    array_of(database, [urgent] * 30, project="many")
    submit(database, "one", project="few", gpus=1)
    ordered = in_order(database)
    assert ordered.index("one") == pytest.approx(worth / 6, abs=1)
    assert ordered.index("plain-0") == 31  # and its own come after all of the urgent ones
    found = ranks(database)
    turn = fair_share.TURN_SECONDS
    assert found["plain-1"] - found["plain-0"] == pytest.approx(turn)
    reach = found["plain-29"] - found["plain-0"]
    assert 0 <= found["plain-0"] - found[ordered[30]] - 6 * turn <= fair_share.MARGIN * reach + 1e-3


def test_weight_and_size_count(database: Database) -> None:
    database.run(lambda s: s.add_all([Project(name="heavy", weight=2.0), Project(name="light")]))
    for n in range(4):
        submit(database, f"light-{n}", project="light", gpus=1)
        submit(database, f"heavy-{n}", project="heavy", gpus=1)
        submit(database, f"wide-{n}", project="wide", gpus=2, machines=2)
    found = ranks(database)
    turn = found["light-1"] - found["light-0"]
    assert found["heavy-1"] - found["heavy-0"] == pytest.approx(turn / 2)
    assert found["wide-1"] - found["wide-0"] == pytest.approx(turn * 4)


@pytest.mark.usefixtures("small_portions")
def test_a_project_may_have_so_many_waiting(database: Database) -> None:
    database.run(lambda s: s.add_all([Project(name=name, max_waiting=2) for name in ("p", "r")]))
    for n in range(2):
        submit(database, f"j{n}", project="p", gpus=1)
    for name, project in (("third", "p"), ("fourth", "p"), ("other", "q")):
        insert(database, name, project=project)
    assert admit_new(database) == 3
    assert "2 jobs waiting" in failure(database, "third")
    assert failure(database, "fourth")
    assert job_of(database, "other").status == "queued"
    submit(database, project="r", gpus=1)
    made = array_of(database, [REQUEST] * 3, project="r")
    assert [job.status for job in made] == ["queued", "failed", "failed"]
