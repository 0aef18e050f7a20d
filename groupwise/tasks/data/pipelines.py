"""Preprocessing of rows before prompts are made of them: `data.preprocessing_pipeline`.

    generic                   a prompt that is text, and its `answer` also as `reference`; of a teacher's rows, as `completion`
    deepseek                  a prompt that is a chat, unchanged, and its `answer` also as `reference`
    module:function           your own function, row → row or None; also path/to/file.py:function
    a name                    one that an installed package announces as entry point of the group `groupwise.preprocessing`

A row for which the function returns None is left out and counted. All columns that it returns are passed to the rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import load, run_user_code
from groupwise.tasks.data.chat import Row
from groupwise.tasks.data.messages import Unusable

ENTRY_POINTS = "groupwise.preprocessing"
"""The entry-point group in which installed packages announce their pipelines."""
KIND = "preprocessing pipeline"


def generic(row: Row) -> Row:
    """Preprocesses rows whose prompt must be text."""
    if not isinstance(row["prompt"], str):
        raise Unusable("the prompt is not text, which the pipeline generic takes (deepseek: chats)")
    return row


def deepseek(row: Row) -> Row:
    """Keeps a chat prompt as it is; a text prompt becomes a user message."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {**row, "prompt": [{"role": "user", "content": prompt}]}
    return row


BUILT_IN: Mapping[str, Callable[[Row], Row]] = {"generic": generic, "deepseek": deepseek}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline, as found by its name."""

    name: str
    function: Callable[[Row], object]
    file: str | None = None
    """File that holds the function; None if it is part of the package."""
    answer: str = "reference"
    """Second name under which a built-in pipeline stores the column `answer`, unless the row already has that column."""

    @property
    def may_make_prompts(self) -> bool:
        """True if the pipeline may add the prompt to rows that have none."""
        return self.name not in BUILT_IN

    def __call__(self, row: Row) -> Row:
        """The processed row. Raises Unusable for a row to leave out, TaskError if the function misbehaves."""
        if self.name in BUILT_IN:
            # A row without a prompt stays as it is: code that needs one checks for it.
            if row.get("prompt") is None:
                return row
            result = BUILT_IN[self.name](row)
            if "answer" not in result or result.get(self.answer) is not None:
                return result
            return {**result, self.answer: result["answer"]}
        what = f"The {KIND} {self.name} failed on the row {row!r:.200}"
        result = run_user_code(lambda: self.function(dict(row)), what=what)
        if result is None:
            raise Unusable(f"the pipeline {self.name} gives None")
        if not isinstance(result, Mapping):
            raise TaskError(
                f"The {KIND} {self.name} gave {result!r:.60} for the row {row!r:.200}. Expected a row, a dict of columns; or None to leave "
                "it out."
            )
        return dict(cast("Mapping[str, Any]", result))


def find_pipeline(name: str, *, teacher: bool = False) -> Pipeline:
    """The pipeline with this name, for teacher rows or for prompts. Raises TaskError that lists the known names if there is none."""
    if name in BUILT_IN:
        answer = "completion" if teacher else "reference"
        return Pipeline(name, BUILT_IN[name], answer=answer)
    builtins = dict.fromkeys(BUILT_IN, __name__)
    plugin = load(name, kind=KIND, builtins=builtins, entry_points=ENTRY_POINTS)
    if isinstance(plugin.object, ModuleType) or not callable(plugin.object):
        raise TaskError(
            f"The {KIND} {name} is not a function. Name one, as in module:function: it takes a row and gives a row or None. Built-in: "
            f"{', '.join(sorted(BUILT_IN))}."
        )
    return Pipeline(name, plugin.object, plugin.file)
