"""Writes completion requests for a vLLM server, and reads its answers: token ids and log-probabilities, exactly.

Every sampling parameter is sent, so that none is left to the server's defaults, which vLLM takes from the model's
`generation_config.json`. The server's own end-of-text token does not end a completion (`ignore_eos`): only the requested stop tokens do.
Requests that a server would interpret differently are refused before they are sent. Answers are accepted only as far as they can be
checked. Fields as in vLLM 0.10.2 (the first that returns token ids) to 0.33.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from groupwise.api.openai_client.response_parsing import excerpt, read_json
from groupwise.core.errors import EndpointError, PolicyMismatchError, RunError
from groupwise.core.types import FinishReason, SamplingParams
from groupwise.engine.sampler.rules import ends_with_stop

SEEDS = (1 << 63) - 1
"""vLLM's seeds are signed, and -1 means none, so only the lower 63 bits of ours are sent."""
COLDEST = 0.01
"""vLLM silently raises lower temperatures to this; 0 is greedy."""
LEAST_LOGPROB = -9999.0
"""vLLM's number for minus infinity, because JSON has none."""
ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0 through rounding."""
TOKEN_AS_TEXT = "token_id:"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion as the server drew it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def refuse_what_differs(params: SamplingParams, end_id: int | None) -> None:
    """Raise RunError for parameters that vLLM interprets differently. `end_id`: the tokenizer's end-of-text token."""
    if 0 < params.temperature < COLDEST:
        raise RunError(
            f"The temperature is {params.temperature:g}, but vLLM samples at {COLDEST:g} where it is told less, so that the "
            f"log-probabilities would be of another distribution. Give 0 (greedy), or {COLDEST:g} and more."
        )
    if params.top_p is not None and params.min_p is not None:
        raise RunError(
            f"top_p is {params.top_p:g} and min_p is {params.min_p:g}; vLLM applies min_p first, this project top_p, which leaves other "
            "tokens. Give one of them."
        )
    if params.min_tokens and params.stop_token_ids and end_id not in (None, *params.stop_token_ids):
        raise RunError(
            f"min_tokens is {params.min_tokens}, in which vLLM withholds the tokenizer's own end of text ({end_id}), too, which is none of "
            f"the stop tokens {list(params.stop_token_ids)}. Add it to sampler.stop_token_ids, or leave "
            "sampler.min_completion_length out."
        )


def request_body(
    name: str, prompt_ids: Sequence[int], seed: int, params: SamplingParams
) -> dict[str, Any]:
    """The body of a POST to /v1/completions for one completion by the model `name`."""
    body: dict[str, Any] = {
        "model": name,
        "prompt": [*prompt_ids],
        "n": 1,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "top_k": params.top_k or 0,
        "min_p": params.min_p or 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed & SEEDS,
        "ignore_eos": True,
        "stop_token_ids": [*params.stop_token_ids],
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    withholds = bool(params.min_tokens and params.stop_token_ids)
    if withholds:
        body["min_tokens"] = params.min_tokens
    if params.stop and (withholds or not params.min_tokens):
        body |= {"stop": [*params.stop], "skip_special_tokens": False}
    return body


def read_completion(
    answer: bytes,
    name: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    vocabulary: int,
    text_of: Callable[[Sequence[int]], str],
) -> Drawn:
    """Parse the one completion of an answer. Raises EndpointError for an answer that does not match the request, PolicyMismatchError if
    another model answered."""
    value = read_json(answer)
    if value.get("model") != name:
        raise PolicyMismatchError(
            f"{name} was asked, but {value.get('model')!r} has answered: what it drew is not the policy's."
        )
    choices: object = value.get("choices")
    count = len(cast("list[Any]", choices)) if isinstance(choices, list) else 0
    if count != 1:
        raise EndpointError(f"answered {count} choices, where one was asked for: {excerpt(answer)}")
    (choice,) = cast("list[Any]", choices)
    if not isinstance(choice, Mapping):
        raise EndpointError(f"answered a choice that is none: {excerpt(answer)}")
    choice = cast("Mapping[str, Any]", choice)
    seen = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
    if seen is not None and seen != [*prompt_ids]:
        raise EndpointError(
            f"was given a prompt of {len(prompt_ids)} tokens and used another one of {len(seen)}"
        )
    ids, logprobs = _read_tokens(choice, answer, vocabulary)
    if not 1 <= len(ids) <= params.max_tokens:
        raise EndpointError(
            f"drew {len(ids)} tokens, where 1 to {params.max_tokens} were asked for"
        )
    return _find_end(choice, ids, logprobs, params, text_of)


def _read_tokens(
    choice: Mapping[str, Any], answer: bytes, vocabulary: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    content: object = choice.get("logprobs")
    logprobs = cast("Mapping[str, Any]", content) if isinstance(content, Mapping) else {}
    ids: object = choice.get("token_ids")
    if ids is None:
        ids = [_id_in_text(token) for token in _as_list(logprobs.get("tokens"))] or None
    values: object = logprobs.get("token_logprobs")
    if not isinstance(ids, list) or not isinstance(values, list):
        lacking = "log-probabilities" if isinstance(ids, list) else "token ids"
        raise EndpointError(
            f"answered without {lacking}, of which training is made. vLLM gives both from 0.10.2 on: {excerpt(answer)}"
        )
    token_ids, numbers = cast("list[Any]", ids), cast("list[Any]", values)
    if len(token_ids) != len(numbers):
        raise EndpointError(
            f"answered {len(numbers)} log-probabilities for {len(token_ids)} tokens"
        )
    for token in token_ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise EndpointError(
                f"drew the token {token!r}, but those of the model are 0 to {vocabulary - 1}: it serves another model"
            )
    return tuple(token_ids), tuple(_check_logprob(number) for number in numbers)


def _id_in_text(token: object) -> int | None:
    text = token.removeprefix(TOKEN_AS_TEXT) if isinstance(token, str) else ""
    return int(text) if text != token and text.isdecimal() else None


def _as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _check_logprob(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EndpointError(f"answered the log-probability {value!r}, which is no number")
    if not math.isfinite(value) or not LEAST_LOGPROB < value <= ROUNDING:
        raise EndpointError(
            f"answered the log-probability {value}, which no token has that was drawn: the weights or the sums are not finite. Lower "
            "training.learning_rate, or look at the server's log"
        )
    return float(value)


def _find_end(
    choice: Mapping[str, Any],
    ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    params: SamplingParams,
    text_of: Callable[[Sequence[int]], str],
) -> Drawn:
    """Cut the completion at its end by this project's rules. vLLM accepts stop texts only after `min_tokens`; here they may end with the
    last of these tokens."""
    early = next((index for index, id in enumerate(ids[:-1]) if id in params.stop_token_ids), None)
    if early is not None:
        raise EndpointError(
            f"went on after the stop token {ids[early]}, the {early + 1}. of {len(ids)} tokens"
        )
    for count in range(1, len(ids) + 1) if params.stop else ():
        if ends_with_stop(ids[:count], params, text_of):
            return Drawn(ids[:count], logprobs[:count], "stop")
    reason = choice.get("finish_reason")
    if ids[-1] in params.stop_token_ids and reason in ("stop", "length"):
        return Drawn(ids, logprobs, "stop")
    if reason == "stop" and choice.get("stop_reason") in params.stop:
        return Drawn(ids, logprobs, "stop")
    if reason == "length" and len(ids) == params.max_tokens:
        return Drawn(ids, logprobs, "length")
    raise EndpointError(
        f"ended a completion after {len(ids)} of at most {params.max_tokens} tokens (finish_reason {reason!r}, stop_reason "
        f"{choice.get('stop_reason')!r}), at none of the stops that were asked for. Has the server a limit of its own "
        "(--max-model-len, max_new_tokens in generation_config.json)?"
    )
