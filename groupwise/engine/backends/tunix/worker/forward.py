"""Computes sequences, and their tokens' log-probabilities. Rows are padded on the right, to few shapes, each compiled once."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from groupwise.core.types import Row
from groupwise.engine.backends.tunix.worker.head import Numbers, Targets, detach_head
from groupwise.engine.backends.tunix.worker.head import numbers as numbers_of

LENGTHS = 4
"""Rows are padded to the longest length, or to three quarters, half or a quarter of it."""
HALVINGS = 3
"""Number of batch sizes in rows, each half of the one before."""


class Sequences(NamedTuple):
    """Rows as arrays [B, L]; facts about a token are at the place where the model predicts it, one before the token's own."""

    tokens_BL: Any
    targets: Targets
    temperatures_B: Any
    withheld_V: Any
    """Mask of tokens that cannot be drawn at places that the targets mark; None if nothing is withheld."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are computed together, with their indices in the given list."""

    rows: tuple[Row, ...]
    indices: tuple[int, ...]
    count: int
    """Rows in the shape; those beyond `rows` are padding."""
    length: int

    def spread(self, values: Sequence[Sequence[float]]) -> np.ndarray:
        """Values of the rows' completion tokens as [B, L], each at the place where its token is predicted."""
        padded = np.zeros((self.count, self.length), np.float32)
        for padded_row, row, row_values in zip(padded, self.rows, values, strict=False):
            start = len(row.prompt_ids) - 1
            padded_row[start : start + len(row_values)] = row_values
        return padded

    def unpad(self, values_BL: Any) -> list[tuple[float, ...]]:
        """The inverse of `spread`: the values of each row's completion tokens."""
        values = np.asarray(values_BL)
        return [
            tuple(row_values[len(row.prompt_ids) - 1 :][: len(row.completion_ids)].tolist())
            for row_values, row in zip(values, self.rows, strict=False)
        ]

    def by_row(self, values: Sequence[float], filling: float = 0.0) -> np.ndarray:
        """One value per row as [B]; padding rows get `filling`."""
        return np.array([*values, *[filling] * (self.count - len(self.rows))], np.float32)

    def sequences(self, vocabulary: int) -> Sequences:
        """The rows in the form that the model takes."""
        tokens = np.zeros((self.count, self.length), np.int32)
        targets = np.zeros((self.count, self.length), np.int32)
        for inputs, target, row in zip(tokens, targets, self.rows, strict=False):
            ids = (*row.prompt_ids, *row.completion_ids)
            inputs[: len(ids)] = ids
            target[: len(ids) - 1] = ids[1:]
            if row.targets is not None:
                start = len(row.prompt_ids) - 1
                target[start : start + len(row.targets)] = row.targets
        read = self.spread([[1.0] * len(row.completion_ids) for row in self.rows]) != 0
        temperatures_B = self.by_row([row.temperature for row in self.rows], 1.0)
        if not any(row.withheld for row in self.rows):
            return Sequences(tokens, Targets(targets, read, None), temperatures_B, None)
        withheld_V = np.zeros(vocabulary, np.bool_)
        for row in self.rows:
            for span in row.withheld:
                withheld_V[[token for token in span.token_ids if token < vocabulary]] = True
        spans = [
            [
                any(span.start <= index < span.end for span in row.withheld)
                for index in range(len(row.completion_ids))
            ]
            for row in self.rows
        ]
        withheld = self.spread(spans) != 0
        return Sequences(tokens, Targets(targets, read, withheld), temperatures_B, withheld_V)


def cut(rows: Sequence[Row], longest: int, tokens: int, multiple: int) -> Iterator[Batch]:
    """Divide rows into batches of at most `tokens` tokens, with similar lengths together; rows per shape are a multiple of `multiple`."""
    shapes = [-(-longest * quarter // LENGTHS) for quarter in range(1, LENGTHS + 1)]
    by_shape: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        length = len(row.prompt_ids) + len(row.completion_ids)
        by_shape.setdefault(next(shape for shape in shapes if shape >= length), []).append(index)
    for length, indices in sorted(by_shape.items()):
        most = max(1, tokens // length)
        counts = sorted(
            {-(-max(1, most >> halving) // multiple) * multiple for halving in range(HALVINGS)}
        )
        while indices:
            count = next((size for size in counts if size >= len(indices)), counts[-1])
            chosen, indices = indices[:count], indices[count:]
            yield Batch(tuple(rows[index] for index in chosen), tuple(chosen), count, length)


def numbers(model: Any, sequences: Sequences) -> Numbers:
    """Numbers of each target; see `groupwise.engine.backends.tunix.worker.head.numbers`."""
    length = sequences.tokens_BL.shape[1]
    positions_BL = jnp.broadcast_to(jnp.arange(length), sequences.tokens_BL.shape)
    causal_BLL = jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), jnp.bool_)), (*sequences.tokens_BL.shape, length)
    )
    head = detach_head(model)
    hidden_BLD, _ = model(sequences.tokens_BL, positions_BL, None, causal_BLL)
    return numbers_of(
        head, hidden_BLD, sequences.targets, sequences.temperatures_B, sequences.withheld_V
    )


def with_recomputation(model: Any) -> Any:
    """The model with recomputation: only the inputs of its layers are kept, and the backward pass recomputes the layers.

    Tunix's own way (`remat_config`) does not work with an adapter: qwix then puts the factors on no mesh, and flax refuses Llama's layers
    (TraceContextError).
    """

    def wrapped(layer: Any) -> Any:
        graph, weights = nnx.split(layer)

        def compute(weights: Any, *args: Any, **options: Any) -> Any:
            return nnx.merge(graph, weights)(*args, **options)

        return functools.partial(jax.checkpoint(compute), weights)

    model.layers = tuple(map(wrapped, model.layers))
    return model
