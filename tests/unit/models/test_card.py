"""The model card: what it says, what it must not say, and that its code loads what it stands beside."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from groupwise.models.bundled import tiny_folder
from groupwise.models.card import Place, model_card, packages_used, results_of
from groupwise.models.config import LoraConfig, ModelConfig
from groupwise.models.load import load_model
from groupwise.models.lora import AdaptedModel, new_lora_config
from groupwise.models.tokenizer import load_tokenizer
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord

HELD_OUT = {
    "prompts": 128,
    "change": {"value": 0.25, "low": 0.125, "high": 0.375},
    "before": {"reward": {"value": 0.5, "low": 0.4, "high": 0.6}, "length": {"value": 12.3456}},
    "after": {"reward": {"value": 0.75, "low": 0.65, "high": 0.85}, "length": {"value": 11.0}},
}
IDS = torch.tensor([[7, 8, 9, 30, 31, 4]])


PACKAGES = {"groupwise": ["0.1"], "torch": ["2.7.1", "2.8.0"]}
SFT = {"policy": "sft@6", "kind": "sft", "task": "colours", "model": "lab/base"}
RL = {"policy": "rl@4", "kind": "rl", "task": "sums", "model": "/elsewhere/start"}


def run_folder(runs: Path, facts: dict[str, Any] | None = None, **config: Any) -> Path:
    given = {
        "model": {"name": "lab/base", "revision": None},
        "algorithm": {"type": "grpo", "beta": 0.04},
        "data": {"dataset_name": None},
        "callbacks": ["loss_logging"],
        "run": {"license": None, "dir": str(runs)},
        **config,
    }
    noted = {"kind": "rl", "task": "sums", "examples": 1000, **(facts or {})}
    with RunFolder.create(runs, "my-run", given, noted) as run:
        for step, reward in ((0, 0.5), (4, 0.6), (8, 0.7)):
            name = f"step-{step}" if step else "before"
            record = EvaluationRecord(step, name, f"my-run@{step}", {"reward": reward})
            run.store.add_evaluation(record)
    return runs / "my-run"


@pytest.fixture
def weights(tmp_path) -> Path:
    """The folder of an adapter, as far as the card looks at it."""
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def front(card: str) -> dict[str, Any]:
    return YAML(typ="safe").load(card.split("---\n")[1])


def test_what_the_hub_reads(tmp_path, weights):
    run = run_folder(tmp_path / "runs", run={"license": "apache-2.0", "dir": "x"})
    assert front(model_card(run, weights, 8)) == {
        "base_model": "lab/base",
        "library_name": "peft",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["groupwise", "rl", "grpo"],
    }


def test_the_licence_is_left_open_and_a_local_base_is_no_hub_id(tmp_path, weights):
    run = run_folder(tmp_path / "runs", model={"name": "/models/mine", "revision": None})
    told = front(model_card(run, weights, 8, merged=True))
    assert not {"license", "base_model"} & told.keys()
    assert told["library_name"] == "transformers"


def test_results_have_their_intervals(tmp_path, weights):
    run = run_folder(tmp_path / "runs")
    results = results_of({"held_out": HELD_OUT, "steps": 8, "folder": str(tmp_path)})
    card = model_card(run, weights, 8, results=results)
    assert "## Results on 128 held-out prompts" in card
    assert "| reward | 0.5 [0.4, 0.6] | 0.75 [0.65, 0.85] |" in card
    assert "| length | 12.35 | 11 |" in card
    assert "0.25 [0.125, 0.375]" in card
    assert "for 8 steps" in card
    assert "1000 examples of the task `sums`" in card


def test_a_checkpoint_has_what_was_evaluated_before_it(tmp_path, weights):
    """That of its own step may be recorded later, and the card must not depend on when it is written."""
    card = model_card(run_folder(tmp_path / "runs"), weights, 8)
    assert "|  | before, 0 steps | step-4, 4 steps |" in card
    assert "| reward | 0.5 | 0.6 |" in card


def test_a_checkpoint_of_a_finished_run_has_that_of_its_own_step(tmp_path, weights):
    run = run_folder(tmp_path / "runs")
    with RunFolder.open(run) as folder:
        folder.finish("finished")
    assert "| before, 0 steps | step-4, 4 steps | step-8, 8 steps |" in model_card(run, weights, 8)
    assert "step-8" not in model_card(run, weights, 4)


def test_data_and_rewards_of_a_task_without_a_name_are_told(tmp_path, weights):
    noted = {"dataset": "/data/capitals.jsonl", "rewards": {"right": 1.0, "near": 0.3, "seen": 0.0}}
    card = model_card(run_folder(tmp_path / "runs", noted), weights, 8)
    assert "reinforcement learning (grpo) on `capitals.jsonl` for 8 steps." in card
    assert (
        "Data: 1000 examples of `capitals.jsonl`, rewarded by `right` (weight 1), `near` (weight 0.3). "
        in card
    )
    assert "sums" not in card
    later = run_folder(tmp_path / "later", {"lineage": [{**RL, **noted}]})
    assert "(reinforcement learning on `capitals.jsonl`)" in model_card(later, weights, 8)


def test_it_names_no_path_and_no_secret(tmp_path, weights):
    run = run_folder(
        tmp_path / "runs",
        model={"name": str(tmp_path / "base"), "revision": None},
        data={"dataset_name": str(tmp_path / "rows.jsonl"), "columns": {"a": "~/b/c.txt"}},
        task={
            "word_list": "/home/me/words.txt",
            "api_key": "sk-123",
            "deep": ["/a/b/"],
            "url": "https://me:passw0rd@host.org/x",
        },
        sampler={"stop": ["</answer>", "/", "\n/x/y"]},
    )
    card = model_card(run, weights, 8, place=Place("final"))
    assert str(tmp_path) not in card
    assert not re.search(r"/home|sk-123|/a/b|~/|passw0rd", card)
    for kept in ("words.txt", "rows.jsonl", '"</answer>"', '"/"', '"\\n/x/y"', "c.txt"):
        assert kept in card
    assert "loss_logging" not in card


def test_it_names_the_versions_that_trained_not_those_that_are_here(tmp_path, weights):
    assert "Made with" not in model_card(run_folder(tmp_path / "old"), weights, 8)
    card = model_card(run_folder(tmp_path / "runs", {"packages": PACKAGES}), weights, 8)
    assert "Made with groupwise 0.1, torch 2.7.1 and 2.8.0." in card


def test_who_goes_on_with_other_versions_has_both(monkeypatch):
    here = {"groupwise": "0.1", "torch": "2.9"}

    def version(package: str) -> str:
        if package not in here:
            raise metadata.PackageNotFoundError(package)
        return here[package]

    monkeypatch.setattr(metadata, "version", version)
    assert packages_used() == {"groupwise": ["0.1"], "torch": ["2.9"]}
    both = {"groupwise": ["0.1"], "torch": ["2.8", "2.9"]}
    assert packages_used({"torch": ["2.8"]}) == both
    assert packages_used(both) == both


def test_a_run_says_what_it_started_from(tmp_path, weights):
    copied = {"name": "lab/base", "revision": None, "adapter": "/runs/my-run/start"}
    card = model_card(run_folder(tmp_path, {"lineage": [SFT]}, model=copied), weights, 8)
    assert "adapter for `lab/base`, trained by reinforcement learning (grpo) on the task" in card
    assert "from `sft@6` (supervised fine-tuning on the task `colours`)." in card
    assert '"adapter": "sft@6"' in card
    assert '"start"' not in card
    assert front(card)["base_model"] == "lab/base"


def test_whole_weights_of_another_run_are_the_base(tmp_path, weights):
    copied = {"name": "/runs/my-run/start", "revision": None, "adapter": None}
    run = run_folder(tmp_path, {"lineage": [SFT, RL]}, model=copied)
    whole = model_card(run, weights, 8, merged=True)
    assert "A model made from `rl@4`" in whole
    assert (
        "It started from `rl@4` (reinforcement learning on the task `sums`), which started from `sft@6` "
        "(supervised fine-tuning on the task `colours`)." in whole
    )
    assert front(whole)["base_model"] == "lab/base"
    adapter = model_card(run, weights, 8)
    assert "base_model" not in front(adapter), "the adapter belongs to weights that are not there"
    assert '"name": "rl@4"' in adapter
    assert "The base, `rl@4`, is on the machine that trained it" in adapter


def test_an_adapter_of_the_config_is_named(tmp_path, weights):
    given = {"name": "lab/base", "revision": None, "adapter": "lab/adapter"}
    card = model_card(run_folder(tmp_path, model=given), weights, 8)
    assert "It started from `lab/adapter`." in card
    assert "started from" not in model_card(run_folder(tmp_path / "other"), weights, 8)


def test_equal_runs_have_equal_cards(tmp_path, weights):
    cards = [
        model_card(run_folder(tmp_path / name), weights, 8, results={"held_out": HELD_OUT})
        for name in ("one", "two")
    ]
    assert cards[0] == cards[1]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_its_code_loads_the_weights(tmp_path, monkeypatch, kind):
    config = ModelConfig(name=str(tiny_folder()))
    (tmp_path / "base").symlink_to(tiny_folder())
    folder = tmp_path / "final"
    folder.mkdir()
    base: Any = load_model(config, "float32")
    adapted = AdaptedModel(base, new_lora_config(LoraConfig(r=4, alpha=8)))
    adapted.add("policy", trainable=True, seed=1)
    for parameter in adapted.parameters("policy").values():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), adapted.using("policy" if kind == "adapter" else None) as acting:
        expected = acting(IDS).logits
    with torch.no_grad():
        plain = base(IDS).logits
    load_tokenizer(config).save_pretrained(folder)
    if kind == "adapter":
        adapted.save("policy", folder)
        assert not torch.allclose(expected, plain)
    else:
        load_model(config, "float32").save_pretrained(folder)
    run = run_folder(tmp_path / "runs", model={"name": str(tmp_path / "base"), "revision": None})
    card = model_card(run, folder, 8, place=Place("final"))
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "the card", "exec"), names)
    with torch.no_grad():
        found = names["model"](IDS).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert names["tokenizer"].decode([7]) == load_tokenizer(config).decode([7])
    assert names["model"].get_input_embeddings() is not base.get_input_embeddings()
