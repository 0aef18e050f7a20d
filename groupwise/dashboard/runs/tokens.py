"""The sampled tokens of a rollout, each with its text, its probability, and the learner's probability.

The record has only ids. Their texts come from the tokenizer that the run saved in its folder at the start, else from that of its
final weights or of its model, if this machine has it; if there is none, the ids are shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from groupwise.core.errors import GroupwiseError
from groupwise.core.types import Group, Rollout, Segment
from groupwise.runs.folder import FINAL, TOKENIZER, read_config

FILE = "tokenizer.json"
STEPS = 8
"""Number of shades of a colour."""
BEFORE = 32
"""Tokens before the shown ones that are decoded with them: a character may consist of several tokens, and a word's space may belong
to the token before.
"""
MIN_NATS = 6.0
"""Negative log-probability (nats) from which a token gets the deepest shade."""
MAX_RATIO = 1.5
"""Ratio with the deepest colour (and its inverse, below 1). With it the usual clip bounds, 0.8 and 1.2, are in the middle of the
scale, and rounding errors of bfloat16 (a few hundredths) get no colour or the palest one.
"""


LONGEST = 1_000
"""Most characters of a token that are shown."""
PROMPT = 500
"""Most tokens shown of the prompt of a row after the first; the end of it."""
AFTER = 4
"""Tokens decoded after a page, to complete its last character."""


class TokenReader(Protocol):
    """Converts token ids to text."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, in this order."""
        ...


class IdReader:
    """Used if there is no tokenizer: shows ids."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See `TokenReader.pieces`."""
        return [f"⟨{token}⟩" for token in ids]


class TokenizerReader:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: Any, stream: Any) -> None:
        self._tokenizer, self._stream = tokenizer, stream

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """See `TokenReader.pieces`. A character of several tokens is shown at the last of them; bytes that form no character, and unknown
        tokens, are shown as their id.
        """
        stream = self._stream(skip_special_tokens=False)
        texts: list[str | None] = []
        for token in map(int, ids):
            try:
                text = stream.step(self._tokenizer, token)
            except Exception:  # noqa: BLE001 — the library raises plain Exception for bytes that form no character
                stream, text = self._stream(skip_special_tokens=False), f"⟨{token}⟩"
            unknown = not text and self._tokenizer.id_to_token(token) is None
            texts.append(f"⟨{token}⟩" if unknown else text)
        if texts and texts[-1] is None:
            texts[-1] = "\ufffd"  # the start of a character that was cut off
        return [(piece or "")[:LONGEST] for piece in texts]


def tokenizer_of(run: Path) -> TokenReader:
    """The tokenizer of a run."""
    for file in (
        run / TOKENIZER / FILE,
        run / FINAL / FILE,
        *sorted(run.glob(f"hub/*/*/files/{FILE}")),
    ):
        # A file may be missing: an upload to the hub that has ended removes its copy.
        with suppress(OSError):
            if (reader := _reader_of(str(file), file.stat().st_mtime_ns)) is not None:
                return reader
    with suppress(GroupwiseError, KeyError, TypeError):
        return _reader_of_model(str(read_config(run)["model"]["name"])) or IdReader()
    return IdReader()


@lru_cache(maxsize=8)
def _reader_of(file: str, _: int) -> TokenReader | None:
    try:
        library = import_module("tokenizers")
        stream = import_module("tokenizers.decoders").DecodeStream
    except ImportError:
        return None
    with suppress(Exception):
        described = json.loads(Path(file).read_bytes())
        if not _never_lengthens(described.get("decoder")):
            return None
        # these parts are only used to encode text, not to show tokens, and an author's settings may take unbounded time
        described |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
        return TokenizerReader(library.Tokenizer.from_str(json.dumps(described)), stream)
    return None


def _never_lengthens(decoder: dict[str, Any] | None) -> bool:
    """True if a decoder never lengthens text: a few doubling steps could fill the memory when a page is opened."""
    if decoder is None or decoder["type"] in (
        "ByteLevel",
        "ByteFallback",
        "Fuse",
        "Strip",
        "Metaspace",
        "WordPiece",
        "BPEDecoder",
    ):
        return True
    if decoder["type"] == "Replace":
        return len(decoder["content"]) <= len(decoder["pattern"].get("String", ""))
    return decoder["type"] == "Sequence" and all(map(_never_lengthens, decoder["decoders"]))


@lru_cache(maxsize=8)
def _reader_of_model(model: str) -> TokenReader | None:
    """The tokenizer in a local model folder; other models are not loaded for a page."""
    file = Path(model).expanduser() / FILE
    return _reader_of(str(file), file.stat().st_mtime_ns) if file.is_file() else None


def segments_of(
    rollout: Rollout, reader: TokenReader, first: int = 0, most: int | None = None
) -> list[dict[str, Any]]:
    """The segments after the prompt with their tokens: at most `most` of these, from index `first` on; by default all.

    A segment that starts a new row has the row's number as `row`, and the end of the row's prompt as `prompt`.
    """
    segments: list[dict[str, Any]] = []
    start, end = first, math.inf if most is None else first + most
    row = 1
    for segment in rollout.segments:
        size = len(segment.token_ids)
        starts_row = segment.prompt_ids is not None
        row += starts_row
        if end > 0 and (start < size or not size):
            segments.append(
                {
                    "row": row if starts_row and start <= 0 else None,
                    "prompt": "".join(reader.pieces((segment.prompt_ids or ())[-PROMPT:])),
                    "source": segment.source,
                    "version": segment.policy_version,
                    "finish": segment.finish_reason,
                    "tokens": _token_rows(segment, reader, max(0, start), int(min(end, size))),
                }
            )
        start, end = start - size, end - size
    return segments


def _token_rows(
    segment: Segment, reader: TokenReader, start: int, end: int
) -> list[dict[str, Any]]:
    ids = segment.token_ids[start:end]
    before = segment.token_ids[max(0, start - BEFORE) : start]
    after = segment.token_ids[end : end + AFTER]
    texts = reader.pieces([*before, *ids, *after])[len(before) : len(before) + len(ids)]
    sampled, learnt = (
        logprobs[start:end] if logprobs is not None else [None] * len(ids)
        for logprobs in (segment.sampling_logprobs, segment.learner_logprobs)
    )
    return [
        {
            "id": id,
            "text": text,
            "logprob": logprob,
            "shade": shade_of(logprob),
            "learner_logprob": by_learner,
            "ratio": (ratio := ratio_of(by_learner, logprob)),
            "ratio_shade": ratio_shade_of(ratio),
        }
        for id, text, logprob, by_learner in zip(ids, texts, sampled, learnt, strict=True)
    ]


def shade_of(logprob: float | None) -> int | None:
    """0: certain, 8: improbable; None: the token was not sampled."""
    if logprob is None or not math.isfinite(logprob):
        return None
    return min(STEPS, round(-logprob / MIN_NATS * STEPS))


def ratio_of(learner: float | None, sampler: float | None) -> float | None:
    """The learner's probability of a token over the sampler's; None if one of them is missing, or the ratio is not a number."""
    if learner is None or sampler is None or not math.isfinite(learner - sampler):
        return None
    return math.exp(min(learner - sampler, 700.0))  # beyond it exp overflows


def ratio_shade_of(ratio: float | None) -> int | None:
    """0: equal; 8: far more probable under the learner, -8: far less; in equal steps of the logarithm."""
    if ratio is None:
        return None
    nats = math.log(ratio) if ratio else -math.inf
    return round(max(-1.0, min(1.0, nats / math.log(MAX_RATIO))) * STEPS)


def without_ratios(rollout: Rollout, group: Group) -> str | None:
    """The reason why the tokens of a rollout have no ratios, in words; None if they have."""
    if any(segment.learner_logprobs for segment in rollout.segments):
        return None
    if rollout.advantage is None:
        return "no step has learnt from it"
    if not any(rollout.advantage for rollout in group.rollouts):
        return "no rollout of its group had an advantage, so that the learner did not compute them"
    return (
        "what this run's learner said of them was not kept, because an earlier version of Groupwise wrote the record, or runs on the "
        "server that it was trained on"
    )
