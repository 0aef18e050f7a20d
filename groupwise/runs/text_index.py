"""The full-text index of prompts and completions, beside the tables of a record, and what a search for text means.

A search asks for all of its words, and its phrases in quotes, wherever they stand in a text, also within words; capitals are the same as
small letters. So it means the same in every script, and for signs such as `+=`.

The index is FTS5's of trigrams: for every three neighbouring characters, the texts that have them. It narrows what is read, and the texts
that are left decide. Words of one or two characters have no trigram, and without FTS5 there is no index: then every text is read. The
index is made again from the tables whenever it may be stale. It keeps no texts, which stand in the tables alone, and no places in them,
which would make it five times as large.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.core import atomic_files

TEXTS = {
    "prompt_index": "draw, indexed(prompt) FROM prompts",
    "completion_index": "id, indexed(completion) FROM rollouts",
}
"""Row id and text for each index."""
CURRENT = "current, trigrams 1"
"""The version that a record notes with its index: its tables hold all of it, and this module made it.

A record with another one is indexed again when it is next written to."""
MOST_TRIGRAMS = 50
"""Trigrams that a search asks for; those of a long phrase are soon in few texts."""
Execute = Callable[[str, tuple[Any, ...]], object]
"""Runs a statement with its values."""

_TERM = re.compile(r'"([^"]*)"|(\S+)')


def terms_of(words: str) -> list[str]:
    """The words and quoted phrases that a text must contain, in small letters."""
    found = [quoted or word.strip('"') or word for quoted, word in _TERM.findall(words)]
    return [term.lower() for term in found if term]


def trigram_query(terms: Sequence[str]) -> str:
    """What all texts with these terms have, in the language of FTS5; empty if no term has three characters."""
    found: dict[str, None] = {}
    for term in map(_indexed, terms):
        last = len(term) - 3
        if last >= 0:  # side by side, and the last: those between would hardly narrow it further
            found |= dict.fromkeys(term[at : at + 3] for at in (*range(0, last, 3), last))
    quoted = ('"{}"'.format(each.replace('"', '""')) for each in [*found][:MOST_TRIGRAMS])
    return " AND ".join(quoted)


def lowered(text: Any) -> Any:
    """SQLite's `lower` for letters of all scripts."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return text.lower() if isinstance(text, str) else text


def _indexed(text: str | bytes) -> str:
    """A text as it is indexed: FTS5 reads none further than its first NUL."""
    return lowered(text).replace("\0", " ")


def is_usable(connection: sqlite3.Connection) -> bool:
    """True if there is an index that this SQLite can use, and that covers all of the tables."""
    return _has_trigrams(connection) and _state(connection) == CURRENT


def prepare(connection: sqlite3.Connection, force: bool = False) -> None:
    """Have a writer keep it: make it where it is missing, or stale because a SQLite without FTS5 wrote since."""
    connection.create_function("indexed", 1, _indexed, deterministic=True)
    wanted = CURRENT if _has_trigrams(connection) else "stale"
    if _state(connection) == wanted and not force:
        return
    connection.execute("BEGIN IMMEDIATE")
    if wanted == CURRENT:
        for index in TEXTS:
            connection.execute(f"DROP TABLE IF EXISTS {index}")  # of an older format, maybe
            connection.execute(
                f"CREATE VIRTUAL TABLE {index} USING fts5"
                " (text, content='', columnsize=0, detail=none, tokenize='trigram case_sensitive 1')"
            )
        add(connection.execute, "TRUE")
    connection.execute(
        "INSERT OR REPLACE INTO meta (key, value) VALUES ('text_index', ?)", (json.dumps(wanted),)
    )
    atomic_files.commit(connection, "text index")


def add(execute: Execute, condition: str, values: tuple[Any, ...] = ()) -> None:
    """Have it find the texts of the groups whose draws meet a condition, within a transaction."""
    for index, texts in TEXTS.items():
        execute(f"INSERT INTO {index} (rowid, text) SELECT {texts} WHERE {condition}", values)


def remove(execute: Execute, condition: str, values: tuple[Any, ...]) -> None:
    """Remove these texts from the index. They must still stand in the tables, because FTS5 needs their content once more for that."""
    for index, texts in TEXTS.items():
        execute(
            f"INSERT INTO {index} ({index}, rowid, text) SELECT 'delete', {texts} WHERE {condition}",
            values,
        )


def _has_trigrams(connection: sqlite3.Connection) -> bool:
    modules = connection.execute("SELECT count(*) FROM pragma_module_list WHERE name = 'fts5'")
    return sqlite3.sqlite_version_info >= (3, 34) and bool(modules.fetchone()[0])


def _state(connection: sqlite3.Connection) -> str | None:
    state = connection.execute("SELECT value FROM meta WHERE key = 'text_index'").fetchone()
    return None if state is None else json.loads(state[0])
