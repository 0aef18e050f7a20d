#!/usr/bin/env python3
"""Make `.venv` ready: the first step of every `make` verb.

The system's Python runs this file, and nothing else needs to be installed. Five steps: the environment itself; torch,
before anything else can ask for it, in the build that suits this machine; the dependencies as constraints.txt pins them, file by file, and
the package over them; the bundled model; byte code of what every run imports, and the kernels for this processor. A stamp in `.venv`
remembers what was done, so that a later call with nothing to do costs a tenth of a second. An interrupted call leaves no stamp, and the
next one goes on from there.

    python3 scripts/bootstrap.py --profile train     what training and the dashboard need
    python3 scripts/bootstrap.py --profile dev       the same, and what tests and checks need
    python3 scripts/bootstrap.py --list train,server print what these extras need, for `pip install -r`, and do nothing

TORCH=cpu|cuda|auto chooses the torch build. `auto`, the default, keeps the build that is installed; in a fresh environment it
takes CUDA where `nvidia-smi` finds a GPU and the CPU build elsewhere. pip is configured as always: PIP_INDEX_URL,
PIP_FIND_LINKS, HTTPS_PROXY or pip's own configuration files.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "groupwise-bootstrap.json"
LOG = VENV / "groupwise-bootstrap.log"
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.13", "python3.12", "python3.11", "python3.14")
OLDEST_PIP = 26
PROFILES = {"train": ("train", "web"), "dev": ("train", "web", "dev")}
FLAVOURS = ("cpu", "cuda", "auto")
NEEDED_GB = {"cpu": 3, "cuda": 10}

QUICK = ("--retries", "1", "--timeout", "15")
"""An index that does not answer may not cost minutes. Without any retry pip would not say why it found nothing."""


class SetupError(Exception):
    """The environment cannot be made; the message says what is missing and what to do."""


class NoIndexError(SetupError):
    """No package index answers."""


class Pins(NamedTuple):
    """The releases that pyproject.toml names for this script."""

    torch: str
    bundled_model: str
    loss_oracle: str


class Attempt(NamedTuple):
    """One way of getting torch, tried in order until one succeeds."""

    pip_arguments: tuple[str, ...]
    notice: str = ""
    """Said before it is tried."""
    remedy: str = ""
    """Said in place of pip's words when it fails and nothing is left to try."""


class Torch(NamedTuple):
    """The torch that is installed."""

    version: str
    flavour: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up `.venv` if it is not as it should be; return the exit code."""
    options = parse(arguments)
    if options.list is not None:
        print("\n".join(requirements(options.list.split(","))))
        return 0
    profile = str(options.profile)
    try:
        require_python()
        wanted = torch_choice(os.environ.get("TORCH") or "auto")
        if stamp_fits(profile, wanted):
            return 0
        with only_one_at_a_time():
            if not stamp_fits(profile, wanted):
                set_up(profile, wanted)
    except SetupError as error:
        print(f"\nSet-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=sorted(PROFILES), default="dev")
    parser.add_argument("--list", metavar="EXTRAS")
    return parser.parse_args(arguments)


def set_up(profile: str, wanted: str) -> None:
    """The five steps, then the stamp."""
    began = time.monotonic()
    pins = read_pins()
    print(f"Setting up {VENV} (profile {profile}); later calls skip this.")
    LOG.unlink(missing_ok=True)
    with step(1, "environment"):
        make_environment()
        STAMP.unlink(missing_ok=True)
    flavour = choose_flavour(wanted, pins.torch)
    with step(2, f"torch {pins.torch} ({flavour})"):
        install_torch(pins.torch, flavour, wanted)
    with step(3, "groupwise and its dependencies"):
        install_pinned(*requirements(PROFILES[profile]))
        # pip checks hashes of files, and a folder has none: by itself, with what builds it installed above
        install("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    with step(4, f"bundled model ({pins.bundled_model})"):
        install_pinned("--no-deps", pins.bundled_model)
        if "dev" in PROFILES[profile]:
            install_pinned("--no-deps", pins.loss_oracle)
    with step(5, "byte code and kernels"):
        compile_ahead()
    torch = installed_torch()
    write_stamp(profile, torch.flavour if torch else flavour)
    release = torch.version if torch else "?"
    print(f"Ready after {time.monotonic() - began:.0f} s, with torch {release}.")


# The stamp


def stamp_fits(profile: str, wanted: str) -> bool:
    """Whether `.venv` already is what this call asks for."""
    if not venv_python().exists():
        return False
    try:
        stamp = json.loads(STAMP.read_text())
        return (
            stamp["inputs"] == inputs_hash()
            and stamp["root"] == str(ROOT)
            and set(PROFILES[profile]) <= set(PROFILES[stamp["profile"]])
            and wanted in ("auto", stamp["torch"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_stamp(profile: str, flavour: str) -> None:
    """Remember what was installed, in one move."""
    stamp = {
        "inputs": inputs_hash(),
        "root": str(ROOT),
        "profile": profile,
        "torch": flavour,
    }
    draft = STAMP.with_suffix(".tmp")
    draft.write_text(json.dumps(stamp, indent=1))
    draft.replace(STAMP)


def inputs_hash() -> str:
    """Of all that decides what is installed, this file included; settings of linters and tests do not count."""
    project = read_pyproject()
    parts = [project["build-system"], project["project"], project["tool"]["groupwise"]]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for path in (CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_pins() -> Pins:
    """The table `tool.groupwise.bootstrap` of pyproject.toml."""
    return Pins(**read_pyproject()["tool"]["groupwise"]["bootstrap"])


def read_pyproject() -> dict[str, Any]:
    """pyproject.toml as it stands."""
    import tomllib  # new in 3.11; an older Python must get as far as its message

    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def requirements(extras: Sequence[str]) -> list[str]:
    """What the package and its extras need, and what builds it."""
    project = read_pyproject()
    wanted = [
        *project["build-system"]["requires"],
        "editables",
        *project["project"]["dependencies"],
    ]
    offered = project["project"]["optional-dependencies"]
    waiting = [name for name in extras if name]
    for name in waiting:
        for each in offered[name]:
            of_ours = re.match(r"groupwise\[(.*)\]", each)
            if of_ours:
                waiting += [other for other in of_ours[1].split(",") if other not in waiting]
            else:
                wanted.append(each)
    return sorted(set(wanted))


# Python and the environment


def require_python() -> None:
    """Go on under a newer interpreter where this one is too old and another is on the PATH."""
    if sys.version_info >= OLDEST_PYTHON:
        return
    for name in NEWER_PYTHONS:
        found = shutil.which(name)
        if found and runs(found):
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python 3.11 or newer is needed; this is {platform.python_version()} ({sys.executable}).\n"
        "Install one (for example `apt install python3.11 python3.11-venv`, `brew install python@3.12` or\n"
        "https://www.python.org/downloads), then run make again, with PYTHON=/path/to/python3.12 if it is not on the PATH."
    )


def runs(python: str) -> bool:
    """A version manager's stand-in may be on the PATH with no Python behind it."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def make_environment() -> None:
    """Make `.venv`, or make it anew where what stands there cannot be used; bring a recent pip."""
    version = pip_version()
    if version is None:
        if moved():
            print(
                f" {VENV} was made for another folder, so it is made again ...", end="", flush=True
            )
        require_venv_module()
        create_environment()
        version = pip_version()
    if version is None:
        raise SetupError(
            f"the new environment {VENV} has no working pip; this Python ({sys.executable}) is damaged.\n"
            "Name another one: make setup PYTHON=/path/to/python3."
        )
    if version < OLDEST_PIP:
        # An older one cannot read hashes from a file of constraints, and needs the line itself.
        line = re.search(r"^pip==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
        only_pip = VENV / "pip.txt"
        only_pip.write_text(line[0] if line else "")
        install(*QUICK, "--require-hashes", "-r", str(only_pip))


def pip_version() -> int | None:
    """Major version of the pip in `.venv`; None where there is no usable environment of this folder."""
    if moved() or not venv_python().exists():
        return None
    probe = "import pip, sys; assert sys.version_info >= (3, 11); print(pip.__version__)"
    answer = subprocess.run(
        [str(venv_python()), "-c", probe],
        capture_output=True,
        text=True,
        env=clean_environ(),
        check=False,
    )
    return int(answer.stdout.split(".")[0]) if answer.returncode == 0 else None


def moved() -> bool:
    """Whether the scripts of `.venv` start the interpreter of another folder, from which it was moved or copied.

    The stamp cannot say this: whoever copies an environment and mends its scripts may leave the stamp as it was.
    """
    try:
        beginning = (VENV / "bin" / "pip").read_text(errors="replace")[:1000]
    except OSError:
        return False
    return str(VENV) not in beginning


def require_venv_module() -> None:
    """Debian and Ubuntu ship Python without the parts that make environments."""
    import importlib.util

    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    raise SetupError(
        f"this Python ({sys.executable}) cannot make virtual environments: its module ensurepip is missing.\n"
        f"On Debian and Ubuntu: sudo apt install {package}, then run make again.\n"
        "Or name another Python: make setup PYTHON=/path/to/python3."
    )


def create_environment() -> None:
    """Run `python -m venv`, clearing what is there."""
    interpreter = str(getattr(sys, "_base_executable", "") or sys.executable)
    answer = subprocess.run(
        [interpreter, "-m", "venv", "--clear", str(VENV)],
        capture_output=True,
        text=True,
        env=clean_environ(),
        check=False,
    )
    if answer.returncode != 0:
        said = last_lines(answer.stdout + answer.stderr)
        raise SetupError(f"the environment {VENV} could not be made.\n{advice(said)}\n{said}")


def venv_python() -> Path:
    """The interpreter of the environment."""
    return VENV / "bin" / "python"


# torch


def torch_choice(value: str) -> str:
    """Check the variable TORCH."""
    if value not in FLAVOURS:
        raise SetupError(f"TORCH={value} is not known; it may be {', '.join(FLAVOURS)}.")
    return value


def choose_flavour(wanted: str, release: str) -> str:
    """`cpu` or `cuda`; `auto` keeps what is installed, then looks for a GPU."""
    if wanted != "auto":
        return wanted
    torch = installed_torch()
    if torch and is_release(torch, release):
        return torch.flavour
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Whether the driver's own tool finds a GPU."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and b"GPU" in answer.stdout


def install_torch(release: str, flavour: str, wanted: str) -> None:
    """Bring the pinned release in the chosen build, unless it is there."""
    torch = installed_torch()
    if torch and is_release(torch, release) and torch.flavour == flavour:
        return
    require_space(NEEDED_GB[flavour])
    if torch:
        pip("uninstall", "-y", "torch")
    try_in_turn(torch_attempts(release, flavour, wanted, platform.system()))
    torch = installed_torch()
    if flavour == "cuda" and (torch is None or torch.flavour != "cuda"):
        raise SetupError(
            f"TORCH=cuda was asked for, but pip's sources gave torch {torch.version if torch else '?'},"
            " a build without CUDA.\nName an index that has it (PIP_INDEX_URL=https://pypi.org/simple),"
            " or take the CPU build: TORCH=cpu."
        )


def torch_attempts(release: str, flavour: str, wanted: str, system: str) -> list[Attempt]:
    """Where to look for torch.

    `==2.13.0` also matches `2.13.0+cpu`, which pip prefers; `===` matches the plain release only, which on PyPI is the
    CUDA build for Linux. `--no-deps`, because torch's small dependencies come later, pinned. Builds that are not on PyPI have no hash
    in constraints.txt: they are as good as the index that they come from.
    """
    if flavour == "cuda":
        pinned = ("-c", str(CONSTRAINTS))
        return [Attempt((*pinned, f"torch==={release}")), Attempt((f"torch=={release}",))]
    plain = f"torch=={release}"
    if system != "Linux":
        return [Attempt(("--no-deps", plain))]
    cpu_build = ("--no-deps", *QUICK, f"{plain}+cpu")
    pytorch_index = ("--index-url", PYTORCH_CPU_INDEX, *cpu_build)
    if wanted == "cpu":
        return [Attempt(cpu_build), Attempt(pytorch_index, remedy=f"{NO_CPU_BUILD}\n{TAKE_CUDA}")]
    last_resort = Attempt(("--no-deps", plain), notice=f"{NO_CPU_BUILD}\n{TAKING_CUDA}")
    return [Attempt(cpu_build), Attempt(pytorch_index), last_resort]


NO_CPU_BUILD = (
    f"pip's index has no CPU build of torch, and {PYTORCH_CPU_INDEX} does not answer.\n"
    "To have it, put the wheel torch-*+cpu-*.whl into a folder and set PIP_FIND_LINKS=folder."
)
TAKE_CUDA = "TORCH=auto takes the default build instead: on Linux the one for CUDA, about 3 GB, which runs on a CPU too."
TAKING_CUDA = (
    "Taking the default build: on Linux the one for CUDA, about 3 GB, which runs on a CPU too ..."
)


def try_in_turn(attempts: Sequence[Attempt]) -> None:
    """Raise the last failure when none succeeds.

    The first attempt asks pip's own index. Where that does not answer, nothing else could be installed either.
    """
    for number, attempt in enumerate(attempts, start=1):
        if attempt.notice:
            print(f"\n{attempt.notice}", end="", flush=True)
        try:
            return install(*attempt.pip_arguments)
        except SetupError as error:
            if number == 1 and isinstance(error, NoIndexError):
                raise
            if number == len(attempts):
                raise (SetupError(attempt.remedy) if attempt.remedy else error) from None
    return None


def installed_torch() -> Torch | None:
    """What `.venv` holds, read from torch's version file: importing torch takes seconds."""
    for record in VENV.glob("lib/python3*/site-packages/torch-*.dist-info/RECORD"):
        source = record.parent.parent / "torch" / "version.py"
        if not source.is_file():
            continue
        text = source.read_text()
        version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
        cuda = re.search(r"^cuda: .*= '", text, re.MULTILINE)
        if version:
            return Torch(version.group(1), "cuda" if cuda else "cpu")
    return None


def is_release(torch: Torch, release: str) -> bool:
    """Whether it is the pinned release, in whatever build."""
    return torch.version.split("+")[0] == release


def require_space(gigabytes: int) -> None:
    """Say it before the download, not after."""
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < gigabytes:
        raise SetupError(
            f"{free:.1f} GB are free in {ROOT}; about {gigabytes} GB are needed for the environment.\n"
            "Free some space, or move the folder to a larger disk, then run make again."
        )


# pip, and what it says when it fails


def install(*arguments: str) -> None:
    """Install without byte code: `compile_ahead` makes it for the few modules that are used, in a fifth of the time."""
    pip("install", "--no-compile", *arguments)


def install_pinned(*arguments: str) -> None:
    """Install the releases of constraints.txt, and none of their files with another hash than it says."""
    install("-c", str(CONSTRAINTS), "--build-constraint", str(CONSTRAINTS), *arguments)


IMPORTED = "import transformers.models.llama.modeling_llama, peft, numba, groupwise.training.assembly.workers"


def compile_ahead() -> None:
    """Import what every run imports, so that Python keeps its byte code, and have the doctor sample and learn with a toy model, so that the
    kernels for this processor are compiled and kept.

    Byte code also where PYTHONDONTWRITEBYTECODE is set, as in many containers: every start would compile it again, for five seconds.
    """
    environ = clean_environ()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for arguments in (["-c", IMPORTED], ["-m", "groupwise", "doctor"]):
        subprocess.run(
            [str(venv_python()), *arguments],
            capture_output=True,
            env=environ,
            cwd=ROOT,
            check=False,  # what does not work is told by the first command that needs it
        )


def pip(*arguments: str) -> None:
    """Run pip quietly; its words go to the log, and are shown when it fails."""
    command = [str(venv_python()), "-m", "pip", "--no-input", *arguments]
    with LOG.open("a+") as log:
        log.write(f"\n$ pip {' '.join(arguments)}\n")
        log.flush()
        start = log.seek(0, os.SEEK_END)
        code = wait(
            subprocess.Popen(command, stdout=log, stderr=log, env=clean_environ(), cwd=ROOT)
        )
        log.seek(start)
        said = log.read()
    if code != 0:
        fail(arguments, said)


def wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; in a terminal show that time passes."""
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                print(".", end="", flush=True)
        except KeyboardInterrupt:
            process.wait()
            raise


def fail(arguments: Sequence[str], said: str) -> NoReturn:
    """Raise what to do about it, and what pip said."""
    shown = " ".join(arguments)
    kind = NoIndexError if UNREACHABLE.search(said) else SetupError
    raise kind(f"{advice(said)}\n\n$ pip {shown}\n{last_lines(said)}\n\nAll of it: {LOG}")


UNREACHABLE = re.compile(
    "Connection refused|NewConnectionError|Failed to establish|name resolution|Name or service not known"
    "|nodename nor servname|Max retries exceeded|ConnectTimeout|ReadTimeout|Read timed out|ProxyError"
    "|Network is unreachable|Could not fetch URL|connection broken"
)

ADVICE = (
    (
        re.compile("DO NOT MATCH THE HASHES"),
        "a file is not the one that constraints.txt names: it was changed on its way, or the index serves a build of its own.\n"
        "Compare the hashes below with those that https://pypi.org shows for this release; nothing of it was installed.",
    ),
    (
        re.compile("No space left on device|Errno 28"),
        "the disk is full. Free some space (pip also unpacks into TMPDIR, now {tmp}), then run make again.",
    ),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED|SSLError"),
        "the package index's certificate is not trusted. Behind a company's proxy, name its authority:\n"
        "PIP_CERT=/path/to/ca.pem.",
    ),
    (
        UNREACHABLE,
        "no package index answers. The first set-up needs one: check the network, HTTPS_PROXY, or name a mirror with\n"
        "PIP_INDEX_URL=https://mirror/simple (or a folder of wheels with PIP_FIND_LINKS=folder).\n"
        "`pip config list` shows what pip uses.",
    ),
    (
        re.compile("No matching distribution|Could not find a version"),
        "the package index has no release that fits this Python ({python}) and system ({system}).\n"
        "Try another Python (make setup PYTHON=python3.12) or another index (PIP_INDEX_URL); `pip config list` shows"
        " what pip uses.",
    ),
    (
        re.compile("Permission denied|Errno 13"),
        "a file cannot be written. Is {venv} owned by another user? `make clean`, then run make again.",
    ),
)


def advice(said: str) -> str:
    """What to do about a failure of pip, from its own words."""
    for pattern, text in ADVICE:
        if pattern.search(said):
            return text.format(
                tmp=tempfile.gettempdir(),
                python=platform.python_version(),
                system=f"{platform.system()} {platform.machine()}",
                venv=VENV,
            )
    return "pip failed. `make clean` and another try from the start may help; its own words:"


NOISE = re.compile(
    r"^\s*$|^\[notice\]|^\s*WARNING: (Location|Running pip as the 'root'|Retrying \(Retry\(total=[1-9])"
)


def last_lines(said: str, count: int = 12) -> str:
    """The end of what pip said, without the lines that never matter."""
    lines = [line for line in said.splitlines() if not NOISE.search(line)]
    return "\n".join(f"    {line[:160]}" for line in lines[-count:])


PIP_SETTINGS = {
    "PIP_USER": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PYTHONUTF8": "1",
}


def clean_environ() -> dict[str, str]:
    """The environment for pip: nothing from another environment, no per-user installation."""
    foreign = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    foreign |= {"PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, **PIP_SETTINGS}


# The terminal


@contextlib.contextmanager
def step(number: int, title: str) -> Generator[None]:
    """One line: what is under way, then how long it took."""
    began = time.monotonic()
    print(f"[{number}/5] {title} ...", end="", flush=True)
    yield
    print(f" {time.monotonic() - began:.0f} s", flush=True)


@contextlib.contextmanager
def only_one_at_a_time() -> Generator[None]:
    """Two verbs started at once in one folder: the second waits and then finds the work done."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up in this folder ...", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
