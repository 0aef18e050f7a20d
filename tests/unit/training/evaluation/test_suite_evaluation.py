"""Suites with a program that behaves like lighteval.

1. A result says what was found, of what, by whom, how surely; it is written at once and never overwritten.
2. An answer that did not come is not a wrong answer: the suite fails, and the others are kept.
3. The key is in the environment of the program, and nowhere else.
4. Whatever was begun ends: at a time limit, by a signal, with a killed parent.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

import groupwise
from groupwise.cli.main import main
from groupwise.core.errors import RunError, UsageError
from groupwise.training.evaluation.suite_evaluation import SuiteRequest, evaluate_suites
from groupwise.training.suites.lighteval import PROGRAM_VARIABLE
from tests.fake_openai_server import Service, scripted, serve
from tests.processes import all_gone, is_gone, wait_until

ROOT = Path(__file__).resolve().parents[4]
FAKE = (sys.executable, str(ROOT / "tests/fake_lighteval.py"))
SERVER = (sys.executable, str(ROOT / "tests/suite_server.py"))
KEY = "sk-secret-0123456789"


def three_of_four(prompt: str, seed: int) -> str:
    number = int(re.findall(r"What is (\d+) plus", prompt)[0])
    return f"I think. ANSWER: {2 * number if number < 3 else 0}"


@pytest.fixture
def service() -> Iterator[Service]:
    with serve(Service(scripted(three_of_four), models=("org/tiny",), key=KEY)) as found:
        yield found


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv(PROGRAM_VARIABLE, shlex.join(FAKE))
    return tmp_path


def suite_request(service: Service, *suites: str, **given: Any) -> SuiteRequest:
    return SuiteRequest(suites, endpoint=service.url, endpoint_model="org/tiny", **given)


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def test_results_are_written_and_never_overwritten(service, here):
    wanted = suite_request(
        service, "aime24", samples_per_prompt=2, temperature=0.6, max_new_tokens=50, top_p=0.9
    )
    found = evaluate_suites(wanted)
    assert found.exit_code == 0
    assert found.summary["metrics"] == {"aime24/pass@1": 0.75}
    file = here / "results/aime24-org_tiny.json"
    before, result = file.read_bytes(), read(file)
    # three of four: Wilson's interval (centre 0.6275, half-width 0.3269), and sqrt(0.25 / 4)
    assert result["intervals_95"]["pass@1"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    assert result["stderr"]["pass@1"] == pytest.approx(0.25)
    assert (result["prompts"], result["samples_per_prompt"], result["samples"]) == (4, 2, 8)
    assert (result["suite"], result["task"], result["suite_version"]) == ("aime24", "aime24", 2)
    assert result["program"] == "lighteval 0.13.0, litellm 1.103.7"
    assert (result["model"], result["endpoint"]) == ("org/tiny", service.url)
    assert (result["kind"], result["format"], result["policy"]) == ("suite", 1, "org/tiny")
    assert [row["score"] for row in result["rows"]] == [1.0, 1.0, 1.0, 0.0]
    assert Path(result["details"]).is_file()
    assert not (file.with_suffix("") / "cache").exists()
    assert not (file.with_suffix("") / ".litellm_cache").exists()
    for body in service.asked:
        assert (body["n"], body["max_completion_tokens"]) == (2, 50)
        assert (body["temperature"], body["top_p"]) == (0.6, 0.9)
    again = evaluate_suites(suite_request(service, "aime24", max_prompts=3))
    assert again.summary["metrics"] == {"aime24/pass@1": 1.0}
    assert file.read_bytes() == before
    assert read(here / "results/aime24-org_tiny-2.json")["prompts"] == 3
    assert (here / "results/aime24-org_tiny-2/log.txt").is_file()


def test_answers_that_do_not_come_are_no_wrong_answers(service, here):
    """And the key, which the service repeats, is written nowhere."""

    async def refuse(number: int) -> JSONResponse | None:
        error = {"message": f"{KEY} asks for too much"}
        return JSONResponse({"error": error}, 400) if number == 1 else None

    service.interfere = refuse
    found = evaluate_suites(
        suite_request(service, "math_500", "aime25", output=here / "out/all.json")
    )
    assert "1 of 4 questions" in found.failed["math_500"]
    content = read(here / "out/all.json")
    assert content["metrics"] == {"aime25/pass@1": 0.75}
    assert content["failed"] == found.failed
    assert "… asks for too much" in (here / "out/all-math_500/log.txt").read_text()
    files = [path for path in here.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_policy_is_served_and_its_server_ended(here):
    words = (*SERVER, "{policy}", "{port}")
    folder = adapter(here / "runs/mine")
    wanted = SuiteRequest(("math_500",), policy=str(folder), serve=words, output=here / "a.json")
    found = evaluate_suites(wanted)
    assert found.summary["metrics"] == {"math_500/pass@1": 1.0}
    assert found.summary["suites"]["math_500"]["model"] == str(folder)
    assert all_gone(read(here / "server.json"))
    assert (here / "a-server/server.txt").is_file()


@pytest.mark.parametrize(
    ("words", "model", "told"),
    [
        ((sys.executable, "-c", "import sys; sys.exit('no GPU')"), None, "exit code 1.*no GPU"),
        ((sys.executable, "-c", "import time; time.sleep(99)"), None, "answer within 0.1 seconds"),
        (SERVER, "other", "has no model 'other'. It has: base, policy"),
    ],
)
def test_a_server_that_is_of_no_use_is_ended(here, words, model, told):
    folder = adapter(here / "mine")
    wanted = SuiteRequest(
        ("math_500",),
        policy=str(folder),
        serve=(*words, "{policy}", "{port}", "base", "policy"),
        endpoint_model=model,
        time_limit=0.1 if "answer" in told else 60.0,
    )
    with pytest.raises(RunError, match=f"(?s){told}"):
        evaluate_suites(wanted)
    if (here / "server.json").exists():
        assert all_gone(read(here / "server.json"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_served_process_ends_with_the_command(here, number):
    folder = adapter(here / "mine")
    serving = shlex.join((*SERVER, "{policy}", "{port}"))
    command = ["eval", "--suite", "aime24", "--policy", str(folder), "--serve", serving]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "groupwise", *command],
        env={
            **os.environ,
            "FAKE_LIGHTEVAL": "aime24=hang",
            "PYTHONPATH": str(Path(groupwise.__file__).parents[2]),
        },
        stderr=subprocess.PIPE,
    ) as process:
        try:
            wait_until(lambda: process.poll() is not None or any(here.rglob("hanging.json")))
            (hanging,) = here.rglob("hanging.json")
            begun = read(hanging) + read(here / "server.json")
            assert not any(map(is_gone, begun))
            process.send_signal(number)
            _, said = process.communicate()
        finally:
            process.kill()
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert (b"stopped by SIGTERM" in said) == (number == signal.SIGTERM)
    try:
        assert all_gone(begun)
    finally:
        for each in begun:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize(("words", "told"), [
    ("", "--suite NAME"), ("--suite math_500", "--endpoint URL"), ("--suite maths --endpoint http://x", "'maths'.*math_500"),
    ("--suite math_500 --endpoint http://x", "--endpoint-model"), ("--suite math_500 --config c.yaml", "--config has no effect"),
    ("--config c.yaml --temperature 1", "--temperature has no effect"), ("--config c.yaml --max-prompts 9", "eval.max_prompts=9"),
    ("--suite math_500 a=b", "key=value has no effect"),
    ("--suite math_500 --serve 'x {port}'", "neither {policy} nor {merged}"), ("--suite math_500 --serve 'x {policy}'", "{port}"),
    (f"--suite math_500 --serve '{sys.executable} {{policy}} {{port}}'", "--policy"),
    ("--suite all --samples-per-prompt 2 --endpoint http://x", "lcb takes one answer"),
])  # fmt: skip
def test_invalid_suite_options_are_refused(words, told, capsys):
    assert main(["eval", *shlex.split(words)]) == 2
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert re.search(told, said), said


@pytest.mark.parametrize(("given", "told"), [
    ({"endpoint_model": "my-o1-model"}, "under another name"), ({"samples_per_prompt": 2}, "need a temperature above 0"),
    ({"policy": "mine"}, "serves what it was started with"), ({"endpoint": "http://me:secret@x"}, "Keys come only from the environment"),
])  # fmt: skip
def test_settings_that_an_endpoint_does_not_support_are_refused(given, told):
    with pytest.raises(UsageError, match=told):
        SuiteRequest(("math_500",), **{"endpoint": "http://x", "endpoint_model": "m", **given})
