"""Writes in steps, so that many of them can share the statements of one transaction.

If the database demands an order of changes, earlier ones must be sent before later ones. A write with such an order is a generator that
yields where a flush is needed. A single write is sent step by step. Within `side_by_side`, one step of all writes is sent before the next
step of any, so each table gets one statement for each step, no matter how many writes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from typing import Any, Concatenate, ParamSpec, TypeAlias

from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import Update

Step: TypeAlias = tuple[Update, Mapping[str, Any]] | None
"""A statement and its values, sent after the changed rows. The statement object is built once, and equal ones are combined."""
Steps: TypeAlias = Generator[Step]
P = ParamSpec("P")

_BEGUN = "groupwise_steps"


def in_steps(
    write: Callable[Concatenate[Session, P], Steps],
) -> Callable[Concatenate[Session, P], None]:
    """Decorator: call the generator as a function. Its work is done when that returns, or when the surrounding `side_by_side` ends."""

    @wraps(write)
    def run_or_defer(session: Session, *args: P.args, **kwargs: P.kwargs) -> None:
        steps = write(session, *args, **kwargs)
        if (deferred := session.info.get(_BEGUN)) is not None:
            deferred.append(steps)
        else:
            _drive(session, [steps])

    return run_or_defer


@contextmanager
def side_by_side(session: Session) -> Generator[None]:
    """Defer writes in steps that are called within the block; at its end they all run, step by step together."""
    deferred: list[Steps] = []
    session.info[_BEGUN] = deferred
    try:
        yield
    finally:
        del session.info[_BEGUN]
    _drive(session, deferred)


def _drive(session: Session, writes: Iterable[Steps]) -> None:
    for steps in zip_longest(*writes):
        session.flush()
        values_by_statement: dict[Update, list[Mapping[str, Any]]] = {}
        for statement, values in filter(None, steps):
            values_by_statement.setdefault(statement, []).append(values)
        for statement, values in values_by_statement.items():
            session.execute(statement, values)
