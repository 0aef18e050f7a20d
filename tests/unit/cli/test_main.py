"""The command line: parsing, exit codes, what goes to stdout and stderr. The commands themselves are replaced by fakes."""

import json
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupwise import __main__ as program
from groupwise.cli.main import documentation, main
from groupwise.cli.train_grpo import main as train_grpo
from groupwise.core.errors import ConfigError, NothingScoredError
from groupwise.engine.distributed import prefork
from groupwise.jobs.hosts.spec import ATTEMPT_VARIABLE
from groupwise.training.config import RunConfig


@dataclass
class Result:
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    exit_code: int = 0


@dataclass
class Verb:
    """Stands in for the function that a command calls."""

    result: Any = field(default_factory=Result)
    error: BaseException | None = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list[Any])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return self.result


def test_the_page_of_commands_is_up_to_date() -> None:
    for name, text in documentation().items():
        page = Path(__file__).parents[3] / "docs" / name
        assert page.read_text() == text, "`make fix` makes it again"


def replaced(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> Verb:
    verb, fake = Verb(), ModuleType(module)
    setattr(fake, name, verb)
    monkeypatch.setitem(sys.modules, module, fake)
    return verb


@pytest.fixture(autouse=True)
def no_early_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefork, "early_zygote", lambda overrides: nullcontext())


@pytest.fixture
def rl(monkeypatch: pytest.MonkeyPatch) -> Verb:
    return replaced(monkeypatch, "groupwise.training.loops.rl_start", "rl")


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Verb:
    verb = replaced(monkeypatch, "groupwise.training.evaluation.evaluate", "evaluate_policies")
    metrics = {"reward": 0.6015625, "completions/mean_length": 11.5}
    found = {"metrics": metrics, "intervals_95": {"reward": [0.51, 0.68]}, "results": "r.json"}
    verb.result = [Result({"policy": "base", **found})]
    return verb


# --- what is handed on


def test_rl_hands_everything_on(rl: Verb) -> None:
    """Words may stand before options, too."""
    words = ["training.max_steps=3", "lora=null", "task.x=-1"]
    code = main(["rl", "-c", "c.yaml", "--task-module", "t.py", *words, "--resume-from", "r@3"])
    assert code == 0
    others = {"resume": False, "resume_from": "r@3", "init_from": None, "dry_run": False}
    assert rl.calls == [((Path("c.yaml"), "t.py"), {"overrides": tuple(words), **others})]
    assert (
        main(["rl", "training.seed=1", "--config", "c", "run.name=x", "-t", "t", "--resume"]) == 0
    )
    assert rl.calls[1][1]["overrides"] == ("training.seed=1", "run.name=x")
    assert rl.calls[1][1]["resume"] is True


def test_eval_hands_everything_on(evaluate: Verb) -> None:
    """By default it is of the base."""
    options = "--policy r@5 --samples-per-prompt 4 --output o.json eval.temperature=1".split()
    assert main(["eval", "--config", "c.yaml", "-t", "sort_words", *options]) == 0
    named = {
        "overrides": ("eval.temperature=1",),
        "samples_per_prompt": 4,
        "output": Path("o.json"),
    }
    assert evaluate.calls == [((Path("c.yaml"), "sort_words", ["r@5"]), named)]
    assert main(["eval", "-c", "c", "-t", "t"]) == 0
    assert evaluate.calls[1][0][2] == ["base"]


def test_an_evaluation_shows_each_metric_with_its_interval(
    evaluate: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "-c", "c", "-t", "t"]) == 0
    assert capsys.readouterr().out.splitlines()[:6] == [
        "policy   base",
        "results  r.json",
        "",
        "metrics, with 95 % intervals",
        "  reward                   0.602 [0.510, 0.680]",
        "  completions/mean_length  11.5",
    ]


def test_an_evaluation_with_advice_shows_some_answers_and_where_all_are(
    evaluate: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {**evaluate.result[0].summary, "advice": [{"says": "None counts.", "do": "Warm up."}]}
    rows = [
        {"prompt": f"question {n}", "completion": f"answer {n}", "reward": 0.0} for n in range(9)
    ]
    evaluate.result = [SimpleNamespace(summary=summary, rows=rows, path=Path("r.json"))]
    assert main(["eval", "-c", "c", "-t", "t"]) == 0
    out = capsys.readouterr().out
    assert [n for n in range(9) if f"answer {n}" in out] == [0, 4, 8]
    assert "Warm up." in out
    assert "`rows` of r.json" in out


# --- results


@pytest.mark.parametrize("code", [0, 1, 130, 143])
def test_a_result_is_printed_for_people_and_its_exit_code_is_handed_on(
    rl: Verb, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    summary = {"run": "runs/x", "reward": {"before": 0.1234567891, "after": None}, "n": 3}
    rl.result = Result(summary, code)
    assert main(["rl", "-c", "c", "-t", "t"]) == code
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:4] == [
        "run            runs/x", "reward.before  0.123457", "reward.after   -", "n              3",
    ]  # fmt: skip
    assert shown.err == ""


def test_a_result_and_a_plan_are_one_json_object_on_request(
    rl: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    rl.result = Result({"path": Path("x"), "reward": float("nan"), "words": ["é", (1.5,)]})
    for options in (["--json"], ["--json", "--dry-run"]):
        assert main(["rl", "-c", "c", "-t", "t", *options]) == 0
        out = capsys.readouterr().out
        assert json.loads(out) == {"path": "x", "reward": None, "words": ["é", [1.5]]}
        assert "é" in out
        assert rl.calls[-1][1]["dry_run"] is ("--dry-run" in options)


def test_a_plan_reads_as_numbers_settings_and_texts(
    rl: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.model_validate({"model": {"name": "tiny"}, "training": {"max_steps": 3}})
    plan = {
        "steps": 3,
        "memory_mib": {"total": 9, "teacher": 0, "parts": {"a": 1}},
        "warnings": ["a line"],
        "rows_left_out": {},
        "first_prompt": "<user>\x1b[31m\nWhat?",
    }
    stage = {"config": config.model_dump(mode="json"), "plan": plan}
    rl.result = Result({**stage, "warm_up": {"plan": {"steps": 4}}})
    start = ["--init-from", "a run@3"]
    assert main(["rl", "-c", "c", "-t", "t", "--dry-run", "training.max_steps=3", *start]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps  3",
        "",
        "configuration, without defaults (all: --json)",
        '  model.name          "tiny"',
        "  training.max_steps  3",
        '  algorithm.type      "dr_grpo"',
        "",
        "memory_mib",
        "  total    9",
        "  parts.a  1",
        "",
        "warnings",
        "  a line",
        "",
        "first_prompt",
        "  │ <user>␛[31m",
        "  │ What?",
        "",
        "━━ the warm-up ━━",
        "",
        "steps  4",
        "",
        "next",
        "  groupwise rl -c c -t t --init-from 'a run@3' training.max_steps=3",
        "    the training",
    ]


@pytest.mark.parametrize(("function", "words"), [
    ("training.evaluation.evaluate.plan_policies", "groupwise eval -c c.yaml -t t.py --output 'my file.json' eval.temperature=1"),
    ("training.evaluation.suite_evaluation.plan", "groupwise eval --suite math_500 --endpoint http://127.0.0.1:1/v1 --endpoint-model m"),
    ("training.generation.generate.generate", "groupwise generate --dataset d.jsonl --prompt-template 'Solve: {q}' --output answers"),
    ("jobs.launch.train_grpo.train_grpo", "groupwise-train-grpo --model tiny --dataset d.jsonl --reward_function correctness"),
])  # fmt: skip
def test_a_dry_run_names_the_command_that_does_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str, words: str
) -> None:  # fmt: skip
    """As it was typed, wherever `--dry-run` stood in it."""
    planned = {"plan": {"prompts": 3}}
    found = planned if "plan" in function else Result(planned)
    monkeypatch.setattr(f"groupwise.{function}", Verb(found))
    program, *typed = shlex.split(words)
    before = () if program.endswith("grpo") else (typed.pop(0),)
    run = train_grpo if program.endswith("grpo") else main
    for line in ([*typed, "--dry_run"], ["--dry_run", *typed]):
        assert run([*before, *line]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[:3] == ["prompts  3", "", "next"]
        assert shown[3] == f"  {words}"
    assert run([*before, *typed, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == planned
    monkeypatch.setenv(ATTEMPT_VARIABLE, "job.1")
    assert run([*before, *typed, "--dry_run"]) == 0
    assert capsys.readouterr().out.splitlines() == ["prompts  3"], (
        "no command works outside its job"
    )


# --- failures


def test_a_failure_is_a_message_without_traceback(
    rl: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    rl.error = ConfigError("c.yaml:1: a\nc.yaml:2: b")
    assert main(["rl", "-c", "c", "-t", "t"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "groupwise:\nc.yaml:1: a\nc.yaml:2: b\n")
    rl.error = NothingScoredError("three steps without a score")
    assert main(["rl", "-c", "c", "-t", "t", "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "groupwise: three steps without a score\n"
    told = {"code": "nothing_scored", "message": "three steps without a score"}
    assert json.loads(shown.out) == {"error": told}


def test_a_bug_shows_its_traceback_and_lack_of_memory_does_not(
    rl: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    for error, code, said in (
        (ZeroDivisionError("by zero"), "bug", "ZeroDivisionError: by zero"),
        (ValueError("\x1b]0;a\ud800"), "bug", "ValueError: ␛]0;a<U+D800>\ngroupwise"),
        (RuntimeError(memory), "out_of_memory", "training.max_tokens_per_microbatch"),
    ):
        rl.error = error
        assert main(["rl", "-c", "c", "-t", "t", "--json"]) == 1
        shown = capsys.readouterr()
        assert ("Traceback" in shown.err) is (code == "bug")
        assert said in shown.err
        assert json.loads(shown.out)["error"]["code"] == code


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    rl: Verb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rl.error = ModuleNotFoundError("No module named 'peft.tuners'", name="peft.tuners")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # type: ignore[reportUnknownLambdaType]
    assert main(["rl", "-c", "c", "-t", "t"]) == 2
    shown = capsys.readouterr().err
    assert "needs torch and peft, which are not" in shown
    assert "'groupwise[train]'" in shown
    assert "Traceback" not in shown


def test_alone_it_shows_five_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    named = {line.split()[1] for line in shown.splitlines() if line.startswith("    groupwise ")}
    assert named == {"init", "rl", "check", "serve", "launch", "fleet"}
    assert max(map(len, shown.splitlines())) < 80


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_outside_a_run_is_no_result(
    evaluate: Verb, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    evaluate.error = KeyboardInterrupt(int(number))
    assert main(["eval", "-c", "c", "-t", "t"]) == code
    told = f"stopped by {number.name}"
    assert capsys.readouterr() == ("", f"groupwise: {told}\n")
    assert main(["eval", "-c", "c", "-t", "t", "--json"]) == code
    error = {"code": "interrupted", "message": told}
    assert json.loads(capsys.readouterr().out) == {"error": error}


@pytest.mark.parametrize(("words", "told"), [
    (["rl", "-t", "t"], "Missing option '--config'. `groupwise init -t t -m smollm2-135m-instruct` writes"),
    (["init", "-m", "tiny"], "Give --task-module and --model, or --from"),
    (["rl", "-c", "c", "-t", "t", "--resum"], "--resume"), (["evla"], "Did you mean 'eval'?"),
    (["rl", "--model_name_or_path", "x"], "here it is model.name"),
    (["sft", "--num-train-epochs", "2"], "did you mean training.num_train_epochs?"),
    (["eval", "-c", "c", "-t", "t", "--samples-per-prompt", "0"], "greater than or equal to 1"),
    (["fetch-model"], "Missing argument 'NAME'"),
])  # fmt: skip
def test_a_wrong_command_line_exits_with_2_and_says_what_was_meant(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, told in shown.err) == ("", True)
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


# --- as a process


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """`groupwise ... | head` ends quietly."""
    code = (
        "import sys; from groupwise.cli import main as m; from groupwise.cli.output import write_json;"
        "m.app.command('flood')(lambda: [write_json(list(range(999))) for _ in range(99)] and None);"
        "sys.exit(m.main(['flood']))"
    )
    errors = tmp_path / "err"
    with errors.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=err, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=60)
    assert errors.read_text() == ""


@pytest.mark.parametrize("group", [["fleet"], ["fleet", "vm"], ["runs"], ["launch"]])
def test_help_cuts_no_summary_off(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*group, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize("modules", [[], ["triton"]])
def test_triton_is_collected_at_exit_so_that_it_reports_no_leaks(
    modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr("groupwise.cli.main.main", lambda: 0)
    monkeypatch.setattr(program.gc, "disable", lambda: None)
    monkeypatch.setattr(program.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert program.main() == 0
    assert bool(frozen) is not bool(modules)
