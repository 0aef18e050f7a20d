"""The full-text index of prompts and completions, beside the tables of a record, and what a search for text means.

The index is made if SQLite has FTS5, and made again from the tables whenever it may be stale. Without FTS5 there is none: search then
reads every text. Of each text it has the words, and the signs that are looked up one by one; the texts themselves stand in the tables
alone.

A search asks for all of its words, and its phrases in quotes, wherever they stand. Words of scripts that put spaces between them are
looked up whole in the index. Chinese, Japanese, Korean, Thai and their neighbours are not written so: a run of letters would be one word
to the index. Such words, and those that are no letters (`+=`), are looked for letter by letter, and so are words that have signs (`-5`,
`C++`): the index alone would find 5, and C. It tells which texts can have them, because they have all the letters, pairs of neighbours
and numbers between; those alone are read.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from groupwise.core import atomic_files
from groupwise.runs.schema import SIGNS_SINCE, TEXT_INDEX_SINCE
from groupwise.runs.sqlite_file import version

COLUMNS = "words, signs"
TEXTS = {
    "prompt_index": "draw, words_of(prompt), signs_of(prompt) FROM prompts",
    "completion_index": "id, words_of(completion), signs_of(completion) FROM rollouts",
}
"""The texts that each index is made of: row id and `COLUMNS`."""
CURRENT = "current, signs 1"
"""The version that a record notes with its index: its tables hold all of it, and this module made the terms.

A record with another number is indexed again."""
WORDS_ALONE = "current"
"""The same of a format that had no signs."""
Execute = Callable[[str, tuple[Any, ...]], object]
"""Runs a statement with its values."""

_TERM = re.compile(r'"([^"]*)"|(\S+)')
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3130-\u318f\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
_WITHOUT_SPACES = re.compile(f"[{_UNSPACED}]")
_SIGNS = re.compile(rf"(?:[^\w\s]|[_{_UNSPACED}])+")
"""Letters of such scripts, and what is neither letter nor number, side by side."""
_BETWEEN = re.compile(
    rf"(?<=[\s!-/:-@\[-`{{-~{_UNSPACED}])([0-9a-z]+)(?:(?=[\s!-/:-@\[-`{{-~{_UNSPACED}])|($))"
)
"""A plain word or number among them; at the end of what is looked for it may go on in a text."""

CODE = 8
"""Hexadecimal digits of a letter's number."""


@dataclass(frozen=True, slots=True)
class RequiredTerms:
    """The terms that a text must contain, all of them."""

    matched: str = ""
    """Query for the full-text index, in its language; empty if it knows none of the terms."""
    plain: tuple[str, ...] = ()
    """Terms in small letters, to be looked for as they stand."""


def wanted_of(words: str, *, indexed: bool, signs: bool) -> RequiredTerms:
    """The meaning of a search; without the index everything is looked for as it stands. `signs`: the index has them."""
    phrases: list[str] = []
    plain: list[str] = []
    for quoted, word in _TERM.findall(words):
        term = quoted or word.strip('"') or word
        in_words = any(letter.isalnum() for letter in term) and not _WITHOUT_SPACES.search(term)
        if indexed and in_words:  # the index has it as one or several whole words
            phrases.append(f'"{term.replace(chr(34), " ").replace(chr(0), " ")}"')
            plain += [term.lower()] if _SIGNS.search(term) else []
        elif term:
            plain.append(term.lower())
    if not signs:
        return RequiredTerms(" AND ".join(phrases), tuple(plain))
    # What all texts with these terms have: words, and codes of signs that stand alone and of pairs of signs.
    found = [match for term in plain for match in _BETWEEN.finditer(term)]
    between = [f'"{match[1]}"{" *" if match[2] is not None else ""}' for match in found]
    runs = [run for term in plain for run in _SIGNS.findall(term)]
    codes = {code for run in runs for code in _codes(run) if len(run) == 1 or len(code) > CODE}
    columns = {"words": [*phrases, *between], "signs": sorted(codes)}
    asked = [f"{name} : ({' AND '.join(terms)})" for name, terms in columns.items() if terms]
    return RequiredTerms(" AND ".join(asked), tuple(plain))


def words_of(text: str | bytes) -> str:
    """A text in which the index finds words: without letters of scripts that have no spaces."""
    return _WITHOUT_SPACES.sub(" ", _as_text(text))


def signs_of(text: str | bytes) -> str:
    """A text's signs for the index, and each two neighbouring ones, in codes that are words to it."""
    runs = dict.fromkeys(_SIGNS.findall(_as_text(text).lower()))
    return " ".join(dict.fromkeys(chain.from_iterable(map(_codes, runs))))


def _as_text(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def _codes(run: str) -> list[str]:
    """Code points of each sign, and of each two neighbouring ones."""
    digits = run.encode("utf-32-be", "surrogatepass").hex()
    places = range(0, len(digits), CODE)
    return [
        digits[at : at + width]
        for width in (CODE, 2 * CODE)
        for at in places
        if at + width <= len(digits)
    ]


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
