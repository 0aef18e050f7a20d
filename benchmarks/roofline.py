"""What this machine could do at best with the fixed work, and which share of it Groupwise reaches: `python -m benchmarks.roofline`.

Rates are measured as the work is laid out: in as many processes at once, with as many threads and as many rows in each as decoding,
prompts and learning have there. A rate is that of the fastest of torch, oneDNN over ordered weights, and our own kernel. The floor of
sampling is, for each token, the longer of computing its products and of reading the weights once, and the products of the prompts;
that of learning is its products: forward and the gradient of the inputs (frozen weights have none of their own), each prompt once for its
group, the output head at completion tokens alone. Attention, drawing, norms and the adapter are left out, so that no floor can be
reached. Then some steps are measured, on the same machine in the same mood, and their shares printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.apart import apart
from benchmarks.step import RESULTS, config_of, machine, measure, quick_dtype, slug
from benchmarks.work import MODEL, W1, Workload
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.load import read_model_config
from groupwise.engine.models.machine import has_bfloat16, prepare_process
from groupwise.engine.models.native.packed import Packed
from groupwise.training import placement
from groupwise.training.assembly.start import training_parts

MEMORY = 1 << 29
"""Bytes that each process reads to measure memory; far more than the caches hold."""
ROWS_OF_ORDER = 32
"""For so many rows oneDNN is asked to order weights."""


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


@dataclass(frozen=True, slots=True)
class Rates:
    """What all processes together do at the same time."""

    products: dict[str, float]
    """FLOP/s with the rows that `decoding`, `prompts` and `learning` have."""
    reading: float
    """Bytes/s of memory."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=quick_dtype())
    parser.add_argument("--repetitions", type=int, default=5, help="steps that are measured")
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    [layout] = apart(partial(layout_of, given.dtype))
    rows = rows_of(W1, layout.processes)
    rates = measured_rates(layout, rows)
    [seconds] = apart(partial(measured_steps, given.dtype, given.repetitions))
    floors = floors_of(W1, sizes_of(MODEL), rates, getattr(torch, given.dtype).itemsize, layout)
    result = {
        "machine": machine(),
        "layout": asdict(layout),
        "rows": rows,
        "rates": asdict(rates),
        "floors": floors,
        "seconds": seconds,
        "shares": {name: floor / median(seconds[name]) for name, floor in floors.items()},
    }
    show(result)
    if given.store:
        file = RESULTS / f"roofline-{slug(result['machine'])}-{given.dtype}.json"
        file.write_text(json.dumps(result, indent=2) + "\n")
        print(f"stored in {file}")


def show(result: dict[str, Any]) -> None:
    """For people."""
    layout, rates = result["layout"], result["rates"]
    print(f"{result['machine']['processor']}, {layout['processes']} processes, {layout['dtype']}")
    for name, rate in rates["products"].items():
        print(f"  products of {result['rows'][name]:>4} rows ({name}) {rate / 1e9:6.0f} GFLOP/s")
    print(f"  reading memory {rates['reading'] / 1e9:6.1f} GB/s")
    for name, floor in result["floors"].items():
        reached = median(result["seconds"][name])
        print(f"  {name:<9} {reached:5.2f} s, at best {floor:5.2f} s: {result['shares'][name]:.0%}")


def layout_of(dtype: str) -> placement.Layout:
    """How Groupwise lays the work out here."""
    return placement.choose_layout(config_of(W1, dtype), longest_prompt=W1.longest)


def measured_steps(dtype: str, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each phase of Groupwise's steps."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(
            training_parts(config_of(W1, dtype), layout_of(dtype), "bench", Path(folder))
        ) as parts,
    ):
        return asyncio.run(measure(parts, repetitions))


def rows_of(work: Workload, processes: int) -> dict[str, int]:
    """Rows of a product in each process; prompts are computed one by one."""
    return {
        "decoding": -(-len(work.prompts) * work.members // processes),
        "prompts": sum(work.prompts) // len(work.prompts),
        "learning": -(-(sum(work.prompts) + work.sampled) // processes),
    }


def floors_of(
    work: Workload, sizes: Sizes, rates: Rates, item_bytes: int, layout: placement.Layout
) -> dict[str, float]:
    """Seconds of each phase at best."""
    products = rates.products
    weights_per_second = rates.reading / (item_bytes * layout.processes)
    sampling = sampling_floor(work, sizes, products["decoding"], weights_per_second)
    prompts = forward_flops(sizes, sum(work.prompts)) / products["prompts"]
    learning = learning_flops(work, sizes) / products["learning"]
    return {
        "sampling": sampling + prompts,
        "learning": learning,
        "step": sampling + prompts + learning,
    }


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


def learning_flops(work: Workload, sizes: Sizes) -> float:
    """Forward and the gradient of the inputs."""
    tokens = sum(work.prompts) + work.sampled
    return 2 * forward_flops(sizes, tokens) + 2 * 2.0 * sizes.output * work.sampled


def sampling_floor(work: Workload, sizes: Sizes, rate: float, weights_per_second: float) -> float:
    """Seconds of decoding all completions beside each other; the first token of each comes with its prompt."""
    weights = sizes.body + sizes.output
    rows = len(work.prompts) * work.members
    each = max(2.0 * weights * rows / rate, weights / weights_per_second)
    return (work.new_tokens - 1) * each


def measured_rates(layout: placement.Layout, rows: dict[str, int]) -> Rates:
    """Of as many processes as the layout has, all at the same time."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager:
        together = manager.Barrier(layout.processes).wait
        one = partial(own_rates, together, layout.threads_each, rows, layout.dtype)
        found = apart(*[one] * layout.processes)
    products = {name: sum(each.products[name] for each in found) for name in rows}
    return Rates(products, sum(each.reading for each in found))


def own_rates(
    together: Callable[[], object], threads: int, rows: dict[str, int], dtype: str
) -> Rates:
    """Of this process; each measurement begins `together` with those of the others."""
    prepare_process(threads)
    sizes = sizes_of(MODEL)
    products: dict[str, float] = {}
    for name, count in rows.items():
        ways = products_of(sizes, count, getattr(torch, dtype))
        seconds: list[float] = []
        for way in ways:
            together()
            seconds.append(best(way))
        products[name] = 2.0 * (sizes.body + sizes.output) * count / min(seconds)
    tensor = torch.ones(MEMORY // 4)
    together()
    return Rates(products, MEMORY / best(tensor.sum))


def products_of(sizes: Sizes, rows: int, dtype: torch.dtype) -> Sequence[Callable[[], None]]:
    """Ways of one pass through products of the model's shapes, each with weights of its own, as in the model."""
    shapes = [*sizes.shapes * sizes.layers, sizes.head]
    layers = [
        (torch.randn(rows, shape[1], dtype=dtype), torch.randn(shape, dtype=dtype))
        for shape in shapes
    ]
    packed = [(x, Packed(weight, None)) for x, weight in layers]

    def plain() -> None:
        for x, weight in layers:
            F.linear(x, weight)

    def by_ours() -> None:
        for x, weight in packed:
            weight.product(x, None)

    if dtype == torch.bfloat16 and not has_bfloat16("cpu"):
        return plain, by_ours
    ordered = [
        (x, torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_OF_ORDER)) for x, weight in layers
    ]

    def by_onednn() -> None:
        for x, weight in ordered:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return plain, by_ours, by_onednn


def best(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    work()
    found: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    main()
