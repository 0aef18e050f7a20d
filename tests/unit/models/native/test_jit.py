"""How kernels are compiled: for the numbers that come, with what they may do to sums, and kept only where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from groupwise.models.native.jit import kernel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where kernels are kept."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def inverse(numbers: Any) -> None:
    for place in range(numbers.shape[0]):
        numbers[place] = 1 / numbers[place]


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_kept_and_what_is_not(folder, kept):
    numbers = np.array([2.0, 4.0])
    kernel(kept=kept)(inverse)(numbers)
    assert numbers.tolist() == [0.5, 0.25]
    assert [path.suffix for path in folder.rglob("*") if path.is_file()] == [".nbc"] * kept


def test_a_division_by_0_is_none_that_raises():
    numbers = np.array([0.0, -0.0])
    kernel()(inverse)(numbers)
    assert numbers.tolist() == [np.inf, -np.inf]


def test_sums_keep_their_order_unless_it_is_given_up():
    in_order: Any = kernel()(inverse)
    in_any_order: Any = kernel({"reassoc"})(inverse)
    assert in_order.targetoptions["fastmath"] == set()
    assert in_any_order.targetoptions["fastmath"] == {"reassoc"}
