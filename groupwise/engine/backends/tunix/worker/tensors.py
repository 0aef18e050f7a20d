"""JAX arrays with the tensor methods of torch that losses use (`groupwise.algorithms.base`), so that each loss is written only once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _of_one(operation: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Make a method that applies the operation to a tensor's array."""

    def method(self: Tensor) -> Tensor:
        return Tensor(operation(self.value))

    return method


def _of_two(operation: Callable[[Any, Any], Any]) -> Callable[[Tensor, Any], Tensor]:
    """Make a method that applies the operation to a tensor's array and another array or a number."""

    def method(self: Tensor, other: Any) -> Tensor:
        return Tensor(operation(self.value, plain(other)))

    return method


class Tensor:
    """An array, or a tracer of one. Operations return new tensors; gradients are those that torch would give."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = jnp.asarray(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def detach(self) -> Tensor:
        return Tensor(jax.lax.stop_gradient(self.value))

    def to(self, dtype: Any) -> Tensor:
        return Tensor(self.value.astype(dtype))

    exp = _of_one(jnp.exp)
    expm1 = _of_one(jnp.expm1)
    abs = _of_one(jnp.abs)
    square = _of_one(jnp.square)
    sigmoid = _of_one(jax.nn.sigmoid)

    def minimum(self, other: Tensor) -> Tensor:
        return Tensor(jnp.minimum(self.value, other.value))

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        """Limit values to the bounds. At a bound itself the gradient is 1, as in torch; jnp.clip would halve it."""
        value = self.value
        if min is not None:
            value = jnp.where(self.value < min, jnp.asarray(min, value.dtype), value)
        if max is not None:
            value = jnp.where(self.value > max, jnp.asarray(max, value.dtype), value)
        return Tensor(value)

    def masked_fill(self, mask: Tensor, filling: float) -> Tensor:
        """Replace values by `filling` where the mask is set; replaced values affect neither result nor gradient."""
        return Tensor(jnp.where(mask.value, jnp.asarray(filling, self.dtype), self.value))

    def sum(self, axis: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Sum along an axis; booleans are counted."""
        value = self.value.astype(jnp.int32) if self.dtype == jnp.bool_ else self.value
        return Tensor(value.sum(axis, keepdims=keepdim))

    def argsort(self, *, dim: int, descending: bool, stable: bool) -> Tensor:
        """Indices that sort along an axis."""
        return Tensor(jnp.argsort(self.value, dim, descending=descending, stable=stable))

    def unsqueeze(self, axis: int) -> Tensor:
        return Tensor(jnp.expand_dims(self.value, axis))

    def expand_as(self, other: Tensor) -> Tensor:
        return Tensor(jnp.broadcast_to(self.value, other.shape))

    __neg__ = _of_one(operator.neg)
    __invert__ = _of_one(operator.invert)
    __add__ = __radd__ = _of_two(operator.add)
    __sub__ = _of_two(operator.sub)
    __mul__ = __rmul__ = _of_two(operator.mul)
    __truediv__ = _of_two(operator.truediv)
    __and__ = _of_two(operator.and_)
    __or__ = _of_two(operator.or_)
    __lt__ = _of_two(operator.lt)
    __gt__ = _of_two(operator.gt)
    __eq__ = _of_two(operator.eq)
    __ne__ = _of_two(operator.ne)

    def __rsub__(self, other: Any) -> Tensor:
        return Tensor(plain(other) - self.value)

    def __rtruediv__(self, other: Any) -> Tensor:
        return Tensor(plain(other) / self.value)

    __hash__ = None  # type: ignore[assignment]


def plain(value: Any) -> Any:
    """The array of a tensor; numbers are returned unchanged."""
    return value.value if isinstance(value, Tensor) else value
