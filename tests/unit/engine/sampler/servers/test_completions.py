"""What is sent to vLLM, and what is taken from it.

1. Every sampling parameter is sent, those without effect too; what vLLM does otherwise is refused.
2. An answer is one completion of ids and finite log-probabilities of equal number, by the model that was asked, for the prompt that was
   given, ended by what was asked for; anything else is an error that says what came.
3. Stops are those of this project, whatever the server's own rules are.
4. Experts that no router can have chosen are left out, and the reason is said; the completion is taken.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy
import pytest

from groupwise.core.errors import EndpointError, PolicyMismatchError, RunError
from groupwise.core.types import (
    GroupRequest,
    LogitsProcessing,
    PromptLogprobs,
    RoutedExperts,
    RouterShape,
    SamplingParams,
)
from groupwise.engine.sampler.servers.completions import (
    SEEDS,
    Drawn,
    divide_group,
    prompt_body,
    read_completions,
    read_prompt,
    refuse_what_differs,
    request_body,
)

PROMPT = (5, 6)
END = 1
PARAMS = SamplingParams(4, stop_token_ids=(END,))


def text_of(ids) -> str:
    return "".join(chr(96 + id) for id in ids)


def answer(ids=(3, 4, END), **changes: Any) -> dict[str, Any]:
    """What a server says, with fields of its choice changed; `logprobs` of the choice as a list."""
    logprobs = changes.pop("logprobs", [-0.5] * len(ids))
    choice = {
        "index": 0, "text": "", "finish_reason": "stop" if ids and ids[-1] == END else "length",
        "stop_reason": None, "token_ids": list(ids), "prompt_token_ids": list(PROMPT),
        "logprobs": {"tokens": [f"token_id:{id}" for id in ids], "token_logprobs": logprobs},
    }  # fmt: skip
    return {"model": "m", "choices": [choice | changes]}


def read(value: Any, params: SamplingParams = PARAMS) -> Drawn:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    (found,) = read_completions(content, "m", [PROMPT], 1, params, 27, text_of)
    return found


# --- what is sent


def test_every_parameter_is_sent_so_that_no_default_of_the_server_acts():
    assert request_body("m", [PROMPT], 3, 7, PARAMS) == {
        "model": "m", "prompt": [[5, 6]], "n": 3, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "seed": 7, "ignore_eos": True, "stop_token_ids": [END],
        "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def test_parameters_reach_the_fields_that_mean_them():
    params = SamplingParams(9, 0.5, (END, 2), ("ab",), min_tokens=3, top_k=5, top_p=0.9)
    body = request_body("m", [PROMPT], 1, 7, params)
    expected = {
        "max_tokens": 9, "temperature": 0.5, "stop_token_ids": [END, 2], "stop": ["ab"], "min_tokens": 3, "top_k": 5,
        "top_p": 0.9, "skip_special_tokens": False,
    }  # fmt: skip
    assert {key: body[key] for key in expected} == expected
    assert request_body("m", [PROMPT], 1, 7, SamplingParams(9, min_p=0.2))["min_p"] == 0.2


@pytest.mark.parametrize("seed", [0, 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_seeds_of_64_bits_are_sent_as_numbers_that_are_seeds_to_vllm(seed):
    sent_seed = request_body("m", [PROMPT], 1, seed, PARAMS)["seed"]
    assert 0 <= sent_seed <= SEEDS
    assert sent_seed == seed % (1 << 63)


@pytest.mark.parametrize(
    ("seeds", "params", "seeded", "parts"),
    [
        ((7, 1, 9), PARAMS, False, [3]),
        ((7, 1, 2, 4), PARAMS, True, [1, 2, 1]),
        ((SEEDS - 1, SEEDS, SEEDS + 1), PARAMS, True, [2, 1]),
        ((1, 2, 3), SamplingParams(4, 0.0), False, [1, 1, 1]),
        ((1, 2, 3), SamplingParams(1 << 17), False, [1, 1, 1]),
        ((1, 2, 3), SamplingParams(1 << 16), False, [3]),
    ],
)
def test_a_group_is_divided_only_as_seeds_and_sizes_require(seeds, params, seeded, parts):
    found = divide_group(GroupRequest(0, PROMPT, seeds, params), seeded)
    assert [len(part.seeds) for part in found] == parts
    assert tuple(seed for part in found for seed in part.seeds) == seeds


def test_answers_with_experts_are_divided_by_their_size():
    """Those of Qwen3-30B-A3B in int32 take 2 KB for a token."""
    routers = RouterShape(48, tuple(range(48)), 128, 8)
    request = GroupRequest(0, PROMPT, (1, 2, 3, 4), SamplingParams(4096))
    assert [len(part.seeds) for part in divide_group(request, False, routers)] == [2, 2]


def test_stop_texts_with_min_tokens_are_not_sent_to_vllm():
    """vLLM would withhold the end of the text by itself; a stop text is then looked for here."""
    body = request_body("m", [PROMPT], 1, 7, SamplingParams(4, min_tokens=2, stop=("a",)))
    assert "min_tokens" not in body
    assert "stop" not in body


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (SamplingParams(4, temperature=0.005), "temperature is 0.005, but vLLM raises it to 0.01"),
        (SamplingParams(4, top_p=0.9, min_p=0.1), "vLLM applies min_p first"),
        (SamplingParams(4, stop_token_ids=(2,), min_tokens=2), r"own end of text \(1\)"),
    ],
)
def test_sampling_parameters_that_vllm_interprets_differently_are_refused(params, told):
    with pytest.raises(RunError, match=told):
        refuse_what_differs(params, END)
    refuse_what_differs(SamplingParams(4, 0.01, (1, 2), top_k=3, min_p=0.1, min_tokens=2), END)


# --- what is taken


def test_ids_and_log_probabilities_are_taken_verbatim():
    assert read(answer((3, 4, END), logprobs=[-1.5, -0.1, 0.0])) == Drawn(
        (3, 4, END), (-1.5, -0.1, 0.0), "stop"
    )
    assert read(answer((3, 4, 5, 6))).finish_reason == "length"
    last = answer((3, 4, 5, END), finish_reason="length")  # as some versions call it
    assert read(last).finish_reason == "stop"
    older = answer()
    del older["choices"][0]["token_ids"]
    assert read(older).token_ids == (3, 4, END), "they are in its tokens"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"oops", "oops"),
        ({"model": "m", "choices": answer()["choices"] * 2}, "2 choices"),
        (answer(prompt_token_ids=[0, 5, 6]), "of 3"),
        (answer(index=1), "index 0"),
        (answer(logprobs=[-0.5, -0.5]), "2 log-prob"),
        (answer(logprobs=[-0.5, None, -0.5]), "None"),
        (answer(logprobs=[-0.5, math.nan, -0.5]), "nan"),
        (answer(logprobs=[-0.5, -9999.0, -0.5]), "log-probability -9999.0"),
        (answer(logprobs=None), "without log-probabilities"),
        (answer((3, 27, END)), "27.*26"),
        (answer((3, -1, END)), "drew the token -1"),
        (answer(()), "0 tokens"),
        (answer((3, 4, 5, 6, END)), "5 tokens"),
        (answer((3, END, 4, END)), "token 1, the 2. of 4"),
        (answer((3, 4)), "2 of at most 4"),
        (answer((3, 4), finish_reason="stop"), "none of the stops"),
        (answer((3, 4), finish_reason="abort"), "finish_reason 'abort'"),
    ],
)  # fmt: skip
def test_an_invalid_answer_of_the_server_is_named_in_the_error(given, told):
    with pytest.raises(EndpointError, match=told):
        read(given)


def test_without_ids_nothing_is_made_of_the_text():
    given = answer()
    del given["choices"][0]["token_ids"]
    given["choices"][0]["logprobs"]["tokens"] = ["c", "d", ""]
    with pytest.raises(EndpointError, match="drew the token None"):
        read(given)
    del given["choices"][0]["logprobs"]
    with pytest.raises(EndpointError, match="without token ids"):
        read(given)


def test_several_completions_of_several_prompts_are_read_in_their_order():
    other = (7,)
    asked = [(PROMPT, 3), (PROMPT, 4), (other, 5), (other, 6)]
    choices = [
        answer((first, END), index=number, prompt_token_ids=[*prompt])["choices"][0]
        for number, (prompt, first) in enumerate(asked)
    ]

    def read_all(choices: list[Any]) -> list[int]:
        content = json.dumps({"model": "m", "choices": choices}).encode()
        found = read_completions(content, "m", [PROMPT, other], 2, PARAMS, 27, text_of)
        return [each.token_ids[0] for each in found]

    assert read_all(choices) == [3, 4, 5, 6]
    for wrong in (choices[:3], choices[::-1]):
        with pytest.raises(EndpointError):
            read_all(wrong)


def test_an_answer_by_another_model_is_refused():
    with pytest.raises(PolicyMismatchError, match="'base'"):
        read(answer() | {"model": "base"})


# --- stops


def test_tokens_after_a_stop_text_are_left_out():
    params = SamplingParams(9, stop=("bc",))
    stopped = read(answer((1, 2, 3, 4, 5), finish_reason="stop", stop_reason="bc"), params)
    assert stopped == Drawn((1, 2, 3), (-0.5,) * 3, "stop")


def test_a_stop_text_may_end_with_the_last_token_of_the_least_length():
    """Where vLLM goes on."""
    params = SamplingParams(5, stop=("b",), min_tokens=2)
    assert read(answer((1, 2, 3, 4, 5)), params).token_ids == (1, 2)
    assert read(answer((2, 1, 3, 4, 2)), params).token_ids == (2, 1, 3, 4, 2)


def test_a_stop_text_found_only_by_the_server_is_accepted_by_its_stop_reason():
    params = SamplingParams(9, stop=("§",))
    given = answer((3, 4), finish_reason="stop", stop_reason="§")
    assert read(given, params).finish_reason == "stop"
    with pytest.raises(EndpointError, match="stop_reason 'other'"):
        read(answer((3, 4), finish_reason="stop", stop_reason="other"), params)


# --- what is asked beside the tokens, and what changes their logits


def test_penalties_biases_and_schemas_are_sent_and_the_rest_stays():
    changes = LogitsProcessing(0.5, -0.5, 1.2, ((3, 2.0), (4, -1.0)), '{"type": "object"}')
    body = request_body("m", [PROMPT], 1, 7, replace(PARAMS, processing=changes), 4)
    expected = {
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logprobs": 4,
        "logit_bias": {"3": 2.0, "4": -1.0},
        "response_format": {"type": "json_schema", "json_schema": {"name": "schema", "schema": {"type": "object"}}},
    }  # fmt: skip
    assert body == request_body("m", [PROMPT], 1, 7, PARAMS) | expected
    refuse_what_differs(replace(PARAMS, processing=changes), END)
    with pytest.raises(RunError, match="end of text"):
        refuse_what_differs(replace(PARAMS, processing=changes), 2)


def test_the_most_probable_tokens_are_read_without_the_drawn_one_and_the_impossible():
    given = answer((3, END))
    given["choices"][0]["logprobs"]["top_logprobs"] = [
        {"token_id:3": -2.5, "token_id:7": -0.1, "token_id:8": -1.0},
        {f"token_id:{END}": -0.5, "token_id:9": -9999.0},
    ]
    (found,) = read_completions(
        json.dumps(given).encode(), "m", [PROMPT], 1, PARAMS, 27, text_of, 2
    )
    assert found.top_logprobs == (((7, -0.1), (8, -1.0)), ((END, -0.5),))
    del given["choices"][0]["logprobs"]["top_logprobs"][1]
    with pytest.raises(EndpointError, match="1 positions for 2"):
        read_completions(json.dumps(given).encode(), "m", [PROMPT], 1, PARAMS, 27, text_of, 2)


def test_the_log_probabilities_of_a_prompt():
    assert prompt_body("m", PROMPT, 3)["prompt_logprobs"] == 3
    position = {"6": {"logprob": -2.0, "rank": 4}, "9": {"logprob": -0.5, "rank": 1}}
    given = json.dumps(answer((3,), prompt_logprobs=[None, position])).encode()
    assert read_prompt(given, "m", PROMPT, 1) == PromptLogprobs((-2.0,), (((9, -0.5),),))
    assert read_prompt(given, "m", PROMPT, 0) == PromptLogprobs((-2.0,))
    for wrong in (
        None,
        [],
        [None],
        [None, None],
        [None, {"9": {"logprob": -1}}],
        [None, {"6": {}}],
    ):
        bad = json.dumps(answer((3,), prompt_logprobs=wrong)).encode()
        with pytest.raises(EndpointError):
            read_prompt(bad, "m", PROMPT, 1)


# --- experts

ROUTERS = RouterShape(layers=3, with_experts=(0, 2), experts=4, top_k=2)
CHOSEN = numpy.array([[[0, 3], [9, 9], [2, 1]], [[1, 2], [9, 9], [0, 3]], [[3, 2], [9, 9], [1, 0]]])
"""Of a prompt of two tokens and a completion of two; the layer in the middle has no experts."""


def as_file(values: Any, pickled: bool = False) -> str:
    file = BytesIO()
    numpy.save(file, values, allow_pickle=pickled)
    return b64encode(file.getvalue()).decode()


def read_with(experts: Any, params: SamplingParams = PARAMS) -> Drawn:
    content = json.dumps(answer((3, END), routed_experts=experts)).encode()
    (found,) = read_completions(content, "m", [PROMPT], 1, params, 27, text_of, 0, ROUTERS)
    return found


@pytest.mark.parametrize("kind", ["uint8", "<u2", "int32"])
def test_the_experts_of_prompt_and_completion(kind):
    indices = bytes([0, 3, 0, 0, 2, 1, 1, 2, 0, 0, 0, 3, 3, 2, 0, 0, 1, 0])
    found = read_with(as_file(CHOSEN.astype(kind)))
    assert (found.routed_experts, found.routing_fault) == (RoutedExperts(0, (3, 3, 2), indices), "")
    cut = read_with(as_file(CHOSEN.astype(kind)), replace(PARAMS, stop=("c",)))
    assert cut.token_ids == (3,)
    assert cut.routed_experts == RoutedExperts(0, (2, 3, 2), indices[:12])


def changed(layer: int, value: int) -> str:
    values = CHOSEN.copy()
    values[1, layer] = value, 3
    return as_file(values)


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        (None, "no experts"),
        ([1], "no experts"),
        ("", "not a NumPy array"),
        ("!", "not a NumPy array"),
        (as_file(CHOSEN)[:-8], "not a NumPy array"),
        (as_file(numpy.array([{}]), pickled=True), "not a NumPy array"),
        (as_file(CHOSEN[:-1]), r"\(2, 3, 2\), where integers \(3, 3, 2\)"),
        (as_file(CHOSEN[:, [0, 2]]), r"\(3, 2, 2\), where"),
        (as_file(CHOSEN.astype(float)), "float64"),
        (changed(2, 4), "0 to 4, but the model has 0 to 3"),
        (changed(0, -1), "-1 to 3"),
        (changed(0, 3), "twice"),
        (as_file(numpy.zeros_like(CHOSEN)), "twice"),
    ],
)
def test_experts_that_no_router_chose_are_left_out(experts, told):
    found = read_with(experts)
    assert (found.token_ids, found.routed_experts) == ((3, END), None)
    assert re.search(told, found.routing_fault)
