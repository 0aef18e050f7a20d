"""Columns and facts are named as commands and documents name them: drain, quarantine, report, untracked."""

from __future__ import annotations

from typing import Any, cast

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"

DOCUMENT = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)


def upgrade() -> None:
    """Rename columns, and names in the JSON of two of them; all values stay. Smaller weights and quotas had the effect of the least."""
    op.execute("ALTER TABLE vms RENAME COLUMN cordoned TO drain_reason")
    op.execute("ALTER TABLE gpus RENAME COLUMN quarantined TO quarantine_reason")
    op.execute("ALTER TABLE gpus RENAME COLUMN accused TO fault_report")
    for column, least in (("weight", "0.001"), ("max_gpus", "0"), ("max_waiting", "0")):
        op.execute(f"UPDATE projects SET {column} = {least} WHERE {column} < {least}")
    _rename_name("vms", "vm_id", "facts", "quarantined", "untracked")
    _rename_name("gpus", "gpu_id", "fault_report", "said", "message")


def _rename_name(table: str, key: str, column: str, old: str, new: str) -> None:
    rows = sa.table(table, sa.column(key), sa.column(column, DOCUMENT))
    row_id, document = rows.c[key], rows.c[column]
    connection = op.get_bind()
    for row_key, value in connection.execute(sa.select(row_id, document)).all():
        if isinstance(value, dict) and old in value:
            renamed = cast("dict[str, Any]", value)
            renamed[new] = renamed.pop(old)
            connection.execute(rows.update().where(row_id == row_key).values({column: renamed}))
