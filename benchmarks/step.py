"""Where the time of a training step goes: `python -m benchmarks.step`.

The work is fixed (W1): SmolLM2-135M-Instruct, LoRA of rank 16 on all linear layers, 4 prompts of 53, 73, 86 and 91 tokens × 8 completions
of exactly 48 new tokens, temperature 1, no KL, one update. Prompts are random tokens, so that nothing but the size of the work
matters. Prints seconds for each phase as the median of the repetitions with their range, and stores them as JSON with the name of
the machine. Seconds of different machines or busy ones do not compare; ratios within one run do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.work import ALPHA, LEARNING_RATE, MODEL, RANK, W1, Workload
from groupwise.algorithms.registry import make
from groupwise.core.types import (
    Completion,
    GroupRequest,
    Learner,
    OptimiserParams,
    Row,
    SamplingParams,
)
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import training_parts
from groupwise.training.config import RunConfig, load_config

VOCABULARY = 40_000
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--store", action="store_true", help="keep the result in benchmarks/results"
    )
    given = parser.parse_args()
    config = config_of(W1, given.dtype, given.threads, given.processes)
    layout = placement.choose_layout(config, longest_prompt=W1.longest)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(training_parts(config, layout, "bench", Path(folder))) as parts,
    ):
        phases = asyncio.run(measure(parts, given.repetitions))
        peak = parts.peak_memory(layout.device)
    result = {
        "machine": machine(),
        "layout": asdict(layout),
        "seconds": phases,
        "peak_rss_mib": None if peak is None else peak >> 20,
    }
    show(result)
    if given.store:
        path = RESULTS / f"step-{slug(result['machine'])}-{layout.dtype}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(
            f"\nstored in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
        )


async def measure(parts: Parts, repetitions: int, work: Workload = W1) -> dict[str, list[float]]:
    """Seconds of each phase in each repetition, after one that is not counted."""
    phases: dict[str, list[float]] = {
        "sampling": [],
        "learning": [],
        "update": [],
        "publication": [],
    }
    await parts.sampler.load(await parts.learner.publish(0))
    for repetition in range(repetitions + 1):
        taken = await one_step(parts, requests(work, repetition), repetition)
        if repetition:
            for name, seconds in phases.items():
                seconds.append(taken[name])
    phases["step"] = [sum(each) for each in zip(*phases.values(), strict=True)]
    return phases


async def one_step(
    parts: Parts, requests: Sequence[GroupRequest], repetition: int
) -> dict[str, float]:
    """Seconds of each phase of one step, and how many `tokens` it sampled."""
    marks = [time.perf_counter()]
    groups = await asyncio.gather(*map(parts.sampler.generate, requests))
    marks.append(time.perf_counter())
    rows = rows_of(requests, groups)
    await learn(parts.learner, rows)
    marks.append(time.perf_counter())
    await parts.learner.update(OptimiserParams(learning_rate=LEARNING_RATE))
    marks.append(time.perf_counter())
    await parts.sampler.load(await parts.learner.publish(repetition + 1))
    marks.append(time.perf_counter())
    names = ("sampling", "learning", "update", "publication")
    taken = {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}
    return {**taken, "tokens": float(sum(len(row.completion_ids) for row in rows))}


def rows_of(requests: Sequence[GroupRequest], groups: Sequence[Sequence[Completion]]) -> list[Row]:
    """What is learnt from the completions; of each group, every other one was good."""
    return [
        Row(
            asked.prompt_ids,
            found.token_ids,
            (1,) * len(found.token_ids),
            found.logprobs,
            (-1.0) ** index,
            1.0,
        )
        for asked, group in zip(requests, groups, strict=True)
        for index, found in enumerate(group)
    ]


async def learn(learner: Learner, rows: Sequence[Row]) -> None:
    """Add the gradient of these rows."""
    tokens = float(sum(len(row.completion_ids) for row in rows))
    await learner.forward_backward(rows, make("dr_grpo", {}).loss_spec(), {"policy": tokens})


def config_of(
    work: Workload,
    dtype: str,
    threads: int | None = None,
    processes: int | None = None,
    model: str = MODEL,
    quantization: str | None = None,
) -> RunConfig:
    """A run with the sizes of the work, which samples all its completions beside each other."""
    return load_config(
        {
            "model": {"name": model, "dtype": dtype},
            "lora": {"r": RANK, "alpha": ALPHA},
            "sampler": {
                "max_completion_length": work.new_tokens,
                "quantization": quantization,
            },
            "training": {
                "prompts_per_step": len(work.prompts),
                "num_generations": work.members,
                "learning_rate": LEARNING_RATE,
            },
            "run": {"threads": threads, "processes": processes},
        }
    ).config


def request(
    work: Workload, draw: int, prompt: Sequence[int], repetition: int, stops: tuple[int, ...] = ()
) -> GroupRequest:
    """A group of the work, with other seeds in each repetition; with natural lengths, `stops` end a completion."""
    rng = random.Random(f"{repetition}/{draw}")
    seeds = tuple(rng.getrandbits(63) for _ in range(work.members))
    params = SamplingParams(work.new_tokens, stop_token_ids=stops if work.natural else ())
    return GroupRequest(draw, tuple(prompt), seeds, params)


def requests(work: Workload, repetition: int) -> list[GroupRequest]:
    """The groups of one step, for random prompts."""
    return [
        request(work, draw, random_prompt(draw, length, repetition), repetition)
        for draw, length in enumerate(work.prompts)
    ]


def random_prompt(draw: int, length: int, repetition: int) -> list[int]:
    """Random tokens of the given length, other ones in each repetition."""
    rng = random.Random(f"prompt {repetition}/{draw}")
    return [rng.randrange(10, VOCABULARY) for _ in range(length)]


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    print(f"{result['machine']['processor']}, {result['layout']}")
    for name, seconds in result["seconds"].items():
        print(f"  {name:<12} {spread(seconds)} s")
    print(
        f"  sampled {W1.sampled / median(result['seconds']['sampling']):.0f} tokens/s, peak {result['peak_rss_mib']} MiB"
    )


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{median(values):6.2f}  ({min(values):.2f} … {max(values):.2f})"


def times(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times as fast `ours` are by their medians, and the range of the pairs that were measured one after the other."""
    pairs = [other / own for own, other in zip(ours, theirs, strict=True)]
    return f"{median(theirs) / median(ours):.2f} times ({min(pairs):.2f} … {max(pairs):.2f})"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    from groupwise.engine.models.machine import describe_processor

    return {
        "processor": describe_processor("cpu") + _generation(),
        "cores": os.cpu_count(),
        "gpu": describe_processor("cuda") if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def _generation() -> str:
    """Which of the processors that share a name; nothing where Linux does not say."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        numbers = [
            re.search(rf"^{name}\s*: (\d+)", text, re.MULTILINE) for name in ("cpu family", "model")
        ]
        if all(numbers):
            return ", family {} model {}".format(*(found[1] for found in numbers if found))
    return ""


def quick_dtype() -> Literal["bfloat16", "float32"]:
    """The number format in which this machine is fastest."""
    from groupwise.engine.models.machine import choose_device, has_bfloat16

    return "bfloat16" if has_bfloat16(choose_device()) else "float32"


def slug(described: dict[str, Any]) -> str:
    """A machine as part of a file name."""
    words = f"{described['gpu'] or described['processor']} {described['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


if __name__ == "__main__":
    main()
