"""Checks of client requests to parts. Anything that would otherwise fail deep in the model, or use all memory, raises UsageError here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from groupwise.algorithms.own import refuse_own
from groupwise.algorithms.registry import from_spec
from groupwise.core.errors import UsageError
from groupwise.core.types import GroupRequest, LossSpec, OptimiserParams, Row

PER_TOKEN = ("mask", "sampling_logprobs", "reference_logprobs", "proximal_logprobs", "credits")
"""Fields of a row that are as long as its completion, or as its targets if it names any."""
MOST_SEEDS = 4096


def check_request(request: GroupRequest, vocabulary: int, longest: int) -> None:
    """Check a request to `Sampler.generate`: `longest` is in tokens, prompt and completion together."""
    params = request.params
    _require(bool(request.prompt_ids), "prompt_ids", "is empty; at least one token is needed")
    seeds = request.seeds
    _require(
        0 < len(seeds) <= MOST_SEEDS, "seeds", f"are {len(seeds)}; 1 to {MOST_SEEDS} are needed"
    )
    _require(len({*seeds}) == len(seeds), "seeds", "are not distinct")
    _require(all(0 <= seed < 2**64 for seed in seeds), "seeds", "are not all of 64 bits")
    _require(params.max_tokens >= 1, "max_tokens", f"is {params.max_tokens}; at least 1 is needed")
    _require(
        0 <= params.temperature < math.inf,
        "temperature",
        f"is {params.temperature}; 0 or a number above it is needed",
    )
    _require(params.min_tokens >= 0, "min_tokens", f"is {params.min_tokens}; 0 or more is needed")
    _require(all(params.stop), "stop", "has an empty text")
    _require(params.top_k is None or params.top_k >= 1, "top_k", "is below 1")
    for name in ("top_p", "min_p"):
        value = getattr(params, name)
        _require(
            value is None or 0 < value <= 1, name, f"is {value}; above 0 and at most 1 is needed"
        )
    length = len(request.prompt_ids) + params.max_tokens
    _require(
        length <= longest,
        "max_tokens",
        f"would make up to {length} tokens with the prompt; the parts were opened for {longest} (longest_prompt and "
        "sampler.max_completion_length)",
    )
    check_tokens(request.prompt_ids, vocabulary, "prompt_ids")
    check_tokens(params.stop_token_ids, vocabulary, "stop_token_ids")


def check_rows(rows: Sequence[Row], vocabulary: int) -> None:
    """Check rows given to a learner."""
    for index, row in enumerate(rows):
        where = f"rows.{index}"
        length = len(row.completion_ids)
        targets = row.target_ids
        _require(
            row.targets is None or (bool(targets) and len(targets) % max(1, length) == 0),
            f"{where}.targets",
            f"has {len(targets)} entries, but completion_ids has {length}; each token has equally many targets, one or more",
        )
        of_what = "completion_ids" if row.targets is None else "targets"
        for name in PER_TOKEN:
            values = getattr(row, name)
            _require(
                values is None or len(values) == len(targets),
                f"{where}.{name}",
                f"has {0 if values is None else len(values)} entries, but {of_what} has {len(targets)}; they go together",
            )
        _require(
            bool(row.prompt_ids), f"{where}.prompt_ids", "is empty; at least one token is needed"
        )
        _require(bool(length), f"{where}.completion_ids", "is empty; at least one token is needed")
        _require({*row.mask} <= {0, 1}, f"{where}.mask", "has other entries than 0 and 1")
        _require(
            0 < row.temperature < math.inf,
            f"{where}.temperature",
            f"is {row.temperature}; a number above 0 is needed",
        )
        check_tokens((*row.prompt_ids, *row.completion_ids), vocabulary, where)
        check_tokens(row.targets or (), vocabulary, f"{where}.targets")
        siblings = row.others
        _require(
            siblings is None or 0 <= siblings.tokens < 2**53,
            f"{where}.others.tokens",
            "is no number of tokens",
        )
        end = 0
        for span in sorted(row.withheld, key=lambda withheld: withheld.start):
            _require(
                end <= span.start < span.end <= length,
                f"{where}.withheld",
                f"names the tokens {span.start} to {span.end} of {length}; stretches lie within the completion and do not overlap",
            )
            check_tokens(span.token_ids, vocabulary, f"{where}.withheld")
            end = span.end


def check_loss(loss: LossSpec, denominators: Mapping[str, float]) -> None:
    """Check the loss given to `Learner.forward_backward`."""
    refuse_own(loss.name)
    try:
        from_spec(loss)
    except (TypeError, ValueError) as error:
        raise UsageError(f"loss: {error}") from None
    for name, value in denominators.items():
        _require(
            0 < value < math.inf, f"denominators.{name}", f"is {value}; a number above 0 is needed"
        )


def check_optimiser(params: OptimiserParams) -> None:
    """Check the parameters of `Learner.update`."""
    for name in ("learning_rate", "weight_decay", "eps"):
        value = getattr(params, name)
        _require(0 <= value < math.inf, name, f"is {value}; 0 or a number above it is needed")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        _require(0 <= value < 1, name, f"is {value}; 0 or more and below 1 is needed")
    norm = params.max_grad_norm
    _require(norm is None or 0 < norm < math.inf, "max_grad_norm", f"is {norm}; above 0 is needed")


def check_tokens(tokens: Sequence[int], vocabulary: int, where: str) -> None:
    """Check that all tokens are within the model's vocabulary."""
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    _require(
        unknown is None,
        where,
        f"has the token {unknown}; those of the model are 0 to {vocabulary - 1}",
    )


def _require(condition: bool, field: str, problem: str) -> None:
    if not condition:
        raise UsageError(f"{field} {problem}.")
