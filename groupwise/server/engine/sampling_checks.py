"""Checks what an order to sample says about single tokens against the vocabulary of the run's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.core.types import LogitsProcessing
from groupwise.server.engine.engine_protocol import OrderField, Sampling, WrongOrder


def refuse_unknown_tokens(token_ids: Sequence[int], vocabulary: int, field: OrderField) -> None:
    """Raise `WrongOrder` for an id that the tokenizer does not have."""
    unknown = next((id for id in token_ids if not 0 <= id < vocabulary), None)
    if unknown is not None:
        raise WrongOrder(
            f"{unknown} is no token of this model; its tokens are 0 to {vocabulary - 1}. GET /tokenizer has them.",
            field,
        )


def stop_token_ids(sampling: Sampling, own: tuple[int, ...], vocabulary: int) -> tuple[int, ...]:
    """The tokens that end a completion: the run's `own`, unless they are ignored, and those that the order adds."""
    refuse_unknown_tokens(sampling.stop_token_ids, vocabulary, "stop_token_ids")
    kept = () if sampling.ignore_eos else own
    return (*kept, *(id for id in dict.fromkeys(sampling.stop_token_ids) if id not in kept))


def check_processing(processing: LogitsProcessing | None, vocabulary: int) -> None:
    """Raise `WrongOrder` for a bias on a token that the tokenizer does not have."""
    if processing is not None:
        refuse_unknown_tokens([id for id, _ in processing.logit_bias], vocabulary, "logit_bias")
