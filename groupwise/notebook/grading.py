"""What is measured of an answer, beside what is rewarded.

Rewards want the marks of the config; a measure should tell a model that cannot calculate from one that writes no marks. So the answer is
what stands between the marks (or in a \\boxed{}), and where nothing does the last number of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from groupwise.rewards.mathematics import MathAnswer, answer_of
from groupwise.rewards.tags import Tags, marks
from groupwise.rewards.text import CompletionText, completion_text

NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def grades(
    tags: Tags, completions: Sequence[CompletionText], *, tolerant: bool, **columns: Any
) -> list[float]:
    """As `math_answer` gives them."""
    grade = MathAnswer(tolerant=tolerant, answer_tag=tags.answer)
    return grade([with_marks(tags, each) for each in completions], **columns)


def with_marks(tags: Tags, completion: CompletionText) -> str:
    """The text; where it has no answer between marks, its last number between them."""
    text = completion_text(completion)
    numbers = NUMBER.findall(text)
    if answer_of(text, tags.answer) is not None or not numbers:
        return text
    opened, closed = marks(tags.answer)
    return f"{opened}{numbers[-1]}{closed}"
