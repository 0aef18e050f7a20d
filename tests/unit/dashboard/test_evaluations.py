"""Evaluations in pages: those of the record and those in files of `groupwise eval`, distinguished and compared.

1. Both kinds stand in the list, beside the checkpoints of their step, and can be compared.
2. Two after the same step have two addresses.
3. pass@k has intervals.
4. Those of all runs stand in one list with those of no run, and any two can be compared.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.training.evaluation.statistics import interval_at_once, mean_with_interval
from tests.unit.dashboard.dashboard_client import asking
from tests.web_runs import write_run


def rows(share: float, samples: int = 4, prompts: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "example": n, "sample": k, "prompt": f"question {n}", "completion": f"answer {n}.{k}",
            "outcome": "scored", "reward": float(k < share * samples), "parts": {}, "tokens": 5,
            "truncated": False, "key": f"k{n}", "answer": None, "success": k < share * samples + n % 2,
        }
        for n in range(prompts)
        for k in range(samples)
    ]  # fmt: skip


def write(run: Path, name: str, policy: str, reward: float, **more: Any) -> Path:
    (run / "results").mkdir(exist_ok=True)
    path = run / "results" / name
    content = {"policy": policy, "task": "sums", "metrics": {"reward": reward}}
    path.write_text(json.dumps({**content, "rows": rows(reward), **more}))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "one", 4)


async def fetch_page(run: Path, path: str, kind: str = "application/json") -> httpx2.Response:
    async with asking(run.parent) as client:
        return await client.get(path, headers={"accept": kind})


async def test_results_of_the_command_stand_beside_those_of_the_run(run: Path) -> None:
    intervals = {"reward": [0.4, 0.6]}
    changed = write(run, "sums-one@4.json", "one@4", 0.125)
    os.utime(changed, ns=(1, 1))
    await fetch_page(run, "/runs/one/evaluations")
    write(run, "sums-one@4.json", "one@4", 0.5, intervals_95=intervals)
    write(run, "sums-base.json", "base", 0.25)
    write(run, "suite.json", "one@4", 0.75, rows=[])
    (run / "results" / "rescored.json").write_text('{"kind": "rescoring"}')
    (run / "results" / "broken.json").write_text("[")
    listed = (await fetch_page(run, "/runs/one/evaluations")).json()["evaluations"]
    assert [(each["step"], each["file"], each["reference"]) for each in listed] == [
        (0, None, "@0:held-out"), (4, None, "@4:held-out"), (4, "sums-one@4.json", ":sums-one@4.json"), (4, "suite.json", ""),
        (None, "sums-base.json", ":sums-base.json"),
    ]  # fmt: skip
    assert (listed[2]["intervals"], listed[2]["metrics"]["reward"]) == (intervals, 0.5)
    page = (await fetch_page(run, "/runs/one/evaluations", "text/html")).text
    assert 'value="one:sums-one@4.json"' in page
    assert page.count(" disabled") == 2, "what has no answers cannot be compared"
    whole = await fetch_page(run, "/evaluations/compare?a=one:sums-base.json&b=one:sums-one@4.json")
    [reward] = whole.json()["metrics"]
    assert reward["change"]["value"] == pytest.approx(0.25)
    mixed = await fetch_page(run, "/evaluations/compare?a=one@0&b=one:sums-one@4.json")
    assert mixed.json()["prompts"] == 10
    (run / "final").mkdir()
    held_out = await fetch_page(run, "/runs/one", "text/html")
    assert "reward 0.500" in held_out.text, "beside the weights"
    weights = (await fetch_page(run, "/runs/one/weights/final")).json()
    assert "sums-one@4.json" in [each["file"] for each in weights["evaluations"]]


async def test_two_after_the_same_step_are_distinguished(run: Path) -> None:
    harder = EvaluationRecord(4, "harder: all", "one@4", {"reward": 0.25}, rows(0.25))
    with Store.open(run / "run.db") as store:
        store.add_evaluation(harder)
    page = (await fetch_page(run, "/runs/one/evaluations", "text/html")).text
    for value in ("one@4:held-out", "one@4:harder: all"):
        assert page.count(f'value="{value}"') == 2
    for reference in ("one@4:held-out", "one@4:harder: all", "one@4", "one"):
        name = "held-out" if "held-out" in reference else "harder: all"
        found = await fetch_page(run, f"/evaluations/compare?a=one@0&b={quote(reference)}")
        assert found.json()["b"] == f"one@4 ({name})"


async def test_pass_at_k_has_intervals(run: Path) -> None:
    nan = float("nan")
    metrics = {"pass@1": 0.375, "pass@4": 1.0}
    with Store.open(run / "run.db") as store:
        store.add_evaluation(EvaluationRecord(4, "several", "one@4", metrics, rows(0.25)))
    given = {"pass@1": [0.2, 0.4], "pass@4": [0.5, 0.9]}
    write(run, "f.json", "one@4", 0.5, metrics=metrics, intervals_95=given)
    others = {"reward": 0.5, "pass@01": 0.25, "pass@08": nan}
    write(run, "other.json", "one@2", 0.5, metrics=others, intervals_95={"pass@01": [nan, 0.5]})

    async def curves() -> dict[str, Any]:
        found = (await fetch_page(run, "/runs/one/evaluations")).json()["pass_at"]
        known = {"f.json": "theirs", "other.json": "odd", "several": "ours"}
        return {to: each for each in found for name, to in known.items() if name in each["label"]}

    found = await curves()
    ours, theirs, odd = (found[name] for name in ("ours", "theirs", "odd"))
    assert (theirs["low"], theirs["high"]) == ([0.2, 0.5], [0.4, 0.9])
    assert ours["low"][0] < 0.375 < ours["high"][0]
    assert ours["low"][1] < 1.0 == ours["high"][1], "that ten have succeeded does not make it sure"
    assert (odd["k"], odd["y"], odd["low"]) == ([1, 8], [0.25, None], [None, None])
    page = (await fetch_page(run, "/runs/one/evaluations", "text/html")).text
    assert "NaN" not in page[page.index("data-curves") :].partition(">")[0]
    with Store.open(run / "run.db") as store:
        store.add_evaluation(
            EvaluationRecord(4, "several", "one@4", {**metrics, "pass@1": 0.5}, rows(0.5))
        )
    assert (await curves())["ours"]["low"][0] > ours["low"][0], "it was evaluated anew"


def test_the_quick_interval_is_near_the_bootstrap() -> None:
    values = [(n % 5) / 4 for n in range(200)]
    quick, whole = interval_at_once(values, share=True), mean_with_interval(values)
    assert quick.value == whole.value
    assert abs(quick.low - whole.low) < 0.01
    assert abs(quick.high - whole.high) < 0.01
    for plain in ([1.0] * 7, [0.0, 1.0], [0.5]):
        assert interval_at_once(plain, share=True) == mean_with_interval(plain)
    edge = interval_at_once([0.01, 0.0, 0.5], share=True)
    assert edge.low == 0.0


async def test_those_of_all_runs_and_of_none_stand_in_one_list(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = write_run(runs / "one", 4)
    write_run(runs / "other", 2)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.db").write_text("no record")
    write(run, "sums-one@4.json", "one@4", 0.5)
    metrics = {"pass@1": 0.25, "pass@4": 0.5}
    write(tmp_path, "suite.json", "HuggingFaceTB/base", 0.25, rows=[])
    base = write(tmp_path, "sums-base.json", "HuggingFaceTB/base <b>", 0.25, metrics=metrics)
    (runs / "base.json").write_text(base.read_text())
    os.utime(runs / "base.json", (1, 1))
    os.utime(tmp_path / "results" / "suite.json", (2, 2))

    async def listed(query: str = "") -> list[Any]:
        return (await fetch_page(run, f"/evaluations{query}")).json()["evaluations"]

    found = [each["run"] + each["reference"] for each in await listed()]
    of_runs = {"one:sums-one@4.json", "one@4:held-out", "one@0:held-out", "other@2:held-out", "other@0:held-out"}  # fmt: skip
    assert (set(found[:5]), found[5:]) == (of_runs, [":results/sums-base.json", "", ":base.json"])
    page = (await fetch_page(run, "/evaluations", "text/html")).text
    assert (page.count('value=":base.json"'), "HuggingFaceTB/base &lt;b&gt;" in page) == (2, True)
    assert {each["run"] for each in await listed("?q=OTHER")} == {"other"}
    of_none = await listed("?q=huggingface+sums")
    assert [each["reference"] for each in of_none] == [":results/sums-base.json", "", ":base.json"]
    for other in (":results/sums-base.json", "one:sums-one@4.json"):
        both = await fetch_page(run, f"/evaluations/compare?a=:base.json&b={other}")
        assert both.json()["prompts"] == 10
    (tmp_path / "secret.json").write_text((runs / "base.json").read_text())
    elsewhere = ("../secret.json", "results/../secret.json", f"{tmp_path}/secret.json", "one/config.json")  # fmt: skip
    for name in (*elsewhere, "none.json", "", "results/"):
        answer = await fetch_page(run, f"/evaluations/compare?a=:{name}&b=one@0")
        assert answer.status_code == 404, name
    for number in range(25):
        write(run, f"other-{number}.json", f"elsewhere-{number}", 0.5)
    newest = [each["reference"] for each in await listed("?q=one")][:3]
    assert newest == [":sums-one@4.json", "@4:held-out", "@0:held-out"], "whatever else it has"


async def test_the_answers_of_one_evaluation_can_be_read(run: Path) -> None:
    write(run, "a.json", "one@4", 0.25)
    data = (await fetch_page(run, "/evaluations/answers?of=one:a.json")).json()
    assert data["all"] == len(data["prompts"]) == 10
    assert data["counts"] == {"never": 0, "sometimes": 10, "always": 0}
    assert [each["reward"] for each in data["prompts"][0]["answers"]] == [1.0, 0.0, 0.0, 0.0]
    assert data["prompts"][0]["mean"] == 0.25
    none = await fetch_page(run, "/evaluations/answers?of=one:a.json&show=always", "text/html")
    assert "No prompt is like that" in none.text
    listed = (await fetch_page(run, "/runs/one/evaluations", "text/html")).text
    assert 'href="/evaluations/answers?of=one%3Aa.json"' in listed
    for wrong, status in (("", 400), ("one@3", 404), ("none", 404), (":../x.json", 404)):
        assert (await fetch_page(run, f"/evaluations/answers?of={wrong}")).status_code == status, (
            wrong
        )


@pytest.mark.parametrize(("success", "rewards", "how_often"), [
    ((False, False), (0.0, 0.0), "never"), ((True, True), (1.0, 1.5), "always"), ((True, None), (1.0, None), "always"),
    ((None, None), (float("nan"), 1.0), "sometimes"),
])  # fmt: skip
async def test_how_often_answers_succeed_is_what_pass_at_k_counts(
    run: Path, success: Any, rewards: Any, how_often: str
) -> None:
    answers = [
        {**row, "success": success[row["sample"]], "reward": rewards[row["sample"]]}
        for row in rows(0.5, samples=2, prompts=3)
    ]
    write(run, "a.json", "one@4", 0.5, rows=answers)
    counts = (await fetch_page(run, "/evaluations/answers?of=one:a.json")).json()["counts"]
    assert {name: count for name, count in counts.items() if count} == {how_often: 3}


@pytest.mark.parametrize(
    "content",
    [
        '{"format": "1", "policy": "p", "metrics": {}, "rows": [1]}',
        "[" * 200_000,
        json.dumps({"policy": "p", "metrics": {"reward": "x"}, "rows": [], "intervals_95": {"reward": [10**400, 1]}}),
        json.dumps({"policy": "p", "metrics": {"reward": 1}, "rows": [{**rows(0.5)[0], "parts": ["x"]}]}),
        json.dumps({"policy": "p", "metrics": {"reward": 1}, "rows": [{**rows(0.5)[0], "reward": "x"}]}),
    ],
    ids=["format", "deep", "large", "parts", "reward"],
)  # fmt: skip
async def test_odd_files_and_numbers_take_no_page_down(run: Path, content: str) -> None:
    (run / "results").mkdir()
    (run / "results" / "odd.json").write_text(content)
    (run / "results" / os.fsdecode(b"odd-\xff.json")).write_text("{}")
    odd = [{**row, "reward": float("nan")} for row in rows(0.5)]
    with Store.open(run / "run.db") as store:
        metrics = {"reward": float("nan"), "pass@1": 0.5}
        store.add_evaluation(EvaluationRecord(4, "none", "one@4", metrics, odd))
        store.add_evaluation(EvaluationRecord(4, "numbers", "one@4", {"score": 0.5}))
    for path in ("/evaluations", "/runs/one", "/runs/one/evaluations", "/evaluations/answers?of=one@4:none"):  # fmt: skip
        assert (await fetch_page(run, path, "text/html")).status_code == 200, path
    for path in ("answers?of=one:odd.json", "compare?a=one:odd.json&b=one@0"):
        assert (await fetch_page(run, f"/evaluations/{path}", "text/html")).status_code == 400, path
    listed = (await fetch_page(run, "/runs/one/evaluations")).json()["evaluations"]
    by_name = {each["name"]: (each["reference"], each["answers"]) for each in listed}
    assert (by_name["numbers"], by_name["none"][1]) == (("", False), True)


async def test_names_of_evaluations_are_resolved_only_within_runs(run: Path) -> None:
    (run / "results").mkdir()
    (run / "results" / "x.json").write_text("{}")
    write_run(run.parent / "one:b", 1)
    found = await fetch_page(run, "/evaluations/compare?a=one:b@1:held-out&b=one@0:held-out")
    assert found.json()["a"] == "one:b@1 (held-out)"
    long = "a" * 300 + ".json"
    for reference in ("one:../one/results/x.json", "one:/etc/passwd.json", "nobody:x.json",
                      "one@4:none", f":{long}", f"one:{long}", ":a"):  # fmt: skip
        answer = await fetch_page(run, f"/evaluations/compare?a=one@0&b={reference}")
        assert answer.status_code == 404, reference
    too_long = await fetch_page(run, "/evaluations/answers?of=" + ":" * 1500)
    assert too_long.status_code == 400
