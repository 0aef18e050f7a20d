"""Prices of Modal's GPUs, for an estimate before anything is paid. Processors and memory come on top; Modal's own bill is what counts."""

from __future__ import annotations

from groupwise.core.errors import UsageError

PRICED_AT = "May 2026"
"""modal.com/pricing, list prices of the base region."""
DOLLARS_PER_SECOND = {
    "T4": 0.000164,
    "L4": 0.000222,
    "A10G": 0.000306,
    "L40S": 0.000542,
    "A100": 0.000583,
    "A100-80GB": 0.000694,
    "H100": 0.001097,
    "H200": 0.001261,
    "B200": 0.001736,
}
"""Dollars a second by Modal's names; A100 is the one with 40 GB."""
USUAL_GPU = "H100"


def check_gpu(name: str) -> str:
    """The name itself. Raises UsageError if it is not known."""
    if name not in DOLLARS_PER_SECOND:
        raise UsageError(
            f"--gpu {name}: Modal's GPUs that are known here are {', '.join(DOLLARS_PER_SECOND)}."
        )
    return name


def per_hour(gpu: str | None, count: int) -> float | None:
    """Dollars an hour for so many GPUs; None if none is asked for."""
    return None if gpu is None else DOLLARS_PER_SECOND[check_gpu(gpu)] * 3600 * max(1, count)
