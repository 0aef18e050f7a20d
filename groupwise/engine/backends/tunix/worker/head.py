"""The last layer by itself, so that logits are computed only for tokens whose numbers are read, and a few at a time.

Tunix's models give the logits of all tokens. For 4,096 tokens and a vocabulary of 262,144 they are four gigabytes in float32, and several
times that in a backward pass; here it is the hidden states, and the logits of one piece. They are in float32, whatever the model's format.

`in_float32` makes products with frozen weights that are not rounded to the weights' format before something is added to them. bfloat16
has eight bits: a logit of 30 is known to an eighth, and a small step of an adapter vanishes beside its layer's output. Devices sum in
float32 anyway, so this costs no more than passing the sum on as it is. The gradient of the inputs is computed in the weights' format, as
without it: JAX alone would multiply float32 with bfloat16, which no matrix unit does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Head = Callable[[Any], Any]
"""Hidden states [B, L, D] to logits [B, L, V] in float32."""
PIECE_BYTES = 256 << 20
"""Bytes of the logits of one piece, in float32."""
NEVER = -1e30
"""Replaces the logit of a token that cannot be drawn."""
Product = Callable[..., Any]
"""Product of inputs and a weight of one format; takes `preferred_element_type`, as JAX's products do."""


class Targets(NamedTuple):
    """Questions to hidden states [B, L], each about the token that comes next."""

    ids_BL: Any
    read_BL: Any
    """True if the answer is used; other answers mean nothing."""
    withheld_BL: Any
    """True if the ids of `withheld_V` cannot be drawn there; None if nothing is withheld."""


class Numbers(NamedTuple):
    """The model's numbers for each target."""

    logprobs_BL: Any
    entropies_BL: Any
    right_BL: Any


def taken_off(model: Any) -> Head:
    """The head of a model; from now on the model returns its hidden states instead of logits."""
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
    """Log-probability (nats) of each target at its row's temperature, entropy there, and whether it is the likeliest.

    Computed in pieces of the length, each once more in the backward pass; pieces without a token to read are left out.
    """

    def said(piece: tuple[Any, Targets]) -> Numbers:
        hidden_BSD, targets = piece
        scaled_BSV = head(hidden_BSD) / temperatures_B[:, None, None]
        if targets.withheld_BL is not None:
            scaled_BSV = jnp.where(targets.withheld_BL[..., None] & withheld_V, NEVER, scaled_BSV)
        return _numbers(scaled_BSV, targets.ids_BL)

    def nothing(piece: tuple[Any, Targets]) -> Numbers:
        return jax.tree.map(
            lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(said, piece)
        )

    def next_piece(_: None, piece: tuple[Any, Targets]) -> tuple[None, Numbers]:
        return None, jax.lax.cond(piece[1].read_BL.any(), said, nothing, piece)

    rows, length, _ = hidden_BLD.shape
    vocabulary = jax.eval_shape(head, hidden_BLD).shape[-1]
    size = min(length, max(1, PIECE_BYTES // (4 * vocabulary * rows)))
    pieces = jax.tree.map(lambda values: _cut(values, size), (hidden_BLD, targets))
    _, found = jax.lax.scan(jax.checkpoint(next_piece, prevent_cse=False), None, pieces)
    return jax.tree.map(lambda values: _join(values)[:, :length], found)


def _numbers(scaled_BSV: Any, targets_BS: Any) -> Numbers:
    totals_BS = jax.nn.logsumexp(scaled_BSV, axis=-1)
    chosen_BS = jnp.take_along_axis(scaled_BSV, targets_BS[..., None], -1)[..., 0]
    chances_BSV = jnp.exp(scaled_BSV - totals_BS[..., None])
    entropies_BS = totals_BS - (chances_BSV * scaled_BSV).sum(-1)
    return Numbers(chosen_BS - totals_BS, entropies_BS, scaled_BSV.argmax(-1) == targets_BS)


def _cut(values_BL: Any, size: int) -> Any:
    """[B, L, …] as [pieces, B, size, …], the last one padded."""
    rows, length, *rest = values_BL.shape
    count = -(-length // size)
    padding = [(0, 0), (0, count * size - length), *[(0, 0)] * len(rest)]
    return jnp.moveaxis(jnp.pad(values_BL, padding).reshape(rows, count, size, *rest), 1, 0)


def _join(values_PBS: Any) -> Any:
    """The inverse of the cut into pieces; the padding stays."""
    pieces, rows, size = values_PBS.shape
    return jnp.moveaxis(values_PBS, 0, 1).reshape(rows, pieces * size)


def _as_it_is(value: Any) -> Any:
    return value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_float32(product: Product, inputs: Any, weight: Any) -> Any:
    """Their product; only the inputs get a gradient."""
    return product(inputs, weight, preferred_element_type=jnp.float32)


def _forward(product: Product, inputs: Any, weight: Any) -> tuple[Any, Any]:
    return in_float32(product, inputs, weight), (inputs, weight)


def _backward(product: Product, kept: Any, cotangent: Any) -> tuple[Any, None]:
    inputs, weight = kept
    _, back = jax.vjp(lambda given: product(given, weight), inputs)
    return (*back(cotangent.astype(inputs.dtype)), None)


in_float32.defvjp(_forward, _backward)
