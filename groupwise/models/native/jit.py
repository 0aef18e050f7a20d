"""How the kernels beside it are compiled."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(order: Set[str] = frozenset(), *, kept: bool = False) -> Callable[[Function], Function]:
    """Compile a function when it is first called with arguments of some kind.

    `order` are LLVM's names for what it may do to the order of sums and to special numbers. What is `kept` stands beside the source
    afterwards, or in the user's cache where that cannot be written; this is for functions that others call, which contain the rest.
    """
    options: dict[str, Any] = {"fastmath": set(order), "error_model": "numpy", "nogil": True}

    def decorate(function: Function) -> Function:
        try:
            return cast("Function", numba.njit(cache=kept, **options)(function))
        except RuntimeError:  # numba found no folder to write to
            return cast("Function", numba.njit(**options)(function))

    return decorate
