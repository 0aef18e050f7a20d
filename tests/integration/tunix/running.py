"""Parts of small models, by Tunix and by torch, and rows to learn from."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise import build, machine_layout
from groupwise.build import Parts
from groupwise.config import RunConfig, load_config
from groupwise.types import OptimiserParams, Row
from tests.tunix_models import model_of

STEP = OptimiserParams(learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5)


def config_of(
    family: str,
    backend: str,
    start: str | None = None,
    mesh: tuple[int, int] | None = None,
    layers: int | None = None,
) -> RunConfig:
    given: dict[str, Any] = {
        "model": {
            "name": str(model_of(family, layers)),
            "backend": backend,
            "dtype": "float32",
            "adapter": start,
            **({} if mesh is None else {"mesh": mesh}),
        },
        "lora": {"r": 4, "alpha": 8},
        "sampler": {"slots": 16, "max_completion_length": 24},
        "training": {"seed": 1},
        "run": {} if backend == "tunix" else {"processes": 1},
    }
    return load_config(given).config


def parts_of(config: RunConfig, folder: Path, longest_prompt: int = 40) -> Parts:
    layout = machine_layout.choose_layout(config, longest_prompt)
    return asyncio.run(build.start_training(config, layout, "run", folder))


def rows_of(chance: random.Random, count: int, *, reference: bool = False) -> list[Row]:
    """Rows of many lengths, with tokens that teach and that do not, at several temperatures."""
    found: list[Row] = []
    for number in range(count):
        length = chance.randint(1, 22)
        ids = tuple(chance.randrange(2, 100) for _ in range(length))
        row = Row(
            prompt_ids=tuple(chance.randrange(2, 100) for _ in range(chance.randint(1, 38))),
            completion_ids=ids,
            mask=tuple(int(chance.random() < 0.8) for _ in ids),
            sampling_logprobs=tuple(-chance.uniform(2, 6) for _ in ids),
            advantage=chance.uniform(-1, 1),
            scale=1 / length,
            temperature=(1.0, 0.7, 1.3)[number % 3],
            rollout=(number, 0),
        )
        if reference:
            logprobs = tuple(-chance.uniform(2, 6) for _ in ids)
            row = replace(row, reference_logprobs=logprobs, proximal_logprobs=row.sampling_logprobs)
        found.append(row)
    return found


def flat(values: Any) -> list[float]:
    return [each for row in values for each in row]
