"""The five functions on a tiny model: what they make and print, and that an interrupted training resumes exactly."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import NothingScoredError, RunNotFoundError, UsageError
from groupwise.notebook import (
    Session,
    TrainerState,
    TrainingConfig,
    evaluate,
    export_checkpoint,
    format_prompt,
    prepare_session,
    quick_test,
    run_full_pipeline,
    train_grpo,
)
from groupwise.runs import checkpoints


def digits(completions, **columns):
    """A reward that a model without any training can get better at."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def config_of(**changes):
    values = {
        "model": "tiny", "dataset": "arithmetic", "dataset_max": 40, "num_batches": 8, "train_fraction": 0.75, "batch_size": 2,
        "num_generations": 4, "total_generation_steps": 16, "learning_rate": 0.05, "beta": 0.0, "lora_rank": 4, "lora_alpha": 8,
        "experiment_name": "digits",
    }  # fmt: skip
    return TrainingConfig(**{**values, **changes})


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Piped:
    """What a pipeline made in its folder, and what it said to the two streams."""

    session: Session
    state: TrainerState
    path: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("piped")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with redirect_stdout(out), redirect_stderr(err):
            session, state, path = run_full_pipeline(config_of(), reward_functions=[digits])
    return Piped(session, state, folder / path, out.getvalue(), err.getvalue())


@pytest.fixture
def at_its_place(piped, monkeypatch):
    monkeypatch.chdir(piped.path.parents[3])
    return piped


def test_the_pipeline_from_a_config_to_an_adapter(at_its_place):
    piped = at_its_place
    config, run = piped.session.config, piped.session.run
    assert piped.path == Path.cwd() / "checkpoints/digits/checkpoints/step-6"
    assert (piped.state.checkpoint_dir, piped.state.config) == ("checkpoints/digits", config)
    assert piped.state.test_answer
    steps = re.findall(r"Completions of step (\d)\n  asked  +reward  parts ", piped.err)
    assert steps == list("123456")
    for part in (
        "6 steps of 2 prompts × 4 completions",
        "arithmetic: 30 rows to train on, 10 to test",
        "PeftModel",
        piped.state.test_answer[:5],
    ):
        assert part in piped.out
    assert [step for step, _ in run.metrics("reward")["reward"]] == list(range(1, 7))
    assert set(run.evaluations()) == {"before", "after"}
    assert {"accuracy", "within_10_percent", "format_rate"} <= set(run.evaluations()["after"])
    assert "<img" in run.plot("reward").as_html()
    assert len(run.table(step=1).rows) == 8
    assert run.summary["state"] == "finished"
    with pytest.raises(UsageError, match="cannot be changed"):
        config.beta = 0.5
    card = (piped.path / "hf_lora" / "README.md").read_text()
    assert "10 held-out prompts" in card
    assert "(grpo) on `arithmetic` for 6 steps" in card
    assert "30 examples of `arithmetic`, rewarded by `digits` (weight 1). The config:" in card
    assert "NotebookTask" not in card


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks
def test_the_exported_adapter_is_not_empty_and_gives_peft_the_same_logits(at_its_place):
    import torch
    from peft import PeftModel

    from groupwise.engine.models.config import ModelConfig
    from groupwise.engine.models.load import load_model

    path = at_its_place.path
    base = load_model(ModelConfig(name="tiny"), "float32")
    ids = torch.tensor([at_its_place.session.tokenizer("What is 1 + 1?").input_ids])
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, path / "hf_lora")
        after = adapted(ids).logits
        final = PeftModel.from_pretrained(
            load_model(ModelConfig(name="tiny"), "float32"), path.parents[1] / "final"
        )
        expected = final(ids).logits
    assert not torch.equal(before, after)
    assert torch.equal(after, expected)
    learnt = [value for name, value in adapted.named_parameters() if "lora_B" in name]
    assert all(value.abs().max() > 0 for value in learnt)
    said = at_its_place.out
    shown = textwrap.dedent(said.partition("To load it\n")[2].partition("To serve it\n")[0])
    loaded: dict[str, Any] = {}
    exec(shown, loaded)
    with torch.no_grad():
        assert torch.equal(loaded["model"](ids).logits, expected)
    assert loaded["tokenizer"]("What is 1 + 1?").input_ids == ids.tolist()[0]
    prompt = loaded["tokenizer"].decode(loaded["inputs"]["input_ids"][0])
    assert format_prompt("What is 3 + 4?", at_its_place.session.config) in prompt
    assert re.findall(r"To serve it\n  (.*)", said) == [
        'vllm serve "$(groupwise fetch-model tiny)" --enable-lora --max-lora-rank 8 '
        f"--lora-modules digits={path.relative_to(Path.cwd())}/hf_lora"
    ]


def test_an_evaluation_with_other_rewards_than_the_training_says_so(here, capsys):
    def half(completions, **columns):
        return [0.5] * len(completions)

    config = config_of(num_batches=3, total_generation_steps=8)
    session = prepare_session(config)
    train_grpo(config, session, extra_reward_functions=[(half, 0.5)])
    after = session.run.evaluations()["after"]
    capsys.readouterr()
    same = evaluate(config, session)  # with the rewards of the training
    assert "other rewards" not in capsys.readouterr().out
    assert same["reward"] == pytest.approx(after["reward"])
    other = evaluate(config, prepare_session(config))  # as in a new kernel
    assert "other rewards (match_format, math_answer, half)" in capsys.readouterr().out
    assert other["reward"] == pytest.approx(after["reward"] - 0.25)


def test_a_training_in_which_nothing_was_scored_fails_and_teaches(here):
    def as_chats(completions, **columns):
        return [float(len(each[0]["content"])) for each in completions]

    config = config_of(num_batches=3, overrides={"eval.before_and_after": False})
    session = prepare_session(config)
    with pytest.raises(NothingScoredError, match="in 2 steps in a row") as failed:
        train_grpo(config, session, reward_functions=[as_chats])
    assert "take `completion`" in str(failed.value)
    assert "Fix the reward functions" in str(failed.value)
    assert "changed rewards begins at its first step" in str(failed.value)


def test_pieces_by_themselves(here, capsys):
    config = config_of()
    session = prepare_session(config)
    with pytest.raises(UsageError, match="call train_grpo"):
        _ = session.run
    assert session.weights is None
    untrained = quick_test(config, session, "Say 1.")
    assert untrained == quick_test(config, session, "Say 1.")
    measured = evaluate(config, session, samples_per_prompt=2)
    assert {"accuracy", "format_rate", "pass@1", "pass@2"} <= set(measured)
    assert "base: 10 prompts" in capsys.readouterr().out
    assert session.lora_policy["r"] == 4
    assert session.model_config.num_hidden_layers == len(session.ref_model.model.layers)
    assert session.mesh is None
    with pytest.raises(UsageError, match="give a list"):
        session.sampler("one text")
    answers = session.sampler(["a", [{"role": "user", "content": "b"}]], total_generation_steps=4)
    assert len(answers) == 2


def test_a_reward_that_hangs_costs_its_group_and_not_the_run(here):
    released = threading.Event()

    def hangs_in_one_step(completions, trainer_state=None, **columns):
        if trainer_state.global_step == 1:
            released.wait(60)
        return digits(completions)

    config = config_of(num_batches=4, overrides={"rewards.time_limit": 0.5})
    session = prepare_session(config)
    train_grpo(config, session, reward_functions=[hangs_in_one_step])
    assert session.run.summary["state"] == "finished"
    late = dict(session.run.metrics("rollouts/timed_out")["rollouts/timed_out"])
    assert late[1] == late[3] == 0
    assert late[2] == 8
    released.set()


def test_sessions_and_checkpoints_of_another_config_are_refused(here):
    with pytest.raises(UsageError, match="num_batches, learning_rate"):
        train_grpo(config_of(num_batches=9, learning_rate=0.1), prepare_session(config_of()))
    folder = here / "checkpoints" / "digits"
    folder.mkdir(parents=True)
    state: Any = TrainerState(None, folder, str(folder))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RunNotFoundError, match="nothing to export"):
        export_checkpoint(config_of(), state)
    known = replace(state, config=config_of())
    with pytest.raises(UsageError, match="save_to_drive, experiment_name"):
        export_checkpoint(config_of(experiment_name="letters", save_to_drive=True), known)
    other = replace(state, checkpoint_dir="checkpoints/letters-2")
    with pytest.raises(UsageError, match="of checkpoints/letters-2"):
        export_checkpoint(config_of(), other)


CELLS = """
    import time
    from pathlib import Path
    from groupwise.notebook import *

    def digits(completions, trainer_state=None, **columns):
        Path("step").write_text(str(trainer_state.global_step))
        while Path("wait").exists() and trainer_state.global_step >= 3:
            time.sleep(0.01)
        return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]

    config = TrainingConfig(
        model="tiny", dataset="arithmetic", dataset_max=40, num_batches=8, train_fraction=0.75, num_generations=4,
        total_generation_steps=16, learning_rate=0.05, beta=0.0, lora_rank=4, lora_alpha=8, experiment_name="digits",
        overrides={"run.save_steps": 2, "run.processes": 1},
    )
    session = prepare_session(config)
    state = train_grpo(config, session, reward_functions=[digits])
    print("done", state.checkpoint_dir)
"""


def stopped(folder, number):
    """The cells, a script in a process group of its own, ended by a signal to all of it in their fourth step."""
    (folder / "wait").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CELLS)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    step = folder / "step"
    while not (step.exists() and step.read_text() == "3"):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.killpg(process.pid, number)
    (folder / "wait").unlink()
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


def weights(folder):
    return (folder / "checkpoints" / "digits" / "final" / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.soak(suite="notebook")), signal.SIGKILL],
)
def test_cells_that_were_cut_off_continue_exactly(number, tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    code, errors = stopped(cut, number)
    assert code != 0
    newest = checkpoints.newest(cut / "checkpoints" / "digits" / "checkpoints")
    assert newest is not None
    if number == signal.SIGINT:
        assert newest.step == 3
        assert "Stopped" in errors or "stopped after 3 steps" in errors
    else:
        assert newest.step == 2
    for folder in (cut, whole):
        monkeypatch.chdir(folder)
        exec(textwrap.dedent(CELLS), {"__name__": "__main__"})
        went_on = "checkpoints/digits was cut off: it goes on." in capsys.readouterr().out
        assert went_on == (folder == cut)
    assert weights(cut) == weights(whole)
    assert not list((cut / "checkpoints").glob("digits-*"))


def test_errors_of_a_run_use_the_notebooks_names_of_keys(here):
    config = config_of(max_prompt_length=2)
    with pytest.raises(UsageError, match="than max_prompt_length = 2"):
        train_grpo(config, prepare_session(config), reward_functions=[digits])
    given = config_of(overrides={"data.max_prompt_length": 2})
    with pytest.raises(UsageError, match=r"data\.max_prompt_length = 2"):
        train_grpo(given, prepare_session(given), reward_functions=[digits])
