"""Checks what an order to sample says about single tokens against the vocabulary of the run's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.core.errors import UsageError
from groupwise.core.types import LogitsProcessing, SamplingParams
from groupwise.server.engine.engine_protocol import WrongOrder
from groupwise.tasks.openai.sampling import OrderField, Sampling


def refuse_unknown_tokens(token_ids: Sequence[int], vocabulary: int, field: OrderField) -> None:
    """Raise `WrongOrder` for an id that the tokenizer does not have."""
    unknown = next((id for id in token_ids if not 0 <= id < vocabulary), None)
    if unknown is not None:
        raise WrongOrder(
            f"{unknown}, given as {field}, is no token of this model; its tokens are 0 to {vocabulary - 1}. GET /tokenizer has them.",
            field,
        )


def stop_token_ids(sampling: Sampling, own: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    """The tokens that end a completion: the run's `own`, unless they are ignored, and those that the order adds."""
    refuse_unknown_tokens(sampling.stop_token_ids, vocabulary, "stop_token_ids")
    kept = () if sampling.ignore_eos else own
    return (*kept, *(id for id in dict.fromkeys(sampling.stop_token_ids) if id not in kept))


def check_processing(params: SamplingParams, vocabulary: int) -> None:
    """Raise `WrongOrder` for a bias on a token that the tokenizer does not have, and for a constraint that cannot be followed to the end
    because of other parameters.
    """
    processing = params.processing
    if processing is None:
        return
    refuse_unknown_tokens([id for id, _ in processing.logit_bias], vocabulary, "logit_bias")
    if not processing.is_constrained:
        return
    if not params.stop_token_ids:
        raise WrongOrder(
            "A completion that follows a schema ends with a stop token where the JSON is complete, but none is left. Leave ignore_eos "
            "out, or give stop_token_ids.",
            "tool_calls" if processing.tool_calls is not None else "json_schema",
        )
    if params.min_tokens:
        raise WrongOrder(
            f"A completion that follows a schema ends where the JSON is complete, which may be before {params.min_tokens} tokens "
            "(min_tokens, or the run's min_completion_length). Give min_tokens 0.",
            "min_tokens",
        )


def check_constraint(processing: LogitsProcessing) -> None:
    """Raise `WrongOrder` for a schema, or calls, that cannot be enforced. Compiles them for up to a second, without the interpreter."""
    from groupwise.engine.sampler.json_schemas import check_calls, compile_schema  # loads torch

    field: OrderField = "tool_calls"
    try:
        if processing.tool_calls is not None:
            check_calls(processing.tool_calls)
        field = "json_schema"
        if processing.json_schema is not None:
            compile_schema(processing.json_schema)
    except UsageError as error:
        raise WrongOrder(str(error), field) from None
