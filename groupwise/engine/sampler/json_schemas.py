"""Constrained decoding: which tokens may come next in a completion that becomes JSON of a given schema.

The library llguidance compiles a schema and follows a completion (`docs/decisions/0064-constrained-decoding-by-llguidance.md`). A schema
with a keyword that it cannot enforce is refused, never half enforced. Between values there may be one line break and eight spaces, which
is enough for indented JSON; more would let a model write white space for ever. A completion can end where the JSON is complete, by one of
the request's stop tokens, and must end there if nothing may follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.core.errors import UsageError

WHITE_SPACE = r"\n? {0,8}"
OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
INCOMPLETE = "\ufffd"


def check_schema(schema: str) -> None:
    """Raise `UsageError` for a schema (JSON text) that cannot be enforced, or if the library is missing."""
    _compile(schema)


def _compile(schema: str) -> str:
    matcher, grammar = _library().LLMatcher, ""
    try:
        grammar = matcher.grammar_from_json_schema(schema, overrides=OPTIONS)
        wrong, messages = matcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        wrong, messages = True, [str(error)]
    if wrong:
        raise UsageError(
            f"The JSON schema cannot be enforced: {'; '.join(messages)[:500]}. Write it without that, and check the rest yourself."
        )
    return grammar


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "A JSON schema is enforced by the package llguidance, which is not installed: pip install 'groupwise[train]'."
        ) from None
    return llguidance


class SchemaMasks:
    """Makes the masks of one tokenizer's completions. The vocabulary is prepared at the first one, which takes half a second."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._grammars: dict[str, str] = {}
        """The schemas used last, compiled."""

    def masks(self, schema: str, stops: Sequence[int], members: int) -> list[SchemaMask]:
        """One mask for each of `members` completions, which end with one of `stops`. Raises `UsageError` as `check_schema` does."""
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer)
        if schema not in self._grammars:
            if len(self._grammars) >= 32:
                self._grammars.clear()
            self._grammars[schema] = _compile(schema)
        first = library.LLMatcher(self._vocabulary, self._grammars[schema])
        if first.get_error():
            raise UsageError(f"The JSON schema cannot be enforced: {first.get_error()[:500]}")
        matchers = [first, *(first.deep_copy() for _ in range(members - 1))]
        size, end = len(self._tokenizer), self._tokenizer.eos_token_id
        return [SchemaMask(matcher, size, end, stops) for matcher in matchers]


class SchemaMask:
    """A `groupwise.engine.sampler.logits.TokenMask` of one completion."""

    def __init__(
        self, matcher: Any, vocabulary: int, end: int | None, stops: Sequence[int]
    ) -> None:
        """`vocabulary`: tokens of the tokenizer; `end`: its end-of-text token."""
        self._matcher = matcher
        self._size = vocabulary
        self._end = end
        self._stops = [*stops]
        self.error = ""
        """Why the schema can no longer be followed; its completion then ends without a result. Empty: it can."""

    def exclude(self, logits_V: Tensor) -> None:
        """See `TokenMask.exclude`. The logits become NaN where the schema is too complex to go on."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self.error = self._matcher.get_error()
        if self.error:
            logits_V.fill_(math.nan)
            return
        allowed_V = np.zeros(len(logits_V), dtype=bool)
        size = min(self._size, len(allowed_V))
        allowed_V[:size] = np.unpackbits(bits, count=self._size, bitorder="little")[:size]
        # The library allows its own end-of-text token; the request says which tokens end a completion.
        if self._end is not None:
            allowed_V[self._end] = False
        if self._matcher.is_accepting():
            allowed_V[self._stops] = True
        logits_V.masked_fill_(~torch.from_numpy(allowed_V).to(logits_V.device), -math.inf)

    def advance(self, token: int) -> None:
        """See `TokenMask.advance`."""
        self._matcher.consume_token(token)


def _vocabulary(tokenizer: Any) -> Any:
    """The tokenizer as the library knows it: read from its own file if it works on bytes, otherwise from the text of each token."""
    from llguidance.hf import from_tokenizer

    library = _library()
    try:
        return from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    except ValueError:
        return library.LLTokenizer(library.TokenizerWrapper(_TokenTexts(tokenizer)))


class _TokenTexts:
    """What the library asks of a tokenizer that it cannot read: the bytes of each token. Tokens that are no whole text are never drawn."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = [*tokenizer.all_special_ids]
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        self.tokens = [b"" if INCOMPLETE in text else text.encode() for text in texts]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer(text.decode(), add_special_tokens=False)["input_ids"]
