"""Starts parts that are built elsewhere: by a training server, by a worker in Tunix's environment, or by a service of the Tinker API.

A config chooses them with `run.server`, `model.backend: tunix` and `model.backend: tinker`. They are in `groupwise.engine.backends`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import UsageError
from groupwise.engine.backends.remote.parts import RemoteParts, RemotePartsSpec
from groupwise.engine.backends.remote.parts import start as start_on_server
from groupwise.engine.backends.tinker import capabilities
from groupwise.engine.backends.tinker.parts import TinkerLearner, TinkerSampler
from groupwise.engine.backends.tinker.service import Service
from groupwise.engine.backends.tunix.environment import mesh_of
from groupwise.engine.backends.tunix.fits import check_unread
from groupwise.engine.backends.tunix.messages import Open
from groupwise.engine.backends.tunix.parts import start as start_tunix
from groupwise.engine.distributed import prefork
from groupwise.engine.models.adapters import (
    adapter_folder,
    base_name,
    check_adapter,
    leave_out_pictures,
    meta_adapter,
    starting_config,
)
from groupwise.engine.models.identity import identity
from groupwise.engine.models.load import configured_stop_token_ids, model_folder, text_config_of
from groupwise.engine.models.lora_config import scaling_of
from groupwise.training.assembly.parts import LearningParts, Parts, ServingParts
from groupwise.training.assembly.prepare import with_configured_stops
from groupwise.training.config import RunConfig
from groupwise.training.placement import Layout, apply_layout, layout_from_response
from groupwise.training.rollout_builder import longest_completion

if TYPE_CHECKING:
    from groupwise.api.schemas.parts import PartsKind
    from groupwise.training.placement import AnyConfig
    from groupwise.training.sft_config import SftConfig


async def start_training(config: RunConfig, layout: Layout, run: str, folder: Path) -> Parts:
    """Sampler and learner; publications arrive in `folder`."""
    if config.run.server is not None:
        remote = await _start_on_server("training", config, layout, run, folder)
        return Parts(remote.sampler, remote.learner, remote.stop_token_ids, session=remote.session)
    if config.model.backend == "tunix":
        return await _start_tunix(config, layout, run, folder)
    return await _start_tinker(config, layout, run, folder)


async def start_supervised(
    config: SftConfig, layout: Layout, run: str, folder: Path
) -> LearningParts:
    """A learner of a training server or of a Tinker service."""
    if config.run.server is not None:
        remote = await _start_on_server("supervised", config, layout, run, folder)
        return LearningParts(remote.learner, session=remote.session)
    parts = await _start_tinker(config, layout, run, folder)
    return LearningParts(parts.learner, service=parts.service)


async def start_serving(config: RunConfig, layout: Layout, weights: Path | None) -> ServingParts:
    """A sampler of the weights; if None, of the config's own policy."""
    if config.run.server is not None:
        remote = await _start_on_server("serving", config, layout, "served", Path(), weights)
        return ServingParts(remote.sampler, remote.stop_token_ids, session=remote.session)
    if config.model.backend == "tunix":
        parts = await _start_tunix(config, layout, "served", Path(), weights)
        return ServingParts(parts.sampler, parts.stop_token_ids, worker=parts.worker)
    return await _serve_tinker(config, layout, weights)


async def _start_on_server(
    kind: PartsKind,
    config: AnyConfig,
    layout: Layout,
    run: str,
    folder: Path,
    weights: Path | None = None,
) -> RemoteParts:
    """Build the parts on `run.server`, in the layout that it has planned. Local weight files are sent to it."""
    assert config.run.server is not None
    longest_prompt, lag = None, 0
    if isinstance(config, RunConfig):
        longest_prompt = layout.key_length - longest_completion(config)
        lag = config.training.max_off_policy_steps

    def describe() -> RemotePartsSpec:
        local = Path(config.model.name).expanduser()
        return RemotePartsSpec(
            kind=kind,
            config=config.model_dump(mode="json"),
            run=run,
            publish_folder=folder,
            longest_prompt=longest_prompt,
            base=identity(config.model.model_copy(update={"adapter": None})),
            called=base_name(config.model),
            keep_publications=lag + 2,
            model=local if local.is_dir() else None,
            adapter=adapter_folder(config.model) if weights is None else None,
            weights=weights,
        )

    parts = await start_on_server(config.run.server, await asyncio.to_thread(describe))
    if layout_from_response(parts.layout) != layout:
        parts.session.close()
        raise UsageError(
            f"{config.run.server} plans another layout than a moment ago: its machine or its settings have changed. Start again."
        )
    return parts


def check_tunix(config: RunConfig) -> None:
    """Raise `UsageError` for a model, mesh or adapted layers that the backend tunix does not support, before any weights are read."""
    _, layers = _starting_adapter(config)
    check_unread(text_config_of(config.model), mesh_of(config.model.mesh), layers)


async def _start_tunix(
    config: RunConfig, layout: Layout, run: str, folder: Path, weights: Path | None = None
) -> Parts:
    """Start a worker with the model and an adapter: the one in `weights`, that of the config, or a new one."""
    prefork.end_zygote()
    request = await asyncio.to_thread(_open_request, config, layout, run, folder, weights)
    tokenizer = prefork.load_tokenizer(config.model)
    stops = configured_stop_token_ids(config.model, tokenizer)
    worker, sampler, learner = await start_tunix(
        request, tokenizer, config.run.threads, config.training.max_off_policy_steps + 2
    )
    return Parts(sampler, learner, with_configured_stops(stops, config), worker=worker)


def _open_request(
    config: RunConfig, layout: Layout, run: str, folder: Path, weights: Path | None
) -> Open:
    if weights is not None:
        model = config.model.model_copy(update={"adapter": str(weights), "adapter_revision": None})
        config = config.model_copy(update={"model": model})
    shape, layers = _starting_adapter(config)
    start_folder = adapter_folder(config.model)
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
        start=None if start_folder is None else str(start_folder),
        described=shape.to_json(),
        run=run,
        publish_folder=str(folder),
        slots=layout.slots,
        key_length=layout.key_length,
        max_tokens=layout.max_tokens_per_microbatch,
    )


def _starting_adapter(config: RunConfig) -> tuple[Any, tuple[str, ...]]:
    """The config of the initial adapter, and the model's layers that have one."""
    assert config.lora is not None, "the config refuses full fine-tuning"
    check_adapter(config.model, config.lora)
    shape = starting_config(config.model, config.lora)
    leave_out_pictures(config.model, shape)
    return shape, tuple(meta_adapter(config.model, shape).layers)


async def _start_tinker(config: AnyConfig, layout: Layout, run: str, folder: Path) -> Parts:
    """Sampler and learner of a session with the service; its model is made when it is first needed, or from a checkpoint."""
    prefork.end_zygote()
    apply_layout(layout)
    assert config.lora is not None, "the config refuses full fine-tuning"
    lag, stops = 0, ()
    tokenizer = prefork.load_tokenizer(config.model)
    if isinstance(config, RunConfig):
        lag = config.training.max_off_policy_steps
        stops = with_configured_stops(_end_token(tokenizer), config)
    service = await asyncio.to_thread(Service, config.model, run)
    capabilities.check(config, service.capabilities)
    published: dict[str, Any] = {}
    learner = TinkerLearner(
        service, config.lora, config.training.seed, run, folder, published, lag + 2
    )
    return Parts(TinkerSampler(service, tokenizer, published), learner, stops, service=service)


async def _serve_tinker(config: RunConfig, layout: Layout, weights: Path | None) -> ServingParts:
    """A sampler of saved weights of the service; None: of the config's own policy."""
    prefork.end_zygote()
    apply_layout(layout)
    tokenizer = prefork.load_tokenizer(config.model)
    service = await asyncio.to_thread(Service, config.model, "evaluation")
    sampler = TinkerSampler(service, tokenizer, {})
    try:
        await sampler.serve(weights)
    except BaseException:
        service.close()
        raise
    stops = with_configured_stops(_end_token(tokenizer), config)
    return ServingParts(sampler, stops, service=service)


def _end_token(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end token, if it has one. The service knows the model's own stop tokens."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
