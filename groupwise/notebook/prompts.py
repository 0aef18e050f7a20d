"""Formats a question for the model."""

from __future__ import annotations

from groupwise.core.errors import UsageError
from groupwise.notebook.config import TrainingConfig


def format_prompt(question: str, config: TrainingConfig, rubric: str | None = None) -> str:
    """The user's message: the system prompt and the question. The model's chat template is applied later.

    The system prompt stands in the user's turn, because Gemma's template has no other. `rubric` is shown to the model where it is given:
    what is then rewarded for its words may be repeated, so nothing gives it by default. Raises UsageError for a question that is no text,
    and for what is no config.
    """
    _refuse_odd(question, config)
    shown = f"{question}\n\nA good answer mentions:\n{rubric}" if rubric else question
    return f"{config.system_prompt}\n\n{shown}" if config.system_prompt else shown


def _refuse_odd(question: object, config: object) -> None:
    called = "format_prompt(question, config)"
    if not isinstance(question, str):
        raise UsageError(
            f"The question is of the type {type(question).__name__}; give a text: {called}."
        )
    if not isinstance(config, TrainingConfig):
        raise UsageError(
            f"Expected a TrainingConfig second, got {type(config).__name__}: {called}."
        )
