"""The `scale` section: how many processes with a model of their own do a run's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from groupwise.settings.schema import Conflict, Strict, setting


class ScaleConfig(Strict):
    """Several GPUs, or several machines."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"samplers"})

    learners: int = setting(
        1,
        "Processes that each hold the whole model, one on each GPU, sample their part of the completions, and add up their gradients by "
        "torch.distributed. Under torchrun as many as it starts; else the run starts them on this machine. Other numbers change the last "
        "bits.",
        on_resume="warn",
        ge=1,
    )


def scale_conflicts(config: Any, rows: int, keys: tuple[str, ...]) -> Iterator[Conflict]:
    """What does not go together with several learners in a config of a training whose steps have so many rows, by these keys."""
    learners: int = config.scale.learners
    if learners == 1:
        return
    here = "scale.learners"
    if learners > rows:
        yield Conflict(
            f"scale.learners is {learners}, but a step has only {rows} rows ({' × '.join(keys)}), so that some would never learn "
            "anything. Lower the one, or raise the others.",
            (here, *keys),
        )
    if config.run.processes is not None:
        yield Conflict(
            f"scale.learners is {learners} and run.processes is {config.run.processes}: either so many processes have a model each, or "
            "so many share one. Leave one of the two out.",
            (here, "run.processes"),
        )
    if config.run.threads is not None and config.run.threads < learners:
        yield Conflict(
            f"scale.learners is {learners}, but run.threads is {config.run.threads}: the threads are those of all processes together, and "
            f"each needs one. Set run.threads to {learners} or more, or leave it out.",
            (here, "run.threads"),
        )
    if config.run.server is not None:
        yield Conflict(
            f"scale.learners is {learners}, which has no effect where run.server computes. Leave one of the two out.",
            (here, "run.server"),
        )
    if config.model.backend != "transformers":
        yield Conflict(
            f"scale.learners is {learners}, but the backend {config.model.backend} divides its work itself: model.mesh. Leave it out.",
            (here, "model.backend"),
        )
