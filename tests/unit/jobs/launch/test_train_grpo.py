"""From flags to the config of an ordinary run, and from there to a command line and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import typer

from groupwise.cli import train_grpo as command
from groupwise.jobs.launch.train_grpo import KEYS, Flags, arguments_of, config_of, problems
from groupwise.training.config import load_config

FLAGS = Flags(model="tiny", dataset="a.jsonl", reward_function=("correctness",))
ODD = Flags(
    model="--model",
    dataset="-d\n'x' \"y\" $(z) 😀",
    reward_function=("a.py:f", "-b=c"),
    preprocessing_pipeline="m:f",
    max_steps=7,
    learning_rate=1.25e-7,
    batch_size=3,
    num_generations=2,
    max_prompt_length=9,
    max_completion_length=11,
    output_dir="an output",
)


@pytest.mark.parametrize("flags", [FLAGS, ODD], ids=["plain", "odd"])
def test_a_command_line_means_what_it_was_made_of(
    flags: Flags, taken: list[tuple[Any, ...]]
) -> None:
    overrides = ("algorithm.beta=0.1", 'run.license="-x\\ny"')
    words = arguments_of(flags, overrides)
    assert words[0] == "groupwise-train-grpo"
    assert command.main(words[1:]) == 0
    ways = {"resume": False, "resume_from": None, "dry_run": False}
    assert taken == [(flags, overrides, ways)]


def test_the_defaults_are_those_that_are_published(taken: list[tuple[Any, ...]]) -> None:
    assert command.main(["--model=m", "--dataset=d", "--reward_function=r"]) == 0
    published = {
        "preprocessing_pipeline": "generic", "max_steps": 500, "learning_rate": 5e-6,
        "batch_size": 1, "num_generations": 4, "output_dir": "outputs", "use_unsloth": False,
        "max_prompt_length": 256, "max_completion_length": 128,
    }  # fmt: skip
    assert taken[0][0] == Flags(model="m", dataset="d", reward_function=("r",), **published)


def test_flags_of_other_launchers_are_told_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model_name_or_path", "m"]) == 2
    assert "(Possible options: --model)" in capsys.readouterr().err


def test_the_config_is_one_of_groupwise_rl() -> None:
    config = load_config(config_of(ODD)).config
    assert config.model.name == ODD.model
    assert config.data.dataset_name == ODD.dataset
    assert config.data.preprocessing_pipeline == "m:f"
    assert config.data.max_prompt_length == 9
    assert config.rewards.reward_funcs == ODD.reward_function
    assert (config.training.max_steps, config.training.learning_rate) == (7, 1.25e-7)
    assert (config.training.prompts_per_step, config.training.num_generations) == (3, 2)
    assert config.sampler.max_completion_length == 11
    assert (config.run.dir, config.run.name) == ("an output", "grpo")
    assert config.algorithm.type == "grpo"


def test_all_problems_are_reported_at_once() -> None:
    flags = Flags(model="", dataset="", reward_function=(), max_steps=0, learning_rate=float("inf"))
    told = problems(flags, ["run.dir=x", "sampler={}"])
    assert [text.split()[0] for text in told] == [
        *("--model", "--dataset", "--reward_function", "--max_steps", "--learning_rate"),
        *("run.dir", "sampler"),
    ]


def test_the_checkpoint_of_the_environment_counts(
    taken: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RESUME_FROM", "/job/outputs/grpo/checkpoints/step-4")
    assert command.main([*arguments_of(FLAGS)[1:], "--resume"]) == 0
    how = taken[0][2]
    assert (how["resume_from"], how["resume"]) == ("/job/outputs/grpo/checkpoints/step-4", False)
    assert "which RESUME_FROM names" in capsys.readouterr().err


def test_every_flag_is_a_key_of_the_config_and_has_its_name() -> None:
    app: Any = typer.main.get_command(command.app)
    offered = {option for parameter in app.params for option in parameter.opts}
    names = [field.name for field in fields(Flags)]
    assert list(KEYS) == names
    assert {f"--{name}" for name in names} <= offered
    assert not any("-" in option.removeprefix("--") for option in offered)
