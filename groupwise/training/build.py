"""Builds the parts of a run from its config. Only this module chooses implementations.

`start_training` builds sampler and learner of the RL loop in the layout of `groupwise.training.placement`, `start_supervised` the
learner of a supervised run, `start_serving` the sampler of an evaluation. If an adapter is trained, sampler and learner share one base
model in memory. Each has its own copy of the adapter, and the sampler's copy changes only by loading published files. Depending on the
layout, the parts are in this process or in ranks (`groupwise.engine.distributed`); the zygote of the ranks then builds them once, with
`make_described`. With `run.server`, a training server builds them (`groupwise.engine.backends.remote`); with `model.backend: tunix`, a
worker in another environment (`groupwise.engine.backends.tunix`); with `model.backend: unsloth`, a single process
(`groupwise.engine.backends.unsloth`).

`models_over` adds further trained adapters later, to the base of a training or to one that `start_base` loaded alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise.algorithms.registry import make
from groupwise.core.accelerators import NVIDIA
from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.interruption import gather_all
from groupwise.core.types import Learner, Policy, Sampler
from groupwise.engine.backends.unsloth import library
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.learner import RankLearner
from groupwise.engine.distributed.learner_workers import Peers
from groupwise.engine.distributed.multi_adapter import (
    Host,
    LocalWorker,
    Models,
    NewModel,
    RemoteWorker,
)
from groupwise.engine.distributed.rpc import Calls
from groupwise.engine.distributed.sampler import RankSampler, RankWitness
from groupwise.engine.distributed.sampler_workers import Samplers
from groupwise.engine.distributed.spawned_workers import Started
from groupwise.engine.distributed.torchrun import read_launch, refuse_other_number
from groupwise.engine.models.memory import memory_explained
from groupwise.runs import publications
from groupwise.training.config import RunConfig, load_config
from groupwise.training.placement import (
    AnyConfig,
    Layout,
    layout_told,
    most_processes,
    samplers_of,
)
from groupwise.training.rollout_builder import longest_completion
from groupwise.training.sft_config import SftConfig, load_sft_config

if TYPE_CHECKING:
    from groupwise.api.schemas.parts import PartsKind
    from groupwise.engine.backends.remote.parts import RemoteParts, RemotePartsSpec
    from groupwise.engine.backends.remote.session import Session
    from groupwise.engine.backends.tunix.messages import Open
    from groupwise.engine.backends.tunix.process import WorkerProcess
    from groupwise.engine.distributed.worker_state import AdapterHost, Hosted
    from groupwise.engine.learner.engine import Engine
    from groupwise.engine.learner.gradient_flow import Slope
    from groupwise.engine.learner.torch_learner import TorchLearner
    from groupwise.engine.learner.weights import TrainedModel
    from groupwise.engine.models.lora import AdaptedModel
    from groupwise.engine.sampler.vllm.own import OwnServer
    from groupwise.engine.sampler.vllm.sampler import Knows, VllmSampler

Kind = Literal["training", "learning", "sampling", "supervised", "serving", "base"]
"""The sets of parts that are built together. `learning` and `sampling` are the halves of a training with separate processes."""
LEARNING = frozenset[Kind]({"training", "learning", "supervised"})
MAKE = "groupwise.training.build:make_described"

LARGE_ADAPTER = 512 << 20
"""Default size in bytes of one publication: that of a rank-64 adapter on a model of 7 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closable:
    """Parts that may be in other processes, which `close` ends."""

    ranks: Calls | None = None
    samplers: Started | None = None
    """Processes that only sample, so that the ranks only learn; None if all do both."""
    divided: bool = False
    """True if each rank has only a part of the weights."""
    hosted: Hosted | None = None
    """The parts in this process, if there are no ranks and further models could be added."""
    session: Session | None = None
    """The session with the server that has the parts; None without `run.server`."""
    worker: WorkerProcess | None = None
    """The worker that has the parts in its own environment; None for other backends than tunix."""
    by_http: VllmSampler | None = None
    """The vLLM sampler whose servers hold adapters; None for other samplers."""

    def close(self) -> None:
        """End the other processes and connections, if any."""
        if self.ranks is not None:
            self.ranks.close()
        if self.samplers is not None:
            self.samplers.close()
        if self.session is not None:
            self.session.close()
        if self.worker is not None:
            self.worker.close()
        if self.by_http is not None:
            self.by_http.close()

    def peak_memory(self, device: str) -> int | None:
        """Peak memory in bytes, as measured by `groupwise.engine.models.probes.peak_memory`.

        With ranks, an estimate over all processes; None if the system does not report how much memory they share.
        """
        from groupwise.engine.models.probes import peak_memory

        if self.ranks is None:
            return peak_memory(device)
        own = peak_memory(device) if device == "cpu" else 0
        held = self.ranks.call_all_now("held_memory", device)
        if self.samplers is not None:
            held += self.samplers.call_all_now("held_memory", device)
        if any(shared is None for _, shared in held):
            return None
        return own + sum(peak - shared for peak, shared in held) + max(s for _, s in held)


@dataclass(frozen=True, slots=True)
class Parts(Closable):
    """The parts that the training loop uses."""

    sampler: Sampler
    learner: Learner
    stop_token_ids: tuple[int, ...]
    trained: Any = None
    """The learner's `groupwise.engine.learner.weights.TrainedWeights`; None if the ranks have them."""

    async def slopes(self, learning_rate: float) -> list[Slope]:
        """How much of a step's change reaches the outputs of the adapter's layers; empty if all weights are trained, or divided."""
        if self.divided:
            return []  # slopes are computed on undivided layers
        if self.ranks is not None:
            return await self.ranks.call(0, "slopes", learning_rate)
        from groupwise.engine.learner.gradient_flow import trained_slopes

        return trained_slopes(self.trained, learning_rate)


@dataclass(frozen=True, slots=True)
class BaseParts(Closable):
    """A base model in memory that is not trained, and a sampler of it."""

    sampler: Sampler
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServingParts(Closable):
    """The sampler of an evaluation."""

    sampler: Sampler
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LearningParts(Closable):
    """The learner of a supervised run."""

    learner: Learner


@contextmanager
def expected_ranks(config: AnyConfig) -> Generator[None]:
    """Like `expect_ranks`, as a context: ranks that were not needed end with it."""
    expect_ranks(config)
    try:
        yield
    finally:
        prefork.give_up()


def expect_ranks(config: AnyConfig) -> None:
    """Start the zygote early if the config will probably need ranks, because its imports take seconds. For Unsloth, import it now, because
    it must be imported before transformers.

    This is a guess: on a machine with a GPU but without its driver's file, a zygote may be started in vain.
    """
    library.import_first(config.model)
    torch_alone = config.run.server is None and config.model.backend == "transformers"
    if not torch_alone or config.model.name == "tiny" or NVIDIA.exists():
        return
    if most_processes(config) > 1 or config.distributed.learners > 1 or samplers_of(config) > 0:
        prefork.begin()


def be_launched(config: AnyConfig) -> None:
    """If torchrun started this process as a rank other than the first, become that rank and never return.

    The process of the first rank runs the whole program and calls the others. Raises UsageError if their number differs from the config's.
    """
    place = read_launch()
    refuse_other_number(place, config.distributed.learners)
    if place is not None and place.rank > 0:
        from groupwise.engine.distributed import peer

        peer.be_launched(place)


def training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Parts:
    """Load the model once and build sampler and learner with it."""
    if layout.samplers:
        # Build the halves one after the other.
        learners, samplers, orders = _halves(config, layout, run, publish_folder)
        try:
            for half, order in zip((learners, samplers), orders, strict=True):
                half.make_now(MAKE, order)
            return _parts_of_halves(learners, samplers, divided=layout.parts > 1)
        except BaseException:
            _close(learners, samplers)
            raise
    return _training_parts(
        _build_now("training", config, layout, run=run, folder=str(publish_folder))
    )


async def start_training(
    config: RunConfig, layout: Layout, run: str, publish_folder: Path
) -> Parts:
    """Like `training_parts`, but async: the event loop continues while ranks start, and cancelling ends them. With `run.server`, the server
    builds the parts.
    """
    if config.run.server is not None:
        found = await _by_server("training", config, layout, run, publish_folder)
        return Parts(found.sampler, found.learner, found.stop_token_ids, session=found.session)
    if config.model.backend == "tunix":
        return await _by_tunix(config, layout, run, publish_folder)
    if layout.samplers:
        # Learners and samplers start concurrently.
        learners, samplers, orders = _halves(config, layout, run, publish_folder)
        try:
            await gather_all(
                half.make(MAKE, order)
                for half, order in zip((learners, samplers), orders, strict=True)
            )
            return _parts_of_halves(learners, samplers, divided=layout.parts > 1)
        except BaseException:
            _close(learners, samplers)
            raise
    made = await _build("training", config, layout, run=run, folder=str(publish_folder))
    if isinstance(made, Calls) and config.sampler.engine == "vllm":
        # The ranks only learn; the first one checks the log-probabilities of the servers.
        try:
            sampler = _vllm_sampler(
                config, layout, RankWitness(made), prefork.load_tokenizer(config.model)
            )
            return Parts(
                sampler, RankLearner(made), _stop_token_ids(made), ranks=made, by_http=sampler
            )
        except BaseException:
            made.close()
            raise
    return _training_parts(made)


def supervised_parts(config: SftConfig, layout: Layout, run: str, folder: Path) -> LearningParts:
    """Load the model and build the learner of a run that samples nothing. `folder` is for publications, which such a run does not make."""
    made = _build_now("supervised", config, layout, run=run, folder=str(folder))
    return _supervised_parts(made, layout)


async def start_supervised(
    config: SftConfig, layout: Layout, run: str, folder: Path
) -> LearningParts:
    """Like `supervised_parts`, but async; see `start_training`."""
    if config.run.server is not None:
        found = await _by_server("supervised", config, layout, run, folder)
        return LearningParts(found.learner, session=found.session)
    made = await _build("supervised", config, layout, run=run, folder=str(folder))
    return _supervised_parts(made, layout)


async def start_serving(config: RunConfig, layout: Layout, weights: Path | None) -> ServingParts:
    """Build a sampler of the adapter or full weights in `weights`; if None, of the config's own policy. See `start_training`."""
    if config.run.server is not None:
        found = await _by_server("serving", config, layout, "served", Path(), weights)
        return ServingParts(found.sampler, found.stop_token_ids, session=found.session)
    if config.model.backend == "tunix":
        found = await _by_tunix(config, layout, "served", Path(), weights)
        return ServingParts(found.sampler, found.stop_token_ids, worker=found.worker)
    folder = None if weights is None else str(weights)
    # One model is enough to check the servers' log-probabilities.
    if config.sampler.engine == "vllm":
        layout = replace(layout, processes=1, learners=1)
    made = await _build("serving", config, layout, weights=folder)
    if isinstance(made, Calls):
        return ServingParts(RankSampler(made), _stop_token_ids(made), ranks=made)
    assert made.sampler is not None
    by_http = _http_sampler(made.sampler)
    if by_http is not None:
        await _serve_by_http(by_http, config, weights)
    return ServingParts(made.sampler, made.stop_token_ids, by_http=by_http)


async def start_base(config: RunConfig, layout: Layout) -> BaseParts:
    """Load a base model to which models are added later, with a sampler of the base itself. See `start_training`."""
    if config.model.adapter is not None:
        raise ConfigError(
            f"model.adapter is {config.model.adapter!r}, but a base has none: it is loaded as it is, and each model that is added "
            "says which adapter it starts from. Leave the key out."
        )
    refuse_servers(config, "a base for several models is sampled where it is")
    made = await _build("base", config, layout)
    if isinstance(made, Calls):
        return BaseParts(RankSampler(made), _stop_token_ids(made), ranks=made)
    assert made.sampler is not None
    return BaseParts(made.sampler, made.stop_token_ids, hosted=made)


def models_over(parts: Parts | BaseParts, most: int, run: str = "run") -> Models:
    """Build the host that can add up to `most` models over the base of these parts; it ends with them.

    In a training, its own model counts as one and is called `run`. Call this only once for the same parts.
    """
    hosts: list[Host]
    if parts.ranks is not None:
        hosts = [RemoteWorker(parts.ranks, rank) for rank in range(parts.ranks.count)]
    else:
        hosts = [LocalWorker(parts.hosted)]
    first = run if isinstance(parts, Parts) else None
    return Models(hosts, most, parts.stop_token_ids, first)


def _training_parts(made: Calls | Hosted) -> Parts:
    if isinstance(made, Calls):
        return Parts(RankSampler(made), RankLearner(made), _stop_token_ids(made), ranks=made)
    assert made.sampler is not None
    assert made.learner is not None
    return Parts(
        made.sampler,
        made.learner,
        made.stop_token_ids,
        made.trained,
        hosted=made,
        by_http=_http_sampler(made.sampler),
    )


def _supervised_parts(made: Calls | Hosted, layout: Layout) -> LearningParts:
    if isinstance(made, Calls):
        return LearningParts(RankLearner(made, divided=layout.parts > 1), ranks=made)
    assert made.learner is not None
    return LearningParts(made.learner)


def _stop_token_ids(ranks: Calls) -> tuple[int, ...]:
    return ranks.call_all_now("stop_token_ids")[0]


# --- with samples from servers of vLLM ------------------------------------------------------------


def refuse_servers(config: AnyConfig, why: str) -> None:
    """Raise UsageError for `sampler.engine: vllm` if the parts have to sample in this process."""
    if isinstance(config, RunConfig) and config.sampler.engine != "torch":
        raise UsageError(
            f"sampler.engine is {config.sampler.engine}, but {why}. Leave it out, and sampler.url too."
        )


def _http_sampler(sampler: Sampler) -> VllmSampler | None:
    from groupwise.engine.sampler.vllm.sampler import VllmSampler

    return sampler if isinstance(sampler, VllmSampler) else None


async def _serve_by_http(sampler: VllmSampler, config: RunConfig, weights: Path | None) -> None:
    """Load the policy to evaluate into the vLLM servers."""
    from groupwise.engine.models.adapters import adapter_folder
    from groupwise.engine.models.lora import CONFIG

    folder = await asyncio.to_thread(adapter_folder, config.model) if weights is None else weights
    try:
        if folder is None:
            await sampler.serve_base()
            return
        if not (folder / CONFIG).is_file():
            raise UsageError(
                f"{folder} holds no adapter, but servers of sampler.url take adapters alone. Leave sampler.engine out to evaluate it."
            )
        found = sampler.fingerprint()  # that of the adapter which was read from the folder
        await sampler.load(Policy("served", 0, found, "adapter", str(folder.resolve())))
    except BaseException:
        sampler.close()
        raise


def _vllm_sampler(config: RunConfig, layout: Layout, witness: Knows, tokenizer: Any) -> VllmSampler:
    from groupwise.api.openai_client.client import Endpoint
    from groupwise.core.retry import Timing
    from groupwise.engine.sampler.vllm.adapters import Shared
    from groupwise.engine.sampler.vllm.sampler import VllmSampler
    from groupwise.engine.sampler.vllm.servers import Server, Servers

    sampler_config, timing = config.sampler, Timing()
    base = sampler_config.served_model or config.model.name
    if sampler_config.vllm_python is not None:
        own = _own_server(config, layout, witness.rank)
        server = Server(own.endpoint, sampler_config.concurrency, timing)
        return VllmSampler(
            Servers([server], sampler_config.patience, timing, f"Read why in {own.log}"),
            witness,
            tokenizer,
            base=base,
            key_length=layout.key_length,
            tolerance=sampler_config.logprob_tolerance,
            begin=lambda: own.up(server, sampler_config.patience, timing),
            end=own.close,
        )
    servers = [
        Server(
            Endpoint(url, base, sampler_config.api_key_env, sampler_config.timeout),
            sampler_config.concurrency,
            timing,
        )
        for url in sampler_config.urls
    ]
    shared = None
    if sampler_config.adapter_folder is not None:
        here = Path(sampler_config.adapter_folder).expanduser().resolve()
        shared = Shared(here, (sampler_config.adapter_folder_there or str(here)).rstrip("/"))
    return VllmSampler(
        Servers(servers, sampler_config.patience, timing),
        witness,
        tokenizer,
        base=base,
        key_length=layout.key_length,
        tolerance=sampler_config.logprob_tolerance,
        shared=shared,
    )


def _own_server(config: RunConfig, layout: Layout, rank: int) -> OwnServer:
    """The vLLM server, not started yet; `rank` is the adapters' LoRA rank. Raises UsageError if there are too few GPUs."""
    from groupwise.core.cache import cache_folder
    from groupwise.engine.models.tokenizer import resolve
    from groupwise.engine.sampler.vllm import own

    sampler_config, resolved = config.sampler, resolve(config.model)
    assert sampler_config.vllm_python is not None
    count = 0 if layout.device == "cpu" else prefork.gpu_count()
    if (
        sampler_config.max_model_len is not None
        and sampler_config.max_model_len < layout.key_length
    ):
        raise UsageError(
            f"sampler.max_model_len is {sampler_config.max_model_len}, but prompt and completion of this run have up to "
            f"{layout.key_length} tokens together. Leave it out, or lower data.max_prompt_length or sampler.max_completion_length."
        )
    return own.OwnServer(
        own.ServerSpec(
            python=sampler_config.vllm_python,
            location=resolved.location,
            revision=resolved.revision,
            name=config.model.name,
            dtype=layout.dtype,
            rank=rank,
            longest=sampler_config.max_model_len or layout.key_length,
            memory=sampler_config.gpu_memory_utilization,
            gpus=own.gpus_beside(
                count,
                sampler_config.tensor_parallel_size,
                sampler_config.gpu_memory_utilization,
                _first_gpu(layout),
            ),
            parallel=sampler_config.tensor_parallel_size,
            in_4bit=config.model.load_in_4bit,
            trust_remote_code=config.model.trust_remote_code,
        ),
        cache_folder("vllm") / f"server-{os.getpid()}.log",
        timeout=sampler_config.timeout,
    )


# --- built by a training server --------------------------------------------------------------------


async def _by_server(
    kind: PartsKind,
    config: AnyConfig,
    layout: Layout,
    run: str,
    folder: Path,
    weights: Path | None = None,
) -> RemoteParts:
    """Build the parts on `run.server`, in the layout that it has planned. Local weight files are sent to it."""
    from groupwise.engine.backends.remote.parts import start

    assert config.run.server is not None
    spec = await asyncio.to_thread(_remote_spec, kind, config, layout, run, folder, weights)
    found = await start(config.run.server, spec)
    if layout_told(found.layout) != layout:
        found.session.close()
        raise UsageError(
            f"{config.run.server} lays the work out otherwise than a moment ago: its machine or its settings have changed. Start again."
        )
    return found


def _remote_spec(
    kind: PartsKind,
    config: AnyConfig,
    layout: Layout,
    run: str,
    folder: Path,
    weights: Path | None,
) -> RemotePartsSpec:
    from groupwise.engine.backends.remote.parts import RemotePartsSpec
    from groupwise.engine.models.adapters import adapter_folder, base_name
    from groupwise.engine.models.identity import identity

    own = Path(config.model.name).expanduser()
    longest, lag = None, 0
    if isinstance(config, RunConfig):
        longest, lag = (
            layout.key_length - longest_completion(config),
            config.training.max_off_policy_steps,
        )
    return RemotePartsSpec(
        kind=kind,
        config=config.model_dump(mode="json"),
        run=run,
        publish_folder=folder,
        longest_prompt=longest,
        base=identity(config.model.model_copy(update={"adapter": None})),
        called=base_name(config.model),
        keep_publications=lag + 2,
        model=own if own.is_dir() else None,
        adapter=adapter_folder(config.model) if weights is None else None,
        weights=weights,
    )


# --- built by a worker in Tunix's environment -----------------------------------------------------


async def _by_tunix(
    config: RunConfig, layout: Layout, run: str, folder: Path, weights: Path | None = None
) -> Parts:
    """Start a worker with the model and an adapter: the one in `weights`, that of the config, or a new one."""
    from groupwise.engine.backends.tunix.parts import start
    from groupwise.engine.models.load import described_stop_token_ids

    prefork.give_up()
    order = await asyncio.to_thread(_tunix_order, config, layout, run, folder, weights)
    tokenizer = prefork.load_tokenizer(config.model)
    stops = described_stop_token_ids(config.model, tokenizer)
    worker, sampler, learner = await start(
        order, tokenizer, config.run.threads, config.training.max_off_policy_steps + 2
    )
    return Parts(sampler, learner, _with_configured(stops, config), worker=worker)


def _tunix_order(
    config: RunConfig, layout: Layout, run: str, folder: Path, weights: Path | None
) -> Open:
    from groupwise.engine.backends.tunix.environment import mesh_of
    from groupwise.engine.backends.tunix.messages import Open
    from groupwise.engine.models.adapters import adapter_folder
    from groupwise.engine.models.load import described_text, model_folder
    from groupwise.engine.models.lora import described_adapter, scaling_of

    if weights is not None:
        model = config.model.model_copy(update={"adapter": str(weights), "adapter_revision": None})
        config = config.model_copy(update={"model": model})
    shape, layers = _starting_adapter(config)
    start = adapter_folder(config.model)
    return Open(
        model=str(model_folder(config.model)),
        text=described_text(config.model),
        dtype=layout.dtype,
        mesh=mesh_of(config.model.mesh),
        remat=config.training.gradient_checkpointing,
        layers=layers,
        rank=shape.r,
        alpha=scaling_of(shape) * shape.r,
        seed=config.training.seed,
        start=None if start is None else str(start),
        described=described_adapter(shape),
        run=run,
        publish_folder=str(folder),
        slots=layout.slots,
        key_length=layout.key_length,
        max_tokens=layout.max_tokens_per_microbatch,
    )


def check_model(config: RunConfig) -> None:
    """Raise `UsageError` for a model, mesh or adapted layers that the backend does not support, before any weights are read."""
    if config.model.backend != "tunix":
        return
    from groupwise.engine.backends.tunix.environment import mesh_of
    from groupwise.engine.backends.tunix.fits import check_unread
    from groupwise.engine.models.load import described_text

    _, layers = _starting_adapter(config)
    check_unread(described_text(config.model), mesh_of(config.model.mesh), layers)


def _starting_adapter(config: RunConfig) -> tuple[Any, tuple[str, ...]]:
    """Peft's config of the initial adapter, and the model's layers that have one."""
    from groupwise.engine.models.adapters import (
        check_adapter,
        hollow_adapter,
        leave_out_pictures,
        starting_config,
    )

    assert config.lora is not None, "the config refuses full fine-tuning"
    check_adapter(config.model, config.lora)
    shape = starting_config(config.model, config.lora)
    leave_out_pictures(config.model, shape)
    return shape, tuple(hollow_adapter(config.model, shape).layers)


def _refuse_tunix(config: AnyConfig) -> None:
    """Raise UsageError for the backend tunix, because these parts compute with torch."""
    if config.model.backend == "tunix":
        raise UsageError(
            "model.backend is tunix, which trains in groupwise rl and in notebooks, and answers in groupwise eval; this command computes "
            "with torch. Leave model.backend out."
        )


# --- built here, or once in the zygote of ranks ---------------------------------------------------


def _build_now(kind: Kind, config: AnyConfig, layout: Layout, **more: Any) -> Calls | Hosted:
    _refuse_tunix(config)
    refuse_servers(config, "this command samples on this machine")
    if layout.processes == 1:
        return _build_here(kind, config, layout, **more)
    if layout.apart:
        started = _start_processes(kind, config, layout)
        started.make_now(MAKE, _description(kind, config, layout, **more))
        return started
    ranks = prefork.take()
    ranks.make_now(MAKE, _description(kind, config, layout, **more), layout.processes)
    return ranks


async def _build(kind: Kind, config: AnyConfig, layout: Layout, **more: Any) -> Calls | Hosted:
    _refuse_tunix(config)
    if layout.processes == 1:
        return _build_here(kind, config, layout, **more)
    if layout.apart:
        started = _start_processes(kind, config, layout)
        await started.make(MAKE, _description(kind, config, layout, **more))
        return started
    ranks = prefork.take()
    await ranks.make(MAKE, _description(kind, config, layout, **more), layout.processes)
    return ranks


def _start_processes(kind: Kind, config: AnyConfig, layout: Layout) -> Started:
    """Start processes with a model each: samplers if the parts only sample, otherwise learners. Ends the zygote, which is not needed."""
    prefork.give_up()
    if layout.samplers and kind not in LEARNING:
        assert isinstance(config, RunConfig), "a supervised run samples nothing"
        return Samplers(
            layout.samplers,
            _first_gpu(layout),
            tells=kind != "sampling",
            patience=config.distributed.sampler_timeout,
        )
    return Peers(layout.learners, read_launch(), learning=kind in LEARNING)


def _first_gpu(layout: Layout) -> int:
    """Index of the first sampler's GPU. The GPUs before it belong to this machine's learners."""
    place = read_launch()
    return layout.learners if place is None else place.local_count


def _halves(
    config: RunConfig, layout: Layout, run: str, folder: Path
) -> tuple[Started, Started, tuple[dict[str, Any], dict[str, Any]]]:
    """Learners, samplers, and the description of the parts of each. Closing the learners also closes the samplers."""
    learners = _start_processes("learning", config, layout)
    samplers = _start_processes("sampling", config, layout)
    learners.take_along(samplers)
    learning = _description("learning", config, layout, run=run, folder=str(folder))
    return learners, samplers, (learning, _description("sampling", config, layout))


def _parts_of_halves(learners: Started, samplers: Started, *, divided: bool) -> Parts:
    return Parts(
        RankSampler(samplers),
        RankLearner(learners, divided=divided),
        _stop_token_ids(samplers),
        ranks=learners,
        samplers=samplers,
        divided=divided,
    )


def _close(*both: Started) -> None:
    for half in both:
        half.close()


def _build_here(kind: Kind, config: Any, layout: Layout, **more: Any) -> Hosted:
    prefork.give_up()
    return _make(kind, config, layout, **more)


def _description(kind: Kind, config: AnyConfig, layout: Layout, **more: Any) -> dict[str, Any]:
    """Arguments of `make_described` as plain JSON."""
    plain = config.model_dump(mode="json")
    return {"kind": kind, "config": plain, "layout": asdict(layout), **more}


def make_described(
    kind: Kind, config: Mapping[str, Any], layout: Mapping[str, Any], **more: Any
) -> Hosted:
    """The factory that the zygote calls."""
    from groupwise.engine.models.machine import give_back_memory

    read = load_sft_config if kind == "supervised" else load_config
    made = _make(kind, read(config).config, Layout(**layout), **more)
    give_back_memory()
    return made


def _make(kind: Kind, config: Any, layout: Layout, **more: Any) -> Hosted:
    with memory_explained("making the model ready"):
        return _MAKERS[kind](config, layout, **more)


def _make_training(config: RunConfig, layout: Layout, run: str, folder: str) -> Hosted:
    """Build sampler and learner in this process. It may be the zygote, which must have only one thread until it has forked the ranks."""
    from groupwise.engine.distributed.worker_state import Hosted
    from groupwise.engine.models.adapters import check_adapter
    from groupwise.engine.models.load import load_model, stop_token_ids
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedAdapter, ServedModel

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = _load_model(config, layout, layout.device)
    stops = stop_token_ids(model, tokenizer)
    trained: Any
    if config.lora:
        trained = _trained_adapter(config, model)
        served = ServedAdapter(trained.adapted)
    else:  # the sampler needs its own copy of all weights
        served = ServedModel(load_model(config.model, layout.dtype, layout.device))
        trained = _trained_model(config, layout, model)
    replicas = _replicas(layout, trained)
    learner = _learner(config, layout, trained, run, folder, config.training.seed, replicas)
    by_servers = config.sampler.engine == "vllm" and layout.learners > 1
    return Hosted(
        layout.threads_each,
        None if by_servers else _sampler(config, layout, served, tokenizer),
        learner,
        _with_configured(stops, config),
        trained,
        replicas,
        witness=_witness(served) if by_servers else None,
        bench=_adapter_host(config, layout, trained.adapted, tokenizer)
        if config.lora is not None and config.model.backend != "unsloth"
        else None,  # further models can be added to the base of an adapter's training
    )


def _witness(served: Any) -> Any:
    from groupwise.engine.sampler.vllm.witness import Witness

    return Witness(served)


def _make_learning(config: RunConfig, layout: Layout, run: str, folder: str) -> Hosted:
    """Build a learner without a sampler."""
    from groupwise.engine.distributed.worker_state import Hosted
    from groupwise.engine.models.adapters import check_adapter
    from groupwise.engine.models.load import load_model

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    model = load_model(config.model, layout.dtype, _whole_on(layout))
    trained = (
        _trained_adapter(config, model) if config.lora else _trained_model(config, layout, model)
    )
    replicas = _replicas(layout, trained)
    learner = _learner(config, layout, trained, run, folder, config.training.seed, replicas)
    return Hosted(layout.threads_each, learner=learner, trained=trained, replicas=replicas)


def _make_sampling(config: RunConfig, layout: Layout) -> Hosted:
    """Build a sampler without a learner, for weights that another process will publish."""
    from groupwise.engine.distributed.worker_state import Hosted
    from groupwise.engine.models.adapters import check_adapter, starting_config
    from groupwise.engine.models.load import load_model, stop_token_ids
    from groupwise.engine.models.lora import AdaptedModel
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedAdapter, ServedModel

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    served = ServedModel(model)
    if config.lora:
        shape = starting_config(config.model, config.lora)
        served = ServedAdapter(AdaptedModel(model, shape))
    stops = _with_configured(stop_token_ids(model, tokenizer), config)
    return Hosted(
        layout.threads_each, _sampler(config, layout, served, tokenizer), stop_token_ids=stops
    )


def _learner(
    config: RunConfig,
    layout: Layout,
    trained: Any,
    run: str,
    folder: str,
    seed: int,
    replicas: Any = None,
) -> TorchLearner:
    from groupwise.engine.learner.torch_learner import TorchLearner

    return TorchLearner(
        trained,
        engine=_own_engine(config, trained),
        run=run,
        publish_folder=Path(folder),
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        keep_publications=config.training.max_off_policy_steps + 2,
        replicas=replicas,
        divide_on=_divide_on(layout),
    )


def _own_engine(config: AnyConfig, trained: Any) -> Engine | None:
    """The engine that computes a learner's rows; None: the learner chooses."""
    if config.model.backend != "unsloth":
        return None
    from groupwise.engine.backends.unsloth.model import UnslothEngine

    return UnslothEngine(trained)


def _load_model(config: AnyConfig, layout: Layout, device: str) -> Any:
    """Load the model in the way of the backend."""
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.library import load

        return load(config.model, layout.dtype, layout.key_length or None)
    from groupwise.engine.models.load import load_model

    return load_model(config.model, layout.dtype, device)


def _divide_on(layout: Layout) -> str | None:
    """Device of a learner's part of the weights; None if it has all weights."""
    return layout.device if layout.parts > 1 else None


def _whole_on(layout: Layout) -> str:
    """Device on which a learner reads the whole model; the CPU if the weights are divided, because one GPU may be too small."""
    return layout.device if layout.parts == 1 else "cpu"


def _sampler(config: RunConfig, layout: Layout, served: Any, tokenizer: Any) -> Sampler:
    from groupwise.engine.sampler.queued import DecodeLayout
    from groupwise.engine.sampler.torch_sampler import TorchSampler

    if config.sampler.engine == "vllm":
        return _vllm_sampler(config, layout, _witness(served), tokenizer)
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.sampler import UnslothSampler

        return UnslothSampler(served, tokenizer, DecodeLayout(layout.slots, layout.key_length))
    return TorchSampler(
        served,
        tokenizer,
        DecodeLayout(layout.slots, layout.key_length),
        enforce_eager=config.sampler.enforce_eager,
    )


def _prepare_process(layout: Layout) -> None:
    """Set the number of threads. With several processes, this one is the zygote, which keeps one thread: forks lose all others."""
    from groupwise.engine.models.machine import prepare_process, set_threads

    if layout.sharing == 1:
        prepare_process(layout.threads_each)
    else:
        set_threads(1)


def _replicas(layout: Layout, trained: Any) -> Any:
    """The link that combines the gradients of all learners; None if only one process learns."""
    from groupwise.engine.learner.collective import Collective
    from groupwise.engine.learner.fsdp import Divided
    from groupwise.engine.learner.replicas import Replicas

    if layout.learning == 1:
        return None
    if layout.apart:
        return Divided() if layout.parts > 1 else Collective()
    return Replicas(layout.processes, [*trained.parameters().values()])


def _make_supervised(config: SftConfig, layout: Layout, run: str, folder: str) -> Hosted:
    from groupwise.engine.distributed.worker_state import Hosted
    from groupwise.engine.learner.torch_learner import TorchLearner
    from groupwise.engine.learner.weights import TrainedModel
    from groupwise.engine.models.adapters import check_adapter

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    model = _load_model(config, layout, _whole_on(layout))
    trained = _trained_adapter(config, model) if config.lora else TrainedModel(model)
    replicas = _replicas(layout, trained)
    learner = TorchLearner(
        trained,
        engine=_own_engine(config, trained),
        run=run,
        publish_folder=Path(folder),
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=config.training.seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        replicas=replicas,
        divide_on=_divide_on(layout),
    )
    return Hosted(layout.threads_each, learner=learner, replicas=replicas)


def _make_serving(config: RunConfig, layout: Layout, weights: str | None) -> Hosted:
    from groupwise.engine.distributed.worker_state import Hosted
    from groupwise.engine.models.adapters import adapter_folder, warn_of_other_base
    from groupwise.engine.models.load import stop_token_ids
    from groupwise.engine.models.lora import CONFIG, read_lora_config
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedAdapter, ServedModel

    folder = adapter_folder(config.model) if weights is None else Path(weights)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = _load_model(config, layout, layout.device)
    stops = _with_configured(stop_token_ids(model, tokenizer), config)
    served: Any = ServedModel(model)
    if folder is not None:
        if (folder / CONFIG).is_file():
            stored = read_lora_config(folder)
            warn_of_other_base(stored, config.model, folder)
            served = ServedAdapter(_with_adapters(config, model, stored))
        served.read(folder)
    sampler = _sampler(config, layout, served, tokenizer)
    return Hosted(layout.threads_each, sampler, stop_token_ids=stops)


def _make_base(config: RunConfig, layout: Layout) -> Hosted:
    """Build the base with a sampler. It arranges the weights for decoding before ranks are forked, for all later models."""
    from groupwise.engine.distributed.worker_state import Hosted
    from groupwise.engine.models.config import LoraConfig
    from groupwise.engine.models.load import load_model, stop_token_ids
    from groupwise.engine.models.lora import AdaptedModel, new_lora_config
    from groupwise.engine.models.native.ready import ready_to_learn
    from groupwise.engine.models.native.weights import native_model
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedModel

    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, layout.dtype, layout.device)
    model.requires_grad_(False)
    sampler = _sampler(config, layout, ServedModel(model), tokenizer)
    native = native_model(model)
    if native is not None:
        ready_to_learn(native)
    adapted = AdaptedModel(model, new_lora_config(config.lora or LoraConfig()))
    return Hosted(
        layout.threads_each,
        sampler,
        stop_token_ids=_with_configured(stop_token_ids(model, tokenizer), config),
        bench=_adapter_host(config, layout, adapted, tokenizer),
    )


def _adapter_host(config: RunConfig, layout: Layout, adapted: Any, tokenizer: Any) -> AdapterHost:
    """Build the host that later creates models over this base."""
    from groupwise.engine.distributed.worker_state import AdapterHost

    def make_weights(adapted: Any, name: str, new: NewModel) -> tuple[Any, Any]:
        from groupwise.engine.learner.weights import TrainedAdapter
        from groupwise.engine.models.adapters import (
            check_adapter,
            starting_config,
            warn_of_other_base,
        )
        from groupwise.engine.models.lora import read_adapter, read_lora_config
        from groupwise.engine.sampler.weights import ServedAdapter

        model = config.model.model_copy(update={"adapter": new.start, "adapter_revision": None})
        check_adapter(model, new.lora, "the adapter to start from,")
        shape = starting_config(model, new.lora, "the adapter to start from,")
        start = None
        if new.start is not None:
            start = read_adapter(Path(new.start))
            warn_of_other_base(read_lora_config(Path(new.start)), model, Path(new.start))
        trained = TrainedAdapter(adapted, new.seed, start, name, shape)
        return trained, ServedAdapter(adapted, f"{name}-served", shape)

    def make_learner(trained: Any, new: NewModel) -> TorchLearner:
        return _learner(config, layout, trained, new.run, new.folder, new.seed)

    def make_sampler(served: Any) -> Sampler:
        return _sampler(config, layout, served, tokenizer)

    return AdapterHost(adapted, make_weights, make_learner, make_sampler)


_MAKERS: dict[Kind, Callable[..., Hosted]] = {
    "training": _make_training,
    "learning": _make_learning,
    "sampling": _make_sampling,
    "supervised": _make_supervised,
    "serving": _make_serving,
    "base": _make_base,
}


def serving_label(config: RunConfig) -> str:
    """Name of the initial policy in results."""
    return "base" if config.model.adapter is None else "base+adapter"


def publication_folder(run_folder: Path, size: int = LARGE_ADAPTER) -> Path:
    """Claim an empty folder for the run's published weights; `size` is that of one publication in bytes."""
    return publications.claim(run_folder, size)


def publication_bytes(config: RunConfig) -> int:
    """Bytes of the trained weights in float32, times the number of publications that the lag requires to be kept."""
    trained = prefork.trained_parameters(config.model, config.lora)
    return 4 * trained * (1 + config.training.max_off_policy_steps)


def remove_publications(folder: Path) -> None:
    """Delete the run's publications and release the folder."""
    publications.release(folder)


def build_algorithm(config: RunConfig) -> Any:
    """The configured algorithm."""
    return make(config.algorithm.type, config.algorithm.knobs)


def _trained_adapter(config: AnyConfig, model: Any) -> Any:
    """A new adapter, or the one that the config starts from."""
    from groupwise.engine.learner.weights import TrainedAdapter
    from groupwise.engine.models.adapters import adapter_folder, starting_config, warn_of_other_base
    from groupwise.engine.models.lora import read_adapter, read_lora_config

    assert config.lora is not None
    folder = adapter_folder(config.model)
    adapted = _with_adapters(config, model, starting_config(config.model, config.lora))
    if folder is None:
        return TrainedAdapter(adapted, config.training.seed)
    warn_of_other_base(read_lora_config(folder), config.model, folder)
    return TrainedAdapter(adapted, config.training.seed, read_adapter(folder))


def _with_adapters(config: AnyConfig, model: Any, shape: Any) -> AdaptedModel:
    """The model, prepared for adapters; `shape` is peft's config of adapters without their own."""
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.model import UnslothModel

        recompute = config.training.gradient_checkpointing
        return UnslothModel(model, shape, gradient_checkpointing=recompute)
    from groupwise.engine.models.lora import AdaptedModel

    return AdaptedModel(model, shape)


def _trained_model(config: RunConfig, layout: Layout, model: Any) -> TrainedModel:
    """The trained full weights, with a frozen copy as reference if the KL coefficient is above 0."""
    from groupwise.engine.learner.weights import TrainedModel
    from groupwise.engine.models.load import load_model

    beta = getattr(config.algorithm, "beta", 0.0)
    reference = load_model(config.model, layout.dtype, _whole_on(layout)) if beta > 0 else None
    return TrainedModel(model, reference)


def check_stop_tokens(config: RunConfig, tokenizer: Any) -> None:
    """Raise ConfigError if `sampler.stop_token_ids` has ids that the tokenizer does not have."""
    unknown = [token for token in config.sampler.stop_token_ids if token >= len(tokenizer)]
    if unknown:
        raise ConfigError(
            f"sampler.stop_token_ids has {', '.join(map(str, unknown))}, but the tokens of {config.model.name} end at "
            f"{len(tokenizer) - 1}."
        )


def _with_configured(stops: tuple[int, ...], config: RunConfig) -> tuple[int, ...]:
    return tuple(sorted({*stops, *config.sampler.stop_token_ids}))
