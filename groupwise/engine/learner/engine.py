"""Defines what computes rows for a learner: plain matrices if the model is of a known family, else transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from groupwise.core.types import PolicyRole, Row
from groupwise.engine.learner.forward import Forward, ForwardOutputs
from groupwise.engine.learner.layout import Batch

Compute = Callable[[Any, ForwardOutputs], Forward]
"""Log-probabilities and entropies of a micro-batch that the same engine has cut."""


class Engine(Protocol):
    """Forward passes of rows, with a gradient if torch's gradients are on."""

    def cut(self, rows: Sequence[Row], max_tokens: int, *, gradient: bool) -> Sequence[Batch]:
        """The rows as micro-batches of at most `max_tokens` tokens, or a single row that is longer."""
        ...

    def acting(self, role: PolicyRole, *, gradient: bool) -> AbstractContextManager[Compute]:
        """Compute as this policy; a backward pass must end while it is open."""
        ...

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """Follows the last row of a step: learners that hold parts of one model keep in step here with those that have more rows."""
        ...
