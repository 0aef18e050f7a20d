"""Builds and starts the parts of a run from its config; the only module that chooses between implementations.

`start_training` builds sampler and learner of the RL loop in the layout of `groupwise.training.placement`, `start_supervised` the
learner of a supervised run, `start_serving` the sampler of an evaluation. If an adapter is trained, sampler and learner share one base
model in memory. Each has its own copy of the adapter, and the sampler's copy changes only by loading published files.

`processes` builds the parts on this machine, in this process or in ranks, which do what `workers` says; `servers` has the sampler of vLLM
and SGLang. `services` starts parts that are elsewhere: on a training server, in Tunix's environment, at a service of the Tinker API.

`models_over` adds further trained adapters later, to the base of a training or to one that `start_base` loaded alone. Callers that also
check configs and make dry runs import this module late, because of all that it imports.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from groupwise.core.errors import ConfigError
from groupwise.core.interruption import gather_all
from groupwise.core.types import Sampler
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.learner import RankLearner
from groupwise.engine.distributed.multi_adapter import (
    LocalWorker,
    ModelHost,
    ModelRegistry,
    RemoteWorker,
)
from groupwise.engine.distributed.rpc import WorkerCalls
from groupwise.engine.distributed.sampler import RankPolicy, RankSampler
from groupwise.runs import publications
from groupwise.training.assembly.parts import LearningParts, Parts, ServingParts
from groupwise.training.assembly.prepare import refuse_servers
from groupwise.training.assembly.processes import (
    WORKER_FACTORY,
    build_workers,
    build_workers_now,
    starting_halves,
)
from groupwise.training.config import RunConfig
from groupwise.training.placement import Layout

if TYPE_CHECKING:
    from groupwise.engine.distributed.spawned_workers import SpawnedWorkers
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.sampler.servers.sampler import ServerSampler
    from groupwise.training.sft_config import SftConfig

logger = logging.getLogger(__name__)


def training_parts(config: RunConfig, layout: Layout, run: str, publish_folder: Path) -> Parts:
    """Load the model once and build sampler and learner with it."""
    if layout.samplers:
        with starting_halves(config, layout, run, publish_folder) as (learners, samplers, specs):
            # Build the halves one after the other.
            for half, spec in zip((learners, samplers), specs, strict=True):
                half.make_now(WORKER_FACTORY, spec)
            return _parts_of_halves(learners, samplers, sharded=layout.weight_shards > 1)
    folder = str(publish_folder)
    workers = build_workers_now("training", config, layout, run=run, folder=folder)
    return _training_parts(workers, config, layout)


async def start_training(
    config: RunConfig, layout: Layout, run: str, publish_folder: Path
) -> Parts:
    """Like `training_parts`, but async: the event loop continues while ranks start, and cancelling ends them. With `run.server`, the server
    builds the parts.
    """
    if config.run.server is not None or config.model.backend in ("tunix", "tinker"):
        from groupwise.training.assembly import services

        return await services.start_training(config, layout, run, publish_folder)
    if layout.samplers:
        with starting_halves(config, layout, run, publish_folder) as (learners, samplers, specs):
            # Learners and samplers start concurrently.
            await gather_all(
                half.make(WORKER_FACTORY, spec)
                for half, spec in zip((learners, samplers), specs, strict=True)
            )
            return _parts_of_halves(learners, samplers, sharded=layout.weight_shards > 1)
    workers = await build_workers("training", config, layout, run=run, folder=str(publish_folder))
    if isinstance(workers, WorkerCalls) and config.sampler.engine != "torch":
        # The ranks only learn; the first one checks the log-probabilities of the servers, or all do that together.
        try:
            from groupwise.training.assembly.servers import server_sampler

            sharded = layout.weight_shards > 1
            local_policy = RankPolicy(workers, sharded=sharded)
            tokenizer = prefork.load_tokenizer(config.model)
            sampler = server_sampler(config, layout, local_policy, tokenizer)
            return Parts(
                sampler,
                RankLearner(workers, sharded=sharded),
                _stop_token_ids(workers),
                ranks=workers,
                sharded=sharded,
                by_http=sampler,
            )
        except BaseException:
            workers.close()
            raise
    return _training_parts(workers, config, layout)


def supervised_parts(config: SftConfig, layout: Layout, run: str, folder: Path) -> LearningParts:
    """Load the model and build the learner of a run that samples nothing. `folder` is for publications, which such a run does not make."""
    workers = build_workers_now("supervised", config, layout, run=run, folder=str(folder))
    return _supervised_parts(workers, layout)


async def start_supervised(
    config: SftConfig, layout: Layout, run: str, folder: Path
) -> LearningParts:
    """Like `supervised_parts`, but async; see `start_training`."""
    if config.run.server is not None or config.model.backend == "tinker":
        from groupwise.training.assembly import services

        return await services.start_supervised(config, layout, run, folder)
    workers = await build_workers("supervised", config, layout, run=run, folder=str(folder))
    return _supervised_parts(workers, layout)


async def start_serving(
    config: RunConfig, layout: Layout, weights: Path | None, server_log: Path | None = None
) -> ServingParts:
    """Build a sampler of the adapter or full weights in `weights`; if None, of the config's own policy. See `start_training`.

    `server_log`: file for the output of a vLLM server that is started for it; None: one in the cache.
    """
    if config.run.server is not None or config.model.backend in ("tunix", "tinker"):
        from groupwise.training.assembly import services

        return await services.start_serving(config, layout, weights)
    folder = None if weights is None else str(weights)
    # Nothing is learnt from these completions.
    sampler_config = config.sampler.model_copy(update={"routing_replay": False})
    config = config.model_copy(update={"sampler": sampler_config})
    # One model is enough to check the servers' log-probabilities.
    if config.sampler.engine != "torch":
        layout = replace(layout, processes=1, learners=1)
    workers = await build_workers("serving", config, layout, weights=folder)
    if isinstance(workers, WorkerCalls):
        return ServingParts(RankSampler(workers), _stop_token_ids(workers), ranks=workers)
    assert workers.sampler is not None
    by_http = _by_http(workers.sampler, config)
    if by_http is not None:
        from groupwise.training.assembly.servers import serve_policy

        if server_log is not None:
            by_http.follow_server(server_log, logger.warning)
        await serve_policy(by_http, config, weights)
    return ServingParts(workers.sampler, workers.stop_token_ids, by_http=by_http)


async def start_base(config: RunConfig, layout: Layout) -> ServingParts:
    """Load a base model to which models are added later, with a sampler of the base itself. See `start_training`."""
    if config.model.adapter is not None:
        raise ConfigError(
            f"model.adapter is {config.model.adapter!r}, but a base has none: it is loaded as it is, and each model that is added "
            "says which adapter it starts from. Leave the key out."
        )
    refuse_servers(config, "a base for several models is sampled where it is")
    workers = await build_workers("base", config, layout)
    if isinstance(workers, WorkerCalls):
        return ServingParts(RankSampler(workers), _stop_token_ids(workers), ranks=workers)
    assert workers.sampler is not None
    return ServingParts(workers.sampler, workers.stop_token_ids, hosted=workers)


def models_over(parts: Parts | ServingParts, max_models: int, run: str = "run") -> ModelRegistry:
    """Build the host that can add up to `max_models` models over the base of these parts; it ends with them.

    In a training, its own model counts as one and is called `run`. Call this only once for the same parts.
    """
    hosts: list[ModelHost]
    if parts.ranks is not None:
        hosts = [RemoteWorker(parts.ranks, rank) for rank in range(parts.ranks.count)]
    else:
        hosts = [LocalWorker(parts.hosted)]
    first_model = run if isinstance(parts, Parts) else None
    return ModelRegistry(hosts, max_models, parts.stop_token_ids, first_model)


@contextmanager
def publication_folder(config: RunConfig, run_folder: Path) -> Generator[Path]:
    """A folder for the publications of the run in `run_folder`, in memory if there is room; removed afterwards."""
    size = 4096  # with a service, a publication is one small file
    if config.model.backend != "tinker":
        # The trained weights in float32, times the number of publications that the lag requires to be kept.
        parameter_count = prefork.trained_parameters(config.model, config.lora)
        size = 4 * parameter_count * (1 + config.training.max_off_policy_steps)
    folder = publications.claim(run_folder, size)
    try:
        yield folder
    finally:
        publications.release(folder)


def _training_parts(workers: WorkerCalls | WorkerState, config: RunConfig, layout: Layout) -> Parts:
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
        by_http=_by_http(workers.sampler, config),
    )


def _by_http(sampler: Sampler, config: RunConfig) -> ServerSampler | None:
    """The sampler that was built in this process if it asks servers, without importing these to look at its type."""
    return None if config.sampler.engine == "torch" else cast("ServerSampler", sampler)


def _parts_of_halves(learners: SpawnedWorkers, samplers: SpawnedWorkers, *, sharded: bool) -> Parts:
    return Parts(
        RankSampler(samplers),
        RankLearner(learners, sharded=sharded),
        _stop_token_ids(samplers),
        ranks=learners,
        samplers=samplers,
        sharded=sharded,
    )


def _supervised_parts(workers: WorkerCalls | WorkerState, layout: Layout) -> LearningParts:
    if isinstance(workers, WorkerCalls):
        return LearningParts(RankLearner(workers, sharded=layout.weight_shards > 1), ranks=workers)
    assert workers.learner is not None
    return LearningParts(workers.learner)


def _stop_token_ids(ranks: WorkerCalls) -> tuple[int, ...]:
    return ranks.call_all_now("stop_token_ids")[0]
