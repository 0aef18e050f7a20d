"""What travels of a project: what git would take, whatever the names; and no credential, no run, nothing from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.hosts.files import BlobStore
from groupwise.launch import bundle as room
from groupwise.launch.bundle import bundle

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n"
CANARY = "canary-value-of-a-secret"


def git(folder: Path, *words: str) -> None:
    settings = ("-c", "user.name=n", "-c", "user.email=e", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tracked files, an untracked one, and one that is ignored."""
    root = tmp_path_factory.mktemp("committed")
    git(root, "init", "-q")
    write(root, {"task.py": "a", "pack/inner.py": "b", ".gitignore": "data/\n*.log\n"})
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    write(root, {"new.yaml": "c", "data/large.bin": "d", "out.log": "e"})
    return root


@pytest.fixture
def project(committed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(committed, tmp_path / "project"))


USUAL = {"task.py", "pack/inner.py", ".gitignore", "new.yaml"}


def test_what_git_would_take_travels(project: Path) -> None:
    found = bundle(project)
    assert set(found.files) == USUAL
    assert found.left_out == {}
    assert found.size == 3 + len("data/\n*.log\n")
    assert all(found.files[path] == project / path for path in found.files)


def test_names_are_taken_as_they_are(project: Path) -> None:
    odd = ["a b.py", "-rf", 'it\'s "it".txt', "new\nline.txt", "ünï.txt", "*.py", "$(x)"]
    names = {*odd, "é/[a].txt"}
    write(project, dict.fromkeys(names, "x"))
    assert set(bundle(project).files) == {*USUAL, *names}
    git(project, "add", "--", ".")
    (project / "task.py").unlink()
    assert set(bundle(project).files) == {*USUAL, *names} - {"task.py"}, "it was deleted"
    assert set(bundle(project / "pack").files) == {"inner.py"}, "a project of its own"


def test_credentials_stay_here_though_git_has_them(project: Path) -> None:
    names = {
        *(".env", ".env.local", "prod.env", "sub/.netrc", "keys/id_ed25519", "server.PEM", "a.key"),
        *(".aws/credentials", ".ssh/config", "kaggle.json", "service-account-prod.json"),
    }
    write(project, dict.fromkeys(names, "TOKEN=x"))
    git(project, "add", "-f", *names)
    found = bundle(project)
    assert set(found.files) == USUAL
    assert found.left_out.keys() == names
    assert all("credentials" in why for why in found.left_out.values())


def test_files_that_show_how_credentials_are_written_travel(project: Path) -> None:
    write(
        project, {".env.example": "TOKEN=", "deploy.key.template": "…", "id_rsa.pub": "ssh-rsa AAA"}
    )
    assert set(bundle(project).files) > {".env.example", "deploy.key.template", "id_rsa.pub"}


def test_a_private_key_is_known_by_its_beginning(project: Path) -> None:
    write(project, {"notes.txt": f"\n{KEY}", "test_keys.py": f'KEY = """{KEY}"""\n'})
    found = bundle(project)
    assert found.left_out == {"notes.txt": "a private key"}
    assert found.suspects == ("test_keys.py",)


def test_a_file_with_the_value_of_a_secret_is_refused_without_showing_it(project: Path) -> None:
    write(project, {"config.yaml": f"key: {CANARY}\n"})
    assert "config.yaml" in bundle(project, {"OTHER": "another value", "SHORT": "key"}).files
    with pytest.raises(UsageError, match=r"config\.yaml: the value of HF_TOKEN") as caught:
        bundle(project, {"HF_TOKEN": CANARY})
    assert CANARY not in str(caught.value)


def test_runs_stay_here_with_all_that_is_in_them(project: Path) -> None:
    write(
        project,
        {
            "runs/one/run.db": "x",
            "runs/one/config.json": "{}",
            "runs/one/checkpoints/step-1/a": "y",
            "runs/notes.md": "z",
        },
    )
    found = bundle(project)
    assert set(found.files) == {*USUAL, "runs/notes.md"}
    assert found.left_out == {"runs/one/": "the folder of a run"}


def test_no_link_takes_a_secret_or_a_run_along(project: Path) -> None:
    made = {".env": f"TOKEN={CANARY}\n", ".aws/config": "x", "runs/one/run.db": "x"}
    write(project, {**made, "runs/one/config.json": "{}", "runs/one/log.txt": "x"})
    (project / "settings.txt").symlink_to(".env")
    (project / "again.txt").symlink_to("settings.txt")
    (project / "cloud.txt").symlink_to(".aws/config")
    (project / "log.txt").symlink_to("runs/one/log.txt")
    found = bundle(project)
    assert set(found.files) == USUAL
    links = {path: why for path, why in found.left_out.items() if (project / path).is_symlink()}
    assert links == {
        "settings.txt": "a link to .env: credentials, by its name",
        "again.txt": "a link to .env: credentials, by its name",
        "cloud.txt": "a link to .aws/config: in a folder of credentials",
        "log.txt": "a link into runs/one/: the folder of a run",
    }


def test_a_link_that_somebody_names_takes_a_run_along_and_no_secret(project: Path) -> None:
    write(
        project,
        {".env": "x", "runs/one/run.db": "x", "runs/one/config.json": "{}", "runs/one/w": "y"},
    )
    (project / "start").symlink_to("runs/one/w")
    (project / "hidden").symlink_to(".env")
    found = bundle(project, take=["start", "hidden"])
    assert "start" in found.files
    assert found.left_out["hidden"] == "a link to .env: credentials, by its name"


def test_links_travel_as_what_they_lead_to_within_the_project(
    project: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"outside.txt": "not ours"})
    (project / "again.py").symlink_to("task.py")
    (project / "out.txt").symlink_to(tmp_path / "outside.txt")
    (project / "folder").symlink_to("pack")
    (project / "gone").symlink_to("nowhere")
    found = bundle(project)
    assert set(found.files) == {*USUAL, "again.py"}
    assert found.left_out == {
        "out.txt": "a link to what is outside of the project",
        "folder": "a link to a folder",
        "gone": "no file",
    }


def test_submodules_travel_with_their_own_rules(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    write(other, {"lib.py": "x", ".gitignore": "*.tmp\n", ".env": "TOKEN=x"})
    git(other, "add", "-f", ".")
    git(other, "commit", "-qm", "first")
    git(project, "submodule", "add", "-q", str(other), "vendor/other")
    write(project, {"vendor/other/scratch.tmp": "y"})
    found = bundle(project)
    assert {"vendor/other/lib.py", "vendor/other/.gitignore", ".gitmodules"} <= set(found.files)
    assert "vendor/other/scratch.tmp" not in found.files
    assert found.left_out == {"vendor/other/.env": "credentials, by its name"}


def test_a_project_without_git_travels_but_for_what_tools_make(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "task.py": "a",
            "my-env/pyvenv.cfg": "",
            "my-env/lib/x.py": "b",
            "pack/__pycache__/y.pyc": "c",
            "pack/z.py": "d",
        },
    )
    write(
        tmp_path,
        {
            "my.egg-info/PKG-INFO": "e",
            ".env": "f",
            "runs/one/run.db": "g",
            "runs/one/config.json": "h",
        },
    )
    write(tmp_path, {"env/game.py": "an environment to learn in"})
    found = bundle(tmp_path)
    assert set(found.files) == {"task.py", "pack/z.py", "env/game.py"}
    assert set(found.left_out) == {".env", "runs/one/", "my-env/"}


def test_what_git_cannot_say_is_not_guessed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UsageError, match="dubious ownership"):
        bundle(project)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="there is no git here to say"):
        bundle(project)


def test_without_the_program_git_a_plain_folder_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of editors are no results of jobs; what is being fetched does not travel, and no pipe is waited for."""
    here = {"task.py": "t", ".vscode/launch.json": "{}", "db/run.db": "x", "db/code.py": "y"}
    write(tmp_path, {**here, "there/.incoming/brought.json": "{}", "there/runs/x": "y"})
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("PATH", "")
    found = bundle(tmp_path)
    assert (set(found.files), set(found.left_out)) == ({*here}, {"pipe", "there/"})


def test_too_much_is_refused_with_what_is_largest(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {"weights.bin": "x" * 5000})
    with pytest.raises(UsageError, match="is no folder"):
        bundle(project / "none")
    monkeypatch.setattr(room, "LARGEST", 4000)
    with pytest.raises(UsageError, match=r"weights\.bin: 0 MB"):
        bundle(project)
    monkeypatch.setattr(room, "LARGEST", 1 << 30)
    monkeypatch.setattr(room, "MOST_FILES", 2)
    with pytest.raises(UsageError, match="5 files"):
        bundle(project)


def test_equal_files_are_one_blob_and_keep_their_modes(project: Path, tmp_path: Path) -> None:
    write(project, {"run.sh": "a"})
    (project / "run.sh").chmod(0o755)
    store = BlobStore(tmp_path / "blobs")
    manifest: Any = store.put_files(bundle(project).files)
    assert manifest["run.sh"].sha256 == manifest["task.py"].sha256
    assert (manifest["run.sh"].mode, manifest["task.py"].mode & 0o111) == (0o755, 0)
