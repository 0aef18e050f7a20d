"""Admission: every new job row is read, checked and expanded once, here, before it enters the queue.

`submit` writes the row of a `JobRequest`, `submit_array` writes many with few statements. Users also insert rows by hand; the dispatcher
finds those with `admit_new`. In each case admission reads the row back from the database, since SQLite stores any type in any column. All
problems are collected and become the `failure_reason` of a failed job: no row disappears silently, and an unreadable one does not block
others. The row of a valid job gets its final command with its hash, its resources and its place in the queue.

The place (`rank`) is a time in seconds: the job's creation, less an hour for each step of priority, or later if jobs of the same project
go first (`fair_share.py`). So a project that submits thousands of jobs does not starve others, and every job gets its turn, because later
jobs have later ranks.

Nothing that a row names is imported: a job type selects among installed kinds by name (`kinds.py`).
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
from functools import cached_property
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
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted
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
    Columns,
    InvalidRequest,
    JobRequest,
    RequestDocument,
    columns_from_row,
    dependency,
    problems,
    request_document_from,
)
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import events, rights
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.engine import strict_json, upsert
from groupwise.jobs.fleet.store.tables import GPU, VM, Job, Moment, Project, this_moment
from groupwise.jobs.fleet.text_validation import text_problems
from groupwise.jobs.hosts.spec import JOB_ID, JobSpec, as_json, path_problems, spec_hash

MAX_REASON_LENGTH = 4000
"""Maximum characters of a stored failure reason."""
PORTION = 500
"""Jobs of an array that are written and admitted together: a larger number saves nothing and makes long statements."""
PASSES = 5
"""Queries for new rows in one call of `admit_new`; each skips the rows that could be neither admitted nor refused."""
ADMISSION = "admission"
OWN_PROGRAMS = "groupwise"
"""Prefix of our own programs. A job kind that runs one needs a prepared machine; a job that names its command brings its own program."""
_NEVER_EMPTIED = frozenset(
    {"job_id", "status", "project", "generation", "idempotency_key", "request_hash"}
)
"""Columns that keep their values when the rest of an unreadable row is replaced by defaults."""

log = logging.getLogger(__name__)

_LOGGED: WeakKeyDictionary[Engine, set[str]] = WeakKeyDictionary()
"""Jobs of each database that can be neither admitted nor refused. Every sweep meets them again; each is logged once a process."""
_JOBS: Table = Job.__table__  # pyright: ignore[reportAssignmentType] — a mapped class's table is a Table
_TIME = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
"""The format of times that SQLite reads. Python reads more, but SQLite's triggers then refuse to write the row again."""


# --- submitting -----------------------------------------------------------------------------------


def submit(
    session: Session,
    request: JobRequest,
    *,
    actor: str,
    project: str,
    job_id: str | None = None,
    idempotency_key: str | None = None,
    allowed: AllowedSecrets = DEFAULT_SECRETS,
) -> Job:
    """Write the row of this request and admit it. An invalid job is returned as failed, with its reason.

    Repeating a request with the same `idempotency_key` or `job_id` returns the existing job; a different request is refused: Refusal
    `idempotency_key_reused` for the key, UsageError for the id.
    """
    _check_texts(request, project)
    digest = _digest(project, [request])
    return _submit_one(session, request, digest, actor, project, job_id, idempotency_key, allowed)


def _submit_one(
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
        raise UsageError(_invalid_id_message(job_id))
    if (existing := _find_existing(session, project, job_id, idempotency_key, digest)) is not None:
        return existing
    job = Job(**_new_row(request, digest, actor, project, job_id or _new_id(), idempotency_key))
    try:
        with session.begin_nested():
            session.add(job)
    except IntegrityError:  # another process has just submitted it
        existing = _find_existing(session, project, job_id, idempotency_key, digest)
        if existing is None:
            raise
        return existing
    events.append(session, **_submission_event(actor, project, job.job_id))
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
    allowed: AllowedSecrets = DEFAULT_SECRETS,
) -> Iterator[Job]:
    """Submit many requests, in order, with few statements. One `idempotency_key` covers the whole array.

    Raises the error of `submit` for a request, once all jobs before it have been yielded; those are not rolled back.
    """
    digest = _digest(project, requests)
    for start in range(0, len(requests), PORTION):
        portion = [
            (request, None if idempotency_key is None else key_in_array(idempotency_key, number))
            for number, request in enumerate(requests[start : start + PORTION], start)
        ]
        yield from _submit_portion(session, portion, digest, actor, project, allowed)


def key_in_array(key: str, number: int) -> str:
    """The key of a job of an array, counted from 0. Clients' keys are ASCII (`api/schemas/idempotency.py`), so none is equal to it."""
    return key if number == 0 else f"{key}·{number}"


def _submit_portion(
    session: Session,
    portion: Sequence[tuple[JobRequest, str | None]],
    digest: str,
    actor: str,
    project: str,
    allowed: AllowedSecrets,
) -> Iterator[Job]:
    """Insert, admit and yield up to PORTION jobs; those that were submitted before with their key are yielded unchanged."""
    jobs_by_key = _find_by_key(session, project, [key for _, key in portion if key is not None])
    ids: list[str] = []
    rows: list[dict[str, Any]] = []
    refusal: UsageError | Refusal | None = None
    for request, key in portion:
        try:
            _check_texts(request, project)
            existing = _require_same_request(
                None if key is None else jobs_by_key.get(key), None, digest
            )
        except (UsageError, Refusal) as error:
            refusal = error  # raised at the end: earlier requests may be invalid too
            break
        ids.append(_new_id() if existing is None else existing.job_id)
        if existing is None:
            rows.append(_new_row(request, digest, actor, project, ids[-1], key))
    if rows:
        try:
            with session.begin_nested():
                session.execute(insert(Job), rows)
        except IntegrityError:  # another process has just submitted one of them: find out which
            for request, key in portion:
                _check_texts(request, project)
                yield _submit_one(session, request, digest, actor, project, None, key, allowed)
            return
    new_ids = [row["job_id"] for row in rows]
    events.append_many(session, [_submission_event(actor, project, job_id) for job_id in new_ids])
    _admit(session, new_ids, allowed)
    query = select(Job).where(Job.job_id.in_(ids)).execution_options(populate_existing=True)
    jobs_by_id = {job.job_id: job for job in session.scalars(query)}
    yield from (jobs_by_id[job_id] for job_id in ids)
    if refusal is not None:
        raise refusal


def _check_texts(request: JobRequest, project: str) -> None:
    """Raise InvalidRequest if a text cannot be stored in the database."""
    columns, document = request.columns(), request.document()
    if problems := [*text_problems({**columns, **document, "project": project}, "")]:
        raise InvalidRequest(problems)


def _digest(project: str, requests: Sequence[JobRequest]) -> str:
    """Hash of everything that was submitted together, to recognise a repeated submission."""
    submitted = "\n".join([project, *(request.digest() for request in requests)])
    return hashlib.sha256(submitted.encode("utf-8", "surrogatepass")).hexdigest()


def _new_row(
    request: JobRequest, digest: str, actor: str, project: str, job_id: str, key: str | None
) -> dict[str, Any]:
    """The row of a job before admission."""
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


def _submission_event(actor: str, project: str, job_id: str) -> dict[str, Any]:
    """The event of a submission."""
    detail = {"project": project}
    return {"actor": actor, "kind": events.JOB_SUBMITTED, "job_id": job_id, "detail": detail}


def _find_existing(
    session: Session, project: str, job_id: str | None, key: str | None, digest: str
) -> Job | None:
    """The existing job of the same request, if any. Raises if the key or id belongs to another request."""
    if key is not None:
        existing = _require_same_request(
            _find_by_key(session, project, [key]).get(key), job_id, digest
        )
        if existing is not None:
            return existing
    existing = None if job_id is None else session.get(Job, job_id)
    if existing is not None and (existing.request_hash != digest or key is not None):
        raise UsageError(
            f"There is a job {job_id} already, and it is another one. Choose another id, or leave it out."
        )
    return existing


def _find_by_key(session: Session, project: str, keys: Sequence[str]) -> dict[str, Job]:
    """The project's jobs with these idempotency keys."""
    if not keys:
        return {}
    query = select(Job).where(Job.project == project, Job.idempotency_key.in_(keys))
    return {job.idempotency_key or "": job for job in session.scalars(query)}


def _require_same_request(existing: Job | None, job_id: str | None, digest: str) -> Job | None:
    """The job of a key, if this is the same request again. Raises `idempotency_key_reused` otherwise."""
    if existing is None:
        return None
    if existing.request_hash != digest or job_id not in (None, existing.job_id):
        raise Refusal("idempotency_key_reused")
    return existing


def _new_id() -> str:
    return "job-" + base64.b32encode(secrets.token_bytes(8)).decode()[:12].lower()


def _invalid_id_message(job_id: str) -> str:
    return (
        f"job_id {job_id[:100]!r}: letters, digits, `_` and `-` are wanted, at most 80, a letter or digit first, "
        "since it names folders on the machines"
    )


# --- admitting ------------------------------------------------------------------------------------


def admit(session: Session, ids: Sequence[str], allowed: AllowedSecrets = DEFAULT_SECRETS) -> None:
    """Check, expand and rank new jobs; their rows then hold the result of each.

    A job of a kind without a GPU count is left unadmitted until a machine has been observed, since the default depends on the fleet.
    """
    session.flush()
    _admit(session, ids, allowed)


def admit_new(session: Session, limit: int, allowed: AllowedSecrets = DEFAULT_SECRETS) -> int:
    """Admit up to `limit` rows that are not admitted yet, oldest first; returns how many were admitted or refused.

    Rows that can be neither admitted nor refused are skipped, and so do not block younger ones.
    """
    admitted, stuck = 0, set[str]()
    for _ in range(PASSES):
        stuck_before = len(stuck)
        # The oldest jobs that are not admitted yet and that no other dispatcher is admitting now.
        query = (
            select(Job.job_id)
            .where(Job.admitted_at.is_(None), Job.status.in_((JobStatus.QUEUED, JobStatus.HELD)))
            .order_by(Job.created_at, Job.job_id)
            .limit(limit - admitted)
            .with_for_update(skip_locked=True, key_share=True)
        )
        new_ids = session.scalars(query.where(Job.job_id.not_in(stuck)) if stuck else query).all()
        admitted += _admit(session, new_ids, allowed, stuck)
        if len(stuck) == stuck_before or admitted == limit:
            break
    return admitted


def _admit(
    session: Session, ids: Sequence[str], allowed: AllowedSecrets, stuck: set[str] | None = None
) -> int:
    """Admit all of them together; if that fails, each half by itself: one bad row then does not block the others.

    Returns how many were admitted or refused; `stuck` receives the ids of rows for which neither was possible.
    """
    stuck = set() if stuck is None else stuck
    try:
        with session.begin_nested():
            return _admit_together(session, ids, allowed)
    except DBAPIError as error:
        if not isinstance(error, DataError | IntegrityError):
            raise  # the database itself failed: the caller retries the transaction
        if len(ids) == 1:
            return _give_up(session, ids[0], error, stuck)
    except Exception as error:  # noqa: BLE001 - a row holds an unforeseen value; the halves below find out which
        if len(ids) == 1:
            return _give_up(session, ids[0], error, stuck)
    half = len(ids) // 2
    return sum(
        _admit(session, half_of_ids, allowed, stuck) for half_of_ids in (ids[:half], ids[half:])
    )


def _give_up(session: Session, job_id: str, error: Exception, stuck: set[str]) -> int:
    """Fail a job whose row broke admission. Returns 1, or 0 if the database refuses that too; then its id is added to `stuck`."""
    logged_ids = _LOGGED.setdefault(session.connection().engine, set())
    if job_id not in logged_ids:
        log.error("job %r cannot be admitted", job_id, exc_info=error)
    status = session.scalar(select(Job.status).where(Job.job_id == job_id))
    reasons = [f"it cannot be read: {type(error).__name__}: {error}"]
    row = _Row({"job_id": job_id, "status": status})
    empty_values = {
        column.name: "" for column in _JOBS.columns if column.name not in _NEVER_EMPTIED
    }
    # A bad value may have to go before any update.
    for variant in (
        row,
        _Row(row.values, empty_values),
    ):
        try:
            with session.begin_nested():
                _refuse_row(session, variant, reasons)
            logged_ids.discard(job_id)
            return 1
        except (DataError, IntegrityError) as database_error:
            problem = database_error
    if job_id not in logged_ids:
        log.error("nor can it be refused, and it stays as it is", exc_info=problem)
    logged_ids.add(job_id)
    stuck.add(job_id)
    return 0


def _admit_together(session: Session, ids: Sequence[str], allowed: AllowedSecrets) -> int:
    """Admit or refuse each of these jobs; returns for how many of them a decision was possible."""
    rows = _read_rows(session, ids)
    if not rows:
        return 0
    fleet = _Fleet(session, rows, allowed)
    admitted: list[_Admitted] = []
    refused_count = 0
    for row in rows:
        decision = _decide(row, fleet)
        if isinstance(decision, _Admitted):
            admitted.append(decision)
        elif decision:
            _refuse_row(session, row, decision)
            refused_count += 1
    accepted: list[_Admitted] = []
    for job in admitted:
        project = fleet.projects[job.project]
        if (problem := project.full("submit it again")) is not None:
            _refuse_row(session, job.row, [problem])
        else:
            project.waiting += 1
            accepted.append(job)
    _write_admitted(session, accepted, fleet)
    return len(admitted) + refused_count


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of `jobs` as the database holds it."""

    values: Mapping[str, Any]
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons why columns cannot be read, by column; the value of such a column is None."""

    @property
    def job_id(self) -> str:
        return self.values["job_id"]

    @property
    def request(self) -> Mapping[str, Any] | None:
        """The document in column `request`, if it is a JSON object."""
        document = self.values["request"]
        return cast("Mapping[str, Any]", document) if isinstance(document, dict) else None


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Admission's decision about a valid row."""

    row: _Row
    spec: JobSpec
    resources: Resources
    held: bool
    follows: Sequence[str]

    @property
    def project(self) -> str:
        return self.row.values["project"]


class _Fleet:
    """Facts about the fleet that admission needs in addition to the rows; read once for many."""

    def __init__(self, session: Session, rows: Iterable[_Row], allowed: AllowedSecrets) -> None:
        self.allowed = allowed
        self.now = database_time(session)
        self._session = session
        self.projects = _lock_projects(
            session, {row.values["project"] for row in rows if "project" not in row.unreadable}
        )
        predecessor_ids: set[str] = set()
        for row in rows:
            dependencies: Any = (row.request or {}).get("after")
            if isinstance(dependencies, list):
                kinds_named = cast("list[Any]", dependencies)
                predecessor_ids |= {
                    dependency(dependency_text)[0]
                    for dependency_text in kinds_named
                    if isinstance(dependency_text, str)
                }
        query = select(Job.job_id, Job.project).where(Job.job_id.in_(predecessor_ids))
        self.projects_of_jobs = dict(session.execute(query).all()) if predecessor_ids else {}

    def gpus_by_default(self, wanted: Resources) -> int | None:
        """Default number of GPUs of a training job: 1 if a machine that it may run on has one, else 0; None before any was observed."""
        rows = self._machines
        allowed = [
            row
            for row in rows
            if wanted.vm in (None, row.vm_id)
            and wanted.labels.items() <= (row.labels or {}).items()
        ]
        for row in allowed or rows:  # if there is no such machine, one may be added
            engine = elastic_of(row.engine)
            if row.vm_id in self._vms_with_gpus or (engine is not None and engine.body.gpus > 0):
                return 1
        return 0 if any(row.observed_round > 0 or row.last_polled for row in rows) else None

    @cached_property
    def _machines(self) -> Sequence[Any]:
        columns = (VM.vm_id, VM.labels, VM.engine, VM.observed_round, VM.last_polled)
        return self._session.execute(select(*columns).where(VM.active)).all()

    @cached_property
    def _vms_with_gpus(self) -> frozenset[str]:
        return frozenset(self._session.scalars(select(GPU.vm_id).distinct()))


def _decide(row: _Row, fleet: _Fleet) -> _Admitted | list[str]:
    """The decision on a row, or a list of its problems; an empty list if it cannot be decided yet."""
    errors = [f"{name}: {problem}" for name, problem in row.unreadable.items()]
    if not JOB_ID.fullmatch(row.job_id):
        errors.append(_invalid_id_message(row.job_id))
    columns: Columns | None = None
    try:
        columns = columns_from_row(row.values)
    except InvalidRequest as error:
        errors += [p for p in error.problems if p.partition(":")[0] not in row.unreadable]
    document = _parse_document(row, errors)
    if columns is None or document is None:
        return errors
    errors += [
        *path_problems("output_dir", columns.output_dir),
        *problems(document),
        *_predecessor_problems(row, columns, document, fleet),
    ]
    errors += [] if errors else fleet.allowed.problems(document.secrets)
    if errors:
        return errors
    values = columns.model_dump()
    try:
        spec = kinds.expand({**values, "job_id": row.job_id, "request": row.values["request"]})
    except UsageError as error:
        return str(error).splitlines() or [type(error).__name__]
    return _admit_row(row, spec, document, fleet)


def _parse_document(row: _Row, errors: list[str]) -> RequestDocument | None:
    """The request's document beyond the columns; None if it is invalid, with the reasons added to `errors`."""
    if row.request is None:
        if "request" not in row.unreadable:
            errors.append("request must be a JSON object, {} if it is empty")
        return None
    try:
        return request_document_from(row.request)
    except InvalidRequest as error:
        errors += [f"request.{problem}" for problem in error.problems]
        return None


def _predecessor_problems(
    row: _Row, columns: Columns, beyond: RequestDocument, fleet: _Fleet
) -> list[str]:
    """Check the jobs that this one is to follow."""
    errors: list[str] = []
    for entry in beyond.after:
        job_id, _ = dependency(entry)
        if job_id == row.job_id:
            errors.append(f"after {entry!r}: a job cannot come after itself")
        elif fleet.projects_of_jobs.get(job_id) != columns.project:
            errors.append(f"after {entry!r}: project {columns.project} has no job {job_id}")
    return errors


def _admit_row(
    row: _Row, spec: JobSpec, beyond: RequestDocument, fleet: _Fleet
) -> _Admitted | list[str]:
    """The decision on a valid row; an empty list while the default number of GPUs is unknown."""
    resources = beyond.resources
    is_command = row.values["job_type"] == COMMAND
    if is_command or resources.settled(0) == resources.settled(1):
        resources = resources.settled(0)
    elif (gpus := fleet.gpus_by_default(resources)) is None:
        return []
    else:
        resources = resources.settled(gpus)
    if not is_command and spec.arguments[0].startswith(OWN_PROGRAMS):
        resources = resources.model_copy(update={"prepared": True})
    # `hold` holds a job once: a retried one, which was released before, is not held again.
    to_be_held = beyond.hold and row.values["generation"] == 0
    is_held = to_be_held or row.values["status"] == JobStatus.HELD
    return _Admitted(row, spec, resources, is_held, beyond.after)


# --- rows as the database holds them --------------------------------------------------------------


def _read_rows(session: Session, ids: Sequence[str]) -> list[_Row]:
    """The rows of these jobs, in this order.

    SQLite may hold values of the wrong type, and a mapped row fails as a whole if one of them cannot be read, so columns are read one by
    one.
    """
    if not ids:
        return []
    raw_columns: list[Any] = [
        literal_column(f'"{column.name}"').label(column.name) for column in _JOBS.columns
    ]
    query = select(*raw_columns).select_from(_JOBS).where(Job.job_id.in_(ids))
    positions = {job_id: position for position, job_id in enumerate(ids)}
    mappings = sorted(
        session.execute(query).mappings().all(), key=lambda values: positions[values["job_id"]]
    )
    dialect = session.get_bind().dialect
    if dialect.name != "sqlite":
        return [_Row(dict(values)) for values in mappings]
    return [_parse_row(dict(values), dialect) for values in mappings]


_TYPE_NAMES = {
    datetime: "a time",
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    object: "JSON",
}


def _parse_row(raw: Mapping[str, Any], dialect: Dialect) -> _Row:
    """A row of SQLite, in which any column may hold a value of any type."""
    values: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for column in _JOBS.columns:
        name = column.name
        try:
            values[name] = _parse_value(column.type, raw[name], dialect)
        except (ValueError, TypeError):
            expected = _TYPE_NAMES[_type_of(column.type)]
            unreadable[name] = f"{str(raw[name])[:60]!r} cannot be read as {expected}"
            values[name] = None
    return _Row(values, unreadable)


def _parse_value(kind: Any, value: Any, dialect: Dialect) -> Any:
    """The value of a column as a mapped row has it; ValueError or TypeError if it has another type."""
    expected = _type_of(kind)
    if expected is datetime and value is not None and not _TIME.fullmatch(str(value)):
        raise ValueError(value)
    if expected is bool and value not in (0, 1, None):
        raise TypeError(value)
    if value is None:
        return None
    if expected is object:
        return value if isinstance(value, int | float) else strict_json(value)
    processor = kind.dialect_impl(dialect).result_processor(dialect, None)
    value = value if processor is None else processor(value)
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise TypeError(value)
    return value


def _type_of(kind: Any) -> type:
    """The Python type of a column; `object` for JSON, which may be anything."""
    return datetime if isinstance(kind, Moment) else kind.python_type


# --- writing --------------------------------------------------------------------------------------


def _refuse_row(session: Session, row: _Row, errors: Sequence[str]) -> None:
    """Fail the job before it starts. Unreadable columns get their defaults, since no query could read the row otherwise."""
    repaired = {name: _column_default(name) for name in row.unreadable}
    for name in ("request", "hyperparams"):
        value = row.values.get(name)
        if value is not None and not isinstance(value, dict):
            repaired[name] = _column_default(name)
    reason = "\n".join(errors)[:MAX_REASON_LENGTH]
    if row.values["status"] == JobStatus.HELD:  # a held job cannot fail; it is released first
        values = {**repaired, "status": JobStatus.QUEUED}
        release = update(Job).where(Job.job_id == row.job_id).values(values)
        session.execute(release.execution_options(synchronize_session=False))
    session.execute(
        update(Job)
        .where(Job.job_id == row.job_id)
        .values(
            {
                **repaired,
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


def _column_default(name: str) -> ColumnElement[Any]:
    """The value that the database itself would put into a column of `jobs`."""
    default: Any = _JOBS.columns[name].server_default
    if default is None:
        return null()
    return literal_column(f"'{default.arg}'") if isinstance(default.arg, str) else default.arg


def no_room(session: Session, project: str, ahead: int = 0) -> str | None:
    """The reason why the project may not have `ahead` + 1 more waiting jobs; None: it may. Locks the project until the commit."""
    return _lock_projects(session, [project])[project].full("retry it", ahead)


def _write_admitted(session: Session, jobs: Sequence[_Admitted], fleet: _Fleet) -> None:
    """Write command, resources and place of each job, with an event, and the progress of its project's queue."""
    if not jobs:
        return
    positions: list[QueuePosition] = []
    for job in jobs:
        created_at: datetime = job.row.values["created_at"]
        if created_at.tzinfo is None:
            created_at = created_at.replace(tzinfo=UTC)
        # A retried job has waited since its retry; a creation time in the future counts as now.
        waiting_since = (
            fleet.now if job.row.values["generation"] else min(created_at.timestamp(), fleet.now)
        )
        due_at = waiting_since - job.row.values["priority"] * PRIORITY_SECONDS
        positions.append(fleet.projects[job.project].queue.place(due_at, job.resources))
    for project in fleet.projects.values():
        project.queue.settle()
    values: list[dict[str, Any]] = []
    for job, position in zip(jobs, positions, strict=True):
        values.append(
            {
                "job_id": job.row.job_id,
                "status": JobStatus.HELD if job.held else JobStatus.QUEUED,
                "spec": as_json(job.spec),
                "spec_hash": spec_hash(job.spec),
                "resources": job.resources.as_json(),
                "shape": job.resources.shape(job.project),
                "due": position.due,
                "rank": position.rank,
                "admitted_at": fleet.now,
                "waiting_since": None if job.held or job.follows else fleet.now,
            }
        )
    session.execute(update(Job), values)
    blobs = (
        (sha256, job.project)
        for job in jobs
        for sha256, _, _ in (job.row.request or {}).get("files", {}).values()
    )
    rights.record(session, blobs)
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


# --- projects -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ProjectShare:
    """A project's limit of waiting jobs and its place in the queue."""

    name: str
    max_waiting: int | None
    waiting: int
    """Counted only if there is a limit."""
    queue: ProjectQueue

    def full(self, remedy: str, ahead: int = 0) -> str | None:
        """The reason why no more jobs of the project may wait; None: they may."""
        waiting_count = self.waiting + ahead
        if self.max_waiting is None or waiting_count < self.max_waiting:
            return None
        return (
            f"project {self.name} has {counted(waiting_count, 'job')} waiting and may have {self.max_waiting}: {remedy} when some "
            "have begun, or ask for a higher max_waiting"
        )


def _lock_projects(session: Session, names: Collection[str]) -> dict[str, _ProjectShare]:
    """The projects, created if necessary, and locked: no other process ranks their jobs until this transaction ends."""
    sorted_names = sorted(names)
    waiting_count = select(func.count()).where(WAITING, Job.admitted_at.is_not(None))
    if not sorted_names:
        return {}
    session.execute(
        upsert(session, Project).on_conflict_do_nothing(), [{"name": name} for name in sorted_names]
    )
    rows = session.execute(
        select(Project.name, Project.weight, Project.max_waiting)
        .where(Project.name.in_(sorted_names))
        .order_by(Project.name)
        .with_for_update(key_share=True)
    ).all()
    return {
        row.name: _ProjectShare(
            row.name,
            row.max_waiting,
            0
            if row.max_waiting is None
            else session.scalar(waiting_count.where(Job.project == row.name)) or 0,
            ProjectQueue(session, row.name, row.weight),
        )
        for row in rows
    }
