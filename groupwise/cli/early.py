"""What a command begins before it imports torch, which takes seconds: a second process that does the same meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def expect_ranks(load: Callable[[], Any]) -> None:
    """Begin the processes that the loaded config will probably have. What is wrong with it is said by whoever loads it next."""
    from groupwise import build
    from groupwise.errors import UsageError

    with suppress(UsageError):
        build.expect_ranks(load().config)
