"""The arithmetic behind the benchmarks; what they measure is run by hand."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.against_trl import ratio, regressions
from benchmarks.apart import apart
from benchmarks.busy import neighbour
from benchmarks.memory import Watch, family, proportional
from benchmarks.overlap import line, one_after_the_other
from benchmarks.roofline import (
    Rates,
    floors_of,
    learning_flops,
    products_of,
    rows_of,
    sampling_floor,
    sizes_of,
)
from benchmarks.scaling import SWEEPS, size
from benchmarks.work import CORNERS, NATURAL, W1, Work, prompts
from groupwise import machine_layout
from groupwise.models.config import ModelConfig
from groupwise.models.load import hollow_model
from groupwise.models.tiny import tiny_tokenizer


class Letters:
    """A tokenizer whose tokens are words: number n is the n-th word of three letters."""

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def decode(self, ids: list[int]) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz"
        number = ids[0]
        return " " + letters[number % 26] + letters[number // 26 % 26] + letters[number // 676 % 26]


@pytest.mark.parametrize("work", [W1, *CORNERS.values()], ids=lambda work: work.described)
def test_prompts_have_their_lengths_and_differ_between_steps(work: Work) -> None:
    texts = prompts(work, Letters(), 1)
    assert tuple(len(text.split()) for text in texts) == work.prompts
    assert len({*texts, *prompts(work, Letters(), 2)}) == 2 * len(work.prompts)
    assert prompts(work, Letters(), 1) == texts


def test_questions_end_where_the_answer_begins_and_differ_between_steps() -> None:
    texts = prompts(NATURAL, tiny_tokenizer(), 1)
    assert len(set(texts)) == len(NATURAL.prompts)
    assert all(text.endswith("<|assistant|>") for text in texts)
    assert prompts(NATURAL, tiny_tokenizer(), 2) != texts


def measured(ours: float, theirs: float, natural: bool = False) -> dict[str, Any]:
    """A cell in which a step of each side takes so many seconds, TRL's for twice as many tokens."""
    phases = ("sampling", "learning", "step")
    return {
        "work": {"natural": natural},
        "groupwise": {"seconds": {key: [ours, ours] for key in phases}, "tokens": [10.0, 10.0]},
        "trl": {"seconds": {key: [theirs, theirs] for key in phases}, "tokens": [20.0, 20.0]},
    }


def test_ratios_are_of_seconds_or_of_seconds_per_token() -> None:
    assert ratio(measured(2.0, 10.0), "step") == pytest.approx(5.0)
    assert ratio(measured(2.0, 10.0, natural=True), "step") == pytest.approx(2.5)


def test_a_regression_is_a_ratio_that_fell() -> None:
    stored = {"W1": measured(2.0, 10.0), "short": measured(1.0, 4.0)}
    assert regressions({"W1": measured(4.0, 18.0), "new": measured(9.0, 1.0)}, stored) == []
    found = regressions({"W1": measured(4.0, 16.0)}, stored)
    assert len(found) == 3
    assert found[0] == "W1, sampling: 4.00 times as fast as TRL, not 5.00"


def test_the_sizes_are_those_of_the_models_linear_layers() -> None:
    model = hollow_model(ModelConfig(name="tiny"))
    linears = {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    sizes = sizes_of("tiny")
    assert sizes.output == linears.pop("lm_head")
    assert sizes.body == sum(linears.values())


def test_floors_grow_with_the_work_and_sampling_waits_for_memory_or_products() -> None:
    sizes = sizes_of("tiny")
    weights = sizes.body + sizes.output
    one = Work((10,), 1, 6)
    assert sampling_floor(one, sizes, rate=1e30, weights_per_second=1.0) == 5 * weights
    assert sampling_floor(one, sizes, rate=2.0, weights_per_second=1e30) == 5 * weights
    # Layers forward and back for 10 + 20 tokens, the head for 20.
    assert learning_flops(Work((10,), 4, 5), sizes) == 4 * (30 * sizes.body + 20 * sizes.output)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's /proc")
def test_memory_is_watched_while_the_watch_is_open() -> None:
    watch = Watch(os.getpid(), interval=0.001)
    assert os.getpid() in family(os.getpid())
    assert proportional(2**22 + 1) == 0, "no such process"
    with watch:
        while not watch.peak:
            pass
    assert watch.peak > 10


def test_rows_are_those_of_one_process() -> None:
    assert rows_of(W1, 2) == {"decoding": 16, "prompts": 75, "learning": 920}


def test_each_process_reads_all_weights_and_a_step_is_the_sum_of_its_phases() -> None:
    sizes, work = sizes_of("tiny"), Work((10, 20), 4, 6)
    rates = Rates({"decoding": 1e30, "prompts": 1.0, "learning": 1e30}, reading=8.0)
    layout = machine_layout.Layout("cpu", "bfloat16", 2, 8, 64, 8192, processes=2)
    floors = floors_of(work, sizes, rates, 2, layout)
    decoding = 5 * (sizes.body + sizes.output) / 2  # 2 processes × 2 bytes of 8 in a second
    assert floors["sampling"] == pytest.approx(decoding + 2 * sizes.body * 30)
    assert floors["step"] == pytest.approx(floors["sampling"] + floors["learning"])


def test_products_are_computed_in_all_ways() -> None:
    for way in products_of(sizes_of("tiny"), 8, torch.float32):
        way()


def test_what_a_sweep_varies_grows() -> None:
    for name, works in SWEEPS.items():
        sizes = [size(name, work) for work in works]
        assert sizes == sorted(set(sizes))


def test_one_after_the_other_takes_all_rewards_of_each_worker() -> None:
    parts = {"scoring": 2.1, "sampling": 2.0, "learning": 1.0, "publishing": 0.5}
    assert one_after_the_other(2.0, 8, {"step": 7.0, **parts}) == pytest.approx(3.5 + 4.0)
    found = {"2": {"0": {"step": 7.5, **parts}, "1": {"step": 3.75}}}
    assert line(2.0, found, 8).split()[-6:] == ["7.50", "s", "100%", "3.75", "s", "50%"]


def test_the_neighbour_works_until_it_is_let_go() -> None:
    with neighbour() as process:
        assert process.poll() is None
    assert process.returncode is not None


def test_works_apart_have_processes_of_their_own() -> None:
    found = apart(os.getpid, os.getpid)
    assert len({*found, os.getpid()}) == 3
