"""The implementations that the contract suites run against."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.interruption import run_to_end
from groupwise.core.types import Learner, Sampler
from tests import unsloth
from tests.forked_zygote import fork_zygotes


@dataclass
class Pair:
    """A sampler and a learner that belong together."""

    sampler: Sampler
    learner: Learner
    tokenizer: Any
    end_id: Any
    disturb: Callable[[], None]
    """Change the learner's weights."""
    close: Callable[[], None] = field(default=lambda: None)
    exact: bool = True
    """Whether results of the sampler are the same to the bit beside others; else their last digits differ."""
    seeded: bool = True
    """Whether a member's seed decides what is drawn."""


def _fakes(folder: Path) -> Pair:
    from groupwise.testing import END_ID, FakeLearner, FakeSampler, FakeTokenizer

    learner = FakeLearner("contract", folder)

    def disturb() -> None:
        learner.table[3] += 1.0

    return Pair(FakeSampler(), learner, FakeTokenizer(), END_ID, disturb)


def _pair(sampler: Sampler, learner: Learner, disturb: Callable[[], None], **more: Any) -> Pair:
    """Of the tiny model's texts."""
    from groupwise.engine.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    return Pair(sampler, learner, tokenizer, tokenizer.eos_token_id, disturb, **more)


def _torch_adapter(folder: Path) -> Pair:
    from groupwise.engine.learner.weights import TrainedAdapter
    from groupwise.engine.models.config import LoraConfig
    from groupwise.engine.models.lora import AdaptedModel
    from groupwise.engine.models.lora_config import new_lora_config
    from groupwise.engine.models.tiny import tiny_model
    from groupwise.engine.sampler.weights import ServedAdapter

    adapted = AdaptedModel(tiny_model(), new_lora_config(LoraConfig(r=4, alpha=8)))
    return _torch_pair(folder, TrainedAdapter(adapted, seed=1), ServedAdapter(adapted))


def _torch_full(folder: Path) -> Pair:
    from groupwise.engine.learner.weights import TrainedModel
    from groupwise.engine.models.tiny import tiny_model
    from groupwise.engine.sampler.weights import ServedModel

    trained = TrainedModel(tiny_model(), reference=tiny_model())
    return _torch_pair(folder, trained, ServedModel(tiny_model()))


def _torch_pair(folder: Path, trained: Any, served: Any) -> Pair:
    from groupwise.engine.models.tiny import tiny_tokenizer
    from groupwise.engine.sampler.queued import DecodeLayout
    from groupwise.engine.sampler.torch_sampler import TorchSampler

    sampler = TorchSampler(served, tiny_tokenizer(), DecodeLayout(slots=8, key_length=64))
    return _pair(sampler, _learner(folder, trained), lambda: _shift(trained.parameters()))


def _learner(folder: Path, trained: Any, engine: Any = None) -> Learner:
    from groupwise.engine.learner.torch_learner import TorchLearner

    return TorchLearner(
        trained,
        engine=engine,
        run="contract",
        publish_folder=folder,
        max_tokens_per_microbatch=4096,
        seed=1,
    )


def _shift(parameters: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def _served(engine: str, folder: Path) -> Pair:
    """Completions of a server, of the adapter that a learner here has published."""
    from groupwise.engine.sampler.servers import server_pool, sglang
    from tests.fake_sglang_server import SglangServer
    from tests.fake_vllm_server import VllmServer
    from tests.vllm_pair import learner_of, server_sampler, trained

    server, kind = (
        (SglangServer(max_model_len=64), sglang.SglangServer)
        if engine == "sglang"
        else (VllmServer(logprobs_mode="processed_logprobs", max_model_len=64), server_pool.Server)
    )
    learner = learner_of(folder)
    sampler = server_sampler(
        [server.url], learner, key_length=64, kind=kind, seeded=engine == "vllm"
    )
    server.begin()

    def close() -> None:
        sampler.close()
        server.end()

    return _pair(
        sampler,
        learner,
        lambda: _shift(trained(learner).parameters()),
        close=close,
        seeded=engine == "vllm",
    )


def _unsloth(folder: Path) -> Pair:
    """Both over a model that the stand-in of Unsloth has loaded."""
    from groupwise.engine.backends.unsloth.model import UnslothEngine
    from groupwise.engine.backends.unsloth.sampler import UnslothSampler
    from groupwise.engine.learner.weights import TrainedAdapter
    from groupwise.engine.models.tiny import tiny_tokenizer
    from groupwise.engine.sampler.queued import DecodeLayout
    from groupwise.engine.sampler.weights import ServedAdapter

    adapted = unsloth.tiny()
    trained = TrainedAdapter(adapted, seed=1)
    layout = DecodeLayout(slots=8, key_length=64)
    return _pair(
        UnslothSampler(ServedAdapter(adapted), tiny_tokenizer(), layout),
        _learner(folder, trained, UnslothEngine(trained)),
        lambda: _shift(trained.parameters()),
        exact=False,
    )


def _ranks(folder: Path) -> Pair:
    """Two ranks over one adapter; they must be forked, so that the tests do not wait for imports."""
    from groupwise.engine.distributed.forked_workers import ForkedWorkers
    from groupwise.engine.distributed.learner import RankLearner
    from groupwise.engine.distributed.sampler import RankSampler

    ranks = ForkedWorkers()
    ranks.start()
    ranks.make_now("tests.contract.hosted:adapter", {"folder": str(folder), "count": 2}, 2)
    return _pair(
        RankSampler(ranks),
        RankLearner(ranks),
        lambda: ranks.call_all_now("disturb")[0],
        close=ranks.close,
    )


def _added(processes: int, folder: Path) -> Pair:
    """A model beside another one, over a base that was loaded without any; with ranks one of them computes it."""
    from dataclasses import replace

    from groupwise.engine.distributed.multi_adapter import NewModel
    from groupwise.engine.models.config import LoraConfig
    from groupwise.training import placement
    from groupwise.training.assembly.parts import ServingParts
    from groupwise.training.assembly.start import models_over, start_base
    from groupwise.training.config import load_config

    config = load_config({"model": {"name": "tiny", "dtype": "float32"}}).config
    layout = placement.choose_layout(config, 20)
    layout = replace(
        layout, processes=processes, threads=processes, slots=8, key_length=64,
        max_tokens_per_microbatch=4096,
    )  # fmt: skip

    async def made() -> tuple[ServingParts, Any]:
        base = await start_base(config, layout)
        models = models_over(base, 2)
        for name, shape in (
            ("other", LoraConfig(r=2, target_modules=("q_proj",))),
            ("contract", LoraConfig(r=4, alpha=8)),
        ):
            own = NewModel(run=name, folder=str(folder / name), seed=1, lora=shape)
            added = await models.add(name, own)
        return base, added

    base, parts = asyncio.run(made())
    return _pair(
        parts.sampler,
        parts.learner,
        lambda: _shift_saved(parts.learner, folder / "shifted"),
        close=base.close,
    )


def _remote(lora: dict[str, int] | None, folder: Path) -> Pair:
    """Parts of a training server, by its routes and its engine's calls, without a socket between them."""
    from groupwise.engine.backends.remote.parts import RemotePartsSpec, start
    from groupwise.engine.models.identity import identity
    from groupwise.training import placement
    from groupwise.training.config import load_config
    from tests.parts_server import HERE, PartsServer

    config = load_config(
        {
            "model": {"name": "tiny", "dtype": "float32"}, "lora": lora, "algorithm": {"beta": 0.1},
            "sampler": {"max_num_seqs": 8, "max_completion_length": 40}, "training": {"seed": 1},
        }
    ).config  # fmt: skip
    layout = placement.choose_layout(config, 24)
    assert layout.key_length == 64
    wanted = RemotePartsSpec(
        kind="training",
        config=config.model_dump(mode="json"),
        run="contract",
        publish_folder=folder,
        longest_prompt=24,
        base=identity(config.model),
    )
    server = PartsServer(folder.parent / "server")
    parts = asyncio.run(start(HERE, wanted, server.transport))
    return _pair(
        parts.sampler,
        parts.learner,
        lambda: _shift_saved(parts.learner, folder.parent / "shifted"),
        close=parts.session.close,
    )


def _shift_saved(learner: Learner, folder: Path) -> None:
    """Change the weights of a learner that may be in another process."""
    from safetensors.torch import load_file, save_file

    from groupwise.engine.models.files import FULL_WEIGHTS
    from groupwise.engine.models.lora_config import WEIGHTS

    folder.mkdir(parents=True, exist_ok=True)
    run_to_end(learner.save(str(folder)))
    weights = next(folder / name for name in (WEIGHTS, FULL_WEIGHTS) if (folder / name).exists())
    tensors = load_file(weights)
    _shift(tensors)
    _as_one_weight(tensors)
    save_file(tensors, weights)
    learner.load(str(folder))


def _tunix(family: str, layers: int | None, folder: Path) -> Pair:
    """A worker in Tunix's environment, over a model of one of its families."""
    from groupwise.training import placement
    from groupwise.training.assembly.start import start_training
    from groupwise.training.config import load_config
    from tests.tunix_models import model_of

    config = load_config(
        {
            "model": {"name": str(model_of(family, layers)), "backend": "tunix"},
            "lora": {"r": 4, "alpha": 8},
            "sampler": {"max_num_seqs": 16, "max_completion_length": 40},
            "training": {"seed": 1},
        }
    ).config
    layout = placement.choose_layout(config, 24)
    parts = asyncio.run(start_training(config, layout, "contract", folder))
    return _pair(
        parts.sampler,
        parts.learner,
        lambda: _shift_saved(parts.learner, folder.parent / "shifted"),
        close=parts.close,
    )


def _as_one_weight(tensors: dict[str, Any]) -> None:
    """Keys and values of Tunix's Gemma share an A; for others this is one change more."""
    for name in tensors:
        if name.endswith("v_proj.lora_A.weight"):
            tensors[name] = tensors[name.replace("v_proj", "k_proj")].clone()


MAKERS = {
    "fake": _fakes, "torch-adapter": _torch_adapter, "torch-full": _torch_full, "vllm": partial(_served, "vllm"),
    "sglang": partial(_served, "sglang"),
    "unsloth": _unsloth, "ranks": _ranks, "torch-added": partial(_added, 1),
    "ranks-added": partial(_added, 2), "remote": partial(_remote, {"r": 4, "alpha": 8}),
    "remote-full": partial(_remote, None), "tunix-llama": partial(_tunix, "llama", 2),
    "tunix-gemma": partial(_tunix, "gemma3", None),
}  # fmt: skip


TOLD_EVERYWHERE = ("exit code 3", "signal 9")
"""Failures that are tried at every place for jobs."""


OF_OTHERS = {
    "test_learner_contract.py": {
        "sglang": {"test_sampler_and_learner_agree"},
        "vllm": {
            "test_sampler_and_learner_agree",
            "test_learner_and_sampler_agree_under_min_tokens",
        },
        "torch-added": {
            "test_the_update_does_not_depend_on_the_cuts",
            "test_save_and_load_restore_exactly",
            "test_the_reference_stays",
        },
        "ranks-added": {
            "test_save_and_load_restore_exactly",
            "test_discarded_and_non_finite_gradients_are_not_applied",
        },
        "remote-full": {
            "test_save_and_load_restore_exactly",
            "test_the_reference_stays",
        },
    },
    "test_sampler_contract.py": {
        "torch-full": {"test_results_do_not_depend_on_what_else_is_asked", "test_a_published_change_reaches_the_sampler"},
        "torch-added": {"test_cancelling_a_request_does_not_disturb_others", "test_a_published_change_reaches_the_sampler"},
        "ranks-added": {"test_results_do_not_depend_on_what_else_is_asked", "test_a_published_change_reaches_the_sampler"},
        "remote-full": {"test_a_published_change_reaches_the_sampler"},
    },
}  # fmt: skip
"""Makers whose learner or sampler is of a class that another one's is of, too: the tests that ask for what is theirs alone.

With the other tests they are soak tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For parametrised tests, the `ranks` implementations run in CI for the first case only; the other cases are soak tests.

    What needs Tunix's environment is a stage of its own. One function classifies the failures of jobs: all kinds are tried on this
    machine, and on other backends those that they report in their own ways.
    """
    seen: set[tuple[Path, str, str]] = set()
    for item in items:
        call = getattr(item, "callspec", None)
        if call and _is_told_elsewhere(call.params):
            item.add_marker(pytest.mark.soak(suite="launch"))
        maker = call.params.get("made") if call else None
        few = OF_OTHERS.get(item.path.name, {}).get(str(maker))
        if few is not None and item.name.partition("[")[0] not in few:
            item.add_marker(pytest.mark.soak(suite="engine"))
        if isinstance(maker, str) and maker.startswith("tunix"):
            item.add_marker("tunix")  # whose workers take seconds to start
            test = (item.path, item.name.partition("[")[0], "tunix")
            if test in seen or maker == "tunix-gemma":
                item.add_marker(pytest.mark.soak(suite="tunix"))
            seen.add(test)
        if item.path.parent != Path(__file__).parent or maker not in ("ranks", "ranks-added"):
            continue
        test = (item.path, item.name.partition("[")[0], maker)
        if test in seen:
            item.add_marker(pytest.mark.soak(suite="engine"))
        seen.add(test)


def _is_told_elsewhere(params: dict[str, Any]) -> bool:
    """Whether it is a failure of a job at another place than this machine that is tried here."""
    if not {"place", "failure", "reason"} <= params.keys():
        return False
    return params["place"] != "local" and params["reason"] not in TOLD_EVERYWHERE


@pytest.fixture(params=MAKERS, scope="module")
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pair, str]]:
    """One pair for all tests of a file, and the checkpoint of its beginning."""
    folder = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patched:
        if request.param.startswith("ranks"):
            fork_zygotes(patched)
        if request.param == "unsloth":
            unsloth.install(patched)
        found = MAKERS[request.param](folder / "published")
        beginning = folder / "beginning"
        beginning.mkdir()
        asyncio.run(found.learner.save(str(beginning)))
        yield found, str(beginning)
        found.close()


@pytest.fixture
def pair(made: tuple[Pair, str]) -> Pair:
    """As it was made."""
    found, beginning = made
    found.learner.discard()
    found.learner.load(beginning)
    return found
