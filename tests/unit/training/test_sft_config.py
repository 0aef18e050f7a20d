"""The config of a supervised run: strict, documented, and every message for a key of another command or framework teaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import ConfigError
from groupwise.training.sft_config import SftConfig, documentation, load_sft_config

MODEL = {"model": {"name": "tiny"}}
ROOT = Path(__file__).parents[3]


def config(**sections: Any) -> SftConfig:
    return load_sft_config({**MODEL, **sections}).config


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


def test_one_epoch_unless_told_otherwise():
    assert (config().training.max_steps, config().training.num_train_epochs) == (None, 1.0)
    steps = config(training={"max_steps": 5}).training
    assert (steps.max_steps, steps.num_train_epochs) == (5, None)
    epochs = config(training={"num_train_epochs": 0.5}).training
    assert (epochs.max_steps, epochs.num_train_epochs) == (None, 0.5)
    assert "one of the two" in refused(training={"max_steps": 5, "num_train_epochs": 2.0})


def test_the_page_is_up_to_date():
    for name, text in documentation().items():
        assert (ROOT / "docs" / name).read_text() == text, "`make fix` makes it again"


def test_only_a_config_of_another_framework_is_taken_for_one(tmp_path: Path):
    ours, theirs = tmp_path / "rl.yaml", tmp_path / "trl.yaml"
    ours.write_text(
        "model: {name: tiny}\nsampler: {max_num_seqs: 8}\nrewards: {in_process: true}\nalgorithm: {beta: 0.1}\n"
        "training: {prompts_per_step: 2, num_generations: 2}\n"
    )
    theirs.write_text(
        "model_name_or_path: tiny\nper_device_train_batch_size: 4\nnum_generations: 8\nbf16: true\n"
    )
    for file, foreign in ((ours, False), (theirs, True)):
        with pytest.raises(ConfigError) as caught:
            load_sft_config(file)
        assert ("groupwise init --from" in str(caught.value)) is foreign, str(caught.value)
