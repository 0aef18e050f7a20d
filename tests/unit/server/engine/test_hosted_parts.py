"""Targets of rows that clients send to a learner: they fit the completion, the other numbers fit them, and the model knows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.core.types import LossSpec, Row
from groupwise.server.engine.hosted_parts import check_loss, check_rows

ROW = Row((5,), (6, 7), (1, 0), (-1.0, -1.0), 1.0, 1.0)
PAIRS = {"mask": (1,) * 4, "sampling_logprobs": (-1.0,) * 4}


@pytest.mark.parametrize("changes", [{}, {"targets": (8, 9)}, {"targets": (8, 9, 8, 9), **PAIRS}])
def test_targets_that_fit(changes: dict[str, Any]) -> None:
    check_rows([replace(ROW, **changes)], 10)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("targets has 0 entries, but completion_ids has 2", {"targets": ()}),
        ("targets has 3 entries, but completion_ids has 2", {"targets": (8, 9, 8)}),
        ("mask has 2 entries, but targets has 4", {"targets": (8, 9, 8, 9)}),
        ("mask has 4 entries, but completion_ids has 2", PAIRS),
        ("targets has the token 10", {"targets": (8, 10)}),
        ("completion_ids is empty", {"completion_ids": (), "mask": (), "sampling_logprobs": ()}),
    ],
)
def test_targets_that_do_not_fit(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=message):
        check_rows([replace(ROW, **changes)], 10)


def test_a_loss_in_a_file_is_not_run() -> None:
    with pytest.raises(UsageError, match="runs no code that a client names"):
        check_loss(LossSpec("/tmp/own.py:Mine"), {"policy": 1.0})
