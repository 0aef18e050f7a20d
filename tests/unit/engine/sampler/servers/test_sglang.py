"""SGLang's servers behind the same interface as vLLM's: adapters, sampling, a restarted server, and unusable answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from groupwise.core.errors import ConfigError, EndpointError, RunError, UsageError
from groupwise.core.types import GroupRequest, LogitsProcessing, SamplingParams
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.sampler.servers.completions import request_body
from groupwise.engine.sampler.servers.sglang import SglangServer, generate_body
from groupwise.training.config import load_config
from tests import fake_sglang_server
from tests.vllm_pair import disturb, learner_of, server_sampler


@pytest.fixture(scope="module")
def server():
    torch.set_num_threads(1)
    with fake_sglang_server.SglangServer() as found:
        yield found


@pytest.fixture
def pair(server, tmp_path):
    """A learner whose adapter changes something, and a sampler that asks the server, which has just been started."""
    server.renew(logprobs_mode="processed_logprobs")
    learner = learner_of(tmp_path / "run")
    disturb(learner)
    return learner, server_sampler([server.url], learner, kind=SglangServer, seeded=False)


def request(**params) -> GroupRequest:
    tokenizer = tiny_tokenizer()
    asked = {"max_tokens": 8, "stop_token_ids": (tokenizer.eos_token_id,), **params}
    ids = tuple(tokenizer("sort these")["input_ids"])
    return GroupRequest(0, ids, tuple(range(4)), SamplingParams(**asked), top_logprobs=2)


async def test_each_version_has_a_name_of_its_own_and_the_one_before_goes(pair, server):
    """Also where the list of models has no adapters, and where the server was started anew meanwhile."""
    learner, sampler = pair
    for version in range(3):
        await sampler.load(await learner.publish(version))
        assert [name.split("-")[2] for name in server.adapters] == [f"v{version}"]
        for each in await sampler.generate(request()):
            assert each.policy_version == version
            assert [len(best) for best in each.top_logprobs] == [2] * len(each.token_ids)
        disturb(learner)
    server._serve_base()
    assert len(await sampler.generate(request())) == 4
    server._serve_base()
    await sampler.load(await learner.publish(3))
    assert [name.split("-")[2] for name in server.adapters] == ["v3"]
    sampler.close()
    assert server.adapters == []


async def test_a_prompt_has_the_log_probabilities_of_the_weights_here(pair):
    learner, sampler = pair
    await sampler.load(await learner.publish(0))
    prompt = request().prompt_ids
    found = await sampler.prompt_logprobs(prompt, 3)
    (expected,) = sampler._local_policy.logprobs([(prompt[:1], prompt[1:])], (1.0,))
    assert found.logprobs == pytest.approx(expected, abs=1e-5)
    assert [len(best) for best in found.top_logprobs] == [3] * (len(prompt) - 1)


async def test_a_loaded_adapter_is_taken_and_one_that_cannot_be_loaded_is_refused(pair, server):
    learner, sampler = pair
    policy = await learner.publish(0)
    await sampler.load(policy)
    await server_sampler([server.url], learner, kind=SglangServer, seeded=False).load(policy)
    assert len(server.adapters) == 1
    server.renew(logprobs_mode="processed_logprobs", max_lora_rank=1)
    with pytest.raises(UsageError, match=r"--max-lora-rank of at least lora\.r"):
        await server_sampler([server.url], learner, kind=SglangServer).load(policy)


async def test_a_server_without_the_routes_of_adapters_is_told_how_to_start(pair, server):
    learner, sampler = pair
    server.renew(logprobs_mode="processed_logprobs", updates=False)
    with pytest.raises(UsageError, match="Start SGLang with --enable-lora"):
        await sampler.load(await learner.publish(0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda entries: {"text": "no"}, "answered no completions as SGLang's /generate does"),
        (lambda entries: entries[1:], "answered 3 choices, where 4 were asked for"),
        (lambda entries: [{**entries[0], "meta_info": {}}, *entries[1:]], "output_token_logprobs"),
    ],
)
async def test_malformed_answers_of_sglang_end_the_run(pair, server, spoil, message):
    learner, sampler = pair
    await sampler.load(await learner.publish(0))
    server.spoil = lambda answer: {"entries": spoil(answer["entries"])}
    with pytest.raises(EndpointError, match=message):
        await sampler.generate(request())


def test_stop_tokens_take_effect_and_stop_texts_not_too_early() -> None:
    def sampling(**params) -> dict:
        wanted = replace(SamplingParams(8), **params)
        return generate_body(request_body("m", [[1]], 1, 7, wanted), None)["sampling_params"]

    assert (sampling()["ignore_eos"], sampling()["top_k"]) == (True, -1)
    assert sampling(stop_token_ids=(3,))["ignore_eos"] is False
    assert sampling(stop=("x",))["stop"] == ["x"]
    early = sampling(stop_token_ids=(3,), stop=("x",), min_tokens=2)
    assert (early["stop"], early["min_new_tokens"]) == ([], 2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"processing": LogitsProcessing(presence_penalty=1.0)}, "not supported with .* sglang"),
        ({"min_tokens": 2, "stop_token_ids": (5,)}, "SGLang withholds the tokenizer's own end"),
    ],
)
def test_sampling_parameters_that_sglang_interprets_differently_are_refused(
    pair, params, message
) -> None:
    _, sampler = pair
    with pytest.raises(RunError if "min_tokens" in params else UsageError, match=message):
        asyncio.run(sampler.generate(request(**params)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "url does not say where it answers. Start SGLang"),
        ("sampler.vllm_python=/bin/python", "vllm_python starts a server of vLLM"),
        ("sampler.url=http://127.0.0.1:1 sampler.seeded=true", "SGLang is sent no seeds"),
        (
            "sampler.url=http://127.0.0.1:1 lora=null sampler.weight_transfer=nccl",
            "from files, or by ipc",
        ),
        ("sampler.url=http://127.0.0.1:1 sampler.max_num_seqs=8", "with the engine sglang"),
    ],
)
def test_the_config_says_what_the_engine_does_not_take(words: str, message: str) -> None:
    given = {"model": {"name": "tiny"}, "sampler": {"engine": "sglang"}}
    with pytest.raises(ConfigError, match=message):
        load_config(given, words.split())
