"""Lays rows out for the learner: divides them into micro-batches by a budget of tokens, in the layout that computes least.

There are three layouts. A `MicroBatch` is one prompt and some of its completions. The prompt's tokens are computed once for all of them,
so a group of G completions of length R after a prompt of length P costs P + G · R tokens instead of G · (P + R). A `PackedBatch` is rows of
any prompts, several one after another in one sequence; each attends only to itself. A row then costs its own length and almost no padding.
`PackedGroups` is both: prompts, each followed by its completions, in one sequence. That computes least, but attention takes one short text
at a time, which is fast only by a GPU's kernel for many texts. A `PackedBatch` cannot be one of those: models that take dense masks would
compute the scores of all its tokens with each other, where several sequences are each as long as the longest row.

Only `cut` chooses between them; the caller decides whether packing is allowed, and whether whole groups are packed. `divide_groups` divides
whole groups, for `PackedGroups` and for the native engine's `FlatBatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from groupwise.core.types import Row
from groupwise.engine.models.native.facts import KEYS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Completions of one prompt that are computed together."""

    prompt_ids: tuple[int, ...]
    rows: tuple[Row, ...]
    indices: tuple[int, ...]
    """Index of each row in the list that was divided."""

    @property
    def starts(self) -> tuple[tuple[int, int], ...]:
        """The same as `PackedBatch.starts`, for rows that are each computed with their own prompt."""
        return tuple((number, 0) for number in range(len(self.rows)))

    @property
    def shape(self) -> tuple[int, int]:
        """The same as `PackedBatch.shape`, for rows that are each computed with their own prompt."""
        return len(self.rows), max(map(_row_tokens, self.rows))

    @property
    def width(self) -> int:
        """The largest number of targets of a row."""
        return most_targets(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.prompt_ids) + len(self.rows) * longest_completion(self.rows)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Whole rows, prompts included, that are computed together as sequences of one length."""

    rows: tuple[Row, ...]
    indices: tuple[int, ...]
    """Index of each row in the list that was divided."""
    starts: tuple[tuple[int, int], ...]
    """For each row the index of its sequence, and the index of its first token there."""
    shape: tuple[int, int]
    """Number of sequences, and the length of each in tokens."""

    @property
    def width(self) -> int:
        """The largest number of targets of a row."""
        return most_targets(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Prompts with some of their completions, one after another in one sequence; each prompt is computed once, and nothing is padding."""

    groups: tuple[tuple[Row, ...], ...]
    """Rows of one prompt each."""
    indices: tuple[int, ...]
    """Index of each row in the list that was divided, one group after another."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all groups."""
        return tuple(chain(*self.groups))

    @property
    def width(self) -> int:
        """The largest number of targets of a row."""
        return most_targets(self.rows)


TransformersBatch = MicroBatch | PackedBatch | PackedGroups
"""Rows that transformers' modules compute together."""


class Batch(Protocol):
    """Rows that are computed together, in any layout."""

    @property
    def rows(self) -> tuple[Row, ...]: ...

    @property
    def indices(self) -> tuple[int, ...]:
        """Index of each row in the list that was divided."""
        ...

    @property
    def width(self) -> int:
        """The largest number of targets of a row: the length to which numbers per target are padded."""
        ...


def longest_completion(rows: Sequence[Row]) -> int:
    """Tokens of the longest completion."""
    return max(len(row.completion_ids) for row in rows)


def most_targets(rows: Sequence[Row]) -> int:
    """The largest number of targets of a row; the length of the longest completion unless rows name targets of their own."""
    return max(len(row.target_ids) for row in rows)


def cut(
    rows: Sequence[Row],
    max_tokens: int,
    *,
    packing: bool,
    prompt_shared: bool = True,
    whole_groups: bool = False,
) -> Sequence[TransformersBatch]:
    """Divide all rows into micro-batches. With `packing`, prompts whose rows cost less packed than shared are packed together; with
    `whole_groups` too, all are.

    If the forward pass cannot share prompts, all rows are packed.
    """
    if packing and whole_groups:
        return pack_groups(rows, max_tokens)
    if not packing:
        return [*microbatches(rows, max_tokens, prompt_shared=prompt_shared)]
    sharing: list[int] = []
    for prompt_ids, members in group_by_prompt(rows).items() if prompt_shared else ():
        width = max(len(rows[index].completion_ids) for index in members)
        shared_cost = len(prompt_ids) + len(members) * (width - 1)
        packed_cost = sum(_row_tokens(rows[index]) for index in members)
        if shared_cost < packed_cost:
            sharing += members
    shared = microbatches([rows[index] for index in sharing], max_tokens)
    rest = sorted(set(range(len(rows))) - set(sharing))
    packs = pack_rows([rows[index] for index in rest], max_tokens)
    return [
        *(MicroBatch(b.prompt_ids, b.rows, _pick_indices(sharing, b.indices)) for b in shared),
        *(PackedBatch(b.rows, _pick_indices(rest, b.indices), b.starts, b.shape) for b in packs),
    ]


def group_by_prompt(rows: Sequence[Row]) -> dict[tuple[int, ...], list[int]]:
    """Indices of the rows of each prompt; prompts are in the order of their first row."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.prompt_ids, []).append(index)
    return groups


def microbatches(
    rows: Sequence[Row], max_tokens: int, *, prompt_shared: bool = True
) -> list[MicroBatch]:
    """Divide rows so that each micro-batch has at most `max_tokens` tokens, or is a single longer row.

    If the forward pass cannot share the prompt, each row costs its own copy. Prompts keep the order of their first row; within a prompt,
    longer completions come first, which needs the least padding.
    """
    batches: list[MicroBatch] = []
    for prompt_ids, members in group_by_prompt(rows).items():
        per_batch, per_row = (len(prompt_ids), 0) if prompt_shared else (0, len(prompt_ids))
        longest_first = sorted(members, key=lambda index: -len(rows[index].completion_ids))
        while longest_first:
            width = max(1, len(rows[longest_first[0]].completion_ids))
            count = max(1, (max_tokens - per_batch) // (width + per_row))
            indices, longest_first = longest_first[:count], longest_first[count:]
            batches.append(
                MicroBatch(prompt_ids, tuple(rows[index] for index in indices), tuple(indices))
            )
    return batches


def pack_rows(rows: Sequence[Row], max_tokens: int) -> list[PackedBatch]:
    """Pack rows into sequences as long as the longest row, with as many sequences in a batch as the budget allows.

    Longer rows come first, each into the first sequence with room (first-fit decreasing). Sequences are no longer than a single row needs,
    because the cost of attention is quadratic in their length.
    """
    remaining = sorted(range(len(rows)), key=lambda index: -_row_tokens(rows[index]))
    batches: list[PackedBatch] = []
    while remaining:
        length = _row_tokens(rows[remaining[0]])
        max_sequences = max(1, max_tokens // length)
        filled: list[int] = []  # tokens of each sequence
        positions: dict[int, tuple[int, int]] = {}
        order, remaining = remaining, []
        for index in order:
            needed = _row_tokens(rows[index])
            fits = (number for number, used in enumerate(filled) if used + needed <= length)
            sequence = next(fits, len(filled))
            if sequence == max_sequences:
                remaining.append(index)
                continue
            if sequence == len(filled):
                filled.append(0)
            positions[index] = (sequence, filled[sequence])
            filled[sequence] += needed
        batches.append(
            PackedBatch(
                tuple(rows[index] for index in positions),
                tuple(positions),
                tuple(positions.values()),
                (len(filled), length),
            )
        )
    return batches


def pack_groups(rows: Sequence[Row], max_tokens: int) -> list[PackedGroups]:
    """Pack whole groups; see `divide_groups`."""
    return [
        PackedGroups(
            tuple(tuple(rows[index] for index in members) for members in groups),
            tuple(chain(*groups)),
        )
        for groups in divide_groups(rows, max_tokens)
    ]


def divide_groups(
    rows: Sequence[Row], max_tokens: int, *, packing: bool = True
) -> list[list[list[int]]]:
    """Divide rows among batches. A batch lists groups, and a group the indices of rows of one prompt, longest first.

    A batch has at most `max_tokens` tokens, and its texts see at most `KEYS_PER_TOKEN` times as many keys; a single row may have more.
    Prompts keep the order of their first row. Only a group that would not fit by itself is divided, with its prompt in each part. Without
    `packing`, a batch has rows of one prompt only.
    """
    batches: list[list[list[int]]] = []
    tokens = keys = 0
    for members in group_by_prompt(rows).values():
        for part in _fitting(rows, members, max_tokens):
            of_part = group_tokens([rows[index] for index in part])
            new = (tokens + of_part[0], keys + of_part[1])
            if not batches or not packing or not _fits(*new, max_tokens):
                batches.append([])
                new = of_part
            batches[-1].append(part)
            tokens, keys = new
    return batches


def _fitting(rows: Sequence[Row], members: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Divide the members of a group, longest first, into parts that fit; each part has at least one."""
    part: list[int] = []
    for index in sorted(members, key=lambda index: -len(rows[index].completion_ids)):
        more = [*part, index]
        if part and not _fits(*group_tokens([rows[each] for each in more]), max_tokens):
            yield part
            more = [index]
        part = more
    yield part


def group_tokens(rows: Sequence[Row]) -> tuple[int, int]:
    """Tokens to compute for rows of one prompt, and the keys that their texts see. A single row is one text; several see copies of the
    prompt's keys."""
    prompt = len(rows[0].prompt_ids)
    tokens = prompt + sum(_inputs(row) for row in rows)
    return tokens, tokens + (prompt * len(rows) if len(rows) > 1 else 0)


def _fits(tokens: int, keys: int, max_tokens: int) -> bool:
    return tokens <= max_tokens and keys <= KEYS_PER_TOKEN * max_tokens


def _inputs(row: Row) -> int:
    """Tokens of the completion that the forward pass reads: the last is never an input."""
    return max(0, len(row.completion_ids) - 1)


def _row_tokens(row: Row) -> int:
    """Tokens that the forward pass computes for a row: the last token is never an input."""
    return max(1, len(row.prompt_ids) + len(row.completion_ids) - 1)


def _pick_indices(numbers: Sequence[int], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers[index] for index in indices)
