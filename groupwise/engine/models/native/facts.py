"""Facts about native models that need no torch: the supported families, and the sizes of the blocks in which they compute."""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from groupwise.core.cache import cache_folder
from groupwise.core.extras import install_command

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CHUNK = 256
"""Most rows of logits in memory at a time: 50 MB in float32 for a vocabulary of 49,152."""
LANES = 16
"""Numbers in one vector of the CPU kernels."""
STRETCH = 16
"""Keys are stored in blocks of this many, ordered [D, STRETCH]; missing ones get weight 0."""
ROTATED = 64
"""Inputs of a quantised product that a Hadamard matrix mixes; they are spread evenly over the row."""
VOCABULARY_BLOCK = 128
"""Tokens of the vocabulary among which a draw, or the most likely token, is looked for one by one."""
ROWS = 8
"""Products of few rows pad them to a multiple of this: tiles have this size, and libraries may give other last bits for fewer rows."""

PAGE = 64
"""Tokens per page of a GPU's cache of keys and values."""

KEYS_PER_TOKEN = 4
"""The most keys for each token of a micro-batch's budget: attention copies a prompt's keys for each completion. Without a limit, short
completions of a long prompt would need more memory for keys than for all else."""


def multiple(count: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `count`."""
    return -(-count // of) * of


def pages_of_a_row(tokens: int) -> int:
    """Most pages for a prompt and its completion of `tokens` tokens together: the completion starts on a new page."""
    return multiple(tokens, PAGE) // PAGE + 1


def head_size(config: Any) -> int:
    """Numbers in a query, key or value of one head; computed if the config does not state it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@cache
def without_numba() -> str | None:
    """Why numba cannot be used; None if it can be imported."""
    try:
        import numba  # noqa: F401 — only to see whether it works
    except Exception as error:  # noqa: BLE001 — with an incompatible NumPy it may raise any error
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return f"numba is not installed ({install_command('train')})"
        return f"numba cannot be imported: {error}"
    return None


def numba_works() -> bool:
    """True if numba can be imported.

    It takes half a second to find out, so a success is noted in the cache, for other processes with the same libraries.
    """
    if "numba" in sys.modules:
        return without_numba() is None
    installed = [_installed(name) for name in ("numba", "llvmlite", "numpy")]
    if None in installed:
        return without_numba() is None
    found = hashlib.sha256(repr((sys.version, sys.prefix, installed)).encode()).hexdigest()[:16]
    note = cache_folder("numba") / f"works-{found}"
    if note.exists():
        return True
    works = without_numba() is None
    if works:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    return works


def _installed(package: str) -> tuple[str, int, int] | None:
    """Path, time and size of a package's first file, without importing it; None if there is no such package.

    They change with the version, whose number takes longer to read.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    about = Path(spec.origin).stat()
    return spec.origin, about.st_mtime_ns, about.st_size
