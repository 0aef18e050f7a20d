"""Finds settings in a run's config that are incompatible with `model.backend: tunix` or `model.backend: unsloth`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groupwise.core.settings.schema import Conflict

BACKEND = "model.backend"
TRANSFORMERS = "Leave model.backend out to train with torch"


def tunix_rl_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig` with Tunix."""
    if config.lora is None:
        yield Conflict(
            f"lora is null, but the backend tunix trains adapters. Leave lora out. {TRANSFORMERS}.",
            ("lora", BACKEND),
        )
    elif config.lora.dropout:
        yield Conflict(
            f"lora.dropout is {config.lora.dropout}, but the backend tunix has none. Leave it out.",
            ("lora.dropout", BACKEND),
        )
    if config.model.trust_remote_code:
        yield Conflict(
            "model.trust_remote_code has no effect with the backend tunix, which has models of its own. Leave it out.",
            ("model.trust_remote_code", BACKEND),
        )
    for key in ("server", "profile"):
        if (value := getattr(config.run, key)) is not None:
            yield Conflict(
                f"run.{key} is {value}, which has no effect with the backend tunix: a worker in an environment of its own computes. "
                "Leave one of the two out.",
                (f"run.{key}", BACKEND),
            )
    if (config.run.processes or 1) > 1:
        yield Conflict(
            f"run.processes is {config.run.processes}, but the backend tunix divides its work over devices: model.mesh. Leave it out.",
            ("run.processes", BACKEND),
        )
    if getattr(config.algorithm, "kl_target", None) is not None:
        yield Conflict(
            "algorithm.kl_target changes beta at each step, for which the backend tunix would compile the loss anew. Set a fixed "
            "algorithm.beta.",
            ("algorithm.kl_target", BACKEND),
        )


def tunix_sft_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.sft_config.SftConfig` with Tunix."""
    yield Conflict(
        f"The backend tunix trains in groupwise rl and in notebooks, not supervised. {TRANSFORMERS}, and start from its adapter "
        "with model.adapter.",
        (BACKEND,),
    )


def unsloth_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig`, or a `groupwise.training.sft_config.SftConfig`, with Unsloth."""
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
    keys = (  # keys that make other processes compute, with their usual value
        ("run.server", config.run.server, None),
        ("run.processes", config.run.processes, 1),
        ("distributed.learners", config.distributed.learners, 1),
        ("distributed.samplers", getattr(config.distributed, "samplers", 0), 0),
    )
    for key, value, default in keys:
        if (value or default) != default:
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
