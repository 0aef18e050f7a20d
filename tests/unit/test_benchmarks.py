"""The arithmetic behind the benchmarks; what they measure is run by hand."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import against_trl, profile_decoding
from benchmarks.against_trl import ratio, regressions, show
from benchmarks.apart import apart
from benchmarks.busy import neighbour
from benchmarks.memory import Watch, family, proportional
from benchmarks.overlap import line, one_after_the_other
from benchmarks.profile_decoding import PARTS
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
from benchmarks.start_up import CONFIG, OVERRIDES, TASK, in_turns, ours, theirs, until_first_reward
from benchmarks.step import times
from benchmarks.work import CORNERS, NATURAL, W1, Work, prompts
from groupwise import build, machine_layout
from groupwise.config import load_config
from groupwise.models.config import ModelConfig
from groupwise.models.load import hollow_model
from groupwise.models.tiny import tiny_tokenizer
from groupwise.types import GroupRequest, SamplingParams


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


def measured(ours: float, theirs: float, natural: bool = False, peak: int = 3000) -> dict[str, Any]:
    """A cell in which a step of each side takes so many seconds, TRL's for twice as many tokens and with 6,000 MiB."""
    work = NATURAL if natural else W1

    def side(seconds: float, tokens: float, mib: int, start_up: float) -> dict[str, Any]:
        return {
            "seconds": {phase: [seconds, seconds] for phase in against_trl.PHASES},
            "tokens": [tokens, tokens],
            "peak_mib": mib,
            "start_up_seconds": start_up,
        }

    return {
        "work": asdict(work),
        "groupwise": side(ours, 10.0, peak, 8.0),
        "trl": side(theirs, 20.0, 6000, 4.0),
    }


def test_ratios_are_of_seconds_or_of_seconds_per_token() -> None:
    assert ratio(measured(2.0, 10.0), "step") == pytest.approx(5.0)
    assert ratio(measured(2.0, 10.0, natural=True), "step") == pytest.approx(2.5)


def test_a_regression_is_a_ratio_that_fell() -> None:
    stored = {"W1": measured(2.0, 10.0), "short": measured(1.0, 4.0)}
    assert regressions({"W1": measured(4.0, 18.0)}, stored) == []
    found = regressions({"W1": measured(4.0, 16.0)}, stored)
    assert len(found) == 3
    assert found[0] == "W1, sampling: 4.00 times as fast as TRL, not 5.00"


def test_so_is_a_share_of_memory_that_rose() -> None:
    stored = {"W1": measured(2.0, 10.0)}
    assert regressions({"W1": measured(2.0, 10.0, peak=3400)}, stored) == []
    found = regressions({"W1": measured(2.0, 10.0, peak=3600)}, stored)
    assert found == ["W1, memory: 60% of TRL's, not 50%"]


def test_ratios_have_the_range_of_the_pairs() -> None:
    assert times([1.0, 2.0, 4.0], [5.0, 9.0, 22.0]) == "4.50 times (4.50 … 5.50)"


def test_what_is_shown_has_ratios_of_speed_memory_and_start_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = measured(2.0, 10.0)
    result["trl"]["seconds"]["step"] = [10.0, 12.0]
    show("W1", result)
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert said["step"].endswith("5.50 times (5.00 … 6.00)")
    assert said["memory"].endswith("50%")
    assert said["start-up"].endswith("0.50 times")


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """The command for W1, unless the arguments say otherwise, which comes out as it is given here; what is stored is in `tmp_path`."""
    described = {"processor": "Slow One", "cores": 2, "gpu": None}
    monkeypatch.setattr(against_trl, "RESULTS", tmp_path)
    monkeypatch.setattr(against_trl, "machine", lambda: described)

    def run(*words: str, result: dict[str, Any] | None = None) -> None:
        alone = ["--dtype", "float32", "--cell", "W1"]
        monkeypatch.setattr("sys.argv", ["against_trl", *alone, *words])
        monkeypatch.setattr(against_trl, "compare", lambda *_: result)
        against_trl.main()

    return run


def test_a_check_passes_where_nothing_got_worse_and_fails_where_something_did(
    against: Callable[..., None], tmp_path: Path
) -> None:
    against("--store", result=measured(2.0, 10.0))
    [file] = tmp_path.iterdir()
    kept = file.read_text()
    against("--check", result=measured(2.0, 10.0))
    with pytest.raises(SystemExit, match=r"worse than in .*\n  W1, sampling: 4\.00 times"):
        against("--check", result=measured(2.0, 8.0))
    with pytest.raises(SystemExit, match=r"worse than in .*\n  W1, memory: 75%"):
        against("--check", result=measured(2.0, 10.0, peak=4500))
    assert file.read_text() == kept


def test_a_check_with_nothing_to_compare_fails_before_it_measures(
    against: Callable[..., None],
) -> None:
    with pytest.raises(SystemExit, match=r"nothing to compare W1 with.*does not exist.*--store"):
        against("--check")
    against("--store", result=measured(2.0, 10.0))
    with pytest.raises(SystemExit, match=r"nothing to compare short with.*has W1\. .*--store"):
        against("--check", "--cell", "short")


def test_all_cells_are_compared_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(against_trl, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["against_trl", "--repetitions", "7"])
    asked: list[tuple[Any, int]] = []

    def compare(work: Any, repetitions: int, dtype: str) -> dict[str, Any]:
        asked.append((work, repetitions))
        return measured(2.0, 10.0)

    monkeypatch.setattr(against_trl, "compare", compare)
    against_trl.main()
    assert asked == [
        (work, 7 if work == against_trl.W1 else 2) for work in against_trl.CELLS.values()
    ]
    assert len(asked) == 8


def test_a_check_does_not_overwrite_what_it_compares_with(
    against: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        against("--check", "--store", result=measured(2.0, 10.0))
    assert "not allowed with" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


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


# Start-up


NOTES = "import os, sys, time; open(sys.argv[1], 'w').write(repr(time.monotonic()))"


def test_sides_start_in_turns_and_the_first_start_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    begun = time.monotonic()
    order: list[str] = []

    def command(name: str, folder: Path) -> list[str]:
        order.append(name)
        keeps = "; assert 'PYTHONDONTWRITEBYTECODE' not in os.environ"
        return [sys.executable, "-I", "-c", NOTES + keeps, str(folder / "note")]

    found = in_turns({name: partial(command, name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3
    assert {name: len(each) for name, each in found.items()} == {"a": 2, "b": 2}
    assert 0 < sum(map(sum, found.values())) < time.monotonic() - begun


@pytest.mark.parametrize(
    ("program", "said"),
    [("raise ValueError('no luck')", r"ValueError: no luck"), ("pass", r"ended before it sampled")],
)
def test_a_start_that_never_samples_is_told(program: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        until_first_reward(lambda _: [sys.executable, "-I", "-c", program])


def test_a_reward_notes_its_first_call_alone(tmp_path: Path) -> None:
    task, config = runpy.run_path(str(TASK)), {"task": {"note": str(tmp_path / "note")}}
    [reward] = task["get_reward_funcs"](config, None)
    assert not (tmp_path / "note").exists()
    assert reward(completions=["a", "b"]) == [0.0, 0.0]
    noted = (tmp_path / "note").read_text()
    assert 0 < float(noted) <= time.monotonic()
    reward(completions=["c"])
    assert (tmp_path / "note").read_text() == noted
    assert task["get_rl_dataset"](config)[0]["prompt"][-1]["content"].startswith("What is")


def test_both_sides_are_asked_for_the_same(tmp_path: Path) -> None:
    config = load_config(CONFIG, OVERRIDES).config
    assert config.training.max_steps == config.sampler.max_completion_length == 1
    assert all(override in ours(tmp_path) for override in OVERRIDES)
    words = theirs(tmp_path)
    assert words[1:3] == ["-m", "benchmarks.trl_start"]
    given = json.loads(words[3])
    assert given["lora"]["r"] == config.lora.r
    assert given["settings"]["max_completion_length"] == 1
    assert given["settings"]["num_generations"] == config.training.num_generations
    assert f"task.note={given['note']}" in ours(tmp_path)


def test_a_script_for_trl_is_not_delayed_by_groupwise() -> None:
    for file in (TASK, TASK.with_name("trl_start.py")):
        modules = {
            name
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert modules
        assert not {name for name in modules if name.split(".")[0] in ("groupwise", "benchmarks")}


# Decoding


def test_every_token_has_its_parts_and_prompts_count_for_none(tmp_path: Path) -> None:
    given = {"model": {"name": "tiny"}, "run": {"threads": 1, "processes": 1}}
    config = load_config(given).config
    layout = machine_layout.choose_layout(config, longest_prompt=8)
    asked = [GroupRequest(draw, (40, 41), (1, 2), SamplingParams(5)) for draw in range(2)]
    with closing(build.training_parts(config, layout, "bench", tmp_path)) as parts:

        async def decoded() -> list[profile_decoding.Token]:
            await parts.sampler.load(await parts.learner.publish(0))
            with profile_decoding.timed() as tokens:
                await asyncio.gather(*map(parts.sampler.generate, asked))
            await parts.sampler.generate(asked[0])
            return tokens

        begun = time.perf_counter()
        tokens = asyncio.run(decoded())
        taken = time.perf_counter() - begun
    assert len(tokens) == 4, "the first of 5 comes with the prompt"
    assert all(set(token) == set(PARTS) and min(token.values()) > 0 for token in tokens)
    assert sum(sum(token.values()) for token in tokens) < taken
