"""The `scale` section: how many processes with a model of their own do a run's work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from groupwise.core.settings.schema import Conflict, Strict, setting


class ScaleConfig(Strict):
    """Several GPUs, or several machines."""

    refused: ClassVar[Mapping[str, str]] = {
        "samplers": "a supervised run samples nothing",
        "patience": "a supervised run has no samplers to wait for",
    }

    learners: int = setting(
        1,
        "Processes that each hold the whole model, one on each GPU, sample their part of the completions, and add up their gradients by "
        "torch.distributed. Under torchrun as many as it starts; else the run starts them on this machine. Other numbers change the last "
        "bits.",
        on_resume="warn",
        ge=1,
    )
    strategy: Literal["ddp", "fsdp2"] = setting(
        "ddp",
        "Who holds the weights that learners compute with: ddp, each learner all of them; fsdp2, each a part, which is gathered layer by "
        "layer, so that a model may be larger than a GPU. Slower; in groupwise rl it needs samplers, which hold the model whole.",
        on_resume="warn",
    )


PATIENCE = 300.0
"""Longer than anything that a sampler does in one piece, as reading weights or computing the prompts of a step."""


class SampledScaleConfig(ScaleConfig):
    """Several GPUs, or several machines, where there is something to sample."""

    refused: ClassVar[Mapping[str, str]] = {}

    samplers: int = setting(
        0,
        "Processes that only sample, on the GPUs of this machine that come after the learners'. Learners then only learn, and with a "
        "training.lag both work at the same time. One that ends is replaced. 0: learners sample.",
        on_resume="warn",
        ge=0,
    )
    patience: float = setting(
        PATIENCE,
        "Seconds without a sign of life after which a sampler is killed and replaced. It gives one between any two tokens, so that this "
        "has to be longer than what it does in one piece: reading weights, computing prompts.",
        on_resume="free",
        gt=0,
    )


def scale_conflicts(config: Any, rows: int, keys: tuple[str, ...]) -> Iterator[Conflict]:
    """What does not go together with several processes of either kind in a config of a training whose steps have so many rows, by
    these keys."""
    learners: int = config.scale.learners
    samplers: int = getattr(config.scale, "samplers", 0)
    if learners > 1:
        yield from _conflicts(config, "scale.learners", learners, rows, keys)
    if samplers > 0:
        yield from _conflicts(config, "scale.samplers", samplers, rows, keys)
    elif getattr(config.scale, "patience", PATIENCE) != PATIENCE:
        yield Conflict(
            f"scale.patience is {config.scale.patience:g}, for samplers, but scale.samplers is 0. Give the run samplers, or leave "
            "scale.patience out.",
            ("scale.patience", "scale.samplers"),
        )
    if config.scale.strategy == "fsdp2":
        yield from _cannot_be_divided(
            learners, samplers if hasattr(config.scale, "samplers") else None
        )
    together, threads = learners + samplers, config.run.threads
    if together > 1 and threads is not None and threads < together:
        counted = [f"scale.learners is {learners}", *[f"scale.samplers is {samplers}"][:samplers]]
        yield Conflict(
            f"{' and '.join(counted)}, but run.threads is {threads}: the threads are those of all processes together, and each needs one. "
            f"Set run.threads to {together} or more, or leave it out.",
            ("scale.learners", *["scale.samplers"][:samplers], "run.threads"),
        )


def _cannot_be_divided(learners: int, samplers: int | None) -> Iterator[Conflict]:
    """`samplers`: None where nothing is sampled."""
    if learners == 1:
        yield Conflict(
            "scale.strategy is fsdp2, which divides weights among several learners, but scale.learners is 1. Raise it, or leave "
            "scale.strategy out.",
            ("scale.strategy", "scale.learners"),
        )
    if samplers == 0:
        yield Conflict(
            "scale.strategy is fsdp2, but learners that hold a part of the model cannot sample, and scale.samplers is 0. Give the run "
            "samplers, or leave scale.strategy out.",
            ("scale.strategy", "scale.samplers"),
        )


_WORK = {"scale.learners": "learn", "scale.samplers": "draw"}


def _conflicts(
    config: Any, here: str, count: int, rows: int, keys: tuple[str, ...]
) -> Iterator[Conflict]:
    if count > rows:
        yield Conflict(
            f"{here} is {count}, but a step has only {rows} rows ({' × '.join(keys)}), so that some would never {_WORK[here]} "
            "anything. Lower the one, or raise the others.",
            (here, *keys),
        )
    if config.run.processes is not None:
        yield Conflict(
            f"{here} is {count} and run.processes is {config.run.processes}: either so many processes have a model each, or "
            "so many share one. Leave one of the two out.",
            (here, "run.processes"),
        )
    if config.run.server is not None:
        yield Conflict(
            f"{here} is {count}, which has no effect where run.server computes. Leave one of the two out.",
            (here, "run.server"),
        )
    if config.model.backend == "tunix":
        yield Conflict(
            f"{here} is {count}, but the backend tunix divides its work itself: model.mesh. Leave it out.",
            (here, "model.backend"),
        )
