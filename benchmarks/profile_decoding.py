"""What decoding a token spends its time on: `python -m benchmarks.profile_decoding --store`.

One process with one thread decodes half of W1 (`benchmarks.work`), 16 rows, as each of two processes does. The sampler's own parts are
timed as they are called: `products` of the layers with those of the adapter, the `head`, `attention`, `drawing`, and the `rest`, which is
norms, SwiGLU and Python. Prints milliseconds for one token of all rows: the median of the repetitions with their range. Prompts are
left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from benchmarks.step import RESULTS, config_of, machine, quick_dtype, requests, slug, spread
from benchmarks.work import W1, Workload
from groupwise.core.types import GroupRequest, Sampler
from groupwise.engine.models.native.linear import Linear
from groupwise.engine.sampler.native.engine import CompiledAttention
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import training_parts

HALF = Workload(W1.prompts[::2], W1.members, W1.new_tokens)
PARTS: tuple[str, ...] = ("products", "head", "attention", "drawing", "rest")

Token = dict[str, float]
"""Seconds of each part of decoding one token of all rows."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=quick_dtype())
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    how = {"threads": 1, "processes": 1, "quantization": given.quantization}
    config = config_of(HALF, given.dtype, **how)
    layout = placement.choose_layout(config, longest_prompt=HALF.longest)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(training_parts(config, layout, "bench", Path(folder))) as parts,
    ):
        found = asyncio.run(measured(parts, given.repetitions))
    for part, each in found.items():
        print(f"  {part:<10} {spread(each)} ms")
    if given.store:
        described = machine()
        file = (
            RESULTS / f"profile-decoding-{slug(described)}-{given.quantization or given.dtype}.json"
        )
        kept = {"machine": described, "milliseconds": found}
        file.write_text(json.dumps(kept, indent=2) + "\n")
        print(f"stored in {file}")


async def measured(parts: Parts, repetitions: int) -> dict[str, list[float]]:
    """Milliseconds of each part, and of all, in every repetition after one that is not counted."""
    await parts.sampler.load(await parts.learner.publish(0))
    tokens = [await decoded(parts.sampler, requests(HALF, n)) for n in range(repetitions + 1)][1:]
    found = {part: [1000 * token[part] for token in tokens] for part in PARTS}
    return {**found, "whole": [1000 * sum(token.values()) for token in tokens]}


async def decoded(sampler: Sampler, asked: Sequence[GroupRequest]) -> Token:
    """The mean token of decoding these groups beside each other."""
    with timed() as tokens:
        await asyncio.gather(*map(sampler.generate, asked))
    return {part: fmean(token[part] for token in tokens) for part in PARTS}


@contextmanager
def timed() -> Iterator[list[Token]]:
    """Every token that a sampler of this process decodes meanwhile, in turn."""
    tokens: list[Token] = []
    now: Token | None = None

    def part(function: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
        def run(owner: Any, *arguments: Any) -> Any:
            begun = time.perf_counter()
            found = function(owner, *arguments)
            if now is not None:  # else it is of a prompt
                now[name(owner)] += time.perf_counter() - begun
            return found

        return run

    def whole(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(owner: Any) -> None:
            nonlocal now
            begun, token = time.perf_counter(), dict.fromkeys(PARTS, 0.0)
            now = token
            function(owner)
            now = None
            token["rest"] = time.perf_counter() - begun - sum(token.values())
            tokens.append(token)

        return run

    with ExitStack() as replaced:
        for owner, name, by in (
            (Linear, "few", lambda linear: "products" if linear.parts else "head"),
            (CompiledAttention, "__call__", lambda _: "attention"),
            (TorchSampler, "_draw_tokens", lambda _: "drawing"),
        ):
            replaced.enter_context(patch.object(owner, name, part(getattr(owner, name), by)))
        step = "_decode_one_token"
        replaced.enter_context(patch.object(TorchSampler, step, whole(getattr(TorchSampler, step))))
        yield tokens


if __name__ == "__main__":
    main()
