"""The tables of the first version: the statements stand in `0001_first.sqlite.sql` and `0001_first.postgresql.sql`."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables in an empty database."""
    connection = op.get_bind()
    script = Path(__file__).with_suffix(f".{connection.dialect.name}.sql")
    for statement in script.read_text(encoding="utf-8").split(";\n"):
        if statement.strip():
            connection.exec_driver_sql(statement)
