"""Stands in for lighteval 0.13: the same command line, the same requests, the same files. A program: `python tests/fake_lighteval.py`.

    lighteval endpoint litellm MODEL.yaml TASK[@k=1@n=N]|0 --output-dir FOLDER --save-details --custom-tasks FILE [--max-samples N]

Its suites are sums; an answer is right if it holds the sum behind "ANSWER: ". `FAKE_LIGHTEVAL` has it do other things, by task:
`gpqa:diamond=hang`. The layout is proven by the soak test that runs lighteval itself through the same tests.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

METRICS = {
    "math_500": ["pass@k:k=1&n=1"], "aime24": ["pass@k:k=1", "avg@n:n=1"], "aime25": ["pass@k:k=1&n=1", "avg@n:n=1"],
    "gpqa:diamond": ["gpqa_pass@k:k=1"], "lcb:codegeneration": ["codegen_pass@1:16"], "lcb:codegeneration_v4": ["codegen_pass@1:16"],
}  # fmt: skip
QUESTIONS = 4
STAMP = "2026-01-02T03-04-05.678901"


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("words", nargs=4)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--save-details", action="store_true", required=True)
    parser.add_argument("--custom-tasks", required=True)
    parser.add_argument("--max-samples", type=int, default=QUESTIONS)
    given = parser.parse_args()
    assert given.words[:2] == ["endpoint", "litellm"], given.words
    file, asked = given.words[2:]
    task, samples = read_task(asked)
    does = dict(word.split("=") for word in os.environ.get("FAKE_LIGHTEVAL", "").split()).get(task)
    print("--- LOADING TASKS ---", flush=True)
    pretend_to_be_installed(Path("site"))
    runpy.run_path(given.custom_tasks)
    Path(".litellm_cache").mkdir(exist_ok=True)
    if does == "hang":
        hang()
    model = json.loads(Path(file).read_text())["model_parameters"]
    (Path(model["cache_dir"]) / model["model_name"]).mkdir(parents=True)
    rows = [answered(model, number, samples) for number in range(given.max_samples)]
    write(given.output_dir, model["model_name"], task, rows, does)
    return 0


def pretend_to_be_installed(folder: Path) -> None:
    for name, release in {"lighteval": "0.13.0", "litellm": "1.103.7"}.items():
        place = folder / f"{name}-{release}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Name: {name}\nVersion: {release}\n")
    sys.path.append(str(folder))


def read_task(asked: str) -> tuple[str, int]:
    name, shots = asked.split("|")
    task, *parameters = name.split("@")
    assert shots == "0", asked
    return task, int(dict(one.split("=") for one in parameters).get("n", 1))


def hang() -> None:
    """Start a process that leaves the group, write the ids of both, and wait for ever."""
    begun = [sys.executable, "-c", "import time; time.sleep(1000)"]
    other = subprocess.Popen(begun, start_new_session=True)
    Path("hanging.json.tmp").write_text(json.dumps([os.getpid(), other.pid]))
    Path("hanging.json.tmp").rename("hanging.json")
    time.sleep(1000)


def answered(model: dict[str, Any], number: int, samples: int) -> dict[str, Any]:
    name = model["model_name"].removeprefix("openai/")
    asked = model["generation_parameters"]
    prompt = f"What is {number} plus {number}?"
    body = {
        "model": name, "messages": [{"role": "user", "content": prompt}], "n": samples,
        "logprobs": False, "response_format": {"type": "text"}, "stop": [],
        "max_completion_tokens": asked["max_new_tokens"],
        **{key: asked[key] for key in ("temperature", "top_p") if key in asked},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{model['base_url']}/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=model["timeout"]) as answer:
            choices = json.load(answer)["choices"]
        texts = [choice["message"]["content"] for choice in choices]
    except HTTPError as error:
        print(f"the service said: {error.read().decode()}")
        print("[ERROR]: API call failed after 8 attempts, returning empty response.")
        texts = [""]
    right = [f"ANSWER: {2 * number}" in text for text in texts]
    return {"id": str(number), "prompt": prompt, "texts": texts, "score": sum(right) / len(right)}


def write(folder: Path, model: str, task: str, rows: list[Any], does: str | None) -> None:
    scores = [row["score"] for row in rows]
    mean = sum(scores) / len(scores)
    squares = sum((score - mean) ** 2 for score in scores)
    found: dict[str, float] = {}
    for metric in METRICS[task]:
        found[metric] = mean
        if len(scores) > 1:
            found[f"{metric}_stderr"] = (squares / (len(scores) - 1) / len(scores)) ** 0.5
    import pyarrow
    from pyarrow import parquet

    key = f"{task}|0"
    config = {"name": task, "hf_repo": f"someone/{task}", "version": 2, "effective_num_docs": -1}
    content: dict[str, Any] = {
        "config_general": {"lighteval_sha": "?", "model_name": model}, "results": {key: found, "all": found}, "versions": {},
        "config_tasks": {key: config}, "summary_tasks": {key: {}},
    }  # fmt: skip
    results = folder / "results" / model / f"results_{STAMP}.json"
    results.parent.mkdir(parents=True)
    if does == "other":
        content["results"][key] = dict.fromkeys(found, 0.987)
    results.write_text("{" if does == "torn" else json.dumps(content if does != "old" else {}))
    details = folder / "details" / model / STAMP / f"details_{key}_{STAMP}.parquet"
    details.parent.mkdir(parents=True)
    table = [
        {
            "doc": {"id": row["id"], "query": row["prompt"]},
            "metric": dict.fromkeys(METRICS[task], row["score"]),
            "model_response": {"text": row["texts"]},
        }
        for row in rows
    ]
    parquet.write_table(pyarrow.Table.from_pylist(table), details)


if __name__ == "__main__":
    sys.exit(main())
