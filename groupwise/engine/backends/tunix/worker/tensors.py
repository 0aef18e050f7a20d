"""JAX arrays with the methods of torch's tensors that losses use (`groupwise.algorithms.base`), so that each loss is written only once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


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

    def exp(self) -> Tensor:
        return Tensor(jnp.exp(self.value))

    def expm1(self) -> Tensor:
        return Tensor(jnp.expm1(self.value))

    def abs(self) -> Tensor:
        return Tensor(jnp.abs(self.value))

    def square(self) -> Tensor:
        return Tensor(jnp.square(self.value))

    def minimum(self, other: Tensor) -> Tensor:
        return Tensor(jnp.minimum(self.value, other.value))

    def clamp(self, min: float | None = None, max: float | None = None) -> Tensor:
        """Limit values to the bounds; at a bound itself the gradient is 1, while jnp.clip would halve it."""
        value = self.value
        if min is not None:
            value = jnp.where(self.value < min, jnp.asarray(min, value.dtype), value)
        if max is not None:
            value = jnp.where(self.value > max, jnp.asarray(max, value.dtype), value)
        return Tensor(value)

    def masked_fill(self, mask: Tensor, filling: float) -> Tensor:
        """`filling` wherever the mask is set; the values replaced reach neither value nor gradient."""
        return Tensor(jnp.where(mask.value, jnp.asarray(filling, self.dtype), self.value))

    def sum(self, axis: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Sum along an axis; truth values are counted."""
        value = self.value.astype(jnp.int32) if self.dtype == jnp.bool_ else self.value
        return Tensor(value.sum(axis, keepdims=keepdim))

    def unsqueeze(self, axis: int) -> Tensor:
        return Tensor(jnp.expand_dims(self.value, axis))

    def expand_as(self, other: Tensor) -> Tensor:
        return Tensor(jnp.broadcast_to(self.value, other.shape))

    def __neg__(self) -> Tensor:
        return Tensor(-self.value)

    def __invert__(self) -> Tensor:
        return Tensor(~self.value)

    def __add__(self, other: Any) -> Tensor:
        return Tensor(self.value + plain(other))

    def __sub__(self, other: Any) -> Tensor:
        return Tensor(self.value - plain(other))

    def __mul__(self, other: Any) -> Tensor:
        return Tensor(self.value * plain(other))

    def __truediv__(self, other: Any) -> Tensor:
        return Tensor(self.value / plain(other))

    def __rsub__(self, other: Any) -> Tensor:
        return Tensor(plain(other) - self.value)

    def __rtruediv__(self, other: Any) -> Tensor:
        return Tensor(plain(other) / self.value)

    __radd__ = __add__
    __rmul__ = __mul__

    def __and__(self, other: Any) -> Tensor:
        return Tensor(self.value & plain(other))

    def __or__(self, other: Any) -> Tensor:
        return Tensor(self.value | plain(other))

    def __lt__(self, other: Any) -> Tensor:
        return Tensor(self.value < plain(other))

    def __gt__(self, other: Any) -> Tensor:
        return Tensor(self.value > plain(other))

    def __eq__(self, other: object) -> Any:
        return Tensor(self.value == plain(other))

    def __ne__(self, other: object) -> Any:
        return Tensor(self.value != plain(other))

    __hash__ = None  # type: ignore[assignment]


def plain(value: Any) -> Any:
    """The array of a tensor; numbers are returned unchanged."""
    return value.value if isinstance(value, Tensor) else value
