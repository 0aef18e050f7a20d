"""Virtual environments of environments: named, made once, locked, listed, removed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.core import virtual_environments
from groupwise.core.errors import TaskError, UsageError
from groupwise.tasks.contract import load_task
from groupwise.tasks.external.installed import find, install, list_installed, name_of, remove
from tests.meanwhile import right_after, right_before


@pytest.fixture(autouse=True)
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip that installs two packages, one of them from a folder, and reports the hash of the other. Returns what it was asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[list[str]] = []

    def run(words: list[str], *_: Any) -> tuple[int, str]:
        asked.append(words)
        reports = [Path(word.partition("=")[2]) for word in words if word.startswith("--report=")]
        for report in reports:
            (site,) = report.parent.glob("lib/python*/site-packages")
            (site / "verifiers-0.1.14.dist-info").mkdir()
            own = site / "my_game-1.0.dist-info"
            own.mkdir()
            (own / "direct_url.json").write_text('{"url": "file:///games/my_game"}')
            archive = {"hashes": {"sha256": "ab12"}}
            entry = {"download_info": {"archive_info": archive}, "metadata": {"name": "verifiers"}}
            report.write_text(json.dumps({"install": [entry]}))
        return 0, ""

    monkeypatch.setattr(virtual_environments, "run_installer", run)
    return asked


def test_it_is_made_once_with_its_library_and_locked(pip: list[list[str]]):
    made = install("my_game", kind="verifiers", say=False)
    assert pip[-1][-3:] == ["my_game", "verifiers", "uv"]
    assert (
        made.lock.read_text()
        == "my_game @ file:///games/my_game\nverifiers==0.1.14 --hash=sha256:ab12\n"
    )
    assert made.version_of("verifiers") == "0.1.14"
    count = len(pip)
    assert (install("my_game", kind="verifiers", say=False), len(pip)) == (made, count)
    with pytest.raises(UsageError, match="--again"):
        install("my_game==2.0", kind="verifiers", say=False)
    again = install("my_game", kind="verifiers", again=True, say=False)
    assert again.python != made.python
    assert not made.python.exists()
    assert list_installed() == [again]
    remove("my-game")
    assert find("my-game") is None


def test_a_folder_is_installed_again_once_its_files_have_changed(tmp_path: Path):
    folder, copy = tmp_path / "game", tmp_path / "copy"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "my_game"\n')
    made = install(str(folder), kind="verifiers", say=False)
    assert (made.name, install(str(folder), kind="verifiers", say=False)) == ("my-game", made)
    shutil.copytree(folder, copy)
    assert install(str(copy), kind="verifiers", say=False) == made
    (copy / "my_game.egg-info").mkdir()
    (copy / "my_game.egg-info" / "PKG-INFO").write_text("what building leaves")
    assert install(str(copy), kind="verifiers", say=False) == made
    (copy / "my_game.py").write_text("")
    assert install(str(copy), kind="verifiers", say=False).python != made.python


def test_versions_of_a_lock_are_installed(pip: list[list[str]], tmp_path: Path):
    """First what has hashes, since pip refuses to check those of some packages only."""
    lock = tmp_path / "lock.txt"
    address = "my_game @ git+file:///games@1f2e#subdirectory=my_game"
    lock.write_text(f"verifiers==0.1.14 --hash=sha256:ab12\n{address}\n")
    made = install("my_game", kind="verifiers", locked=lock, say=False)
    assert pip[-1][-2:] == ["--no-deps", address]
    (requirements,) = [Path(asked[-1]) for asked in pip if asked[-3:-1] == ["--no-deps", "-r"]]
    assert requirements.read_text() == "verifiers==0.1.14 --hash=sha256:ab12"
    assert "verifiers==0.1.14 --hash=sha256:ab12" in made.lock.read_text()


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("Kuhn_Poker", "kuhn-poker"),
        ("wordle[extra]>=0.2,<1", "wordle"),
        ("git+https://github.com/some/repo.git@main", "repo"),
        ("git+https://github.com/some/repo#subdirectory=environments/code_golf", "code-golf"),
        ("wordle @ https://example.org/wordle.whl", "wordle"),
    ],
)
def test_the_name_is_that_of_the_package(requirement: str, name: str):
    assert name_of(requirement) == name


def test_packages_with_other_names_are_listed_with_the_command_that_uses_them(
    capsys: pytest.CaptureFixture[str],
):
    """Its module is still that of the package; tasksets that come with verifiers have names of their own."""
    used = {
        "my_game": "--task-module verifiers:my-game task.environment=other",
        "verifiers[ta]": "--task-module verifiers:other",
    }
    line = "next: groupwise check "
    for package, words in used.items():
        assert main(["environments", "install", package, "--name", "other", "--again"]) == 0
        assert capsys.readouterr().err.splitlines()[-1] == line + words


def test_a_missing_environment_is_reported_with_what_to_do():
    install("my_game", kind="verifiers", say=False)
    with pytest.raises(TaskError, match="textarena:NAME, verifiers:NAME"):
        load_task("gym:CartPole-v1")
    task = load_task("verifiers:my-gane")
    with pytest.raises(
        TaskError, match=r"Did you mean my-game.*groupwise environments install my-gane"
    ):
        task.program({"task": {}})


def test_one_that_another_process_removes_while_this_one_waits_is_made_or_removed_again(
    monkeypatch: pytest.MonkeyPatch,
):
    home = install("my_game", kind="verifiers", say=False).home
    right_after(monkeypatch, virtual_environments.fcntl, "flock", lambda: shutil.rmtree(home))
    remove("my-game")
    assert not home.exists()
    right_after(monkeypatch, virtual_environments.fcntl, "flock", lambda: shutil.rmtree(home))
    made = install("my_game", kind="verifiers", say=False)
    assert list_installed() == [made]


def test_what_another_installation_builds_in_a_folder_may_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "game"
    build = folder / "build" / "lib"
    build.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "my_game"\n')
    right_before(monkeypatch, os, "scandir", build.rmdir, lambda path: str(path) == str(build))
    made = install(str(folder), kind="verifiers", say=False)
    assert not build.exists()
    assert install(str(folder), kind="verifiers", say=False) == made
