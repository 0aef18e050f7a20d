"""Alembic runs this to bring a database up to date; `schema.py` calls it with an open transaction, so that all of it happens or nothing.

There is no `alembic.ini`, and revisions are written by hand: `versions/0002_….py` with `upgrade()`, once 0001 has been released. Tests say
whether they lead to the tables of the code.
"""

from __future__ import annotations

from alembic import context

from groupwise.jobs.fleet.store.schema import VERSION_TABLE
from groupwise.jobs.fleet.store.tables import Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
