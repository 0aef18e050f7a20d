"""Builds the parts of a run from its config. Only this module chooses implementations.

`start_training` builds sampler and learner of the RL loop in the layout of `groupwise.training.placement`, `start_supervised` the
learner of a supervised run, `start_serving` the sampler of an evaluation. If an adapter is trained, sampler and learner share one base
model in memory. Each has its own copy of the adapter, and the sampler's copy changes only by loading published files. Depending on the
layout, the parts are in this process or in ranks (`groupwise.engine.distributed`); the zygote of the ranks then builds them once, with
`make_worker_from_json`. With `run.server`, a training server builds them (`groupwise.engine.backends.remote`); with
`model.backend: tunix`, a worker in another environment (`groupwise.engine.backends.tunix`); with `model.backend: tinker`, a service of the
Tinker API has them (`groupwise.engine.backends.tinker`); with `model.backend: unsloth`, a single process
(`groupwise.engine.backends.unsloth`).

`models_over` adds further trained adapters later, to the base of a training or to one that `start_base` loaded alone.
"""

from __future__ import annotations

import asyncio
import logging
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
from groupwise.core.retry import Timing
from groupwise.core.types import Learner, Policy, Sampler
from groupwise.engine.backends.unsloth import library
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.torchrun import check_world_size, read_torchrun_rank
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.training.config import RunConfig, load_config
from groupwise.training.placement import (
    Layout,
    layout_from_response,
    most_processes,
    samplers_of,
)
from groupwise.training.rollout_builder import longest_completion

if TYPE_CHECKING:
    from groupwise.api.schemas.parts import PartsKind
    from groupwise.engine.backends.remote.parts import RemoteParts, RemotePartsSpec
    from groupwise.engine.backends.remote.session import Session
    from groupwise.engine.backends.tinker.service import Service
    from groupwise.engine.backends.tunix.messages import Open
    from groupwise.engine.backends.tunix.process import WorkerProcess
    from groupwise.engine.distributed.multi_adapter import ModelRegistry, NewModel
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.spawned_workers import SpawnedWorkers
    from groupwise.engine.distributed.worker_state import AdapterHost, WorkerState
    from groupwise.engine.learner.engine import LearnerEngine
    from groupwise.engine.learner.gradient_flow import Slope
    from groupwise.engine.learner.teacher import Teacher
    from groupwise.engine.learner.torch_learner import TorchLearner
    from groupwise.engine.learner.weights import TrainedModel
    from groupwise.engine.models.lora import AdaptedModel
    from groupwise.engine.sampler.config import SamplerConfig
    from groupwise.engine.sampler.servers.probe import LocalPolicy
    from groupwise.engine.sampler.servers.sampler import ServerSampler, WeightSync
    from groupwise.engine.sampler.servers.server_pool import Servers
    from groupwise.engine.sampler.servers.spawned_server import ServerGpus, SpawnedServer
    from groupwise.training.placement import AnyConfig
    from groupwise.training.sft_config import SftConfig

logger = logging.getLogger(__name__)

Kind = Literal["training", "learning", "sampling", "supervised", "serving", "base"]
"""The sets of parts that are built together. `learning` and `sampling` are the halves of a training with separate processes."""
LEARNING = frozenset[Kind]({"training", "learning", "supervised"})
WORKER_FACTORY = "groupwise.training.build:make_worker_from_json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closable:
    """Parts that may be in other processes, which `close` ends."""

    ranks: WorkerCalls | None = None
    samplers: SpawnedWorkers | None = None
    """Processes that only sample, so that the ranks only learn; None if all do both."""
    divided: bool = False
    """True if each rank has only a part of the weights."""
    hosted: WorkerState | None = None
    """The parts in this process, if there are no ranks and further models could be added."""
    session: Session | None = None
    """The session with the server that has the parts; None without `run.server`."""
    worker: WorkerProcess | None = None
    """The worker that has the parts in its own environment; None for other backends than tunix."""
    service: Service | None = None
    """The session with the Tinker service that has the parts; None for other backends than tinker."""
    by_http: ServerSampler | None = None
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
        if self.service is not None:
            self.service.close()
        if self.by_http is not None:
            self.by_http.close()

    def peak_memory(self, device: str) -> int | None:
        """Peak memory in bytes, as measured by `groupwise.engine.models.probes.peak_memory`.

        With ranks, an estimate over all processes; None if the system does not report how much memory they share.
        """
        from groupwise.engine.models.probes import peak_memory

        if self.ranks is None:
            return peak_memory(device)
        own_peak = peak_memory(device) if device == "cpu" else 0
        rank_memory = self.ranks.call_all_now("held_memory", device)
        if self.samplers is not None:
            rank_memory += self.samplers.call_all_now("held_memory", device)
        if any(shared_bytes is None for _, shared_bytes in rank_memory):
            return None
        return (
            own_peak
            + sum(peak - shared_bytes for peak, shared_bytes in rank_memory)
            + max(shared_bytes for _, shared_bytes in rank_memory)
        )


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
        if self.service is not None:
            return []  # nor does this machine see a service's layers
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
        prefork.end_zygote()


def expect_ranks(config: AnyConfig) -> None:
    """Start the zygote early if the config will probably need ranks, because its imports take seconds; else end one that was started
    before the config was read. For Unsloth, import it now, because it must be imported before transformers.

    This is a guess: on a machine with a GPU but without its driver's file, a zygote may be started in vain.
    """
    library.import_first(config.model)
    torch_alone = config.run.server is None and config.model.backend == "transformers"
    several = (
        most_processes(config) > 1 or config.distributed.learners > 1 or samplers_of(config) > 0
    )
    if torch_alone and config.model.name != "tiny" and not NVIDIA.exists() and several:
        prefork.start_zygote()
    else:
        prefork.end_zygote()


def be_launched(config: AnyConfig) -> None:
    """If torchrun started this process as a rank other than the first, become that rank and never return.

    The process of the first rank runs the whole program and calls the others. Raises UsageError if their number differs from the config's.
    """
    launch = read_torchrun_rank()
    check_world_size(launch, config.distributed.learners)
    if launch is not None and launch.rank > 0:
        from groupwise.engine.distributed import peer

        peer.run_torchrun_rank(launch)


def training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Parts:
    """Load the model once and build sampler and learner with it."""
    if layout.samplers:
        # Build the halves one after the other.
        learners, samplers, orders = _start_halves(config, layout, run, publish_folder)
        try:
            for half, order in zip((learners, samplers), orders, strict=True):
                half.make_now(WORKER_FACTORY, order)
            return _parts_of_halves(learners, samplers, sharded=layout.parts > 1)
        except BaseException:
            _close_halves(learners, samplers)
            raise
    return _training_parts(
        _build_workers_now("training", config, layout, run=run, folder=str(publish_folder)), layout
    )


async def start_training(
    config: RunConfig, layout: Layout, run: str, publish_folder: Path
) -> Parts:
    """Like `training_parts`, but async: the event loop continues while ranks start, and cancelling ends them. With `run.server`, the server
    builds the parts.
    """
    if config.run.server is not None:
        remote = await _build_on_server("training", config, layout, run, publish_folder)
        return Parts(remote.sampler, remote.learner, remote.stop_token_ids, session=remote.session)
    if config.model.backend == "tunix":
        return await _build_on_tunix(config, layout, run, publish_folder)
    if config.model.backend == "tinker":
        return await _build_on_tinker(config, layout, run, publish_folder)
    if layout.samplers:
        # Learners and samplers start concurrently.
        learners, samplers, orders = _start_halves(config, layout, run, publish_folder)
        try:
            await gather_all(
                half.make(WORKER_FACTORY, order)
                for half, order in zip((learners, samplers), orders, strict=True)
            )
            return _parts_of_halves(learners, samplers, sharded=layout.parts > 1)
        except BaseException:
            _close_halves(learners, samplers)
            raise
    from groupwise.engine.distributed.learner import RankLearner
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.sampler import RankPolicy

    workers = await _build_workers("training", config, layout, run=run, folder=str(publish_folder))
    if isinstance(workers, WorkerCalls) and config.sampler.engine != "torch":
        # The ranks only learn; the first one checks the log-probabilities of the servers, or all do that together.
        try:
            divided = layout.parts > 1
            local_policy = RankPolicy(workers, divided=divided)
            tokenizer = prefork.load_tokenizer(config.model)
            sampler = _server_sampler(config, layout, local_policy, tokenizer)
            return Parts(
                sampler,
                RankLearner(workers, divided=divided),
                _stop_token_ids(workers),
                ranks=workers,
                divided=divided,
                by_http=sampler,
            )
        except BaseException:
            workers.close()
            raise
    return _training_parts(workers, layout)


def supervised_parts(config: SftConfig, layout: Layout, run: str, folder: Path) -> LearningParts:
    """Load the model and build the learner of a run that samples nothing. `folder` is for publications, which such a run does not make."""
    workers = _build_workers_now("supervised", config, layout, run=run, folder=str(folder))
    return _supervised_parts(workers, layout)


async def start_supervised(
    config: SftConfig, layout: Layout, run: str, folder: Path
) -> LearningParts:
    """Like `supervised_parts`, but async; see `start_training`."""
    if config.run.server is not None:
        remote = await _build_on_server("supervised", config, layout, run, folder)
        return LearningParts(remote.learner, session=remote.session)
    if config.model.backend == "tinker":
        parts = await _build_on_tinker(config, layout, run, folder)
        return LearningParts(parts.learner, service=parts.service)
    workers = await _build_workers("supervised", config, layout, run=run, folder=str(folder))
    return _supervised_parts(workers, layout)


async def start_serving(
    config: RunConfig, layout: Layout, weights: Path | None, server_log: Path | None = None
) -> ServingParts:
    """Build a sampler of the adapter or full weights in `weights`; if None, of the config's own policy. See `start_training`.

    `server_log`: file for the output of a vLLM server that is started for it; None: one in the cache.
    """
    if config.run.server is not None:
        parts = await _build_on_server("serving", config, layout, "served", Path(), weights)
        return ServingParts(parts.sampler, parts.stop_token_ids, session=parts.session)
    if config.model.backend == "tunix":
        parts = await _build_on_tunix(config, layout, "served", Path(), weights)
        return ServingParts(parts.sampler, parts.stop_token_ids, worker=parts.worker)
    if config.model.backend == "tinker":
        return await _serve_on_tinker(config, layout, weights)
    folder = None if weights is None else str(weights)
    # Nothing is learnt from these completions.
    sampler_config = config.sampler.model_copy(update={"routing_replay": False})
    config = config.model_copy(update={"sampler": sampler_config})
    # One model is enough to check the servers' log-probabilities.
    if config.sampler.engine != "torch":
        layout = replace(layout, processes=1, learners=1)
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.sampler import RankSampler

    workers = await _build_workers("serving", config, layout, weights=folder)
    if isinstance(workers, WorkerCalls):
        return ServingParts(RankSampler(workers), _stop_token_ids(workers), ranks=workers)
    assert workers.sampler is not None
    by_http = _http_sampler(workers.sampler)
    if by_http is not None:
        if server_log is not None:
            by_http.follow_server(server_log, logger.warning)
        await _serve_by_http(by_http, config, weights)
    return ServingParts(workers.sampler, workers.stop_token_ids, by_http=by_http)


async def start_base(config: RunConfig, layout: Layout) -> BaseParts:
    """Load a base model to which models are added later, with a sampler of the base itself. See `start_training`."""
    if config.model.adapter is not None:
        raise ConfigError(
            f"model.adapter is {config.model.adapter!r}, but a base has none: it is loaded as it is, and each model that is added "
            "says which adapter it starts from. Leave the key out."
        )
    refuse_servers(config, "a base for several models is sampled where it is")
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.sampler import RankSampler

    workers = await _build_workers("base", config, layout)
    if isinstance(workers, WorkerCalls):
        return BaseParts(RankSampler(workers), _stop_token_ids(workers), ranks=workers)
    assert workers.sampler is not None
    return BaseParts(workers.sampler, workers.stop_token_ids, hosted=workers)


def models_over(parts: Parts | BaseParts, max_models: int, run: str = "run") -> ModelRegistry:
    """Build the host that can add up to `max_models` models over the base of these parts; it ends with them.

    In a training, its own model counts as one and is called `run`. Call this only once for the same parts.
    """
    from groupwise.engine.distributed.multi_adapter import (
        LocalWorker,
        ModelHost,
        ModelRegistry,
        RemoteWorker,
    )

    hosts: list[ModelHost]
    if parts.ranks is not None:
        hosts = [RemoteWorker(parts.ranks, rank) for rank in range(parts.ranks.count)]
    else:
        hosts = [LocalWorker(parts.hosted)]
    first_model = run if isinstance(parts, Parts) else None
    return ModelRegistry(hosts, max_models, parts.stop_token_ids, first_model)


def _training_parts(workers: WorkerCalls | WorkerState, layout: Layout) -> Parts:
    from groupwise.engine.distributed.learner import RankLearner
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.sampler import RankSampler

    if isinstance(workers, WorkerCalls):
        return Parts(
            RankSampler(workers, frees_cache=layout.frees_cache),
            RankLearner(workers),
            _stop_token_ids(workers),
            ranks=workers,
        )
    assert workers.sampler is not None
    assert workers.learner is not None
    return Parts(
        workers.sampler,
        workers.learner,
        workers.stop_token_ids,
        workers.trained,
        hosted=workers,
        by_http=_http_sampler(workers.sampler),
    )


def _supervised_parts(workers: WorkerCalls | WorkerState, layout: Layout) -> LearningParts:
    from groupwise.engine.distributed.learner import RankLearner
    from groupwise.engine.distributed.rpc import WorkerCalls

    if isinstance(workers, WorkerCalls):
        return LearningParts(RankLearner(workers, divided=layout.parts > 1), ranks=workers)
    assert workers.learner is not None
    return LearningParts(workers.learner)


def _stop_token_ids(ranks: WorkerCalls) -> tuple[int, ...]:
    return ranks.call_all_now("stop_token_ids")[0]


# --- with samples from servers --------------------------------------------------------------------


def refuse_servers(config: AnyConfig, why: str) -> None:
    """Raise UsageError for `sampler.engine: vllm` if the parts have to sample in this process."""
    if isinstance(config, RunConfig) and config.sampler.engine != "torch":
        raise UsageError(
            f"sampler.engine is {config.sampler.engine}, but {why}. Leave it out, and sampler.url too."
        )


def _http_sampler(sampler: Sampler) -> ServerSampler | None:
    from groupwise.engine.sampler.servers.sampler import ServerSampler

    return sampler if isinstance(sampler, ServerSampler) else None


async def _serve_by_http(sampler: ServerSampler, config: RunConfig, weights: Path | None) -> None:
    """Load the policy to evaluate into the vLLM servers."""
    from groupwise.engine.models.adapters import adapter_folder
    from groupwise.engine.models.lora_config import CONFIG

    folder = await asyncio.to_thread(adapter_folder, config.model) if weights is None else weights
    try:
        if folder is None:
            await sampler.serve_base()
            return
        kind = "adapter" if (folder / CONFIG).is_file() else "full"
        # That of the weights which were read from the folder.
        fingerprint = await asyncio.to_thread(sampler.fingerprint)
        await sampler.load(Policy("served", 0, fingerprint, kind, str(folder.resolve())))
    except BaseException:
        sampler.close()
        raise


def _server_sampler(
    config: RunConfig, layout: Layout, local_policy: LocalPolicy, tokenizer: Any
) -> ServerSampler:
    """The sampler of servers: their addresses or one that is started here, how weights reach them, and what checks their answers."""
    from groupwise.engine.sampler.servers.sampler import ServerSampler

    sampler_config, timing = config.sampler, Timing()
    base = sampler_config.served_model or config.model.name
    own = (
        None
        if sampler_config.vllm_python is None
        else _own_server(config, layout, local_policy.rank, timing)
    )
    return ServerSampler(
        _servers(sampler_config, base, own, timing),
        local_policy,
        tokenizer,
        base=base,
        key_length=layout.key_length,
        tolerance=sampler_config.logprob_tolerance,
        seeded=layout.seeded,
        sync=_weight_sync(sampler_config, base, own, local_policy),
        own=own,
        routers=local_policy.router_shape() if sampler_config.routing_replay else None,
    )


def _servers(
    sampler_config: SamplerConfig, base: str, own: SpawnedServer | None, timing: Timing
) -> Servers:
    """The run's own server, or those at `sampler.urls`."""
    from groupwise.api.openai_client.client import Endpoint
    from groupwise.engine.sampler.servers.server_pool import Server, Servers
    from groupwise.engine.sampler.servers.sglang import SglangServer

    timeout = sampler_config.server_timeout
    if own is not None:
        return Servers([own.server], timeout, timing, lambda: f"Read why in {own.log}")
    kind = SglangServer if sampler_config.engine == "sglang" else Server
    endpoints = [
        Endpoint(url, base, sampler_config.api_key_env, sampler_config.timeout)
        for url in sampler_config.urls
    ]
    servers = [kind(endpoint, sampler_config.concurrency, timing) for endpoint in endpoints]
    return Servers(servers, timeout, timing)


def _weight_sync(
    sampler_config: SamplerConfig, base: str, own: SpawnedServer | None, local_policy: LocalPolicy
) -> WeightSync:
    """How new weights reach the servers. Raises UsageError if this process cannot share its GPU memory with them."""
    from groupwise.engine.sampler.servers.adapters import AdapterFiles, SharedFolder
    from groupwise.engine.sampler.servers.spawned_server import (
        ALLOCATOR_SETTINGS,
        has_expandable_segments,
    )
    from groupwise.engine.sampler.servers.whole_weights import WholeWeights

    takes = sampler_config.weight_transfer or "files"
    if own is not None:
        takes = own.spec.takes
    elif takes == "ipc" and has_expandable_segments(os.environ):
        raise UsageError(
            f"sampler.weight_transfer is ipc, but {' or '.join(ALLOCATOR_SETTINGS)} has expandable_segments:True, and other processes "
            "cannot map such memory. Take it out, or set weight_transfer to files."
        )
    shared = None
    if sampler_config.adapter_folder is not None:
        folder = Path(sampler_config.adapter_folder).expanduser().resolve()
        there = (sampler_config.adapter_folder_there or str(folder)).rstrip("/")
        shared = SharedFolder(folder, there)
    if local_policy.rank is not None or takes == "adapters":
        by_expert = local_policy.write_by_expert if local_policy.adapts_experts else None
        return AdapterFiles(shared, by_expert)
    timeout = sampler_config.weight_transfer_timeout
    return WholeWeights(base, takes, local_policy, timeout=timeout, shared=shared, own=own)


def _own_server(
    config: RunConfig, layout: Layout, rank: int | None, timing: Timing
) -> SpawnedServer:
    """The vLLM server, not started yet; `rank`: of the adapters, if there are any. Raises UsageError if there are too few GPUs."""
    from groupwise.core.cache import cache_folder
    from groupwise.engine.models.tokenizer import resolve
    from groupwise.engine.sampler.servers import spawned_server

    sampler_config, source = config.sampler, resolve(config.model)
    assert sampler_config.vllm_python is not None
    if (
        sampler_config.max_model_len is not None
        and sampler_config.max_model_len < layout.key_length
    ):
        raise UsageError(
            f"sampler.max_model_len is {sampler_config.max_model_len}, but prompt and completion of this run have up to "
            f"{layout.key_length} tokens together. Leave it out, or lower data.max_prompt_length or sampler.max_completion_length."
        )
    gpus = own_server_gpus(config, layout)
    takes = sampler_config.weight_transfer or ("ipc" if gpus.shared else "files")
    if rank is not None:
        takes = "adapters"
    if takes in ("ipc", "nccl") and gpus.shared != (takes == "ipc"):
        where = "a GPU of its own" if takes == "ipc" else "the learner's own GPU"
        raise UsageError(
            f"sampler.weight_transfer is {takes}, but the server of sampler.vllm_python gets {where}: ipc is for the learner's own GPU, "
            "nccl for others. Leave weight_transfer out, or change the number of GPUs (CUDA_VISIBLE_DEVICES)."
        )
    if takes == "ipc" and spawned_server.has_expandable_segments(os.environ):
        takes = "files"
        logger.warning(
            "%s has expandable_segments:True: the vLLM of sampler.vllm_python cannot map such memory (CUDA IPC), and reads all weights "
            "from files after each step. Take it out for faster steps",
            " or ".join(spawned_server.ALLOCATOR_SETTINGS),
        )
    return spawned_server.SpawnedServer(
        spawned_server.ServerSpec(
            python=sampler_config.vllm_python,
            location=source.location,
            revision=source.revision,
            name=config.model.name,
            dtype=layout.dtype,
            tf32=layout.tf32,
            rank=rank,
            longest=sampler_config.max_model_len or layout.key_length,
            memory=gpus.memory,
            gpus=gpus.devices,
            in_turn=gpus.in_turn,
            takes=takes,
            parallel=sampler_config.tensor_parallel_size,
            in_4bit=config.model.load_in_4bit,
            returns_experts=sampler_config.routing_replay,
            trust_remote_code=config.model.trust_remote_code,
        ),
        cache_folder("vllm") / f"server-{os.getpid()}.log",
        concurrency=sampler_config.concurrency,
        timeout=sampler_config.timeout,
        server_timeout=sampler_config.server_timeout,
        timing=timing,
    )


def own_server_gpus(config: RunConfig, layout: Layout) -> ServerGpus:
    """The GPUs of the vLLM server that the run starts. Raises UsageError if there are too few."""
    from groupwise.engine.sampler.servers.spawned_server import server_gpus

    return server_gpus(
        0 if layout.device == "cpu" else prefork.gpu_count(),
        config.sampler.tensor_parallel_size,
        config.sampler.gpu_memory_utilization,
        _first_gpu(layout),
        in_turn=config.training.max_off_policy_steps == 0,  # it never samples while it learns
    )


def own_server_bytes(config: RunConfig, layout: Layout) -> tuple[float, float]:
    """What the vLLM server that the run starts takes of the learner's GPU, in bytes: while the run samples, and while it learns."""
    if config.sampler.vllm_python is None:
        return 0.0, 0.0
    from groupwise.engine.sampler.servers.spawned_server import ASLEEP

    gpus = own_server_gpus(config, layout)
    if not gpus.shared or gpus.memory is None:
        return 0.0, 0.0
    held = gpus.memory * prefork.gpu_memory(layout.device)
    return held, ASLEEP if gpus.in_turn else held


# --- built by a training server --------------------------------------------------------------------


async def _build_on_server(
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
    parts = await start(config.run.server, spec)
    if layout_from_response(parts.layout) != layout:
        parts.session.close()
        raise UsageError(
            f"{config.run.server} lays the work out otherwise than a moment ago: its machine or its settings have changed. Start again."
        )
    return parts


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

    model_folder = Path(config.model.name).expanduser()
    longest_prompt, lag = None, 0
    if isinstance(config, RunConfig):
        longest_prompt, lag = (
            layout.key_length - longest_completion(config),
            config.training.max_off_policy_steps,
        )
    return RemotePartsSpec(
        kind=kind,
        config=config.model_dump(mode="json"),
        run=run,
        publish_folder=folder,
        longest_prompt=longest_prompt,
        base=identity(config.model.model_copy(update={"adapter": None})),
        called=base_name(config.model),
        keep_publications=lag + 2,
        model=model_folder if model_folder.is_dir() else None,
        adapter=adapter_folder(config.model) if weights is None else None,
        weights=weights,
    )


# --- built by a worker in Tunix's environment -----------------------------------------------------


async def _build_on_tunix(
    config: RunConfig, layout: Layout, run: str, folder: Path, weights: Path | None = None
) -> Parts:
    """Start a worker with the model and an adapter: the one in `weights`, that of the config, or a new one."""
    from groupwise.engine.backends.tunix.parts import start
    from groupwise.engine.models.load import configured_stop_token_ids

    prefork.end_zygote()
    order = await asyncio.to_thread(_tunix_order, config, layout, run, folder, weights)
    tokenizer = prefork.load_tokenizer(config.model)
    stops = configured_stop_token_ids(config.model, tokenizer)
    worker, sampler, learner = await start(
        order, tokenizer, config.run.threads, config.training.max_off_policy_steps + 2
    )
    return Parts(sampler, learner, _with_configured_stops(stops, config), worker=worker)


def _tunix_order(
    config: RunConfig, layout: Layout, run: str, folder: Path, weights: Path | None
) -> Open:
    from groupwise.engine.backends.tunix.environment import mesh_of
    from groupwise.engine.backends.tunix.messages import Open
    from groupwise.engine.models.adapters import adapter_folder
    from groupwise.engine.models.load import model_folder, text_config_of
    from groupwise.engine.models.lora_config import scaling_of

    if weights is not None:
        model = config.model.model_copy(update={"adapter": str(weights), "adapter_revision": None})
        config = config.model_copy(update={"model": model})
    shape, layers = _starting_adapter(config)
    start = adapter_folder(config.model)
    return Open(
        model=str(model_folder(config.model)),
        text=text_config_of(config.model),
        dtype=layout.dtype,
        mesh=mesh_of(config.model.mesh),
        remat=config.training.gradient_checkpointing,
        layers=layers,
        rank=shape.r,
        alpha=scaling_of(shape) * shape.r,
        seed=config.training.seed,
        start=None if start is None else str(start),
        described=shape.to_json(),
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
    from groupwise.engine.models.load import text_config_of

    _, layers = _starting_adapter(config)
    check_unread(text_config_of(config.model), mesh_of(config.model.mesh), layers)


def _starting_adapter(config: RunConfig) -> tuple[Any, tuple[str, ...]]:
    """The config of the initial adapter, and the model's layers that have one."""
    from groupwise.engine.models.adapters import (
        check_adapter,
        leave_out_pictures,
        meta_adapter,
        starting_config,
    )

    assert config.lora is not None, "the config refuses full fine-tuning"
    check_adapter(config.model, config.lora)
    shape = starting_config(config.model, config.lora)
    leave_out_pictures(config.model, shape)
    return shape, tuple(meta_adapter(config.model, shape).layers)


# --- by a Tinker service --------------------------------------------------------------------------


async def _build_on_tinker(config: AnyConfig, layout: Layout, run: str, folder: Path) -> Parts:
    """Sampler and learner of a session with the service; its model is made when it is first needed, or from a checkpoint."""
    from groupwise.engine.backends.tinker import offer
    from groupwise.engine.backends.tinker.parts import TinkerLearner, TinkerSampler
    from groupwise.engine.backends.tinker.service import Service

    prefork.end_zygote()
    _prepare_process(layout)
    assert config.lora is not None, "the config refuses full fine-tuning"
    lag, stops = 0, ()
    tokenizer = prefork.load_tokenizer(config.model)
    if isinstance(config, RunConfig):
        lag = config.training.max_off_policy_steps
        stops = _with_configured_stops(_end_token(tokenizer), config)
    service = await asyncio.to_thread(Service, config.model, run)
    offer.check(config, service.offer)
    published: dict[str, Any] = {}
    learner = TinkerLearner(
        service, config.lora, config.training.seed, run, folder, published, lag + 2
    )
    return Parts(TinkerSampler(service, tokenizer, published), learner, stops, service=service)


async def _serve_on_tinker(config: RunConfig, layout: Layout, weights: Path | None) -> ServingParts:
    """A sampler of saved weights of the service; None: of the config's own policy."""
    from groupwise.engine.backends.tinker.parts import TinkerSampler
    from groupwise.engine.backends.tinker.service import Service

    prefork.end_zygote()
    _prepare_process(layout)
    tokenizer = prefork.load_tokenizer(config.model)
    service = await asyncio.to_thread(Service, config.model, "evaluation")
    sampler = TinkerSampler(service, tokenizer, {})
    try:
        await sampler.serve(weights)
    except BaseException:
        service.close()
        raise
    stops = _with_configured_stops(_end_token(tokenizer), config)
    return ServingParts(sampler, stops, service=service)


def _end_token(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end token, if it has one. The service knows the model's own stop tokens."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def prompt_room(model: ModelConfig, completion: int) -> int:
    """Most tokens that a prompt may have if the completion may have `completion` tokens. Raises UsageError if a service does not answer."""
    if model.backend != "tinker":
        return prefork.prompt_room(model, completion)
    from groupwise.engine.backends.tinker.service import longest_context

    limits = [longest_context(model), model.max_seq_length]
    return min((limit for limit in limits if limit), default=1 << 30) - completion


def vocabulary(model: ModelConfig, tokenizer: Any) -> int:
    """Number of token ids that the model has; those of the tokenizer if a service has the model."""
    return len(tokenizer) if model.backend == "tinker" else prefork.vocabulary(model)


def refuse_services(config: AnyConfig, why: str) -> None:
    """Raise UsageError for the backend tinker if the parts have to be on this machine."""
    if config.model.backend == "tinker":
        raise UsageError(
            f"model.backend is tinker, with which a service trains in groupwise rl and sft, and answers in groupwise eval; but {why}. "
            "Leave model.backend out."
        )


def _refuse_tunix(config: AnyConfig) -> None:
    """Raise UsageError for the backends tunix and tinker, because these parts compute with torch."""
    refuse_services(config, "this command computes here")
    if config.model.backend == "tunix":
        raise UsageError(
            "model.backend is tunix, which trains in groupwise rl and in notebooks, and answers in groupwise eval; this command computes "
            "with torch. Leave model.backend out."
        )


# --- built here, or once in the zygote of ranks ---------------------------------------------------


def _build_workers_now(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> WorkerCalls | WorkerState:
    _refuse_tunix(config)
    refuse_servers(config, "this command samples on this machine")
    if layout.processes == 1:
        return _build_in_process(kind, config, layout, **arguments)
    if layout.apart:
        workers = _start_processes(kind, config, layout)
        workers.make_now(WORKER_FACTORY, _make_arguments(kind, config, layout, **arguments))
        return workers
    ranks = prefork.take_zygote()
    ranks.make_now(
        WORKER_FACTORY, _make_arguments(kind, config, layout, **arguments), layout.processes
    )
    return ranks


async def _build_workers(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> WorkerCalls | WorkerState:
    _refuse_tunix(config)
    if layout.processes == 1:
        return _build_in_process(kind, config, layout, **arguments)
    if layout.apart:
        workers = _start_processes(kind, config, layout)
        await workers.make(WORKER_FACTORY, _make_arguments(kind, config, layout, **arguments))
        return workers
    ranks = prefork.take_zygote()
    await ranks.make(
        WORKER_FACTORY, _make_arguments(kind, config, layout, **arguments), layout.processes
    )
    return ranks


def _start_processes(kind: Kind, config: AnyConfig, layout: Layout) -> SpawnedWorkers:
    """Start processes with a model each: samplers if the parts only sample, otherwise learners. Ends the zygote, which is not needed."""
    from groupwise.engine.distributed.learner_workers import LearnerWorkers
    from groupwise.engine.distributed.sampler_workers import SamplerWorkers

    prefork.end_zygote()
    if layout.samplers and kind not in LEARNING:
        assert isinstance(config, RunConfig), "a supervised run samples nothing"
        return SamplerWorkers(
            layout.samplers,
            _first_gpu(layout),
            tells=kind != "sampling",
            timeout=config.distributed.sampler_timeout,
        )
    return LearnerWorkers(layout.learners, read_torchrun_rank(), learning=kind in LEARNING)


def _first_gpu(layout: Layout) -> int:
    """Index of the first sampler's GPU. The GPUs before it belong to this machine's learners, unless they share them."""
    if layout.shares_gpus:
        return 0
    launch = read_torchrun_rank()
    return layout.learners if launch is None else launch.local_count


def _start_halves(
    config: RunConfig, layout: Layout, run: str, folder: Path
) -> tuple[SpawnedWorkers, SpawnedWorkers, tuple[dict[str, Any], dict[str, Any]]]:
    """Learners, samplers, and the description of the parts of each. Closing the learners also closes the samplers."""
    learners = _start_processes("learning", config, layout)
    samplers = _start_processes("sampling", config, layout)
    learners.also_end(samplers)
    learning = _make_arguments("learning", config, layout, run=run, folder=str(folder))
    return learners, samplers, (learning, _make_arguments("sampling", config, layout))


def _parts_of_halves(learners: SpawnedWorkers, samplers: SpawnedWorkers, *, sharded: bool) -> Parts:
    from groupwise.engine.distributed.learner import RankLearner
    from groupwise.engine.distributed.sampler import RankSampler

    return Parts(
        RankSampler(samplers),
        RankLearner(learners, divided=sharded),
        _stop_token_ids(samplers),
        ranks=learners,
        samplers=samplers,
        divided=sharded,
    )


def _close_halves(*halves: SpawnedWorkers) -> None:
    for half in halves:
        half.close()


def _build_in_process(kind: Kind, config: Any, layout: Layout, **arguments: Any) -> WorkerState:
    from groupwise.engine.models.native.weights import write_weight_caches

    prefork.end_zygote()
    worker = _make_worker(kind, config, layout, **arguments)
    write_weight_caches()  # now: later this process may change its weights
    return worker


def _make_arguments(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> dict[str, Any]:
    """Arguments of `make_worker_from_json` as plain JSON."""
    config_json = config.model_dump(mode="json")
    return {"kind": kind, "config": config_json, "layout": asdict(layout), **arguments}


def make_worker_from_json(
    kind: Kind, config: Mapping[str, Any], layout: Mapping[str, Any], **arguments: Any
) -> WorkerState:
    """The factory that the zygote calls."""
    from groupwise.engine.models.machine import give_back_memory
    from groupwise.training.sft_config import load_sft_config

    read = load_sft_config if kind == "supervised" else load_config
    worker = _make_worker(kind, read(config).config, Layout(**layout), **arguments)
    give_back_memory()
    return worker


def _make_worker(kind: Kind, config: Any, layout: Layout, **arguments: Any) -> WorkerState:
    with explaining_out_of_memory("making the model ready"):
        return _MAKERS[kind](config, layout, **arguments)


def _make_training(config: RunConfig, layout: Layout, run: str, folder: str) -> WorkerState:
    """Build sampler and learner in this process. It may be the zygote, which must have only one thread until it has forked the ranks."""
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.models.adapters import check_adapter
    from groupwise.engine.models.load import load_model, stop_token_ids
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedAdapter, ServedModel

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    device, divided = _full_model_device(layout), layout.parts > 1
    model = _load_trained_model(config, layout, device)
    stops = stop_token_ids(model, tokenizer)
    learner_weights: Any
    if config.lora:
        learner_weights = _trained_adapter(config, model)
        sampler_weights = ServedAdapter(learner_weights.adapted)
    else:  # the sampler needs its own copy of all weights
        served = load_model(config.model, layout.dtype, device)
        if divided:
            from groupwise.engine.learner.fsdp import shard_model

            shard_model(served, layout.device)
        sampler_weights = ServedModel(served)
        learner_weights = _trained_model(config, layout, model)
    replicas = _replicas(layout, learner_weights)
    learner = _build_learner(
        config, layout, learner_weights, run, folder, config.training.seed, replicas
    )
    samples_on_servers = config.sampler.engine != "torch" and layout.learners > 1
    return WorkerState(
        layout.threads_each,
        None if samples_on_servers else _build_sampler(config, layout, sampler_weights, tokenizer),
        learner,
        _with_configured_stops(stops, config),
        learner_weights,
        replicas,
        local_policy=_build_local_policy(sampler_weights) if samples_on_servers else None,
        adapter_host=_adapter_host(config, layout, learner_weights.adapted, tokenizer)
        if config.lora is not None and config.model.backend != "unsloth" and not divided
        else None,  # further models can be added to the base of an adapter's training
    )


def _build_local_policy(sampler_weights: Any) -> Any:
    from groupwise.engine.sampler.servers.local_policy import TorchPolicy

    return TorchPolicy(sampler_weights)


def _make_learning(config: RunConfig, layout: Layout, run: str, folder: str) -> WorkerState:
    """Build a learner without a sampler."""
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.models.adapters import check_adapter

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    model = _load_trained_model(config, layout, _full_model_device(layout))
    learner_weights = (
        _trained_adapter(config, model) if config.lora else _trained_model(config, layout, model)
    )
    replicas = _replicas(layout, learner_weights)
    learner = _build_learner(
        config, layout, learner_weights, run, folder, config.training.seed, replicas
    )
    return WorkerState(
        layout.threads_each, learner=learner, trained=learner_weights, replicas=replicas
    )


def _make_sampling(config: RunConfig, layout: Layout) -> WorkerState:
    """Build a sampler without a learner, for weights that another process will publish."""
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.models.adapters import check_adapter, starting_config
    from groupwise.engine.models.load import load_base, stop_token_ids
    from groupwise.engine.models.lora import AdaptedModel
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedAdapter, ServedModel

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_base(config.model, layout.dtype, layout.device)
    sampler_weights = ServedModel(model)
    if config.lora:
        shape = starting_config(config.model, config.lora)
        sampler_weights = ServedAdapter(AdaptedModel(model, shape))
    stops = _with_configured_stops(stop_token_ids(model, tokenizer), config)
    return WorkerState(
        layout.threads_each,
        _build_sampler(config, layout, sampler_weights, tokenizer),
        stop_token_ids=stops,
    )


def _build_learner(
    config: RunConfig,
    layout: Layout,
    learner_weights: Any,
    run: str,
    folder: str,
    seed: int,
    replicas: Any = None,
) -> TorchLearner:
    from groupwise.engine.learner.torch_learner import TorchLearner

    return TorchLearner(
        learner_weights,
        engine=_own_engine(config, learner_weights),
        run=run,
        publish_folder=Path(folder),
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        routing_replay=config.sampler.routing_replay,
        keep_publications=config.training.max_off_policy_steps + 2,
        replicas=replicas,
        divide_on=_shard_device(layout),
        make_teacher=_teacher_factory(config, layout, learner_weights),
    )


def _teacher_factory(
    config: RunConfig, layout: Layout, learner_weights: Any
) -> Callable[[LearnerEngine], Teacher] | None:
    """Makes the teacher of a distillation that the learner's process computes; None without one."""
    settings = config.teacher
    if settings is None or settings.type == "endpoint":
        return None
    from groupwise.engine.learner.teacher import Teacher
    from groupwise.engine.learner.teacher_weights import average_teacher, model_teacher

    packing = config.training.packing
    if settings.type == "model":
        model_config = settings.model_config_of(config.model)
        dtype = prefork.choose_dtype(model_config, False, layout.device)
        return lambda _: model_teacher(model_config, dtype, layout.device, packing=packing)
    if settings.weights == "ema":
        rate, dtype = settings.ema_rate, layout.dtype
        return lambda _: average_teacher(learner_weights, rate, dtype, packing=packing)
    return lambda engine: Teacher(engine, "reference" if settings.weights == "start" else "policy")


def _own_engine(config: AnyConfig, learner_weights: Any) -> LearnerEngine | None:
    """The engine that computes a learner's rows; None: the learner chooses."""
    if config.model.backend != "unsloth":
        return None
    from groupwise.engine.backends.unsloth.model import UnslothEngine

    return UnslothEngine(learner_weights)


def _load_model(config: AnyConfig, layout: Layout, device: str) -> Any:
    """Load the model in the way of the backend."""
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.library import load

        return load(config.model, layout.dtype, layout.key_length or None)
    from groupwise.engine.models.load import load_base

    return load_base(config.model, layout.dtype, device)


def _load_trained_model(config: AnyConfig, layout: Layout, device: str) -> Any:
    """Load the model for its training: weights that are trained are float32, whatever format they are computed in.

    Modules whose weights are trained or divided are those of transformers.
    """
    from groupwise.engine.models.load import load_model

    if config.lora is None:
        return load_model(config.model, "float32", device)
    if layout.parts > 1:
        return load_model(config.model, layout.dtype, device)
    return _load_model(config, layout, device)


def _shard_device(layout: Layout) -> str | None:
    """Device of a learner's part of the weights; None if it has all weights."""
    return layout.device if layout.parts > 1 else None


def _full_model_device(layout: Layout) -> str:
    """Device on which a learner reads the whole model; the CPU if the weights are divided, because one GPU may be too small."""
    return layout.device if layout.parts == 1 else "cpu"


def _build_sampler(
    config: RunConfig, layout: Layout, sampler_weights: Any, tokenizer: Any
) -> Sampler:
    from groupwise.engine.sampler.queued import DecodeLayout
    from groupwise.engine.sampler.torch_sampler import TorchSampler

    if config.sampler.engine != "torch":
        return _server_sampler(config, layout, _build_local_policy(sampler_weights), tokenizer)
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.sampler import UnslothSampler

        return UnslothSampler(
            sampler_weights, tokenizer, DecodeLayout(layout.slots, layout.key_length)
        )
    return TorchSampler(
        sampler_weights,
        tokenizer,
        DecodeLayout(layout.slots, layout.key_length),
        enforce_eager=config.sampler.enforce_eager,
        int8=config.sampler.quantization == "int8",
        frees_cache=layout.frees_cache,
    )


def _prepare_process(layout: Layout) -> None:
    """Set the number of threads, and the precision of the run's products.

    With several processes, this one is the zygote, which keeps one thread: forks lose all others.
    """
    from groupwise.engine.models.machine import prepare_process, set_tf32, set_threads

    set_tf32(layout.tf32)
    if layout.sharing == 1:
        prepare_process(layout.threads_each)
    else:
        set_threads(1)


def _replicas(layout: Layout, learner_weights: Any) -> Any:
    """The link that combines the gradients of all learners; None if only one process learns."""
    if layout.learning == 1:
        return None
    if layout.parts > 1:
        from groupwise.engine.learner.fsdp import FsdpGradientSum

        return FsdpGradientSum()
    if layout.apart:
        from groupwise.engine.learner.collective import ProcessGroupGradientSum

        return ProcessGroupGradientSum()
    from groupwise.engine.learner.replicas import SharedMemoryGradientSum

    return SharedMemoryGradientSum(layout.processes, [*learner_weights.parameters().values()])


def _make_supervised(config: SftConfig, layout: Layout, run: str, folder: str) -> WorkerState:
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.learner.torch_learner import TorchLearner
    from groupwise.engine.learner.weights import TrainedModel
    from groupwise.engine.models.adapters import check_adapter

    check_adapter(config.model, config.lora)
    _prepare_process(layout)
    model = _load_trained_model(config, layout, _full_model_device(layout))
    learner_weights = (
        _trained_adapter(config, model) if config.lora else TrainedModel(model, dtype=layout.dtype)
    )
    replicas = _replicas(layout, learner_weights)
    learner = TorchLearner(
        learner_weights,
        engine=_own_engine(config, learner_weights),
        run=run,
        publish_folder=Path(folder),
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=config.training.seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        replicas=replicas,
        divide_on=_shard_device(layout),
    )
    return WorkerState(layout.threads_each, learner=learner, replicas=replicas)


def _make_serving(config: RunConfig, layout: Layout, weights: str | None) -> WorkerState:
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.models.adapters import adapter_folder, warn_of_other_base
    from groupwise.engine.models.load import stop_token_ids
    from groupwise.engine.models.lora_config import CONFIG, read_lora_config
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedAdapter, ServedModel

    folder = adapter_folder(config.model) if weights is None else Path(weights)
    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = _load_model(config, layout, layout.device)
    stops = _with_configured_stops(stop_token_ids(model, tokenizer), config)
    sampler_weights: Any = ServedModel(model)
    if folder is not None:
        if (folder / CONFIG).is_file():
            stored = read_lora_config(folder)
            warn_of_other_base(stored, config.model, folder)
            sampler_weights = ServedAdapter(_build_adapted_model(config, model, stored))
        sampler_weights.read(folder)
    sampler = _build_sampler(config, layout, sampler_weights, tokenizer)
    return WorkerState(layout.threads_each, sampler, stop_token_ids=stops)


def _make_base(config: RunConfig, layout: Layout) -> WorkerState:
    """Build the base with a sampler. It arranges the weights for decoding before ranks are forked, for all later models."""
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.models.config import LoraConfig
    from groupwise.engine.models.load import load_base, stop_token_ids
    from groupwise.engine.models.lora import AdaptedModel
    from groupwise.engine.models.lora_config import new_lora_config
    from groupwise.engine.models.native.ready import ready_to_learn
    from groupwise.engine.models.native.weights import native_model
    from groupwise.engine.models.tokenizer import load_tokenizer
    from groupwise.engine.sampler.weights import ServedModel

    _prepare_process(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_base(config.model, layout.dtype, layout.device)
    sampler = _build_sampler(config, layout, ServedModel(model), tokenizer)
    native = native_model(model)
    if native is not None:
        ready_to_learn(native)
    adapted_model = AdaptedModel(model, new_lora_config(config.lora or LoraConfig()))
    return WorkerState(
        layout.threads_each,
        sampler,
        stop_token_ids=_with_configured_stops(stop_token_ids(model, tokenizer), config),
        adapter_host=_adapter_host(config, layout, adapted_model, tokenizer),
    )


def _adapter_host(
    config: RunConfig, layout: Layout, adapted_model: Any, tokenizer: Any
) -> AdapterHost:
    """Build the host that later creates models over this base."""
    from groupwise.engine.distributed.worker_state import AdapterHost

    def make_weights(adapted_model: Any, name: str, spec: NewModel) -> tuple[Any, Any]:
        from groupwise.engine.learner.weights import TrainedAdapter
        from groupwise.engine.models.adapters import (
            check_adapter,
            starting_config,
            warn_of_other_base,
        )
        from groupwise.engine.models.lora import read_adapter
        from groupwise.engine.models.lora_config import read_lora_config
        from groupwise.engine.sampler.weights import ServedAdapter

        model = config.model.model_copy(update={"adapter": spec.start, "adapter_revision": None})
        check_adapter(model, spec.lora, "the adapter to start from,")
        shape = starting_config(model, spec.lora, "the adapter to start from,")
        start = None
        if spec.start is not None:
            start = read_adapter(Path(spec.start))
            warn_of_other_base(read_lora_config(Path(spec.start)), model, Path(spec.start))
        learner_weights = TrainedAdapter(adapted_model, spec.seed, start, name, shape)
        return learner_weights, ServedAdapter(adapted_model, f"{name}-served", shape)

    def make_learner(learner_weights: Any, spec: NewModel) -> TorchLearner:
        return _build_learner(config, layout, learner_weights, spec.run, spec.folder, spec.seed)

    def make_sampler(sampler_weights: Any) -> Sampler:
        return _build_sampler(config, layout, sampler_weights, tokenizer)

    return AdapterHost(adapted_model, make_weights, make_learner, make_sampler)


_MAKERS: dict[Kind, Callable[..., WorkerState]] = {
    "training": _make_training,
    "learning": _make_learning,
    "sampling": _make_sampling,
    "supervised": _make_supervised,
    "serving": _make_serving,
    "base": _make_base,
}


def publication_bytes(config: RunConfig) -> int:
    """Bytes of the trained weights in float32, times the number of publications that the lag requires to be kept."""
    if config.model.backend == "tinker":
        return 4096  # a publication is one small file
    parameter_count = prefork.trained_parameters(config.model, config.lora)
    return 4 * parameter_count * (1 + config.training.max_off_policy_steps)


def build_algorithm(config: RunConfig) -> Any:
    """The configured algorithm."""
    return make(config.algorithm.type, config.algorithm.knobs)


def _trained_adapter(config: AnyConfig, model: Any) -> Any:
    """A new adapter, or the one that the config starts from."""
    from groupwise.engine.learner.weights import TrainedAdapter
    from groupwise.engine.models.adapters import adapter_folder, starting_config, warn_of_other_base
    from groupwise.engine.models.lora import read_adapter
    from groupwise.engine.models.lora_config import read_lora_config

    assert config.lora is not None
    folder = adapter_folder(config.model)
    adapted_model = _build_adapted_model(config, model, starting_config(config.model, config.lora))
    if folder is None:
        return TrainedAdapter(adapted_model, config.training.seed)
    warn_of_other_base(read_lora_config(folder), config.model, folder)
    return TrainedAdapter(adapted_model, config.training.seed, read_adapter(folder))


def _build_adapted_model(config: AnyConfig, model: Any, shape: Any) -> AdaptedModel:
    """The model, prepared for adapters; `shape` is the config of adapters without their own."""
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.model import UnslothModel

        recompute = config.training.gradient_checkpointing
        return UnslothModel(model, shape, gradient_checkpointing=recompute)
    from groupwise.engine.models.lora import AdaptedModel

    return AdaptedModel(model, shape)


def _trained_model(config: RunConfig, layout: Layout, model: Any) -> TrainedModel:
    """The trained full weights, with a frozen copy as reference if the KL penalty or the teacher needs it."""
    from groupwise.engine.learner.weights import TrainedModel

    device = _full_model_device(layout)
    reference = _load_trained_model(config, layout, device) if needs_reference(config) else None
    return TrainedModel(model, reference, layout.dtype)


def needs_reference(config: RunConfig) -> bool:
    """True if the learner needs the policy that the run started from: for a KL penalty, or as the teacher."""
    starts_teacher = config.teacher is not None and config.teacher.weights == "start"
    return build_algorithm(config).needs_reference or starts_teacher


def check_stop_tokens(config: RunConfig, tokenizer: Any) -> None:
    """Raise ConfigError if `sampler.stop_token_ids` has ids that the tokenizer does not have."""
    unknown = [token for token in config.sampler.stop_token_ids if token >= len(tokenizer)]
    if unknown:
        raise ConfigError(
            f"sampler.stop_token_ids has {', '.join(map(str, unknown))}, but the tokens of {config.model.name} end at "
            f"{len(tokenizer) - 1}."
        )


def _with_configured_stops(stops: tuple[int, ...], config: RunConfig) -> tuple[int, ...]:
    return tuple(sorted({*stops, *config.sampler.stop_token_ids}))
