"""Uploads to a hub on loopback, over real HTTP: what is made, what is refused, and that doing it again does no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from starlette.responses import Response

from groupwise.core.errors import EndpointError, UsageError
from groupwise.engine.models import hub_queue
from groupwise.engine.models.hub_push import Target, check_access, push
from tests.fake_hub import Hub, serve_hub, use_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's

BRANCH = "main-step-000000120"
CARD = "---\nlicense: mit\n---\n\nA model.\n"
WEIGHTS = bytes(range(256)) * 20


@pytest.fixture
def hub(monkeypatch):
    with serve_hub(Hub(orgs=("lab",))) as hub:
        use_hub(monkeypatch, hub)
        yield hub


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (made / "adapter_config.json").write_text("{}")
    (made / "README.md").write_text(CARD)
    return made


def commits(hub: Hub, branch: str = BRANCH) -> int:
    return len(hub.repositories["me/model"].branches[branch])


# --- what is made


def test_a_branch_holds_exactly_the_folder_and_the_others_are_left_alone(hub, folder):
    hub.add("me/model", {"README.md": b"of main", "old.txt": b"x"})
    pushed = push(folder, Target("me/model", BRANCH), "run@120")
    repository = hub.repositories["me/model"]
    assert repository.files(BRANCH) == {
        "README.md": CARD.encode(),
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": WEIGHTS,
    }
    assert repository.files("main") == {"README.md": b"of main", "old.txt": b"x"}
    assert pushed.url == f"{hub.url}/me/model/tree/{BRANCH}"
    assert pushed.commit == repository.branches[BRANCH][-1]
    assert push(folder, Target("me/model", BRANCH), "run@120") == pushed, "it is there"
    assert commits(hub) == 2  # the hub's own, and one
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS[:-1] + b"\0")
    with pytest.raises(UsageError, match="adapter_model"):
        push(folder, Target("me/model", BRANCH), "run@120")
    assert repository.messages[repository.branches[BRANCH][-1]] == "run@120"


def test_a_repository_is_made_private_unless_it_is_to_be_seen(hub, folder):
    for name, private in (("lab/model", True), ("lab/seen", False)):
        assert check_access(Target(name, private=private)) is None
        assert name not in hub.repositories, "asking makes nothing"
        push(folder, Target(name, private=private), "m")
        assert hub.repositories[name].private is private


def test_an_upload_that_ended_before_its_commit_continues(hub, folder):
    async def refuse(method: str, path: str) -> Response | None:
        return Response("no", 400) if "/commit/" in path else None

    hub.interfere = refuse
    with pytest.raises(EndpointError, match="main-step-000000120"):
        push(folder, Target("me/model", BRANCH), "m")
    assert hub.repositories["me/model"].files(BRANCH) == {}
    hub.interfere = None
    hub.asked.clear()
    push(folder, Target("me/model", BRANCH), "m")
    assert commits(hub) == 2
    assert [path for _, path in hub.asked if path.startswith("/large/")] == [], "it is there"


def test_a_run_may_replace_what_it_has_uploaded_itself(tmp_path, hub, folder):
    run = tmp_path / "run"
    run.mkdir()
    target = Target("me/model")
    push(folder, target, "run@6", run)
    (folder / "README.md").write_text(CARD + "More.\n")
    assert check_access(target, run) is None
    with pytest.raises(UsageError, match="holds other files"):
        check_access(target)
    push(folder, target, "run@12", run)
    repository = hub.repositories["me/model"]
    assert repository.files()["README.md"].endswith(b"More.\n")
    messages = [repository.messages[commit] for commit in repository.branches["main"]]
    assert messages[1:] == ["run@6", "run@12"]
    stored = json.loads((run / "hub.json").read_bytes())
    assert stored == {"me/model@main": repository.branches["main"][-1]}


def test_a_branch_that_others_changed_since_the_last_push_is_left_alone(tmp_path, hub, folder):
    push(folder, Target("me/model"), "run@6", tmp_path)
    hub._add_commit(hub.repositories["me/model"], "main", {"theirs.txt": b"x"}, "theirs")
    for refused in (
        lambda: check_access(Target("me/model"), tmp_path),
        lambda: push(folder, Target("me/model"), "run@12", tmp_path),
    ):
        with pytest.raises(UsageError, match=r"theirs\.txt"):
            refused()
    assert hub.repositories["me/model"].files() == {"theirs.txt": b"x"}


# --- what is refused


def test_a_public_repository_is_refused_unless_that_is_said(hub, folder):
    hub.add("me/model", private=False)
    for refused in (
        lambda: check_access(Target("me/model")),
        lambda: push(folder, Target("me/model"), "m"),
    ):
        with pytest.raises(UsageError, match="private: false"):
            refused()
    assert hub.repositories["me/model"].files() == {}
    public = Target("me/model", private=False)
    assert check_access(public) is None
    push(folder, public, "m")
    assert "README.md" in hub.repositories["me/model"].files()


@pytest.mark.parametrize("there", [{"other.txt": b"x"}, {"README.md": b"x" * len(CARD)}])
def test_other_content_is_not_overwritten_without_leave(hub, folder, there):
    """That is told before any work where it can be known."""
    hub.add("me/model", there)
    if "other.txt" in there:
        with pytest.raises(UsageError, match=r"other.txt.*overwrite: true"):
            check_access(Target("me/model"))
    assert check_access(Target("me/model", overwrite=True)) is None
    with pytest.raises(UsageError):
        push(folder, Target("me/model"), "m")
    assert hub.repositories["me/model"].files() == there
    push(folder, Target("me/model", overwrite=True), "m")
    assert set(hub.repositories["me/model"].files()) == {p.name for p in folder.iterdir()}
    assert commits(hub, "main") == 3, "its history has what was there"


@pytest.mark.parametrize(("repo_id", "token", "role", "told"), [
    ("you/model", "hf_of_the_tests", "write", "me, lab"), ("model", "hf_of_the_tests", "write", "OWNER/NAME"),
    ("me/a b", "hf_of_the_tests", "write", "me/a b"), ("me/model", "another", "write", "HF_TOKEN"),
    ("me/model", "hf_of_the_tests", "read", "may only read"), ("me/model", None, "write", "hf auth login"),
])  # fmt: skip
def test_missing_write_access_is_refused_before_any_work(
    monkeypatch, tmp_path, repo_id, token, role, told
):
    with serve_hub(Hub(orgs=("lab",), role=role)) as hub:
        use_hub(monkeypatch, hub, *([token] if token else []))
        if token is None:
            monkeypatch.delenv("HF_TOKEN")
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(UsageError, match=told):
            check_access(Target(repo_id))
        assert not hub.repositories


def test_the_token_stands_in_no_message(monkeypatch, hub, folder):
    use_hub(monkeypatch, hub, "hf_secret")
    with pytest.raises(EndpointError) as caught:
        push(folder, Target("me/model"), "m")
    assert "hf_secret" not in str(caught.value)


# --- what waits


def queue(run: Path, step: int, folder: Path, name: str = "me/model@b") -> None:
    target = Target("me/model", f"{name.partition('@')[2]}-{step}")
    hub_queue.queue(run, name).add(step, target, folder, CARD, None)


def test_queued_uploads_are_complete_ordered_and_independent_of_their_source(tmp_path, hub, folder):
    run = tmp_path / "run"
    (folder / "optimiser.safetensors").write_bytes(b"nobody else's")
    for step in (120, 9):
        queue(run, step, folder)
    (run / "hub/me%2Fmodel@b/step-000000007/files").mkdir(parents=True)  # of one that died
    for file in folder.iterdir():
        file.unlink()
    entries = hub_queue.waiting(run)
    assert [entry.step for entry in entries] == [9, 120]
    for entry in entries:
        entry.push()
    files = hub.repositories["me/model"].files("b-9")
    assert files["adapter_model.safetensors"] == WEIGHTS
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert hub_queue.waiting(run) == []


def test_steps_that_are_done_again_are_given_up(tmp_path, folder):
    for step in (2, 4):
        queue(tmp_path, step, folder)
    (tmp_path / "hub/me%2Fmodel@b/step-000000001/files").mkdir(parents=True)
    queue(tmp_path, 5, folder, "me/model@another")
    hub_queue.queue(tmp_path, "me/model@b").drop_after(2)
    assert [entry.step for entry in hub_queue.waiting(tmp_path)] == [2, 5]
    left = [path.name for path in (tmp_path / "hub/me%2Fmodel@b").iterdir()]
    assert left == ["step-000000002"]


def test_each_upload_target_has_its_own_queue(tmp_path, hub, folder):
    names = ("me/model@b", "me/model@other/c")
    for step in (2, 1):
        for name in names:
            queue(tmp_path, step, folder, name)
    revisions = [entry.target.revision for entry in hub_queue.waiting(tmp_path)]
    assert revisions == ["b-1", "other/c-1", "b-2", "other/c-2"]
    for entry in hub_queue.queue(tmp_path, names[1]).waiting():
        entry.push()
    left = [entry.target.revision for entry in hub_queue.waiting(tmp_path)]
    assert left == ["b-1", "b-2"]
    assert set(hub.repositories["me/model"].branches) == {"main", "other/c-1", "other/c-2"}


def test_an_entry_that_is_removed_while_the_queue_is_read_is_left_out(
    tmp_path, folder, monkeypatch
):
    for step in (1, 2):
        queue(tmp_path, step, folder)
    first, _ = hub_queue.waiting(tmp_path)
    read = Path.read_bytes

    def drop_first(path: Path) -> bytes:
        if first.is_there:
            first.drop()  # as the thread that uploads does at any time
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", drop_first)
    assert [entry.step for entry in hub_queue.waiting(tmp_path)] == [2]


def test_an_entry_may_be_removed_twice(tmp_path, folder):
    """`runs push` may still upload it when the run is resumed, which removes it."""
    queue(tmp_path, 1, folder)
    (entry,) = hub_queue.waiting(tmp_path)
    entry.drop()
    entry.drop()
    assert hub_queue.waiting(tmp_path) == []
