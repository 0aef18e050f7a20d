"""The full-text index of prompts and completions, beside the tables of a record.

It is made if SQLite has FTS5, and made again from the tables whenever it may be stale. Without FTS5 there is none: search then reads every
text.
Of each text it has the words, and the signs that are looked up one by one (`search_terms.py`); the texts themselves stand in the tables
alone.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from groupwise.core import atomic_files
from groupwise.runs.schema import SIGNS_SINCE, TEXT_INDEX_SINCE
from groupwise.runs.search_terms import signs_of, words_of
from groupwise.runs.sqlite_file import version

COLUMNS = "words, signs"
TEXTS = {
    "prompt_index": "draw, words_of(prompt), signs_of(prompt) FROM prompts",
    "completion_index": "id, words_of(completion), signs_of(completion) FROM rollouts",
}
"""The texts that each index is made of: row id and `COLUMNS`."""
CURRENT = "current, signs 1"
"""The version that a record notes with its index: its tables hold all of it, and `search_terms.py` made the terms.

A record with another number is indexed again."""
WORDS_ALONE = "current"
"""The same of a format that had no signs."""
Execute = Callable[[str, tuple[Any, ...]], object]
"""Runs a statement with its values."""


def is_usable(connection: sqlite3.Connection) -> bool:
    """True if there is an index that this SQLite can use, and that covers all of the tables."""
    format = version(connection)
    wanted = CURRENT if format >= SIGNS_SINCE else WORDS_ALONE
    return _fts5(connection) and format >= TEXT_INDEX_SINCE and _state(connection) == wanted


def prepare(connection: sqlite3.Connection, force: bool = False) -> None:
    """Have a writer keep it: make it where it is missing, or stale because a SQLite without FTS5 wrote since."""
    for function in (words_of, signs_of):
        connection.create_function(function.__name__, 1, function, deterministic=True)
    wanted = CURRENT if _fts5(connection) else "stale"
    if _state(connection) == wanted and not force:
        return
    connection.execute("BEGIN IMMEDIATE")
    if wanted == CURRENT:
        for index in TEXTS:
            connection.execute(f"DROP TABLE IF EXISTS {index}")  # of an older format, maybe
            connection.execute(f"CREATE VIRTUAL TABLE {index} USING fts5 ({COLUMNS}, content='')")
        add(connection.execute, "TRUE")
    connection.execute(
        "INSERT OR REPLACE INTO meta (key, value) VALUES ('text_index', ?)", (json.dumps(wanted),)
    )
    atomic_files.commit(connection, "text index")


def add(execute: Execute, condition: str, values: tuple[Any, ...] = ()) -> None:
    """Have it find the texts of the groups whose draws meet a condition, within a transaction."""
    for index, texts in TEXTS.items():
        execute(f"INSERT INTO {index} (rowid, {COLUMNS}) SELECT {texts} WHERE {condition}", values)


def remove(execute: Execute, condition: str, values: tuple[Any, ...]) -> None:
    """Remove these texts from the index. They must still stand in the tables, because FTS5 needs their content once more for that."""
    for index, texts in TEXTS.items():
        execute(
            f"INSERT INTO {index} ({index}, rowid, {COLUMNS}) SELECT 'delete', {texts} WHERE {condition}",
            values,
        )


def _fts5(connection: sqlite3.Connection) -> bool:
    return bool(
        connection.execute(
            "SELECT count(*) FROM pragma_module_list WHERE name = 'fts5'"
        ).fetchone()[0]
    )


def _state(connection: sqlite3.Connection) -> str | None:
    state = connection.execute("SELECT value FROM meta WHERE key = 'text_index'").fetchone()
    return None if state is None else json.loads(state[0])
