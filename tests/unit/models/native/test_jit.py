"""Kernels are compiled also where nothing can be kept."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from groupwise.models.native.jit import kernel


def double(numbers: Any) -> None:
    for place in range(numbers.shape[0]):
        numbers[place] *= 2


@pytest.mark.parametrize("kept", [False, True])
def test_without_a_folder_to_write_to(monkeypatch, kept):
    njit, asked = numba.njit, []

    def nowhere(*, cache: bool = False, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", nowhere)
    numbers = np.arange(5.0)
    kernel({"contract"}, kept=kept)(double)(numbers)
    assert numbers.tolist() == [0, 2, 4, 6, 8]
    assert asked == ([True, False] if kept else [False])
