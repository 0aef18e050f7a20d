"""Runs that upload, to a hub on loopback:

1. each checkpoint stands on a branch of its own, in order, and the final weights on theirs, while the run is equal to one without a hub;
2. a hub that is slow, away or unwilling costs the run nothing but a warning;
3. what a killed run has not uploaded is uploaded when it goes on, or by `groupwise runs push`, and nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.responses import Response

import groupwise
from groupwise.cli.main import main
from groupwise.errors import UsageError
from tests.fake_hub import Hub, serve_hub, use_hub
from tests.integration.running import TOY, config, go_on, in_child, what_must_be_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # huggingface_hub
]
BRANCHES = [f"main-step-{step:09d}" for step in (2, 4, 5)]
REPO = "me/model"


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    torch.set_num_threads(1)
    with serve_hub(Hub()) as hub:
        use_hub(monkeypatch, hub)
        yield hub


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run without a hub."""
    torch.set_num_threads(1)
    runs = tmp_path_factory.mktemp("alone")
    groupwise.rl({**config(runs), "eval": {}}, TOY)
    return what_must_be_equal(runs / "toy")


def settings(runs: Path, *, final: bool = False, **parameters: Any) -> dict[str, Any]:
    given = {**config(runs), "eval": {}}
    given["callbacks"] = [{"name": "push_to_hub_revision", "repo_id": REPO, **parameters}]
    if final:
        given["run"]["hub"] = {"repo_id": REPO}
    return given


def warnings_of(run: Path) -> str:
    return "\n".join(
        line for line in (run / "log.txt").read_text().splitlines() if " WARNING " in line
    )


def test_checkpoints_and_the_final_weights_stand_on_the_hub(tmp_path, hub, alone):
    result = groupwise.rl(settings(tmp_path, final=True), TOY)
    assert result.exit_code == 0
    assert result.summary["hub"] == {"url": f"{hub.url}/{REPO}/tree/main"}
    repository = hub.repositories[REPO]
    assert repository.private
    assert list(repository.branches) == ["main", *BRANCHES]
    assert [len(repository.branches[branch]) for branch in BRANCHES] == [2, 2, 2]
    here = {p.name: p.read_bytes() for p in (result.folder / "final").iterdir()}
    assert repository.files("main") == here
    last = repository.files(BRANCHES[-1])
    assert last["adapter_model.safetensors"] == here["adapter_model.safetensors"]
    assert last.keys() == here.keys(), "no optimiser, no record; the tokenizer and a card"
    assert f'revision="{BRANCHES[-1]}"'.encode() in last["README.md"]
    assert not any(str(tmp_path).encode() in data for data in last.values())
    assert not list((result.folder / "hub").iterdir())
    assert what_must_be_equal(result.folder) == alone


def test_who_may_not_write_is_told_before_a_run_begins(tmp_path, hub):
    with pytest.raises(UsageError, match=r"push_to_hub_revision: you/model@.*cannot be written"):
        groupwise.rl({**settings(tmp_path, repo_id="you/model")}, TOY, dry_run=True)
    given = {**config(tmp_path)}
    given["run"]["hub"] = {"repo_id": "you/model"}
    with pytest.raises(UsageError, match=r"you/model@main on the hub cannot be written"):
        groupwise.rl(given, TOY)
    assert not list(tmp_path.iterdir())


def test_a_hub_that_hangs_is_not_waited_for_and_can_be_asked_again(tmp_path, hub, alone, capsys):
    released = asyncio.Event()

    async def hang(method: str, path: str) -> None:
        if "/commit/" in path:
            await released.wait()

    hub.interfere = hang
    folder = groupwise.rl(settings(tmp_path, max_wait=0.0), TOY).folder
    assert what_must_be_equal(folder)["record"] == alone["record"]
    assert f"not uploaded yet: {', '.join(f'{REPO}@{b}' for b in BRANCHES)}" in warnings_of(folder)
    hub.interfere = None
    assert main(["runs", "push", "toy", "--dir", str(tmp_path), "--json"]) == 0
    uploaded = json.loads(capsys.readouterr().out)["uploaded"]
    assert [place.rpartition("/")[2] for place in uploaded] == BRANCHES
    assert all("README.md" in hub.repositories[REPO].files(branch) for branch in BRANCHES)
    assert main(["runs", "push", "toy", "--dir", str(tmp_path)]) == 2
    assert "has nothing to upload" in capsys.readouterr().err
    released.set()


def test_a_hub_that_is_away_and_comes_back_gets_all_in_order(tmp_path, hub):
    failures = iter([True, True])

    async def fail_twice(method: str, path: str) -> Response | None:
        return Response("down", 500) if path.endswith("create") and next(failures, False) else None

    hub.interfere = fail_twice
    folder = groupwise.rl(settings(tmp_path), TOY).folder
    assert list(hub.repositories[REPO].branches) == ["main", *BRANCHES]
    assert warnings_of(folder).count("it is tried again at the next checkpoint") == 2


def test_a_branch_with_other_content_is_left_as_it_is(tmp_path, hub):
    made = hub.add(REPO, {"mine.txt": b"x"})
    made.branches[BRANCHES[1]] = list(made.branches["main"])
    folder = groupwise.rl(settings(tmp_path), TOY).folder
    assert made.files(BRANCHES[1]) == {"mine.txt": b"x"}
    assert "README.md" in made.files(BRANCHES[2])
    assert warnings_of(folder).count("may not be overwritten") == 1
    assert f"not uploaded yet: {REPO}@{BRANCHES[1]}. Upload it by" in warnings_of(folder)


@pytest.mark.parametrize("where", ["/preupload/", "/large/", "/commit/"])
def test_killed_in_the_middle_of_an_upload_and_taken_up_again(tmp_path, hub, where, alone):
    killed = []

    async def kill(method: str, path: str) -> None:
        if where in path and not killed:
            killed.append(int((tmp_path / "process").read_text()))
            os.kill(killed[0], signal.SIGKILL)
            await asyncio.Event().wait()

    def run() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))
        groupwise.rl(settings(tmp_path, max_wait=60.0), TOY)

    hub.interfere = kill
    assert in_child(run) == -signal.SIGKILL
    hub.interfere = None
    go_on(settings(tmp_path))
    repository = hub.repositories[REPO]
    assert list(repository.branches) == ["main", *BRANCHES]
    assert [len(repository.branches[branch]) for branch in BRANCHES] == [2, 2, 2]
    assert not list((tmp_path / "toy/hub").iterdir())
    assert what_must_be_equal(tmp_path / "toy")["record"] == alone["record"]


def test_a_result_that_cannot_be_uploaded_stands_and_says_so(tmp_path, hub, capsys):
    async def fail(method: str, path: str) -> Response | None:
        return Response("no", 400) if path.endswith("create") else None

    hub.interfere = fail
    given = {**config(tmp_path), "eval": {}}
    given["run"]["hub"] = {"repo_id": REPO, "revision": "final"}
    result = groupwise.rl(given, TOY)
    assert result.exit_code == 1
    assert "could not be written" in result.summary["hub"]["error"]
    summary = json.loads((result.folder / "summary.json").read_text())
    assert (summary["state"], summary["error"]) == ("finished", None)
    assert (result.folder / "final/adapter_model.safetensors").is_file()
    log = (result.folder / "log.txt").read_text()
    assert f"groupwise runs push toy --dir {tmp_path}" in log
    hub.interfere = None
    assert main(["runs", "push", "toy", "--dir", str(tmp_path)]) == 0
    assert "README.md" in hub.repositories[REPO].files("final")


def test_supervised_runs_upload_too(tmp_path, hub, caplog):
    caplog.set_level(logging.INFO, "groupwise")
    given = {
        "model": {"name": "tiny"},
        "lora": {"r": 4},
        "training": {"max_steps": 2, "examples_per_step": 2},
        "run": {"dir": str(tmp_path), "threads": 1, "save_steps": 1, "hub": {"repo_id": REPO}},
        "callbacks": ["push_to_hub_revision"],
    }
    result = groupwise.sft(given, str(Path(__file__).with_name("sft_task.py")))
    assert result.exit_code == 0
    assert set(hub.repositories[REPO].branches) == {"main", *(BRANCHES[0], "main-step-000000001")}
    assert b"supervised fine-tuning" in hub.repositories[REPO].files()["README.md"]
