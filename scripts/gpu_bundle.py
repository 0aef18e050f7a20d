"""Collects in `build/gpu` the wheels that the tests for GPUs need beside torch: `make gpu-bundle TARGET=3.12`.

A machine with a GPU often has a Python with torch and no package index. This folder, carried there with the checkout, is all that it
lacks. The releases are those of constraints.txt, for a Linux with x86-64. Left out is what comes with torch, and what takes most
space and no test of `tests/gpu` imports: numba's compiler, and the libraries that task files read data sets with.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"
FOLDER = ROOT / "build" / "gpu"
UNUSED = re.compile("numba|datasets|pyarrow|llguidance")
WITH_TORCH = re.compile(r"(torch|triton|numpy|sympy|networkx|setuptools|nvidia-.*|cuda-.*)==")
TEST_TOOLS = re.compile("pytest|hypothesis")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_MB = 40
"""Such machines are often reached by what carries little more than the checkout."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolve, download, say what to do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of the Python that is there")
    python = parser.parse_args(arguments).python
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    download(releases(python), python)
    sizes = [wheel.stat().st_size for wheel in FOLDER.iterdir()]
    place, size = FOLDER.relative_to(ROOT), sum(sizes) / 1e6
    print(f"{place}: {len(sizes)} wheels of {size:.1f} MB for Python {python} on Linux, x86-64.")
    if size > LIMIT_MB:
        print(
            f"At most {LIMIT_MB} MB are expected: add to UNUSED what no test imports, in {__file__}"
        )
        return 1
    print("Copy the checkout with this folder to the machine with the GPU, and there say")
    print(f"  make gpu WHEELS={place} PYTHON=python{python}")
    return 0


def releases(python: str) -> list[str]:
    """Each release that is needed, as `name==release`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"]]
    wanted = [each for each in wanted if not UNUSED.match(each)]
    wanted += [each for each in extras["dev"] if TEST_TOOLS.match(each)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    command += ["--no-header", "--no-annotate", "--constraint", str(CONSTRAINTS)]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "-"]
    found = subprocess.run(
        command, cwd=ROOT, check=True, input="\n".join(wanted), stdout=subprocess.PIPE, text=True
    )
    return [line for line in found.stdout.splitlines() if not WITH_TORCH.match(line)]


def download(found: list[str], python: str) -> None:
    """The wheels for that Python, whatever runs here; none with another hash than constraints.txt says."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", python, "--dest", str(FOLDER)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--constraint", str(CONSTRAINTS), *found], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
