"""The answer that a reward reads in a completion, recorded with the rollout: majority voting counts it.

Equal answers are recorded as equal texts, None if there is no answer. `groupwise.training.evaluation.measures` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

EXTRACTED_ANSWER = "extracted_answer"
"""The name under which `log_extra` records it."""

LogExtra: TypeAlias = Callable[[str, Sequence[Any]], None]


def record_answers(log_extra: LogExtra | None, answers: Iterable[str | None]) -> None:
    """Record an answer for each completion, empty ones as None. Without `log_extra` (in direct calls) `answers` is not read."""
    if log_extra is not None:
        log_extra(EXTRACTED_ANSWER, [answer or None for answer in answers])
