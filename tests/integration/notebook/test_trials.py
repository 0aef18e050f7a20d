"""A search: trials are trainings, bad ones end early, and an interrupted search resumes."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import Any, cast

import numpy as np
import pytest

from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.terminal.notebook import Table
from groupwise.notebook import TrainingConfig
from groupwise.notebook.hyperparameter_search import search
from groupwise.notebook.search_space import Between
from groupwise.notebook.training import Stopped
from groupwise.runs.folder import read_config

SPACE: dict[str, Any] = {
    "learning_rate": Between(1e-4, 0.1, log=True),
    "num_generations": [2, 4],
    "training.weight_decay": [0.0],
}


def between(low: Any, high: Any) -> Between:
    """A range that a type checker would refuse."""
    return Between(low, high)


def digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


PLAINLY: dict[str, Any] = {"reward_functions": [digits], "prune": False}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return TrainingConfig(
        model="tiny", dataset="arithmetic", dataset_max=12, num_batches=3, batch_size=1, total_generation_steps=8, beta=0.0, lora_rank=2,
        lora_alpha=4, experiment_name="digits", overrides={"run.processes": 1, "eval.max_prompts": 2},
    )  # fmt: skip


def test_trials_are_trainings_of_the_space_and_another_question_is_another_search(
    config, tmp_path, capsys
):
    def ask(config=config, space=SPACE, trials=2, reward=digits, **others):
        return search(
            config, space, trials=trials, reward_functions=[reward], prune=False, **others
        )

    def letters(completions, **columns):
        return [float(sum(each.isalpha() for each in text)) for text in completions]

    found = ask()
    assert len(found.study.trials) == 2
    assert {trial.params["num_generations"] for trial in found.study.trials} <= {2, 4}
    runs = tmp_path / "checkpoints" / "digits-search"
    assert trainings(runs) == ["trial-0", "trial-1"]
    best = found.best
    assert best.learning_rate == found.study.best_trial.params["learning_rate"]
    assert best.overrides == {**config.overrides, "training.weight_decay": 0.0}
    assert best.experiment_name == "digits"
    assert found.best_value == max(trial.value or 0 for trial in found.study.trials)
    assert isinstance(found.table(), Table)
    assert [len(row) for row in found.table().rows] == [6, 6]
    assert "learning_rate" in capsys.readouterr().out
    assert "<img" in found.as_html()
    values = [trial.value for trial in found.study.trials]
    assert [trial.value for trial in ask().study.trials] == values
    assert [trial.value for trial in ask(trials=3).study.trials][:2] == values
    overrides = {**config.overrides, "eval.max_prompts": 3}
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"config": config.changed(beta=0.3)}, "beta"),
        ({"reward": letters}, "the reward digits, the reward letters"),
        ({"metric": "accuracy"}, "metric"),
        ({"config": config.changed(overrides=overrides)}, r"eval\.max_prompts"),
        ({"space": {"learning_rate": Between(1e-4, 0.2)}}, "learning_rate, num_generations"),
    )
    for asked, told in others:
        with pytest.raises(ConfigError, match=told):
            ask(**asked)
    with pytest.raises(UsageError, match="no metric 'acuracy'"):
        ask(metric="acuracy")
    # A run of other values that has the number of a trial is not taken for it.
    (runs / "trials.jsonl").unlink()
    [trial] = ask(space={**SPACE, "learning_rate": Between(0.5, 0.6)}, trials=1).study.trials
    before, now = (
        read_config(runs / name)["training"]["learning_rate"] for name in ("trial-0", "trial-0-2")
    )
    assert before < now == trial.params["learning_rate"]


def test_a_search_that_was_cut_off_continues_in_the_middle_of_a_trial(config, tmp_path):
    def cut_off(completions, trainer_state, **columns):
        if trainer_state.global_step == 3 and not (tmp_path / "cut").exists():
            (tmp_path / "cut").touch()
            os.kill(os.getpid(), signal.SIGINT)
        return digits(completions)

    longer = config.changed(num_batches=7)
    with pytest.raises(Stopped):
        search(longer, SPACE, trials=2, reward_functions=[cut_off], prune=False)
    found = search(longer, SPACE, trials=2, reward_functions=[cut_off], prune=False)
    apart = longer.changed(checkpoint_dir=str(tmp_path / "other" / "digits"))
    whole = search(apart, SPACE, trials=2, reward_functions=[cut_off], prune=False)
    one, other = (
        [(trial.params, trial.value) for trial in each.study.trials] for each in (found, whole)
    )
    assert one == other
    assert len(one) == 2


def test_a_trial_whose_run_was_over_is_not_trained_again(config, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("optuna.study.Study.tell", crash)
        with pytest.raises(KeyboardInterrupt):
            search(config, SPACE, trials=1, **PLAINLY)
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.notebook.training.rl", crash)
        found = search(config, SPACE, trials=1, **PLAINLY)
    assert found.best_value == found.study.trials[0].value


def test_a_search_resumes_only_if_its_rewards_read_the_same_values(config):
    seen, letters = list[str](), ["0123"]

    def reward(completions, **columns):
        seen.extend(completions)
        return [sum(text.count(each) for each in letters[0]) for text in completions]

    search(config, SPACE, trials=1, reward_functions=[reward], prune=False)
    assert seen
    found = search(config, SPACE, trials=2, reward_functions=[reward], prune=False)
    assert len(found.study.trials) == 2
    letters[0] = "01"
    with pytest.raises(ConfigError, match="reward reward"):
        search(config, SPACE, trials=3, reward_functions=[reward], prune=False)


def test_a_trial_that_fails_is_reported_and_the_next_one_begins(config):
    def fails(completions, **columns):
        raise ValueError("no, says https://me:plain@host/v1")

    longer = config.changed(num_batches=5)
    found = search(longer, SPACE, trials=2, reward_functions=[fails], prune=False)
    assert [trial.state.name for trial in found.study.trials] == ["FAIL", "FAIL"]
    assert "scored in 3 steps" in str(found)
    assert "me:plain" not in str([trial.user_attrs for trial in found.study.trials])
    with pytest.raises(UsageError, match="No trial has ended well"):
        _ = found.best


def test_a_trial_that_is_worse_than_the_others_ends_early(config):
    values = iter([*[1.0] * 9, *[0.0] * 30])

    def worse(completions, **columns):
        return [next(values, 0.0)] * (len(completions) - 1) + [0.5]

    found = search(config, SPACE, trials=4, reward_functions=[worse])
    states = [trial.state.name for trial in found.study.trials]
    assert "PRUNED" in states
    assert "ended early" in str(found.table())


SMALL = {"num_generations": [2, 4], "epsilon": [0.1]}


def trainings(folder):
    return sorted(each.name for each in folder.iterdir() if each.is_dir())


def test_values_that_were_tried_are_not_trained_again_and_all_of_them_are_the_end(
    config, tmp_path, capsys
):
    found = search(config, SMALL, trials=30, **PLAINLY)
    trials = found.study.trials
    tried = [trial.params["num_generations"] for trial in trials]
    assert {*tried} == {2, 4}
    assert tried[0] == tried[1]
    folder = tmp_path / "checkpoints" / "digits-search"
    assert trainings(folder) == [f"trial-{n}" for n in sorted({*map(tried.index, tried)})]
    assert len({(number, trial.value) for number, trial in zip(tried, trials, strict=True)}) == 2
    became = {row[0]: row[-1] for row in found.table().rows}
    assert (became["0"], became["1"]) == ("", "as trial 0")
    assert f"the search is over after {len(tried)} of 30 trials" in capsys.readouterr().out
    again = search(config, SMALL, trials=30, **PLAINLY)
    assert len(again.study.trials) == len(tried)


def test_a_space_that_cannot_work_is_refused_before_any_training(config, tmp_path):
    wrong: tuple[tuple[Any, str], ...] = (
        ({}, "not a mapping, or empty"), ([1], "not a mapping"), ({"learning_rat": [0.1]}, "learning_rat"),
        ({"learning_rate": Between(-1.0, 0.1)}, "learning_rate is -1.0"), ({"learning_rate": Between(0.1, 0.1)}, "not below"),
        ({"learning_rate": Between(0.0, 0.1, log=True)}, "0.0 has no logarithm"),
        ({"learning_rate": between("a", 0.1)}, "learning_rate: .* not 'a'"), ({"beta": Between(0, True)}, "beta: .* not True"),
        ({"num_iterations": Between(0.5, 4)}, "num_iterations takes whole"),
        ({"dataset_max": Between(4, 9.5)}, "dataset_max takes whole"),
        ({"training.max_off_policy_steps": Between(0.5, 4)}, "training.max_off_policy_steps takes whole"), ({"topic": Between(0, 1)},
        "topic is not a key"), ({"num_generations": [2, 1]}, "num_generations is 1"), ({"num_generations": "24"}, "num_generations"),
        ({"lora_rank": 8}, "lora_rank: expected Between"), ({"hf_token": ["a"]}, "nothing that a search can vary"),
    )  # fmt: skip
    for space, said in wrong:
        with pytest.raises(ConfigError, match=said):
            search(config, cast("Any", space), trials=1)
    with pytest.raises(ConfigError, match="trials is '3'"):
        search(config, SPACE, trials=cast("Any", "3"))
    assert not (tmp_path / "checkpoints").exists()


class Mine(TrainingConfig):
    boldness: float = 0.5
    words: int | None = None


@pytest.mark.parametrize(("space", "kind"), [
    ({"beta": Between(0, 1)}, float), ({"training.weight_decay": Between(0, 1)}, float),
    ({"boldness": between(np.int64(0), np.float32(1))}, float), ({"num_iterations": between(1.0, np.float32(20))}, int),
    ({"words": Between(0, 20)}, int), ({"lora.r": Between(1, 20)}, int),
])  # fmt: skip
def test_a_range_gives_values_of_its_fields_type(config, space, kind, monkeypatch):
    monkeypatch.setattr("groupwise.notebook.hyperparameter_search._train_trial", told_a_number)
    given = Mine(**{name: getattr(config, name) for name in config.model_fields_set})
    values = []
    for number in range(3):
        own = given.changed(experiment_name=f"r{number}", seed=number)
        [trial] = search(own, space, trials=1).study.trials
        values += trial.params.values()
    assert {type(value) for value in values} == {kind}
    assert any(value % 1 for value in values) == (kind is float)


def told_a_number(study, trial, *_, **__):
    study.tell(trial, 1.0)


class WithKeys(TrainingConfig):
    openai_api_key: str | None = None
    judge_url: str = ""


PLAIN = "plain-XYZ987"


def test_no_credential_stands_in_the_journal(config, tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.notebook.hyperparameter_search._train_trial", told_a_number)
    given = {name: getattr(config, name) for name in config.model_fields_set}
    kept = WithKeys(**given, openai_api_key=PLAIN, judge_url=f"https://me:{PLAIN}@h/")
    search(kept, SMALL, trials=1)
    [file] = [each for each in (tmp_path / "checkpoints").rglob("*") if each.is_file()]
    assert (file.name, PLAIN in file.read_text()) == ("trials.jsonl", False)
    search(kept.changed(openai_api_key=None), SMALL, trials=2)
    for space in ({"openai_api_key": [PLAIN]}, {"judge_url": ["", f"https://me:{PLAIN}@h/"]}):
        with pytest.raises(ConfigError, match=next(iter(space))):
            search(kept, space, trials=1)


def test_a_metric_that_cannot_be_measured_is_refused_before_any_training(
    config, tmp_path, monkeypatch
):
    with pytest.raises(UsageError, match="within_10_percent"):
        search(config, SPACE, trials=1, metric="acuracy")
    blind = config.changed(overrides={**config.overrides, "eval.before_and_after": False})
    with pytest.raises(UsageError, match="test part"):
        search(blind, SPACE, trials=1)
    rows = tmp_path / "towns.jsonl"
    lines = [f'{{"question": "q{n}?", "answer": "Town{n % 3}"}}\n' for n in range(9)]
    rows.write_text("".join(lines))
    with pytest.raises(UsageError, match="'within_10_percent'"):
        search(config.changed(dataset=str(rows)), SPACE, trials=1, metric="within_10_percent")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "optuna" else found(name)
    )
    with pytest.raises(UsageError, match="optuna, which is not installed"):
        search(config, SPACE, trials=1)
    assert not list((tmp_path / "checkpoints").rglob("run.db"))


def test_trials_on_drive_continue_on_another_machine(config, tmp_path, monkeypatch):
    for name in ("drive", "one", "two"):
        (tmp_path / name).mkdir()
    place = tmp_path / "drive"
    monkeypatch.setattr("groupwise.notebook.drive.DRIVE", place)
    monkeypatch.setattr("groupwise.notebook.config.DRIVE", place)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.chdir(tmp_path / "one")
    others = {"save_to_drive": True, "hf_token": "hf_key"}
    own = TrainingConfig(**{**config.model_dump(exclude={"checkpoint_dir"}), **others})
    seen = list[str]()

    def collecting(completions, **columns):
        seen.extend(completions)
        return digits(completions)

    found = search(own, SPACE, trials=1, reward_functions=[collecting], prune=False)
    assert os.environ["HF_TOKEN"] == "hf_key"
    files = [str(each.relative_to(place)) for each in place.rglob("*") if each.is_file()]
    assert files == ["digits-search/trials.jsonl"]
    monkeypatch.chdir(tmp_path / "two")
    more = search(own, SPACE, trials=2, reward_functions=[collecting], prune=False)
    assert more.study.trials[0].value == found.study.trials[0].value
    assert len(more.study.trials) == 2
