"""Out-of-memory errors, in the words of those who raise them and in ours."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.core.errors import NonFiniteError, OutOfMemoryError
from groupwise.engine.models.memory import explaining_out_of_memory, is_out_of_memory

EXBIBYTE = 1 << 60


def raised_by(refused: Callable[[], Any]) -> BaseException:
    """What is raised where there is really too little."""
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        refused()
    return caught.value


REFUSALS = {
    "processor": raised_by(lambda: torch.empty(EXBIBYTE, dtype=torch.uint8)),
    "numpy": raised_by(lambda: np.empty(EXBIBYTE, np.uint8)),
    "gpu": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB."
    ),
    "gpu library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "python": MemoryError(),
    "system": OSError(errno.ENOMEM, "Cannot allocate memory"),
}
REQUESTED_SIZES = {"processor": "1,099,511,627,776.0 MiB", "numpy": "1.00 EiB", "gpu": "20.00 MiB"}


@pytest.mark.parametrize("who", REFUSALS)
def test_out_of_memory_errors_of_every_source_are_recognised(who):
    error = REFUSALS[who]
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemoryError) as caught, explaining_out_of_memory("learning"):
        raise error
    assert caught.value.__cause__ is error
    assert REQUESTED_SIZES.get(who, "while learning") in str(caught.value)
    whose = "CUDA out of memory" if who.startswith("gpu") else "Cannot allocate memory"
    assert f"({whose}" in str(caught.value), "by these words programs that read logs know it"


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError(errno.ENOSPC, "No space left on device"),
    NonFiniteError("no numbers"), OutOfMemoryError("explained already: out of memory"), ValueError("out of memory"),
])  # fmt: skip
def test_other_errors_stay_what_they_are(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, explaining_out_of_memory("learning"):
        raise error
    assert caught.value is error
