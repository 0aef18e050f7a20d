"""Recognises out-of-memory errors, and tells the user how to need less memory.

GPUs and numpy have their own exceptions for it. On a CPU torch raises a RuntimeError that only its text identifies; a refusal by the
operating system is an OSError. None of this needs torch, so code that reports a failure can use it without importing torch.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager

from groupwise.core.errors import OutOfMemoryError

SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of torch's messages: on a GPU, on a CPU, from a library on a GPU."""
NEEDS_LESS = (
    "lower training.max_tokens_per_microbatch, sampler.max_num_seqs or run.processes, set training.gradient_checkpointing, "
    "set model.dtype to bfloat16, or take a smaller model"
)
REMEDY = f"To need less, {NEEDS_LESS}; `groupwise doctor` says how much a run needs and how much there is."

_ALLOCATION = re.compile(
    r"(?:tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]i?B)", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error that has not been explained yet."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def out_of_memory(error: BaseException, doing: str | None = None) -> OutOfMemoryError:
    """An error with a message for users; `doing` names the work that needed the memory, as in `while learning`."""
    text = str(error)
    phrase = "Cannot allocate memory"  # the phrases by which programs that read logs recognise it
    if any(sign in text for sign in ("CUDA", "CUBLAS", "HIP")):
        phrase = "HIP out of memory" if "HIP out" in text else "CUDA out of memory"
    size = ""
    if match := _ALLOCATION.search(text):
        amount, unit = match.groups()
        if unit.lower() == "bytes":
            amount, unit = f"{float(amount) / 2**20:,.1f}", "MiB"
        size = f": {amount} {unit} at once could not be had"
    during = f" while {doing}" if doing else ""
    return OutOfMemoryError(f"There was no memory left{during} ({phrase}{size}). {REMEDY}")


@contextmanager
def explaining_out_of_memory(doing: str) -> Generator[None]:
    """Turn out-of-memory errors into an `OutOfMemoryError`."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, doing) from error
