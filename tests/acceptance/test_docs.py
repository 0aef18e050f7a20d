"""What the documentation says is so: commands run, code runs, configs are valid, names exist.

    1. Every line of a ```console or ```bash block is a command. Those of groupwise run, the others (make, pip, activate) are
       looked up. Output stands in ```text blocks. A page is followed as a whole; a commit follows some pages, the next commit others
       (tests/rotation.py), and `make soak SUITE=docs` all.
    2. Every ```python block runs. Every ```yaml block is a config or a part of one.
    3. Links lead somewhere; files, options, config keys, metrics and Python names in `code` exist.
    4. The index lists every page, or the index of a folder that it lists does.
    5. Configs as shipped are valid, and the command in their first line runs: with the page on which it stands, or else by itself.
    6. `groupwise serve` begins a real server, beside which the commands after it run. Pages about the server (SERVED) are followed
       from top to bottom: a ```yaml block whose first line is `# NAME.yaml` is that file, a ```bash block is one script, and what
       asks http://127.0.0.1:8000 asks the server. Their tables are what the code says.
    7. Pages about the fleet (FLEET) are followed likewise, beside the fleet that they begin (`tests/fleet_pages.py`).

Commands run as they stand, in a folder of their own that holds the configs of the repository with the tiny model in them and
two steps, and a run `quickstart` of 40 steps, of which the pages speak. The commands of a page run in their order; each block
finds that run as the quickstart left it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import typer
from ruamel.yaml import YAML

import groupwise
from groupwise.api.http.prometheus import RequestMetrics
from groupwise.api.http.route import Route
from groupwise.api.schemas.parts import AnyVerb
from groupwise.api.schemas.problems import KINDS
from groupwise.api.schemas.training import EventKind, StartRequest, StatusAnswer
from groupwise.cli.main import app, main
from groupwise.cli.train_grpo import app as train_grpo_app
from groupwise.cli.train_grpo import main as train_grpo
from groupwise.core.errors import GroupwiseError
from groupwise.engine.models.bundled import ALIASES
from groupwise.jobs.fleet import webhooks
from groupwise.jobs.fleet.api.app import ROUTES as FLEET_ROUTES
from groupwise.jobs.fleet.api.routes import state as fleet_state
from groupwise.jobs.fleet.operations import status as fleet_status
from groupwise.jobs.fleet.queue.failures import BUDGETS, CHARGED_RETRIES, FREE_RETRIES
from groupwise.jobs.fleet.settings import FleetSettings
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import events as fleet_events
from groupwise.jobs.hosts.keys import parse_host_key
from groupwise.jobs.launch import preflight
from groupwise.jobs.launch.preflight import DryRunReport
from groupwise.notebook import TrainingConfig
from groupwise.runs.folder import RunFolder
from groupwise.runs.store import Store
from groupwise.server.routes.health import render
from groupwise.server.routes.parts import parts_routes
from groupwise.server.serve import ROUTES, read_start
from groupwise.server.settings import ServerConfig, read_settings
from groupwise.tasks.external.kinds import split_spec
from groupwise.training import sft_config
from groupwise.training.config import documentation, load_config
from groupwise.training.loops.metrics import TOKEN_MEANS
from groupwise.training.sft_config import load_sft_config
from groupwise.training.suites.lighteval import PROGRAM_VARIABLE
from tests import fleet_pages, ray_cluster, slurm, ssh_hosts
from tests.fake_openai_server import Service, serve, tiny
from tests.fleet_pages import FleetDocRunner
from tests.integration.server.server_process import Server
from tests.rotation import described, rotating_params

ROOT = Path(__file__).resolve().parents[2]
TASK = "examples/01_first_task/task.py"
LIGHTEVAL = ROOT / "tests/fake_lighteval.py"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
GUIDES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", ROOT / "CHANGELOG.md"]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])
SUPERVISED = ("sft.md", "configuration-sft.md")
"""Pages whose configs are of `groupwise sft`."""
SERVED = (
    *("serve.md", "deploy-server.md", "openai-clients.md", "agents.md"),
    *("train-elsewhere.md", "server-api.md"),
)
"""Pages that are followed from top to bottom, beside the server that they begin."""
FLEET = ("fleet.md", "fleet-machines.md", "fleet-api.md", "fleet-operations.md")
"""Pages that are followed from top to bottom, beside the fleet that they begin."""
LAUNCHED = ("launch.md", "scaling.md")
"""Pages whose commands place jobs, some of them over SSH."""
OF_ENVIRONMENTS = ("fruits",)
"""Runs with an environment of another library, which `make test-environments` trains."""
OF_VLLM = {
    "--enable-return-routed-experts",
    *("--api-key", "--enable-lora", "--logprobs-mode", "--max-lora-rank", "--max-model-len"),
    *("--served-model-name", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "--model"),
    "--mem-fraction-static",
}
"""Options of `vllm serve`, and of SGLang's server, that its page speaks of."""
RUN_ELSEWHERE = ("tinker.md",)
"""Whose programs `tests/integration/server/test_tinker.py` runs, each in a process of its own: their client leaves threads behind."""
SERVER = "http://127.0.0.1:8000"
"""Where a server of the documentation is; that of a test is elsewhere."""
STEPS = 2
SMALL = {
    "training.max_steps": STEPS, "training.prompts_per_step": 2, "training.num_generations": 4,
    "eval.max_prompts": 4, "run.threads": 1, "algorithm.beta": 0.01,
}  # fmt: skip
"""With beta a step computes something even where all rewards are the same, as those of the tiny model mostly are."""
MAX_TOKENS = 8
"""Tokens of a completion, where a config has more: the tiny model mostly goes on to the end."""
IN_PROCESS = ("configs/quickstart.yaml", "my.yaml")
"""Of which most pages speak: their rewards are scored by worker processes where the quickstart's own commands run, and elsewhere here."""
ROWS = 32
"""For training, of a task that comes with the package: each is written, asked for and masked before a run begins."""
SMALL_SFT = {
    "training.max_steps": STEPS, "training.examples_per_step": 2, "eval.max_examples": 4, "run.threads": 1,
}  # fmt: skip


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    kinds = "|".join(languages)
    return re.findall(rf"^```(?:{kinds})\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    """The text of the page with this file name."""
    [path] = [path for path in PAGES if path.name == page]
    return path.read_text()


def spans(page: Path) -> list[str]:
    """What stands in `code` on a page, blocks left out."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def commands(page: Path) -> list[list[list[str]]]:
    """The commands of each block, as words. Cached: collection alone asks a thousand times."""
    joined = [block.replace("\\\n", " ") for block in blocks(page, "console", "bash")]
    return [[shlex.split(line, comments=True) for line in block.splitlines()] for block in joined]


def first_line_command(config: Path) -> list[str]:
    return shlex.split(config.read_text().splitlines()[0].removeprefix("# "))


def is_supervised(config: Path) -> bool:
    """Whether it is a config of `groupwise sft`."""
    return first_line_command(config)[:2] == ["groupwise", "sft"]


# The folder in which commands run


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository after a quickstart with a tiny model."""
    place = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "examples", place / "examples")
    for config in CONFIGS:
        made_small(config, place / name(config))
    made_small(ROOT / "configs/quickstart.yaml", place / "my.yaml")
    (place / "path/to").mkdir(parents=True)
    rows = re.findall(r'^{"question.*$', (ROOT / "docs/how-to/sft.md").read_text(), re.MULTILINE)
    (place / "questions.jsonl").write_text("\n".join(rows) + "\n")
    shutil.copy(ROOT / "examples/01_first_task/task.py", place / "path/to/task.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        quickstart = ["--config", "configs/quickstart.yaml", "--task-module", TASK]
        assert main(["rl", *quickstart, "training.max_steps=40"]) == 0
    return place


def made_small(config: Path, target: Path) -> None:
    yaml = YAML()
    content = yaml.load(config)
    content["model"] = {"name": "tiny"}
    if target.stem != config.stem:
        del content["run"]["name"]
    for key, value in (SMALL_SFT if is_supervised(config) else SMALL).items():
        section, leaf = key.split(".")
        content.setdefault(section, {})[leaf] = value
    if isinstance(warm_up := content.get("warm_up"), dict):
        warm_up["training"].update(max_steps=STEPS, examples_per_step=2)
        warm_up["eval"].update(max_examples=4, completions={"max_prompts": 2, "num_generations": 2})
    if target.as_posix().endswith(IN_PROCESS):
        content.setdefault("rewards", {})["in_process"] = True
    sampler = content.get("sampler", {})
    if "max_completion_length" in sampler:
        sampler["max_completion_length"] = min(MAX_TOKENS, sampler["max_completion_length"])
    if first_line_command(config)[-1].isidentifier():
        content.setdefault("task", {})["train_size"] = ROWS
    target.parent.mkdir(parents=True, exist_ok=True)
    yaml.dump(content, target)


@pytest.fixture
def place(after_quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "place"
    shutil.copytree(after_quickstart, copy)
    monkeypatch.chdir(copy)
    return copy


class Beside:
    """The server that commands run beside: the one that was begun last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._server: Server | None = None

    def begin(self, words: list[str]) -> None:
        """`groupwise serve` with these words, at a port that is free."""
        self.end()
        given = dict(zip(words[::2], words[1::2], strict=True))
        folder = Path(given.pop("--output-dir")).resolve()
        given.pop("--port", None)
        server = Server(folder, *[word for option in given.items() for word in option])
        self._patch.setenv("GROUPWISE_URL", server.begin())
        self._server = server

    def end(self) -> None:
        """Cleanly, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            assert server.end() == 0, server.log.read_text()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    found = Beside(monkeypatch)
    yield found
    found.kill()


Run = Callable[[list[str]], None]
SHORT_PROGRAMS = {"tool_agent.py": ("--model", "tiny", "--steps", "1")}
"""Options with which programs that take minutes take seconds."""


@pytest.fixture
def run(
    place: Path,
    beside: Beside,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    tried = once_each(preflight.try_command)

    def run_one(words: list[str]) -> None:
        if serves(words):
            beside.begin(words[2:])
            return
        programs = {"groupwise web": look_at, "torchrun --nnodes": started_by_torchrun}
        if (start := " ".join(words[:2])) in programs:
            programs[start](words)
            return
        if words[0] == "python" and words[1:3] != ["-m", "zipfile"]:
            short = SHORT_PROGRAMS.get(Path(words[1]).name, ())
            command = [sys.executable, *words[1:], *short]
            subprocess.run(command, check=True, stdout=subprocess.PIPE)
            return
        if words[0] == "groupwise-train-grpo":
            adapted = with_the_tiny_model([*words[1:], f"--max_steps={STEPS}"])
            assert train_grpo(adapted) == 0, shlex.join(words)
            return
        if words[:2] == ["groupwise", "launch"]:
            monkeypatch.setenv("HOME", str(place / "home"))
            monkeypatch.setattr(preflight, "try_command", tried)
            assert launched(words[1:]) == 0, f"{shlex.join(words)}\n{capfd.readouterr().err}"
            return
        here = os.environ.get("GROUPWISE_URL", SERVER)
        words = [word.replace(SERVER, here) for word in words]
        if words[0] != "groupwise":
            assert known(words), (
                f"unknown `{shlex.join(words)}`: fix the page, or add it to known()"
            )
            return
        adapted = within_seconds(words[1:])
        if words[1] == "generate":
            code = main_beside_a_service(adapted)
        elif "--endpoint" in words:
            code = suites_beside_a_service(adapted)
        else:
            code = main(adapted)
        assert code == 0, f"{shlex.join(words)}\nrun as {adapted}\n{capfd.readouterr().err}"

    return run_one


def started_by_torchrun(words: list[str]) -> None:
    """A dry run of the command, on one machine in place of several, by two processes."""
    there = words.index("groupwise")
    assert "--dry-run" in words
    adapted = with_learners(within_seconds(words[there + 1 :]), 2)
    alone = ["--standalone", "--nproc-per-node", "2", "-m", "groupwise"]
    command = [sys.executable, "-m", "torch.distributed.run", *alone, *adapted]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stderr}"
    assert re.search(r"^  learners +2$", ended.stdout, re.MULTILINE)


def look_at(words: list[str]) -> None:
    """Begin a dashboard, ask it for its first page, and end it."""
    command = [sys.executable, "-m", "groupwise", "web", "--port", "0", *words[2:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as dashboard:
        assert dashboard.stderr is not None
        said = dashboard.stderr.readline()
        try:
            [address] = re.findall(r"http://127\.0\.0\.1:\d+", said)
            with urllib.request.urlopen(f"{address}/runs?format=json") as page:
                assert "runs" in json.load(page)
        finally:
            dashboard.send_signal(signal.SIGINT)
        assert dashboard.wait(30) == 0, said


def within_seconds(words: list[str]) -> list[str]:
    """The command with the tiny model and two steps instead of those that it asks for."""
    if words[0] == "fetch-model":
        assert words[1] in ALIASES
        return ["fetch-model", "tiny"]
    if words[0] == "fetch-tunix":  # gigabytes from the network; `make test-tunix` does it
        return [*words, "--help"]
    if words[0] == "--install-completion":  # writes into the home folder
        return ["--help"]
    if words[0] == "environments" or any(map(split_spec, words)) or words[-1] in OF_ENVIRONMENTS:
        return [words[0], *(words[1:2] if words[0] == "environments" else ()), "--help"]  # likewise
    if words[0] == "init":
        return with_the_tiny_model(words)
    if "--resume" in words:
        leave_unfinished(Path("runs/quickstart"))
    begun = words[words.index("--resume-from") + 1] if "--resume-from" in words else "quickstart@0"
    steps = (40 if "--resume" in words else int(begun.partition("@")[2])) + STEPS
    replaced = [
        re.sub(r"^model\.name=(?!runs/).*", "model.name=tiny", word)
        for word in words
        if not word.startswith("training.max_steps=")
    ]
    if words[0] not in ("rl", "sft"):
        return replaced
    several = [each[1] for word in words if (each := re.fullmatch(r"distributed\.\w+=(\d+)", word))]
    threads = [f"run.threads={sum(map(int, several))}"] if several else []
    return [*replaced, *threads, f"training.max_steps={steps}"]


def launched(words: list[str]) -> int:
    """The exit code of `groupwise launch`, its command within seconds too; a machine is one of the tests, with a GPU that stands in."""
    there = words.index("--") + 1 if "--" in words else len(words)
    own, behind = words[:there], words[there:]
    adapted = within_seconds(behind) if behind else []
    if words[1] in ("slurm", "ray"):
        give = given_to_slurm if words[1] == "slurm" else given_to_ray
        return give(*on_a_small_cluster(own, adapted))
    if words[1] != "ssh":
        return main([*own, *adapted])
    places = [at for at, word in enumerate(own) if word == "--host"]
    with ssh_hosts.loopback_hosts(len(places)) as machines:
        rows = [machine.vm_row() for machine in machines]
        for machine, at, row in zip(machines, places, rows, strict=True):
            machine.gpus(1)
            own[at + 1] = f"{row['user']}@{row['ip_address']}:{row['port']}"
        if len(machines) > 1:
            known_there(rows)
            trust = ["--dry-run"]  # tests/integration/launch/test_gang.py has them run
        else:
            trust = ["--trust", parse_host_key(rows[0]["host_key"]).fingerprint]
        way = ["--key", rows[0]["ssh_key_path"], "--python", sys.executable]
        return main([*own[:2], *way, *trust, *own[2:], *adapted])


def once_each(try_command: Callable[..., DryRunReport]) -> Callable[..., DryRunReport]:
    """Trying a command, which takes seconds; what was tried for one place is not tried for the next one."""
    found: dict[tuple[object, ...], DryRunReport] = {}

    def tried(words: Sequence[str], project: Path, environment: Mapping[str, str]) -> DryRunReport:
        asked = (*words, project, *sorted(environment.items()))
        if asked not in found:
            found[asked] = try_command(words, project, environment)
        return found[asked]

    return tried


def known_there(rows: list[dict[str, Any]]) -> None:
    """Their keys, as somebody has them who has been there."""
    known = Path.home() / ".ssh" / "known_hosts"
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(
        "".join(f"[{row['ip_address']}]:{row['port']} {row['host_key']}\n" for row in rows)
    )


def on_a_small_cluster(own: list[str], behind: list[str]) -> tuple[list[str], list[str]]:
    """The command for machines with two GPUs each, as those of the tests, if it asks for more."""
    place = own.index("--gpus") + 1
    if int(own[place]) <= 2:
        return own, behind
    learners = 2 * int(own[own.index("--machines") + 1])
    return [*own[:place], "2", *own[place + 1 :]], with_learners(behind, learners)


def with_learners(words: list[str], count: int) -> list[str]:
    """The command with so many learners of one thread each."""
    keys = re.compile(r"^(distributed\.learners|run\.threads)=.*")
    return [keys.sub(rf"\1={count}", word) for word in words]


def given_to_slurm(own: list[str], behind: list[str]) -> int:
    """The same as if it were typed on the login node, of a cluster of the tests."""
    place = own.index("--host")
    with slurm.cluster() as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.configuration))
        several = ["--dry-run"] if "--machines" in own and "--dry-run" not in own else []
        return main([*own[:place], *several, *own[place + 2 :], *behind])


def given_to_ray(own: list[str], behind: list[str]) -> int:
    """The same as if it were typed on the head of a Ray of the tests."""
    place = own.index("--host")
    cluster = ray_cluster.shared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        patch.setenv("RAY_AUTH_TOKEN", cluster.token)
        # tests/integration/launch/test_slurm_and_ray.py has them run
        asks = [] if "--dry-run" in own else ["--dry-run"]
        return main([*own[:place], *asks, *own[place + 2 :], *behind])


def with_the_tiny_model(words: list[str]) -> list[str]:
    place = words.index("--model") + 1
    return [*words[:place], "tiny", *words[place + 1 :]]


def main_beside_a_service(words: list[str]) -> int:
    """The exit code of a command that asks a service: one with the tiny model, for a few tokens, that is there while it runs."""
    place = words.index("--model") + 1
    with serve(Service(tiny())) as service:
        asked = [*words[:place], "tiny", *words[place + 1 :], "--base-url", service.url]
        return main([*asked, "--max-new-tokens", "8", "--keep-truncated"])


def suites_beside_a_service(words: list[str]) -> int:
    """Likewise of suites, run by the program that stands in for lighteval."""
    url, model = (words.index(option) + 1 for option in ("--endpoint", "--endpoint-model"))
    with (
        pytest.MonkeyPatch.context() as patch,
        serve(Service(tiny(), models=(words[model],))) as service,
    ):
        patch.setenv(PROGRAM_VARIABLE, shlex.join([sys.executable, str(LIGHTEVAL)]))
        asked = [*words[:url], service.url, *words[url + 1 :]]
        return main([*asked, "--max-new-tokens", "8"])


def leave_unfinished(path: Path) -> None:
    with RunFolder.open(path) as folder:
        folder.finish("interrupted")


def known(words: list[str]) -> bool:
    """Whether a command of another program is one that this repository has or needs."""
    match words:
        case ["make", *rest]:
            verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            given = [word for word in rest if "=" not in word]
            return bool(given) and set(given) <= set(verbs) and variables_known(rest)
        case [".", ".venv/bin/activate"] | ["python3", "-m", "venv", ".venv"] | ["export", _]:
            return True
        case ["curl", *_, url, "-o", _] if url.startswith("$TINKER_BASE_URL"):
            route = url.removeprefix("$TINKER_BASE_URL/api/v1").partition("?")[0]
            return f'"{route}"' in (ROOT / "groupwise/server/tinker/routes.py").read_text()
        case ["python", "-m", "zipfile", "-e", *_]:
            return True
        case ["docker" | "sudo" | "systemctl" | "journalctl", *rest]:
            return all((ROOT / word).exists() for word in rest if word.startswith("deploy/"))
        case ["pip", "install", "torch", "--index-url", index]:
            return f'"{index}"' in (ROOT / "scripts/bootstrap.py").read_text()
        case ["jupyter", "lab", "--notebook-dir", ".", notebook]:
            return (ROOT / notebook).is_file()
        case ["pip", "install", target] | ["pip", "install", target, "jupyterlab", "ipywidgets"]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            wanted = re.fullmatch(r"\.\[([\w,]+)\]", target)
            return wanted is not None and set(wanted[1].split(",")) <= set(
                project["optional-dependencies"]
            )
        case _:
            return False


def variables_known(words: list[str]) -> bool:
    read = (ROOT / "Makefile").read_text() + (ROOT / "scripts/bootstrap.py").read_text()
    script = (ROOT / "examples/quickstart.py").read_text()
    for variable, _, value in (word.partition("=") for word in words if "=" in word):
        if variable not in read or (value.startswith("--") and f'"{value}"' not in script):
            return False
    return True


# Commands and code


ALONE = [page for page in PAGES if page.name not in (*SERVED, *FLEET)]
PARTS = 16
"""A commit follows one page in so many."""


def serves(words: list[str]) -> bool:
    """Whether a command begins the training server."""
    return words[:2] == ["groupwise", "serve"] and "--new-key" not in words


def begins_a_server(page: Path) -> bool:
    return any(serves(words) for block in commands(page) for words in block)


@pytest.fixture(autouse=True)
def shown_where_a_test_fails() -> None:
    print(described())


def some(pages: Sequence[Path], *marks: Any) -> list[Any]:
    return rotating_params(pages, PARTS, "docs", name, marks)


OF_SERVERS = [page for page in ALONE if begins_a_server(page) and page.name not in LAUNCHED]
OF_JOBS = [page for page in ALONE if page.name in LAUNCHED]
WITH_COMMANDS = [p for p in ALONE if commands(p) and p not in (*OF_SERVERS, *OF_JOBS)]
SLOW = pytest.mark.timeout(300)
"""Engines begin, models learn, jobs run one after the other. The first test that runs commands makes the quickstart, too, and compiles
kernels if no earlier run saved them: 105 s on two cores."""
SOAK = (SLOW, pytest.mark.soak(suite="docs"))
"""Jobs of a page run on every kind of place, which takes a minute and a half."""


@pytest.mark.parametrize(
    "page",
    [
        *some(WITH_COMMANDS, SLOW),
        *some(OF_SERVERS, SLOW, pytest.mark.server),
        *(pytest.param(page, id=f"all: {name(page)}", marks=SOAK) for page in OF_JOBS),
    ],
)
def test_commands_run(page: Path, after_quickstart: Path, run: Run) -> None:
    for block in commands(page):
        shutil.rmtree("runs/quickstart")
        shutil.copytree(after_quickstart / "runs/quickstart", "runs/quickstart")
        for words in block:
            run(words)


def runs_with_its_page(config: Path) -> bool:
    """Whether the command in its first line stands on a page, too, whose commands are run."""
    return any(
        first_line_command(config) in block
        for page in (*WITH_COMMANDS, *OF_JOBS)
        for block in commands(page)
    )


OF_NO_PAGE = [config for config in CONFIGS if not runs_with_its_page(config)]


@pytest.mark.parametrize("config", some(OF_NO_PAGE, SLOW))
def test_configs_of_no_page_run_by_their_first_line(config: Path, run: Run) -> None:
    run(first_line_command(config))


@pytest.mark.soak(suite="docs")
def test_commands_that_the_quickstart_prints_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "examples/quickstart.py"
    small = ["model.name=tiny", "run.threads=1", "algorithm.beta=0.01"]
    monkeypatch.setattr("sys.argv", [str(script), "--short", *small])
    assert runpy.run_path(str(script))["main"]() == 0
    printed = capfd.readouterr().out.partition("Next:\n")[2].strip().splitlines()
    assert len(printed) == 5
    for line in printed:
        run(shlex.split(line, comments=True))


WITH_PYTHON = [page for page in ALONE if blocks(page, "python") and page.name not in RUN_ELSEWHERE]
OF_NOTEBOOKS = [page for page in WITH_PYTHON if page.name == "notebooks.md"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft 0.21, TRL 1.16
@pytest.mark.parametrize(
    "page",
    [
        *some([page for page in WITH_PYTHON if page not in OF_NOTEBOOKS], SLOW),
        *some(OF_NOTEBOOKS, SLOW, pytest.mark.notebook),
    ],
)
def test_python_runs(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.notebook.core.SMALL", "tiny")
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        if "import verifiers" not in block:  # tests/integration/environments/test_verifiers.py
            exec(compile(block, name(page), "exec"), names)


FOR_CLIENTS = re.compile(r"^from (agents|langchain\w*)\b", re.MULTILINE)
"""In a block for packages that are in an environment of their own: `scripts/real_environment.py agents`."""


def run_with_clients(block: str) -> None:
    """A block in that environment; nothing, where it has not been made."""
    environments = runpy.run_path(str(ROOT / "scripts/real_environment.py"))
    python: Path = environments["where"]("agents") / "bin/python"
    if python.exists():
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [str(python), "-c", block], env=variables, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        assert ended.stdout.strip() == "trained"


@pytest.mark.parametrize(
    "page", some([p for p in PAGES if p.name in SERVED], pytest.mark.server, SLOW)
)
def test_a_page_of_the_server_can_be_followed(
    page: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [program for program in ("curl", "jq") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"this machine has no {' and no '.join(missing)}, which the page's scripts use")
    names: dict[str, Any] = {}
    for kind, block in typed_blocks(page):
        if kind == "yaml":
            keep_yaml(block)
        elif kind == "python" and FOR_CLIENTS.search(block):
            run_with_clients(block)
        elif kind == "python":
            exec(compile(block, name(page), "exec"), names)
        elif kind == "bash":
            run_script(block)
        elif kind == "console":
            for line in block.replace("\\\n", " ").splitlines():
                follow(line, run, monkeypatch)


@pytest.mark.parametrize(
    "page", some([p for p in PAGES if p.name in FLEET], pytest.mark.fleet, SLOW)
)
def test_a_page_of_the_fleet_can_be_followed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples/10_fleet", tmp_path / "examples/10_fleet")
    monkeypatch.chdir(tmp_path)
    with FleetDocRunner(tmp_path, monkeypatch, capfd) as runner:
        for kind, block in typed_blocks(page):
            if kind == "yaml":
                runner.writes(block.splitlines()[0].removeprefix("# "), block)
            elif kind == "sql":
                runner.asks_the_database(block)
            elif kind == "python":
                exec(compile(block.replace(fleet_pages.API, runner.api), name(page), "exec"), {})
            elif kind == "console":
                for line in block.replace("\\\n", " ").splitlines():
                    follow_fleet(line, runner)
        if page.name == "fleet.md":
            found = runner.variables_of_a_job()
            assert {"GROUPWISE_ATTEMPT", "ATTEMPT", "PATH"} <= found
            assert found <= set(first_cells(page.name, "| variable | holds |"))


def follow_fleet(line: str, runner: FleetDocRunner) -> None:
    """One command of a page of the fleet."""
    match shlex.split(line, comments=True):
        case ["groupwise", "fleet", *words]:
            runner.types(words)
        case ["nats", "pub", subject, payload]:
            runner.publishes(subject, payload)
        case ["curl", *_]:
            run_script(line.replace(fleet_pages.API, runner.api))
        case words:
            assert known(words), f"what is `{line}`? Say it here, if it is meant"


def typed_blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def follow(line: str, run: Run, patch: pytest.MonkeyPatch) -> None:
    """One command of a page of the server."""
    words = shlex.split(line, comments=True)
    if words[0] == "export":
        variable, _, _ = words[1].partition("=")
        value = run_script(f'{line}\nprintf %s "${variable}"').strip()
        patch.setenv(variable, os.environ["GROUPWISE_URL"] if value == SERVER else value)
    elif words[0] == "curl":
        run_script(line)
    else:
        run(words)


def run_script(script: str) -> str:
    """What a script prints that asks the server."""
    here = script.replace(SERVER, os.environ.get("GROUPWISE_URL", SERVER))
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{script}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended.stdout


def keep_yaml(block: str) -> None:
    """The file that a block is, checked by what reads it."""
    file = Path(block.splitlines()[0].removeprefix("# "))
    file.write_text(block)
    if file.name == "serve.yaml":
        read_settings(file, {}, {"output_dir": "served"}, ())
    elif file.name == "alarms.yaml":
        [group] = YAML(typ="safe").load(block)["groups"]
        asked = re.findall(r"\bgroupwise_\w+", " ".join(rule["expr"] for rule in group["rules"]))
        assert set(asked) <= server_metrics()
    else:
        read_start(file)


# What stands on the pages, all pages at once


def found_wrong(pages: Sequence[Path], wrong: Callable[[Path], Iterator[str]]) -> list[str]:
    return [f"{name(page)}: {fault}" for page in pages for fault in wrong(page)]


def test_blocks_are_of_a_kind_that_is_checked_and_yaml_is_a_config() -> None:
    kinds = {"console", "bash", "python", "yaml", "sql", "text"}

    def wrong(page: Path) -> Iterator[str]:
        yield from set(re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]) - kinds
        for block in blocks(page, "yaml") if page in ALONE else ():
            taught = page.name in SUPERVISED and not block.startswith("warm_up:")
            load = load_sft_config if taught else load_config
            try:
                load({"model": {"name": "tiny"}, **YAML(typ="safe").load(block)})
            except GroupwiseError as error:
                yield f"{block}: {error}"

    assert found_wrong(PAGES, wrong) == []


def test_only_the_warning_pays_for_an_answer_anywhere_in_the_text() -> None:
    def lenient(source: str) -> bool:
        return any(
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.In)
            and re.search("answer|gold|city|right", ast.unparse(node.left))
            and re.search("text|completion|chat|content|reply", ast.unparse(node.comparators[0]))
            for node in ast.walk(ast.parse(source))
        )

    pages = [name(page) for page in PAGES for block in blocks(page, "python") if lenient(block)]
    examples = [file for file in (ROOT / "examples").rglob("*.py") if lenient(file.read_text())]
    assert (pages, examples) == (["docs/how-to/rewards.md"], [])


def test_configs_are_valid_as_shipped_and_begin_with_the_command_that_runs_them() -> None:
    def wrong(config: Path) -> Iterator[str]:
        words = first_line_command(config)
        if (
            words[:2] not in (["groupwise", "rl"], ["groupwise", "sft"])
            or name(config) not in words
        ):
            yield shlex.join(words)
        load = load_sft_config if is_supervised(config) else load_config
        if load(config).config.model.name not in ALIASES:
            yield "its model is not an alias"

    assert CONFIGS
    assert found_wrong(CONFIGS, wrong) == []


@pytest.mark.parametrize("style", ["string", "chat"])
def test_tasks_in_the_plain_hook_style_train(style: str, place: Path) -> None:
    enough = ["training.prompts_per_step=8", "training.num_generations=8"]  # for some signal
    command = ["rl", "--config", "my.yaml", "run.name=plain", *enough]
    assert main([*command, "--task-module", f"examples/02_plain_hooks/task_{style}.py"]) == 0
    with Store.open(place / "runs/plain/run.db", readonly=True) as store:
        outcomes = {one.outcome for group in store.groups(0) for one in group.rollouts}
        assert [step.version_out for step in store.steps()] == [1, 2]
        recorded = {*store.metric_names(), *TOKEN_MEANS.values()}
    assert outcomes == {"scored"}
    general = {re.sub(r"^rewards/\w+/", "rewards/NAME/", metric) for metric in recorded}
    general |= {f"{metric.partition('/')[0]}/…" for metric in recorded}
    assert set(first_cells("look-at-rollouts.md", "| metric | meaning |")) <= general


# Names


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    def wrong(page: Path) -> Iterator[str]:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            file, _, anchor = target.partition("#")
            found = (page.parent / file).resolve() if file else page
            if not target.startswith(("http://", "https://")) and not (
                found.exists() and (not anchor or anchor in anchors(found))
            ):
                yield target

    assert found_wrong(GUIDES, wrong) == []


FOLDERS = "groupwise|docs|tests|configs|examples|scripts|benchmarks|deploy"


@cache
def options(*, hidden: bool = True) -> frozenset[str]:
    """Every option of every command."""
    found = {"--help", "--version"}
    for typed in (app, train_grpo_app):
        for command in all_commands(typer.main.get_command(typed)):
            for parameter in command.params:
                if hidden or not getattr(parameter, "hidden", False):
                    found.update((*parameter.opts, *parameter.secondary_opts))
            for parameter in getattr(command, "alias_params", ()) if hidden else ():
                found.update(parameter.opts)
    return frozenset(found)


def all_commands(command: Any) -> Iterator[Any]:
    """It, and all below it."""
    yield command
    for inner in inner_commands(command).values():
        yield from all_commands(inner)


def inner_commands(command: Any) -> dict[str, Any]:
    """Those of a group; some groups load theirs when they are asked for them."""
    if not hasattr(command, "list_commands"):
        return {}
    context = typer.Context(command)
    return {verb: command.get_command(context, verb) for verb in command.list_commands(context)}


@cache
def whole_command() -> Any:
    return typer.main.get_command(app)


def is_a_command(words: list[str]) -> bool:
    """Down through the groups, to a command that takes the other words."""
    command = whole_command()
    for word in words:
        known_here = inner_commands(command)
        if word.startswith("-") or not known_here:
            return True
        if word not in known_here:
            return False
        command = known_here[word]
    return True


@cache
def config_keys() -> frozenset[str]:
    tables = "\n".join([*documentation().values(), *sft_config.documentation().values()])
    return frozenset(re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE))


def is_a_python_name(dotted: str) -> bool:
    module, _, attribute = dotted.rpartition(".")
    try:
        import_module(dotted)
    except ModuleNotFoundError:
        return hasattr(import_module(module), attribute)
    return True


def test_files_options_commands_keys_and_names_in_the_text_exist() -> None:
    sections = "|".join({key.partition(".")[0] for key in config_keys()} - {"task"})
    files = re.compile(rf"(?:{FOLDERS})/[\w./-]*")
    keys = re.compile(rf"(?<![\w./])((?:{sections})\.[a-z_]+)(?=[:=]|$)")

    def wrong(page: Path) -> Iterator[str]:
        allowed = options() | (OF_VLLM if page.name == "vllm.md" else set())
        for span in spans(page):
            words = span.split()
            used = {*re.findall(r"(?<!\S)--[a-z_-]+", span)}
            named = {*keys.findall(span)} - {"config.json", "run.db"}
            if not (
                (not files.fullmatch(span) or (ROOT / span).exists())
                and used <= allowed
                and (words[:1] != ["groupwise"] or is_a_command(words[1:]))
                and (words[:1] != ["make"] or len(words) == 1 or known(words[:2]))
                and named <= config_keys()
                and (not re.fullmatch(r"groupwise(\.\w+)+", span) or is_a_python_name(span))
            ):
                yield span

    assert found_wrong(PAGES, wrong) == []


# Tables of the server and of the fleet, made of what the code says

FLEET_CODES = frozenset(
    "unknown_job unknown_vm unknown_gpu unknown_project unknown_key vm_exists vm_state vm_in_use job_state host_key_mismatch "
    "database_away file_busy".split()
)
"""Problems that only the fleet's API has."""


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.count("|") - 1
    lines = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * columns, *lines])


def routes_table(routes: Sequence[Route] = ROUTES) -> str:
    rows: list[tuple[str, ...]] = []
    for route in routes:
        does = " ".join(str(route.handler.__doc__).split())
        rows.append((f"`{route.name}`", route.role.word if route.role else "", does))
    return table("| route | role | does |", rows)


def calls_table() -> str:
    """What parts can be called for."""
    kinds = get_args(get_args(AnyVerb)[0])
    rows: list[tuple[str, ...]] = []
    for kind in kinds:
        verb, *fields = kind.model_fields
        rows.append(
            (
                f"`{kind.model_fields[verb].default}`",
                ", ".join(f"`{field}`" for field in fields),
                " ".join(str(kind.__doc__).split()),
            )
        )
    return table("| verb | with | does |", rows)


def fields_table(model: Any, head: str) -> str:
    rows: list[tuple[str, ...]] = []
    for key, field in model.model_fields.items():
        shown = "" if field.is_required() else f"`{shown_default(field.default)}`"
        rows.append((f"`{key}`", shown, str(field.description)))
    return table(head, rows)


def notebook_table() -> str:
    """What `TrainingConfig.fields()` shows."""
    shown = TrainingConfig.fields()
    rows = [(f"`{field}`", f"`{default}`", meaning) for field, default, meaning in shown.rows]
    return table(f"| {' | '.join(shown.header)} |", rows)


def shown_default(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, cast('tuple[Any, ...]', value)))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def problems_table(*, of_the_fleet: bool = False) -> str:
    rows = [
        (f"`{code}`", str(kind.status), "yes" if kind.retry else "", kind.meaning)
        for code, kind in sorted(KINDS.items(), key=lambda item: (item[1].status, item[0]))
        if (code in FLEET_CODES) == of_the_fleet
    ]
    return table("| code | status | again? | what has happened, and what to do |", rows)


def server_metrics() -> set[str]:
    """All that GET /metrics has."""
    full = StatusAnswer.model_validate(
        {
            "phase": "running", "model_version": ("run", 1), "step": 1, "max_steps": 2, "throughput": {"seconds_per_step": 1.0},
            "memory": {"engine_bytes": 1},
        }
    )  # fmt: skip
    return set(re.findall(r"^# TYPE (\w+)", render(RequestMetrics(), full), re.MULTILINE))


TABLES: list[tuple[str, Callable[[], str]]] = [
    ("server-api.md", routes_table),
    ("serve.md", lambda: fields_table(StartRequest, "| setting | default | meaning |")),
    ("server-api.md", problems_table),
    ("server-api.md", lambda: routes_table(parts_routes(cast("Any", None)))),
    ("server-api.md", calls_table),
    ("deploy-server.md", lambda: fields_table(ServerConfig, "| key | default | meaning |")),
    # who may train at a server may act in a fleet: it is one role
    ("fleet-api.md", lambda: routes_table(FLEET_ROUTES).replace("| train |", "| act |")),
    ("fleet-api.md", lambda: problems_table(of_the_fleet=True)),
    ("notebooks.md", notebook_table),
    ("scaling.md", lambda: import_module("benchmarks.many_gpus").table()),
    (
        "fleet-operations.md",
        lambda: fields_table(FleetSettings, "| setting | default | meaning |"),
    ),
]


def test_tables_are_up_to_date() -> None:
    old = [
        f"{page}, make it again:\n{made()}" for page, made in TABLES if made() not in text_of(page)
    ]
    assert old == []


def test_public_names_are_explained_by_their_docstrings() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text_of("python.md"), re.MULTILINE)
    docs = {name: getattr(groupwise, name).__doc__ for name in groupwise.__all__ if name[0] != "_"}
    firsts = {name: " ".join(doc.partition("\n\n")[0].split()) for name, doc in docs.items()}
    assert dict(rows) == firsts


def first_cells(page: str, head: str) -> list[str]:
    """What stands in `code` in the first column of the table with this head."""
    _, found, rest = text_of(page).partition(f"\n{head}\n")
    assert found, head
    cells = [line.split("|")[1] for line in rest.partition("\n\n")[0].splitlines()[1:]]
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def test_events_and_metrics_of_the_server_are_explained() -> None:
    assert set(EventKind) <= set(spans(ROOT / "docs/operate/serve.md"))
    page = text_of("deploy-server.md")
    explained = page.partition("| metric | meaning |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", explained)) >= server_metrics()


def test_states_alarms_events_and_metrics_of_the_fleet_are_explained() -> None:
    alarms = re.findall(r'_alarm\(\s*"(\w+)"', Path(fleet_status.__file__).read_text())
    events = {
        value
        for module in (fleet_events, webhooks)
        for key, value in vars(module).items()
        if key.isupper() and isinstance(value, str) and re.fullmatch(r"[a-z]+\.[a-z_]+", value)
    }
    full: dict[str, Any] = {
        "jobs": {"queued": 1}, "machines": {"total": 1, "ready": 1, "gpus": 1, "gpus_available": 1}, "oldest_waiting_seconds": 1.0,
        "alarms": [{"kind": "leaking"}], "processes": [{"role": "poller", "owner": "o", "silent_seconds": 1.0, "alive": True}],
    }  # fmt: skip
    lines = (*fleet_state.render(full), *RequestMetrics().lines())
    metrics = {word for line in lines for word in re.findall(r"^# TYPE (\w+)", line)}
    assert (len(alarms) >= 8, len(events) > 30) == (True, True)
    assert first_cells("fleet.md", "| status | means | what follows |") == list(JobStatus)
    operations = "fleet-operations.md"
    assert sorted(first_cells(operations, "| kind | says | do |")) == sorted(set(alarms))
    assert sorted(first_cells(operations, "| events | when |")) == sorted(events)
    assert set(first_cells(operations, "| metric | meaning |")) == metrics


def test_the_first_page_of_the_fleet_needs_twelve_words() -> None:
    page = text_of("fleet.md")
    table = page.partition("| word | means |\n|---|---|\n")[2].partition("\n\n")[0]
    assert 1 <= len(table.splitlines()) <= 12
    operators_words = r"\b(epochs?|incarnation|accused|leaking|leases?|quarantined?)\b"
    assert re.findall(operators_words, page) == []


def test_failures_and_their_retries_are_as_in_the_table() -> None:
    page = text_of("fleet-operations.md")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes)? ?\| (\w+) \|$", page, re.MULTILINE)
    expected: list[tuple[str, str, str]] = []
    for failure, budget in BUDGETS.items():
        otherwise = CHARGED_RETRIES if budget.charged else FREE_RETRIES
        retries = otherwise if budget.most is None else budget.most
        charged = "yes" if budget.charged else ""
        expected.append((str(failure), charged, str(retries or "none")))
    assert rows == expected


# The set as a whole


def test_the_index_lists_every_page_and_every_page_has_one_title() -> None:
    listed = {
        (index.parent / target.partition("#")[0]).resolve()
        for index in (ROOT / "docs").rglob("index.md")
        for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text())
    }
    assert set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/index.md"} <= listed
    for page in PAGES:
        assert page.read_text().startswith("# "), page
        assert sum(line.startswith("# ") for line in prose(page).splitlines()) == 1, page


def test_no_page_is_long() -> None:
    lines = {page: len(page.read_text().splitlines()) for page in PAGES}
    assert lines.pop(ROOT / "README.md") <= 120
    assert [page for page, count in lines.items() if count > 300] == []


def test_options_of_the_command_line_are_explained_somewhere() -> None:
    explained = "\n".join(page.read_text() for page in PAGES)
    unknown = {
        each for each in options(hidden=False) if each.startswith("--") and each not in explained
    }
    assert unknown == set()
