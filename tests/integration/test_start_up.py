"""What happens between a command and its first sampled token, checked without a clock.

1. A command begins the processes of its ranks before anything else, and none for a dry run.
2. Until then nothing heavy has been imported.
3. Nor by a dry run, `check` or `init` of a model that can be counted by arithmetic: their processor time is what imports take.
4. Where ranks hold the model, the main process never imports torch, the models of transformers, or peft.
5. Nor does what trains and samples a native model on a CPU import anything but torch of these: the rest takes longer than its weights.
6. The second run of a model maps weights that the first one arranged, and is equal to it to the bit.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config

import groupwise
from groupwise.core.terminal.progress import Progress
from groupwise.engine.models import load
from groupwise.engine.models.native import weight_cache
from groupwise.engine.models.tiny import write_tiny_model
from groupwise.training.assembly import prepare
from groupwise.training.loops import start
from tests.chat import write_qwen_tokenizer
from tests.forked_zygote import fork_zygotes
from tests.integration.toy_run import TOY, config, what_must_be_equal
from tests.unit.engine.models.native.families import SMALL, made

BY_ARITHMETIC = (
    "torch",
    "peft",
    "datasets",
    "accelerate",
    "transformers",
    "mpmath",
    "rich.console",
)
BY_ARITHMETIC += ("groupwise.engine.backends.tunix.environment", "huggingface_hub", "httpx2")
BY_ARITHMETIC += ("groupwise.engine.sampler.servers.teacher", "groupwise.api.schemas.parts")
BY_ARITHMETIC += ("groupwise.training.callbacks.sinks", "groupwise.engine.models.hub_queue")
BY_ARITHMETIC += ("groupwise.engine.distributed.rpc", "groupwise.engine.models.hub_push")
BY_ARITHMETIC += ("groupwise.core.terminal.progress", "groupwise.training.assembly.start")
BY_ARITHMETIC += ("groupwise.api.client.errors", "groupwise.api.schemas.problems")
SFT = str(Path(__file__).with_name("sft_task.py"))
HEAVY = ("torch", "transformers", "peft", "numpy", "datasets")
OF_RANKS = (
    "torch", "transformers.modeling_utils", "transformers.models.llama", "peft", "accelerate",
)  # fmt: skip


class Begun(Exception):
    """Processes would have been started."""


@pytest.mark.parametrize("command", ["rl", "sft", "evaluate"])
def test_the_processes_of_ranks_are_begun_before_anything_else(command, tmp_path, monkeypatch):
    def begin(config):
        raise Begun

    monkeypatch.setattr(prepare, "expect_ranks", begin)
    settings = {"model": {"name": "./nowhere"}, "run": {"dir": str(tmp_path)}}
    with pytest.raises(Begun):
        getattr(groupwise, command)(settings, "no_such_task.py")
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_starts_no_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "expect_ranks", lambda config: pytest.fail("begun"))
    assert groupwise.rl(config(tmp_path), TOY, dry_run=True).exit_code == 0


@pytest.mark.parametrize("verb", ["rl", "sft", "eval"])
def test_a_command_begins_them_before_it_imports_what_reads_its_config(verb):
    code = f"""
import sys
from groupwise.cli.main import main
from groupwise.engine.distributed import prefork
prefork.available_cores = lambda: 2
prefork.NVIDIA = __import__("pathlib").Path("nowhere")
begun = []
prefork.start_zygote = lambda: begun.append("groupwise.training" in sys.modules)
for words in (["-c", "nowhere.yaml"], ["model.name=tiny"]):
    sys.argv[1:] = [{verb!r}, *words]
    code = main()
    print("begun", begun)
"""
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in shown.stdout.splitlines() if line.startswith("begun")]
    assert lines == ["begun [False]"] * 2, "tiny is computed in one process"


def test_heavy_packages_are_not_imported_to_validate_a_config():
    modules = "groupwise.training.loops.rl_start, groupwise.training.loops.sft_start, groupwise.training.evaluation.evaluate"
    code = (
        f"import sys, {modules}; from groupwise.training.config import load_config\n"
        "load_config({'model': {'name': 'x'}})\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_dry_runs_checks_and_init_import_neither_torch_nor_models(tmp_path):
    model = ["model.name=tiny", f"run.dir={tmp_path}", "training.max_steps=1"]
    given = [["check", "-t", TOY, *model], ["runs", "list", "--dir", str(tmp_path)]]
    tasks = {"rl": TOY, "sft": SFT, "eval": TOY}
    given += [[verb, "-t", task, "--dry-run", *model] for verb, task in tasks.items()]
    written = ["-m", "tiny", "--out", str(tmp_path / "toy.yaml"), "--no-measure"]
    given.append(["init", "-t", TOY, *written])
    code = f"""
import gc, sys
from groupwise.cli.main import main
for words in {given!r}:
    gc.set_threshold(700)
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
    heavy = {BY_ARITHMETIC!r} + ("groupwise.training.callbacks.base",) * (words[0] == "check")
    print("heavy", [m for m in heavy if m in sys.modules], gc.get_threshold()[0])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [line for line in shown.stdout.splitlines() if "heavy" in line]
    assert found == [f"heavy [] {often}" for often in (1_000_000, 700, *[1_000_000] * 4)]


def test_a_dry_run_builds_the_section_of_its_algorithm_alone_and_looks_for_no_plugins(tmp_path):
    words = ["rl", "-t", TOY, "--dry-run", "model.name=tiny", f"run.dir={tmp_path}"]
    code = f"""
from groupwise.cli.main import main
code = main({[*words, "training.max_steps=1", "algorithm.type=gspo"]!r})
from groupwise.training.config import algorithm_section
from pydantic.plugin import _loader
print("built", algorithm_section.cache_info().currsize, _loader._plugins, code)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "built 2 None 0", "the default's, and that of gspo"


@pytest.mark.parametrize(("words", "expected", "heavy"), [
    ("launch local --dry-run --script job.py", "0 1000000", (
        "asyncssh", "groupwise.jobs.launch.install_plan", "groupwise.runs.store", "httpx2", "ruamel", "sqlalchemy",
    )),
    ("fleet --help", "0 700", ("groupwise.jobs.fleet.settings", "groupwise.runs")),
    ("fleet list --fleet nowhere", "2 700", (
        "fastapi", "groupwise.jobs.fleet.local", "groupwise.runs", "httpx2", "sqlalchemy",
    )),
])  # fmt: skip
def test_a_plan_of_a_launch_and_a_fleet_that_is_not_there_take_little(
    words, expected, heavy, tmp_path
):
    (tmp_path / "job.py").touch()
    code = f"""
import gc, sys
from groupwise.cli.main import main
code = main({words.split()!r})
print("heavy", [m for m in {heavy!r} if m in sys.modules], code, gc.get_threshold()[0])
"""
    own = {name: str(tmp_path / "home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    command, environment = [sys.executable, "-c", code], {**os.environ, **own}
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines()[-1] == f"heavy [] {expected}", shown.stderr


def test_a_notice_is_shown_while_the_model_is_loaded_and_other_lines_of_the_log_are_not(capsys):
    log = logging.getLogger("groupwise")
    log.setLevel(logging.INFO)
    with Progress("run", 1) as progress, start._shown_warnings(progress):
        log.info("a line")
        log.info("kernels are compiled", extra={"notice": True})
        log.warning("a doubt")
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if line][1:] == ["kernels are compiled", "warning: a doubt"]


COMMIT = "a" * 40
OF_NATIVE_MODELS = (
    "transformers", "peft", "accelerate", "huggingface_hub", "torch._dynamo", "torch.distributed.tensor", "sympy",
)  # fmt: skip
"""What a native model needs nothing of, on a CPU."""


@pytest.mark.parametrize(
    ("verb", "model"), [("rl", "tiny"), ("evaluate", "tiny"), ("rl", "someone/qwen")]
)
def test_a_native_model_is_trained_and_sampled_without_libraries_of_models(verb, model, tmp_path):
    """Also one of the hub, here from its cache; for that one huggingface_hub is needed."""
    settings = config(tmp_path, max_steps=1)
    settings["run"] |= {"threads": 1, "processes": 1}
    settings["model"]["name"] = model
    cached = tmp_path / "hub/models--someone--qwen"
    if model != "tiny":
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text(COMMIT)
        made(Qwen2Config(**{**SMALL, "vocab_size": 272})).save_pretrained(
            cached / "snapshots" / COMMIT
        )
        write_qwen_tokenizer(cached / "snapshots" / COMMIT, "{{ messages[0].content }}")
    code = f"""
import sys, groupwise
groupwise.{verb}({settings!r}, {TOY!r})
print([module for module in {OF_NATIVE_MODELS!r} if module in sys.modules], "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    shown = subprocess.run(
        command, env={**os.environ, **hub}, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    needed = ["huggingface_hub"] if model != "tiny" else []
    assert shown.stdout.splitlines()[-1] == f"{needed} True"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_with_mapped_weights_equals_one_that_computes_them(processes, tmp_path, monkeypatch):
    fork_zygotes(monkeypatch)
    monkeypatch.setattr(weight_cache, "WORTH", 0)
    monkeypatch.setattr(weight_cache, "SPARE", 0)
    write_tiny_model(tmp_path / "model")

    def trained(name: str, processes: int) -> dict:
        settings = config(tmp_path / name, max_steps=2)
        settings["model"] = {"name": str(tmp_path / "model")}
        settings["run"] |= {"threads": processes, "processes": processes}
        assert groupwise.rl(settings, TOY).exit_code == 0
        return what_must_be_equal(tmp_path / name / "toy")

    monkeypatch.setenv(weight_cache.VARIABLE, "0")
    computed = trained("computed", processes)
    monkeypatch.setenv(weight_cache.VARIABLE, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained("writing", 1)  # which has written the files when its first step begins
    monkeypatch.setattr(load, "read_model_tensors", lambda folder: pytest.fail("files were read"))
    assert trained("mapped", processes) == computed


MAIN = f"""
import json, sys
import groupwise
for command, settings, task in json.loads(sys.argv[1]):
    getattr(groupwise, command)(settings, task)
    print(command, [module for module in {OF_RANKS!r} if module in sys.modules])
"""


@pytest.mark.soak(suite="engine")
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks need Linux")
def test_the_main_process_of_ranks_stays_light(tmp_path):
    """Whichever commands it runs: all of them, one after the other."""
    write_tiny_model(tmp_path / "model")
    settings = config(tmp_path, max_steps=1)
    settings["model"] = {"name": str(tmp_path / "model")}
    settings["run"] |= {"threads": 2, "processes": 2}
    supervised = {
        **settings,
        "training": {"max_steps": 1, "examples_per_step": 4},
        "eval": {"eval_steps": 1},
        "run": {**settings["run"], "name": "sft"},
    }
    del supervised["sampler"], supervised["rewards"]
    given = {"rl": (settings, TOY), "evaluate": (settings, TOY), "sft": (supervised, SFT)}
    commands = json.dumps([(verb, *words) for verb, words in given.items()])
    main = [sys.executable, "-c", MAIN, commands]
    shown = subprocess.run(main, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    found = [line for line in shown.stdout.splitlines() if line.endswith("]")]
    assert found[-3:] == [f"{verb} []" for verb in given]
