"""The house rules that no other tool checks: dependencies, start-up time, what the files may say."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import closing
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from groupwise.jobs.fleet.local import LocalFleet
from groupwise.jobs.fleet.store.database import connect
from tests.fleet_api import commands_answered, place_in
from tests.unit.cli.conftest import fleet_with_a_machine

__all__ = ["fleet_with_a_machine"]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TENSOR_PACKAGES = {"models", "learner", "sampler", "backends/unsloth"}
UNPINNED = {"unsloth"}
"""It goes with older releases than those that are pinned; tests of the real one have an environment of their own."""
HEAVY = ["torch", "transformers", "peft", "datasets", "numpy", "pandas", "safetensors"]


def python(code: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def published_files() -> list[Path]:
    """What git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("this is not a checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


# Dependencies


def declared() -> list[str]:
    """All but extras that are made of other ones."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(one for extra in extras for one in extra)]
    return [one for one in asked if distribution(one) != project["name"]]


def distribution(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name
    return re.sub(r"[._-]+", "-", name.group()).lower()


def pins() -> set[str]:
    """Names in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {line.split("==")[0] for line in lines if not line.startswith("#")}


def test_the_base_install_is_five_small_libraries() -> None:
    names = {distribution(one) for one in PROJECT["project"]["dependencies"]}
    assert names == {"pydantic", "ruamel-yaml", "typer", "rich", "httpx2"}


def test_every_dependency_says_why_it_is_there_has_a_lower_bound_and_is_pinned() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    known = {*pins(), *UNPINNED}
    for requirement in declared():
        line = next(line for line in lines if line.strip().startswith(f'"{requirement}"'))
        assert re.search(r"#\s+\S.{10,}", line), f"{requirement} has no reason beside it"
        assert ">=" in requirement, requirement
        assert distribution(requirement) in known, f"{requirement}: run scripts/lock.py"


def test_constraints_hold_for_every_machine_and_say_the_hash_of_each_file() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    release = re.compile(r"[a-z0-9-]+==[\w.]+( ; [^-].*?)?( --hash=sha256:[0-9a-f]{64})+")
    assert [each for each in lines if each[0] != "#" and not release.fullmatch(each)] == []


EXTRAS = {
    "fleet": (("cli.fleet", "jobs.fleet"), ("core", "api", "cli", "jobs"), set[str]()),
    "launch": (
        ("cli.launch", "jobs.launch"),
        ("core", "api", "cli.parsing", "cli.launch", "jobs.launch", "jobs.hosts", "jobs.clouds"),
        {"modal"},
    ),
    "server": (("cli.serve", "server"), ("core", "api", "server"), {"tinker"}),
    "web": (("cli.web", "dashboard"), ("core", "dashboard"), set[str]()),
}
"""For each extra the modules that need it, where their imports are followed to, and extras that parts of these modules need besides."""


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_its_code_imports(extra: str) -> None:
    starts, followed, besides = EXTRAS[extra]
    paths = modules()
    reached = {module for module in paths if is_in(module, starts)}
    waiting = set(reached)
    while waiting:
        found = {name for module in waiting for name in imports_of(paths[module])}
        waiting = {name for name in found if name in paths and is_in(name, followed)} - reached
        reached |= waiting
    brought = {distribution(one) for one in brought_by({extra, *besides})}
    distributions = packages_distributions()
    missing = {
        f"{module} imports {name}"
        for module in reached
        for name in imports_of(paths[module])
        if (top := name.partition(".")[0]) not in {*sys.stdlib_module_names, "groupwise"}
        and not brought.intersection(map(distribution, distributions.get(top, [])))
    }
    assert missing == set()


def modules() -> dict[str, Path]:
    paths = (ROOT / "groupwise").rglob("*.py")
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


@cache
def imports_of(path: Path) -> set[str]:
    """Names that a module imports when it runs, in functions too."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    names = set[str]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            for block in ("body", "orelse", "handlers", "finalbody", "cases"):
                waiting += getattr(node, block, ())
    return names


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"groupwise.{package}.") for package in packages)


def brought_by(extras: set[str]) -> list[str]:
    """Requirements of an installation with these extras, those of extras in extras too, and `pydantic-core`, which is pydantic's half."""
    optional = PROJECT["project"]["optional-dependencies"]
    found = [*PROJECT["project"]["dependencies"], "pydantic-core"]
    for requirement in (one for extra in extras for one in optional[extra]):
        nested = re.fullmatch(r"groupwise\[(.+)\]", requirement)
        found += brought_by(set(nested[1].split(","))) if nested else [requirement]
    return found


# Start-up


HELP = "import sys; sys.argv = ['groupwise', '--help']; from groupwise.cli.main import main; main()"


def test_help_imports_nothing_heavy() -> None:
    scripts = [target.split(":") for target in PROJECT["project"]["scripts"].values()]
    loads = "; ".join(
        f"import {module}; assert callable({module}.{name})" for module, name in scripts
    )
    code = f"""
import sys
{loads}
try:
    {HELP}
except SystemExit as ended:
    assert not ended.code, ended.code
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).splitlines()[-1] == "heavy: []"


FLEET_COMMANDS = (
    "submit --help", "submit --gpus 0 --idempotency-key one -- true", "submit --gpus 0 --dry-run -- true", "list", "show {job}",
    "logs {job}", "hold {job}", "release {job}", "stop {job} --reason enough", "resume {job}", "status", "vm list", "vm show vm-1",
    "vm drain vm-1", "project list", "key list", "remove --older-than 1d --dry-run",
)  # fmt: skip
OF_THE_CONTROL_PLANE = ["sqlalchemy", "alembic", "asyncssh", "fastapi", "uvicorn", "nats"]


def test_commands_leave_the_database_and_ssh_to_the_fleet_that_runs(
    fleet_with_a_machine: Path, tmp_path: Path
) -> None:
    """These packages take more than a second to load; with them a command would take two."""
    folder = shutil.copytree(fleet_with_a_machine, tmp_path / "fleet")
    place = place_in(folder)
    with closing(connect(place.database_url)) as database, commands_answered(database, place):
        with LocalFleet(place, "user:ada") as fleet:
            request = {"arguments": ["true"], "resources": {"gpus": 0}, "hold": True}
            job = fleet.submit(request)["job_id"]
            assert fleet.show(job)["submitted_by"] == "user:ada"
        commands = [["fleet", *words.format(job=job).split()] for words in FLEET_COMMANDS]
        commands += [["launch", "list"], ["launch", "ssh", "--help"], ["runs", "--help"]]
        code = f"""
import os, sys
os.environ |= {{"GROUPWISE_FLEET": {str(folder)!r}, "HOME": {str(tmp_path)!r}}}
from groupwise.cli.main import main
failed = [words for words in {commands} if main(words)]
assert not failed, failed
print("heavy:", [name for name in {[*HEAVY, *OF_THE_CONTROL_PLANE]} if name in sys.modules])
"""
        assert python(code).splitlines()[-1] == "heavy: []"


STAGES = ("server", "fleet", "launch", "notebook", "tunix", "environments", "web")


@pytest.mark.parametrize("stage", STAGES)
def test_every_marked_test_is_in_the_paths_of_its_stage(stage: str) -> None:
    target = re.search(rf"^test-{stage}: .*\n(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    paths = [ROOT / path for path in re.findall(r"(?<=\s)tests/\S+", target[1])]
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(rf"\bmark\.{stage}\b", path.read_text())
    ]
    assert [path for path in marked if not {path, *path.parents} & {*paths}] == []


# Files


def test_every_module_is_in_a_package_whose_types_are_checked() -> None:
    checked = {ROOT / entry for entry in PROJECT["tool"]["pyright"]["strict"]}
    checked |= {ROOT / "groupwise" / "engine" / package for package in TENSOR_PACKAGES}
    modules = (ROOT / "groupwise").rglob("*.py")
    unchecked = {
        path
        for path in modules
        if path.name != "__init__.py" and not {path, *path.parents} & checked
    }
    assert unchecked == set(), "add them to tool.pyright.strict in pyproject.toml"


PUBLIC_NAMES = {
    "groupwise": (
        "AsyncTrainingClient Callback CallbackError CheckpointError Completion ConfigError EndpointError "
        "EnvironmentWorkerError EvalResult Example GenerateResult Group GroupwiseError ModelError NonFiniteError "
        "NothingScoredError OutOfMemoryError PolicyMismatchError ResumeMismatchError RewardPart RewardWorkerError "
        "RlResult Rollout RunError RunInUseError RunNotFoundError SandboxError Segment SftResult Step Store StoreError "
        "TaskError TextCalls Tools TrainingClient UsageError WorkerLostError __version__ check doctor evaluate generate "
        "get_reward_funcs reward rl sft"
    ).split(),
    "groupwise.api.client": ["AsyncTrainingClient", "TrainingClient", "rewards_for", "train"],
    "groupwise.tasks.data": ["ReplayBuffer"],
    "groupwise.notebook": (
        "Between ColabSession ColabTrainingConfig Connection Criterion Rubric RubricSet Search Session TrainerState "
        "TrainingConfig accelerator connect create_reward_functions evaluate export_checkpoint format_prompt "
        "load_rubrics prepare_colab_session prepare_datasets prepare_session quick_test register_dataset "
        "register_reward run_full_pipeline search train_grpo"
    ).split(),
    "groupwise.tasks.rewards": ["get_reward_funcs"],
}
"""The packages that have public names, and these names."""


def test_only_packages_with_public_names_have_code_in_their_init() -> None:
    init_files = (ROOT / "groupwise").rglob("__init__.py")
    used = [".".join(d.parent.relative_to(ROOT).parts) for d in init_files if d.read_text().strip()]
    assert sorted(used) == sorted(PUBLIC_NAMES)


def test_public_names_of_packages_are_lazy() -> None:
    code = f"""
import importlib, sys
for name in {[*PUBLIC_NAMES]}:
    package = importlib.import_module(name)
    own = [each for each in sys.modules if each.startswith(name + ".")]
    assert (package.__all__, own) == (dir(package), []), name
    print(name, *package.__all__)
heavy = {{each for each in {HEAVY} if each in sys.modules}}
assert not heavy, heavy
for name in {[*PUBLIC_NAMES]}:
    module = sys.modules[name]
    assert all(callable(getattr(module, each)) for each in module.__all__ if each != "__version__")
heavy = {{each for each in {HEAVY} if each in sys.modules}} - {{"safetensors"}}
assert not heavy, heavy
"""
    shown = {line.split()[0]: line.split()[1:] for line in python(code).splitlines()}
    assert shown == PUBLIC_NAMES


# Split, so that this file does not contain them.
FOLDERS = ["/" + "work/", "/tmp/" + "w/", "/" + "root/"]
PAGES = ["design" + ".md", "style" + ".md", "components" + ".md", "cpu-speed" + ".md"]
PAGES += ["training" + ".md"]
# A folder of such a name within another one is anybody's.
PRIVATE = re.compile(
    "|".join([rf"(?<![\w.-]){each}" for each in FOLDERS] + [*map(re.escape, PAGES)])
)


def test_no_file_speaks_of_the_place_where_it_was_written() -> None:
    found: list[str] = []
    for path in published_files():
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {each}" for each in PRIVATE.findall(text)]
    assert found == []
