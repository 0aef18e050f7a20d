"""The part of `groupwise launch --dry-run` about the environment: interpreter, releases, their sizes, and the disk space on the machine.

The machine runs `builder.survey` itself, which reads the sizes of the files from its package index, in JSON (PEP 700). Sizes on disk are
those of the same releases here, or of the wheels that are sent.
"""

from __future__ import annotations

import asyncio
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from groupwise.core.terminal.quantities import byte_size, counted
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.fleet.machines import builder
from groupwise.jobs.fleet.machines.locks import name_of_wheel, normal
from groupwise.jobs.fleet.machines.plans import Plan

UNPACKED_RATIO = 2
"""Estimate of a release's bytes on disk for each byte of its file, if the same release is not installed here."""
MAX_NAMED = 3
BUILDER = Path(builder.__file__)
SURVEY_PROGRAM = (
    "import json, sys; room = {'__name__': 'builder'}; exec(sys.argv[1], room); "
    "print(json.dumps(room['survey'](room['Order'](json.loads(sys.argv[2])))))"
)
"""Runs the builder's text on the machine, where no file of it is yet."""


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """The environment to install, and what the machine reports about itself."""

    environment: Plan
    project_bytes: int
    survey: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `builder.survey` found out about the machine; empty if there is none yet."""

    @property
    def releases(self) -> dict[str, str]:
        """The releases that the lock pins, by name."""
        matches = (
            re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)", line)
            for line in self.environment.lock.lines
        )
        return {normal(match[1]): match[2] for match in matches if match}

    @property
    def wheels(self) -> dict[str, Path]:
        """The wheels that are sent, by file name."""
        sent = (*self.environment.wheels, *(self.environment.wheelhouse or ()))
        return {path.name: path for path in sent}

    @property
    def downloads(self) -> dict[str, int]:
        """Sizes in bytes of the files that the machine downloads or receives, by file name."""
        sent = {name: path.stat().st_size for name, path in self.wheels.items()}
        return {**self.survey.get("files", {}), **sent}

    @property
    def needed_bytes(self) -> int:
        """Estimate of the disk space that the job needs: the project in the store and in the working folder, the downloaded files, and
        what they unpack to."""
        wheels = self.wheels
        by_name = {
            name_of_wheel(Path(file)): file for file in self.downloads if file.endswith(".whl")
        }
        total = 2 * self.project_bytes + sum(self.downloads.values())
        for name in {*self.releases, *by_name}:
            file = by_name.get(name)
            if file in wheels:
                with zipfile.ZipFile(wheels[file]) as archive:
                    total += sum(entry.file_size for entry in archive.infolist())
                continue
            estimate = UNPACKED_RATIO * self.downloads[file] if file else 0
            total += max(estimate, _installed_bytes(name, self.releases.get(name, "")))
        return total

    def document(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {
            "releases": self.releases,
            "left_to_pip": list(self.environment.lock.left_to_pip),
            "downloads": self.downloads,
            "disk_needed": self.needed_bytes,
            "machine": dict(self.survey),
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Label and text of each line of the plan."""
        survey, downloads = self.survey, self.downloads
        if survey.get("made"):
            yield "installs", f"nothing: the environment is there already, in {survey['folder']}"
            return
        if "python" in survey:
            yield "interpreter", f"{survey['python']} ({survey['version']})"
        else:
            yield "interpreter", f"the first of {', '.join(self.environment.candidates)}"
        if survey.get("problem"):
            yield "problem", survey["problem"]
        largest = sorted(downloads, key=lambda name: -downloads[name])[:MAX_NAMED]
        listed = ", ".join(f"{name} {byte_size(downloads[name])}" for name in largest)
        count = len(self.releases) + len(self.environment.lock.left_to_pip)
        size = (
            f"{byte_size(sum(downloads.values()))} in {counted(len(downloads), 'file')} ({listed})"
        )
        if not downloads:
            reason = "the index does not say" if survey else "the machine does not exist yet"
            size = f"their sizes are unknown: {survey.get('unknown') or reason}"
        yield "installs", f"{count} releases in addition to groupwise; {size}"
        yield "torch", self._torch()
        disk = f"about {byte_size(self.needed_bytes)}"
        if "free" in survey:
            disk += f", of {byte_size(survey['free'])} free in {survey['folder']}"
            disk += ": TOO LITTLE" * (survey["free"] < self.needed_bytes)
        yield "disk", disk

    def _torch(self) -> str:
        """The build of torch."""
        file = next((name for name in self.downloads if name.startswith("torch-")), None)
        if file is None:
            release = self.releases.get("torch")
            return f"{release}, in the build that the machine's index has" if release else "none"
        if local := re.search(r"\+([A-Za-z0-9.]+)", file):
            return f"{file}: built for {local[1]}"
        nvidia_sizes = [size for name, size in self.downloads.items() if name.startswith("nvidia")]
        if not nvidia_sizes:
            return f"{file}: without CUDA's libraries"
        return f"{file}: with {counted(len(nvidia_sizes), 'package')} of NVIDIA, {byte_size(sum(nvidia_sizes))}"


async def install_plan(
    backend: object, environment: Plan, root: str, project_bytes: int
) -> InstallPlan:
    """Ask the machine, if there is one yet. Raises CloudError if it gives no answer."""
    plan = InstallPlan(environment, project_bytes)
    if not isinstance(backend, MachineBackend):
        return plan
    order = environment.order(f"{root}/environments") | {"releases": plan.releases}
    order["index_url"] = environment.environment.get("PIP_INDEX_URL", environment.index_url)
    text = await asyncio.to_thread(BUILDER.read_text, encoding="utf-8")
    result = await backend.run("python3", "-I", "-c", SURVEY_PROGRAM, text, json.dumps(order))
    last_line = (result.out.strip().splitlines() or [""])[-1]
    try:
        survey = json.loads(last_line)
    except ValueError:
        survey = {
            "unknown": (result.err.strip().splitlines() or ["the machine gave no answer"])[-1]
        }
    return replace(plan, survey=survey)


def _installed_bytes(name: str, release: str) -> int:
    """Size on disk of the same release here; 0 if it is not installed."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return 0
    if package.version.partition("+")[0] != release:
        return 0
    return sum(file.size or 0 for file in package.files or ())
