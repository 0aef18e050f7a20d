"""What a search for text means: all of its words, and its phrases in quotes, wherever they stand.

Words of scripts that put spaces between them are looked up whole in the full-text index. Chinese, Japanese, Korean, Thai and their
neighbours are not written so: a run of letters would be one word to the index. Such words, and those that are no letters (`+=`), are
looked for letter by letter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERM = re.compile(r'"([^"]*)"|(\S+)')
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u30ff\u3130-\u318f\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff]"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a text must hold, all of it."""

    matched: str = ""
    """For the full-text index, in its language; empty: nothing that it knows."""
    plain: tuple[str, ...] = ()
    """In small letters, to be looked for as they stand."""


def wanted_of(words: str, *, indexed: bool) -> Wanted:
    """The meaning of a search; without the index everything is looked for as it stands."""
    phrases: list[str] = []
    plain: list[str] = []
    for quoted, word in _TERM.findall(words):
        term = quoted or word.strip('"') or word
        if indexed and _is_known(term):
            phrases.append(f'"{term.replace(chr(34), " ").replace(chr(0), " ")}"')
        elif term:
            plain.append(term.lower())
    return Wanted(" AND ".join(phrases), tuple(plain))


def _is_known(term: str) -> bool:
    """Whether the index has it as one or several whole words."""
    return any(letter.isalnum() for letter in term) and not _WITHOUT_SPACES.search(term)
