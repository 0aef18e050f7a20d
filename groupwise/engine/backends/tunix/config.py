"""Finds the parts of a run's config that do not go with `model.backend: tunix`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groupwise.core.settings.schema import Conflict

BACKEND = "model.backend"
TRANSFORMERS = "Leave model.backend out to train with torch"


def rl_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.config.RunConfig` with that backend."""
    yield from _alike(config)
    if getattr(config.algorithm, "kl_target", None) is not None:
        yield Conflict(
            "algorithm.kl_target changes beta at each step, for which the backend tunix would compile the loss anew. Set a fixed "
            "algorithm.beta.",
            ("algorithm.kl_target", BACKEND),
        )


def sft_conflicts(config: Any) -> Iterator[Conflict]:
    """Conflicts of a `groupwise.training.sft_config.SftConfig` with that backend."""
    yield Conflict(
        f"The backend tunix trains in groupwise rl and in notebooks, not supervised. {TRANSFORMERS}, and start from its adapter "
        "with model.adapter.",
        (BACKEND,),
    )


def _alike(config: Any) -> Iterator[Conflict]:
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
