"""`groupwise-train-grpo`:

1. it trains, and `output_dir` is a whole model that transformers loads, beside the run;
2. it is an ordinary `groupwise rl` with the same config;
3. from copies of its checkpoints alone, in an empty folder, it goes on to the same bits;
4. whatever is given wrongly is said in words, and nothing is left behind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import groupwise
from groupwise.cli.main import main as groupwise_main
from groupwise.cli.train_grpo import main
from groupwise.core import atomic_files
from groupwise.jobs.launch.train_grpo import Flags, config_of, write_merged_model
from groupwise.runs import checkpoints
from tests.integration.fleet import tiny_grpo
from tests.integration.toy_run import die, in_child, what_must_be_equal

WORDS = list(tiny_grpo.ARGUMENTS[1:])

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft asks
]


def with_(words: list[str], **flags: object) -> list[str]:
    """The command line with other values."""
    names = tuple(f"--{name}=" for name in flags)
    kept = [word for word in words if not word.startswith(names)]
    return [*kept, *(f"--{name}={value}" for name, value in flags.items())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of a job that nothing disturbed."""
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("whole")
    tiny_grpo.write_files(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        assert main(WORDS) == 0
    return work


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the files that the job brings."""
    folder = tmp_path / "work"
    folder.mkdir()
    tiny_grpo.write_files(folder)
    monkeypatch.chdir(folder)
    return folder


# 1


def test_the_output_is_a_whole_model_that_transformers_loads(whole: Path) -> None:
    missing = [name for name in tiny_grpo.EXPECTED if not (whole / name).is_file()]
    assert missing == []
    model: Any = AutoModelForCausalLM.from_pretrained(whole / "outputs")
    tokenizer: Any = AutoTokenizer.from_pretrained(whole / "outputs")
    asked = tokenizer("au?", return_tensors="pt")
    said = model.generate(**asked, max_new_tokens=6, do_sample=False)
    assert said.shape[1] > asked["input_ids"].shape[1]
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert "outputs" in (whole / "outputs/README.md").read_text()


def test_the_model_has_what_was_learnt(
    whole: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = work / "exported"
    words = ["runs", "export", "grpo", "--dir", str(whole / "outputs"), "--to", "merged"]
    assert groupwise_main([*words, "--output", str(exported)]) == 0
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (whole / "outputs", exported)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    base = AutoModelForCausalLM.from_pretrained(whole / "outputs").state_dict()
    assert base.keys() >= ours.keys()


def test_a_second_model_takes_the_place_of_the_first_and_leaves_its_run(
    whole: Path, work: Path
) -> None:
    shutil.copytree(whole / "outputs", work / "outputs")
    (work / "outputs/model-00001-of-00002.safetensors").write_bytes(b"of a larger model")
    (work / "outputs/notes.txt").write_text("mine")
    assert main(with_(WORDS, max_steps=1)) == 0
    assert (work / "outputs/grpo-2").is_dir()
    assert (work / "outputs/grpo/final").is_dir()
    assert (work / "outputs/notes.txt").read_text() == "mine"
    assert not (work / "outputs/model-00001-of-00002.safetensors").exists()
    before, after = (load_file(f / "outputs/model.safetensors") for f in (whole, work))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_an_incomplete_model_folder_is_never_loaded(whole: Path, work: Path) -> None:
    shutil.copytree(whole / "outputs", work / "outputs")

    def put() -> None:
        atomic_files.on_write = lambda name: (
            die() if name == "file:model.safetensors:after" else None
        )
        write_merged_model(work / "outputs/grpo", work / "outputs")

    assert in_child(put) == 17
    assert not (work / "outputs/config.json").exists()
    write_merged_model(work / "outputs/grpo", work / "outputs")
    AutoModelForCausalLM.from_pretrained(work / "outputs")


# 2


def test_it_is_an_ordinary_run(whole: Path, work: Path) -> None:
    flags = Flags(
        model="tiny",
        dataset=f"./{tiny_grpo.DATA}",
        reward_function=(f"{tiny_grpo.REWARDS}:share", "correctness"),
        max_steps=tiny_grpo.STEPS,
        learning_rate=0.01,
        batch_size=2,
        max_completion_length=6,
    )
    result = groupwise.rl(config_of(flags), overrides=WORDS[-5:])
    assert what_must_be_equal(result.folder) == what_must_be_equal(whole / "outputs/grpo")


# 3


def killed_after(step: int, words: list[str], command: Any = main) -> None:
    def work() -> None:
        atomic_files.on_write = lambda name: die() if name == f"folder:step-{step}:after" else None
        command(words)

    assert in_child(work) == 17


def only_checkpoints(old: Path, new: Path, folder: str) -> None:
    """What a mirror brings to another machine: complete checkpoints, by what their manifests list."""
    for found in checkpoints.complete(old / folder):
        for name in (*found.files, checkpoints.MANIFEST):
            place = new / folder / found.path.name / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found.path / name, place)


def test_copies_of_the_checkpoints_are_enough_to_continue_to_the_same_bits(
    whole: Path,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed_after(4, WORDS)
    new = tmp_path / "another machine"
    new.mkdir()
    tiny_grpo.write_files(new)
    only_checkpoints(work, new, tiny_grpo.CHECKPOINTS)
    shutil.rmtree(new / tiny_grpo.CHECKPOINTS / "step-2")
    shutil.rmtree(work)
    monkeypatch.chdir(new)
    checkpoint = new / tiny_grpo.CHECKPOINTS / "step-4"
    monkeypatch.setenv("RESUME_FROM", str(checkpoint))
    assert main(WORDS) == 0
    assert "resumed after 4 steps" in capsys.readouterr().err
    found = what_must_be_equal(new / "outputs/grpo")
    assert found == what_must_be_equal(whole / "outputs/grpo")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (new / "outputs" / name).read_bytes() == (whole / "outputs" / name).read_bytes()


def test_an_attempt_that_was_killed_at_its_very_end_makes_the_model(
    whole: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_checkpoints(whole, work, tiny_grpo.CHECKPOINTS)
    monkeypatch.setenv("RESUME_FROM", str(work / tiny_grpo.CHECKPOINTS / "step-6"))
    assert main(WORDS) == 0
    ours, theirs = (f / "outputs/model.safetensors" for f in (work, whole))
    assert ours.read_bytes() == theirs.read_bytes()


def test_another_command_continues_elsewhere_with_the_weights_that_it_began_with(
    whole: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["rl", *("algorithm.beta=0.1", "training.max_steps=3", "run.save_steps=2")]
    rest = ["model.name=tiny", "data.dataset_name=letters.jsonl", "run.threads=1", "run.name=on"]
    rewards = [f"rewards.reward_funcs=[{tiny_grpo.REWARDS}:share]", "lora.r=4", "lora.alpha=8"]
    sizes = ["training.prompts_per_step=2", "training.num_generations=2"]
    short = [
        "sampler.max_completion_length=4",
        "rewards.in_process=true",
        "data.prompt_format=text",
    ]
    words = [*flags, *rest, *rewards, *sizes, *short]
    shutil.copytree(whole / "outputs/grpo/final", work / "weights")
    began = ["--init-from", str(work / "weights")]
    assert groupwise_main([*words, *began, "run.dir=undisturbed"]) == 0
    killed_after(2, [*words, *began], groupwise_main)
    new = tmp_path / "new"
    new.mkdir()
    tiny_grpo.write_files(new)
    only_checkpoints(work, new, "runs/on/checkpoints")
    for gone in ("weights", "runs"):
        shutil.rmtree(work / gone)
    monkeypatch.chdir(new)
    monkeypatch.setenv("RESUME_FROM", str(new / "runs/on/checkpoints/step-2"))
    assert groupwise_main([*words, "--init-from", "gone"]) == 0, "the checkpoint counts"
    before, after = (what_must_be_equal(f) for f in (work / "undisturbed/on", new / "runs/on"))
    assert after == before


# 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"words": []}, ["--model", "--dataset", "--reward_function"]), ({"words": ["--batchsize=3"]}, ["--batch_size"]),
        ({"words": ["--max-steps=3"]}, ["--max_steps"]), ({"max_steps": "many"}, ["'--max_steps'"]),
        ({"max_steps": 0}, ["--max_steps is 0"]), ({"learning_rate": "nan"}, ["--learning_rate is nan"]),
        ({"model": "tinny"}, ["tinny"]), ({"model": ""}, ["--model"]),
        ({"dataset": "leters.jsonl"}, ["'leters.jsonl'", "letters.jsonl"]),
        ({"reward_function": "correctnes"}, ["correctnes", "correctness"]),
        ({"reward_function": "letter_rewards.py:shar"}, ["`shar`", "`share`"]),
        ({"preprocessing_pipeline": "generc"}, ["`generc`", "`generic`"]),
        ({"words": [*WORDS, "--use_unsloth"]}, ["unsloth, which is not installed", "pip install"]),
        ({"words": [*WORDS, "training.max_steps=3"]}, ["training.max_steps is --max_steps"]),
        ({"words": [*WORDS, "training={seed: 3}"]}, ["training"]), ({"words": [*WORDS, "--resume"]}, ["'grpo'"]),
        ({"words": [*WORDS, "--resume_from=gone/step-3"]}, ["'gone/step-3'"]),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_flags_are_reported_without_a_traceback(
    given: dict[str, Any], told: list[str], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = given["words"] if "words" in given else with_(WORDS, **given)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert [text for text in told if text not in said] == [], said
    assert "Traceback" not in said
    left = [path.name for path in work.glob("outputs/*")]
    assert left == []


@pytest.mark.soak(suite="training")
def test_resume_by_hand_needs_no_path(whole: Path, work: Path) -> None:
    killed_after(2, WORDS)
    assert main(WORDS) == 2, "an unfinished run is in the way"
    assert main([*WORDS, "--resume"]) == 0
    assert what_must_be_equal(work / "outputs/grpo") == what_must_be_equal(whole / "outputs/grpo")


def test_checkpoints_of_an_earlier_version_are_refused_with_what_to_do(
    whole: Path, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_checkpoints(whole, work, tiny_grpo.CHECKPOINTS)
    for step in (4, 6):
        folder = work / tiny_grpo.CHECKPOINTS / f"step-{step}"
        shutil.rmtree(folder / "run")
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {k: v for k, v in manifest["files"].items() if not k.startswith("run/")}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    monkeypatch.setenv("RESUME_FROM", str(work / tiny_grpo.CHECKPOINTS / "step-6"))
    assert main(WORDS) == 2
    assert "Copy the whole folder" in capsys.readouterr().err
