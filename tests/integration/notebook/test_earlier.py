"""Earlier runs are found again, resumed, returned or left alone; and what Drive brings to another machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from groupwise.core.errors import RunError, UsageError
from groupwise.engine.models.bundled import fetch_model
from groupwise.notebook import (
    TrainingConfig,
    drive,
    evaluate,
    export_checkpoint,
    prepare_session,
    quick_test,
    train_grpo,
)
from groupwise.notebook.training import Stopped
from groupwise.runs import checkpoints
from groupwise.runs.folder import RECORD
from groupwise.runs.store import Store

pytestmark = pytest.mark.slow


def config_of(**changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "model": "tiny", "dataset": "arithmetic", "dataset_max": 40, "num_batches": 8, "train_fraction": 0.75, "num_generations": 4,
        "total_generation_steps": 8, "learning_rate": 0.05, "beta": 0.0, "lora_rank": 4, "lora_alpha": 8, "experiment_name": "digits",
        "overrides": {"run.save_steps": 2, "run.processes": 1, "eval.max_prompts": 4},
    }  # fmt: skip
    return TrainingConfig(**{**values, **changes})


class Digits:
    """Rewards digits; the cell is interrupted after so many steps, before the next one is scored."""

    def __init__(self, interrupt: int | None = None) -> None:
        self.interrupt = interrupt

    def __call__(self, completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step == self.interrupt:
            saved = f"checkpoints/*/checkpoints/step-{self.interrupt}"
            self.interrupt = None
            os.kill(os.getpid(), signal.SIGINT)
            while not list(Path().glob(saved)):
                time.sleep(0.01)
        return [sum(each.isdigit() for each in text) / max(len(text), 1) for text in completions]


class Letters(Digits):
    def __call__(self, completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        found = super().__call__(completions, trainer_state)
        return [1 - each for each in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Two machines: one whose run was finished, with its state, and one whose run was cut off."""
    whole, cut = (tmp_path_factory.mktemp(name) for name in ("whole", "cut"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cut)
        cut_off(config_of())
        patch.chdir(whole)
        config = config_of()
        state = train_grpo(config, prepare_session(config), reward_functions=[Digits()])
    return whole, cut, state


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Go to a machine of this name: a disk of its own, and the same Drive."""
    place = tmp_path / "drive"
    place.mkdir()
    monkeypatch.setattr(drive, "DRIVE", place)
    monkeypatch.setattr("groupwise.notebook.config.DRIVE", place)

    def go(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    return go


@pytest.fixture
def finished(machine: Any, trained: tuple[Path, Path, Any]) -> Path:
    """A machine on which a run was finished."""
    return _like(machine("one"), trained[0])


@pytest.fixture
def cut(machine: Any, trained: tuple[Path, Path, Any]) -> Path:
    """A machine on which a run was cut off after three of six steps."""
    return _like(machine("one"), trained[1])


def _like(machine: Path, other: Path) -> Path:
    shutil.copytree(other / "checkpoints", machine / "checkpoints")
    return machine


def final(machine: Path, run: str = "digits") -> bytes:
    return (machine / "checkpoints" / run / "final" / "adapter_model.safetensors").read_bytes()


def train(config: TrainingConfig, reward: Any = None) -> Any:
    return train_grpo(config, prepare_session(config), reward_functions=[reward or Digits()])


def cut_off(config: TrainingConfig, at: int = 3, kind: type[Digits] = Digits) -> None:
    with pytest.raises(Stopped):
        train(config, kind(at))


def test_a_finished_run_is_found_again_and_not_trained_twice(finished, trained, capsys):
    state = trained[2]
    config = config_of()
    session = prepare_session(config)
    assert "digits: finished after 6" in capsys.readouterr().out
    assert session.run.summary["state"] == "finished"
    assert ("run", "checkpoints/digits") in session.table().rows
    quick_test(config, session)
    assert "digits@6" in capsys.readouterr().out
    other = train_grpo(config, session, reward_functions=[Digits()])
    assert "was finished with this" in capsys.readouterr().out
    assert (other.final_policy, other.checkpoint_dir) == (state.final_policy, state.checkpoint_dir)
    one, two = state.grpo_trainer, other.grpo_trainer
    assert two.summary["reward_last"] == one.summary["reward_last"]
    assert None not in (one.before, one.after)
    for before, now in ((one.before, two.before), (one.after, two.after)):
        assert (now.metrics, now.metrics_with_interval) == (
            before.metrics,
            before.metrics_with_interval,
        )
    kept = config_of(save_to_drive=True)
    train(kept)
    assert "was finished with this" in capsys.readouterr().out
    drive_of_it = finished.parent / "drive" / "digits"
    assert (drive_of_it / "final" / "adapter_model.safetensors").is_file()
    assert [each.name for each in (finished / "checkpoints").iterdir()] == ["digits"]
    anew = train_grpo(config, session, reward_functions=[Digits()], resume=False)
    assert anew.checkpoint_dir == str(session.folder) == "checkpoints/digits-2"
    assert final(finished) == final(finished, "digits-2")
    more = config_of(overrides={**config.overrides, "eval.max_prompts": 2})
    cut_off(more, 1)
    assert Path("checkpoints/digits-3").is_dir(), "another evaluation is another run"


def test_other_rewards_and_other_rows_begin_beside(cut, capsys):
    config = config_of()
    session = prepare_session(config)
    said = capsys.readouterr().out
    assert "goes on from step 3" in said
    assert re.search(r"^  run +checkpoints/digits$", said, re.MULTILINE)
    with pytest.raises(Stopped):
        train_grpo(config, session, reward_functions=[Letters(1)])
    assert "Digits, the reward Letters" in capsys.readouterr().out
    session = prepare_session(config)
    session.train_dataset = list(session.train_dataset)[1:]
    with pytest.raises(Stopped):
        train_grpo(config, session, reward_functions=[Digits(1)])
    assert "differs in rows" in capsys.readouterr().out
    assert Store.facts(session.run.folder / RECORD)["dataset"] == "own rows, tested on arithmetic"
    train(config)
    assert "digits was cut off:" in capsys.readouterr().out
    names = sorted(each.name for each in (cut / "checkpoints").iterdir())
    assert names == ["digits", "digits-2", "digits-3"]


def test_an_interrupted_run_can_be_exported_and_sampled(machine, capsys):
    machine("one")
    config = config_of()
    session = prepare_session(config)
    assert session.weights is None
    with pytest.raises(Stopped):
        train_grpo(config, session, reward_functions=[Digits(3)])
    with pytest.raises(UsageError, match=r"no evaluation 'after'. It has: before"):
        _ = session.run.evaluations()["after"]
    assert export_checkpoint(config, session) == "checkpoints/digits/checkpoints/step-3"
    quick_test(config, session)
    assert "digits@3" in capsys.readouterr().out
    with pytest.raises(UsageError, match="other values of beta"):
        evaluate(config_of(beta=0.1), session)
    with pytest.raises(UsageError, match="other values of seed"):
        quick_test(config_of(seed=1), session)


def test_drive_takes_a_run_to_another_machine(machine, trained, capsys):
    config = config_of(save_to_drive=True)
    machine("first")
    cut_off(config)
    second = machine("second")
    capsys.readouterr()
    session = prepare_session(config_of(save_to_drive=True))
    said = capsys.readouterr().out
    assert "digits@3 came from there" in said
    assert "after 3 of 6" in said
    assert len(session.run.metrics("reward")["reward"]) == 3
    train_grpo(session.config, session, reward_functions=[Digits()])
    assert final(second) == final(trained[0])
    place = second.parent / "drive" / "digits"
    assert (place / "final" / "adapter_model.safetensors").is_file()
    path = Path(export_checkpoint(session.config, session))
    with zipfile.ZipFile(place / "digits.zip") as archive:
        packed = archive.read("adapter_model.safetensors")
    assert packed == (path / "hf_lora" / "adapter_model.safetensors").read_bytes()


def test_each_run_of_an_experiment_has_its_own_folder_on_drive(finished, machine, capsys):
    config = config_of(save_to_drive=True)
    train(config)
    other = config_of(save_to_drive=True, seed=5)
    cut_off(other, at=5)
    third = machine("third")
    prepare_session(other)
    assert "digits@6, digits-2@5" in capsys.readouterr().out
    for run, step in (("digits", 6), ("digits-2", 5)):
        newest = checkpoints.newest(third / "checkpoints" / run / "checkpoints")
        assert newest is not None
        assert newest.step == step
    train(other)
    assert "digits-2 was cut off:" in capsys.readouterr().out
    for each in (config, other):
        export_checkpoint(each, prepare_session(each))
    place = third.parent / "drive"
    zips = sorted(str(each.relative_to(place)) for each in place.rglob("*.zip"))
    assert zips == ["digits-2/digits-2.zip", "digits/digits.zip"]
    packed = [zipfile.ZipFile(place / each).read("adapter_model.safetensors") for each in zips]
    assert packed[0] != packed[1]


def test_a_training_that_fails_is_the_sessions_run(finished, capsys):
    config = config_of()
    session = prepare_session(config)
    assert session.policy == "digits@6"

    def broken(completions, **columns):
        raise ValueError("no")

    shared = prepare_session(config)
    shared.test_dataset = shared.train_dataset
    with pytest.raises(UsageError, match="rows to train on ask"):
        train_grpo(config, shared, reward_functions=[broken])
    assert "is taken" not in "".join(capsys.readouterr()), "no run was made"
    with pytest.raises(RunError):
        train_grpo(config, session, reward_functions=[broken])
    said = "".join(capsys.readouterr())
    assert "finished, but differs in the reward Digits, the reward broken" in said
    assert "digits is taken" in said
    assert session.run.folder == Path("checkpoints/digits-2")
    assert session.run.rollouts()
    assert session.policy == "digits-2@2"


def test_a_record_is_mended_and_what_is_gone_is_begun_again(cut, capsys):
    """A run that lost its checkpoints begins again; a finished one without its weights is trained anew."""
    (cut / "checkpoints" / "digits" / "run.db").write_bytes(b"torn")
    assert train(config_of()).checkpoint_dir == "checkpoints/digits"
    assert "digits was cut off:" in capsys.readouterr().out
    for name in ("final", "checkpoints"):  # to free the disk
        shutil.rmtree(cut / "checkpoints" / "digits" / name)
    cut_off(config_of(), 1)
    assert "weights are gone" in capsys.readouterr().out
    shutil.rmtree(cut / "checkpoints" / "digits-2" / "checkpoints")
    prepare_session(config_of())
    assert "from its start" in capsys.readouterr().out


def test_a_name_that_is_on_drive_is_not_taken_again(finished, machine, capsys):
    """Also where the run of that name is no longer here, or never got as far as a checkpoint."""
    config = config_of(save_to_drive=True)
    train(config)
    session = prepare_session(config)
    shutil.rmtree(finished / "checkpoints" / "digits")
    state = train_grpo(config, session, reward_functions=[Digits()])
    assert state.checkpoint_dir == "checkpoints/digits-2"
    shutil.rmtree(finished.parent / "drive" / "digits")
    machine("second")
    capsys.readouterr()
    prepare_session(config)
    assert "digits-2@6 came from there" in capsys.readouterr().out


def test_a_model_with_other_weights_begins_beside(machine, capsys):
    folder = machine("one")
    model = folder / "my_model"
    shutil.copytree(fetch_model("tiny"), model)
    config = config_of(model=str(model), num_batches=3)
    train(config)
    weights = model / "model.safetensors"
    tensors = {name: value + 0.25 for name, value in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    capsys.readouterr()
    session = prepare_session(config)
    assert "earlier run" not in capsys.readouterr().out
    cut_off(config, 1)
    assert final(folder)
    save_file({name: value + 0.25 for name, value in tensors.items()}, weights, {"format": "pt"})
    capsys.readouterr()
    with pytest.raises(Stopped):
        train_grpo(config, session, reward_functions=[Digits(1)])
    said = capsys.readouterr().out
    assert "differs in the weights" in said
    assert session.folder == Path("checkpoints/digits-3")
