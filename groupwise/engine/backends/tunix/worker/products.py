"""Products with frozen weights that return float32, so that they are not rounded to the weights' format before something is added to them.

bfloat16 has eight bits: a logit of 30 is known to an eighth, and a small step of an adapter vanishes beside its layer's output. Devices
sum in float32 anyway, so this costs no more than passing the sum on as it is. The gradient of the inputs is computed in the weights'
format, as without it: JAX alone would multiply float32 with bfloat16, which no matrix unit does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Product = Callable[..., Any]
"""Product of inputs and a weight of one format; takes `preferred_element_type`, as JAX's products do."""


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
