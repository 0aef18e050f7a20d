"""Writes that go in steps, so that many of them go side by side in one transaction.

Where the database demands an order, what was changed first has to be sent before what is changed next. A write that has such places is a
generator that yields there. Done alone it is sent step by step; within `side_by_side` a step of all of them is sent before the next step of
any, so that each table gets it in one statement, however many they are.
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
"""A statement and its values, sent after the rows that were changed. The statement object is made once, so that equal ones are combined."""
Steps: TypeAlias = Generator[Step]
P = ParamSpec("P")

_BEGUN = "groupwise_steps"


def in_steps(
    write: Callable[Concatenate[Session, P], Steps],
) -> Callable[Concatenate[Session, P], None]:
    """Decorator: call the generator as a function. Its work is done when that returns, or when the surrounding `side_by_side` ends."""

    @wraps(write)
    def whole(session: Session, *args: P.args, **kwargs: P.kwargs) -> None:
        steps = write(session, *args, **kwargs)
        if (started := session.info.get(_BEGUN)) is not None:
            started.append(steps)
        else:
            _drive(session, [steps])

    return whole


@contextmanager
def side_by_side(session: Session) -> Generator[None]:
    """Writes in steps that are called within it begin at its end, and go on together."""
    started: list[Steps] = []
    session.info[_BEGUN] = started
    try:
        yield
    finally:
        del session.info[_BEGUN]
    _drive(session, started)


def _drive(session: Session, writes: Iterable[Steps]) -> None:
    for steps in zip_longest(*writes):
        session.flush()
        of: dict[Update, list[Mapping[str, Any]]] = {}
        for statement, values in filter(None, steps):
            of.setdefault(statement, []).append(values)
        for statement, values in of.items():
            session.execute(statement, values)
