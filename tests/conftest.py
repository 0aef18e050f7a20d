"""Settings for all tests: one thread per process, no downloads, fixed seeds; also the test stages and soak suites."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import rotation, tmpfs_session

# Before torch, tokenizers or huggingface_hub read them; subprocesses of tests inherit them.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}.items():
    os.environ.setdefault(name, value)

# Workers inherit the controller's.
IN_MEMORY = None if "PYTEST_DEBUG_TEMPROOT" in os.environ else tmpfs_session.session_folder()
if IN_MEMORY is not None:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(IN_MEMORY.path)

gc.disable()
"""Garbage collection is off until the tests are collected: imports leave a million objects, which every full collection would scan."""

if "torch" in sys.modules:  # a plugin imported it before the variables above were set
    sys.modules["torch"].set_num_threads(1)

SLOWEST_FILES = (
    "integration/launch/test_gang.py", "integration/launch/test_slurm_and_ray.py",
    "contract/test_cloud_contract.py", "integration/launch/test_aws.py",
    "integration/notebook/test_kernel.py", "integration/notebook/test_notebooks.py",
    "integration/fleet/test_submission_paths.py", "integration/fleet/test_named_faults.py",
    "integration/fleet/test_chaos.py", "integration/fleet/test_up.py",
    "integration/fleet/test_secrets.py", "integration/fleet/test_injection.py",
    "integration/fleet/test_claim_races.py", "integration/fleet/test_crash_points.py",
    "integration/fleet/test_ssh.py", "integration/server/test_remote_training_server.py",
    "integration/cookbook/test_loops.py", "integration/agents/test_clients.py", "integration/server/test_tinker.py",
    "integration/server/test_kills_of_server.py",
    "integration/server/test_through_http.py", "acceptance/test_docs.py",
    "integration/test_resume.py", "integration/test_ranks.py", "integration/test_samplers.py",
    "integration/test_fsdp.py", "integration/test_other_families.py", "integration/test_distillation.py",
    "unit/engine/models/native/test_triton_kernels.py", "contract/test_learner_contract.py", "unit/tasks/rewards/test_workers.py",
    "contract/test_builtin_tasks.py", "contract/test_sampler_contract.py",
    "unit/engine/distributed/test_multi_adapter.py", "acceptance/test_gap.py", "acceptance/test_learning.py",
    "unit/engine/sampler/native/test_engine.py", "integration/test_pushing.py",
    "unit/tasks/rewards/test_python_tests.py", "unit/engine/learner/test_torch_learner.py",
    "integration/test_generate.py", "integration/test_learners.py", "integration/test_replay.py", "integration/test_another_device.py",
    "unit/test_bootstrap.py", "unit/test_deployment.py", "unit/test_house.py",
)  # fmt: skip
"""xdist gives a whole file to one worker, so these start first and no worker finishes long after the others."""

FLEET_FOLDERS = ("integration/fleet/", "unit/jobs/fleet/", "unit/jobs/hosts/")
"""Their tests are the stage `make test-fleet`."""
FLEET_TIMEOUT_S = 300
"""Timeout of one fleet test: its servers run dozens of processes on two cores."""
LAUNCH_TIMEOUT_S = 540


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of `SLOWEST_FILES`; xdist would start with the files that have the most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_report_header() -> str:
    """The part of the long lists that this session tests."""
    return rotation.described()


def pytest_sessionfinish(exitstatus: int) -> None:
    """If tests failed, their files stay until the next session starts."""
    if IN_MEMORY is not None:
        IN_MEMORY.wanted = exitstatus != 0


def pytest_unconfigure() -> None:
    if IN_MEMORY is not None:
        IN_MEMORY.end()


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: a collection that scans them takes half a second, in forked children too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        10_000, 10, 10
    )  # as commands do; Python's 700 takes a twentieth of the tests' time
    gc.enable()


SUITES = (
    "agents", "attacks", "configs", "containers", "cookbook", "docs", "engine", "fleet", "kills", "launch", "learning", "mutations",
    "notebook", "server", "skyrl", "tasks", "training", "tunix", "unsloth", "versions", "vllm", "web",
)  # fmt: skip
"""The values of `make soak SUITE=…`; CONTRIBUTING.md says what each suite tests and how long it takes."""

OWN_STAGES = {
    **{name: name for name in ("server", "notebook", "tunix", "launch", "environments", "web")},
    "real_vllm": "vllm",
    "agents": "server",
    "cookbook": "server",
}
"""Folders of `integration`, and the markers of their tests."""
STAGES = frozenset({*OWN_STAGES.values(), "fleet"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first, keep the order of the others, and add the marks of the stages."""
    positions = {name: n for n, name in enumerate(SLOWEST_FILES)}
    root = Path(__file__).parent
    # Worked out once for each file: of 8,500 tests that would take seconds, in every worker.
    names = {path: path.relative_to(root).as_posix() for path in {item.path for item in items}}
    items.sort(key=lambda item: positions.get(names[item.path], len(SLOWEST_FILES)))
    for item in items:
        name = names[item.path]
        for marker in item.iter_markers("soak"):
            if marker.kwargs.get("suite") not in SUITES:
                raise pytest.UsageError(f"{item.nodeid}: soak(suite=…) takes one of {SUITES}")
        for folder, stage in OWN_STAGES.items():
            if name.startswith(f"integration/{folder}/"):
                item.add_marker(stage)
        if name.startswith(("integration/", "acceptance/")) and not any(
            map(item.get_closest_marker, STAGES)
        ):
            item.add_marker("runs")
        if name.startswith(FLEET_FOLDERS):
            item.add_marker("fleet")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(FLEET_TIMEOUT_S))
        if item.get_closest_marker("launch") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LAUNCH_TIMEOUT_S))
        check_timeout(item)


def check_timeout(item: pytest.Item) -> None:
    """Check that faulthandler's timeout in pyproject.toml is longer than the timeout of any test of CI."""
    marker = item.get_closest_marker("timeout")
    if marker and not any(map(item.get_closest_marker, ("soak", "gpu"))):
        longest = float(item.config.getini("faulthandler_timeout"))
        if not 0 < marker.args[0] < longest:
            raise pytest.UsageError(f"{item.nodeid}: a test of CI has a timeout below {longest} s")


hypothesis.settings.register_profile("groupwise", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("groupwise")


@pytest.fixture(autouse=True, scope="session")
def sigint_is_not_ignored() -> None:
    """A shell makes its background processes ignore SIGINT; tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def sigint_handler_is_restored() -> Iterator[None]:
    """A handler that a test leaves behind would take the signals of later tests, which then wait for ever."""
    before = signal.getsignal(signal.SIGINT)
    yield
    left = signal.getsignal(signal.SIGINT)
    if left is not before:
        signal.signal(signal.SIGINT, before)
        pytest.fail(
            f"the test left the handler {left!r} of SIGINT behind; before there was {before!r}"
        )
