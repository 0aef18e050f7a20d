"""`run.report_to` and the keys that belong to it: names from other frameworks, and keys that would have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.core.errors import ConfigError
from groupwise.training.config import load_config


def refusal(folder: Path, *lines: str) -> str:
    file = folder / "c.yaml"
    file.write_text("\n  ".join(["model: {name: tiny}\nrun:", *lines]))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(("given", "told"), [
    ("all", "all would also name"), ("[console, mlflow]", "progress is shown"), ("json", "the file of metrics is called jsonl"),
    ("swanlab", "there is no sink for swanlab"),
])  # fmt: skip
def test_names_of_other_frameworks_lead_on(tmp_path, given, told):
    message = refusal(tmp_path, f"report_to: {given}")
    assert message.startswith(f"c.yaml:3: run.report_to: {told}")
    assert "tensorboard, wandb, trackio, mlflow, jsonl, parquet" in message


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("mlflow_experiment: x",), "while report_to does not name mlflow"),
        (("report_to: parquet", "num_completions_to_print: 3"), "while report_to does not name wandb, trackio, mlflow or jsonl"),
        (("use_mlflow: true",), "here it is run.report_to"), (("mlflow_tracking_uri: x",), "as MLFLOW_TRACKING_URI"),
    ],
)  # fmt: skip
def test_keys_without_their_sink_are_refused(tmp_path, lines, told):
    assert told in refusal(tmp_path, *lines)
