"""The tables of the first version."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime(timezone=True)
NOW = {"postgresql": "now()", "sqlite": "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"}


def _where(condition: str) -> dict[str, Any]:
    return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}


def upgrade() -> None:
    """Create all tables in an empty database."""
    now = sa.text(NOW[op.get_context().dialect.name])
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("projects", DOCUMENT, nullable=True),
        sa.Column("note", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    op.create_table(
        "blob_rights",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "project", name="pk_blob_rights"),
    )
    op.create_table(
        "control_processes",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("facts", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_control_processes"),
    )
    op.create_table(
        "cursors",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_cursors"),
    )
    op.create_table(
        "events",
        sa.Column("event_id", SERIAL, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=True),
        sa.Column("vm_id", sa.Text(), nullable=True),
        sa.Column("before", DOCUMENT, nullable=True),
        sa.Column("after", DOCUMENT, nullable=True),
        sa.Column("detail", DOCUMENT, nullable=True),
        sa.PrimaryKeyConstraint("event_id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_id", "events", ["job_id"])
    op.create_index("ix_events_vm_id", "events", ["vm_id"])
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("job_type", sa.Text(), server_default="GRPO", nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("dataset", sa.Text(), nullable=True),
        sa.Column("reward_function", sa.Text(), nullable=True),
        sa.Column("preprocessing_pipeline", sa.Text(), server_default="generic", nullable=False),
        sa.Column("hyperparams", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("use_unsloth", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("output_dir", sa.Text(), server_default="outputs", nullable=False),
        sa.Column("max_steps", sa.Integer(), server_default="500", nullable=False),
        sa.Column("learning_rate", sa.Float(), server_default="5e-6", nullable=False),
        sa.Column("batch_size", sa.Integer(), server_default="1", nullable=False),
        sa.Column("num_generations", sa.Integer(), server_default="4", nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("status", sa.Text(), server_default="queued", nullable=False),
        sa.Column("retry_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("assigned_vm", sa.Text(), nullable=True),
        sa.Column("gpu_index", sa.Integer(), nullable=True),
        sa.Column("created_at", MOMENT, server_default=now, nullable=False),
        sa.Column("start_time", MOMENT, nullable=True),
        sa.Column("end_time", MOMENT, nullable=True),
        sa.Column("log_path", sa.Text(), nullable=True),
        sa.Column("project", sa.Text(), server_default="default", nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("submitted_by", sa.Text(), nullable=True),
        sa.Column("request", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("spec", DOCUMENT, nullable=True),
        sa.Column("spec_hash", sa.Text(), nullable=True),
        sa.Column("resources", DOCUMENT, nullable=True),
        sa.Column("shape", sa.Text(), nullable=True),
        sa.Column("due", sa.Float(), nullable=True),
        sa.Column("rank", sa.Float(), nullable=True),
        sa.Column("admitted_at", sa.Float(), nullable=True),
        sa.Column("not_before", sa.Float(), server_default="0", nullable=False),
        sa.Column("waiting_since", sa.Float(), nullable=True),
        sa.Column("generation", sa.Integer(), server_default="0", nullable=False),
        sa.Column("spent", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("blocked_reasons", DOCUMENT, nullable=True),
        sa.Column("blocked_on", sa.Text(), nullable=True),
        sa.Column("cancel_requested_at", sa.Float(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_hash", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name="pk_jobs"),
        sa.UniqueConstraint("project", "idempotency_key", name="uq_jobs_project_idempotency_key"),
    )
    op.create_index(
        "ix_jobs_blocked_on",
        "jobs",
        ["blocked_on"],
        **_where("status = 'pending' AND blocked_on IS NOT NULL"),
    )
    op.create_index("ix_jobs_created", "jobs", ["created_at", "job_id", "status"])
    op.create_index("ix_jobs_new", "jobs", ["created_at"], **_where("admitted_at IS NULL"))
    op.create_index(
        "ix_jobs_of_project",
        "jobs",
        ["project", "due", "rank"],
        **_where("status IN ('queued', 'pending', 'held')"),
    )
    op.create_index("ix_jobs_patient", "jobs", ["waiting_since"], **_where("status = 'queued'"))
    op.create_index("ix_jobs_queue", "jobs", ["rank", "job_id"], **_where("status = 'queued'"))
    op.create_index(
        "ix_jobs_shapes", "jobs", ["shape", "rank", "job_id"], **_where("status = 'queued'")
    )
    op.create_index(
        "ix_jobs_waiting",
        "jobs",
        ["shape", "rank", "job_id"],
        **_where("status = 'pending' AND blocked_on IS NULL"),
    )
    op.create_table(
        "projects",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weight", sa.Float(), server_default="1", nullable=False),
        sa.Column("max_gpus", sa.Integer(), nullable=True),
        sa.Column("max_waiting", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_projects"),
    )
    op.create_table(
        "vms",
        sa.Column("vm_id", sa.Text(), nullable=False),
        sa.Column("ip_address", sa.Text(), server_default="127.0.0.1", nullable=False),
        sa.Column("port", sa.Integer(), server_default="22", nullable=False),
        sa.Column("user", sa.Text(), nullable=True),
        sa.Column("ssh_key_path", sa.Text(), nullable=True),
        sa.Column("transport", sa.Text(), server_default="ssh", nullable=False),
        sa.Column("jump", DOCUMENT, nullable=True),
        sa.Column("host_key", sa.Text(), nullable=True),
        sa.Column("seen_host_key", sa.Text(), nullable=True),
        sa.Column("workdir", sa.Text(), server_default="groupwise-fleet", nullable=False),
        sa.Column("python", sa.Text(), server_default="python3", nullable=False),
        sa.Column("labels", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("cpu_slots", sa.Integer(), nullable=True),
        sa.Column("projects", DOCUMENT, nullable=True),
        sa.Column("deadman", sa.Float(), nullable=True),
        sa.Column("probe", DOCUMENT, nullable=True),
        sa.Column("idle_memory_mb", sa.Integer(), server_default="500", nullable=False),
        sa.Column("active", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("cordoned", sa.Text(), nullable=True),
        sa.Column("lost_at", sa.Float(), nullable=True),
        sa.Column("contact", sa.Text(), server_default="new", nullable=False),
        sa.Column("unreachable_since", sa.Float(), nullable=True),
        sa.Column("misses", sa.Integer(), server_default="0", nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("degraded", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("facts", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("observed_round", sa.Float(), server_default="0", nullable=False),
        sa.Column("launch_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", MOMENT, server_default=now, nullable=False),
        sa.Column("last_polled", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("vm_id", name="pk_vms"),
    )
    op.create_table(
        "attempts",
        sa.Column("epoch", SERIAL, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="reserved", nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("failure_class", sa.Text(), nullable=True),
        sa.Column("charged", sa.Boolean(), nullable=True),
        sa.Column("evidence", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Float(), server_default="0", nullable=False),
        sa.Column("contact", sa.Text(), server_default="ok", nullable=False),
        sa.Column("unreachable_since", sa.Float(), nullable=True),
        sa.Column("cleanup", sa.Text(), server_default="pending", nullable=False),
        sa.Column("resume_from", DOCUMENT, nullable=True),
        sa.Column("previous_failure", sa.Text(), nullable=True),
        sa.Column("spec", DOCUMENT, nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("running_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_attempts_job_id"),
        sa.PrimaryKeyConstraint("epoch", name="pk_attempts"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_attempts_job_id", "attempts", ["job_id"])
    op.create_index(
        "ix_attempts_open",
        "attempts",
        ["lease_until"],
        **_where("state <> 'ended' OR cleanup <> 'clean'"),
    )
    op.create_index(
        "uq_attempts_live", "attempts", ["job_id"], unique=True, **_where("state <> 'ended'")
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("manifest", DOCUMENT, nullable=False),
        sa.Column("mirrored_at", sa.Float(), nullable=False),
        sa.Column("damaged_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_checkpoints_job_id"),
        sa.PrimaryKeyConstraint("job_id", "generation", "epoch", "path", name="pk_checkpoints"),
    )
    op.create_index(
        "ix_checkpoints_damaged", "checkpoints", ["damaged_at"], **_where("damaged_at IS NOT NULL")
    )
    op.create_table(
        "gpus",
        sa.Column("gpu_id", SERIAL, nullable=False),
        sa.Column("vm_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("memory_mb", sa.Integer(), nullable=True),
        sa.Column("observed", sa.Text(), server_default="ok", nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("memory_used_mb", sa.Integer(), nullable=True),
        sa.Column("utilisation", sa.Integer(), nullable=True),
        sa.Column("temperature", sa.Integer(), nullable=True),
        sa.Column("quarantined", sa.Text(), nullable=True),
        sa.Column("accused", DOCUMENT, nullable=True),
        sa.Column("observed_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["vm_id"], ["vms.vm_id"], name="fk_gpus_vm_id"),
        sa.PrimaryKeyConstraint("gpu_id", name="pk_gpus"),
        sa.UniqueConstraint("vm_id", "uuid", name="uq_gpus_vm_id_uuid"),
    )
    op.create_index("ix_gpus_uuid", "gpus", ["uuid"])
    op.create_index("ix_gpus_vm_id", "gpus", ["vm_id"])
    op.create_table(
        "attempt_members",
        sa.Column("epoch", SERIAL, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("vm_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=True),
        sa.Column("handle", DOCUMENT, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("log_offset", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("log_shipped", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("released", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.ForeignKeyConstraint(["epoch"], ["attempts.epoch"], name="fk_attempt_members_epoch"),
        sa.ForeignKeyConstraint(["vm_id"], ["vms.vm_id"], name="fk_attempt_members_vm_id"),
        sa.PrimaryKeyConstraint("epoch", "rank", name="pk_attempt_members"),
    )
    op.create_index("ix_attempt_members_vm_id", "attempt_members", ["vm_id"])
    op.create_index(
        "ix_members_unshipped", "attempt_members", ["epoch"], **_where("log_shipped < log_offset")
    )
    op.create_table(
        "gpu_history",
        sa.Column("gpu_id", SERIAL, nullable=False),
        sa.Column("minute", sa.BigInteger(), nullable=False),
        sa.Column("memory_used_mb", sa.Integer(), nullable=True),
        sa.Column("utilisation", sa.Integer(), nullable=True),
        sa.Column("temperature", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpus.gpu_id"], name="fk_gpu_history_gpu_id"),
        sa.PrimaryKeyConstraint("gpu_id", "minute", name="pk_gpu_history"),
    )
    op.create_table(
        "reservations",
        sa.Column("reservation_id", SERIAL, nullable=False),
        sa.Column("vm_id", sa.Text(), nullable=False),
        sa.Column("gpu_id", SERIAL, nullable=True),
        sa.Column("slot", sa.Integer(), nullable=True),
        sa.Column("share_mb", sa.Integer(), nullable=True),
        sa.Column("epoch", SERIAL, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("reserved_at", sa.Float(), nullable=False),
        sa.Column("released_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["epoch"], ["attempts.epoch"], name="fk_reservations_epoch"),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpus.gpu_id"], name="fk_reservations_gpu_id"),
        sa.ForeignKeyConstraint(["vm_id"], ["vms.vm_id"], name="fk_reservations_vm_id"),
        sa.PrimaryKeyConstraint("reservation_id", name="pk_reservations"),
    )
    op.create_index("ix_reservations_epoch", "reservations", ["epoch"])
    op.create_index(
        "ix_reservations_open", "reservations", ["vm_id"], **_where("released_at IS NULL")
    )
    op.create_index(
        "uq_reservations_gpu",
        "reservations",
        ["gpu_id"],
        unique=True,
        **_where("released_at IS NULL AND share_mb IS NULL"),
    )
    op.create_index(
        "uq_reservations_slot",
        "reservations",
        ["vm_id", "slot"],
        unique=True,
        **_where("released_at IS NULL AND gpu_id IS NULL"),
    )
