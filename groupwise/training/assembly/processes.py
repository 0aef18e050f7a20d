"""Builds the parts in the processes of a layout: in this one, in ranks that share one model, or in processes with a model each.

Ranks are forked from a zygote, which builds the parts once (`groupwise.engine.distributed`). Each process that builds parts calls
`make_worker_from_json`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import UsageError
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.learner_workers import LearnerWorkers
from groupwise.engine.distributed.sampler_workers import SamplerWorkers
from groupwise.engine.distributed.torchrun import read_torchrun_rank
from groupwise.training.assembly.parts import Kind
from groupwise.training.assembly.prepare import refuse_servers, refuse_services
from groupwise.training.config import RunConfig
from groupwise.training.placement import Layout, first_gpu

if TYPE_CHECKING:
    from groupwise.engine.distributed.forked_workers import ForkedWorkers
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.spawned_workers import SpawnedWorkers
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.training.placement import AnyConfig

LEARNING = frozenset[Kind]({"training", "learning", "supervised"})
WORKER_FACTORY = "groupwise.training.assembly.workers:make_worker_from_json"


def build_workers_now(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> WorkerCalls | WorkerState:
    """Build these parts, and wait for the processes that do."""
    _refuse_other_backends(config)
    refuse_servers(config, "this command samples on this machine")
    if layout.processes == 1:
        return _build_in_process(kind, config, layout, **arguments)
    workers, factory_call = _start_workers(kind, config, layout, **arguments)
    workers.make_now(*factory_call)
    return workers


async def build_workers(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> WorkerCalls | WorkerState:
    """Like `build_workers_now`, but async."""
    _refuse_other_backends(config)
    if layout.processes == 1:
        return _build_in_process(kind, config, layout, **arguments)
    workers, factory_call = _start_workers(kind, config, layout, **arguments)
    await workers.make(*factory_call)
    return workers


def _build_in_process(kind: Kind, config: Any, layout: Layout, **arguments: Any) -> WorkerState:
    prefork.end_zygote()
    from groupwise.training.assembly.workers import make_worker_here

    return make_worker_here(kind, config, layout, **arguments)


def _start_workers(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> tuple[SpawnedWorkers | ForkedWorkers, list[Any]]:
    """The processes that will build the parts, and the arguments of their `make`."""
    factory_call = [WORKER_FACTORY, _make_arguments(kind, config, layout, **arguments)]
    if layout.separate_models:
        return _start_processes(kind, config, layout), factory_call
    return prefork.take_zygote(), [*factory_call, layout.processes]


def _make_arguments(
    kind: Kind, config: AnyConfig, layout: Layout, **arguments: Any
) -> dict[str, Any]:
    """Arguments of `make_worker_from_json` as plain JSON."""
    config_json = config.model_dump(mode="json")
    return {"kind": kind, "config": config_json, "layout": asdict(layout), **arguments}


def _start_processes(kind: Kind, config: AnyConfig, layout: Layout) -> SpawnedWorkers:
    """Start processes with a model each: samplers if the parts only sample, otherwise learners. Ends the zygote, which is not needed."""
    prefork.end_zygote()
    if layout.samplers and kind not in LEARNING:
        assert isinstance(config, RunConfig), "a supervised run samples nothing"
        return SamplerWorkers(
            layout.samplers,
            first_gpu(layout),
            sends_log=kind != "sampling",
            timeout=config.distributed.sampler_timeout,
        )
    return LearnerWorkers(layout.learners, read_torchrun_rank(), learning=kind in LEARNING)


@contextmanager
def starting_halves(
    config: RunConfig, layout: Layout, run: str, folder: Path
) -> Generator[tuple[SpawnedWorkers, SpawnedWorkers, tuple[dict[str, Any], dict[str, Any]]]]:
    """Learners, samplers, and the description of the parts of each. An error closes both; later, closing the learners also closes the
    samplers.
    """
    learners = _start_processes("learning", config, layout)
    samplers = _start_processes("sampling", config, layout)
    learners.also_end(samplers)
    learning = _make_arguments("learning", config, layout, run=run, folder=str(folder))
    try:
        yield learners, samplers, (learning, _make_arguments("sampling", config, layout))
    except BaseException:
        learners.close()
        samplers.close()
        raise


def _refuse_other_backends(config: AnyConfig) -> None:
    """Raise UsageError for the backends tunix and tinker, because these parts compute with torch."""
    refuse_services(config, "this command computes here")
    if config.model.backend == "tunix":
        raise UsageError(
            "model.backend is tunix, which trains in groupwise rl and in notebooks, and answers in groupwise eval; this command computes "
            "with torch. Leave model.backend out."
        )
