"""Why rollouts were not scored, by kind: a message that has a number, a name or an answer in it is another one each time."""

from __future__ import annotations

import re

from groupwise.runs.database import Database
from groupwise.runs.records import FailureKind

CHARACTERS = 300
"""Characters of a reason that are looked at."""
_PARTICULAR = re.compile(
    r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`|“[^”\n]*”|\b0x[0-9a-fA-F]+|\d+(?:[.,:_]\d+)*"""
)
OUTCOMES = ("failed", "timed_out")


def failure_kinds(db: Database, most: int, newest: int) -> list[FailureKind]:
    """The most frequent kinds among the newest of each outcome."""
    rows = [row for outcome in OUTCOMES for row in _reasons(db, outcome, newest)]
    found: dict[str, list[tuple[int, str]]] = {}
    for id, reason in sorted(rows, reverse=True)[:newest]:
        found.setdefault(kind_of(reason), []).append((id, reason))
    kinds = [FailureKind(kind, len(each), each[0][1], each[0][0]) for kind, each in found.items()]
    return sorted(kinds, key=lambda kind: (-kind.count, kind.reason))[:most]


def kind_of(reason: str) -> str:
    """A reason without what is particular to one rollout."""
    return _PARTICULAR.sub("…", reason)


def _reasons(db: Database, outcome: str, newest: int) -> list[tuple[int, str]]:
    rows = db.all(
        f"SELECT id, CAST(substr(coalesce(reason, 'no reason given'), 1, {CHARACTERS}) AS BLOB) FROM rollouts"
        " WHERE outcome = ? ORDER BY id DESC LIMIT ?",
        (outcome, newest),
    )
    return [(id, reason.decode("utf-8", "replace")) for id, reason in rows]
