"""The tokens of a rollout as they were drawn, each with what it reads and how probable it was.

The record has ids. What they read is told by the tokenizer that the run has left beside its weights, else by that of its model, where this
machine has it; where there is none, the ids are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from groupwise.errors import GroupwiseError
from groupwise.runs.folder import FINAL, read_config
from groupwise.types import Rollout

FILE = "tokenizer.json"
STEPS = 8
"""Shades of a colour."""
LEAST_NATS = 6.0
"""Below which a token is shown as improbable as can be."""


class Reads(Protocol):
    """What tokens read."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, in this order."""
        ...


class Ids:
    """Where nobody knows the words."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See `Reads.pieces`."""
        return [f"⟨{each}⟩" for each in ids]


class ByFile:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: Any, stream: Any) -> None:
        self._tokenizer, self._stream = tokenizer, stream

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See `Reads.pieces`. A letter of several tokens is shown at the last of them."""
        stream = self._stream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, int(each)) or "" for each in ids]


def tokenizer_of(run: Path) -> Reads:
    """The tokenizer of a run."""
    for file in (run / FINAL / FILE, *sorted(run.glob(f"hub/*/*/files/{FILE}"))):
        if file.is_file() and (found := _read(str(file), file.stat().st_mtime_ns)) is not None:
            return found
    return _of_model(run) or Ids()


@lru_cache(maxsize=8)
def _read(file: str, _: int) -> Reads | None:
    try:
        library = import_module("tokenizers")
        stream = import_module("tokenizers.decoders").DecodeStream
    except ImportError:
        return None
    with suppress(Exception):
        return ByFile(library.Tokenizer.from_file(file), stream)
    return None


def _of_model(run: Path) -> Reads | None:
    with suppress(GroupwiseError, KeyError, TypeError):
        return _named(_model_of(run))
    return None


def _model_of(run: Path) -> str:
    return str(read_config(run)["model"]["name"])


@lru_cache(maxsize=8)
def _named(model: str) -> Reads | None:
    """Of a folder with a model; others are not loaded for a page."""
    file = Path(model).expanduser() / FILE
    return _read(str(file), file.stat().st_mtime_ns) if file.is_file() else None


def segments_of(rollout: Rollout, reads: Reads) -> list[dict[str, Any]]:
    """The segments after the prompt, token by token."""
    return [
        {
            "source": segment.source,
            "version": segment.policy_version,
            "finish": segment.finish_reason,
            "tokens": _tokens(segment.token_ids, segment.sampling_logprobs, reads),
        }
        for segment in rollout.segments
    ]


def _tokens(
    ids: Sequence[int], logprobs: Sequence[float] | None, reads: Reads
) -> list[dict[str, Any]]:
    pieces = reads.pieces(ids)
    told = logprobs if logprobs is not None else [None] * len(ids)
    return [
        {"id": id, "text": piece, "logprob": logprob, "shade": shade_of(logprob)}
        for id, piece, logprob in zip(ids, pieces, told, strict=True)
    ]


def shade_of(logprob: float | None) -> int | None:
    """0: certain, 8: improbable; None: it was not drawn."""
    if logprob is None or not math.isfinite(logprob):
        return None
    return min(STEPS, round(-logprob / LEAST_NATS * STEPS))
