"""What this machine could do at best with the fixed work, and which share of it Groupwise reaches: `python -m benchmarks.roofline`.

Rates are measured: matrix products of the model's own shapes, with as many rows as decoding and learning have, and the reading of
memory. The floor of sampling is, for each token, the longer of computing its products and of reading the weights once; that of learning
is its products: forward and the gradient of the inputs (frozen weights have none of their own), each prompt once for its group, the
output head at completion tokens alone. Attention, sampling, norms and the adapter are left out, so the floor cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.step import RESULTS, machine, slug
from benchmarks.work import MODEL, W1, Work
from groupwise.models.config import ModelConfig
from groupwise.models.load import read_model_config
from groupwise.models.machine import prepare_process

LEARNT_ROWS = 1024
"""Rows of a product in the learner: some groups' tokens."""
MEMORY = 1 << 30
"""Bytes that are read to measure memory; far more than the caches hold."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The linear layers of a model."""

    shapes: tuple[tuple[int, int], ...]
    """(out, in) of those of one layer."""
    layers: int
    head: tuple[int, int]

    @property
    def body(self) -> int:
        """Weights of all layers, without the head."""
        return self.layers * sum(rows * columns for rows, columns in self.shapes)

    @property
    def output(self) -> int:
        """Weights of the head."""
        return self.head[0] * self.head[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    prepare_process(os.cpu_count() or 1)
    sizes, dtype = sizes_of(MODEL), getattr(torch, given.dtype)
    rows = len(W1.prompts) * W1.members
    rates = {count: gemm_rate(sizes, count, dtype) for count in (rows, LEARNT_ROWS)}
    reading = read_rate()
    floors = {
        "sampling": sampling_floor(W1, sizes, rates[rows], reading, dtype.itemsize)
        + forward_flops(sizes, sum(W1.prompts)) / rates[LEARNT_ROWS],
        "learning": learning_flops(W1, sizes) / rates[LEARNT_ROWS],
    }
    floors["step"] = sum(floors.values())
    print(f"{machine()['processor']}, {os.cpu_count()} cores, {given.dtype}")
    for count, rate in rates.items():
        print(f"  products of {count:>4} rows  {rate / 1e9:6.0f} GFLOP/s")
    print(f"  reading memory         {reading / 1e9:6.1f} GB/s")
    reached = stored(given.dtype)
    for name, floor in floors.items():
        seconds = reached.get(name)
        share = f"   reached {seconds:.2f} s: {floor / seconds:.0%} of it" if seconds else ""
        print(f"  {name:<10} at best {floor:.2f} s{share}")


def sizes_of(model: str) -> Sizes:
    """From the model's config; no weights are read."""
    config: Any = read_model_config(ModelConfig(name=model))
    hidden, inner = config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries = config.num_attention_heads * head_size
    joined = queries + 2 * config.num_key_value_heads * head_size
    shapes = ((joined, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
    return Sizes(shapes, config.num_hidden_layers, (config.vocab_size, hidden))


def forward_flops(sizes: Sizes, tokens: int) -> float:
    """Of the layers, without the head."""
    return 2.0 * sizes.body * tokens


def learning_flops(work: Work, sizes: Sizes) -> float:
    """Forward and the gradient of the inputs."""
    tokens = sum(work.prompts) + work.sampled
    return 2 * forward_flops(sizes, tokens) + 2 * 2.0 * sizes.output * work.sampled


def sampling_floor(work: Work, sizes: Sizes, rate: float, reading: float, item_bytes: int) -> float:
    """Seconds of decoding all completions beside each other."""
    weights = sizes.body + sizes.output
    rows = len(work.prompts) * work.members
    return work.new_tokens * max(2.0 * weights * rows / rate, weights * item_bytes / reading)


def gemm_rate(sizes: Sizes, rows: int, dtype: torch.dtype) -> float:
    """FLOP/s of one pass through layers of the model's shapes, each with weights of its own, as in the model."""
    layers = [
        (torch.randn(rows, shape[1], dtype=dtype), torch.randn(shape, dtype=dtype))
        for _ in range(sizes.layers)
        for shape in sizes.shapes
    ]

    def once() -> None:
        for x, weight in layers:
            F.linear(x, weight)

    return 2.0 * sizes.body * rows / best(once)


def read_rate() -> float:
    """Bytes/s of summing a tensor that no cache holds."""
    tensor = torch.ones(MEMORY // 4)
    return MEMORY / best(tensor.sum)


def best(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    work()
    found: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def stored(dtype: str) -> dict[str, float]:
    """Seconds of Groupwise's phases on this machine, as `benchmarks.against_trl --store` measured them; none if it has not."""
    file = RESULTS / f"against-trl-{slug(machine())}-{dtype}.json"
    if not file.exists():
        return {}
    seconds = json.loads(file.read_text())["cells"]["W1"]["groupwise"]["seconds"]
    return {phase: median(values) for phase, values in seconds.items()}


if __name__ == "__main__":
    main()
