"""A sampler by HTTP, against a server that answers as vLLM does.

1. Adapters come under a name of their own for each version, once; the one before goes; what a killed run left is loaded anew.
2. A server that serves another base, another vocabulary, no adapter, other log-probabilities or a shorter context is refused, with what
   to do; so is one that cannot load.
3. A server that is started anew gets its adapter again, in the middle of a step too. A lost answer is asked for again.
4. Of several servers the least loaded is asked; a dead one is left alone, and comes back by itself; without any the run ends.
5. A response that is not an answer ends the run, and the request is not repeated.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.core.errors import EndpointError, PolicyMismatchError, RunError, UsageError
from groupwise.core.types import GroupRequest, LogitsProcessing, Policy, Row, SamplingParams
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.sampler.servers.adapters import SharedFolder, policy_name
from groupwise.engine.sampler.servers.whole_weights import WholeWeights
from tests.fake_vllm_server import VllmServer, refusal
from tests.meanwhile import right_before
from tests.vllm_pair import KEY, Clock, disturb, learner_of, server_sampler

PROCESSED = "processed_logprobs"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A learner with an adapter that changes something, its beginning, and two servers: for all tests of the file."""
    torch.set_num_threads(1)
    found = learner_of(tmp_path_factory.mktemp("published") / "run")
    disturb(found)
    beginning = tmp_path_factory.mktemp("beginning")
    asyncio.run(found.save(str(beginning)))
    with VllmServer(logprobs_mode=PROCESSED) as one, VllmServer(logprobs_mode=PROCESSED) as other:
        yield found, str(beginning), one, other


@pytest.fixture
def learner(made):
    found, beginning, *_ = made
    found.load(beginning)
    return found


@pytest.fixture
def server(made):
    made[2].renew(logprobs_mode=PROCESSED)
    return made[2]


@pytest.fixture
def two(made, server):
    made[3].renew(logprobs_mode=PROCESSED)
    return server, made[3]


def request(members=4, **params) -> GroupRequest:
    tokenizer = tiny_tokenizer()
    ids = tuple(tokenizer("sort these")["input_ids"])
    asked = {"max_tokens": 8, "stop_token_ids": (tokenizer.eos_token_id,), **params}
    return GroupRequest(0, ids, tuple(range(members)), SamplingParams(**asked))


def completions(server) -> int:
    """Number of completions that the server was asked for as members of groups."""
    prompts = [[*request().prompt_ids]]
    return sum(body["n"] for body in server.bodies("/completions") if body["prompt"] == prompts)


async def groups(sampler, *members):
    """Several at once."""
    return await asyncio.gather(*(sampler.generate(request(count)) for count in members))


# --- adapters


async def test_each_version_has_a_name_of_its_own_and_the_one_before_goes(learner, server):
    sampler = server_sampler([server.url], learner)
    for version in range(3):
        policy = await learner.publish(version)
        await sampler.load(policy)
        assert server.adapters == [f"groupwise-contract-v{version}-{policy.fingerprint}"]
        for each in await sampler.generate(request()):
            assert (each.policy_version, each.fingerprint) == (version, policy.fingerprint)
        disturb(learner)
    loaded = [body["lora_name"] for body in server.bodies("/load_lora_adapter")]
    assert len(loaded) == len(set(loaded)) == 3
    sampler.close()
    assert server.adapters == []


async def test_the_event_loop_continues_while_weights_are_read_and_hashed(learner, server):
    """Neither reading nor hashing ends before the loop says so; a fingerprint is asked for at each step, and computed once."""
    sampler = server_sampler([server.url], learner)
    local_policy: Any = sampler._local_policy
    goes_on, hashed = threading.Event(), []

    def wait(call, *arguments):
        assert goes_on.wait(20)
        hashed.append(call)
        return call(*arguments)

    local_policy.read = partial(wait, local_policy.read)
    local_policy.fingerprint = partial(wait, local_policy.fingerprint)
    loading = asyncio.create_task(sampler.load(policy := await learner.publish(0)))
    await asyncio.sleep(0)
    goes_on.set()
    await loading
    assert {sampler.fingerprint() for _ in range(3)} == {policy.fingerprint}
    assert len(hashed) == 2


async def test_an_adapter_that_another_process_of_the_run_left_is_taken_or_loaded_again(
    learner, server, tmp_path
):
    policy = await learner.publish(0)
    with pytest.raises(PolicyMismatchError, match="fingerprint"):
        await server_sampler([server.url], learner).load(replace(policy, fingerprint="0" * 16))
    assert server.asked == [], "nothing that was not published so"
    first = server_sampler([server.url], learner)
    for each in (first, first, server_sampler([server.url], learner)):
        await each.load(policy)
    assert len(server.bodies("/load_lora_adapter")) == 1
    moved = tmp_path / "elsewhere" / "v000000000"
    shutil.copytree(policy.path, moved)
    await server_sampler([server.url], learner).load(replace(policy, path=str(moved)))
    assert len(server.bodies("/load_lora_adapter")) == 2
    assert server.models[policy_name(policy)].root == str(moved)
    other = tmp_path / "other" / "v000000000"
    shutil.copytree(policy.path, other)
    await server_sampler([server.url], learner).load(replace(policy, path=str(other), run="other"))
    assert len(server.adapters) == 2, "those of other runs are left alone"


async def test_a_shared_folder_holds_the_adapter_that_serves_and_no_other(learner, server, tmp_path):  # fmt: skip
    (tmp_path / "there").symlink_to(tmp_path / "here")
    shared = SharedFolder(tmp_path / "here", str(tmp_path / "there"))
    sampler = server_sampler([server.url], learner, shared=shared)
    for version in range(2):
        policy = await learner.publish(version)
        await sampler.load(policy)
        assert [each.name for each in (tmp_path / "here/run").iterdir()] == [policy_name(policy)]
        assert server.models[policy_name(policy)].root.startswith(f"{tmp_path}/there/run/")
        disturb(learner)
    assert len(server.adapters) == 1
    sampler.close()
    assert list((tmp_path / "here").iterdir()) == []


async def test_nothing_is_drawn_before_weights_or_loaded_while_drawing(learner, server):
    sampler = server_sampler([server.url], learner)
    with pytest.raises(RunError, match="no weights yet"):
        await sampler.generate(request())
    policy = await learner.publish(0)
    await sampler.load(policy)
    under_way = asyncio.ensure_future(sampler.generate(request()))
    await asyncio.sleep(0)
    with pytest.raises(RunError, match="of the old ones"):
        await sampler.load(policy)
    await under_way
    with pytest.raises(UsageError, match="holds all weights"):
        await sampler.load(replace(policy, kind="full"))
    for_models = server_sampler(
        [server.url], learner, sync=WholeWeights("tiny", "files", sampler._local_policy, timeout=1)
    )
    with pytest.raises(UsageError, match="holds an adapter, but lora is null"):
        await for_models.load(policy)


# --- servers that are not as they must be


@pytest.mark.parametrize(
    ("settings", "sampler", "told"),
    [
        ({"name": "other"}, {}, r"sampler\.served_model"),
        ({"max_model_len": 100}, {}, "--max-model-len 128"),
        ({"updates": False}, {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"max_lora_rank": 2}, {}, "max_lora_rank 2"),
        ({"seed": 1}, {}, r"sampler\.logprob_tolerance is 0\.01"),
        ({"ignores_adapters": True}, {"tolerance": 10.0}, "without any adapter"),
        ({"logprobs_mode": "raw_logprobs"}, {"tolerance": 10.0}, "--logprobs-mode processed_logprobs"),
        ({"key": "secret"}, {}, KEY),
    ],
)  # fmt: skip
async def test_a_server_that_does_not_fit_is_refused(learner, server, settings, sampler, told):
    server.renew(**{"logprobs_mode": PROCESSED, **settings})
    tried = server_sampler([server.url], learner, **sampler)
    with pytest.raises((UsageError, PolicyMismatchError, EndpointError), match=told):
        await tried.load(await learner.publish(0))


async def test_a_server_may_ask_for_a_key_or_serve_its_base(learner, server, monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    server.renew(logprobs_mode=PROCESSED, key="secret")
    sampler = server_sampler([server.url], learner)
    await sampler.serve_base()
    assert {each.policy_version for each in await sampler.generate(request())} == {0}
    await sampler.load(await learner.publish(0))
    assert len(server.adapters) == 1
    sampler.close()
    assert server.adapters == []


# --- servers that end and come back


async def test_a_server_that_ends_in_the_middle_is_waited_for(learner, server):
    clock = Clock()
    sampler = server_sampler([server.url], learner, clock=clock)
    await sampler.load(await learner.publish(0))
    before = await sampler.generate(request(8))

    async def dies(path, body):
        if path == "/completions":
            server.stop_soon()
            return refusal(503, "going down")
        return None

    def again():
        server.end()
        server.interfere = None
        server.begin()

    server.interfere, clock.meanwhile[2] = dies, again
    assert await sampler.generate(request(8)) == before
    assert len(server.adapters) == 1
    assert clock.slept


async def test_another_model_at_the_address_of_a_lost_server_is_noticed(learner, server):
    clock = Clock()
    sampler = server_sampler([server.url], learner, clock=clock)
    await sampler.load(await learner.publish(0))

    server.end()
    clock.meanwhile[1] = lambda: server.renew(logprobs_mode=PROCESSED, seed=1)
    with pytest.raises(PolicyMismatchError, match="serves other weights"):
        await sampler.generate(request())


async def test_without_any_server_the_run_ends_after_its_timeout(learner, server):
    clock = Clock()
    sampler = server_sampler([server.url], learner, clock=clock, server_timeout=50.0)
    await sampler.load(await learner.publish(0))
    server.end()
    with pytest.raises(EndpointError, match=r"sampler\.server_timeout.*--resume"):  # fmt: skip
        await sampler.generate(request(1))
    assert sum(clock.slept) == pytest.approx(50.0)
    assert clock.slept[:4] == [1.0, 2.0, 4.0, 8.0]


async def test_a_request_that_exceeds_its_time_limit_is_repeated(learner, server):
    sampler = server_sampler([server.url], learner, timeout=3.0)
    await sampler.load(await learner.publish(0))
    hung, asked_again = [], asyncio.Event()

    async def hangs(path, body):
        if path == "/completions" and not hung:
            hung.append(body)
            await asked_again.wait()
        elif hung and body.get("prompt") == hung[0]["prompt"]:
            asked_again.set()

    server.interfere = hangs
    assert len(await sampler.generate(request(1))) == 1
    assert completions(server) == 2, "asked for once more"
    first, last = (body for body in server.bodies("/completions") if body["prompt"] == hung[0]["prompt"])  # fmt: skip
    assert first == last == hung[0], "the same seed"


# --- several


async def test_several_servers_share_the_work(learner, two):
    sampler = server_sampler([each.url for each in two], learner)
    await sampler.load(await learner.publish(0))
    together = await groups(sampler, 6, 3, 4)
    assert [*map(completions, two)] == [6, 7]
    alone = server_sampler([two[0].url], learner)
    await alone.load(await learner.publish(0))
    assert await groups(alone, 6, 3, 4) == together


async def test_a_dead_one_is_left_alone_and_comes_back_with_the_newest_weights(learner, two):
    clock, (one, dead) = Clock(), two
    sampler = server_sampler([one.url, dead.url], learner, clock=clock)
    await sampler.load(await learner.publish(0))
    dead.end()
    assert len(await sampler.generate(request(6))) == 6
    assert completions(one) == 6
    disturb(learner)
    policy = await learner.publish(1)
    await sampler.load(policy)
    dead.begin()
    await sampler.generate(request(6))
    assert completions(dead) == 0, "left alone for a while"
    clock.now += 100
    await groups(sampler, 6, 3)
    assert completions(dead) == 3
    assert dead.adapters == [policy_name(policy)]
    assert clock.slept == []


async def test_a_group_is_one_request_whose_seeds_may_be_left_to_the_server(learner, server):
    seeded, other = (
        server_sampler([server.url], learner, seeded=seeded) for seeded in (True, False)
    )
    policy = await learner.publish(0)
    for sampler in (seeded, other):
        await sampler.load(policy)
        server.asked.clear()
        assert len({each.token_ids for each in await sampler.generate(request(8))}) > 1
        (asked,) = server.bodies("/completions")
        assert (asked["n"], asked["seed"]) == (8, 0 if sampler is seeded else None)
    cold = replace(request(3), params=replace(request().params, temperature=0.0))
    assert len({each.token_ids for each in await seeded.generate(cold)}) == 1


# --- responses that are not answers


async def test_a_strange_answer_ends_the_run_and_is_not_asked_for_again(learner, server):
    sampler = server_sampler([server.url], learner)
    await sampler.load(await learner.publish(0))

    def short(answer):
        answer["choices"][0]["logprobs"]["token_logprobs"].pop()
        return answer

    server.spoil = short
    with pytest.raises(EndpointError, match=server.url):  # fmt: skip
        await sampler.generate(request(1))
    assert completions(server) == 1


async def test_no_more_than_the_limit_is_asked_at_once(learner, server):
    sampler = server_sampler([server.url], learner)
    for each in sampler._servers.all:
        each.concurrency = 3
    await sampler.load(await learner.publish(0))
    there, most = 0, 0

    async def counted(path, body):
        nonlocal there, most
        there += 1
        most = max(most, there)
        for _ in range(50):
            await asyncio.sleep(0)
        there -= 1

    server.interfere = counted
    await groups(sampler, *[1] * 12)
    assert 1 < most <= 3


# --- what is asked beside the tokens


async def test_alternatives_schemas_and_prompts_come_from_the_server(learner, server):
    sampler = server_sampler([server.url], learner)
    await sampler.load(await learner.publish(0))
    plain = request()
    for each in await sampler.generate(replace(plain, top_logprobs=3)):
        assert [len(best) for best in each.top_logprobs] == [3] * len(each.token_ids)
        for token, logprob, best in zip(
            each.token_ids, each.logprobs, each.top_logprobs, strict=True
        ):
            assert dict(best).get(token, logprob) == pytest.approx(logprob)
            assert logprob <= best[0][1] + 1e-6
    biased = replace(plain.params, processing=LogitsProcessing(logit_bias=((30, 100.0),)))
    for each in await sampler.generate(replace(plain, params=biased)):
        assert each.token_ids == (30,) * 8
    schema = LogitsProcessing(json_schema='{"enum": [true]}')
    for each in await sampler.generate(
        replace(plain, params=replace(plain.params, processing=schema))
    ):
        assert tiny_tokenizer().decode([*each.token_ids], skip_special_tokens=True) == "true"
    told = await sampler.prompt_logprobs(plain.prompt_ids, 2)
    row = Row(plain.prompt_ids[:1], plain.prompt_ids[1:], (1,) * 9, (0.0,) * 9, 0.0, 1.0)
    (wanted,) = await learner.logprobs([row])
    assert told.logprobs == pytest.approx(wanted, abs=1e-4)
    assert [len(best) for best in told.top_logprobs] == [2] * 9


def test_a_shared_folder_that_another_run_uses_meanwhile_stays(tmp_path, monkeypatch):
    """A run of the same folder on another machine."""
    shared = SharedFolder(tmp_path, "/there")
    of_run = tmp_path / "run"
    of_run.mkdir()
    right_before(monkeypatch, Path, "rmdir", (of_run / "other").touch, lambda path: path == of_run)
    shared.remove(Policy("run", 1, "f00d", "adapter", str(tmp_path / "published" / "run" / "v1")))
    assert [path.name for path in of_run.iterdir()] == ["other"]
