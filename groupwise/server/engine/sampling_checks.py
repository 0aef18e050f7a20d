"""Checks a request to sample before it is sampled: that the token ids it names are in the vocabulary, and that its prompt is not too long,
by the number of its characters alone.

Tokenising a megabyte takes seconds. No token has more characters than the vocabulary's longest one, so a text with more characters
than `longest prompt × longest token` has too many tokens in any case. The HTTP side checks it first, so such a prompt never reaches the
engine; the engine checks the messages as its chat template reads them, and the text that the template makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from groupwise.core.errors import UsageError
from groupwise.core.types import LogitsProcessing, Prompt, SamplingParams
from groupwise.server.engine.engine_protocol import InvalidSampleRequest
from groupwise.tasks.openai.sampling import OrderField, Sampling


def refuse_unknown_tokens(token_ids: Sequence[int], vocabulary: int, field: OrderField) -> None:
    """Raise `InvalidSampleRequest` for an id that the tokenizer does not have."""
    unknown = next((id for id in token_ids if not 0 <= id < vocabulary), None)
    if unknown is not None:
        raise InvalidSampleRequest(
            f"{unknown}, given as {field}, is not a token of this model; its tokens are 0 to {vocabulary - 1}. GET /tokenizer has them.",
            field,
        )


def stop_token_ids(sampling: Sampling, own: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    """The tokens that end a completion: the run's `own`, unless they are ignored, and those that the request adds."""
    refuse_unknown_tokens(sampling.stop_token_ids, vocabulary, "stop_token_ids")
    own_ids = () if sampling.ignore_eos else own
    return (*own_ids, *(id for id in dict.fromkeys(sampling.stop_token_ids) if id not in own_ids))


def check_processing(params: SamplingParams, vocabulary: int) -> None:
    """Raise `InvalidSampleRequest` for a bias on a token that the tokenizer does not have, and for a constraint that cannot be followed to
    the end because of other parameters.
    """
    processing = params.processing
    if processing is None:
        return
    refuse_unknown_tokens([id for id, _ in processing.logit_bias], vocabulary, "logit_bias")
    if not processing.is_constrained:
        return
    if not params.stop_token_ids:
        raise InvalidSampleRequest(
            "A completion that follows a schema ends with a stop token where the JSON is complete, but none is left. Leave ignore_eos "
            "out, or give stop_token_ids.",
            "tool_calls" if processing.tool_calls is not None else "json_schema",
        )
    if params.min_tokens:
        raise InvalidSampleRequest(
            f"A completion that follows a schema ends where the JSON is complete, which may be before {params.min_tokens} tokens "
            "(min_tokens, or the run's min_completion_length). Give min_tokens 0.",
            "min_tokens",
        )


def check_constraint(processing: LogitsProcessing) -> None:
    """Raise `InvalidSampleRequest` for a schema, or calls, that cannot be enforced. Compiles them, for up to a second without the GIL."""
    from groupwise.engine.sampler.json_schemas import check_calls, compile_schema  # loads torch

    field: OrderField = "tool_calls"
    try:
        if processing.tool_calls is not None:
            check_calls(processing.tool_calls)
        field = "json_schema"
        if processing.json_schema is not None:
            compile_schema(processing.json_schema)
    except UsageError as error:
        raise InvalidSampleRequest(str(error), field) from None


LONG = 1 << 16
"""Characters of a prompt's JSON above which it is rendered and tokenised in a thread, so that other requests go on."""


def texts_of(prompt: Prompt) -> list[str]:
    """The texts of a prompt as a client sent it that are in any case part of it: itself, or what its messages hold, as text or in parts,
    and the names in their calls of tools.
    """
    if isinstance(prompt, str):
        return [prompt]
    texts: list[str] = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            parts = cast("list[dict[str, Any]]", content)
            texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
        calls = message.get("tool_calls")
        for call in cast("list[Any]", calls) if isinstance(calls, list) else ():
            match call:
                case {"function": {"name": str(name)}} | {"name": str(name)}:
                    texts.append(name)
                case _:
                    pass
    return texts


def check_characters(*texts: str, longest: int, most: int) -> None:
    """Raise InvalidSampleRequest if the texts have more than `most` characters together, which `longest` tokens never exceed."""
    if (count := sum(map(len, texts))) > most:
        raise InvalidSampleRequest(
            f"The prompt has {count:,} characters, and this run takes at most {longest} tokens (max_prompt_length), which are "
            f"never more than {most:,} characters. Shorten it, or start the run with a higher one.",
            "prompt",
            "prompt_too_long",
        )
