"""The way into the queue: whoever makes a row, and however, it is read, checked and expanded once, here.

`submit` makes the row of a `JobRequest`, `submit_array` those of many with few statements; people also insert rows by hand, and a
dispatcher sweeps those up with `admit_new`. Whichever it was, admission reads the row as it stands in the database, since SQLite keeps
whatever was written into a column. What is wrong is collected and
becomes the `failure_reason` of a failed job: no row is ever lost without a word, and none that cannot be read stays where it would
stop others. What is right is frozen: the command with all its parts and its hash, what it needs, and its place in the queue.

The place (`rank`) is a time: when the job was made, less an hour for each step of priority, or later, when those of its project that
stand before it have had their turns (`fair_share.py`). So a project that submits thousands does not keep others from theirs, and nobody
waits for ever, because ranks of later jobs are later.

Nothing that a row names is imported: of kinds only the names count (`kinds.py`).
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ColumnElement,
    Dialect,
    Engine,
    Table,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.queue import kinds
from groupwise.jobs.fleet.queue.elastic import elastic_of
from groupwise.jobs.fleet.queue.fair_share import (
    PRIORITY_SECONDS,
    WAITING,
    ProjectQueue,
    QueuePosition,
)
from groupwise.jobs.fleet.queue.request import (
    COMMAND,
    Beyond,
    Columns,
    InvalidRequest,
    JobRequest,
    beyond_from_document,
    columns_from_row,
    dependency,
    problems,
)
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.secrets import UNLESS_TOLD, AllowedSecrets
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import events, rights
from groupwise.jobs.fleet.store.database import seconds
from groupwise.jobs.fleet.store.engine import strict_json
from groupwise.jobs.fleet.store.tables import GPU, VM, Job, Moment, Project, this_moment
from groupwise.jobs.fleet.text_validation import text_problems
from groupwise.jobs.hosts.spec import JOB_ID, JobSpec, as_json, path_problems, spec_hash

MOST_WORDS = 4000
"""Of a reason that is stored."""
PORTION = 500
"""Jobs of an array that are written and admitted together: more of them would save nothing, and make long statements."""
PASSES = 5
"""In one look for new rows, over those with which nothing can be done."""
ADMISSION = "admission"
OWN_PROGRAMS = "groupwise"
"""How they begin. A kind of job that runs one needs a machine that has it; whoever names a command knows by himself where that is."""
_KEPT = frozenset({"job_id", "status", "project", "generation", "idempotency_key", "request_hash"})
"""Columns of a row that no reading of it has to do without."""

log = logging.getLogger(__name__)

_TOLD: WeakKeyDictionary[Engine, set[str]] = WeakKeyDictionary()
"""Jobs of each database that can be neither admitted nor refused, and that this process has told of: every sweep meets them again."""
_JOBS: Table = Job.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table
_TIME = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
"""As SQLite reads times; Python reads more, and what the database does not read it does not let be written again."""


# --- submitting -----------------------------------------------------------------------------------


def submit(
    session: Session,
    request: JobRequest,
    *,
    actor: str,
    project: str,
    job_id: str | None = None,
    idempotency_key: str | None = None,
    allowed: AllowedSecrets = UNLESS_TOLD,
) -> Job:
    """A job of this request, admitted; where something is wrong with it, it has failed and says why.

    The same once more (by `idempotency_key`, else by `job_id`) gives the job that is there; another request under the same key or id is
    refused: `idempotency_key_reused`, UsageError.
    """
    _check(request, project)
    digest = _digest(project, [request])
    return _submit(session, request, digest, actor, project, job_id, idempotency_key, allowed)


def _submit(
    session: Session,
    request: JobRequest,
    digest: str,
    actor: str,
    project: str,
    job_id: str | None,
    idempotency_key: str | None,
    allowed: AllowedSecrets,
) -> Job:
    if job_id is not None and not JOB_ID.fullmatch(job_id):
        raise UsageError(_bad_id(job_id))
    if (there := _same(session, project, job_id, idempotency_key, digest)) is not None:
        return there
    job = Job(**_written(request, digest, actor, project, job_id or _new_id(), idempotency_key))
    try:
        with session.begin_nested():
            session.add(job)
    except IntegrityError:  # somebody has just submitted it
        there = _same(session, project, job_id, idempotency_key, digest)
        if there is None:
            raise
        return there
    events.append(session, **_submission(actor, project, job.job_id))
    admit(session, [job.job_id], allowed)
    session.refresh(job)
    return job


def submit_array(
    session: Session,
    requests: Sequence[JobRequest],
    *,
    actor: str,
    project: str,
    idempotency_key: str | None = None,
    allowed: AllowedSecrets = UNLESS_TOLD,
) -> Iterator[Job]:
    """What `submit` does with each request, in their order, with few statements for many. The key is one of them all.

    Raises what `submit` would, when all jobs before that one have been given out; nobody has rolled them back then.
    """
    digest = _digest(project, requests)
    for start in range(0, len(requests), PORTION):
        portion = [
            (request, None if idempotency_key is None else key_in_array(idempotency_key, number))
            for number, request in enumerate(requests[start : start + PORTION], start)
        ]
        yield from _submit_portion(session, portion, digest, actor, project, allowed)


def key_in_array(key: str, number: int) -> str:
    """Of a job of an array, from 0. Nobody submits with a key of this form: those of people are ASCII (`api/schemas/idempotency.py`)."""
    return key if number == 0 else f"{key}·{number}"


def _submit_portion(
    session: Session,
    portion: Sequence[tuple[JobRequest, str | None]],
    digest: str,
    actor: str,
    project: str,
    allowed: AllowedSecrets,
) -> Iterator[Job]:
    there = _by_key(session, project, [key for _, key in portion if key is not None])
    ids: list[str] = []
    rows: list[dict[str, Any]] = []
    refused: UsageError | Refusal | None = None
    for request, key in portion:
        try:
            _check(request, project)
            same = _repeated(None if key is None else there.get(key), None, digest)
        except (UsageError, Refusal) as error:
            refused = error  # those before it may be wrong too, and are told first
            break
        ids.append(_new_id() if same is None else same.job_id)
        if same is None:
            rows.append(_written(request, digest, actor, project, ids[-1], key))
    if rows and not _inserted(session, rows):
        for request, key in portion:  # which of them it was, and whether it is the same
            _check(request, project)
            yield _submit(session, request, digest, actor, project, None, key, allowed)
        return
    new = [row["job_id"] for row in rows]
    events.append_many(session, [_submission(actor, project, job_id) for job_id in new])
    _admit(session, new, allowed)
    yield from _jobs(session, ids)
    if refused is not None:
        raise refused


def _inserted(session: Session, rows: Sequence[Mapping[str, Any]]) -> bool:
    """False, and none of them, where somebody has just submitted one."""
    try:
        with session.begin_nested():
            session.execute(insert(Job), rows)
    except IntegrityError:
        return False
    return True


def _jobs(session: Session, ids: Sequence[str]) -> Iterator[Job]:
    """As they stand in the database now, in this order."""
    query = select(Job).where(Job.job_id.in_(ids)).execution_options(populate_existing=True)
    found = {job.job_id: job for job in session.scalars(query)}
    return (found[job_id] for job_id in ids)


def _check(request: JobRequest, project: str) -> None:
    """Raises InvalidRequest where something cannot even be written."""
    columns, document = request.columns(), request.document()
    if found := [*text_problems({**columns, **document, "project": project}, "")]:
        raise InvalidRequest(found)


def _digest(project: str, requests: Sequence[JobRequest]) -> str:
    """By which what was submitted together is known again: all of it, and how many they are."""
    told = "\n".join([project, *(request.digest() for request in requests)])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


def _written(
    request: JobRequest, digest: str, actor: str, project: str, job_id: str, key: str | None
) -> dict[str, Any]:
    """Its row, before it is admitted."""
    return {
        "job_id": job_id,
        "project": project,
        "status": JobStatus.HELD if request.hold else JobStatus.QUEUED,
        "request": request.document(),
        "submitted_by": actor,
        "idempotency_key": key,
        "request_hash": digest,
        **request.columns(),
    }


def _submission(actor: str, project: str, job_id: str) -> dict[str, Any]:
    """The event that tells of it."""
    detail = {"project": project}
    return {"actor": actor, "kind": events.JOB_SUBMITTED, "job_id": job_id, "detail": detail}


def _same(
    session: Session, project: str, job_id: str | None, key: str | None, digest: str
) -> Job | None:
    """The job that was made of the same request before."""
    if key is not None:
        there = _repeated(_by_key(session, project, [key]).get(key), job_id, digest)
        if there is not None:
            return there
    there = None if job_id is None else session.get(Job, job_id)
    if there is not None and (there.request_hash != digest or key is not None):
        raise UsageError(
            f"There is a job {job_id} already, and it is another one. Choose another id, or leave it out."
        )
    return there


def _by_key(session: Session, project: str, keys: Sequence[str]) -> dict[str, Job]:
    """The jobs that were made with these keys."""
    if not keys:
        return {}
    query = select(Job).where(Job.project == project, Job.idempotency_key.in_(keys))
    return {job.idempotency_key or "": job for job in session.scalars(query)}


def _repeated(there: Job | None, job_id: str | None, digest: str) -> Job | None:
    """The job of a key, where it is the same once more. Raises `idempotency_key_reused`."""
    if there is None:
        return None
    if there.request_hash != digest or job_id not in (None, there.job_id):
        raise Refusal("idempotency_key_reused")
    return there


def _new_id() -> str:
    return "job-" + base64.b32encode(secrets.token_bytes(8)).decode()[:12].lower()


def _bad_id(job_id: str) -> str:
    return (
        f"job_id {job_id[:100]!r}: letters, digits, `_` and `-` are wanted, at most 80, a letter or digit first, "
        "since it names folders on the machines"
    )


# --- admitting ------------------------------------------------------------------------------------


def admit(session: Session, ids: Sequence[str], allowed: AllowedSecrets = UNLESS_TOLD) -> None:
    """Check, expand and rank jobs that are as new; their rows then say what became of each.

    A job that does not say how many GPUs it wants stays as it is until some machine was observed: nobody can say before.
    """
    session.flush()
    _admit(session, ids, allowed)


def admit_new(session: Session, limit: int, allowed: AllowedSecrets = UNLESS_TOLD) -> int:
    """The same for rows that nobody has admitted yet, the oldest first; how many were dealt with.

    Rows that the database does not even let be refused are passed over, so that they stand before no others.
    """
    dealt_with, stuck = 0, set[str]()
    for _ in range(PASSES):
        before = len(stuck)
        new = _new(session, limit - dealt_with, stuck)
        dealt_with += _admit(session, new, allowed, stuck)
        if len(stuck) == before or dealt_with == limit:
            break
    return dealt_with


def _new(session: Session, limit: int, but: Collection[str]) -> Sequence[str]:
    """Ids of the oldest that nobody has admitted yet; no other dispatcher has them in hand."""
    query = (
        select(Job.job_id)
        .where(Job.admitted_at.is_(None), Job.status.in_((JobStatus.QUEUED, JobStatus.HELD)))
        .order_by(Job.created_at, Job.job_id)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
    )
    return session.scalars(query.where(Job.job_id.not_in(but)) if but else query).all()


def _admit(
    session: Session, ids: Sequence[str], allowed: AllowedSecrets, stuck: set[str] | None = None
) -> int:
    """All of them together; where that breaks, by halves, so that the one which breaks it holds up nobody else.

    `stuck` gets the ids of those with which nothing can be done.
    """
    stuck = set() if stuck is None else stuck
    try:
        with session.begin_nested():
            return _admit_together(session, ids, allowed)
    except DBAPIError as error:
        if not isinstance(error, DataError | IntegrityError):
            raise  # the database itself: whoever asked begins anew
        if len(ids) == 1:
            return _give_up(session, ids[0], error, stuck)
    except Exception as error:  # noqa: BLE001 - a row holds what nobody thought of; which one is found out below
        if len(ids) == 1:
            return _give_up(session, ids[0], error, stuck)
    half = len(ids) // 2
    return sum(_admit(session, some, allowed, stuck) for some in (ids[:half], ids[half:]))


def _give_up(session: Session, job_id: str, error: Exception, stuck: set[str]) -> int:
    """A row that admission broke at has failed, with all that can be said about it; how many that are."""
    told = _TOLD.setdefault(session.connection().engine, set())
    if job_id not in told:
        log.error("job %r cannot be admitted", job_id, exc_info=error)
    status = session.scalar(select(Job.status).where(Job.job_id == job_id))
    because = [f"it cannot be read: {type(error).__name__}: {error}"]
    row = _Row({"job_id": job_id, "status": status})
    emptied = {column.name: "" for column in _JOBS.columns if column.name not in _KEPT}
    for each in (row, _Row(row.values, emptied)):  # the database may not let it stay as it is
        try:
            with session.begin_nested():
                _refuse(session, each, because)
            told.discard(job_id)
            return 1
        except (DataError, IntegrityError) as refused:
            problem = refused
    if job_id not in told:
        log.error("nor can it be refused, and it stays as it is", exc_info=problem)
    told.add(job_id)
    stuck.add(job_id)
    return 0


def _admit_together(session: Session, ids: Sequence[str], allowed: AllowedSecrets) -> int:
    rows = _rows(session, ids)
    if not rows:
        return 0
    fleet = _Fleet(session, rows, allowed)
    admitted: list[_Admitted] = []
    refused = 0
    for row in rows:
        answer = _answer(row, fleet)
        if isinstance(answer, _Admitted):
            admitted.append(answer)
        elif answer:
            _refuse(session, row, answer)
            refused += 1
    accepted = [each for each in admitted if not _over_quota(session, each, fleet, rows)]
    _freeze(session, accepted, fleet)
    return len(admitted) + refused


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as it stands there, and which of its columns cannot be read."""

    values: Mapping[str, Any]
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def job_id(self) -> str:
        return self.values["job_id"]

    @property
    def request(self) -> Mapping[str, Any] | None:
        """Its document, if it is one."""
        document = self.values["request"]
        return cast("Mapping[str, Any]", document) if isinstance(document, dict) else None


@dataclass(frozen=True, slots=True)
class _Admitted:
    """What becomes of a row that is right."""

    row: _Row
    spec: JobSpec
    resources: Resources
    held: bool
    follows: Sequence[str]

    @property
    def project(self) -> str:
        return self.row.values["project"]


class _Fleet:
    """What admission must know beside the rows; read once for many."""

    def __init__(self, session: Session, rows: Iterable[_Row], allowed: AllowedSecrets) -> None:
        self.allowed = allowed
        self.now = seconds(session)
        self.gpus_by_default = _gpus_by_default(session)
        self.projects = _lock_projects(
            session, {row.values["project"] for row in rows if "project" not in row.unreadable}
        )
        self.projects_of_jobs = _projects_of(session, rows)


def _answer(row: _Row, fleet: _Fleet) -> _Admitted | list[str]:
    """What becomes of it, or what is wrong with it; an empty list: it cannot be said yet."""
    found = [f"{name}: {why}" for name, why in row.unreadable.items()]
    if not JOB_ID.fullmatch(row.job_id):
        found.append(_bad_id(row.job_id))
    columns, beyond = _columns(row, found), _beyond(row, found)
    if columns is None or beyond is None:
        return found
    found += [*_column_problems(columns), *problems(beyond), *_follows(row, columns, beyond, fleet)]
    found += [] if found else fleet.allowed.problems(beyond.secrets)
    if found:
        return found
    values = columns.model_dump()
    try:
        spec = kinds.expand({**values, "job_id": row.job_id, "request": row.values["request"]})
    except UsageError as error:
        return str(error).splitlines() or [type(error).__name__]
    return _admitted(row, spec, beyond, fleet)


def _columns(row: _Row, found: list[str]) -> Columns | None:
    try:
        return columns_from_row(row.values)
    except InvalidRequest as error:
        found += [p for p in error.problems if p.partition(":")[0] not in row.unreadable]
        return None


def _beyond(row: _Row, found: list[str]) -> Beyond | None:
    if row.request is None:
        if "request" not in row.unreadable:
            found.append("request: a JSON object is wanted, {} where there is nothing to say")
        return None
    try:
        return beyond_from_document(row.request)
    except InvalidRequest as error:
        found += [f"request.{problem}" for problem in error.problems]
        return None


def _column_problems(columns: Columns) -> list[str]:
    return path_problems("output_dir", columns.output_dir)


def _follows(row: _Row, columns: Columns, beyond: Beyond, fleet: _Fleet) -> list[str]:
    found: list[str] = []
    for word in beyond.after:
        job_id, _ = dependency(word)
        if job_id == row.job_id:
            found.append(f"after {word!r}: a job cannot come after itself")
        elif fleet.projects_of_jobs.get(job_id) != columns.project:
            found.append(f"after {word!r}: project {columns.project} has no job {job_id}")
    return found


def _admitted(row: _Row, spec: JobSpec, beyond: Beyond, fleet: _Fleet) -> _Admitted | list[str]:
    resources = beyond.resources
    if resources.settled(0) != resources.settled(1):
        if fleet.gpus_by_default is None:
            return []
        resources = resources.settled(fleet.gpus_by_default)
    else:
        resources = resources.settled(0)
    if row.values["job_type"] != COMMAND and spec.arguments[0].startswith(OWN_PROGRAMS):
        resources = resources.model_copy(update={"prepared": True})
    # Who was released once is not held again because it was to be held at first.
    to_be_held = beyond.hold and row.values["generation"] == 0
    held = to_be_held or row.values["status"] == JobStatus.HELD
    return _Admitted(row, spec, resources, held, beyond.after)


def _gpus_by_default(session: Session) -> int | None:
    """How many GPUs a job gets that does not say: one, or none in a fleet without. None: no machine was observed yet."""
    of_fleet = select(GPU.gpu_id).join(VM, VM.vm_id == GPU.vm_id).where(VM.active).limit(1)
    if session.scalar(of_fleet) is not None or _engine_gives_gpus(session):
        return 1
    seen = select(VM.vm_id).where(VM.active, (VM.observed_round > 0) | VM.last_polled.is_not(None))
    return None if session.scalar(seen.limit(1)) is None else 0


def _engine_gives_gpus(session: Session) -> bool:
    rows = session.scalars(select(VM.engine).where(VM.active, VM.engine.is_not(None)))
    found = (elastic_of(document) for document in rows)
    return any(each is not None and each.said.gpus > 0 for each in found)


def _projects_of(session: Session, rows: Iterable[_Row]) -> dict[str, str]:
    """The projects of the jobs that these rows are to come after."""
    words: list[Any] = []
    for row in rows:
        after = (row.request or {}).get("after")
        words += cast("list[Any]", after) if isinstance(after, list) else []
    ids = {dependency(word)[0] for word in words if isinstance(word, str)}
    if not ids:
        return {}
    query = select(Job.job_id, Job.project).where(Job.job_id.in_(ids))
    return dict(session.execute(query).all())


# --- rows as they stand there ---------------------------------------------------------------------


def _rows(session: Session, ids: Sequence[str]) -> list[_Row]:
    """In this order. Read column by column, as a mapped row fails as a whole where one value cannot be read; PostgreSQL has none such."""
    if not ids:
        return []
    raw: list[Any] = [
        literal_column(f'"{column.name}"').label(column.name) for column in _JOBS.columns
    ]
    query = select(*raw).select_from(_JOBS).where(Job.job_id.in_(ids))
    places = {job_id: place for place, job_id in enumerate(ids)}
    found = sorted(
        session.execute(query).mappings().all(), key=lambda values: places[values["job_id"]]
    )
    dialect = session.get_bind().dialect
    if dialect.name != "sqlite":
        return [_Row(dict(values)) for values in found]
    return [_row(dict(values), dialect) for values in found]


def _row(raw: Mapping[str, Any], dialect: Dialect) -> _Row:
    values: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for column in _JOBS.columns:
        name = column.name
        try:
            values[name] = _value(column.type, raw[name], dialect)
        except (ValueError, TypeError):
            unreadable[name] = f"{str(raw[name])[:60]!r} cannot be read as {_word(column.type)}"
            values[name] = None
    return _Row(values, unreadable)


def _value(kind: Any, value: Any, dialect: Dialect) -> Any:
    """The value of a column as mapped rows have it; ValueError or TypeError where it is of another type."""
    wanted = _type_of(kind)
    if wanted is datetime and value is not None and not _TIME.fullmatch(str(value)):
        raise ValueError(value)
    if wanted is bool and value not in (0, 1, None):
        raise TypeError(value)
    if value is None:
        return None
    if wanted is object:
        return value if isinstance(value, int | float) else strict_json(value)
    read = kind.dialect_impl(dialect).result_processor(dialect, None)
    value = value if read is None else read(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise TypeError(value)
    return value


def _type_of(kind: Any) -> type:
    """`object` for JSON, which may be anything."""
    return datetime if isinstance(kind, Moment) else kind.python_type


def _word(kind: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        object: "JSON",
    }
    return words.get(_type_of(kind), "a time")


# --- what is written ------------------------------------------------------------------------------


def _refuse(session: Session, row: _Row, found: Sequence[str]) -> None:
    """The job has failed before it began. What cannot be read is replaced by its default, or nobody could look at the row."""
    no_objects = [name for name in ("request", "hyperparams") if _is_no_object(row, name)]
    mended = {name: _default(name) for name in (*row.unreadable, *no_objects)}
    reason = "\n".join(found)[:MOST_WORDS]
    if row.values["status"] == JobStatus.HELD:  # nothing that is held fails; it is let go first
        values = {**mended, "status": JobStatus.QUEUED}
        released = update(Job).where(Job.job_id == row.job_id).values(values)
        session.execute(released.execution_options(synchronize_session=False))
    session.execute(
        update(Job)
        .where(Job.job_id == row.job_id)
        .values(
            {
                **mended,
                "status": JobStatus.FAILED,
                "failure_reason": reason,
                "end_time": this_moment(),
            }
        )
        .execution_options(synchronize_session=False)
    )
    events.append(
        session,
        actor=ADMISSION,
        kind=events.JOB_FAILED,
        job_id=row.job_id,
        before={"status": row.values["status"]},
        after={"status": JobStatus.FAILED},
        detail={"reason": reason},
    )


def _is_no_object(row: _Row, name: str) -> bool:
    return row.values.get(name) is not None and not isinstance(row.values[name], dict)


def _default(name: str) -> ColumnElement[Any]:
    """What the database itself would put there."""
    default: Any = _JOBS.columns[name].server_default
    if default is None:
        return null()
    return literal_column(f"'{default.arg}'") if isinstance(default.arg, str) else default.arg


def _over_quota(session: Session, job: _Admitted, fleet: _Fleet, rows: Sequence[_Row]) -> bool:
    """Whether its project has as many waiting jobs as it may; then it has failed."""
    project = fleet.projects[job.project]
    if (full := project.full("submit it again")) is not None:
        _refuse(session, job.row, [full])
        return True
    project.waiting += 1
    return False


def no_room(session: Session, project: str, ahead: int = 0) -> str | None:
    """Why no job of a project may begin to wait once more, `ahead` of them being about to, if so; until the end nobody else admits one."""
    return _lock_projects(session, [project])[project].full("retry it", ahead)


def _freeze(session: Session, jobs: Sequence[_Admitted], fleet: _Fleet) -> None:
    """Command, needs and place of each, with an event; and how far each project has come."""
    if not jobs:
        return
    places = [_placed(job, fleet) for job in jobs]
    for project in fleet.projects.values():
        project.line.settle()
    values: list[dict[str, Any]] = []
    for job, place in zip(jobs, places, strict=True):
        values.append(
            {
                "job_id": job.row.job_id,
                "status": JobStatus.HELD if job.held else JobStatus.QUEUED,
                "spec": as_json(job.spec),
                "spec_hash": spec_hash(job.spec),
                "resources": job.resources.as_json(),
                "shape": job.resources.shape(job.project),
                "due": place.due,
                "rank": place.rank,
                "admitted_at": fleet.now,
                "waiting_since": None if job.held or job.follows else fleet.now,
            }
        )
    session.execute(update(Job), values)
    rights.record(session, _named(jobs))
    events.append_many(
        session,
        [
            {
                "actor": ADMISSION,
                "kind": f"job.{row['status']}",
                "job_id": row["job_id"],
                "after": {"status": row["status"], "spec_hash": row["spec_hash"]},
            }
            for row in values
        ],
    )


def _named(jobs: Iterable[_Admitted]) -> Iterator[tuple[str, str]]:
    """The blobs that their requests name, each with the project."""
    for job in jobs:
        for sha256, _, _ in (job.row.request or {}).get("files", {}).values():
            yield sha256, job.project


def _placed(job: _Admitted, fleet: _Fleet) -> QueuePosition:
    """Where it stands in the line of its project. One that is retried has waited since then, and nobody waits since a time to come."""
    made: datetime = job.row.values["created_at"]
    if made.tzinfo is None:
        made = made.replace(tzinfo=UTC)
    since = fleet.now if job.row.values["generation"] else min(made.timestamp(), fleet.now)
    due = since - job.row.values["priority"] * PRIORITY_SECONDS
    return fleet.projects[job.project].line.place(due, job.resources)


# --- projects -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Share:
    """Of a project in the queue."""

    name: str
    max_waiting: int | None
    waiting: int
    """Counted only where there is a limit."""
    line: ProjectQueue

    def full(self, remedy: str, ahead: int = 0) -> str | None:
        """Why no more of it may wait, if so."""
        waiting = self.waiting + ahead
        if self.max_waiting is None or waiting < self.max_waiting:
            return None
        return (
            f"project {self.name} has {waiting} jobs waiting and may have {self.max_waiting}: {remedy} when some have begun, "
            "or ask for a higher max_waiting"
        )


def _lock_projects(session: Session, names: Collection[str]) -> dict[str, _Share]:
    """The projects, made where they are not there yet; nobody else ranks a job of theirs until the end."""
    ordered = sorted(names)
    if not ordered:
        return {}
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    session.execute(insert(Project).on_conflict_do_nothing(), [{"name": name} for name in ordered])
    rows = session.execute(
        select(Project.name, Project.weight, Project.max_waiting)
        .where(Project.name.in_(ordered))
        .order_by(Project.name)
        .with_for_update(key_share=True)
    ).all()
    return {
        row.name: _Share(
            row.name,
            row.max_waiting,
            0 if row.max_waiting is None else _waiting(session, row.name),
            ProjectQueue(session, row.name, row.weight),
        )
        for row in rows
    }


def _waiting(session: Session, project: str) -> int:
    query = select(func.count()).where(WAITING, Job.admitted_at.is_not(None))
    return session.scalar(query.where(Job.project == project)) or 0
