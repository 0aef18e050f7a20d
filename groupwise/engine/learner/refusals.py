"""Errors that every learner raises in the same words; free of torch."""

from __future__ import annotations

from groupwise.core.errors import NonFiniteError
from groupwise.core.types import OptimiserParams


def too_fast(params: OptimiserParams) -> NonFiniteError:
    """The error for weights that a step made not finite."""
    return NonFiniteError(
        f"An update with the learning rate {params.learning_rate:g} made weights that are not finite. The last checkpoint "
        "stands. Lower training.learning_rate."
    )
