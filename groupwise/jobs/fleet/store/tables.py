"""The tables of a fleet. `database.py` connects to them; `migrations/` creates them; triggers and views are generated from `states.py`.

Users write rows by hand: an INSERT of job_id, model, dataset and reward_function is a full submission, an INSERT of vm_id, ip_address,
user and ssh_key_path a machine to be polled. So every other column has a default in the database itself. `status` is written by the control
plane.

There are two kinds of time. Times for users are timestamps (`created_at`, `start_time`, `end_time`). Times for the control plane are
seconds of the database's clock since 1970 (`lease_until`, `not_before`), because no other clock may decide who owns an attempt.

No column stores how many GPUs are free: the view `vm` counts the rows of `reservations`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.functions import FunctionElement

from groupwise.api.schemas.fleet import UNPREPARED

Document = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
"""A JSON value; binary in PostgreSQL. None is NULL, never JSON's own null."""
Serial = BigInteger().with_variant(Integer(), "sqlite")
"""A number that the database assigns; SQLite does so only for columns of the exact type INTEGER."""


class Moment(TypeDecorator[datetime]):
    """A timestamp with its zone, for users. SQLite stores no zone, so it is stored as UTC there."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert for the database. A time without a zone is refused, since its meaning is unknown."""
        if value is None:
            return None
        assert value.tzinfo is not None, f"{value} has no time zone: datetime.now(UTC) has one"
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        """Read a value of SQLite that was written by hand and is not a time as None: the query goes on, and admission reports it."""
        processor: Any = super().result_processor(dialect, coltype)

        def readable(value: Any) -> datetime | None:
            try:
                return processor(value)
            except (ValueError, TypeError):
                return None

        return readable if dialect.name == "sqlite" else processor

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert from the database: times from SQLite get the zone UTC."""
        if value is None or value.tzinfo is not None:
            return value
        return value.replace(tzinfo=UTC)


class this_moment(FunctionElement[datetime]):
    """Now, by the database's clock; SQLite's CURRENT_TIMESTAMP has whole seconds only."""

    type = Moment()
    inherit_cache = True


@compiles(this_moment, "postgresql")
def _postgresql_moment(*_: Any, **__: Any) -> str:
    return "now()"


@compiles(this_moment, "sqlite")
def _sqlite_moment(*_: Any, **__: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


_NAMES = {
    "ix": "ix_%(column_0_N_label)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index of the few rows that are queried often; both databases support such partial indexes."""
    condition = text(where)
    return Index(name, *columns, unique=unique, postgresql_where=condition, sqlite_where=condition)


class Base(DeclarativeBase):
    """The base of all tables, with names of constraints that do not depend on the database."""

    metadata = MetaData(naming_convention=_NAMES)


class VM(Base):
    """A machine that runs jobs: one that is reached by SSH, or this one (`transport` local)."""

    __tablename__ = "vms"

    vm_id: Mapped[str] = mapped_column(Text, primary_key=True)
    ip_address: Mapped[str] = mapped_column(Text, server_default="127.0.0.1")
    port: Mapped[int] = mapped_column(Integer, server_default="22")
    user: Mapped[str | None] = mapped_column(Text)
    ssh_key_path: Mapped[str | None] = mapped_column(Text)
    """A file on the control machine; the key itself is never in the database."""
    transport: Mapped[str] = mapped_column(Text, server_default="ssh")
    """`ssh` or `local`."""
    jump: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """A jump host: host, port, user, ssh_key_path, host_key."""
    host_key: Mapped[str | None] = mapped_column(Text)
    """The pinned host key, as `ssh-ed25519 AAAA…`; without it nothing but the key itself is read from the machine."""
    seen_host_key: Mapped[str | None] = mapped_column(Text)
    """The host key that it showed last, if that is not the pinned one."""
    workdir: Mapped[str] = mapped_column(Text, server_default="groupwise-fleet")
    """Folder in which its runner keeps attempts, files and locks; relative to the home of `user`."""
    python: Mapped[str] = mapped_column(Text, server_default=UNPREPARED)
    """The interpreter of the environment that jobs run in; its folder comes first on their PATH."""
    labels: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    cpu_slots: Mapped[int | None] = mapped_column(Integer)
    """Number of jobs without GPUs that may run at once; NULL: 1."""
    projects: Mapped[list[str] | None] = mapped_column(Document)
    """Only jobs of these projects are placed there; NULL: jobs of any project."""
    deadman: Mapped[float | None] = mapped_column(Float)
    """Seconds without word from the control plane after which its runner ends a job; NULL: never."""
    probe: Mapped[list[str] | None] = mapped_column(Document)
    """The command that reads the GPUs, as an argument list; NULL: the vendors' tools."""
    idle_memory_mb: Mapped[int] = mapped_column(Integer, server_default="500")
    """An idle GPU may still show this much memory as used."""
    active: Mapped[bool] = mapped_column(Boolean, server_default=true())
    """False: it was removed; the row stays for the history."""
    draining: Mapped[bool] = mapped_column(Boolean, server_default=false())
    drain_reason: Mapped[str | None] = mapped_column(Text)
    """Why nothing new is placed there; NULL if it is not drained, or no reason was given."""
    lost_at: Mapped[float | None] = mapped_column(Float)
    """When an operator declared that it will not come back."""
    contact: Mapped[str] = mapped_column(Text, server_default="new")
    """new, ok, unreachable or untrusted."""
    unreachable_since: Mapped[float | None] = mapped_column(Float)
    misses: Mapped[int] = mapped_column(Integer, server_default="0")
    problem: Mapped[str | None] = mapped_column(Text)
    """The problem as a message: the last error, or the output of nvidia-smi."""
    degraded: Mapped[bool] = mapped_column(Boolean, server_default=false())
    """Its probe printed unreadable lines; no job is placed there."""
    boot_id: Mapped[str | None] = mapped_column(Text)
    facts: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    """Last facts from its runner: cpus, ram_mb, disk_free_mb, python, load …"""
    observed_round: Mapped[float] = mapped_column(Float, server_default="0")
    """When the stored observation was requested; an older one is dropped."""
    launch_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    """Refused launches in a row; at a limit the machine is drained."""
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=this_moment())
    last_polled: Mapped[datetime | None] = mapped_column(Moment)
    engine: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The engine that starts jobs instead, such as Slurm: an `EngineBody` (api/schemas/fleet.py) as JSON; NULL: the machine itself."""


class GPU(Base):
    """One GPU of a machine, and its last observation. Only reservations make it taken."""

    __tablename__ = "gpus"
    __table_args__ = (UniqueConstraint("vm_id", "uuid"),)

    gpu_id: Mapped[int] = mapped_column(Serial, primary_key=True)
    vm_id: Mapped[str] = mapped_column(ForeignKey("vms.vm_id"), index=True)
    index: Mapped[int] = mapped_column(Integer)
    uuid: Mapped[str] = mapped_column(Text, index=True)
    """UUID of the card, independent of the machine's name: two rows may be about the same card."""
    model: Mapped[str | None] = mapped_column(Text)
    memory_mb: Mapped[int | None] = mapped_column(Integer)
    observed: Mapped[str] = mapped_column(Text, server_default="ok")
    """ok, foreign_busy, missing, degraded or mig; anything but ok takes no new job."""
    detail: Mapped[str | None] = mapped_column(Text)
    memory_used_mb: Mapped[int | None] = mapped_column(Integer)
    utilisation: Mapped[int | None] = mapped_column(Integer)
    """Percent."""
    temperature: Mapped[int | None] = mapped_column(Integer)
    """Degrees Celsius."""
    quarantine_reason: Mapped[str | None] = mapped_column(Text)
    """The reason why no job gets it until an operator clears it."""
    fault_report: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The last report in a job's log that it is broken (no proof): job_id, epoch, at, message. NULL once an operator clears it."""
    observed_at: Mapped[float | None] = mapped_column(Float)


class GPUHistory(Base):
    """One row per minute and GPU, kept for a week."""

    __tablename__ = "gpu_history"

    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpus.gpu_id"), primary_key=True)
    minute: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    memory_used_mb: Mapped[int | None] = mapped_column(Integer)
    utilisation: Mapped[int | None] = mapped_column(Integer)
    temperature: Mapped[int | None] = mapped_column(Integer)


class Project(Base):
    """A project, to which jobs belong: a weight and quotas."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    weight: Mapped[float] = mapped_column(Float, server_default="1")
    max_gpus: Mapped[int | None] = mapped_column(Integer)
    """Maximum GPUs of its running jobs together."""
    max_waiting: Mapped[int | None] = mapped_column(Integer)
    """Maximum jobs that have not started."""


class Job(Base):
    """A job, as its submitter requested it, and its state."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("project", "idempotency_key"),
        _partial("ix_jobs_queue", "rank", "job_id", where="status = 'queued'"),
        # With the id: otherwise a database sorts the jobs of a shape when its statistics say that there are few.
        _partial("ix_jobs_shapes", "shape", "rank", "job_id", where="status = 'queued'"),
        _partial(
            "ix_jobs_waiting",
            "shape",
            "rank",
            "job_id",
            where="status = 'pending' AND blocked_on IS NULL",
        ),
        _partial(
            "ix_jobs_blocked_on",
            "blocked_on",
            where="status = 'pending' AND blocked_on IS NOT NULL",
        ),
        _partial(
            "ix_jobs_of_project",
            "project",
            "due",
            "rank",
            where="status IN ('queued', 'pending', 'held')",
        ),
        _partial("ix_jobs_patient", "waiting_since", where="status = 'queued'"),
        Index("ix_jobs_created", "created_at", "job_id", "status"),
        _partial("ix_jobs_new", "created_at", where="admitted_at IS NULL"),
    )

    job_id: Mapped[str] = mapped_column(Text, primary_key=True)
    job_type: Mapped[str] = mapped_column(Text, server_default="GRPO")
    """GRPO, SFT, EVAL, any kind that is registered, or COMMAND."""
    model: Mapped[str | None] = mapped_column(Text)
    dataset: Mapped[str | None] = mapped_column(Text)
    """An absolute path is a path on the machine, `org/name` a dataset on the Hugging Face hub."""
    reward_function: Mapped[str | None] = mapped_column(Text)
    """A registered name or module:function; several are separated by commas."""
    preprocessing_pipeline: Mapped[str] = mapped_column(Text, server_default="generic")
    hyperparams: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    """Further settings of the kind, by name."""
    use_unsloth: Mapped[bool] = mapped_column(Boolean, server_default=false())
    output_dir: Mapped[str] = mapped_column(Text, server_default="outputs")
    max_steps: Mapped[int] = mapped_column(Integer, server_default="500")
    learning_rate: Mapped[float] = mapped_column(Float, server_default="5e-6")
    batch_size: Mapped[int] = mapped_column(Integer, server_default="1")
    num_generations: Mapped[int] = mapped_column(Integer, server_default="4")
    priority: Mapped[int] = mapped_column(Integer, server_default="0")
    status: Mapped[str] = mapped_column(Text, server_default="queued")
    retry_count: Mapped[int] = mapped_column(Integer, server_default="0")
    """Attempts of this generation that followed a failure."""
    failure_reason: Mapped[str | None] = mapped_column(Text)
    assigned_vm: Mapped[str | None] = mapped_column(Text)
    """The machine of rank 0 of the newest attempt."""
    gpu_index: Mapped[int | None] = mapped_column(Integer)
    """Index of the first GPU of rank 0 of the newest attempt."""
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=this_moment())
    start_time: Mapped[datetime | None] = mapped_column(Moment)
    end_time: Mapped[datetime | None] = mapped_column(Moment)
    log_path: Mapped[str | None] = mapped_column(Text)
    """Log of the newest attempt, relative to the folder of the control machine; NULL before there is one."""

    project: Mapped[str] = mapped_column(Text, server_default="default")
    name: Mapped[str | None] = mapped_column(Text)
    submitted_by: Mapped[str | None] = mapped_column(Text)
    request: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    """The request beyond the columns: a `JobRequest` (request.py) as JSON."""
    spec: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The spec that admission made from the row: a `JobSpec` (jobs/hosts/spec.py) as JSON; the same for all attempts."""
    spec_hash: Mapped[str | None] = mapped_column(Text)
    resources: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """Admitted `Resources` (resources.py) as JSON."""
    shape: Mapped[str | None] = mapped_column(Text)
    """Hash of `resources` and project: jobs of one shape can run in the same places."""
    due: Mapped[float | None] = mapped_column(Float)
    """Its place in its project, lowest first: its creation in seconds since 1970, less an hour for each step of priority."""
    rank: Mapped[float | None] = mapped_column(Float)
    """Its place in the queue, lowest first: `due`, or the time when those before it in its project have had their turns."""
    admitted_at: Mapped[float | None] = mapped_column(Float)
    not_before: Mapped[float] = mapped_column(Float, server_default="0")
    waiting_since: Mapped[float | None] = mapped_column(Float)
    """Time since when it could have started, had there been room; NULL while it runs."""
    generation: Mapped[int] = mapped_column(Integer, server_default="0")
    """Number of times that `retry` has started it again."""
    spent: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    """Failures of this generation by class, and `charged`: the counters for the retry budgets."""
    blocked_reasons: Mapped[list[str] | None] = mapped_column(Document)
    blocked_on: Mapped[str | None] = mapped_column(Text)
    """The job that it waits for; NULL if it waits for room."""
    cancel_requested_at: Mapped[float | None] = mapped_column(Float)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    request_hash: Mapped[str | None] = mapped_column(Text)
    """Hash of the request that came with the idempotency key: the same key with another request is refused."""


class Attempt(Base):
    """One execution of a job. Its epoch is higher than that of every attempt before it."""

    __tablename__ = "attempts"
    __table_args__ = (
        _partial("uq_attempts_live", "job_id", where="state <> 'ended'", unique=True),
        _partial("ix_attempts_open", "lease_until", where="state <> 'ended' OR cleanup <> 'clean'"),
        {"sqlite_autoincrement": True},
    )

    epoch: Mapped[int] = mapped_column(Serial, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), index=True)
    generation: Mapped[int] = mapped_column(Integer)
    number: Mapped[int] = mapped_column(Integer)
    """Number within its generation, from 0."""
    state: Mapped[str] = mapped_column(Text, server_default="reserved")
    outcome: Mapped[str | None] = mapped_column(Text)
    failure_class: Mapped[str | None] = mapped_column(Text)
    charged: Mapped[bool | None] = mapped_column(Boolean)
    evidence: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    """The evidence for its end: exit record, boot ids, last lines, and their sources."""
    owner: Mapped[str | None] = mapped_column(Text)
    lease_until: Mapped[float] = mapped_column(Float, server_default="0")
    contact: Mapped[str] = mapped_column(Text, server_default="ok")
    unreachable_since: Mapped[float | None] = mapped_column(Float)
    cleanup: Mapped[str] = mapped_column(Text, server_default="pending")
    resume_from: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The mirrored checkpoint from which it resumes: step and manifest."""
    previous_failure: Mapped[str | None] = mapped_column(Text)
    spec: Mapped[dict[str, Any] | None] = mapped_column(Document)
    """The spec if it differs from the job's: a smaller batch after the GPU ran out of memory."""
    created_at: Mapped[float] = mapped_column(Float)
    running_at: Mapped[float | None] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    """When the control plane recorded its end, which may be long after it if the control plane was down."""

    @property
    def command_ended_at(self) -> float | None:
        """When its command ended, by the seconds that its machines counted; `ended_at` if they did not, or not all of them."""
        members: list[dict[str, Any]] = self.evidence.get("members") or []
        exits: list[dict[str, Any]] = [member.get("exit") or {} for member in members]
        seconds = [each["seconds"] for each in exits if each.get("seconds") is not None]
        if self.ended_at is None or self.running_at is None or not 0 < len(seconds) == len(members):
            return self.ended_at
        return min(self.ended_at, self.running_at + max(seconds))


class Member(Base):
    """The part of an attempt that runs on one machine; a gang has several, rank 0 leads."""

    __tablename__ = "attempt_members"
    __table_args__ = (_partial("ix_members_unshipped", "epoch", where="log_shipped < log_offset"),)

    epoch: Mapped[int] = mapped_column(ForeignKey("attempts.epoch"), primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    vm_id: Mapped[str] = mapped_column(ForeignKey("vms.vm_id"), index=True)
    state: Mapped[str | None] = mapped_column(Text)
    """The last `MemberState` from its runner; NULL if no request was ever sent."""
    handle: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))
    """pid, start ticks, boot id and how it was started, as its runner reported."""
    log_offset: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Bytes of its log that are on the control machine's disk."""
    log_shipped: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Bytes of the log that were shipped to a log collector, if there is one."""
    released: Mapped[bool] = mapped_column(Boolean, server_default=false())
    """Its machine was seen to hold nothing of it any more."""


class Reservation(Base):
    """A GPU, a part of one, or a CPU slot that an attempt holds until `released_at`."""

    __tablename__ = "reservations"
    __table_args__ = (
        _partial(
            "uq_reservations_gpu",
            "gpu_id",
            where="released_at IS NULL AND share_mb IS NULL",
            unique=True,
        ),
        _partial(
            "uq_reservations_slot",
            "vm_id",
            "slot",
            where="released_at IS NULL AND gpu_id IS NULL",
            unique=True,
        ),
        _partial("ix_reservations_open", "vm_id", where="released_at IS NULL"),
    )

    reservation_id: Mapped[int] = mapped_column(Serial, primary_key=True)
    vm_id: Mapped[str] = mapped_column(ForeignKey("vms.vm_id"))
    gpu_id: Mapped[int | None] = mapped_column(ForeignKey("gpus.gpu_id"))
    slot: Mapped[int | None] = mapped_column(Integer)
    """The CPU slot, if no GPU is held."""
    share_mb: Mapped[int | None] = mapped_column(Integer)
    """Memory of the GPU that is held; NULL: all of it."""
    epoch: Mapped[int] = mapped_column(ForeignKey("attempts.epoch"), index=True)
    rank: Mapped[int] = mapped_column(Integer)
    reserved_at: Mapped[float] = mapped_column(Float)
    released_at: Mapped[float | None] = mapped_column(Float)


class Checkpoint(Base):
    """A complete checkpoint of a job that is stored on the control machine."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        _partial("ix_checkpoints_damaged", "damaged_at", where="damaged_at IS NOT NULL"),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    path: Mapped[str] = mapped_column(Text, primary_key=True)
    """Path of the checkpoint's folder, relative to the attempt's work folder."""
    step: Mapped[int] = mapped_column(BigInteger)
    manifest: Mapped[dict[str, Any]] = mapped_column(Document)
    """Path → sha256, mode and size: blobs of the control machine's store."""
    mirrored_at: Mapped[float] = mapped_column(Float)
    damaged_at: Mapped[float | None] = mapped_column(Float)
    """When an attempt could not resume from it because some of its blobs are lost. No other attempt tries to, unless the job is retried."""


NEWEST_FIRST = (Checkpoint.epoch.desc(), Checkpoint.step.desc(), Checkpoint.path.desc())
"""The one order of a job's checkpoints, used to resume attempts, to keep rows and to list them: first those of the newest attempt that has
left any, and of these the one with the most steps.

Attempts resume from the newest, so steps grow from each epoch to the next, also if `retry` started a new generation. If they do not grow,
the job has decided to start over; then its newer checkpoints count, although the older ones were further.
"""


class BlobRight(Base):
    """A project that may name a blob; see `rights.py`."""

    __tablename__ = "blob_rights"

    sha256: Mapped[str] = mapped_column(Text, primary_key=True)
    project: Mapped[str] = mapped_column(Text, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    """When it was recorded last."""


class Event(Base):
    """An event: appended in the transaction that caused it, never changed."""

    __tablename__ = "events"
    __table_args__ = ({"sqlite_autoincrement": True},)

    event_id: Mapped[int] = mapped_column(Serial, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    actor: Mapped[str] = mapped_column(Text)
    """Actor: `dispatcher:<owner>`, `key:<id>`, `user:<name>`, `poller` …"""
    kind: Mapped[str] = mapped_column(Text)
    """Kind: `job.queued`, `attempt.running`, `vm.lost`, `gpu.quarantined` …"""
    job_id: Mapped[str | None] = mapped_column(Text, index=True)
    epoch: Mapped[int | None] = mapped_column(BigInteger)
    vm_id: Mapped[str | None] = mapped_column(Text, index=True)
    before: Mapped[dict[str, Any] | None] = mapped_column(Document)
    after: Mapped[dict[str, Any] | None] = mapped_column(Document)
    detail: Mapped[dict[str, Any] | None] = mapped_column(Document)


class Cursor(Base):
    """The position up to which a reader of events has read: the tracker, webhooks."""

    __tablename__ = "cursors"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    position: Mapped[int] = mapped_column(BigInteger, server_default="0")


class ControlProcess(Base):
    """A dispatcher, poller, requeue manager or tracker that is alive, or was."""

    __tablename__ = "control_processes"

    owner: Mapped[str] = mapped_column(Text, primary_key=True)
    role: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    started_at: Mapped[float] = mapped_column(Float)
    seen_at: Mapped[float] = mapped_column(Float)
    facts: Mapped[dict[str, Any]] = mapped_column(Document, server_default=text("'{}'"))


class ApiKey(Base):
    """A key of the HTTP API, by its hash."""

    __tablename__ = "api_keys"

    key_id: Mapped[str] = mapped_column(Text, primary_key=True)
    role: Mapped[str] = mapped_column(Text)
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    projects: Mapped[list[str] | None] = mapped_column(Document)
    """NULL: all projects."""
    note: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float | None] = mapped_column(Float)
    revoked_at: Mapped[float | None] = mapped_column(Float)
