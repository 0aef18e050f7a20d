"""The arithmetic behind the benchmarks; what they measure is run by hand."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.memory import Watch, family, proportional
from benchmarks.roofline import learning_flops, sampling_floor, sizes_of
from benchmarks.work import CORNERS, W1, Work, prompts
from groupwise.models.config import ModelConfig
from groupwise.models.load import hollow_model


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
    one = Work((10,), 1, 5)
    assert sampling_floor(one, sizes, rate=1e30, reading=2.0, item_bytes=2) == 5 * weights
    assert sampling_floor(one, sizes, rate=2.0, reading=1e30, item_bytes=2) == 5 * weights
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
