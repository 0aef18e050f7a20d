"""Combines several sets of rows: how much of each is drawn, which rows are held out, and which columns they share.

Held-out rows are split off first and never trained on: rows with the same prompt are all on one side, even across sets. For the
rest, a weight sets how often a row occurs in an epoch: 1 takes each once, 0.5 half of them, 2 each twice, 1.5 each once and half of
them twice. The seed decides which half, and each epoch takes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from groupwise.core.errors import TaskError
from groupwise.core.types import with_number_of
from groupwise.tasks.data.chat import Row
from groupwise.tasks.data.order import Share, Stream

Join = Literal["same", "common", "all"]
"""Columns of a mixture. `same`: all sets must have the same; `common`: only those that all sets have; `all`: the columns of any set."""


@dataclass(frozen=True, slots=True)
class Part:
    """One set of rows."""

    name: str
    """Name for messages and for the random draw: unique in a mixture."""
    rows: Sequence[Row]
    weight: float = 1.0
    renamed: frozenset[str] = frozenset()
    """Original columns that also exist under our names; other sets need not have them."""


def split(
    parts: Sequence[Part], share: float, seed: int, key: Callable[[Row], str]
) -> tuple[list[Part], list[Part]]:
    """Training parts and held-out parts, which get a share of each part's distinct rows, by `key`. Raises TaskError if a side is empty."""
    held_out: dict[str, bool] = {}
    for part in parts:
        keys = list(dict.fromkeys(map(key, part.rows)))
        new_keys = [row_key for row_key in keys if row_key not in held_out]
        held_out_count = sum(held_out.get(row_key, False) for row_key in keys)
        count = min(max(round(share * len(keys)) - held_out_count, 0), len(new_keys))
        sampled = set(Stream("held out", seed, part.name).sample(new_keys, count))
        held_out |= {row_key: row_key in sampled for row_key in new_keys}
    train = [_filter_rows(part, lambda row: not held_out[key(row)]) for part in parts]
    test = [_filter_rows(part, lambda row: held_out[key(row)]) for part in parts]
    for part, train_part in zip(parts, train, strict=True):
        if not train_part.rows:
            raise TaskError(
                f"{part.name}: data.test_split_size = {share:g} leaves none of its {len(part.rows)} rows for training."
            )
    if not any(part.rows for part in test):
        total = sum(len(part.rows) for part in parts)
        raise TaskError(f"data.test_split_size = {share:g} of {total} rows is none. Raise it.")
    return train, [part for part in test if part.rows]


def _filter_rows(part: Part, belongs: Callable[[Row], bool]) -> Part:
    return replace(part, rows=[row for row in part.rows if belongs(row)])


def mix_parts(parts: Sequence[Part], seed: int) -> tuple[list[Row], tuple[Share, ...]]:
    """All rows, and their shares of an epoch; several parts are shuffled together. Raises TaskError if a share has no rows."""
    rows = [row for part in parts for row in part.rows]
    order = range(len(rows))
    if len(parts) > 1:
        order = Stream("mixture", seed).sample(order, len(rows))
    position_of = {row: position for position, row in enumerate(order)}
    numbers = iter(range(len(rows)))
    positions = [[position_of[next(numbers)] for _ in part.rows] for part in parts]
    shares = [
        _make_share(part, tuple(part_positions))
        for part, part_positions in zip(parts, positions, strict=True)
        if part.weight != 1.0
    ]
    return [rows[row] for row in order], tuple(shares)


def _make_share(part: Part, indices: tuple[int, ...]) -> Share:
    if round(part.weight * len(part.rows)) < 1:
        raise TaskError(
            f"{part.name}: the weight {part.weight:g} of its {len(part.rows)} rows is none. Raise it, or leave the set out."
        )
    return Share(part.name, indices, part.weight)


def interleave(parts: Sequence[Part]) -> list[Row]:
    """Takes one row of each part in turn, so the first rows represent all parts."""
    rounds = zip_longest(*(part.rows for part in parts))
    return [row for turn in rounds for row in turn if row is not None]


def with_same_columns(parts: Sequence[Part], join: Join) -> list[Part]:
    """The parts with the same columns in every row. Raises TaskError that names the differences if they must be the same."""
    columns = [dict.fromkeys(name for row in part.rows for name in row) for part in parts]
    all_columns = dict.fromkeys(name for names in columns for name in names)
    common = [name for name in all_columns if all(name in names for names in columns)]
    if join == "same" and set(all_columns) - {
        *common,
        *(n for part in parts for n in part.renamed),
    }:
        lines = [
            f"  {part.name} lacks {', '.join(repr(column) for column in all_columns if column not in part_columns)}"
            for part, part_columns in zip(parts, columns, strict=True)
            if len(part_columns) < len(all_columns)
        ]
        raise TaskError(
            "\n".join(
                [
                    f"The sets of data.dataset_mixture differ in their columns; all have {', '.join(map(repr, common)) or 'none'}.",
                    *lines,
                    "Give them the same names with `columns` of each set, or say in data.mixture_columns what becomes of the others: "
                    "common leaves them out, all fills them with null.",
                ]
            )
        )
    if join == "common" or (join == "same" and len(common) < len(all_columns)):
        return [_with_columns(part, common) for part in parts]
    return (
        [_with_columns(part, list(all_columns)) for part in parts]
        if len(parts) > 1
        else list(parts)
    )


def _with_columns(part: Part, columns: Sequence[str]) -> Part:
    rows = [with_number_of(row, {name: row.get(name) for name in columns}) for row in part.rows]
    return replace(part, rows=rows)
