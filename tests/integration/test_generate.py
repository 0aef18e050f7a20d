"""`groupwise generate` against a service over real HTTP:

1. Rows × generations come back in the order of the input, are filtered by rewards, and train with `groupwise sft`.
2. kill -9 at any moment loses at most what was under way: everything that was appended is never asked for again.
3. Ctrl-C ends it with 130; the same command goes on. Limits, failures and time-outs of the service are waited out.
4. Shards divide the rows, and the command without one puts them together without asking again.
5. A folder belongs to one way of asking, and to one process. What cannot work is said before anything is asked.
6. Finished files go to the hub, into a private dataset, in one commit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

import groupwise
from groupwise.api.openai_client import waiting
from groupwise.cli.main import main
from groupwise.core.errors import (
    ResumeMismatchError,
    RunInUseError,
    UsageError,
)
from groupwise.runs.lock import RunLock
from groupwise.training.generation.journal import Answers
from tests.fake_hub import Hub, serve_hub, use_hub
from tests.fake_openai_server import Service, Writer, scripted, serve, tiny
from tests.integration.toy_run import begun_in_child

ROWS = 20
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def model() -> Writer:
    return tiny()


@pytest.fixture
def echo() -> Generator[Service]:
    """Answers with what it was asked, and the seed."""
    with serve(Service(scripted(lambda text, seed: f"{text} {seed}"))) as service:
        yield service


@pytest.fixture(autouse=True)
def _waits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_WAIT", 0.002)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"letters after {n}", "number": n} for n in range(ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(service: Service, data: Path, out: Path, **options: Any) -> groupwise.GenerateResult:
    given = {"dataset": str(data), "output": str(out), "base_url": service.url, **options}
    return groupwise.generate(**given)


def words_of(service: Service, data: Path, out: Path, *words: str) -> list[str]:
    return [
        *("generate", "--dataset", str(data), "--output", str(out)),
        *("--base-url", service.url, "--model", "tiny", "--json", *words),
    ]


def begun(said: Path, *words: str) -> int:
    """A forked child that does this command, and says into a file what it says."""

    def do() -> None:
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os._exit(main([*words]))

    return begun_in_child(do)


def appended(out: Path) -> Counter[tuple[str, int]]:
    """How often each generation of each row is in the journal; a torn end is none."""
    whole = (out / "answers.jsonl").read_bytes().rpartition(b"\n")[0]
    told = [json.loads(line) for line in whole.splitlines()]
    return Counter(
        (line["key"], line["first"] + number)
        for line in told
        for number in range(len(line["choices"]))
    )


# From prompts to training


def test_generations_come_in_order_and_train(model: Writer, data: Path, tmp_path: Path) -> None:
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text(
        "def short(prompts, completions, number, **columns):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [float(n % 2) - len(text) / 1000 for n, text in zip(number, texts)]\n"
    )
    out = tmp_path / "out"
    with serve(Service(model)) as service:
        result = generate(
            service,
            data,
            out,
            num_generations=2,
            max_new_tokens=8,
            seed=5,
            rewards=[f"{rewards}:short"],
            min_reward=0.5,
            keep_truncated=True,
            price_in=2.0,
            price_out=10.0,
        )
    assert (result.exit_code, result.summary["state"]) == (0, "done")
    generations, train = lines(out / "generations.jsonl"), lines(out / "train.jsonl")
    assert [row["number"] for row in generations] == list(range(ROWS))
    assert all(len(row["generation"]) == 2 for row in generations)
    assert {row["model"] for row in generations} == {"tiny"}
    for row in train:
        pair = generations[row["number"]]
        better = min(filter(str.strip, pair["generation"]), key=len)
        assert row["generation"] == better
        assert row["prompt"] == [{"role": "user", "content": f"letters after {row['number']}"}]
        assert row["completion"] == [{"role": "assistant", "content": better}]
    assert {row["number"] % 2 for row in train} == {1}
    summary = result.summary
    tokens = summary["prompt_tokens"], summary["completion_tokens"]
    assert summary["cost"] == pytest.approx((tokens[0] * 2.0 + tokens[1] * 10.0) / 1e6)
    assert tokens[1] == sum(row["usage"]["completion_tokens"] for row in generations)
    assert trained_on(train, tmp_path) == 2


def trained_on(rows: list[dict[str, Any]], place: Path) -> int:
    """Steps that a supervised training does on these rows."""

    class Task:
        def get_sft_dataset(self, config: Any, tokenizer: Any) -> list[dict[str, Any]]:
            return rows

    config = {
        "model": {"name": "tiny"},
        "lora": {"r": 4, "alpha": 8},
        "training": {"max_steps": 2, "examples_per_step": 4, "learning_rate": 0.05},
        "run": {"name": "sft", "dir": str(place / "runs"), "threads": 1},
    }
    return groupwise.sft(config, Task()).summary["steps"]


def test_a_second_call_asks_nothing_and_scores_again(
    echo: Service, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    generate(echo, data, out)
    first = (out / "generations.jsonl").read_text()
    assert len(echo.asked) == ROWS
    with data.open("a") as file:
        file.write('{"prompt": "one more", "number": 99}\n')
    generate(echo, data, out)
    assert len(echo.asked) == ROWS + 1
    assert (out / "generations.jsonl").read_text().startswith(first)
    rewards = tmp_path / "r.py"
    rewards.write_text("def high(number, **c):\n    return [float(n) for n in number]\n")
    generate(echo, data, out, rewards=[f"{rewards}:high"], min_reward=18.0)
    assert len(echo.asked) == ROWS + 1
    assert [row["number"] for row in lines(out / "train.jsonl")] == [18, 19, 99]


# Interruptions


def test_kill_at_any_moment_loses_only_what_was_under_way(
    model: Writer, data: Path, tmp_path: Path
) -> None:
    out, concurrency, rng = tmp_path / "out", 3, random.Random(4)
    more = ["--num-generations", "2", "--max-new-tokens", "6", "--concurrency", str(concurrency)]
    with serve(Service(model)) as service:
        running: list[int] = []
        # More requests apart than may reach the service after one of them has killed who asks.
        dying = [begin + rng.randrange(3) for begin in (1, 12)]

        async def kill(number: int) -> Response | None:
            if number in dying:  # the other requests are on their way, or being written down
                os.kill(running[-1], signal.SIGKILL)
            return None

        service.interfere = kill
        ended: list[int] = []
        while not ended or ended[-1] != 0:
            before = appended(out) if ended else Counter[tuple[str, int]]()
            running.append(begun(tmp_path / "said", *words_of(service, data, out, *more)))
            ended.append(os.waitstatus_to_exitcode(os.waitpid(running[-1], 0)[1]))
            assert ended[-1] in (0, -signal.SIGKILL), (tmp_path / "said").read_text()
            assert before <= appended(out), "nothing that was there is gone"
        assert ended == [-signal.SIGKILL] * len(dying) + [0]
    answers = Answers()
    answers.read(out / "answers.jsonl")
    twice = [key for key, count in appended(out).items() if count > 1]
    assert twice == []
    assert len(appended(out)) == 2 * ROWS
    assert len(service.asked) <= ROWS + concurrency * len(dying)
    assert [row["number"] for row in lines(out / "generations.jsonl")] == list(range(ROWS))


def test_ctrl_c_keeps_what_came(echo: Service, data: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    running: list[int] = []

    async def interrupt(number: int) -> Response | None:
        if number == 5:
            os.kill(running[0], signal.SIGINT)
            while "same command goes on" not in said.read_text():  # noqa: ASYNC110 — another process says it
                await asyncio.sleep(0.01)
        return None

    echo.interfere = interrupt
    running.append(begun(said, *words_of(echo, data, out, "--concurrency", "1")))
    assert os.waitstatus_to_exitcode(os.waitpid(running[0], 0)[1]) == 130
    assert '"interrupted"' in said.read_text()
    assert len(appended(out)) == 5
    assert not (out / "generations.jsonl").exists()
    echo.asked.clear()
    echo.interfere = None
    assert generate(echo, data, out, model="tiny").exit_code == 0
    assert len(echo.asked) == ROWS - 5


def test_failed_rows_are_listed_and_asked_for_again(
    echo: Service, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(number: int) -> Response | None:
        refused = {"error": {"message": "too long"}}
        return JSONResponse(refused, 400) if number in (3, 7) else None

    echo.interfere = refuse
    out = tmp_path / "out"
    result = generate(echo, data, out, concurrency=1)
    summary = result.summary
    assert (result.exit_code, summary["state"], summary["failed"]) == (0, "incomplete", 2)
    failures = [(row["row"], "too long" in row["reason"]) for row in lines(out / "failures.jsonl")]
    assert failures == [(3, True), (7, True)]
    assert "2 rows have failed" in caplog.text
    result = generate(echo, data, out, concurrency=1)
    assert (result.summary["state"], len(echo.asked)) == ("done", ROWS + 2)
    assert lines(out / "failures.jsonl") == []


# Shards


def test_shards_are_put_together_without_asking_again(
    echo: Service, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for shard in ("1/3", "2/3", "3/3"):
        generate(echo, data, out, shard=shard, seed=1)
    assert len(echo.asked) == ROWS
    apart = {
        row["number"]: row for n in (1, 2, 3) for row in lines(out / f"shard-{n}-of-3/train.jsonl")
    }
    generate(echo, data, out, seed=1)
    assert len(echo.asked) == ROWS
    assert lines(out / "train.jsonl") == [apart[n] for n in range(ROWS)]
    with pytest.raises(ResumeMismatchError, match="seed"):
        generate(echo, data, out, shard="1/4", seed=2)
    lock = RunLock.acquire(out / "shard-2-of-3")
    with pytest.raises(RunInUseError, match="shard-2-of-3"):
        generate(echo, data, out, seed=1)
    lock.release()


# What cannot work


def test_a_folder_belongs_to_one_process_and_one_way_of_asking(
    echo: Service, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    lock = RunLock.acquire(out)
    with pytest.raises(RunInUseError, match=f"{os.getpid()}"):
        generate(echo, data, out)
    lock.release()
    assert echo.asked == []
    generate(echo, data, out, temperature=0.5)
    with pytest.raises(ResumeMismatchError) as caught:
        generate(echo, data, out, temperature=0.7, system_prompt="s")
    assert all(key in str(caught.value) for key in ("system_prompt", "temperature: 0.5 there, 0.7"))
    assert generate(echo, data, out, temperature=0.5, concurrency=3, timeout=9.0).exit_code == 0
    assert len(echo.asked) == ROWS


# The hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    with serve_hub(Hub()) as made:
        use_hub(monkeypatch, made)
        yield made


def test_private_data_is_not_pushed_to_a_public_repository(
    echo: Service, data: Path, tmp_path: Path, hub: Hub
) -> None:
    public = hub.add("me/made", private=False)
    with pytest.raises(UsageError, match=r"me/made(.|\n)*--public"):
        generate(echo, data, tmp_path / "out", model="tiny", hub="me/made")
    assert (echo.asked, public.files()) == ([], {})


def test_finished_files_go_to_the_hub(
    echo: Service, data: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [*words_of(echo, data, out), "--hf-output-dataset", "me/made", "--private"]
    assert main(words) == 0
    there = json.loads(capsys.readouterr().out)["hub"]
    assert there.startswith(f"{hub.url}/datasets/me/made/commit/")
    made = hub.repositories["me/made"]
    assert (made.private, len(made.branches["main"])) == (True, 2)
    assert set(made.files()) == {"README.md", "train.jsonl", "generations.jsonl"}
    assert made.files()["train.jsonl"] == (out / "train.jsonl").read_bytes()


def test_without_a_service_it_says_what_to_give(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dataset", str(data), "--output", str(tmp_path / "out"), "--dry-run"]
    assert main(["generate", *words, "--base-url", "http://127.0.0.1:9/v1"]) == 1
    said = capsys.readouterr().err
    assert "--base-url" in said
    assert "--model" in said
    assert main(["generate", *words, "--model", "any"]) == 0, "with a name, none is asked"
