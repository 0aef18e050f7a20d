"""Rows of jobs become equivalent commands, or every problem with them is reported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from groupwise.cli import train_grpo as command
from groupwise.core.errors import UsageError
from groupwise.core.settings.overrides import parse_override
from groupwise.jobs.hosts.spec import JobSpec, problems
from groupwise.jobs.launch import train_grpo
from groupwise.jobs.launch.kinds import (
    EVAL,
    GRPO,
    MAX_NUM_SEQS,
    MICROBATCH,
    SFT,
    TrainingKind,
    override_value,
)
from groupwise.jobs.launch.train_grpo import Flags
from groupwise.training.config import load_config
from groupwise.training.sft_config import load_sft_config

ODD = "-x=\n\t'a' \"b\" $(c) é \u2028 \ufeff 😀 # d: e"


def row(**columns: Any) -> dict[str, Any]:
    """A row with the database's defaults."""
    return {
        "job_id": "job-1",
        "job_type": "GRPO",
        "model": "tiny",
        "dataset": "/data/sums.jsonl",
        "reward_function": "correctness",
        "preprocessing_pipeline": "generic",
        "hyperparams": {},
        "use_unsloth": False,
        "output_dir": "outputs",
        "max_steps": 500,
        "learning_rate": 5e-6,
        "batch_size": 1,
        "num_generations": 4,
        "request": {},
        **columns,
    }


def refusal_of(kind: TrainingKind, **columns: Any) -> str:
    with pytest.raises(UsageError) as caught:
        kind.expand(row(**columns))
    return str(caught.value)


Given = Callable[[JobSpec], tuple[Flags, tuple[str, ...]]]


@pytest.fixture
def parsed_arguments(taken: list[tuple[Any, ...]]) -> Given:
    """What the command makes of its words."""

    def of(spec: JobSpec) -> tuple[Flags, tuple[str, ...]]:
        assert command.main(spec.arguments[1:]) == 0
        flags, overrides, _ = taken[-1]
        return flags, overrides

    return of


# GRPO


def test_odd_values_of_a_row_reach_the_command_unchanged(parsed_arguments: Given) -> None:
    odd = row(
        model=ODD,
        dataset="/" + ODD,
        reward_function=f"{'-a.py:f'}, --model=evil:f , m:g",
        preprocessing_pipeline="--use_unsloth",
        hyperparams={"run.license": ODD, "sampler": {"stop": [ODD, "--x"]}, "algorithm.beta": 1e-7},
        output_dir="-out put/a",
        max_steps=3,
    )
    spec = GRPO.expand(odd)
    assert problems(spec) == []
    flags, overrides = parsed_arguments(spec)
    assert (flags.model, flags.dataset, flags.max_steps) == (ODD, "/" + ODD, 3)
    assert flags.reward_function == ("-a.py:f", "--model=evil:f", "m:g")
    assert (flags.preprocessing_pipeline, flags.use_unsloth) == ("--use_unsloth", False)
    assert flags.output_dir == "-out put/a"
    config = load_config(train_grpo.config_of(flags), overrides).config
    assert config.run.license == ODD
    assert config.sampler.stop == (ODD, "--x")
    assert config.algorithm.knobs["beta"] == 1e-7
    assert (spec.artefacts, spec.checkpoints) == (("-out put/a",), ("-out put/a",))


def test_values_are_read_as_they_were_given() -> None:
    numbers = (0, -1, 5e-06, 1e300, True)
    for value in (ODD, "", "null", "1e5", "1_000", "\x7f", None, [1, "a"], {"k": [ODD]}, *numbers):
        word = override_value(value)
        assert word.isascii()
        assert word.isprintable()
        read = parse_override(f"a.b={word}")
        assert read == (("a", "b"), value)
        assert type(read[1]) is type(value)


@pytest.mark.parametrize("kind", [GRPO, SFT, EVAL])
@pytest.mark.parametrize("use_unsloth", [False, True])
def test_unsloth_is_asked_for_by_a_column(kind: TrainingKind, use_unsloth: bool) -> None:
    given = {} if kind is GRPO else {"max_steps": 500, "reward_function": None}
    if kind is EVAL:
        given["reward_function"] = "correctness"
    words = kind.expand(row(**given, use_unsloth=use_unsloth)).arguments
    asked = {"--use_unsloth", 'model.backend="unsloth"'} & {*words}
    assert len(asked) == use_unsloth


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        (
            {"model": None, "dataset": None, "reward_function": None},
            ["model is missing", "dataset is missing", "reward_function is missing"],
        ),
        ({"dataset": "sums.jsonl", "output_dir": "/x"}, ["neither an absolute path", "'/x'"]),
        ({"dataset": "data/sums.jsonl"}, ["neither an absolute path"]),
        (
            {"reward_function": "nosuch, corectness,correctness,antigravity"},
            ["`nosuch`", "`corectness`. Did you mean `correctness`", "gravity`"],
        ),
        ({"dataset": "file:../x"}, ["dataset '../x'"]),
        ({"output_dir": "../up"}, ["output_dir '../up'"]),
        (
            {"use_unsloth": True, "hyperparams": {"model.backend": "tunix"}},
            ["model.backend is --use_unsloth here"],
        ),
        ({"max_steps": 0, "learning_rate": -1.0}, ["--max_steps is 0", "--learning_rate is -1"]),
        ({"hyperparams": {"training.max_steps": 3}}, ["training.max_steps is --max_steps here"]),
        ({"hyperparams": {"beta": 0.1, "algorithm.epsilonn": 1}}, ["algorithm.beta", "epsilon"]),
        ({"hyperparams": {"a=b": 1, "--x": 2}}, ["'a=b' is not a key", "'--x' is not a key"]),
        (
            {"hyperparams": {"algorithm.beta": float("nan")}},
            ["algorithm.beta is not a finite number"],
        ),
        ({"hyperparams": {"algorithm": {"type": "/any/own.py:Mine"}}}, ["a class in a file"]),
    ],
    ids=str,
)
def test_all_that_is_wrong_is_reported(columns: dict[str, Any], texts: list[str]) -> None:
    said = refusal_of(GRPO, **columns)
    assert [text for text in texts if text not in said] == [], said


# SFT, EVAL


def test_sft_is_a_command_whose_keys_are_valid() -> None:
    columns = {"reward_function": None, "batch_size": 2, "hyperparams": {"lora.r": 4}}
    spec = SFT.expand(row(**columns))
    assert spec.arguments[:2] == ("groupwise", "sft")
    config = load_sft_config({}, spec.arguments[2:]).config
    assert (config.training.max_steps, config.training.examples_per_step) == (500, 2)
    assert (config.training.learning_rate, config.run.dir) == (5e-6, "outputs")
    assert config.data.preprocessing_pipeline == "generic"


def test_eval_is_a_command_whose_keys_are_valid() -> None:
    spec = EVAL.expand(row(hyperparams={"eval": {"max_prompts": 3}}, output_dir="found"))
    assert spec.arguments[:3] == ("groupwise", "eval", "--output=found/evaluation.json")
    config = load_config({}, spec.arguments[3:]).config
    assert (config.eval.max_prompts, config.data.dataset_test_split) == (3, "train")
    of_hub = EVAL.expand(row(dataset="openai/gsm8k"))
    assert 'data.dataset_test_split="test"' in of_hub.arguments


OF_KIND = {GRPO: {}, SFT: {"reward_function": None}, EVAL: {}}
"""Columns that are right for each."""


def test_columns_without_effect_are_refused() -> None:
    assert "reward_function has no" in refusal_of(SFT)
    assert "num_generations is 8" in refusal_of(SFT, num_generations=8)
    assert "max_steps is 3" in refusal_of(EVAL, max_steps=3)
    for key in ("learning_rate", "num_train_epochs"):
        given = {"reward_function": None, "hyperparams": {f"training.{key}": 1}}
        assert key in refusal_of(SFT, **given)


@pytest.mark.parametrize("kind", OF_KIND)
def test_machines_and_gpus_that_would_stand_idle_are_refused(kind: TrainingKind) -> None:
    columns = OF_KIND[kind]

    def said(**resources: Any) -> str:
        return refusal_of(kind, **columns, request={"resources": resources})

    assert "resources.machines is 2, but " in said(machines=2, gpus=0)
    assert "-- torchrun" in said(machines=2)
    assert "8 GPUs are asked for, but " in said(gpus=8)
    assert "2 GPUs are asked for" in said(vm="a", named=[0, 1])
    assert len(said(gpus=2, machines=2).splitlines()) == 2
    for will_do in ({}, {"gpus": 0}, {"gpus": 1}, {"vm": "a", "named": [1]}, {"share_mb": 8000}):
        assert kind.expand(row(**columns, request={"resources": will_do})).arguments


# smaller


def test_smaller_computes_less_at_once_and_learns_from_the_same_batch() -> None:
    given = row()
    less = GRPO.smaller(given)
    assert less is not None
    assert {**less, "hyperparams": {}} == given, "the row stays as it is"
    words = [word for word in GRPO.expand(less).arguments if not word.startswith("--")][1:]
    before, after = (load_config({"model": {"name": "m"}}, each).config for each in ((), words))
    assert after.training.max_tokens_per_microbatch == 2048
    assert after.training.prompts_per_step == before.training.prompts_per_step
    for key in (MICROBATCH, MAX_NUM_SEQS, "training.gradient_checkpointing"):
        section, name = key.split(".")
        extra: Any = type(getattr(before, section)).model_fields[name].json_schema_extra
        assert extra["on_resume"] in {"warn", "free"}, "a resume has to take it"


@pytest.mark.parametrize("kind", [GRPO, SFT, EVAL])
def test_smaller_comes_to_an_end(kind: TrainingKind) -> None:
    small, steps = row(), 0
    while (less := kind.smaller(small)) is not None:
        small, steps = {**less}, steps + 1
        assert steps < 20
    assert steps >= 1


# plugs


def test_expanding_loads_no_training_library_and_no_user_code() -> None:
    script = (
        "import sys; from groupwise.jobs.launch.kinds import GRPO;"
        f"GRPO.expand({row(reward_function='antigravity:fly,correctness', preprocessing_pipeline='this:that')!r});"
        "sys.exit(str({'torch', 'transformers', 'peft', 'antigravity', 'this'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""
