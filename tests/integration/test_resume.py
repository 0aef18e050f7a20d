"""A resumed run equals the uninterrupted one, to the bit, wherever it was stopped:

1. after a clean stop (SIGINT) at any step, also in the middle of sampling and in the middle of a gradient;
2. after a crash at a durable write, before and after it becomes visible;
3. after two crashes;
4. with the record whole: no rollout missing, none twice.

Repeated runs are equal to begin with, whatever the number of reward workers.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import groupwise
from groupwise.core import atomic_files
from groupwise.core.errors import NothingScoredError, RunInUseError
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.models.native.products import HAS_VNNI
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.runs import checkpoints
from groupwise.runs.store import Store
from groupwise.training.loops import held_out, schedules
from groupwise.training.loops import rl as loop
from groupwise.training.loops import rl_start as start_module
from tests.integration import toy_task
from tests.integration.toy_run import (
    STEPS,
    TOY,
    config,
    crash_at,
    go_on,
    what_must_be_equal,
)
from tests.rotation import turn

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def uninterrupted(whole_toy):
    return whole_toy.equal, whole_toy.points


def start(runs: Path) -> None:
    groupwise.rl(config(runs), TOY)


def test_a_repeated_run_is_equal_whatever_its_number_of_reward_workers(uninterrupted, tmp_path):
    settings = config(tmp_path)
    settings["rewards"] = {"workers": 2}
    groupwise.rl(settings, TOY)
    assert what_must_be_equal(tmp_path / "toy") == uninterrupted[0]


@pytest.mark.timeout(400)
def test_durable_writes_are_crash_points(uninterrupted, tmp_path):
    """Each commit dies at other points of those where a run writes durably; `make soak SUITE=kills` at all."""
    whole, points = uninterrupted
    kinds = {name.split(":")[0] for name in points}
    assert kinds == {"file", "folder", "remove", "commit"}
    assert sum(name == "commit:step:after" for name in points) == STEPS
    failed = [
        f"{number} {name}"
        for number, name in [*enumerate(points)][turn() % 40 :: 40]
        if not survives(tmp_path / str(number), number, whole)
    ]
    assert not failed


def survives(runs: Path, number: int, whole: dict) -> bool:
    assert crash_at(number, lambda: start(runs)) == 17
    go_on(config(runs))
    return what_must_be_equal(runs / "toy") == whole


def test_two_crashes(uninterrupted, tmp_path):
    whole, points = uninterrupted
    assert crash_at(2 * len(points) // 3, lambda: start(tmp_path)) == 17
    assert crash_at(len(points) // 4, lambda: go_on(config(tmp_path))) == 17
    go_on(config(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == whole
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert len(store.resumes()) == 2


EASY = {
    "dataset_name": str(Path(__file__).parents[1] / "fixtures" / "easy.jsonl"),
    "columns": {"prompt": "question"},
    "schedule": [[0, 1.0], [2, 0.5]],
}
REPLAY = {"warmup_entries": 1, "success_threshold": 0.01}
WAYS = {
    "several updates": {"training": {"num_iterations": 2, "minibatches": 2}},
    "adaptive kl, entropy bonus, warned of": {
        "algorithm": {
            "type": "grpo", "adaptive_kl": True, "kl_target": 0.001, "entropy_coef": 0.01,
        },
        "signals": {"start_steps": 2, "memory": 0.5, "noise": 0.01, "truncation_rise": 0.01},
    },
    "dynamic sampling": {
        "algorithm": {"type": "dapo", "max_resample_rounds": 2},
        "sampler": {"max_completion_length": 1},
    },
    "dynamic sampling ahead": {
        "algorithm": {"type": "dapo"},
        "sampler": {"max_completion_length": 1},
        "training": {"max_off_policy_steps": 1},
    },
    "importance correction": {
        "algorithm": {"type": "gspo", "importance_sampling_correction": "sequence_mask"}
    },
    "all weights": {"lora": None, "model": {"dtype": "bfloat16"}, "algorithm": {"type": "rloo", "beta": 0.1}},
    "dropout": {"lora": {"r": 4, "dropout": 0.2}},
    "checkpointing": {"training": {"gradient_checkpointing": True}},
    "two stages": {
        "rollout": {"type": "two_stage", "max_reasoning_length": 6, "max_answer_length": 3},
        "sampler": {"max_completion_length": 256},
    },
    "a step ahead": {"training": {"max_off_policy_steps": 1}},
    "an environment": {"rollout": {"type": "environment", "max_turns": 3}},
    "an environment ahead": {
        "rollout": {"type": "environment", "max_turns": 3, "in_process": True},
        "training": {"max_off_policy_steps": 1},
    },
    "easy pool": {"data": {"easy_pool": EASY}},
    "prompts again": {"data": {"replay": REPLAY}},
    "prompts again ahead": {"data": {"replay": REPLAY}, "training": {"max_off_policy_steps": 2}},
    "completions again": {"data": {"replay": {**REPLAY, "mode": "completions"}}},
    "curriculum": {"data": {"curriculum": {"success_threshold": 0.2}}},
    "temperature": {"sampler": {"temperature_schedule": {"steps": 3, "end": 0.5, "high_temperature_every": 4}}},
    "int8": {"sampler": {"quantization": "int8"}},
    "all at once, dynamic sampling ahead": {
        "algorithm": {"type": "dapo"},
        "sampler": {"max_completion_length": 1, "temperature_schedule": {"steps": 3}},
        "training": {"max_off_policy_steps": 1},
        "data": {
            "easy_pool": EASY,
            "replay": {**REPLAY, "mode": "completions"},
            "curriculum": {"success_threshold": 0.2},
        },
    },
}  # fmt: skip
USUAL = (
    "adaptive kl, entropy bonus, warned of",
    "an environment ahead",
    "all at once, dynamic sampling ahead",
    "int8",
)
"""Between them they have all state that a checkpoint holds of a run; `make soak SUITE=kills` goes the others."""
SEEN_IN = {
    "rollouts/rejected_groups": "dynamic sampling", "data/easy_share": ("easy", "all at once"),
    "data/replay_share": ("again", "all at once"), "curriculum/success": ("curriculum", "all at once"),
    "sampling/temperature": ("temperature", "all at once"), "signals/active": "warned",
}  # fmt: skip
"""The metrics that show that a way was gone, by a word of its name."""
STEPPED = str(Path(__file__).with_name("stepped_task.py"))
GAME = str(Path(__file__).parents[2] / "examples" / "03_guessing_game" / "task.py")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way in USUAL else [pytest.mark.soak(suite="kills")])
        for way in WAYS
    ],
)
def test_every_way_of_training_resumes_bit_equal(tmp_path, way):
    """A crash after the fourth step, when a checkpoint is there and two steps are under way."""
    if way == "int8" and not HAS_VNNI:
        pytest.skip("needs a CPU with AVX512_VNNI")
    task = GAME if "environment" in way else STEPPED

    def settings(folder: str) -> dict:
        made = config(tmp_path / folder)
        for section, keys in WAYS[way].items():
            made[section] = keys and {**made.get(section, {}), **keys}
        return made

    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        groupwise.rl(settings("whole"), task)
    finally:
        atomic_files.on_write = lambda name: None
    steps = [number for number, point in enumerate(points) if point == "commit:step:after"]
    assert crash_at(steps[3], lambda: groupwise.rl(settings("crashed"), task)) == 17
    go_on(settings("crashed"), task)
    whole, crashed = (
        what_must_be_equal(tmp_path / folder / "toy") for folder in ("whole", "crashed")
    )
    assert crashed == whole
    with Store.open(tmp_path / "whole" / "toy" / "run.db", readonly=True) as store:
        curves = store.metrics()
    for metric, words in SEEN_IN.items():
        expected = any(word in way for word in ([words] if isinstance(words, str) else words))
        assert any(value for _, value in curves.get(metric, [])) == expected, metric
    assert len({beta for _, beta in curves.get("beta", [])}) == (STEPS if "adaptive" in way else 0)


def fails_later(completions, trainer_state, **columns):
    """No reward from the second step on."""
    return [1.0 if trainer_state.global_step < 1 else None] * len(completions)


def test_steps_without_a_reward_are_counted_across_a_resume(tmp_path):
    """From its checkpoint, one step into the streak, the run stops where the uninterrupted one stopped."""
    silent = SimpleNamespace(
        get_rl_dataset=toy_task.get_rl_dataset,
        get_reward_funcs=lambda config, tokenizer: [fails_later],
    )
    settings = {**config(tmp_path), "eval": {"before_and_after": False}}
    for resume in (False, True):
        with pytest.raises(NothingScoredError, match="in 3 steps in a row"):
            groupwise.rl(settings, silent, resume=resume)
        with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
            assert store.last_step() == 2


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("sampling", 0),
        ("gradient", 3),
        ("between", 3),
        *(
            pytest.param(place, step, marks=pytest.mark.soak(suite="kills"))
            for place, step in (("sampling", 3), ("gradient", 0), ("between", 0))
        ),
    ],
)
def test_a_clean_stop(uninterrupted, tmp_path, monkeypatch, capsys, place, step):
    """Ctrl-C is said to be heard, keeps finished rollouts, checkpoints the last whole step, and exits with 130."""
    interrupt_at(monkeypatch, place, step)
    result = groupwise.rl(config(tmp_path), TOY)
    monkeypatch.undo()
    folder = tmp_path / "toy"
    assert (result.exit_code, result.summary["state"]) == (130, "interrupted")
    assert capsys.readouterr().err.count("Ctrl-C once more stops at once") == 1
    done = step + (place == "between")
    with Store.open(folder / "run.db", readonly=True) as store:
        assert store.last_step() == (done - 1 if done else None)
        assert bool(store.unfinished_groups()) == (place == "gradient")
    if done:
        newest = checkpoints.newest(folder / "checkpoints")
        assert newest is not None
        assert newest.step == done
    assert groupwise.rl(config(tmp_path), TOY, resume=True).exit_code == 0
    resumed, whole = what_must_be_equal(folder), uninterrupted[0]
    assert resumed["record"] == whole["record"]
    for name, digest in whole["files"].items():
        assert resumed["files"].get(name, digest) == digest
    assert (
        resumed["files"]["final/adapter_model.safetensors"]
        == whole["files"]["final/adapter_model.safetensors"]
    )


def interrupt_at(monkeypatch, place: str, step: int) -> None:
    """Send this process SIGINT in the midst of a piece of work: between tokens, between micro-batches, between steps."""
    owner, name = {
        "sampling": (TorchSampler, "_decode_one_token"),
        "gradient": (TorchLearner, "_backward"),
        "between": (loop, "commit"),
    }[place]
    original, at = getattr(owner, name), []
    draw_next = schedules.FixedLag.next

    def drawing(schedule):
        at.append(schedule._run.step)
        return draw_next(schedule)

    def stop_in(*arguments, **keywords):
        if at and at[-1] == step and len(at) < 100:
            at.extend([-1] * 100)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **keywords)

    monkeypatch.setattr(schedules.FixedLag, "next", drawing)
    monkeypatch.setattr(owner, name, stop_in)


def test_an_interrupted_evaluation_is_done_again(uninterrupted, tmp_path, monkeypatch):
    """The one that was due after step 3 belongs to the run, whether it was under way or not."""
    answer, calls = held_out.answer_held_out, []

    def stop_in(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(*arguments, **keywords)

    monkeypatch.setattr(held_out, "answer_held_out", stop_in)
    assert groupwise.rl(config(tmp_path), TOY).exit_code == 130
    monkeypatch.undo()
    assert groupwise.rl(config(tmp_path), TOY, resume=True).exit_code == 0
    assert what_must_be_equal(tmp_path / "toy")["record"] == uninterrupted[0]["record"]


def test_more_steps_continue_where_the_run_ended_and_where_it_was_moved(
    uninterrupted, whole_toy, tmp_path
):
    """max_steps may change; with a constant learning rate the longer run is the same run, also one that started from another."""
    constant = {"lr_scheduler_type": "constant"}
    before = Path(shutil.copytree(whole_toy.runs / "toy", tmp_path / "before"))

    def settings(folder: str, steps: int) -> dict:
        made = config(tmp_path / folder, max_steps=steps, **constant)
        return {**made, "eval": {"before_and_after": False}}

    groupwise.rl(settings("whole", 4), TOY, init_from=str(before))
    groupwise.rl(settings("cut", 2), TOY, init_from=str(before))
    shutil.rmtree(before)
    (tmp_path / "cut").rename(tmp_path / "moved")
    groupwise.rl(settings("moved", 4), TOY, resume_from="toy@2")
    moved, whole = (what_must_be_equal(tmp_path / name / "toy") for name in ("moved", "whole"))
    assert moved["record"] == whole["record"]


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(40, marks=pytest.mark.timeout(400)),
        pytest.param(1, marks=pytest.mark.soak(suite="kills")),
    ],
)
def test_a_run_that_starts_from_another_one_survives_crashes(whole_toy, tmp_path, every):
    """It copies what it starts from; until it has, a resume copies it, and afterwards nobody else's files are needed."""

    def begin(settings: dict) -> None:
        groupwise.rl(settings, TOY, init_from=str(whole_toy.runs / "toy"))

    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        begin(config(tmp_path / "whole", max_steps=2))
    finally:
        atomic_files.on_write = lambda name: None
    whole = what_must_be_equal(tmp_path / "whole" / "toy")
    failed: list[str] = []
    for number in range(turn() % every, len(points), every):
        runs = tmp_path / str(number)
        settings = config(runs, max_steps=2)
        assert crash_at(number, lambda made=settings: begin(made)) == 17
        if not (runs / "toy" / "run.db").exists():
            continue  # nothing was begun
        go_on(settings)
        copied = runs / "toy" / "start" / "adapter_model.safetensors"
        if what_must_be_equal(runs / "toy") != whole or not copied.is_file():
            failed.append(f"{number} {points[number]}")
    assert not failed


def test_a_second_resume_does_not_rewind_the_first(tmp_path, monkeypatch):
    """The first chooses its checkpoint; meanwhile the second resumes and ends."""
    assert crash_at(25, lambda: start(tmp_path)) == 17
    prepare = start_module.prepare_rl

    def slow(*arguments, **options):
        monkeypatch.setattr(start_module, "prepare_rl", prepare)
        assert groupwise.rl(config(tmp_path), TOY, resume=True).exit_code == 0
        return prepare(*arguments, **options)

    monkeypatch.setattr(start_module, "prepare_rl", slow)
    with pytest.raises(RunInUseError, match="by another process"):
        groupwise.rl(config(tmp_path), TOY, resume=True)
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert store.last_step() == STEPS - 1
