"""Several models over one base, in this process and in ranks; see also the contracts of samplers and learners.

1. What a model learns and samples is bit for bit what it would alone, whatever others do meanwhile: gradients, weights, completions.
   So it is for the model of a run that others were added to.
2. Models come and go without touching the others, also in the middle of their work, also with layers that nobody had changed.
3. The weights of the base never change.
4. A model that is dropped is gone when what is under way for it has ended; later calls are refused.
5. What cannot be made leaves nothing behind.
"""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.algorithms.registry import make
from groupwise.core.errors import ModelError, UsageError
from groupwise.core.types import GroupRequest, OptimiserParams, Row, SamplingParams
from groupwise.engine.distributed.multi_adapter import ModelRegistry, NewModel
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import fingerprint
from groupwise.engine.models.tiny import tiny_model
from groupwise.training import placement
from groupwise.training.assembly.parts import ServingParts
from groupwise.training.assembly.start import models_over, start_base, start_training
from groupwise.training.config import load_config
from tests.forked_zygote import fork_zygotes

LOSS = make("dr_grpo", {}).loss_spec()
STEP = OptimiserParams(learning_rate=0.02)
SHAPES = {
    "wide": LoraConfig(r=4, alpha=8),
    "attention": LoraConfig(r=2, alpha=2, target_modules=("q_proj", "v_proj")),
    "dropping": LoraConfig(r=8, dropout=0.3, target_modules=("up_proj", "down_proj")),
    "head": LoraConfig(r=3, alpha=5, target_modules=("lm_head", "o_proj")),
}
"""By name; the last two are computed by transformers' modules."""
TIED = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


SOAK = pytest.mark.soak(suite="engine")
IN_RANKS = pytest.mark.parametrize("processes", [pytest.param(1, marks=SOAK), 2])
IN_ONE = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=SOAK)])


def config_of(dtype="float32", **more):
    return load_config({"model": {"name": "tiny", "dtype": dtype}, **more}).config


def layout_of(config, processes):
    return replace(
        placement.choose_layout(config, 20),
        processes=processes,
        threads=processes,
        slots=8,
        key_length=64,
        max_tokens_per_microbatch=60,
    )


async def base_of(processes: int, most=4, **settings) -> tuple[ServingParts, ModelRegistry]:
    config = config_of(**settings)
    base = await start_base(config, layout_of(config, processes))
    return base, models_over(base, most)


def new(tmp_path, name, shape: LoraConfig | None = None, **more) -> NewModel:
    shape = SHAPES[name] if shape is None else shape
    folder = str(tmp_path / name)
    return NewModel(run=name, folder=folder, seed=len(name), lora=shape, **more)


def rows(seed: int, members=3) -> list[Row]:
    return [
        Row(
            tuple(range(10 + seed, 18 + seed + group)),
            tuple((7 * group + 3 * member + place + seed) % 90 + 6 for place in range(5 + member)),
            (1,) * (5 + member),
            (-4.5,) * (5 + member),
            (-1.0) ** member * (group + 1),
            1.0,
        )
        for group in range(2)
        for member in range(members)
    ]


async def step(parts: Any, number: int) -> list[Any]:
    """A step of a loop: everything that can be seen of it, to the bit."""
    learner, sampler, seen = parts.learner, parts.sampler, []
    for call in range(2):
        given = rows(number + call)
        seen.append(await learner.forward_backward(given, LOSS, {"policy": 60.0}))
    seen.append(await learner.update(STEP))
    policy = await learner.publish(number + 1)
    await sampler.load(policy)
    seen += [policy.fingerprint, sampler.fingerprint(), await learner.logprobs(rows(number))]
    params = SamplingParams(max_tokens=9)
    asked = [
        GroupRequest(draw, tuple(range(5 + draw, 20)), tuple(range(9 * draw, 9 * draw + 3)), params)
        for draw in range(2)
    ]
    return [*seen, await asyncio.gather(*map(sampler.generate, asked))]


async def steps(parts: Any, first=0, count=2) -> list[Any]:
    return [await step(parts, number) for number in range(first, first + count)]


def base_fingerprints(parts: Any) -> list[str]:
    """Of the base's own weights, in each process."""
    if parts.ranks is not None:
        states = parts.ranks.call_all_now("adapter_host._adapted.base.state_dict")
    else:
        states = [parts.hosted.adapter_host._adapted.base.state_dict()]
    own = [{key: each[key] for key in each if ".lora_" not in key} for each in states]
    found = [{key.replace(".base_layer", ""): each[key] for key in each} for each in own]
    assert all(each.keys() == tiny_model().state_dict().keys() for each in found)
    return [fingerprint(each) for each in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[..., Coroutine[Any, Any, list[Any]]]:
    """What steps of a model come to that has its base for itself, and no ranks; made once."""
    found: dict[Any, list[Any]] = {}

    async def taken(name: str, dtype="float32", count=2) -> list[Any]:
        if len(found.get((name, dtype), ())) < count:
            base, models = await base_of(1, dtype=dtype)
            with closing(base):
                made = new(tmp_path_factory.mktemp("alone"), name)
                found[name, dtype] = await steps(await models.add(name, made), count=count)
        return found[name, dtype][:count]

    return taken


@pytest.fixture(scope="module", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_zygotes(patch)
        yield


# 1, 2, 3


@TIED
@pytest.mark.parametrize(("processes", "dtype"), [
    (1, "float32"), pytest.param(1, "bfloat16", marks=SOAK), pytest.param(2, "float32", marks=SOAK),
    pytest.param(2, "bfloat16", marks=SOAK),
])  # fmt: skip
async def test_each_is_as_it_would_be_alone(processes, dtype, tmp_path, alone):
    """One of them draws dropout between the micro-batches of others."""
    wanted = {name: await alone(name, dtype) for name in SHAPES}
    base, models = await base_of(processes, dtype=dtype)
    with closing(base):
        before = base_fingerprints(base)
        parts = {name: await models.add(name, new(tmp_path, name)) for name in SHAPES}
        found = await asyncio.gather(*map(steps, parts.values()))
        assert dict(zip(parts, found, strict=True)) == wanted
        assert base_fingerprints(base) == before
    different = {each[0][3] for each in wanted.values()}
    assert len(different) == len(SHAPES), "all learn, each something else"


@TIED
@IN_ONE
async def test_adding_and_dropping_other_adapters_does_not_change_one_in_training(
    processes, tmp_path, alone
):
    wanted = await alone("attention", count=3)
    base, models = await base_of(processes)
    with closing(base):
        before = base_fingerprints(base)
        kept = await models.add("attention", new(tmp_path, "attention"))
        working = asyncio.create_task(steps(kept, count=3))
        for name in ("wide", "dropping", "head"):
            other = await models.add(name, new(tmp_path, name))
            await step(other, 0)
            await models.drop(name)
        assert await working == wanted
        assert base_fingerprints(base) == before


@TIED
@IN_RANKS
async def test_the_model_of_a_run_is_as_it_would_be_without_others(processes, tmp_path):
    config = config_of(lora={"r": 4, "alpha": 8})
    layout = layout_of(config, processes)
    with closing(await start_training(config, layout, "r", tmp_path / "a")) as parts:
        wanted = await steps(parts)
        slopes = await parts.slopes(1e-5)
    with closing(await start_training(config, layout, "r", tmp_path / "b")) as parts:
        models = models_over(parts, 4)
        assert models.names == ("run",)
        names = ("attention", "dropping", "head")
        others = [await models.add(name, new(tmp_path, name)) for name in names]
        found, *_ = await asyncio.gather(*map(steps, (parts, *others)))
        assert found == wanted
        assert await parts.slopes(1e-5) == slopes
        with pytest.raises(UsageError, match="run, attention"):
            await models.add("wide", new(tmp_path, "wide"))


# 4


@IN_RANKS
async def test_dropping_waits_for_what_is_under_way_and_then_refuses_and_frees_the_name(
    processes, tmp_path
):
    base, models = await base_of(processes, most=1)
    with closing(base):
        first = await models.add("wide", new(tmp_path, "wide"))
        seen = await step(first, 0)
        asked = GroupRequest(0, (5, 6), (1, 2), SamplingParams(30))
        wanted = await first.sampler.generate(asked)
        under_way = [
            asyncio.create_task(first.sampler.generate(asked)),
            asyncio.create_task(first.learner.forward_backward(rows(1), LOSS, {"policy": 1.0})),
        ]
        await asyncio.sleep(0)  # both have been asked for
        dropping = asyncio.create_task(models.drop("wide"))
        found, sums = await asyncio.gather(*under_way)
        assert found == wanted
        assert sums
        await dropping
        assert models.names == ()
        for call in (first.learner.publish(3), first.sampler.generate(asked)):
            with pytest.raises(UsageError, match="wide"):
                await call
        with pytest.raises(UsageError, match="wide"):
            first.learner.discard()
        with pytest.raises(UsageError, match="wide"):
            await models.drop("wide")
        again = await models.add("wide", new(tmp_path, "wide"))
        assert await step(again, 0) == seen


async def test_a_dropped_adapter_frees_its_tensors(tmp_path):
    """Its learner and sampler with all their tensors; the modules of the base are its own again."""

    def tensors() -> int:
        gc.collect()
        return sum(each.nbytes for each in gc.get_objects() if issubclass(type(each), torch.Tensor))

    base, models = await base_of(1)
    held: Any = base.hosted
    modules = [
        (path, type(module)) for path, module in held.adapter_host._adapted.base.named_modules()
    ]
    await step(await models.add("attention", new(tmp_path, "attention")), 0)
    await models.drop("attention")
    before = tensors()
    parts = await models.add("wide", new(tmp_path, "wide"))
    await step(parts, 0)
    standing = held.adapter_host._models["wide"]
    gone = [weakref.ref(each) for each in (standing.learner, standing.sampler)]
    gone += [weakref.ref(parameter) for parameter in standing.trained.parameters().values()]
    size = sum(parameter.nbytes for parameter in standing.trained.parameters().values())
    assert tensors() >= before + 4 * size, "its weights, moments, and the sampler's copy"
    del standing
    await models.drop("wide")
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert tensors() == before
    now = [(path, type(module)) for path, module in held.adapter_host._adapted.base.named_modules()]
    assert now == modules


# 5


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # it warns of what is refused afterwards
@IN_ONE
async def test_an_adapter_that_cannot_be_created_leaves_no_trace(processes, tmp_path, alone):
    wanted = await alone("attention")
    base, models = await base_of(processes, most=2)
    with closing(base):
        kept = await models.add("attention", new(tmp_path, "attention"))
        first = await steps(kept, count=1)
        for targets in (("nope",), ("k_proj", "v_prj"), ("embed_tokens", "k_proj")):
            with pytest.raises(ModelError, match=r"lora\.target_modules"):
                await models.add("bad", new(tmp_path, "bad", LoraConfig(target_modules=targets)))
        with pytest.raises(ModelError, match="there is no folder"):
            await models.add("bad", new(tmp_path, "bad", LoraConfig(), start=str(tmp_path / "x")))
        assert models.names == ("attention",)
        assert first + await steps(kept, first=1, count=1) == wanted
        await models.add("bad", new(tmp_path, "bad", LoraConfig(target_modules=("k_proj",))))


@IN_RANKS
async def test_a_model_starts_from_what_another_saved(processes, tmp_path):
    base, models = await base_of(processes)
    with closing(base):
        first = await models.add("wide", new(tmp_path, "wide"))
        await step(first, 0)
        saved = tmp_path / "saved"
        saved.mkdir()
        await first.learner.save(str(saved))
        again = await models.add("again", new(tmp_path, "again", LoraConfig(), start=str(saved)))
        given = rows(4)
        wanted = await first.learner.logprobs(given)
        assert await again.learner.logprobs(given) == wanted
        assert await again.learner.logprobs(given, "reference") == wanted
        again.learner.load(str(saved))
        assert await step(again, 1) == await step(first, 1)
        with pytest.raises(ModelError, match=r"lora\.r is 2"):
            await models.add("other", new(tmp_path, "other", LoraConfig(r=2), start=str(saved)))
