"""Facts about native models that need no torch: which families have one, and in what blocks its numbers are computed."""

from __future__ import annotations

from functools import cache
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CHUNK = 256
"""Rows of logits held at a time: 50 MB in float32 for a vocabulary of 49,152."""
LANES = 16
"""Numbers of a vector of the processor."""
STRETCH = 16
"""Keys that stand beside each other, in the order [D, STRETCH]; missing ones weigh 0."""
ROWS = 8
"""Few rows are computed in multiples of this: tiles are made for it, and libraries may compute fewer with other last bits."""

PAGE = 64
"""Tokens of a page, in which a GPU keeps keys and values."""


def multiple(count: int, of: int) -> int:
    """The least multiple of `of` that is at least as large."""
    return -(-count // of) * of


def pages_of_a_row(tokens: int) -> int:
    """Pages for a prompt and its completion of so many tokens together, at most: the completion begins on a page of its own."""
    return multiple(tokens, PAGE) // PAGE + 1


def head_size(config: Any) -> int:
    """Numbers of a query, a key or a value of one head, which not every config says."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@cache
def without_numba() -> str | None:
    """Why there is no numba; None if it can be imported."""
    try:
        import numba  # noqa: F401 — asked for, not used
    except Exception as error:  # noqa: BLE001 — beside another NumPy than it was made for, any may come
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return "numba is not installed (pip install numba)"
        return f"numba cannot be imported: {error}"
    return None
