"""Machines behind which an engine begins jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    """Add the column for engines. Machines that exist already have none: they begin jobs themselves."""
    op.add_column("vms", sa.Column("engine", DOCUMENT, nullable=True))
