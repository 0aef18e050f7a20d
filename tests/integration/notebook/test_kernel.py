"""The functions in a real kernel: where output appears, what an interruption leaves, edited modules, and no credential anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jupyter_kernel import TRAIN_WAITING, WAITING, Kernel, in_its_fourth_step, text

pytestmark = pytest.mark.slow

BEGIN = """
from groupwise.notebook import *

def digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]

config = TrainingConfig(
    model="tiny", dataset="arithmetic", dataset_max=40, num_batches=8, train_fraction=0.75, num_generations=4, total_generation_steps=16,
    learning_rate=0.05, beta=0.0, lora_rank=4, lora_alpha=8, experiment_name="digits", overrides={"run.processes": 1},
)
"""
SESSION = "session = prepare_session(config)"
TRAIN = "state = train_grpo(config, session, reward_functions=[digits])"


def test_each_cell_has_its_own_output_and_the_training_is_one_that_is_redrawn(
    kernel: Kernel,
) -> None:
    assert kernel.run(BEGIN) == []
    [table] = kernel.run(SESSION)
    assert "6 steps of 2 prompts" in table["data"]["text/html"]
    page, advice = kernel.run(TRAIN)
    assert "are cut off by the length limit" in advice["text"]
    assert "step 6/6" in page["data"]["text/html"]
    assert page["data"]["text/html"].count("<img") == 3
    exported = kernel.run("path = export_checkpoint(config, state)")
    for part, output in zip(("hf_lora", "PeftModel", "vllm serve"), exported, strict=True):
        assert part in output["data"]["text/html"]
    [record] = kernel.run("session.run")
    assert "<img" in record["data"]["text/html"]
    [mistake] = kernel.run("TrainingConfig(num_batchs=3)")
    assert mistake["traceback"] == [
        "ConfigError: TrainingConfig: num_batchs is not a key; did you mean num_batches?"
    ]


def test_an_interrupted_training_continues_in_the_same_kernel(
    kernel: Kernel, tmp_path: Path
) -> None:
    """Jupyter interrupts the whole process group, the two processes that sample and learn among it."""
    kernel.run((BEGIN + WAITING).replace('"run.processes": 1', '"run.processes": 2'))
    kernel.run(SESSION)
    (tmp_path / "wait").touch()
    cell = in_its_fourth_step(kernel, tmp_path, 60)
    kernel.interrupt()
    said = text(kernel.outputs(cell))
    assert "Stopped after 3 steps" in said
    assert "another interrupt stops at once" in said
    assert not re.search("Ctrl-C|--resume", said)
    assert "Traceback" not in said
    (tmp_path / "wait").unlink()
    assert "it goes on" in text(kernel.run(TRAIN_WAITING))
    record = text(
        kernel.run("print([step for step, _ in session.run.metrics('reward')['reward']])")
    )
    assert record.strip() == "[1, 2, 3, 4, 5, 6]"


SECRET = "hf_Zq81kLmN20pQrT"


def test_credentials_stand_in_no_output_and_no_file(kernel: Kernel, tmp_path: Path) -> None:
    given = BEGIN.replace(
        "TrainingConfig(", f'TrainingConfig(hf_token="{SECRET}", wandb_api_key="{SECRET}", '
    )
    cells = [
        given, "config", SESSION, TRAIN, "state", "session", "export_checkpoint(config, state)",
        "config.beta = -1",
    ]  # fmt: skip
    said = "\n".join(text(kernel.run(cell)) for cell in cells)
    assert "hf_token from" in said
    assert SECRET not in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert "beta cannot be changed" in said


SEARCH = """
from groupwise.notebook import *

config = TrainingConfig(
    model="tiny", dataset="arithmetic", dataset_max=12, num_batches=4, train_fraction=0.5, batch_size=1, total_generation_steps=4,
    beta=0.0, lora_rank=2, lora_alpha=4, experiment_name="k", overrides={"run.processes": 1, "eval.max_prompts": 2},
)
print("mine")
found = search(config, {"num_batches": [2, 4], "train_fraction": [0.25]}, trials=20, prune=False)
"""


def test_trials_have_one_place_and_what_else_the_cell_said_stays(kernel: Kernel) -> None:
    said = kernel.run(SEARCH)
    states = text(kernel.run("print(*[trial.state.name for trial in found.study.trials])")).split()
    assert {*states} == {"COMPLETE", "FAIL"}
    [drawn] = [each for each in said if each["kind"] == "display_data"]
    page = drawn["data"]["text/html"]
    assert "Trials" in page
    assert "num_batches 2 × train_fraction 0.25" in page
    assert said[0]["text"].startswith("mine")
    streams = "".join(each["text"] for each in said if each["kind"] == "stream")
    failed = ["trial … failed"] * states.count("FAIL")
    assert len(streams.splitlines()) == len(["mine", *failed, "over after"])
