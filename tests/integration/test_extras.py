"""Each extra brings all that its commands import: other libraries count as not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_OTHERS = """
import importlib, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def bring(name, extras, found):
    "Adds what a distribution with these extras requires, directly or not."
    if (canonicalize_name(name), extras) in found:
        return found
    found.add((canonicalize_name(name), extras))
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:  # of another platform
        return found
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            bring(requirement.name, tuple(sorted(requirement.extras)), found)
    return found

extra, *modules = sys.argv[1:]
brought = {name for name, _ in bring("groupwise", (extra,), set())}
missing = {
    package for package, names in packages_distributions().items()
    if brought.isdisjoint(map(canonicalize_name, names)) and package not in ("packaging", "tests")
}

class Installed:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Installed, sys.meta_path)
for module in modules:
    importlib.import_module(module)
"""

MODULES = {
    "train": "groupwise.training.assembly.workers groupwise.training.assembly.services groupwise.training.loops.rl_start "
    "groupwise.training.loops.sft_start groupwise.training.evaluation.evaluate groupwise.training.init.init",
    "web": "groupwise.dashboard.serve groupwise.dashboard.app",
    "server": "groupwise.server.serve groupwise.server.openai.service",
    "fleet": "groupwise.jobs.fleet.up groupwise.jobs.fleet.api.app groupwise.jobs.fleet.local groupwise.jobs.fleet.doctor",
    "launch": "groupwise.jobs.launch.results groupwise.jobs.launch.bundle groupwise.jobs.clouds.machine",
    "tinker": "groupwise.engine.backends.tinker.service",
    "mcp": "groupwise.tasks.mcp_tools",
    "": "groupwise groupwise.cli.main groupwise.jobs.fleet.client",
}


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_is_enough_for_what_it_is_for(extra: str) -> None:
    words = (sys.executable, "-c", WITHOUT_OTHERS, extra, *MODULES[extra].split())
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
