"""Folders of one experiment's runs stand beside each other: `name`, `name-2`, `name-3` …, here and on Drive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path


def number_of(run: str, name: str) -> int | None:
    """The number of an experiment's run, by its folder's name: 1, 2, 3 …; None if it is none of them."""
    found = re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", run)
    return int(found[1] or 1) if found else None


def sibling(first: Path, number: int) -> Path:
    """The folder of the experiment's run of that number, beside its first one."""
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


def siblings(first: Path) -> Iterator[Path]:
    """The folders of all possible runs, in order, without end."""
    return (sibling(first, number) for number in count(1))
