"""Parts of small models, by Tunix and by torch, and rows to learn from."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.algorithms.registry import make
from groupwise.core.types import OptimiserParams, Row
from groupwise.engine.models.files import read_tensors, write_tensors
from groupwise.engine.models.lora_config import WEIGHTS
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import start_training
from groupwise.training.config import RunConfig, load_config
from tests.tunix_models import model_of

STEP = OptimiserParams(learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5)

LAYERS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma3": 6}
"""Of Gemma one in six attends to everything."""


def config_of(
    family: str,
    backend: str,
    start: str | None = None,
    mesh: tuple[int, int] | None = None,
    layers: int | None = None,
) -> RunConfig:
    given: dict[str, Any] = {
        "model": {
            "name": str(model_of(family, layers or LAYERS.get(family))),
            "backend": backend,
            "dtype": "float32",
            "adapter": start,
            **({} if mesh is None else {"mesh": mesh}),
        },
        "lora": {"r": 4, "alpha": 8},
        "sampler": {"max_num_seqs": 16, "max_completion_length": 24},
        "training": {"seed": 1},
        "run": {} if backend == "tunix" else {"processes": 1},
    }
    return load_config(given).config


def parts_of(config: RunConfig, folder: Path, longest_prompt: int = 40) -> Parts:
    layout = placement.choose_layout(config, longest_prompt)
    return asyncio.run(start_training(config, layout, "run", folder))


async def stirred(parts: Parts) -> None:
    """Leave the start, where B is zero, by an update."""
    rows = rows_of(random.Random(5), 6)
    await parts.learner.forward_backward(rows, make("dr_grpo", {}).loss_spec(), {"policy": 6.0})
    assert (await parts.learner.update(STEP)).applied


def start_of(family: str, folder: Path) -> str:
    """An adapter that is not zero, with one A for layers that are one weight in Tunix."""
    with closing(parts_of(config_of(family, "transformers"), folder)) as parts:
        asyncio.run(stirred(parts))
        path = asyncio.run(parts.learner.publish(0)).path
    file = Path(path) / WEIGHTS
    tensors = read_tensors(file)
    own = {as_one(name, family): tensor for name, tensor in tensors.items()}
    write_tensors({name: own[as_one(name, family)].clone() for name in tensors}, file)
    return path


def as_one(name: str, family: str) -> str:
    """The same for the A factors of layers that are one weight in Tunix's Gemma."""
    if family.startswith("gemma3") and name.endswith("lora_A.weight"):
        fused = ["k_proj", "v_proj", *(["q_proj"] if family == "gemma3-all-heads" else [])]
        for layer in fused:
            name = name.replace(layer, "fused")
    return name


def rows_of(rng: random.Random, count: int, *, reference: bool = False) -> list[Row]:
    """Rows of many lengths, with tokens that teach and that do not, at several temperatures."""
    found: list[Row] = []
    for number in range(count):
        length = rng.randint(1, 22)
        ids = tuple(rng.randrange(2, 100) for _ in range(length))
        row = Row(
            prompt_ids=tuple(rng.randrange(2, 100) for _ in range(rng.randint(1, 38))),
            completion_ids=ids,
            mask=tuple(int(rng.random() < 0.8) for _ in ids),
            sampling_logprobs=tuple(-rng.uniform(2, 6) for _ in ids),
            advantage=rng.uniform(-1, 1),
            scale=1 / length,
            temperature=(1.0, 0.7, 1.3)[number % 3],
            rollout=(number, 0),
        )
        if reference:
            logprobs = tuple(-rng.uniform(2, 6) for _ in ids)
            row = replace(row, reference_logprobs=logprobs, proximal_logprobs=row.sampling_logprobs)
        found.append(row)
    return found


def flat(values: Any) -> list[float]:
    return [each for row in values for each in row]
