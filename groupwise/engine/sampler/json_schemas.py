"""Constrained decoding: which tokens may come next in a completion that becomes JSON of a given schema.

A completion of tool calls is constrained in the same way, by a grammar (`groupwise.engine.sampler.call_grammars`).

The library llguidance compiles a schema and follows a completion (`docs/decisions/0064-constrained-decoding-by-llguidance.md`). A schema
with a keyword that it cannot enforce is refused, never half enforced. Between values there may be one line break and eight spaces, which
is enough for indented JSON; more would let a model write white space for ever. A completion can end where the JSON is complete, by one of
the request's stop tokens, and must end there if nothing may follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.core.errors import UsageError
from groupwise.core.types import CallGrammar
from groupwise.engine.sampler.call_grammars import arguments_schema, call_grammar, count_schemas

WHITE_SPACE = r"\n? {0,8}"
OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
INCOMPLETE = "\ufffd"
MOST_SCHEMAS = 1000
"""Limit on the schemas within the schemas of a request, so that compiling them takes at most half a second."""
MOST_GRAMMARS = 32
"""Grammars that a sampler remembers; the one that was used least recently goes first."""


def check_schema(schema: str) -> None:
    """Raise `UsageError` for a schema (JSON text) that cannot be enforced, or if the library is missing."""
    _compile(schema)


def check_calls(calls: CallGrammar) -> None:
    """Raise `UsageError`, which names the tool, if the arguments of a tool cannot be enforced; or as `check_schema` does."""
    total = 0
    for name, schema in calls.tools:
        arguments = json.loads(arguments_schema(schema))
        total += count_schemas(arguments)
        try:
            if arguments["type"] != "object":
                raise UsageError(
                    f"Arguments are a JSON object, but the schema has the type {arguments['type']!r:.80}; write `object`."
                )
            if total > MOST_SCHEMAS:
                raise _too_many(total)
            _compile(json.dumps(arguments))
        except UsageError as error:
            raise UsageError(f"The tool {name!r:.80} cannot be called by force. {error}") from None


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"The JSON schema cannot be enforced: there are {count} schemas in it or more, and at most {MOST_SCHEMAS} are compiled, so that "
        "others do not wait. Write it with fewer properties."
    )


def _compile(schema: str) -> str:
    matcher, grammar = _library().LLMatcher, ""
    if (count := count_schemas(json.loads(schema))) > MOST_SCHEMAS:
        raise _too_many(count)
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
        self._grammars: dict[tuple[str | None, CallGrammar | None], str] = {}
        """The grammars of the schemas and calls used last, in the order of their use."""
        self._lock = Lock()  # requests compile in threads

    def masks(
        self,
        schema: str | None,
        stops: Sequence[int],
        members: int,
        calls: CallGrammar | None = None,
    ) -> list[SchemaMask]:
        """One mask for each of `members` completions, which end with one of `stops`: JSON of the schema, or calls, or either of them where
        both are given. Raises `UsageError` as `check_schema` and `check_calls` do.
        """
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer)
        grammar = self._grammar(schema, calls)
        first = library.LLMatcher(self._vocabulary, grammar)
        if first.get_error():
            raise UsageError(f"The JSON schema cannot be enforced: {first.get_error()[:500]}")
        matchers = [first, *(first.deep_copy() for _ in range(members - 1))]
        size, end = len(self._tokenizer), self._tokenizer.eos_token_id
        return [SchemaMask(matcher, size, end, stops) for matcher in matchers]

    def _grammar(self, schema: str | None, calls: CallGrammar | None) -> str:
        """The compiled grammar, from the cache if it is there."""
        key = schema, calls
        with self._lock:
            grammar = self._grammars.pop(key, None)
        grammar = grammar or self._compile(schema, calls)
        with self._lock:
            self._grammars[key] = grammar
            if len(self._grammars) > MOST_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return grammar

    def _compile(self, schema: str | None, calls: CallGrammar | None) -> str:
        compiled = None if schema is None else _compile(schema)
        if calls is None:
            assert compiled is not None, "nothing is to be enforced"
            return compiled
        check_calls(calls)
        special = {token: id for id, token in _special_tokens(self._tokenizer).items()}
        lark = call_grammar(calls, schema, special, OPTIONS)
        return _library().LLMatcher.grammar_from_lark(lark)


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


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Text of each special token by its id."""
    return {id: t.content for id, t in tokenizer.added_tokens_decoder.items() if t.special}


def _vocabulary(tokenizer: Any) -> Any:
    """The tokenizer as the library knows it: read from its own file if it works on bytes, otherwise from the text of each token."""
    from llguidance.hf import from_tokenizer

    library = _library()
    try:
        return from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    except ValueError:
        return library.LLTokenizer(library.TokenizerWrapper(_TokenTexts(tokenizer)))


class _TokenTexts:
    """The form that the library needs of a tokenizer that it cannot read: the bytes of each token. Parts of characters are never drawn."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *_special_tokens(tokenizer)})
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        self.tokens = [b"" if INCOMPLETE in text else text.encode() for text in texts]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer(text.decode(), add_special_tokens=False)["input_ids"]
