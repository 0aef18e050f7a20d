"""An evaluation during a training does not change the training, and its result can be compared and scored again.

1. A run with evaluations equals the run without, bit for bit: rollouts, metrics, weights, optimiser.
2. No generator is moved (torch, Python) and no mode is changed, also where dropout makes training depend on both.
3. Two real runs are compared, and a run's rollouts are judged by other rewards.
"""

from __future__ import annotations

import hashlib
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.cli.main import main
from groupwise.runs.store import Store
from groupwise.training.evaluation import evaluate as evaluation
from tests.integration.toy_run import TOY, config


def settings(runs: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Training with dropout, so that it draws from torch's own generator too."""
    found = config(runs)
    found["lora"]["dropout"] = 0.2
    found["run"]["name"] = name
    found["eval"] = {
        "eval_steps": None,
        "before_and_after": False,
        "max_prompts": 3,
        "temperature": 1.0,
        "top_p": 0.8,
        "samples_per_prompt": 2,
        "success_threshold": 0.3,
        **changes,
    }
    return found


def trained(folder: Path) -> dict[str, Any]:
    """What the training left, without the evaluations."""
    with Store.open(folder / "run.db", readonly=True) as store:
        record = json.loads(store.deterministic_dump())
    del record["evaluations"]
    kept = [*folder.glob("checkpoints/step-*/*"), *folder.glob("final/*")]
    files = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in kept
        if path.is_file() and path.name != "manifest.json"
    }
    return {"record": record, "files": files}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("apart") / "runs"
    groupwise.rl(settings(folder, "without"), TOY)
    groupwise.rl(settings(folder, "with", eval_steps=1, before_and_after=True), TOY)
    return folder


def without_name(found: dict[str, Any]) -> str:
    return json.dumps(found, sort_keys=True).replace('"with"', '"without"')


def test_a_run_with_evaluations_equals_the_run_without(runs):
    alone, beside = trained(runs / "without"), trained(runs / "with")
    assert len(alone["record"]["steps"]) == 5
    assert [key for key in alone["files"] if key.endswith(".safetensors")]
    assert without_name(beside["record"]) == without_name(alone["record"])
    weights = {key: digest for key, digest in alone["files"].items() if "safetensors" in key}
    assert weights == {key: beside["files"][key] for key in weights}


def test_generators_and_modes_stay_as_they_were(runs, monkeypatch):
    """Looked at within an evaluation, before its first prompt and after its last."""
    before: list[Any] = []
    after: list[Any] = []
    served: list[Any] = []
    ask, rows_of = evaluation._sample_group, evaluation.rows_of

    def state() -> Any:
        modes = [module.training for module in served[0].modules()]
        return torch.get_rng_state().tolist(), random.getstate(), modes

    async def first(asked, sampler, *rest):
        served[:] = [sampler._weights.model]
        if len(before) == len(after):
            before.append(state())
        return await ask(asked, sampler, *rest)

    def last(*arguments):
        after.append(state())
        return rows_of(*arguments)

    monkeypatch.setattr(evaluation, "_sample_group", first)
    monkeypatch.setattr(evaluation, "rows_of", last)
    groupwise.rl(settings(runs, "watched", eval_steps=2), TOY)
    assert len(before) == 2
    assert before == after


def test_the_most_probable_token_alone_is_the_greedy_answer(tmp_path):
    """By `groupwise eval` and within a run: what an evaluation leaves out reaches the sampler."""
    answers = []
    for name, how in (
        ("greedy", {"temperature": 0.0}),
        ("free", {"temperature": 1.3}),
        ("single", {"temperature": 1.3, "top_k": 1}),
    ):
        made = settings(tmp_path, name, top_p=None, samples_per_prompt=1, **how)
        made["sampler"]["min_completion_length"] = 3
        apart = groupwise.evaluate(made, TOY, output=tmp_path / f"{name}.json")
        answers.append([row["completion"] for row in apart.rows])
        written = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert {row["columns"]["wanted"] for row in written} == {"abcdefghijklm"}
    made["training"]["max_steps"] = 1
    made["eval"]["before_and_after"] = True
    groupwise.rl(made, TOY)
    with Store.open(tmp_path / "single" / "run.db", readonly=True) as store:
        recorded = store.evaluation(0, "before")
    assert recorded
    assert [row["completion"] for row in recorded.rows] == answers[-1]
    greedy, free, single = answers
    assert greedy == single != free


def test_several_policies_in_one_command(runs, tmp_path, capsys):
    given = tmp_path / "toy.yaml"  # JSON is YAML
    given.write_text(json.dumps(settings(runs, "any")))
    command = ["eval", "-c", str(given), "-t", TOY, "--policy", "with@4", "--policy", "with"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("A  with@4 (")
    assert "3 answered by both" in shown
    assert main(shlex.split(shown.splitlines()[-2])[1:]) == 0, "the command that it names next"
    capsys.readouterr()
    assert main([*command, "--policy", "base", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in found["evaluations"]] == ["with@4", "with@5", "base"]
    assert [each["prompts"] for each in found["comparisons"]] == [3, 3]


def test_an_evaluation_says_which_settings_the_run_had_otherwise(runs, tmp_path):
    given = settings(runs, "any")
    limit = given["sampler"]["max_completion_length"]
    key = "sampler.max_completion_length"
    same = groupwise.evaluate(given, TOY, policy="with")
    other = groupwise.evaluate(given, TOY, policy="with", overrides=[f"{key}={limit + 1}"])
    own = [f"{key}={limit + 1}", f"eval.max_completion_length={limit}"]
    limited = groupwise.evaluate(given, TOY, policy="with", overrides=own)
    assert (same.other_settings, limited.other_settings) == ({}, {})
    assert other.summary["other_settings"] == {key: f"{limit + 1}, in the run {limit}"}
    assert other.path
    assert json.loads(other.path.read_text())["other_settings"] == dict(other.other_settings)


def test_the_same_command_again_says_the_name_of_the_new_run(runs, capsys):
    given = settings(runs, "again")
    given["training"]["max_steps"] = 1
    groupwise.rl(given, TOY)
    assert "again-2" not in capsys.readouterr().err
    assert groupwise.rl(given, TOY).folder.name == "again-2"
    assert "there is a finished run again; this one is again-2" in capsys.readouterr().err
