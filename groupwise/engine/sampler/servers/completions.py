"""Writes completion requests for a vLLM server, and reads its answers: token ids and log-probabilities, exactly.

Every sampling parameter is sent, so that none is left to the server's defaults, which vLLM takes from the model's
`generation_config.json`. The server's own end-of-text token does not end a completion (`ignore_eos`): only the requested stop tokens do.
Requests that a server would interpret differently are refused before they are sent. Answers are accepted only as far as they can be
checked. Fields as in vLLM 0.12 to 0.33; token ids are returned from 0.10.2 on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from groupwise.api.openai_client.response_parsing import excerpt, read_json
from groupwise.core.errors import EndpointError, PolicyMismatchError, RunError, UsageError
from groupwise.core.types import (
    FinishReason,
    GroupRequest,
    LogitsProcessing,
    PromptLogprobs,
    RoutedExperts,
    RouterShape,
    SamplingParams,
    TopLogprobs,
)
from groupwise.engine.sampler.rules import ends_with_stop
from groupwise.engine.sampler.servers.routed_experts import WIRE_BYTES, read_routed_experts

SEEDS = (1 << 63) - 1
"""vLLM's seeds are signed, and -1 means none, so only the lower 63 bits of ours are sent."""
TOKEN_BYTES = 100
"""Bytes of JSON for a token in an answer, about."""
ANSWER_TOKENS = 1 << 18
"""Most tokens in one answer, at `TOKEN_BYTES` each, so that it stays well below the client's limit."""
MIN_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this; 0 is greedy."""
MIN_LOGPROB = -9999.0
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
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most probable tokens at each position, if they were asked for."""
    routed_experts: RoutedExperts | None = None
    """The experts that were chosen for prompt and completion, if they are wanted and in order."""
    routing_fault: str = ""
    """What is wrong with the experts in the answer, as a verb phrase; empty if nothing is, or if they are not wanted."""


def refuse_what_differs(params: SamplingParams, end_id: int | None) -> None:
    """Raise RunError for parameters that vLLM interprets differently, UsageError for those that it cannot be asked for.

    `end_id`: the tokenizer's end-of-text token.
    """
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise RunError(
            f"The temperature is {params.temperature:g}, but vLLM raises it to {MIN_TEMPERATURE:g}, so that the "
            f"log-probabilities would be of another distribution. Give 0 (greedy), or at least {MIN_TEMPERATURE:g}."
        )
    if params.top_p is not None and params.min_p is not None:
        raise RunError(
            f"top_p is {params.top_p:g} and min_p is {params.min_p:g}; vLLM applies min_p first, this project top_p, which leaves other "
            "tokens. Give one of them."
        )
    refuse_withheld_end("vLLM", params, end_id)
    if params.processing is not None and params.processing.tool_calls is not None:
        raise UsageError(
            "tool_calls: a required call (tool_choice), and response_format with tools, are not supported with vLLM, whose servers read "
            "grammars in different notations. Give tool_choice `auto` without response_format, or sample with sampler.engine torch."
        )
    follows_schema = params.processing is not None and params.processing.json_schema is not None
    if follows_schema and end_id not in params.stop_token_ids:
        raise RunError(
            f"Where JSON of a schema is complete, vLLM ends it with the tokenizer's own end of text ({end_id}), which is none "
            f"of the stop tokens {list(params.stop_token_ids)}. Add it to sampler.stop_token_ids, or leave the schema out."
        )


def refuse_withheld_end(engine: str, params: SamplingParams, end_id: int | None) -> None:
    """Raise RunError if the engine withholds, in the least tokens of a completion, an end of text that is not a stop token."""
    if params.min_tokens and params.stop_token_ids and end_id not in (None, *params.stop_token_ids):
        raise RunError(
            f"min_tokens is {params.min_tokens}, in which {engine} withholds the tokenizer's own end of text ({end_id}), too, which is "
            f"none of the stop tokens {list(params.stop_token_ids)}. Add it to sampler.stop_token_ids, or leave "
            "sampler.min_completion_length out."
        )


def divide_group(
    request: GroupRequest, seeded: bool, routers: RouterShape | None = None
) -> list[GroupRequest]:
    """The parts of a group that one request each may ask for: vLLM adds 1 to the seed for each further completion, gives only one if it
    is greedy, and an answer has at most `ANSWER_TOKENS`. `seeded`: whether each member must be drawn with its own seed. `routers`: as for
    `read_completions`."""
    params = request.params
    length = len(request.prompt_ids) + params.max_tokens * (1 + request.top_logprobs)
    if routers is not None:
        tokens = len(request.prompt_ids) + params.max_tokens
        length += int(tokens * routers.layers * routers.top_k * WIRE_BYTES / TOKEN_BYTES)
    most = 1 if params.temperature == 0 else max(1, ANSWER_TOKENS // length)
    parts: list[list[int]] = []
    for seed in request.seeds:
        last = parts[-1] if parts else []
        if 0 < len(last) < most and (not seeded or seed & SEEDS == (last[-1] & SEEDS) + 1):
            last.append(seed)
        else:
            parts.append([seed])
    return [replace(request, seeds=tuple(seeds)) for seeds in parts]


def request_body(
    name: str,
    prompts: Sequence[Sequence[int]],
    count: int,
    seed: int | None,
    params: SamplingParams,
    top: int = 0,
) -> dict[str, Any]:
    """The body of a POST to /v1/completions for `count` completions of each prompt by the model `name`, with the `top` most probable
    tokens beside each. vLLM draws completion i of a prompt with the seed `seed` + i; None: with random numbers of the server."""
    processing = params.processing or LogitsProcessing()
    body: dict[str, Any] = {
        "model": name,
        "prompt": [[*prompt_ids] for prompt_ids in prompts],
        "n": count,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "top_k": params.top_k or 0,
        "min_p": params.min_p or 0.0,
        "presence_penalty": processing.presence_penalty,
        "frequency_penalty": processing.frequency_penalty,
        "repetition_penalty": processing.repetition_penalty,
        "seed": None if seed is None else seed & SEEDS,
        "ignore_eos": True,
        "stop_token_ids": [*params.stop_token_ids],
        "logprobs": top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    withholds = bool(params.min_tokens and params.stop_token_ids)
    if withholds:
        body["min_tokens"] = params.min_tokens
    if processing.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in processing.logit_bias}
    if processing.json_schema is not None:
        schema = {"name": "schema", "schema": json.loads(processing.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if params.stop and (withholds or not params.min_tokens):
        body |= {"stop": [*params.stop], "skip_special_tokens": False}
    return body


def read_completions(
    answer: bytes,
    name: str,
    prompts: Sequence[Sequence[int]],
    count: int,
    params: SamplingParams,
    vocabulary: int,
    text_of: Callable[[Sequence[int]], str],
    top: int = 0,
    routers: RouterShape | None = None,
) -> tuple[Drawn, ...]:
    """Parse the completions of an answer to `request_body`, prompt by prompt. Raises EndpointError for an answer that does not match the
    request, PolicyMismatchError if another model answered. `routers`: the experts that were chosen are wanted, and must have this shape;
    wrong ones are left out."""
    choices = _read_choices(answer, name, prompts, count)
    drawn = [
        _read_completion(choice, answer, params, vocabulary, text_of, top) for choice in choices
    ]
    if routers is None:
        return tuple(drawn)
    return tuple(
        _with_routing(one, choice, len(prompts[number // count]), routers)
        for number, (one, choice) in enumerate(zip(drawn, choices, strict=True))
    )


def _with_routing(
    drawn: Drawn, choice: Mapping[str, Any], prompt: int, routers: RouterShape
) -> Drawn:
    """The completion with the experts of its answer, which may have more tokens than were kept. `prompt`: number of its tokens."""
    tokens = prompt + len(_as_list(cast("Mapping[str, Any]", choice["logprobs"])["token_logprobs"]))
    try:
        routed = read_routed_experts(choice.get("routed_experts"), routers, tokens)
    except EndpointError as error:
        return replace(drawn, routing_fault=str(error))
    return replace(drawn, routed_experts=routed.part(0, prompt + len(drawn.token_ids) - 1))


def _read_completion(
    choice: Mapping[str, Any],
    answer: bytes,
    params: SamplingParams,
    vocabulary: int,
    text_of: Callable[[Sequence[int]], str],
    top: int,
) -> Drawn:
    ids, logprobs = _read_tokens(choice, answer, vocabulary)
    if not 1 <= len(ids) <= params.max_tokens:
        raise EndpointError(
            f"drew {len(ids)} tokens, where 1 to {params.max_tokens} were asked for"
        )
    drawn = _find_end(choice, ids, logprobs, params, text_of)
    if not top:
        return drawn
    content = cast("Mapping[str, Any]", choice["logprobs"])
    positions = _as_list(content.get("top_logprobs"))[: len(drawn.token_ids)]
    if len(positions) < len(drawn.token_ids):
        raise EndpointError(
            f"answered the most probable tokens of {len(positions)} positions for {len(drawn.token_ids)} tokens"
        )
    best = tuple(_most_probable(position, top, _id_in_text) for position in positions)
    return replace(drawn, top_logprobs=best)


def prompt_body(name: str, prompt_ids: Sequence[int], top: int) -> dict[str, Any]:
    """The body of a POST to /v1/completions for the log-probabilities of a prompt; the one token that is drawn for it is left aside."""
    params = SamplingParams(1, temperature=0.0)
    return request_body(name, [prompt_ids], 1, None, params) | {"prompt_logprobs": top}


def read_prompt(answer: bytes, name: str, prompt_ids: Sequence[int], top: int) -> PromptLogprobs:
    """Parse the answer to `prompt_body`. Raises as `read_completions` does."""
    (choice,) = _read_choices(answer, name, [prompt_ids], 1)
    positions = _as_list(choice.get("prompt_logprobs"))
    if len(positions) != len(prompt_ids):
        raise EndpointError(
            f"answered log-probabilities of {len(positions)} tokens for a prompt of {len(prompt_ids)}"
        )
    logprobs: list[float] = []
    best: list[TopLogprobs] = []
    for token, position in zip(prompt_ids[1:], positions[1:], strict=True):
        values = {
            id: entry.get("logprob") for id, entry in position.items()
        } if isinstance(position, Mapping) else {}  # fmt: skip
        if str(token) not in values:
            raise EndpointError(f"answered no log-probability of the prompt's token {token}")
        logprobs.append(_check_logprob(values[str(token)]))
        if top:
            best.append(_most_probable(values, top, int))
    return PromptLogprobs(tuple(logprobs), tuple(best))


def _most_probable(position: object, count: int, id_of: Callable[[str], int | None]) -> TopLogprobs:
    """The `count` most probable tokens of one position. vLLM adds the drawn token, and gives -9999 to those that could not be drawn."""
    values = cast("Mapping[str, Any]", position) if isinstance(position, Mapping) else {}
    pairs = [(id_of(key), value) for key, value in values.items()]
    possible = [
        (token, float(value))
        for token, value in pairs
        if token is not None and isinstance(value, int | float) and value > MIN_LOGPROB
    ]
    return tuple(sorted(possible, key=lambda pair: (-pair[1], pair[0]))[:count])


def _read_choices(
    answer: bytes, name: str, prompts: Sequence[Sequence[int]], wanted: int
) -> list[Mapping[str, Any]]:
    """The choices of an answer, `wanted` for each prompt, in the order of their indices."""
    value = read_json(answer)
    if value.get("model") != name:
        raise PolicyMismatchError(
            f"{name} was asked, but {value.get('model')!r} has answered: what it drew is not the policy's."
        )
    choices = _as_list(value.get("choices"))
    if len(choices) != wanted * len(prompts):
        raise EndpointError(
            f"answered {len(choices)} choices, where {wanted * len(prompts)} were asked for: {excerpt(answer)}"
        )
    for number, choice in enumerate(choices):
        if not isinstance(choice, Mapping) or choice.get("index") != number:
            raise EndpointError(
                f"answered no choice with the index {number} in its place: {excerpt(answer)}"
            )
        prompt_ids = prompts[number // wanted]
        seen = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
        if seen is not None and seen != [*prompt_ids]:
            raise EndpointError(
                f"was given a prompt of {len(prompt_ids)} tokens and used another one of {len(seen)}"
            )
    return choices


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
            f"answered without {lacking}, of which training is made. Install vLLM 0.12 or newer there: {excerpt(answer)}"
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
        raise EndpointError(f"answered the log-probability {value!r}, which is not a number")
    if not math.isfinite(value) or not MIN_LOGPROB < value <= ROUNDING:
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
