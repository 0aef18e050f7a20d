"""The `distributed` section: how many processes with a model of their own do a run's work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from groupwise.core.settings.schema import Conflict, Strict, setting


class DistributedConfig(Strict):
    """Several GPUs, or several machines."""

    refused: ClassVar[Mapping[str, str]] = {
        "samplers": "a supervised run samples nothing",
        "sampler_timeout": "a supervised run has no samplers to wait for",
    }

    learners: int = setting(
        1,
        "Processes that learn, each on a GPU of its own: each samples its part of the completions, and torch.distributed adds up "
        "their gradients. Under torchrun this is the number of its processes; otherwise the run starts them on this machine. Other "
        "numbers change the last bits.",
        on_resume="warn",
        ge=1,
    )
    strategy: Literal["ddp", "fsdp2"] = setting(
        "ddp",
        "How the weights are divided. ddp: each learner holds all of them. fsdp2: each holds a part, and layers are gathered one by "
        "one, so that a model may be larger than a GPU; this is slower, and groupwise rl then needs samplers or servers, which hold "
        "the whole model.",
        on_resume="warn",
    )


SAMPLER_TIMEOUT = 300.0
"""Seconds. Longer than any single uninterrupted operation of a sampler, such as reading weights or computing the prompts of a step."""


class SampledDistributedConfig(DistributedConfig):
    """Several GPUs, or several machines, where there is something to sample."""

    refused: ClassVar[Mapping[str, str]] = {}

    samplers: int = setting(
        0,
        "Processes that only sample, on the GPUs of this machine after the learners'. If no GPU is left and "
        "training.max_off_policy_steps is at least 1, they use the learners' GPUs. Learners then only learn, and with "
        "training.max_off_policy_steps both work at the same time. A sampler that ends is replaced. 0: learners sample.",
        on_resume="warn",
        ge=0,
    )
    sampler_timeout: float = setting(
        SAMPLER_TIMEOUT,
        "Seconds without a sign of life after which a sampler is killed and replaced. A sampler gives one after each token, so this must "
        "be longer than its longest single piece of work: reading weights, or computing prompts.",
        on_resume="free",
        gt=0,
    )


def distributed_conflicts(config: Any, rows: int, keys: tuple[str, ...]) -> Iterator[Conflict]:
    """Yield conflicts of `distributed.learners` and `distributed.samplers` with the rest of a training config.

    `rows` is the number of rows in a step; `keys` are the config keys whose product it is.
    """
    learners: int = config.distributed.learners
    samplers: int = getattr(config.distributed, "samplers", 0)
    if learners > 1:
        yield from _count_conflicts(config, "distributed.learners", learners, rows, keys)
    if samplers > 0:
        yield from _count_conflicts(config, "distributed.samplers", samplers, rows, keys)
    elif getattr(config.distributed, "sampler_timeout", SAMPLER_TIMEOUT) != SAMPLER_TIMEOUT:
        yield Conflict(
            f"distributed.sampler_timeout is {config.distributed.sampler_timeout:g}, for samplers, but distributed.samplers is 0. Give the "
            "run samplers, or leave distributed.sampler_timeout out.",
            ("distributed.sampler_timeout", "distributed.samplers"),
        )
    if config.distributed.strategy == "fsdp2":
        samples_here = hasattr(config, "sampler") and config.sampler.engine == "torch"
        yield from _fsdp_conflicts(learners, alone=samples_here and samplers == 0)
    processes, threads = learners + samplers, config.run.threads
    if processes > 1 and threads is not None and threads < processes:
        settings = [
            f"distributed.learners is {learners}",
            *[f"distributed.samplers is {samplers}"][:samplers],
        ]
        yield Conflict(
            f"{' and '.join(settings)}, but run.threads is {threads}: the threads are those of all processes together, and each needs one. "
            f"Set run.threads to {processes} or more, or leave it out.",
            ("distributed.learners", *["distributed.samplers"][:samplers], "run.threads"),
        )


def _fsdp_conflicts(learners: int, *, alone: bool) -> Iterator[Conflict]:
    """`alone`: the learners would have to sample."""
    if learners == 1:
        yield Conflict(
            "distributed.strategy is fsdp2, which divides weights among several learners, but distributed.learners is 1. Raise it, or "
            "leave distributed.strategy out.",
            ("distributed.strategy", "distributed.learners"),
        )
    if alone:
        yield Conflict(
            "distributed.strategy is fsdp2, but learners that hold a part of the model cannot sample, and distributed.samplers is 0. Give "
            "the run samplers, or servers (sampler.engine: vllm), or leave distributed.strategy out.",
            ("distributed.strategy", "distributed.samplers"),
        )


_VERBS = {"distributed.learners": "learn", "distributed.samplers": "draw"}


def _count_conflicts(
    config: Any, key: str, count: int, rows: int, keys: tuple[str, ...]
) -> Iterator[Conflict]:
    if count > rows:
        yield Conflict(
            f"{key} is {count}, but a step has only {rows} rows ({' × '.join(keys)}), so that some would never {_VERBS[key]} "
            "anything. Lower the one, or raise the others.",
            (key, *keys),
        )
    if config.run.processes is not None:
        yield Conflict(
            f"{key} is {count} and run.processes is {config.run.processes}: either so many processes have a model each, or "
            "so many share one. Leave one of the two out.",
            (key, "run.processes"),
        )
    if config.run.server is not None:
        yield Conflict(
            f"{key} is {count}, which has no effect where run.server computes. Leave one of the two out.",
            (key, "run.server"),
        )
    if config.model.backend == "tunix":
        yield Conflict(
            f"{key} is {count}, but the backend tunix divides its work itself: model.mesh. Leave it out.",
            (key, "model.backend"),
        )
    if config.model.backend == "tinker":
        yield Conflict(
            f"{key} is {count}, which has no effect where a Tinker service computes. Leave it out.",
            (key, "model.backend"),
        )
