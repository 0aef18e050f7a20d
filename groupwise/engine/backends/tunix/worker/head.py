"""The output head as a separate function, so that logits are computed only for tokens that are read, and a few at a time.

Tunix's models return the logits of all tokens. For 4,096 tokens and a vocabulary of 262,144 they take four gigabytes in float32, and
several times that in a backward pass. Here only the hidden states, and the logits of one piece, are in memory. Logits are float32 for
every format of the model.

`in_float32` makes products with frozen weights that are not rounded to the weights' format before something is added to them. bfloat16
has eight bits: a logit of 30 is known to an eighth, and a small update of an adapter vanishes next to its layer's output. Devices sum in
float32 anyway, so returning the unrounded sum costs nothing more. The gradient of the inputs is computed in the weights' format, as it
would be otherwise: JAX by default would multiply float32 with bfloat16, which no matrix unit supports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Head = Callable[[Any], Any]
"""Maps hidden states [B, L, D] to logits [B, L, V] in float32."""
PIECE_BYTES = 256 << 20
"""Bytes of the logits of one piece, in float32."""
NEVER = -1e30
"""Replaces the logit of a token that cannot be drawn."""
Product = Callable[..., Any]
"""Product of inputs and a weight in one format; takes `preferred_element_type`, as JAX's products do."""


class Targets(NamedTuple):
    """For each hidden state of [B, L], the token that comes next."""

    ids_BL: Any
    read_BL: Any
    """True if the result is used; other results are undefined."""
    withheld_BL: Any
    """True if the ids of `withheld_V` cannot be drawn there; None if nothing is withheld."""


class Numbers(NamedTuple):
    """The model's numbers for each target."""

    logprobs_BL: Any
    entropies_BL: Any
    right_BL: Any


def detach_head(model: Any) -> Head:
    """Remove and return the head of a model; from then on the model returns hidden states instead of logits."""
    if hasattr(model, "lm_head"):
        weight, words = model.lm_head.w.get_value(), "BLD,DV->BLV"
        model.lm_head = _as_it_is
    else:
        weight, words = model.embedder.input_embedding.get_value(), "BLD,VD->BLV"
        model.embedder.decode = _as_it_is
    product = functools.partial(jnp.einsum, words)
    return lambda hidden_BLD: in_float32(product, hidden_BLD.astype(weight.dtype), weight)


def numbers(
    head: Head, hidden_BLD: Any, targets: Targets, temperatures_B: Any, withheld_V: Any
) -> Numbers:
    """Log-probability (nats) of each target at its row's temperature, the entropy there, and whether it is the most likely token.

    Computed in pieces of the length; the backward pass recomputes each. Pieces without a token to read are skipped.
    """

    def full_piece(piece: tuple[Any, Targets]) -> Numbers:
        hidden_BSD, targets = piece
        scaled_BSV = head(hidden_BSD) / temperatures_B[:, None, None]
        if targets.withheld_BL is not None:
            scaled_BSV = jnp.where(targets.withheld_BL[..., None] & withheld_V, NEVER, scaled_BSV)
        return _piece_numbers(scaled_BSV, targets.ids_BL)

    def empty_piece(piece: tuple[Any, Targets]) -> Numbers:
        return jax.tree.map(
            lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(full_piece, piece)
        )

    def next_piece(_: None, piece: tuple[Any, Targets]) -> tuple[None, Numbers]:
        return None, jax.lax.cond(piece[1].read_BL.any(), full_piece, empty_piece, piece)

    rows, length, _ = hidden_BLD.shape
    vocabulary = jax.eval_shape(head, hidden_BLD).shape[-1]
    size = min(length, max(1, PIECE_BYTES // (4 * vocabulary * rows)))
    pieces = jax.tree.map(lambda values: _split_pieces(values, size), (hidden_BLD, targets))
    _, results = jax.lax.scan(jax.checkpoint(next_piece, prevent_cse=False), None, pieces)
    return jax.tree.map(lambda values: _join_pieces(values)[:, :length], results)


def _piece_numbers(scaled_BSV: Any, targets_BS: Any) -> Numbers:
    totals_BS = jax.nn.logsumexp(scaled_BSV, axis=-1)
    chosen_BS = jnp.take_along_axis(scaled_BSV, targets_BS[..., None], -1)[..., 0]
    chances_BSV = jnp.exp(scaled_BSV - totals_BS[..., None])
    entropies_BS = totals_BS - (chances_BSV * scaled_BSV).sum(-1)
    return Numbers(chosen_BS - totals_BS, entropies_BS, scaled_BSV.argmax(-1) == targets_BS)


def _split_pieces(values_BL: Any, size: int) -> Any:
    """[B, L, …] as [pieces, B, size, …], the last one padded."""
    rows, length, *rest = values_BL.shape
    count = -(-length // size)
    padding = [(0, 0), (0, count * size - length), *[(0, 0)] * len(rest)]
    return jnp.moveaxis(jnp.pad(values_BL, padding).reshape(rows, count, size, *rest), 1, 0)


def _join_pieces(values_PBS: Any) -> Any:
    """The inverse of `_split_pieces`; the padding stays."""
    pieces, rows, size = values_PBS.shape
    return jnp.moveaxis(values_PBS, 0, 1).reshape(rows, pieces * size)


def _as_it_is(value: Any) -> Any:
    return value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_float32(product: Product, inputs: Any, weight: Any) -> Any:
    """The product in float32; only the inputs get a gradient."""
    return product(inputs, weight, preferred_element_type=jnp.float32)


def _forward(product: Product, inputs: Any, weight: Any) -> tuple[Any, Any]:
    return in_float32(product, inputs, weight), (inputs, weight)


def _backward(product: Product, residuals: Any, cotangent: Any) -> tuple[Any, None]:
    inputs, weight = residuals
    _, back = jax.vjp(lambda x: product(x, weight), inputs)
    return (*back(cotangent.astype(inputs.dtype)), None)


in_float32.defvjp(_forward, _backward)
