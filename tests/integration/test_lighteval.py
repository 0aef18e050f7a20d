"""The real lighteval against the program that stands in for it in other tests: the same requests, files and scores.

Wants the program (`groupwise eval --suite` says how to get it), and no network: the questions come from a hub on loopback. When
lighteval starts for the first time it loads a file from GitHub, without which it does not start.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupwise.training.evaluation.suite_evaluation import SuiteRequest, evaluate_suites
from groupwise.training.suites.lighteval import PROGRAM
from tests.fake_openai_server import Service, listening, scripted, serve

COMMIT = "a" * 40
SUM = r"What is (\d+) plus"
PROBLEMS = [{"problem": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(4)]
DATA: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "HuggingFaceH4/MATH-500": (
        *("default", "test"),
        [{**row, "solution": f"\\boxed{{{row['answer']}}}"} for row in PROBLEMS],
    ),
    "HuggingFaceH4/aime_2024": ("default", "train", PROBLEMS),
    "yentinglin/aime_2025": ("default", "train", PROBLEMS),
    "Idavidrein/gpqa": (
        *("gpqa_diamond", "train"),
        [
            {
                "Question": row["problem"],
                "Correct Answer": row["answer"],
                **{f"Incorrect Answer {n}": f"-{n}" for n in (1, 2, 3)},
            }
            for row in PROBLEMS
        ],
    ),
}


def problems(number: int) -> dict[str, Any]:
    """A problem of LiveCodeBench, all of whose tests are public; the private ones come packed as they do there."""
    tests = [{"input": "3\n", "output": f"{3 + number}\n", "testtype": "stdin"}]
    return {
        "question_content": f"Read a number and print it plus {number}.",
        "starter_code": "",
        "public_test_cases": json.dumps(tests),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps("[]"))).decode(),
        "metadata": "{}",
    }


for name in ("v4_v5", "v4"):
    DATA[f"lighteval/code_generation_lite/{name}"] = (name, "test", [problems(n) for n in (1, 2)])


def files(repo: str) -> dict[str, bytes]:
    """What the hub holds of a dataset: rows, and a card that names its configurations."""
    found = [entry for key, entry in DATA.items() if key.removeprefix(repo) in ("", f"/{entry[0]}")]
    cards = [
        f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {config}.jsonl\n"
        for config, split, _ in found
    ]
    rows = {
        f"{config}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
        for config, _, rows in found
    }
    return {"README.md": f"---\nconfigs:\n{''.join(cards)}---\n".encode(), **rows}


async def answer(request: Request) -> Response:
    """As much of the hub as `datasets` asks for."""
    path = request.url.path
    match = re.match(r"(/api)?/datasets/([\w-]+/[\w-]+)(/.*)?$", path)
    if match is None or not (there := files(match[2])) or len(there) == 1:
        return JSONResponse([] if path == "/api/models" else {"error": "no"})
    rest = match[3] or ""
    if match[1] and rest in ("", "/revision/main", f"/revision/{COMMIT}"):
        return JSONResponse({"id": match[2], "sha": COMMIT, "siblings": []})
    if match[1] and rest == f"/tree/{COMMIT}":
        entries = [{"type": "file", "path": p, "size": len(d), "oid": p} for p, d in there.items()]
        return JSONResponse(entries)
    if rest.startswith("/resolve/") and (name := rest.split("/", 3)[3]) in there:
        return Response(there[name], headers={"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
    return JSONResponse({"error": "no"}, 404, headers={"X-Error-Code": "EntryNotFound"})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "HEAD"])])
    with listening(app) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield


def solved(prompt: str, seed: int) -> str:
    """Three of four sums, and one of two problems."""
    if found := re.search(SUM, prompt):
        number = int(found[1])
        right = str(2 * number if number < 3 else -1)
        letters = re.search(rf"^([ABCD])\) {right}$", prompt, re.MULTILINE)
        return (
            f"Answer: {letters[1]}" if letters else f"ANSWER: {right}. It is $\\boxed{{{right}}}$"
        )
    return "```python\nprint(int(input()) + 1)\n```"


real = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason=f"the program {PROGRAM} is not on the PATH"
)


@pytest.mark.soak(suite="training")
@real
@pytest.mark.timeout(3600)
def test_every_suite_runs(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Service(scripted(solved), models=("org/tiny",), key="k")) as service:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        wanted = SuiteRequest(
            ("all",), endpoint=service.url, endpoint_model="org/tiny", max_new_tokens=50
        )
        found = evaluate_suites(wanted)
    assert found.failed == {}
    values = {name: each["metrics"]["pass@1"] for name, each in found.results.items()}
    assert values == {
        **dict.fromkeys(("math_500", "aime24", "aime25", "gpqa_diamond"), 0.75),
        **dict.fromkeys(("lcb", "lcb_v4"), 0.5),
    }
    assert found.results["math_500"]["program"].startswith("lighteval 0.13.")
    assert found.results["math_500"]["dataset"] == "HuggingFaceH4/MATH-500"
    assert {body["max_completion_tokens"] for body in service.asked} == {50}
    assert not any("max_tokens" in body for body in service.asked)
