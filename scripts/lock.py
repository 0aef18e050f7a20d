"""Remake constraints.txt after a change of pyproject.toml: `.venv/bin/python scripts/lock.py`.

With `--upgrade` every release becomes the newest that the bounds allow; without it, those that still fit stay.

uv resolves pyproject.toml with all extras but those in APART, and what builds this package, for every platform and Python at once,
and writes the hash of every file that a release has. A second call adds what set-up installs without dependencies. torch stands at the
release that `tool.groupwise.bootstrap` names. CUDA's packages are in the file: a constraint has nothing installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"

HEADER = """\
# Made by `.venv/bin/python scripts/lock.py`: every release that the tests ran with, for all platforms, with the hashes of its files.
# Do not edit. pip refuses a file that has none of these hashes, and packages that are not here.
"""
APART = {"unsloth"}
"""Extras that go with older releases than the others."""
BUILDERS = ("pip>=26,<27", "editables>=0.5,<0.6", "setuptools", "wheel")
"""What set-up upgrades first, what hatchling wants for `pip install -e`, and what builds packages that come as source alone."""


def main() -> int:
    """Resolve, join lines, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest releases")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    project = tomllib.loads(PYPROJECT.read_text())
    pins = project["tool"]["groupwise"]["bootstrap"]
    extras = sorted(project["project"]["optional-dependencies"].keys() - APART)
    named = [word for extra in extras for word in ("--extra", extra)]
    torch = f"torch=={pins['torch']}\n"
    builders = "\n".join([*BUILDERS, *project["build-system"]["requires"]])
    lines = compiled([*upgrade, *named, str(PYPROJECT), "-"], builders, torch)
    alone = "\n".join([pins["bundled_model"], pins["loss_oracle"]])
    lines += compiled(["--no-deps", "-"], alone, torch)
    CONSTRAINTS.write_text(HEADER + "".join(f"{line}\n" for line in sorted(lines)))
    print(f"{CONSTRAINTS.name}: {len(lines)} releases")
    return 0


def compiled(arguments: list[str], requirements: str, constraint: str) -> list[str]:
    """What `uv pip compile` resolves, a line for each release. It keeps what constraints.txt has, unless told to upgrade."""
    with tempfile.TemporaryDirectory() as folder:
        pins, written = Path(folder, "pins.txt"), Path(folder, "constraints.txt")
        pins.write_text(constraint)
        written.write_text(CONSTRAINTS.read_text())
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        command += ["--python-version", "3.11", "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--no-config", "--constraint", str(pins)]
        command += ["--output-file", str(written), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, input=requirements, text=True)
        return written.read_text().replace(" \\\n    ", " ").splitlines()


if __name__ == "__main__":
    sys.exit(main())
