"""Lays rows out on one axis without padding, so that a prompt with several rows is computed once.

A prompt with several completions is placed once, and its completions after it; each of them sees the prompt and itself. A prompt with one
completion forms a single text with it. The last token of a completion is left out, because no token is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.core.types import Row
from groupwise.engine.learner.layout import divide_groups, most_targets

SPREAD = 2
"""Texts are computed as one padded batch if the longest is at most this many times as long as the shortest."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Consecutive texts, longest first. Each sees itself, and all see the same prompt, or none."""

    start: int
    """Index of the first token of the first text."""
    lengths: tuple[int, ...]
    prompt: tuple[int, int] | None = None
    """Start and length of the prompt that they see; None: they see none."""

    @property
    def end(self) -> int:
        """Index after the last token of the last text."""
        return self.start + sum(self.lengths)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that they see."""
        return 0 if self.prompt is None else self.prompt[1]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Rows that are computed together."""

    rows: tuple[Row, ...]
    indices: tuple[int, ...]
    """Index of each row in the list given to `cut`."""
    token_ids: tuple[int, ...]
    """Ids of the tokens of all texts, N."""
    positions: tuple[int, ...]
    """Position of each token in its own text, prompt included; N."""
    texts: tuple[Texts, ...]
    """Sets of texts that together cover all tokens; those that see no prompt come first."""
    predictors: tuple[int, ...]
    """Index of the token before each completion token, one row after another."""

    @property
    def width(self) -> int:
        """The largest number of targets of a row."""
        return most_targets(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return len(self.token_ids)


def cut(rows: Sequence[Row], max_tokens: int, *, packing: bool = True) -> list[FlatBatch]:
    """Micro-batches of all rows; see `groupwise.engine.learner.layout.divide_groups`."""
    divided = divide_groups(rows, max_tokens, packing=packing)
    return [flat_batch(rows, groups) for groups in divided]


def flat_batch(rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> FlatBatch:
    """The micro-batch of these rows, given by group; within a group the longest comes first."""
    axis = _Axis()
    trunks: list[tuple[int, ...]] = []  # texts that see no prompt
    for members in groups:
        row = rows[members[0]]
        alone = row.completion_ids[:-1] if len(members) == 1 else ()
        trunks.append((*row.prompt_ids, *alone))
    order = sorted(range(len(groups)), key=lambda number: -len(trunks[number]))
    starts = dict(zip(order, axis.add([trunks[number] for number in order]), strict=True))
    predictors: list[int] = []
    for number, members in enumerate(groups):
        length = len(rows[members[0]].prompt_ids)
        last_prompt_index = starts[number] + length - 1
        completions = [rows[index].completion_ids for index in members]
        if len(members) == 1:
            predictors += range(last_prompt_index, last_prompt_index + len(completions[0]))
            continue
        text_starts = axis.add([ids[:-1] for ids in completions], (starts[number], length))
        for ids, start in zip(completions, text_starts, strict=True):
            predictors += [last_prompt_index, *range(start, start + len(ids) - 1)]
    indices = tuple(index for members in groups for index in members)
    return FlatBatch(
        rows=tuple(rows[index] for index in indices),
        indices=indices,
        token_ids=tuple(axis.token_ids),
        positions=tuple(axis.positions),
        texts=tuple(axis.texts),
        predictors=tuple(predictors),
    )


class _Axis:
    """The axis of a micro-batch while texts are added to it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.texts: list[Texts] = []

    def add(
        self, texts: Sequence[Sequence[int]], prompt: tuple[int, int] | None = None
    ) -> list[int]:
        """Append texts that see this prompt, longest first; return the start of each."""
        starts: list[int] = []
        first_position = 0 if prompt is None else prompt[1]
        for ids in texts:
            starts.append(len(self.token_ids))
            self.token_ids += ids
            self.positions += range(first_position, first_position + len(ids))
        # Form sets of similar length; empty texts are left out.
        start, remaining = starts[0], [len(ids) for ids in texts if ids]
        while remaining:
            taken = [length for length in remaining if SPREAD * length >= remaining[0]]
            self.texts.append(Texts(start, tuple(taken), prompt))
            start, remaining = self.texts[-1].end, remaining[len(taken) :]
        return starts
