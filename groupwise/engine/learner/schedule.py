"""Computes the learning rate from the step alone, so that a resume needs no state for it; does not import torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from groupwise.core.errors import NonFiniteError
from groupwise.core.types import OptimiserParams

if TYPE_CHECKING:  # Tunix's worker imports this file, and needs no config
    from groupwise.engine.learner.config import OptimisationConfig


def learning_rate(step: int, max_steps: int, config: OptimisationConfig) -> float:
    """The learning rate of step `step` (from 0): warm-up to the peak, then constant, or falling towards 0 after the last step."""
    warmup = config.warmup_steps or round(config.warmup_ratio * max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, max_steps - warmup)
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1 - progress)
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * (0.5 * (1 + math.cos(math.pi * progress)))
    return config.learning_rate


def learning_rate_too_high(params: OptimiserParams) -> NonFiniteError:
    """The error for a learning rate that was too high: an update made weights NaN or infinite."""
    return NonFiniteError(
        f"An update with the learning rate {params.learning_rate:g} made weights that are not finite. The last checkpoint "
        "stands. Lower the learning rate (training.learning_rate of a config)."
    )
