"""What a GPU does with models of three sizes: `python -m benchmarks.gpu`.

Weights are random, so that nothing is downloaded; their shapes are those of SmolLM2-135M, Qwen2.5-1.5B and Llama-3.1-8B, in bfloat16 with
a LoRA adapter of rank 16. Of each size a step is sampled, learnt from (once more with the sums of attention's gradient in any order) and
published, and a few long rows are decoded; `--all-weights` also learns without an adapter, with float32 weights whose products are
bfloat16. Beside the seconds stand floors, by what this GPU was seen to do just before with a large product and a large copy: a token is
drawn no sooner than all weights and the keys and values of all rows are read, and learning takes no less than its products, forward and
the gradient of their inputs. Results are kept as they come, beside those of other sizes that the file has already. Without a GPU,
`--sizes tiny` shows that the program works.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step import RESULTS, learn, machine, requests, rows_of, slug
from benchmarks.work import LEARNING_RATE, RANK, Workload
from groupwise.core.atomic_files import write_json
from groupwise.core.errors import OutOfMemoryError
from groupwise.core.types import OptimiserParams, Row
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel, TrainedWeights
from groupwise.engine.models import varlen
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.machine import choose_device, prepare_process
from groupwise.engine.models.native.facts import multiple
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import cuda_graphs, run_eagerly
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter

PRODUCT = 8192
"""Rows and columns of the matrices whose product is timed."""
COPY = 1 << 32
"""Bytes that are copied."""
KEYS = 64
"""The room of a row is a multiple of so many tokens."""
LONG_ROWS, LONG_PROMPT, LONG_TOKENS = 8, 8000, 64
"""Rows with so long a prompt, of which so many tokens are decoded: too few to keep a GPU busy, unless several programs share their keys."""
KERNELS = 40
"""Lines of a profile."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape, and the work that is measured with it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    """Whether the embeddings and the output head share their weights."""
    work: Workload

    @property
    def body(self) -> int:
        """Weights of the matrices of all layers."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output(self) -> int:
        """Weights of the head."""
        return self.hidden * self.vocabulary

    @property
    def rows(self) -> int:
        """Completions that are drawn beside each other."""
        return len(self.work.prompts) * self.work.members

    def model(self, device: str) -> Any:
        """With random weights."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            max_position_embeddings=8192,
        )
        torch.manual_seed(0)
        with torch.device(device):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return made.eval().requires_grad_(requires_grad=False)

    def bytes_of_a_token(self) -> float:
        """Read to draw one token of all rows, with half of the completion written."""
        prompt, new = self.work.longest, self.work.new_tokens
        keys = 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * (prompt + new / 2)
        return 2.0 * (self.body + self.output + self.rows * keys)

    def learnt_tokens(self) -> int:
        """Each prompt once, and all completions."""
        return sum(self.work.prompts) + self.work.sampled

    def products_of_learning(self) -> float:
        """Floating-point operations with an adapter: 2 for each weight and token, twice; the head at completions alone."""
        return 4.0 * (self.body * self.learnt_tokens() + self.output * self.work.sampled)

    def products_of_all_weights(self) -> float:
        """Likewise without an adapter: weights have gradients, too."""
        return 1.5 * self.products_of_learning()


SIZES = {
    "tiny": Size(64, 96, 2, 4, 2, 49_152, True, Workload((20,) * 2, 8, 8)),
    "135M": Size(576, 1536, 30, 9, 3, 49_152, True, Workload((100,) * 8, 8, 128)),
    "1.5B": Size(1536, 8960, 28, 12, 2, 151_936, True, Workload((512,) * 32, 8, 256)),
    "8B": Size(4096, 14_336, 32, 32, 8, 128_256, False, Workload((512,) * 16, 4, 256)),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements have in common."""

    device: str
    repetitions: int
    budgets: tuple[int, ...]
    """Tokens of a micro-batch."""
    eager: bool
    """Whether sampling without recordings is timed, too."""
    all_weights: bool
    """Whether learning without an adapter is timed, too."""
    profiles: Path | None
    """Folder for tables of what the kernels took."""

    def seconds(self, compute: Callable[[], object]) -> float:
        """The median of the repetitions, after one that is not counted."""
        found: list[float] = []
        for _ in range(self.repetitions + 1):
            self.wait()
            begin = time.perf_counter()
            compute()
            self.wait()
            found.append(time.perf_counter() - begin)
        return median(found[1:])

    def wait(self) -> None:
        """Until all that was started is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        """Memory is measured from here on."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Most GiB of tensors since `forget_peak`; 0 on a processor."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0

    def profiled(self, name: str | None, compute: Callable[[], object]) -> None:
        """Do it once more and write down which kernels took how long, if profiles are wanted and it has a name."""
        if self.profiles is None or name is None:
            return
        activities = [ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, acc_events=True) as found:
            compute()
            self.wait()
        order = f"self_{self.device}_time_total"
        table = found.key_averages().table(
            sort_by=order, row_limit=KERNELS, max_name_column_width=80
        )
        self.profiles.mkdir(parents=True, exist_ok=True)
        (self.profiles / f"{name}.txt").write_text(table)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=("135M", "1.5B", "8B"))
    parser.add_argument("--budgets", nargs="+", type=int, default=(4096, 16_384, 65_536))
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="time sampling without CUDA graphs")
    parser.add_argument(
        "--all-weights", action="store_true", help="time learning without an adapter too"
    )
    parser.add_argument("--profiles", type=Path, help="write tables of kernels to this folder")
    parser.add_argument(
        "--out", type=Path, help="write the result there, not to benchmarks/results"
    )
    given = parser.parse_args()
    prepare_process(8)
    bench = Bench(
        *(choose_device(), given.repetitions, tuple(given.budgets)),
        *(given.eager, given.all_weights, given.profiles),
    )
    described = machine()
    file = given.out or RESULTS / f"gpu-{slug(described)}.json"
    found: dict[str, Any] = {"machine": described, "ceilings": ceilings(bench)}
    print(described, found["ceilings"], flush=True)
    for name in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            numbers = measured(name, bench, Path(folder), found["ceilings"])
        write_json(file, {**found, "sizes": {**stored_sizes(file), name: numbers}})
    print(f"stored in {file}")


def stored_sizes(file: Path) -> dict[str, Any]:
    """What the file has of all sizes, those of earlier calls among them."""
    return json.loads(file.read_text())["sizes"] if file.exists() else {}


def ceilings(bench: Bench) -> dict[str, float]:
    """FLOP/s of a large product in bfloat16, bytes/s of a large copy, read and written."""
    small = bench.device == "cpu"
    rows, size = (256, 1 << 24) if small else (PRODUCT, COPY)
    x, y = (torch.randn(rows, rows, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(x)
    source = torch.randint(0, 255, (size,), device=bench.device, dtype=torch.uint8)
    into = torch.empty_like(source)
    times = 10

    def multiply() -> None:
        for _ in range(times):
            torch.mm(x, y, out=product)

    def copy() -> None:
        for _ in range(times):
            into.copy_(source)

    return {
        "flops": times * 2 * rows**3 / bench.seconds(multiply),
        "bytes": times * 2 * size / bench.seconds(copy),
    }


def measured(name: str, bench: Bench, folder: Path, ceilings: dict[str, float]) -> dict[str, Any]:
    """All that is measured of a size, printed line by line."""
    size, found = SIZES[name], dict[str, Any]()

    def note(what: str, numbers: dict[str, float]) -> None:
        found[what] = numbers
        words = ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())
        print(f"{name:>5}  {what:<28} {words}", flush=True)

    adapter = new_lora_config(LoraConfig(r=RANK))
    trained = TrainedAdapter(AdaptedModel(size.model(bench.device), adapter), seed=0)
    served = ServedAdapter(trained.adapted)
    publisher = _learner(trained, folder, bench.budgets[0])
    floor = 1000 * size.bytes_of_a_token() / ceilings["bytes"]
    if bench.eager:
        eager, _ = sampling(size, bench, served, publisher, enforce_eager=True)
        note("sampling without graphs", eager)
    numbers, rows = sampling(size, bench, served, publisher, profile=f"sampling-{name}")
    note("sampling", {**numbers, "floor_milliseconds": floor})
    note("few long rows", few_long_rows(bench, served))
    gaps = _gaps(publisher, rows)
    note("gap", {"mean_absolute": float(gaps.abs().mean()), "mean": float(gaps.mean())})
    floor = size.products_of_learning() / ceilings["flops"]
    for budget in bench.budgets:
        profile = f"learning-{name}" if budget == bench.budgets[-1] else None
        numbers = learning(size, bench, _learner(trained, folder, budget), rows, profile=profile)
        note(f"learning, {budget} tokens", {**numbers, "floor_seconds": floor})
    with patch.object(varlen, "with_deterministic_gradient", lambda output_NHD: output_NHD):
        budget = sorted(bench.budgets)[len(bench.budgets) // 2]
        numbers = learning(size, bench, _learner(trained, folder, budget), rows, profile=None)
        note(f"in any order, {budget} tokens", numbers)
    note("publication", publication(bench, served, publisher))
    del trained, served, publisher
    if bench.all_weights:
        bench.forget_peak()
        whole = TrainedModel(size.model(bench.device).float(), dtype="bfloat16")
        floor = size.products_of_all_weights() / ceilings["flops"]
        for budget in bench.budgets:
            profile = f"all-weights-{name}" if budget == bench.budgets[-1] else None
            numbers = learning(size, bench, _learner(whole, folder, budget), rows, profile=profile)
            note(f"all weights, {budget} tokens", {**numbers, "floor_seconds": floor})
    return found


def sampling(
    size: Size,
    bench: Bench,
    served: ServedAdapter,
    publisher: TorchLearner,
    *,
    enforce_eager: bool = False,
    profile: str | None = None,
) -> tuple[dict[str, float], list[Row]]:
    """How long the completions of a step take, and the rows that they make."""
    bench.forget_peak()
    room = -(-(size.work.longest + size.work.new_tokens) // KEYS) * KEYS
    layout = DecodeLayout(size.rows, room)
    sampler = TorchSampler(served, tiny_tokenizer(), layout, enforce_eager=enforce_eager)
    asyncio.run(sampler.load(asyncio.run(publisher.publish(1))))
    asked, rows = requests(size.work, 0), list[Row]()

    async def ask() -> None:
        rows[:] = rows_of(asked, await asyncio.gather(*map(sampler.generate, asked)))

    seconds = bench.seconds(lambda: asyncio.run(ask()))
    peak = bench.peak()
    bench.profiled(profile, lambda: asyncio.run(ask()))
    numbers = {
        "tokens_per_second": size.work.sampled / seconds,
        "milliseconds_per_token": 1000 * seconds / size.work.new_tokens,
        "gib": peak,
    }
    return numbers, rows


def few_long_rows(bench: Bench, served: ServedAdapter) -> dict[str, float]:
    """Milliseconds for a token of a few rows with many keys, by a program for each row and head of keys, and for each part of it."""
    model = served.native()
    assert model is not None
    small = bench.device == "cpu"
    prompt, tokens = (100, 4) if small else (LONG_PROMPT, LONG_TOKENS)
    # Each timing adds as many tokens to the same rows.
    room = multiple(prompt + (bench.repetitions + 1) * tokens, KEYS)
    found = dict[str, float]()
    for name, span in (("whole", room), ("parts", None)):
        record = run_eagerly if small else cuda_graphs()
        engine = GraphEngine(model, served, LONG_ROWS, room, record, span=span)
        with torch.inference_mode():
            row = engine.prefill([3 + number % 90 for number in range(prompt)])
            for _ in range(LONG_ROWS):
                engine.add_row(row)
            seconds = bench.seconds(partial(_decode, engine, tokens))
        found[f"milliseconds_{name}"] = 1000 * seconds / tokens
    return found


def _decode(engine: GraphEngine, tokens: int) -> None:
    for number in range(tokens):
        engine.decode([3 + number % 90] * LONG_ROWS)


def learning(
    size: Size, bench: Bench, learner: TorchLearner, rows: list[Row], *, profile: str | None
) -> dict[str, float]:
    """How long a gradient and an update take; `out_of_memory` where there is none for it."""
    bench.forget_peak()

    def step() -> None:
        asyncio.run(learn(learner, rows))
        asyncio.run(learner.update(OptimiserParams(learning_rate=LEARNING_RATE)))

    try:
        seconds = bench.seconds(step)
    except OutOfMemoryError:
        learner.discard()
        return {"out_of_memory": 1.0}
    peak = bench.peak()
    bench.profiled(profile, step)
    return {"tokens_per_second": size.learnt_tokens() / seconds, "seconds": seconds, "gib": peak}


def publication(bench: Bench, served: ServedAdapter, publisher: TorchLearner) -> dict[str, float]:
    """Seconds until an adapter is on the disk, and until a sampler has it."""
    loading = TorchSampler(served, tiny_tokenizer(), DecodeLayout(8, KEYS))
    begin = time.perf_counter()
    policy = asyncio.run(publisher.publish(2))
    written = time.perf_counter()
    asyncio.run(loading.load(policy))
    bench.wait()
    return {"written": written - begin, "loaded": time.perf_counter() - written}


def _learner(trained: TrainedWeights, folder: Path, budget: int) -> TorchLearner:
    return TorchLearner(
        trained, run="bench", publish_folder=folder, max_tokens_per_microbatch=budget, seed=0
    )


def _gaps(learner: TorchLearner, rows: list[Row]) -> torch.Tensor:
    """Of every sampled token, the sampler's log-probability minus the learner's."""
    wanted = asyncio.run(learner.logprobs(rows))
    return torch.tensor(
        [
            ours - theirs
            for row, values in zip(rows, wanted, strict=True)
            for ours, theirs in zip(row.sampling_logprobs, values, strict=True)
        ]
    )


if __name__ == "__main__":
    main()
