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
import re
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages
from groupwise.core.types import CallGrammar
from groupwise.engine.sampler.call_grammars import arguments_schema, call_grammar, count_schemas

WHITE_SPACE = r"\n? {0,8}"
OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
INCOMPLETE = "\ufffd"
NO_TOKEN = "NoExtensionBias"
"""The library's error where none of the tokens may come next."""
MAX_SCHEMAS = 1000
"""Limit on the schemas within the schemas of a request, so that compiling them takes at most half a second."""
MAX_GRAMMARS = 32
"""Compiled schemas that are cached; the one that was used least recently goes first."""


@lru_cache(MAX_GRAMMARS)
def check_calls(calls: CallGrammar) -> None:
    """Raise `UsageError`, which names the tool, if the arguments of a tool cannot be enforced; or as `compile_schema` does."""
    total = 0
    for name, schema in calls.tools:
        arguments = json.loads(arguments_schema(schema))
        total += count_schemas(arguments)
        try:
            if arguments["type"] != "object":
                raise UsageError(
                    f"Arguments are a JSON object, but the schema has the type {arguments['type']!r:.80}; write `object`."
                )
            if total > MAX_SCHEMAS:
                raise _too_many(total)
            compile_schema.__wrapped__(json.dumps(arguments))  # the result for all tools is cached
        except UsageError as error:
            raise UsageError(f"The tool {name!r:.80} cannot be called by force. {error}") from None


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"The JSON schema cannot be enforced: there are {count} schemas in it or more, and at most {MAX_SCHEMAS} are compiled, so that "
        "others do not wait. Write it with fewer properties."
    )


@lru_cache(MAX_GRAMMARS)
def compile_schema(schema: str) -> str:
    """The grammar of a schema (JSON text). Raises `UsageError` if it cannot be enforced, or if the library is missing."""
    matcher, grammar = _library().LLMatcher, ""
    if (count := count_schemas(json.loads(schema))) > MAX_SCHEMAS:
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
    require_packages("Enforcing a JSON schema", "train", "llguidance")
    import llguidance

    return llguidance


class SchemaMasks:
    """Makes the masks of one tokenizer's completions. The vocabulary is prepared at the first one, unless `prepare` did it before."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._preparing = Lock()
        self._matcher = lru_cache(MAX_GRAMMARS)(self._compile)

    def prepare(self) -> None:
        """Prepare the vocabulary: half a second in which the library lets no other thread of the process run. Raises `UsageError` if it is
        missing.
        """
        with self._preparing:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer)

    def masks(
        self,
        schema: str | None,
        stops: Sequence[int],
        members: int,
        calls: CallGrammar | None = None,
    ) -> list[SchemaMask]:
        """One mask for each of `members` completions, which end with one of `stops`: JSON of the schema, or calls, or either of them where
        both are given. Raises `UsageError` as `compile_schema` and `check_calls` do.
        """
        matcher = self._matcher(schema, calls)
        return [SchemaMask(matcher.deep_copy(), self._tokenizer, stops) for _ in range(members)]

    def _compile(self, schema: str | None, calls: CallGrammar | None) -> Any:
        """A matcher that has followed nothing yet."""
        library = _library()
        if calls is None:
            assert schema is not None, "nothing is to be enforced"
            grammar = compile_schema(schema)
        else:
            if schema is not None:
                compile_schema(schema)
            check_calls(calls)
            special = {token: id for id, token in _special_tokens(self._tokenizer).items()}
            text = call_grammar(calls, schema, special, OPTIONS)
            grammar = library.LLMatcher.grammar_from_lark(text)
        self.prepare()
        matcher = library.LLMatcher(self._vocabulary, grammar)
        if matcher.get_error():
            raise UsageError(f"The JSON schema cannot be enforced: {_reason(matcher)}")
        return matcher


def _reason(matcher: Any) -> str:
    """Why a matcher has failed, without the dump of its state."""
    return re.split(r"<(?:state|grammar)>", matcher.get_error())[0].rstrip()[:500]


class SchemaMask:
    """A `groupwise.engine.sampler.logits.TokenMask` of one completion."""

    def __init__(self, matcher: Any, tokenizer: Any, stops: Sequence[int]) -> None:
        self._matcher = matcher
        self._size = len(tokenizer)
        # Tokens that the library allows and that are not to be drawn: its own end-of-text token, because the request says which tokens end
        # a completion, and the one into which a tokenizer turns a text that it cannot write.
        never = {tokenizer.eos_token_id, tokenizer.unk_token_id} - {None}
        self._never = [*never]
        self._stops = [*stops]
        self.error = ""
        """Why the schema can no longer be followed; its completion then ends without a result. Empty: it can."""

    def exclude(self, logits_V: Tensor) -> None:
        """See `TokenMask.exclude`. The logits become NaN where the schema cannot be followed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.zeros(len(logits_V), dtype=bool)
        error = _reason(self._matcher)
        if not error:
            size = min(self._size, len(allowed_V))
            allowed_V[:size] = np.unpackbits(bits, count=self._size, bitorder="little")[:size]
            allowed_V[self._never] = False
            if self._matcher.is_accepting():
                allowed_V[self._stops] = True
        if error and error != NO_TOKEN:
            self.error = f"The JSON schema is too complex: {error}"
        elif not allowed_V.any():
            text = b"" if error else bytes(self._matcher.compute_ff_bytes())
            shown = f"{text.decode(errors='replace')!r:.200}" if text else "characters"
            self.error = (
                f"The JSON schema, or a tool's name, goes on with {shown}, which this model's tokenizer cannot write. Use other "
                "characters there."
            )
        if self.error:
            logits_V.fill_(math.nan)
        else:
            logits_V.masked_fill_(~torch.from_numpy(allowed_V).to(logits_V.device), -math.inf)

    def advance(self, token: int) -> None:
        """See `TokenMask.advance`."""
        self._matcher.consume_token(token)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Text of each special token by its id."""
    return {id: t.content for id, t in tokenizer.added_tokens_decoder.items() if t.special}


def _vocabulary(tokenizer: Any) -> Any:
    """The tokenizer as the library knows it: read from its own file if it works on bytes, otherwise from the text of each token."""
    library = _library()
    from llguidance.hf import from_tokenizer

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
