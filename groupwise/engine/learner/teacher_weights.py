"""Makes teachers that are computed in the learner's process: another model, or a moving average of the policy's weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groupwise.engine.learner.native.engine import NativeEngine
from groupwise.engine.learner.teacher import MovingAverage, Teacher
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel
from groupwise.engine.models.adapters import adapter_folder, starting_config, warn_of_other_base
from groupwise.engine.models.config import Dtype, LoraConfig, ModelConfig
from groupwise.engine.models.load import load_base
from groupwise.engine.models.lora import AdaptedModel, read_adapter
from groupwise.engine.models.lora_config import AdapterConfig, read_lora_config
from groupwise.engine.models.native.weights import native_model

if TYPE_CHECKING:
    from groupwise.engine.learner.engine import LearnerEngine


def model_teacher(config: ModelConfig, dtype: Dtype, device: str, *, packing: bool) -> Teacher:
    """Another model, with its adapter if it has one."""
    model = load_base(config, dtype, device)
    folder = adapter_folder(config)
    weights: Any
    if folder is None:
        native, weights = native_model(model), TrainedModel(model)
        model.requires_grad_(False)
    else:
        warn_of_other_base(read_lora_config(folder), config, folder)
        adapted = AdaptedModel(model, _without_dropout(starting_config(config, LoraConfig())))
        weights = TrainedAdapter(adapted, seed=0, start=read_adapter(folder))
        native = weights.native()
    return Teacher(_engine(weights, native, packing=packing))


def average_teacher(trained: Any, rate: float, dtype: Dtype, *, packing: bool) -> Teacher:
    """A moving average of the trained weights: a second adapter over the same base, or a copy of the model. `dtype`: of products."""
    weights: Any
    if isinstance(trained, TrainedAdapter):
        shape = _without_dropout(trained.adapted.configs[trained.name])
        name = f"{trained.name}-teacher"
        weights = TrainedAdapter(trained.adapted, seed=0, name=name, config=shape)
        native = weights.native()
    else:
        weights, native = TrainedModel(copy.deepcopy(trained.model), dtype=dtype), None
    average, policy = weights.parameters(), trained.parameters()
    for parameter in average.values():
        parameter.requires_grad_(False)
    return Teacher(
        _engine(weights, native, packing=packing), average=MovingAverage(average, policy, rate)
    )


def _without_dropout(config: AdapterConfig) -> AdapterConfig:
    """A teacher takes no gradient, so that the dropout with which its adapter was trained never acts and must not slow it down."""
    return replace(config, lora_dropout=0.0)


def _engine(weights: Any, native: Any, *, packing: bool) -> LearnerEngine:
    if native is not None:
        return NativeEngine(native, weights, packing=packing, gradient_checkpointing=False)
    from groupwise.engine.learner.engine import TransformersEngine  # imports transformers

    return TransformersEngine(weights, packing=packing, gradient_checkpointing=False)
