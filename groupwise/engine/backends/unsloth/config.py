"""Finds the parts of a run's config that do not go with `model.backend: unsloth`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groupwise.core.settings.schema import Conflict

BACKEND = "model.backend"


def conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig`, or a `groupwise.training.sft_config.SftConfig`, with that backend."""
    if config.lora is None:
        yield Conflict(
            "lora is null, but the backend unsloth trains adapters. Leave lora out, or leave model.backend out to train all weights.",
            ("lora", BACKEND),
        )
    elif config.lora.dropout:
        yield Conflict(
            f"lora.dropout is {config.lora.dropout}, which Unsloth computes without its own kernels, and sampler and learner would see "
            "other policies. Leave it out.",
            ("lora.dropout", BACKEND),
        )
    for key, value, usual in _several(config):
        if (value or usual) != usual:
            yield Conflict(
                f"{key} is {value}, but with the backend unsloth one process samples and learns. Leave one of the two out.",
                (key, BACKEND),
            )
    if (sampler := getattr(config, "sampler", None)) is not None and sampler.enforce_eager:
        yield Conflict(
            "sampler.enforce_eager has no effect with the backend unsloth, which samples in its own way. Leave it out.",
            ("sampler.enforce_eager", BACKEND),
        )
    if sampler is not None and sampler.vllm_python is not None and config.model.load_in_8bit:
        yield Conflict(
            "model.load_in_8bit is true, and the vLLM of sampler.vllm_python holds weights in 16 or in 4 bits, so that it would sample "
            "from another policy. Set load_in_4bit instead, or leave one of the two out.",
            ("model.load_in_8bit", "sampler.vllm_python"),
        )


def _several(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Keys that have other processes compute, with their usual value."""
    yield "run.server", config.run.server, None
    yield "run.processes", config.run.processes, 1
    yield "distributed.learners", config.distributed.learners, 1
    yield "distributed.samplers", getattr(config.distributed, "samplers", 0), 0
