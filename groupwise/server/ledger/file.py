"""The file `server.db`: opens it, brings its tables up to date, and explains errors of the disk or of SQLite.

Only one process has it open for writing: the HTTP side. Others may read it at the same time.

Its tables are a list of migrations that only go forward: the sections of `schema.sql`. `PRAGMA user_version` counts the migrations
applied to a file. A change of the schema is a new section at the end of the file; a released section is never edited. A change of
`group_states.TABLE` needs a new section, too: it drops the trigger `group_moves` and creates it again. SQLite itself enforces the
invariants, so that no code path can break them: a group only moves along the table of states, its rewards are written once, a draw has
one living group, a step of a run has one living plan, one run is active.

Conventions: times are seconds since 1970, leases are seconds of the server's uptime, steps are indices starting at 0. The sampling record
of a group (tokens, log-probabilities, seeds) is stored in `records`, separate from `groups`, because SQLite rewrites a whole row whenever
one column changes.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from groupwise.core.errors import StoreError
from groupwise.runs.sqlite_file import FREE_SPACE, Format, connect_writer, is_full, remedy
from groupwise.server.ledger.group_states import (
    FREE,
    IN_A_PLAN,
    TABLE,
    WITHOUT_REWARDS,
    sql_list,
    transitions,
)

APPLICATION_ID = 0x47525053
"""Marks the file as the ledger of a training server (`GRPS`)."""

_SCRIPT = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
_, _first, *_later = re.split(r"-- migration \d+\n", _SCRIPT)
_first = _first.format(
    states=sql_list(tuple(TABLE)),
    moves=", ".join(f"('{old}', '{new}')" for old, new in transitions()),
    without_rewards=sql_list(WITHOUT_REWARDS),
    perhaps_without_rewards=sql_list((*WITHOUT_REWARDS, "given_up")),
    in_a_plan=sql_list(IN_A_PLAN),
    free=sql_list(FREE),
)
MIGRATIONS: tuple[str, ...] = (_first, *_later)

FORMAT = Format(
    "the ledger of a training server",
    APPLICATION_ID,
    MIGRATIONS,
    if_another="Choose another --output-dir.",
)
BUSY_SECONDS = 5.0
"""How long a commit waits for another connection's lock (e.g. a manual copy). Clients wait as well, so it is short."""


class DiskFull(StoreError):
    """Nothing was stored, because the disk is full. Acknowledged data is safe, and writing continues once there is room."""

    code = "disk_full"


class LedgerClosed(StoreError):
    """The server is shutting down and has closed its ledger: nothing more is read or stored. The next server answers the same request."""

    code = "shutting_down"


def open_file(path: Path) -> sqlite3.Connection:
    """Open or create the ledger; the connection starts no transactions by itself. StoreError if it cannot be used."""
    with explaining_sqlite(path):
        return connect_writer(path, FORMAT, "server migration", BUSY_SECONDS)


@contextmanager
def explaining_sqlite(path: Path) -> Generator[None, None, None]:
    """Convert errors of SQLite into a StoreError with a remedy."""
    try:
        yield
    except sqlite3.Error as error:
        raise explanation(path, error) from error


def explanation(path: Path, error: sqlite3.Error) -> StoreError:
    """The error as a DiskFull or other StoreError, with the cause and remedy for the operator."""
    if is_full(path, error):
        return DiskFull(
            f"cannot write the server's ledger {path}: {error}. {FREE_SPACE}; writing continues by itself, and acknowledged data stands."
        )
    return StoreError(f"cannot use the server's ledger {path}: {error}. {remedy(path, error)}.")
