"""The full-text index of prompts and completions in a run's record, and the meaning of a text search.

A search is a case-insensitive substring match: all of its words and quoted phrases must occur in the text, also inside words (AND).
It works the same in every script, and for signs such as `+=`.

The index is FTS5's trigram index: for every three adjacent characters, the texts that contain them. It only pre-filters; the remaining
texts are matched exactly. Words of one or two characters have no trigram, and without FTS5 there is no index: then every text is read.
The index is rebuilt from the tables whenever it may be out of date. It stores neither texts (`content=''`: they are in the tables) nor
positions (`detail=none`), which would make it five times as large.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.core import atomic_files

INDEX_SOURCES = {
    "prompt_index": "draw, indexed(prompt) FROM prompts",
    "completion_index": "id, indexed(completion) FROM rollouts",
}
"""The SQL that selects the row ids and texts of each index."""
INDEX_VERSION = "current, trigrams 1"
"""Version of the index, stored in the record's `meta` table if the index covers all rows and this version of the module built it.

A record with another value is indexed again by the next writer that opens it."""
MAX_TRIGRAMS = 50
"""The most trigrams that a search looks up. 50 already match very few texts; more would only slow the query."""
Execute = Callable[[str, tuple[Any, ...]], object]
"""Runs a statement with its values."""

_TERM = re.compile(r'"([^"]*)"|(\S+)')


def terms_of(words: str) -> list[str]:
    """The words and quoted phrases that a text must contain, in lower case."""
    terms = [quoted or word.strip('"') or word for quoted, word in _TERM.findall(words)]
    return [term.lower() for term in terms if term]


def trigram_query(terms: Sequence[str]) -> str:
    """FTS5 MATCH expression that every matching text satisfies (necessary, not sufficient); empty if no term has three characters."""
    trigrams: dict[str, None] = {}
    for term in map(_indexed_text, terms):
        last_start = len(term) - 3
        if last_start >= 0:  # adjacent trigrams and the last one: overlapping ones would add little
            trigrams |= dict.fromkeys(
                term[start : start + 3] for start in (*range(0, last_start, 3), last_start)
            )
    quoted = ('"{}"'.format(trigram.replace('"', '""')) for trigram in [*trigrams][:MAX_TRIGRAMS])
    return " AND ".join(quoted)


def sql_lower(text: Any) -> Any:
    """Lower case for letters of all scripts. An SQL function, so it also receives bytes and NULL; SQLite's own `lower` is ASCII only."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return text.lower() if isinstance(text, str) else text


def _indexed_text(text: str | bytes) -> str:
    """The text as it is indexed. FTS5 stops reading at the first NUL, so NULs are replaced."""
    return sql_lower(text).replace("\0", " ")


def is_usable(connection: sqlite3.Connection) -> bool:
    """True if this SQLite can use the index and the index covers all rows."""
    return _has_trigrams(connection) and _stored_version(connection) == INDEX_VERSION


def prepare(connection: sqlite3.Connection, force: bool = False) -> None:
    """Create or rebuild the index if it is missing or out of date, e.g. because a SQLite without FTS5 wrote to the record."""
    connection.create_function("indexed", 1, _indexed_text, deterministic=True)
    target_version = INDEX_VERSION if _has_trigrams(connection) else "stale"
    if _stored_version(connection) == target_version and not force:
        return
    connection.execute("BEGIN IMMEDIATE")
    if target_version == INDEX_VERSION:
        for index in INDEX_SOURCES:
            connection.execute(f"DROP TABLE IF EXISTS {index}")  # it may exist in an older format
            connection.execute(
                f"CREATE VIRTUAL TABLE {index} USING fts5"
                " (text, content='', columnsize=0, detail=none, tokenize='trigram case_sensitive 1')"
            )
        add(connection.execute, "TRUE")
    connection.execute(
        "INSERT OR REPLACE INTO meta (key, value) VALUES ('text_index', ?)",
        (json.dumps(target_version),),
    )
    atomic_files.commit(connection, "text index")


def add(execute: Execute, condition: str, values: tuple[Any, ...] = ()) -> None:
    """Index the prompts and completions of the groups that match the condition. Call inside a transaction."""
    for index, texts in INDEX_SOURCES.items():
        execute(f"INSERT INTO {index} (rowid, text) SELECT {texts} WHERE {condition}", values)


def remove(execute: Execute, condition: str, values: tuple[Any, ...]) -> None:
    """Remove these texts from the index. Call it before deleting the rows: FTS5 needs the text again to remove its trigrams."""
    for index, texts in INDEX_SOURCES.items():
        execute(
            f"INSERT INTO {index} ({index}, rowid, text) SELECT 'delete', {texts} WHERE {condition}",
            values,
        )


def _has_trigrams(connection: sqlite3.Connection) -> bool:
    modules = connection.execute("SELECT count(*) FROM pragma_module_list WHERE name = 'fts5'")
    return sqlite3.sqlite_version_info >= (3, 34) and bool(modules.fetchone()[0])


def _stored_version(connection: sqlite3.Connection) -> str | None:
    state = connection.execute("SELECT value FROM meta WHERE key = 'text_index'").fetchone()
    return None if state is None else json.loads(state[0])
