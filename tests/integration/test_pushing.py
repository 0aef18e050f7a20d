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
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.responses import Response

import groupwise
from groupwise.cli.main import main
from groupwise.core.errors import UsageError
from groupwise.engine.models import hub_queue
from tests.fake_hub import Hub, serve_hub, use_hub
from tests.integration.toy_run import TOY, config, go_on, in_child, what_must_be_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # huggingface_hub
]
SAVED = (1, 2, 3)
BRANCHES = [f"main-step-{step:09d}" for step in SAVED]
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
    groupwise.rl(three_steps(runs), TOY)
    return what_must_be_equal(runs / "toy")


def three_steps(runs: Path, **training: Any) -> dict[str, Any]:
    given = {**config(runs, **{"max_steps": 3, **training}), "eval": {}}
    given["run"] |= {"save_steps": 1}
    return given


def settings(runs: Path, *, final: bool = False, **parameters: Any) -> dict[str, Any]:
    given = three_steps(runs)
    given["callbacks"] = [{"name": "push_to_hub_revision", "repo_id": REPO, **parameters}]
    if final:
        given["run"]["hub"] = {"repo_id": REPO}
    return given


def warnings_of(run: Path) -> str:
    return "\n".join(
        line for line in (run / "log.txt").read_text().splitlines() if " WARNING " in line
    )


def test_checkpoints_and_the_final_weights_stand_on_the_hub(tmp_path, hub, alone):
    given = settings(tmp_path, final=True)
    (first,) = given["callbacks"]
    given["callbacks"] = [first, {**first, "repo_id": "me/other", "revision": "x/y"}]
    result = groupwise.rl(given, TOY)
    assert result.exit_code == 0
    repository = hub.repositories[REPO]
    url, commit = f"{hub.url}/{REPO}/tree/main", repository.branches["main"][-1]
    assert result.summary["hub"] == {"url": url, "commit": commit}
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
    others = [f"x/y-step-{step:09d}" for step in SAVED]
    assert list(hub.repositories["me/other"].branches) == ["main", *others]
    assert all("README.md" in hub.repositories["me/other"].files(branch) for branch in others)
    assert not hub_queue.waiting(result.folder)
    assert what_must_be_equal(result.folder) == alone


def test_a_hub_repository_that_cannot_be_written_is_refused_before_the_run(tmp_path, hub):
    with pytest.raises(UsageError, match="you/model@"):
        groupwise.rl({**settings(tmp_path, repo_id="you/model")}, TOY, dry_run=True)
    given = three_steps(tmp_path)
    given["run"]["hub"] = {"repo_id": "you/model"}
    with pytest.raises(UsageError, match="you/model@main"):
        groupwise.rl(given, TOY)
    twice = settings(tmp_path, final=True)
    twice["callbacks"] += ["push_to_hub_revision"]
    with pytest.raises(UsageError, match=f"{REPO}@main-step-"):
        groupwise.rl(twice, TOY)
    hub.add(REPO, {"mine.txt": b"x"})
    given["run"]["hub"] = {"repo_id": REPO}
    with pytest.raises(UsageError, match=r"mine\.txt"):
        groupwise.rl(given, TOY)
    assert not list(tmp_path.iterdir())


def test_a_hub_that_hangs_is_not_waited_for_and_can_be_asked_again(tmp_path, hub, alone, capsys):
    released = threading.Event()

    async def hang(method: str, path: str) -> None:
        if "/commit/" in path:
            await asyncio.to_thread(released.wait)

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
    before, failures = iter([True]), iter([True, True])

    async def fail(method: str, path: str) -> Response | None:
        down = next(before, False) or (path.endswith("create") and next(failures, False))
        return Response("down", 503) if down else None

    hub.interfere = fail
    folder = groupwise.rl(settings(tmp_path), TOY).folder
    assert list(hub.repositories[REPO].branches) == ["main", *BRANCHES]
    assert warnings_of(folder).count("tried again") == 1
    log = (folder / "log.txt").read_text()
    assert log.count("tried again") == 2, "the log has each"
    assert "before the run" in log


def test_ctrl_c_ends_the_wait_for_the_hub(tmp_path, hub, capsys):
    released = threading.Event()

    async def hang(method: str, path: str) -> None:
        if "/commit/" in path:
            log = (tmp_path / "toy/log.txt").read_text
            while "waiting for the hub" not in log():  # noqa: ASYNC110 — another process says it
                await asyncio.sleep(0.01)
            os.kill(int((tmp_path / "process").read_text()), signal.SIGINT)
            await asyncio.to_thread(released.wait)

    def run() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))
        given = settings(tmp_path, max_wait=1000.0)
        assert groupwise.rl(given, TOY).summary["state"] == "finished"

    hub.interfere = hang
    assert in_child(run) == 0
    hub.interfere = None
    released.set()
    assert main(["runs", "push", "toy", "--dir", str(tmp_path)]) == 0
    assert list(hub.repositories[REPO].branches) == ["main", *BRANCHES]


def test_a_branch_with_other_content_is_left_as_it_is(tmp_path, hub):
    made = hub.add(REPO, {"mine.txt": b"x"})
    made.branches[BRANCHES[1]] = list(made.branches["main"])
    folder = groupwise.rl(settings(tmp_path), TOY).folder
    assert made.files(BRANCHES[1]) == {"mine.txt": b"x"}
    assert "README.md" in made.files(BRANCHES[2])
    assert warnings_of(folder).count("may not be overwritten") == 1
    assert f"not uploaded yet: {REPO}@{BRANCHES[1]}. Upload it by" in warnings_of(folder)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("/preupload/", marks=pytest.mark.soak(suite="kills")),
        pytest.param("/large/", marks=pytest.mark.soak(suite="kills")),
        "/commit/",
    ],
)
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
    assert not hub_queue.waiting(tmp_path / "toy")
    assert what_must_be_equal(tmp_path / "toy")["record"] == alone["record"]


def test_a_branch_that_others_fill_meanwhile_is_kept_and_another_one_can_be_named(
    tmp_path, hub, capsys
):
    given = three_steps(tmp_path, max_steps=1)
    given["run"]["hub"] = {"repo_id": REPO}

    async def fill(method: str, path: str) -> None:
        if path.endswith("create"):
            hub.add(REPO, {"theirs.txt": b"x"})

    hub.interfere = fill
    result = groupwise.rl(given, TOY)
    assert result.exit_code == 1
    assert "theirs.txt" in result.summary["hub"]["error"]
    summary = json.loads((result.folder / "summary.json").read_text())
    assert (summary["state"], summary["error"]) == ("finished", None), "the result stands"
    log = (result.folder / "log.txt").read_text()
    assert f"push toy --dir {tmp_path} with --overwrite or --revision BRANCH" in log
    hub.interfere = None
    push = ["runs", "push", "toy", "--dir", str(tmp_path)]
    assert main(push) == 2
    assert main([*push, "--revision", "my run"]) == 2
    assert main([*push, "--revision", "v1"]) == 0
    repository = hub.repositories[REPO]
    assert repository.files() == {"theirs.txt": b"x"}
    assert b'revision="v1"' in repository.files("v1")["README.md"]
    assert main([*push, "--overwrite"]) == 0
    final = {file.name: file.read_bytes() for file in (result.folder / "final").iterdir()}
    assert repository.files() == final
    assert final.keys() == repository.files("v1").keys()
    assert b"revision=" not in final["README.md"]
    assert not list(result.folder.glob(".*"))


def test_supervised_runs_upload_too(tmp_path, hub, caplog):
    caplog.set_level(logging.INFO, "groupwise")
    given = {
        "model": {"name": "tiny"}, "lora": {"r": 4}, "training": {"max_steps": 2, "examples_per_step": 2},
        "run": {"dir": str(tmp_path), "threads": 1, "save_steps": 1, "hub": {"repo_id": REPO}}, "callbacks": ["push_to_hub_revision"],
    }  # fmt: skip
    result = groupwise.sft(given, str(Path(__file__).with_name("sft_task.py")))
    assert result.exit_code == 0
    assert set(hub.repositories[REPO].branches) == {"main", *BRANCHES[:2]}
    assert b"supervised fine-tuning" in hub.repositories[REPO].files()["README.md"]


def test_a_finished_run_that_is_trained_further_replaces_its_own_upload(tmp_path, hub):
    given = three_steps(tmp_path, max_steps=1, lr_scheduler_type="constant")
    given["run"] |= {"hub": {"repo_id": REPO}}
    groupwise.rl(given, TOY)
    assert b"for 1 steps" in hub.repositories[REPO].files()["README.md"]
    given["training"]["max_steps"] = 2
    assert groupwise.rl(given, TOY, resume_from="toy@1").exit_code == 0
    assert b"for 2 steps" in hub.repositories[REPO].files()["README.md"]
