"""Makes a worker: the parts that a process has, whether it is this one, the zygote of ranks, or one of several with a model each.

`groupwise.training.assembly.processes` decides which process makes which kind. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.engine.backends.unsloth import library
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.worker_state import AdapterHost, WorkerState
from groupwise.engine.learner.collective import ProcessGroupGradientSum
from groupwise.engine.learner.replicas import SharedMemoryGradientSum
from groupwise.engine.learner.teacher import Teacher
from groupwise.engine.learner.teacher_weights import average_teacher, model_teacher
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel
from groupwise.engine.models.adapters import (
    adapter_folder,
    check_adapter,
    starting_config,
    warn_of_other_base,
)
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.load import load_base, load_model, stop_token_ids
from groupwise.engine.models.lora import AdaptedModel, read_adapter
from groupwise.engine.models.lora_config import CONFIG, new_lora_config, read_lora_config
from groupwise.engine.models.machine import give_back_memory
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.engine.models.native.ready import ready_to_learn
from groupwise.engine.models.native.weights import native_model, write_weight_caches
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.servers.local_policy import TorchPolicy
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter, ServedModel
from groupwise.training.assembly.prepare import needs_reference, with_configured_stops
from groupwise.training.config import RunConfig, load_config
from groupwise.training.placement import Layout, apply_layout
from groupwise.training.sft_config import load_sft_config

if TYPE_CHECKING:
    from groupwise.core.types import Sampler
    from groupwise.engine.distributed.multi_adapter import NewModel
    from groupwise.engine.learner.engine import LearnerEngine
    from groupwise.training.assembly.parts import Kind
    from groupwise.training.placement import AnyConfig


def make_worker_from_json(
    kind: Kind, config: Mapping[str, Any], layout: Mapping[str, Any], **arguments: Any
) -> WorkerState:
    """The factory that the zygote calls."""
    read = load_sft_config if kind == "supervised" else load_config
    worker = _make_worker(kind, read(config).config, Layout(**layout), **arguments)
    give_back_memory()
    return worker


def make_worker_here(kind: Kind, config: Any, layout: Layout, **arguments: Any) -> WorkerState:
    """The same for a layout of one process."""
    worker = _make_worker(kind, config, layout, **arguments)
    write_weight_caches()  # now: later this process may change its weights
    return worker


def _make_worker(kind: Kind, config: Any, layout: Layout, **arguments: Any) -> WorkerState:
    with explaining_out_of_memory("making the model ready"):
        return _MAKERS[kind](config, layout, **arguments)


def _make_training(config: RunConfig, layout: Layout, run: str, folder: str) -> WorkerState:
    """Build sampler and learner in this process. It may be the zygote, which must have only one thread until it has forked the ranks."""
    check_adapter(config.model, config.lora)
    apply_layout(layout)
    tokenizer = load_tokenizer(config.model)
    device, sharded = _full_model_device(layout), layout.weight_shards > 1
    model = _load_trained_model(config, layout, device)
    stops = stop_token_ids(model, tokenizer)
    learner_weights: Any
    if config.lora:
        learner_weights = _trained_adapter(config, model)
        sampler_weights = ServedAdapter(learner_weights.adapted)
    else:  # the sampler needs its own copy of all weights
        served = load_model(config.model, layout.dtype, device)
        if sharded:
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
        with_configured_stops(stops, config),
        learner_weights,
        replicas,
        local_policy=TorchPolicy(sampler_weights) if samples_on_servers else None,
        adapter_host=_adapter_host(config, layout, learner_weights.adapted, tokenizer)
        if config.lora is not None and config.model.backend != "unsloth" and not sharded
        else None,  # further models can be added to the base of an adapter's training
    )


def _make_learning(config: AnyConfig, layout: Layout, run: str, folder: str) -> WorkerState:
    """Build a learner without a sampler."""
    check_adapter(config.model, config.lora)
    apply_layout(layout)
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
    check_adapter(config.model, config.lora)
    apply_layout(layout)
    tokenizer = load_tokenizer(config.model)
    model = load_base(config.model, layout.dtype, layout.device)
    sampler_weights = ServedModel(model)
    if config.lora:
        shape = starting_config(config.model, config.lora)
        sampler_weights = ServedAdapter(AdaptedModel(model, shape))
    stops = with_configured_stops(stop_token_ids(model, tokenizer), config)
    return WorkerState(
        layout.threads_each,
        _build_sampler(config, layout, sampler_weights, tokenizer),
        stop_token_ids=stops,
    )


def _make_serving(config: RunConfig, layout: Layout, weights: str | None) -> WorkerState:
    folder = adapter_folder(config.model) if weights is None else Path(weights)
    apply_layout(layout)
    tokenizer = load_tokenizer(config.model)
    model = _load_model(config, layout, layout.device)
    stops = with_configured_stops(stop_token_ids(model, tokenizer), config)
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
    apply_layout(layout)
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
        stop_token_ids=with_configured_stops(stop_token_ids(model, tokenizer), config),
        adapter_host=_adapter_host(config, layout, adapted_model, tokenizer),
    )


_MAKERS: dict[Kind, Callable[..., WorkerState]] = {
    "training": _make_training,
    "learning": _make_learning,
    "sampling": _make_sampling,
    "supervised": _make_learning,
    "serving": _make_serving,
    "base": _make_base,
}


def _adapter_host(
    config: RunConfig, layout: Layout, adapted_model: Any, tokenizer: Any
) -> AdapterHost:
    """Build the host that later creates models over this base."""

    def make_weights(adapted_model: Any, name: str, spec: NewModel) -> tuple[Any, Any]:
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

    make_sampler = partial(_build_sampler, config, layout, tokenizer=tokenizer)
    return AdapterHost(adapted_model, make_weights, make_learner, make_sampler)


def _build_learner(
    config: AnyConfig,
    layout: Layout,
    learner_weights: Any,
    run: str,
    folder: str,
    seed: int,
    replicas: Any = None,
) -> TorchLearner:
    only_rl: dict[str, Any] = {}
    if isinstance(config, RunConfig):
        only_rl = {
            "routing_replay": config.sampler.routing_replay,
            "keep_publications": config.training.max_off_policy_steps + 2,
            "make_teacher": _teacher_factory(config, layout, learner_weights),
        }
    own_engine = None
    if config.model.backend == "unsloth":
        from groupwise.engine.backends.unsloth.model import UnslothEngine

        own_engine = UnslothEngine(learner_weights)
    return TorchLearner(
        learner_weights,
        engine=own_engine,
        run=run,
        publish_folder=Path(folder),
        max_tokens_per_microbatch=layout.max_tokens_per_microbatch,
        seed=seed,
        gradient_checkpointing=config.training.gradient_checkpointing,
        packing=config.training.packing,
        replicas=replicas,
        shard_device=layout.device if layout.weight_shards > 1 else None,
        **only_rl,
    )


def _teacher_factory(
    config: RunConfig, layout: Layout, learner_weights: Any
) -> Callable[[LearnerEngine], Teacher] | None:
    """Makes the teacher of a distillation that the learner's process computes; None without one."""
    settings = config.teacher
    if settings is None or settings.type == "endpoint":
        return None
    packing = config.training.packing
    if settings.type == "model":
        model_config = settings.model_config_of(config.model)
        dtype = prefork.choose_dtype(model_config, False, layout.device)
        return lambda _: model_teacher(model_config, dtype, layout.device, packing=packing)
    if settings.weights == "ema":
        rate, dtype = settings.ema_rate, layout.dtype
        return lambda _: average_teacher(learner_weights, rate, dtype, packing=packing)
    return lambda engine: Teacher(engine, "reference" if settings.weights == "start" else "policy")


def _build_sampler(
    config: RunConfig, layout: Layout, sampler_weights: Any, tokenizer: Any
) -> Sampler:
    if config.sampler.engine != "torch":
        from groupwise.training.assembly.servers import server_sampler

        return server_sampler(config, layout, TorchPolicy(sampler_weights), tokenizer)
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


def _load_model(config: AnyConfig, layout: Layout, device: str) -> Any:
    """Load the model with the loader of its backend."""
    if config.model.backend == "unsloth":
        return library.load(config.model, layout.dtype, layout.key_length or None)
    return load_base(config.model, layout.dtype, device)


def _load_trained_model(config: AnyConfig, layout: Layout, device: str) -> Any:
    """Load the model for its training: weights that are trained are float32, whatever format they are computed in.

    Modules whose weights are trained or divided are those of transformers.
    """
    if config.lora is None:
        return load_model(config.model, "float32", device)
    if layout.weight_shards > 1:
        return load_model(config.model, layout.dtype, device)
    return _load_model(config, layout, device)


def _trained_adapter(config: AnyConfig, model: Any) -> Any:
    """The adapter to train: a new one, or the one in `model.adapter`."""
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
    return AdaptedModel(model, shape)


def _trained_model(config: AnyConfig, layout: Layout, model: Any) -> TrainedModel:
    """The trained full weights, with a frozen copy as reference if the KL penalty or the teacher needs it."""
    device = _full_model_device(layout)
    reference = None
    if isinstance(config, RunConfig) and needs_reference(config):
        reference = _load_trained_model(config, layout, device)
    return TrainedModel(model, reference, layout.dtype)


def _full_model_device(layout: Layout) -> str:
    """Device on which a learner reads the whole model; the CPU if the weights are divided, because one GPU may be too small."""
    return layout.device if layout.weight_shards == 1 else "cpu"


def _replicas(layout: Layout, learner_weights: Any) -> Any:
    """The link that combines the gradients of all learners; None if only one process learns."""
    if layout.learning_processes == 1:
        return None
    if layout.weight_shards > 1:
        from groupwise.engine.learner.fsdp import FsdpGradientSum

        return FsdpGradientSum()
    if layout.separate_models:
        return ProcessGroupGradientSum()
    return SharedMemoryGradientSum(layout.processes, [*learner_weights.parameters().values()])
