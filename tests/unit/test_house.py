"""The house rules that no other tool checks: dependencies, start-up time, what the files may say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TENSOR_ROOMS = {"models", "learner", "sampler", "backends/unsloth"}
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
        pytest.skip("this is no checkout")
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


STAGES = ("server", "fleet", "launch", "notebook", "tunix", "web")


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


def test_every_module_is_in_a_room_whose_types_are_checked() -> None:
    checked = {ROOT / entry for entry in PROJECT["tool"]["pyright"]["strict"]}
    checked |= {ROOT / "groupwise" / "engine" / room for room in TENSOR_ROOMS}
    modules = (ROOT / "groupwise").rglob("*.py")
    unchecked = {
        path
        for path in modules
        if path.name != "__init__.py" and not {path, *path.parents} & checked
    }
    assert unchecked == set(), "add them to tool.pyright.strict in pyproject.toml"


DOORS = {
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
"""The rooms that have public names, and these."""


def test_only_packages_with_public_names_have_code_in_their_init() -> None:
    doors = (ROOT / "groupwise").rglob("__init__.py")
    used = [".".join(d.parent.relative_to(ROOT).parts) for d in doors if d.read_text().strip()]
    assert sorted(used) == sorted(DOORS)


def test_public_names_of_rooms_are_lazy() -> None:
    code = f"""
import importlib, sys
for name in {[*DOORS]}:
    room = importlib.import_module(name)
    own = [each for each in sys.modules if each.startswith(name + ".")]
    assert (room.__all__, own) == (dir(room), []), name
    print(name, *room.__all__)
heavy = {{each for each in {HEAVY} if each in sys.modules}}
assert not heavy, heavy
assert all(callable(getattr(sys.modules[name], each)) for name in {[*DOORS]} for each in sys.modules[name].__all__ if each != "__version__")
heavy = {{each for each in {HEAVY} if each in sys.modules}} - {{"safetensors"}}
assert not heavy, heavy
"""
    shown = {line.split()[0]: line.split()[1:] for line in python(code).splitlines()}
    assert shown == DOORS


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
