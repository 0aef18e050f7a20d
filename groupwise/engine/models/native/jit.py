"""Compiles the kernels in this folder."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, TypeVar, cast

import numba

from groupwise.engine.models.native.kernel_cache import cache_of

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(order: Set[str] = frozenset(), *, kept: bool = False) -> Callable[[Function], Function]:
    """Compile a function when it is first called with arguments of some kind.

    `order` are LLVM's names for what it may do to the order of sums and to special numbers. If `kept`, the result is cached for later runs
    (`groupwise.engine.models.native.kernel_cache`); use it for functions called from outside, which contain the others.
    """
    options: dict[str, Any] = {"fastmath": set(order), "error_model": "numpy", "nogil": True}

    def decorate(function: Function) -> Function:
        compiled: Any = numba.njit(**options)(function)
        if kept:
            compiled._cache = cache_of(function)  # as numba itself does for cache=True
        return cast("Function", compiled)

    return decorate
