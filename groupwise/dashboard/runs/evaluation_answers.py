"""One policy's answers to the held-out prompts, and how often it succeeded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from groupwise.core.errors import UsageError
from groupwise.dashboard.pages import Page, Query, Visit, cut, shown
from groupwise.dashboard.runs.evaluating import LONGEST, PER_PAGE, side
from groupwise.training.evaluation.measures import Row, by_prompt

MOST_SAMPLES = 32
"""Answers to one prompt that a page shows."""
FILTERS = {
    "all": "all",
    "never": "no answer succeeds",
    "sometimes": "some answers do",
    "always": "all answers do",
}
"""Prompts by how many answers succeed, as pass@k counts it; where that is not known, by how many earn the highest reward of all."""


class Answers(Query):
    """Which evaluation, and which of its prompts."""

    of: str = Field("", max_length=LONGEST)
    """As one of two that are compared is named."""
    show: Literal["all", "never", "sometimes", "always"] = "all"
    page: int = Field(1, ge=1)


def answers(visit: Visit) -> Page:
    """Those with the lowest rewards come first."""
    asked = visit.query(Answers)
    if not asked.of:
        raise UsageError("Say of which evaluation: ?of=RUN@STEP.")
    found = side(visit, asked.of)
    if found.supervised or not found.rows:
        raise UsageError(
            f"{found.label} has no answers: it was evaluated by the loss on given ones."
        )
    best = _best(found.rows)
    prompts = [_answered(rows, best) for rows in by_prompt(found.rows).values()]
    counts = Counter(each["solved"] for each in prompts)
    chosen = [each for each in prompts if asked.show in ("all", each["solved"])]
    chosen.sort(key=lambda each: (each["mean"] is not None, each["mean"] or 0.0))
    here = cut(chosen, asked.page, PER_PAGE)
    data = {
        "asked": asked.model_dump(),
        "label": found.label,
        "metrics": dict(found.metrics),
        "all": len(prompts),
        "counts": {name: counts[name] for name in FILTERS if name != "all"},
        "shows": FILTERS,
        "prompts": here.rows,
        "page": here.page,
        "pages": here.pages,
    }
    return Page("evaluation_answers.html", data)


def _best(rows: Sequence[Row]) -> float | None:
    """The reward by which an answer succeeds; None: it is known which do."""
    if any(row.get("success") is not None for row in rows):
        return None
    return max(_rewards(rows), default=math.inf)


def _rewards(rows: Sequence[Row]) -> list[float]:
    known = (row["reward"] for row in rows if row["reward"] is not None)
    return [reward for reward in known if math.isfinite(reward)]


def _solved(rows: Sequence[Row], best: float | None) -> str:
    judged = [row.get("success") if best is None else row["reward"] == best for row in rows]
    known = [bool(each) for each in judged if each is not None]
    if not any(known):
        return "never"
    return "always" if all(known) else "sometimes"


def _answered(rows: Sequence[Row], best: float | None) -> dict[str, Any]:
    rewards = _rewards(rows)
    return {
        "prompt": rows[0]["prompt"],
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "solved": _solved(rows, best),
        "answers": [
            {
                "reward": row["reward"],
                "outcome": row["outcome"],
                "completion": row["completion"],
                "tokens": row.get("written", row["tokens"]),
                "truncated": bool(row.get("truncated")),
                "parts": row["parts"],
            }
            for row in rows[:MOST_SAMPLES]
        ],
        "more": max(0, len(rows) - MOST_SAMPLES),
    }


ROUTES = (shown("/evaluations/answers", answers),)
