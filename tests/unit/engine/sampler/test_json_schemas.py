"""Constrained decoding, by a model that knows nothing of JSON.

1. Every completion that ends is JSON of its schema, and ends with a stop token of the request, which cannot be drawn before.
2. Log-probabilities are those of the distribution without the tokens that the schema rules out, against a reference in float64.
3. Groups beside it keep every bit; one whose schema grows too complex fails alone.
4. A schema that cannot be enforced is refused.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
import torch

from groupwise.core.errors import UsageError
from groupwise.core.types import GroupRequest, LogitsProcessing, SamplingParams
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.json_schemas import SchemaMask, SchemaMasks, compile_schema

TOKENIZER: Any = tiny_tokenizer()
EOS = 1
SCHEMA: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["ox", "hen"]}, "wild": {"type": "boolean"}},
    "required": ["kind", "wild"],
    "additionalProperties": False,
}
BOTH_ENGINES = pytest.mark.usefixtures("engine")


def request(
    draw=0, members=6, schema: Any = SCHEMA, stops=(EOS,), max_tokens=96, **params
) -> GroupRequest:
    ids = tuple(TOKENIZER("sort these")["input_ids"])
    seeds = tuple(1000 * draw + member for member in range(members))
    processing = LogitsProcessing(json_schema=json.dumps(schema)) if schema is not None else None
    return GroupRequest(
        draw,
        ids,
        seeds,
        SamplingParams(max_tokens, stop_token_ids=stops, processing=processing, **params),
    )


LETTER = TOKENIZER("z")["input_ids"][0]


@BOTH_ENGINES
@pytest.mark.parametrize("stops", [(EOS, LETTER), (LETTER,)])
async def test_completions_are_json_of_the_schema(make_sampler, stops):
    found = await make_sampler(key_length=128).generate(request(stops=stops))
    assert {each.finish_reason for each in found} == {"stop"}
    for each in found:
        assert each.token_ids[-1] in stops
        value = json.loads(TOKENIZER.decode(each.token_ids[:-1]))
        assert [*value] == ["kind", "wild"]
        assert value["kind"] in ("ox", "hen")
        assert type(value["wild"]) is bool
    assert len({each.token_ids for each in found}) > 1
    (cut,) = await make_sampler().generate(request(members=1, max_tokens=5))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)


@BOTH_ENGINES
async def test_log_probabilities_are_those_of_the_constrained_distribution(make_sampler):
    model: Any = tiny_model(seed=4)
    group_request = request(members=3, temperature=0.7)
    for each in await make_sampler(model, key_length=128).generate(group_request):
        with torch.no_grad():
            whole = torch.tensor([[*group_request.prompt_ids, *each.token_ids]])
            logits_TV = model(input_ids=whole, use_cache=False).logits[0].double()
        (mask,) = SchemaMasks(TOKENIZER).masks(json.dumps(SCHEMA), (EOS,), 1)
        expected: list[float] = []
        for logits_V, token in zip(
            logits_TV[len(group_request.prompt_ids) - 1 :], each.token_ids, strict=False
        ):
            mask.exclude(logits_V)
            expected.append(float((logits_V / 0.7).log_softmax(-1)[token]))
            mask.advance(token)
        assert each.logprobs == pytest.approx(expected, abs=3e-5)
        assert 0.0 in each.logprobs, "where only one token fits, it is certain"


async def test_a_json_schema_does_not_affect_other_requests(make_sampler):
    sampler = make_sampler(key_length=128)
    plain = request(3, schema=None, max_tokens=20)
    alone = await sampler.generate(plain)
    drawing = asyncio.gather(sampler.generate(request(1)), sampler.generate(plain))
    assert (await drawing)[1] == alone


async def test_a_schema_that_grows_too_complex_fails_its_own_group(make_sampler, monkeypatch):
    sampler = make_sampler(key_length=128)
    exclude = SchemaMask.exclude

    def failing(self: SchemaMask, logits_V: torch.Tensor) -> None:
        exclude(self, logits_V)
        self.error = "too many items"
        logits_V.fill_(math.nan)

    plain = asyncio.create_task(sampler.generate(request(3, schema=None, max_tokens=20)))
    await asyncio.sleep(0)
    monkeypatch.setattr(SchemaMask, "exclude", failing)
    with pytest.raises(UsageError, match="too many items"):
        await sampler.generate(request(1))
    monkeypatch.undo()
    assert len(await plain) == 6
    assert len(await sampler.generate(request(1))) == 6


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "foo"}, "foo"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?=a)"}, "look"),
        ({"$ref": "http://example.org/schema"}, "example.org"),
        ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "not"),
    ],
)
async def test_unsupported_json_schemas_are_refused(make_sampler, schema, said):
    with pytest.raises(UsageError, match=said):
        compile_schema(json.dumps(schema))
    sampler = make_sampler()
    with pytest.raises(UsageError, match=said):
        await sampler.generate(request(schema=schema, max_tokens=8))
    assert await sampler.generate(request(schema={"type": "object"}, max_tokens=4))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": "aö, b"}, "goes on with 'ö, b\"'"),
        ({"enum": ["中文", "é"]}, "goes on with characters, which"),
        (
            {
                "type": "object",
                "properties": {"名": {}},
                "required": ["名"],
                "additionalProperties": False,
            },
            "goes on with '名\"",
        ),
    ],
)
async def test_a_text_that_the_tokenizer_cannot_write_is_named(make_sampler, schema, said):
    with pytest.raises(UsageError, match=said) as refused:
        await make_sampler(key_length=128).generate(request(schema=schema))
    assert len(str(refused.value)) < 300


def test_a_schema_is_compiled_once():
    compile_schema.cache_clear()
    schema = json.dumps({"const": "once"})
    masks = SchemaMasks(TOKENIZER)
    for _ in range(2):
        compile_schema(schema)
        masks.masks(schema, (EOS,), 2)
    assert compile_schema.cache_info().misses == 1


def test_white_space_ends():
    """A model that loves white space would otherwise write nothing else."""
    (mask,) = SchemaMasks(TOKENIZER).masks('{"type": "integer"}', (EOS,), 1)
    space = TOKENIZER(" ")["input_ids"][0]
    for _ in range(8):
        logits_V = torch.zeros(len(TOKENIZER))
        mask.exclude(logits_V)
        if logits_V[space] == -math.inf:
            break
        mask.advance(space)
    logits_V = torch.zeros(len(TOKENIZER))
    mask.exclude(logits_V)
    assert logits_V[space] == -math.inf
