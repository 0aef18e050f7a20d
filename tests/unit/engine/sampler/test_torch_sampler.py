"""The torch sampler:

1. What was sampled is what comes back, token for token, also where text would not give the same tokens again.
2. Any stop token ends a completion, once; a truncated completion has none.
3. Nothing but its own prompt and seed decides a completion: to the bit, whatever the mates, the order, the slot, the load.
4. Its log-probabilities are those of a plain forward pass; greedy, it is transformers' `generate`.
5. Nothing of one policy is left when another is loaded.
6. What goes wrong reaches everybody who waits, hangs nobody, and leaves a sampler that works.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig

from groupwise.core.errors import NonFiniteError, RunError
from groupwise.core.types import GroupRequest, SamplingParams
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedModel
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler import queued
from groupwise.engine.sampler.draw import draw_tokens
from groupwise.engine.sampler.native.engine import NativeEngine
from groupwise.engine.sampler.weights import ServedModel
from tests.unit.engine.models.native.families import SMALL, made

TOKENIZER: Any = tiny_tokenizer()
EOS = 1


def request(draw=0, members=4, prompt="sort these", max_tokens=20, **params) -> GroupRequest:
    ids = tuple(TOKENIZER(prompt)["input_ids"])
    seeds = tuple(1000 * draw + member for member in range(members))
    params = {"stop_token_ids": (EOS,), **params}
    return GroupRequest(draw, ids, seeds, SamplingParams(max_tokens, **params))


BOTH_ENGINES = pytest.mark.usefixtures("engine")

MIXED = [
    request(0, 5, "a"), request(1, 1, "what is it then", temperature=0.6), request(2, 9, "sort these", max_tokens=25),
    request(3, 3, "x y z, a longer one", max_tokens=1), request(4, 2, "a", temperature=0.0), request(5, 6, "b", min_tokens=5),
    request(6, 3, "b", temperature=0.0, min_tokens=9), request(7, 4, "what", temperature=1.4, top_p=0.7),
    request(8, 4, "what", top_k=9, min_p=0.02, min_tokens=3),
]  # fmt: skip
"""More members than slots, prompts and limits of several lengths."""


def plain_logprobs(model, prompt_ids, token_ids, temperature=1.0) -> list[float]:
    """By transformers' own forward over the whole sequence."""
    whole = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.no_grad():
        logits = model(input_ids=whole, use_cache=False).logits[0].double()
    tail = (logits[len(prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return [float(tail[index, token]) for index, token in enumerate(token_ids)]


# Tokens


async def test_sampled_ids_are_verbatim_where_text_would_change_them(make_sampler):
    found = await make_sampler().generate(request(members=40))
    changed = [
        each
        for each in found
        if tuple(TOKENIZER(TOKENIZER.decode(each.token_ids, skip_special_tokens=True))["input_ids"])
        != each.token_ids
    ]
    assert changed, "some must hold tokens that text loses"
    for each in changed:
        wanted = plain_logprobs(tiny_model(seed=4), request().prompt_ids, each.token_ids)
        assert each.logprobs == pytest.approx(wanted, abs=2e-5), "they are the drawn ones"


@BOTH_ENGINES
async def test_every_stop_token_ends_a_completion(make_sampler):
    stops = tuple(range(1, 40))
    found = await make_sampler().generate(request(members=60, stop_token_ids=stops))
    ends = {each.token_ids[-1] for each in found if each.finish_reason == "stop"}
    assert len(ends) > 5
    assert ends <= set(stops)
    assert not any(set(each.token_ids[:-1]) & set(stops) for each in found)


# Independence, to the bit


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("native", torch.float32),
        ("native", torch.bfloat16),
        ("transformers", torch.float32),
        pytest.param("transformers", torch.bfloat16, marks=pytest.mark.soak(suite="engine")),
    ],
    indirect=["engine"],
)
async def test_neither_order_nor_mates_nor_slots_change_a_bit(engine, make_sampler, dtype):
    sampler = make_sampler(dtype=dtype)
    alone = [await sampler.generate(asked) for asked in MIXED]
    order = random.Random(0).sample(range(len(MIXED)), len(MIXED))
    found = await asyncio.gather(*(sampler.generate(MIXED[index]) for index in order))
    assert [found[order.index(index)] for index in range(len(MIXED))] == alone
    parts = [await sampler.generate(replace(MIXED[2], seeds=(seed,))) for seed in MIXED[2].seeds]
    assert tuple(part[0] for part in parts) == alone[2]
    assert len({each.token_ids for each in alone[2]}) == len(alone[2])
    others = [request(90 + index, 2, "noise " * 2, max_tokens=9) for index in range(3)]
    together = await asyncio.gather(*map(sampler.generate, [*others, *MIXED, *others]))
    assert list(together[3:-3]) == alone


async def test_a_prompt_is_computed_once_for_all_groups_in_progress(make_sampler, monkeypatch):
    sampler = make_sampler()
    orders = [request(draw, 2, "sort these", max_tokens=30) for draw in range(3)]
    alone = [await sampler.generate(order) for order in orders]
    computed: list[tuple[int, ...]] = []
    prefill = NativeEngine.prefill
    monkeypatch.setattr(
        NativeEngine, "prefill", lambda engine, ids: computed.append(ids) or prefill(engine, ids)
    )
    first_two = asyncio.gather(*map(sampler.generate, orders[:2]))
    while not any(sampler.so_far(0)):  # noqa: ASYNC110 — it yields after every token
        await asyncio.sleep(0)
    last = await sampler.generate(orders[2])
    assert [*await first_two, last] == alone
    assert computed == [orders[0].prompt_ids]
    await sampler.generate(orders[0])
    assert len(computed) == 2, "nobody was using it any more"


# Against transformers


@BOTH_ENGINES
async def test_log_probabilities_are_those_of_a_plain_forward_pass(make_sampler):
    temperature = 0.5
    model: Any = tiny_model(seed=4)
    groups = [request(draw, 6, prompt, temperature=temperature)
              for draw, prompt in enumerate(("a", "a longer prompt"))]  # fmt: skip
    sampler = make_sampler(model)
    for asked, found in zip(
        groups, await asyncio.gather(*map(sampler.generate, groups)), strict=True
    ):
        for each in found:
            wanted = plain_logprobs(model, asked.prompt_ids, each.token_ids, temperature)
            assert each.logprobs == pytest.approx(wanted, abs=2e-5)


async def test_log_probabilities_are_exact_with_sliding_windows(make_sampler):
    config = MistralConfig(**{**SMALL, "vocab_size": 102, "head_dim": 16, "sliding_window": 6})
    model = made(config)
    asked = request(members=3, prompt="longer than a window")
    for each in await make_sampler(model).generate(asked):
        wanted = plain_logprobs(model, asked.prompt_ids, each.token_ids)
        assert each.logprobs == pytest.approx(wanted, abs=1e-4)


@BOTH_ENGINES
@pytest.mark.parametrize("least", [0, 7])
async def test_greedy_is_what_transformers_generates(make_sampler, least):
    model: Any = tiny_model(seed=4)
    asked = request(members=1, temperature=0.0)
    sampler = make_sampler(model)
    (found,) = await sampler.generate(asked)
    ways: list[dict[str, Any]] = [
        {"temperature": 1.3, "top_k": 1}, {"temperature": 0.0, "top_k": 1}, {"temperature": 1e-44}, {"top_p": 1e-50},
    ]  # fmt: skip
    for way in ways:
        (single,) = await sampler.generate(request(members=1, **way))
        assert (single.token_ids, {*single.logprobs}) == (found.token_ids, {0.0})
    stop = found.token_ids[2] if least else EOS
    asked = request(members=1, temperature=0.0, stop_token_ids=(stop,), min_tokens=least)
    (found,) = await sampler.generate(asked)
    ids = torch.tensor([asked.prompt_ids])
    more = {"min_new_tokens": least, "eos_token_id": stop, "max_new_tokens": 20}
    with torch.no_grad():
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **more)
    assert list(found.token_ids) == wanted[0, ids.shape[1] :].tolist()
    if least:
        return
    expected = plain_logprobs(model, asked.prompt_ids, found.token_ids)
    assert found.logprobs == pytest.approx(expected, abs=2e-5)


# Other weights


def learner_of(trained: TrainedModel, folder: Path) -> TorchLearner:
    return TorchLearner(
        trained, run="r", publish_folder=folder, max_tokens_per_microbatch=999, seed=0
    )


@BOTH_ENGINES
async def test_nothing_of_the_old_policy_is_left_in_a_shared_system_prompt(make_sampler, tmp_path):
    """Prompts that begin alike, before and after: what they share is computed by the policy that answers."""
    shared = "a long system prompt, shared: "
    trained = TrainedModel(tiny_model(seed=4))
    learner = learner_of(trained, tmp_path)
    sampler = make_sampler(key_length=64)
    for version, questions in enumerate([("one", "two"), ("one", "three"), ("", "two", "four")]):
        await sampler.load(await learner.publish(version))
        asked = [
            request(10 * version + draw, 3, shared + question)
            for draw, question in enumerate(questions)
        ]
        for each, found in zip(
            asked, await asyncio.gather(*map(sampler.generate, asked)), strict=True
        ):
            for completion in found:
                wanted = plain_logprobs(trained.model, each.prompt_ids, completion.token_ids)
                assert completion.logprobs == pytest.approx(wanted, abs=2e-5)
        with torch.no_grad():
            for parameter in trained.parameters().values():
                parameter.add_(torch.randn(parameter.shape) * 0.2)


@BOTH_ENGINES
async def test_loading_while_it_samples_is_refused(make_sampler, tmp_path):
    policy = await learner_of(TrainedModel(tiny_model(seed=4)), tmp_path).publish(1)
    sampler = make_sampler()
    busy = asyncio.ensure_future(sampler.generate(request()))
    for _ in range(3):
        await asyncio.sleep(0)
        with pytest.raises(RunError, match="on their way"):
            await sampler.load(policy)
    assert {each.policy_version for each in await busy} == {0}
    await sampler.load(policy)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_requests_during_a_weight_load_wait_for_it(
    make_sampler, tmp_path, monkeypatch, cancelled
):
    """The event loop goes on meanwhile. A load that is cancelled is completed first."""
    policy = await learner_of(TrainedModel(tiny_model(seed=9)), tmp_path).publish(1)
    sampler, fresh = make_sampler(), make_sampler(tiny_model(seed=9))
    may_read, read = threading.Event(), ServedModel.read

    def waiting(served: ServedModel, folder: Path) -> None:
        assert may_read.wait(20)
        read(served, folder)

    monkeypatch.setattr(ServedModel, "read", waiting)
    loading = asyncio.create_task(sampler.load(policy))
    await asyncio.sleep(0)
    group = asyncio.create_task(sampler.generate(request()))
    scores = asyncio.create_task(sampler.prompt_logprobs((5, 6, 7), 0))
    if cancelled:
        loading.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sampler.so_far(0)
    assert not any(task.done() for task in (loading, group, scores))
    may_read.set()
    found = await group
    assert (await asyncio.gather(loading, return_exceptions=True) != [None]) == cancelled
    wanted = await fresh.generate(request())
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert {each.policy_version for each in found} == {1}
    assert await scores == await fresh.prompt_logprobs((5, 6, 7), 0)


# When something goes wrong


@BOTH_ENGINES
async def test_a_request_that_does_not_fit_is_refused_without_disturbing_others(make_sampler):
    sampler = make_sampler(key_length=48)
    alone = await sampler.generate(request())
    fits = request(prompt="x" * 28)
    await sampler.generate(fits)
    running = asyncio.ensure_future(sampler.generate(request()))
    await asyncio.sleep(0)
    with pytest.raises(RunError, match="needs 49"):
        await sampler.generate(request(prompt="x" * 29))
    for nothing in (replace(request(), prompt_ids=()), request(max_tokens=0)):
        with pytest.raises(RunError, match="at least one"):
            await sampler.generate(nothing)
    assert await running == alone
    assert await sampler.generate(request(members=0)) == ()


@BOTH_ENGINES
async def test_a_row_that_is_no_number_fails_its_own_group_alone(make_sampler, monkeypatch):
    def spoilt(logits: Any, temperatures: Any, uniforms: Any) -> Any:
        tokens, logprobs = draw_tokens(logits, temperatures, uniforms)
        return tokens, logprobs.masked_fill(temperatures == 0.5, math.nan)

    sampler = make_sampler()
    wanted = await sampler.generate(request())
    monkeypatch.setattr(queued, "draw_tokens", spoilt)
    asked = request(), request(1, 30, temperature=0.5), request()
    first, broken, last = await asyncio.gather(
        *map(sampler.generate, asked), return_exceptions=True
    )
    assert isinstance(broken, NonFiniteError)
    assert [first, last] == [wanted, wanted]


@BOTH_ENGINES
@pytest.mark.parametrize("after", [0, 7])
async def test_an_error_reaches_all_who_wait_and_hangs_nobody(make_sampler, monkeypatch, after):
    """In a layer: of a prompt, or of a token whose keys and values are half written."""
    sampler = make_sampler()
    wanted = await sampler.generate(request())
    calls = [0]

    def failing(activation: Any) -> Any:
        def fail(*arguments: Any, **more: Any) -> torch.Tensor:
            calls[0] += 1
            if calls[0] > after:
                raise RuntimeError("it is broken")
            return activation(*arguments, **more)

        return fail

    for owner, name in ((torch.nn.functional, "silu"), (NativeModel, "swiglu")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    groups = [request(0, 1), request(1, 1, "b"), request(2, 20)]
    failed = await asyncio.wait_for(
        asyncio.gather(*map(sampler.generate, groups), return_exceptions=True), timeout=20
    )
    assert [type(error) for error in failed] == [RunError] * 3
    assert "it is broken" in str(failed[0])
    monkeypatch.undo()
    assert await sampler.generate(request()) == wanted


@BOTH_ENGINES
async def test_completions_under_way_keep_their_cache(make_sampler):
    sampler = make_sampler()
    wanted = await sampler.generate(request())
    sampler._frees_cache = True
    await sampler.release_memory()
    under_way = asyncio.create_task(sampler.generate(request()))
    for _ in range(4):
        await asyncio.sleep(0)
        await sampler.release_memory()
    assert await under_way == wanted
