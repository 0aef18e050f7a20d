"""Which files of a project are sent: those that git would track, whatever their names; and no credential, no run, nothing from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.launch import bundle as room
from groupwise.jobs.launch.bundle import bundle

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


def test_names_are_taken_as_they_are(project: Path) -> None:
    odd = ["a b.py", "-rf", 'it\'s "it".txt', "new\nline.txt", "ünï.txt", "*.py", "$(x)"]
    names = {*odd, "é/[a].txt"}
    write(project, dict.fromkeys(names, "x"))
    assert set(bundle(project).files) == {*USUAL, *names}
    git(project, "add", "--", ".")
    (project / "task.py").unlink()
    assert set(bundle(project).files) == {*USUAL, *names} - {"task.py"}, "it was deleted"
    assert set(bundle(project / "pack").files) == {"inner.py"}, "a project of its own"


def test_credentials_in_git_are_not_packed_but_their_examples_are(
    project: Path,
) -> None:
    names = {
        *(".env", ".env.local", "prod.env", "sub/.netrc", "keys/id_ed25519", "server.PEM", "a.key"),
        *(".aws/credentials", ".ssh/config", "kaggle.json", "service-account-prod.json"),
        *(
            "rootkey.csv", "sub/.hf_token", "prod.tfvars", ".env-prod", "a.key.bak", ".bash_history",
            ".AWS/x", "sub/.env/prod", ".config/gcloud/x.db", "KubeConfig", ".vault-token", "a.tfstate",
        ),
    }  # fmt: skip
    shown = {".env.example", "deploy.key.template", "id_rsa.pub"}
    keys = {"notes.txt": f"\n{KEY}"}
    write(project, {**dict.fromkeys({*names, *shown}, "TOKEN=x"), **keys})
    git(project, "add", "-f", *names)
    found = bundle(project)
    assert set(found.files) == {*USUAL, *shown}
    assert found.left_out.pop("notes.txt") == "a private key"
    assert found.left_out.keys() == names
    assert all("credentials" in why for why in found.left_out.values())
    assert {".env", "notes.txt"} <= bundle(project, take=[".env", "./notes.txt"]).files.keys()


@pytest.mark.parametrize("line", [
    f'KEY = """{KEY}"""', "-----BEGIN PGP PRIVATE KEY BLOCK-----", "token: ghp_" + "a1B2" * 9,
    "gw-train1-" + "aB3_" * 10, "AKIA" + "ABCDEFGH" * 2,
    "key = 'sk-proj-" + "a1" * 12 + "'", "xoxb-12345678-abcdef", "url: postgres://me:secret7@host/db",
    '{"source": ["os.environ[\\"HF_TOKEN\\"] = \\"hf_' + "aB3" * 11 + '\\""]}',
])  # fmt: skip
def test_a_line_that_looks_like_a_credential_does_not_travel_by_itself(
    project: Path, line: str
) -> None:
    write(project, {"pack/found.ipynb": "x" * 9000 + f"\n{line}\n", "large.js": "eyJ" * 9000})
    with pytest.raises(UsageError, match=r"look like credentials[^:]*:\n  pack/found\.ipynb\nTake"):
        bundle(project)
    assert "pack/found.ipynb" not in bundle(project, exclude=["*.ipynb"]).files
    for take in ("pack/found.ipynb", "pack"):
        assert "pack/found.ipynb" in bundle(project, take=[take]).files
    said = line.replace("\n", "  # pragma: allowlist secret\n") + "  # pragma: allowlist secret\n"
    write(project, {"pack/found.ipynb": f"x\n{said}"})
    assert "pack/found.ipynb" in bundle(project).files


@pytest.mark.parametrize("content", [
    (TOKEN := "token: ghp_" + "a1B2" * 9).encode("utf-16"), f"{TOKEN}\0".encode(),
    b'"image/png": "' + b"iVBORw0K" * 400_000 + f'"\n{TOKEN}\n'.encode(), b"line\n" * 700_000 + TOKEN.encode(),
])  # fmt: skip
def test_it_is_found_behind_a_picture_and_in_any_encoding(project: Path, content: bytes) -> None:
    (project / "found.txt").write_bytes(content)
    with pytest.raises(UsageError, match=r"look like credentials[^:]*:\n  found\.txt\nTake"):
        bundle(project)
    (project / "found.txt").write_bytes(bytes(range(256)) * 40 + TOKEN.encode())
    assert "found.txt" in bundle(project).files, "weights and pictures are not read as text"


def test_a_file_with_the_value_of_a_secret_is_refused_without_showing_it(project: Path) -> None:
    write(project, {"config.yaml": f"key: {CANARY}\n"})
    assert "config.yaml" in bundle(project, {"OTHER": "another value", "SHORT": "key"}).files
    with pytest.raises(UsageError, match=r"config\.yaml: .* HF_TOKEN") as caught:
        bundle(project, {"HF_TOKEN": CANARY})
    assert CANARY not in str(caught.value)


RUNS = {"runs/one/run.db": "x", "runs/one/config.json": "{}", "runs/one/log.txt": "x"}


def test_runs_stay_here_with_all_that_is_in_them_and_no_link_takes_one_or_a_secret_along(
    project: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"outside.txt": "not ours"})
    more = {"runs/one/checkpoints/step-1/a": "y", "runs/notes.md": "z"}
    write(project, {**RUNS, **more, ".env": f"TOKEN={CANARY}\n", ".aws/config": "x"})
    write(project, {"scratch/.gitignore": "*", "scratch/big": "x"})
    links = {
        "again.py": ("task.py", ""),
        "out.txt": (tmp_path / "outside.txt", "a link to what is outside of the project"),
        "folder": ("pack", ""),
        "above": (".", "a link that leads back to itself"),
        "pack/to-data": ("../data", "a link to data/, from which no file is sent"),
        "gone": ("nowhere", "a link to nothing"),
        "big": ("scratch/big", "a link to scratch/big, which does not travel"),
        "settings.txt": (".env", "a link to .env: credentials, by its name"),
        "again.txt": ("settings.txt", "a link to .env: credentials, by its name"),
        "cloud.txt": (".aws/config", "a link to .aws/config: in a folder of credentials"),
        "log.txt": ("runs/one/log.txt", "a link into runs/one/: the folder of a run"),
    }
    for name, (to, _) in links.items():
        (project / name).symlink_to(to)
    found = bundle(project)
    assert set(found.files) == {*USUAL, "runs/notes.md", "again.py", "folder/inner.py"}
    assert found.left_out["runs/one/"] == "the folder of a run"
    told = {path: why for path, why in found.left_out.items() if (project / path).is_symlink()}
    assert told == {name: why for name, (_, why) in links.items() if why}
    named = bundle(project, take=["log.txt"], exclude=["inner.py", "task.py"])
    assert "log.txt" in named.files, "a run may be taken along by name, a secret may not"
    assert not {"again.py", "folder/inner.py"} & {*named.files}, (
        "nor what --exclude names, by a link"
    )
    for name in ("settings.txt", "out.txt"):
        with pytest.raises(UsageError, match=f"--file {name} cannot travel: a link to"):
            bundle(project, take=[name])


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
    git(project, "submodule", "-q", "deinit", "-f", "vendor/other")
    assert "not checked out" in bundle(project).left_out["vendor/other/"]


def test_patterns_leave_files_out_and_the_summary_says_what_is_sent(project: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    names = [
        "a.ckpt",
        "pack/b.ckpt",
        "sub/pack/c",
        "out/deep/x.bin",
        "data/more.bin",
        "node_modules/m.js",
    ]
    write(project, {**dict.fromkeys(names, "x"), "weights.bin": pointer, "l\nine": "y" * 2000})
    (project / "inner").symlink_to("sub")
    (project / os.fsdecode(b"\xff.txt")).touch()
    asked = ("*.ckpt", "/pack/", "out/*.bin", "*.none")
    found = bundle(project, take=["a.ckpt", "inner"], exclude=asked)
    sent = {"task.py", ".gitignore", "new.yaml", "weights.bin", "l\nine", "a.ckpt"}
    assert set(found.files) == {*sent, "sub/pack/c", "inner/pack/c"}
    assert found.left_out["pack/b.ckpt"] == "--exclude *.ckpt"
    assert (found.unmatched, found.lfs_pointers) == (("*.none",), ("weights.bin",))
    text = "\n".join(found.summary())
    for told in ("8 files", "l⏎ine 2 kB", "not UTF-8", "--exclude *.none matches", "git lfs pull"):
        assert told in text


def test_a_project_without_git_travels_but_for_what_tools_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of editors are not results of jobs; what is being fetched does not travel, and no pipe is waited for."""
    here = ("task.py", "pack/z.py", "env/game.py", ".vscode/launch.json", "db/run.db", "db/code.py")
    made = (
        "my-env/pyvenv.cfg", "my-env/lib/x.py", "pack/__pycache__/y.pyc", "my.egg-info/PKG-INFO",
    )  # fmt: skip
    write(tmp_path, {**dict.fromkeys((*here, *made, ".env", "there/runs/x"), "a"), **RUNS})
    write(tmp_path, {"there/.incoming/brought.json": "{}"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "round").symlink_to("round")
    for path in (os.environ["PATH"], ""):  # also where there is no program git
        monkeypatch.setenv("PATH", path)
        found = bundle(tmp_path)
        assert set(found.files) == {*here}
        assert found.left_out.keys() - {"pipe"} == {
            ".env",
            "runs/one/",
            "my-env/",
            "round",
            "there/",
        }
    shutil.rmtree(tmp_path / "runs")
    write(
        tmp_path, {".gitignore": "db/\n", "down/CACHEDIR.TAG": "", "down/x": "", "models--a/x": ""}
    )
    with pytest.raises(UsageError, match="no git here"):
        bundle(tmp_path)
    monkeypatch.undo()
    assert set(bundle(tmp_path).files) == {*here, ".gitignore"} - {"db/run.db", "db/code.py"}
    git(tmp_path, "init", "-q", str(tmp_path))
    (tmp_path / ".git/info/exclude").write_text("pack\n")
    assert set(bundle(tmp_path / "pack").files) == {"z.py"}, "its repository ignores all of it"


def test_a_project_that_git_cannot_list_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = project / "program"
    program.write_text(f"#!/bin/sh\ntouch {project}/ran\n")
    program.chmod(0o755)
    subprocess.run(["git", "-C", project, "config", "core.fsmonitor", program], check=True)
    bundle(project)
    assert not (project / "ran").exists(), "a program that the project names"
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UsageError, match="dubious ownership"):
        bundle(project)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="no git here"):
        bundle(project)


def test_too_much_is_refused_with_what_is_largest(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {"weights.bin": "x" * 5000})
    with pytest.raises(UsageError, match="is not a folder"):
        bundle(project / "none")
    monkeypatch.setattr(room, "MAX_BUNDLE_BYTES", 4000)
    with pytest.raises(UsageError, match=r"weights\.bin: 5 kB"):
        bundle(project)
    monkeypatch.setattr(room, "MAX_BUNDLE_BYTES", 1 << 30)
    monkeypatch.setattr(room, "MAX_FILES", 2)
    with pytest.raises(UsageError, match="5 files"):
        bundle(project)
