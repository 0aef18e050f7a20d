"""`groupwise fleet` as commands: what they print, and what they say to every mistake. The fleet is a folder; nothing runs in it.

Those that only look, or are refused, share one fleet (`still`), and look that it stays as it was.
"""

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from groupwise.api.schemas.fleet import MAX_LINES
from groupwise.cli.fleet import follow, machines
from groupwise.cli.fleet.machines import LOCATION
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.local import LocalFleet
from groupwise.jobs.fleet.processes import hold_role
from groupwise.jobs.fleet.store import schema, triggers
from groupwise.jobs.fleet.store.database import connect
from groupwise.jobs.fleet.store.tables import GPU, VM
from groupwise.jobs.hosts.files import hash_of
from tests.fleet_api import place_in
from tests.unit.cli.conftest import Command

AMD, NVIDIA = f"GPU-{'a' * 16}", "GPU-11111111-2222-3333-4444-555555555555"


def submitted(fleet: Command, *words: str) -> str:
    code, out, err = fleet("submit", "--gpus", "0", *words)
    assert code == 0, err
    return out.strip()


# --- which fleet


def test_looking_makes_no_fleet(fleet: Command, folder: Path) -> None:
    code, _, err = fleet("list")
    assert code == 2
    assert f"there is no fleet in {folder}. `groupwise fleet up` makes one" in err
    assert not folder.exists()


@pytest.mark.parametrize("words", ["list", "migrate"])
def test_no_command_changes_the_tables_of_a_fleet_that_runs(
    seen: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    with monkeypatch.context() as other_version, hold_role(folder, "dispatcher"):
        other_version.setattr(triggers, "rules", lambda: ())
        code, _, err = seen(words)
    assert code == 2
    assert "its dispatcher (process" in err
    assert "Restart that" in err
    with closing(connect(f"sqlite:///{folder / 'fleet.db'}")) as database:
        assert database.at_rest(schema.is_current)


# --- submitting


def test_gpus_can_be_named_by_model_index_or_uuid(seen: Command, folder: Path) -> None:
    def write(session: Session) -> None:
        for uuid, model in ((AMD, "AMD Instinct MI300X"), (NVIDIA, "NVIDIA H100 PCIe")):
            session.add(GPU(vm_id="vm-1", index=0, uuid=uuid, model=model))
        session.add(VM(vm_id="slurm", user="u", engine={"name": "slurm", "gpu_model": "a100"}))

    with closing(connect(f"sqlite:///{folder / 'fleet.db'}")) as database:
        database.run(write)
    for given, needs in (
        ("A100:2", {"gpus": 2, "gpu_model": "A100"}),
        ("H100", {"gpus": 1, "gpu_model": "H100"}),
        ("vm-1:1", {"named": [1], "vm": "vm-1", "gpus": 1}),
        ("vm-9:0", {"named": [0], "vm": "vm-9", "gpus": 1}),
        (f"vm-1:{AMD}", {"named": [AMD], "vm": "vm-1", "gpus": 1}),
    ):
        plan = json.loads(seen("submit", "--dry-run", "--json", "--gpus", given, "true")[1])
        assert plan["resources"] == needs
    for given, told in (
        ("vm-11:1", "did you mean vm-1?"),
        ("L40:2", "models: AMD Instinct MI300X, NVIDIA H100 PCIe, a100. To wait"),
        ("MIG-3g.20gb", "--gpus 1 --gpu-model MIG-3g.20gb"),
        ("vm-1:0", f"--gpus vm-1:{AMD} (AMD Instinct MI300X), --gpus vm-1:{NVIDIA} (NVIDIA H100 "),
        (f"{AMD},{NVIDIA}", "of one vendor"),
    ):
        code, out, err = seen("submit", "--gpus", given, "true")
        assert (code, out, told in err) == (2, "", True), err
    code, _, err = seen("submit", "--gpus", "2", "--gpu-model", "L40", "true")
    assert (code, "the fleet has no GPU L40, so the job waits" in err) == (0, True)
    assert (
        "have 1 × AMD Instinct MI300X, 1 × NVIDIA H100 PCIe: --gpus 1" in seen("submit", "true")[2]
    )
    code, _, err = seen("vm", "clear-quarantine", "vm-1", "0")
    assert code == 2
    assert f"has 2 GPUs 0: name the UUID; they are 0 ({AMD}, AMD Instinct MI300X), 0 " in err


def test_the_id_stands_alone_on_standard_output(seen: Command) -> None:
    """With and without dashes the options of the command are its own."""
    for dashes in ((), ("--",)):
        code, out, err = seen("submit", *dashes, "python", "x.py", "--priority", "9")
        assert code == 0
        assert out.startswith("job-")
        assert len(out.split()) == 1
        assert "--gpus" not in err, "the fleet has no GPU that could have been meant"
        assert f"next: groupwise fleet logs -f {out.strip()}" in err
        assert "has no GPU" in seen("submit", "--vm", "vm-1", "--gpus", "1", *dashes, "true")[2]
        found = json.loads(seen("show", out.strip(), "--json")[1])
        assert found["arguments"] == ["python", "x.py", "--priority", "9"]
        assert found["priority"] == 0
        assert found["submitted_by"].startswith("user:")


def test_everything_is_handed_on(seen: Command, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("{}\n")
    variables = tmp_path / "job.env"
    variables.write_text("A=overridden\nexport B='2 3'\n")
    first = submitted(seen, "--hold", "--", "true")
    job_id = submitted(
        seen,
        *("--time-limit", "2h", "--priority", "3", "--name", "n", "--label", "team=x"),
        *("--retries", "1", "--after", f"{first}:ok", "--env", "A=b=c", "--secret", "HF_TOKEN"),
        *("--env-file", str(variables)),
        *("--file", f"{file}:in/data.jsonl", "--output", "out", "--memory", "2GB"),
        *("--checkpoint", "out/ckpt", "--allow-smaller-batch"),
        *("--output-limit", "40GB", "--output-files", "7", "--grace", "2m"),
        *("--webhook", "https://example.org/x", "--", "true"),
    )
    found = json.loads(seen("show", job_id, "--json")[1])
    asked = found["request"]
    assert (found["priority"], found["name"]) == (3, "n")
    assert asked["checkpoints"] == ["out/ckpt"]
    assert asked["allow_smaller_batch"] is True
    assert asked["limits"] == {
        "time_seconds": 7200.0, "grace_seconds": 120.0, "artefact_mb": 40_000, "artefact_files": 7
    }  # fmt: skip
    assert asked["environment"] == {"A": "b=c", "B": "2 3"}
    assert asked["secrets"] == {"HF_TOKEN": "env:HF_TOKEN"}
    assert asked["after"] == [f"{first}:ok"]
    assert asked["retry"] == {"charged": 1}
    assert list(asked["files"]) == ["in/data.jsonl"]
    assert found["resources"]["ram_mb"] == 2000


def test_a_command_on_one_machine_that_is_interrupted_is_cancelled(
    seen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int, name: str, code: int) -> None:
        def follow_log(access: object, job_id: str) -> None:
            os.kill(os.getpid(), number)
            raise AssertionError("the signal was not heeded")

        monkeypatch.setattr(follow, "follow_log", follow_log)
        before = signal.getsignal(signal.SIGTERM)
        ended, _, said = seen("exec", "vm-1", "sleep", "500")
        assert signal.getsignal(signal.SIGTERM) is before
        job, *_ = json.loads(seen("list", "--json")[1])
        assert (job["status"], ended) == ("cancelled", code)
        assert said == f"{job['job_id']} is cancelled\ngroupwise: stopped by {name}\n"
        shown = json.loads(seen("show", job["job_id"], "--json")[1])
        assert shown["request"]["retry"] == {"once": True}

    interrupted(signal.SIGINT, "SIGINT", 130)
    interrupted(signal.SIGTERM, "SIGTERM", 143)


def test_an_array_has_a_job_for_each_line(seen: Command, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text('--seed 1\n\n{"name": "second", "environment": {"B": "2"}}\n')
    options = ("--gpus", "0", "--env", "A=1", "--array", str(file))
    code, out, _ = seen("submit", *options, "--", "python", "x.py")
    assert code == 0
    one, two = (json.loads(seen("show", job_id, "--json")[1]) for job_id in out.split())
    assert one["arguments"] == ["python", "x.py", "--seed", "1"]
    assert two["name"] == "second"
    assert two["request"]["environment"] == {"A": "1", "B": "2"}
    file.write_text('echo one\n{"arguments": ["echo", "two"], "resources": {"gpus": 0}}\n')
    _, out, _ = seen("submit", "--gpus", "0", "--array", str(file))
    found = [json.loads(seen("show", job_id, "--json")[1]) for job_id in out.split()]
    assert [each["arguments"] for each in found] == [["echo", "one"], ["echo", "two"]]
    assert [each["name"] for each in found] == ["echo one", "a.txt:2"]
    for line, words in (
        ('{"arguments": ["true"], "priority": "high"}', "priority"),
        ('{"arguments": ["true"], "output_dir": "../elsewhere"}', "output_dir"),
        ('{"name": "nothing"}', "there is nothing to run"),
        ("it 'is open", "quotes"),
    ):
        file.write_text(f"echo 1\n\n{line}\necho 2\n")
        code, out, err = seen("submit", "--gpus", "0", "--array", str(file))
        assert (code, out) == (2, "")
        assert f"--array {file}:3: " in err
        assert words in err
    assert len(json.loads(seen("list", "--json")[1])) == 4


GRPO = ("--kind", "GRPO", "--gpus", "0", "--model", "tiny", "--reward-function", "correctness")
TRAINING = (*GRPO[:2], *GRPO[4:], "--dataset", "org/d")


def test_files_that_lines_of_an_array_name_travel_with_their_jobs(
    seen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "sums.jsonl").write_text(json.dumps({"of": name}))
    (tmp_path / "my.py").write_text("def score(): ...")
    lines = (
        {"dataset": "a/sums.jsonl"},
        {"dataset": str(tmp_path / "b" / "sums.jsonl"), "reward_function": "my.py:score,length"},
        {"name": "the options'"},
        {"dataset": "org/name"},
    )
    (tmp_path / "lines").write_text("\n".join(json.dumps(line) for line in lines))
    asked = ("submit", *GRPO, "--dataset", "c/sums.jsonl", "--array", "lines")
    code, out, err = seen(*asked)
    assert code == 0, err
    made = [json.loads(seen("show", job_id, "--json")[1]) for job_id in out.split()]
    assert [each["dataset"] for each in made] == ["file:sums.jsonl"] * 3 + ["org/name"]
    assert [each["reward_function"] for each in made][:2] == ["correctness", "my.py:score,length"]
    sent = [each["request"].get("files", {}) for each in made]
    assert [[*each] for each in sent] == [
        ["sums.jsonl"], ["sums.jsonl", "my.py"], ["sums.jsonl"], []
    ]  # fmt: skip
    hashes = [each["sums.jsonl"][0] for each in sent[:3]]
    assert hashes == [hash_of(tmp_path / name / "sums.jsonl") for name in "abc"]
    assert seen(*asked, "--dry-run")[0] == 0


def test_a_dataset_that_can_only_be_a_file_here_must_be_one(
    still: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums.jsonl").touch()
    for name, words in (
        ("data/nosums.jsonl", f"no file nosums.jsonl here (in {tmp_path}/data). Did you mean sums.jsonl?"),
        ("nosums.csv", f"no file nosums.csv here (in {tmp_path})"),
        ("nosuch/sums.parquet", f"(in {tmp_path}/nosuch)"),
        ("gsm8k", "OWNER/NAME"),
        ("data", "--file data:data --dataset file:data"),
    ):  # fmt: skip
        code, _, err = still("submit", *GRPO, "--dataset", name)
        assert code == 2
        assert words in " ".join(err.split())


def test_a_folder_travels_under_its_name_or_as_its_contents(seen: Command, tmp_path: Path) -> None:
    (tmp_path / "code" / ".hidden").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("1")
    (tmp_path / "code" / ".hidden" / "b").write_text("2")
    (tmp_path / "link").symlink_to("code")

    def sent(word: str) -> list[str]:
        job_id = submitted(seen, "--file", word, "--", "true")
        return sorted(json.loads(seen("show", job_id, "--json")[1])["request"]["files"])

    assert sent(str(tmp_path / "code")) == ["code/.hidden/b", "code/a.py"]
    assert sent(f"{tmp_path}/code:.") == [".hidden/b", "a.py"]
    assert sent(f"{tmp_path}/code/:./") == [".hidden/b", "a.py"]
    assert sent(f"{tmp_path}/code:src/x/") == ["src/x/.hidden/b", "src/x/a.py"]
    assert sent(str(tmp_path / "link")) == ["link/.hidden/b", "link/a.py"]
    assert sent(f"{tmp_path}/code/a.py:.") == ["a.py"]
    (tmp_path / "code" / "there").symlink_to("a.py")
    code, _, err = seen("submit", "--gpus", "0", "--file", str(tmp_path / "code"), "--", "true")
    assert code == 2
    assert "there is a link" in err


def test_a_project_travels_as_git_has_it(
    seen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    for name in ("src/a b.py", "data/x.bin", "data/y.bin", "__pycache__/z.pyc", "big.ckpt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (project / "src/a b.py").chmod(0o755)
    (project / ".gitignore").write_text("data\n")
    (project / "code").symlink_to("src")
    (project / "away").symlink_to(tmp_path)
    (tmp_path / "other.py").write_text("1")
    monkeypatch.chdir(tmp_path)
    words = (
        "--project-dir",
        "project",
        "--exclude",
        "*.ckpt",
        "--file",
        "project/data/x.bin",
        "--file",
        "other.py:z.py",
    )
    code, out, err = seen("submit", "--gpus", "0", *words, "--", "true")
    assert code == 0, err
    sent = json.loads(seen("show", out.strip(), "--json")[1])["request"]["files"]
    assert sorted(sent) == [".gitignore", "code/a b.py", "data/x.bin", "src/a b.py", "z.py"]
    assert (sent["code/a b.py"], sent["src/a b.py"][1]) == (sent["src/a b.py"], 0o755)
    assert "4 files of " in err
    assert "away is not sent: a link to what is outside" in err
    code, _, err = seen("submit", "--gpus", "0", "--exclude", "*", "--", "true")
    assert (code, "--project-dir" in err) == (2, True)


def test_a_submission_that_cannot_be(still: Command) -> None:
    length = ("--max-completion-length", "64")
    refused: tuple[tuple[tuple[str, ...], str], ...] = (
        ((), "there is nothing to run"), (("--model", "m"), "add --kind GRPO"),
        (("--model", "m", "--", "true"), "Leave one of the two out"), (("--max_steps", "3"), "--max-steps"),
        (("--gpu-memori", "3GB", "true"), "--gpu-memory"), (("--time-limit", "soon", "true"), "2h, 1h30m"),
        (("--env", "A", "true"), "KEY=VALUE"), (("--label", "a=1", "--label", "a=2", "true"), "given twice"),
        (("--secret", "T=hunter2", "true"), "a secret is named, never given"),
        (("--file", "not-there.txt", "true"), "there is no file or folder"),
        (("--file", "pyproject.toml:/etc/x", "true"), "without `..`"),
        (("--hyperparams", "beta", "--kind", "GRPO"), "key=value, or a JSON object"),
        (("--wait", "--hold", "true"), "contradict each other"),
        (("--kind", "GRPOO", "--gpus", "0", "--model", "m"), "Did you mean GRPO?"),
        (("--retries", "many", "true"), "a whole number is expected, 0 to 100, or none"),
        ((*length, "--kind", "EVAL"), "sampler.max_completion_length=64"), ((*length, "true"), "Leave one of the two out"),
        (("--learning-rate", "nan", "--kind", "GRPO"), "learning_rate"),
        ((*TRAINING, "--machines", "2", "--dry-run"), "each machine would do the same"),
        ((*TRAINING, "--gpus", "vm-1:0,1"), "GRPO computes on one"), (("--memory", "12 apples", "true"), "e.g. 40GB, 64GiB"),
        (("--gpu-memory", "1B", "true"), "at least 1 MB"),
        (("--gpus", "A100:2", "--gpu-model", "H100", "true"), "give one"), (("--gpus", "0", "python train.py"), "words apart"),
        (("--gpus", "0", "--retries", "0", "--allow-smaller-batch", "true"), "without retries"),
    )  # fmt: skip
    for words, told in refused:
        code, out, err = still("submit", *words)
        assert (code, out, told in err) == (2, "", True), (words, err)
        assert "hunter2" not in err
    assert "no jobs" in still("list")[2]


# --- machines


def test_a_removed_machine_is_added_again_by_its_name(
    seen: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its login and settings; and the jobs that wait for it are named when it is removed."""
    with LocalFleet(place_in(folder), "user:ada") as access:
        access.add_machine({"vm_id": "local", "transport": "local", "workdir": "/srv/work"})
    settings = {"labels": {"disk": "fast"}, "cpu_slots": 3, "deadman": 600.0, "projects": ["one"]}
    for name in ("local", "vm-1"):
        own = ("--label", "disk=fast", "--cpu-slots", "3", "--deadman", "10min", "--project", "one")
        assert seen("vm", "set", name, *own)[0] == 0
        job = submitted(seen, "--vm", name, "--", "true")
        before = json.loads(seen("vm", "show", name, "--json")[1])
        assert f"waits for it: {job}" in seen("vm", "remove", name)[2]
        assert seen("vm", "add", name)[0] == 0
        after = json.loads(seen("vm", "show", name, "--json")[1])
        assert {field: after[field] for field in settings} == settings
        for field in (*LOCATION, "workdir", "active"):
            assert after[field] == before[field], field
    with closing(connect(f"sqlite:///{folder / 'fleet.db'}")) as database:
        database.run(lambda s: setattr(s.get_one(VM, "vm-1"), "host_key", "ssh-ed25519 AAAA"))
    seen("vm", "set", "vm-1", "--workdir", "/srv/jobs")
    seen("vm", "remove", "vm-1")
    looked_at: list[dict[str, Any]] = []

    def observe(machine: dict[str, Any]) -> None:
        looked_at.append(machine)
        raise UsageError("seen")

    monkeypatch.setattr(machines, "observe_new", observe)
    assert seen("vm", "add", "vm-1")[0] == 2
    assert looked_at[0]["workdir"] == "/srv/jobs"
    monkeypatch.setattr(machines, "observe_new", lambda _: None)
    assert seen("vm", "add", "vm-1")[0] == 0
    seen("vm", "drain", "vm-1", "--reason", "new disk on Friday " * 9)
    assert ("new disk on Friday " * 9).strip() in seen("vm", "list")[1], "no terminal, nothing cut"
    code, _, err = seen("vm", "add", "never")
    assert (code, "where is the machine?" in err) == (2, True)
    for name in [machine["vm_id"] for machine in json.loads(seen("vm", "list", "--json")[1])]:
        seen("vm", "remove", name)
    assert "vm list --removed" in seen("vm", "list")[2]


# --- jobs


def test_a_sweep_is_ended_by_its_label(seen: Command) -> None:
    ids = [submitted(seen, "--label", "sweep=a", "--name", str(n), "--", "true") for n in range(3)]
    other = submitted(seen, "--", "true")
    assert seen("stop", ids[0])[0] == 0
    of_sweep = ("--label", "sweep=a")
    assert seen("hold", *of_sweep)[2].splitlines() == [
        *(f"{ids[2]} is held", f"{ids[1]} is held", "hold: 2 jobs")
    ]
    assert seen("release", *of_sweep, "--name", "1")[2].endswith("release: 1 job\n")
    assert seen("stop", *of_sweep)[2].endswith("stop: 2 jobs\n")
    assert json.loads(seen("stop", *of_sweep, "--json")[1]) == []
    assert seen("stop", *of_sweep)[::2] == (0, "stop: no jobs like that\n")
    assert json.loads(seen("show", other, "--json")[1])["status"] == "queued"
    code, _, err = seen("stop", *of_sweep, "--status", "cancelled,queued")
    assert code == 0  # what is cancelled already stays so
    again = json.loads(seen("resume", "--project", "default", "--json")[1])
    assert {each["job_id"] for each in again} == set(ids)
    code, _, err = seen("resume", *of_sweep, "--status", "queued")
    assert code == 2
    assert err.endswith("resume: 0 of 3 jobs, 3 refused\n")


def test_mistakes_are_reported(still: Command) -> None:
    add = ("vm", "add", "x")
    refused: tuple[tuple[tuple[str, ...], str], ...] = (
        (("list", "--status", "runing"), "did you mean running?"),
        (("list", "--status", "cancelling"), "--status running"),
        (("list", "--label", "x"), "KEY=VALUE"),
        (("list", "--limit", "1001"), "less than or equal to 1000"),
        (("stop",), "name the jobs, or choose them"),
        (("hold", "job-1", "--label", "a=1"), "ids and by --label"),
        (("exec", "vm-1", "--gpus", "1", "--", "ls", "-l"), "exec --gpus 1 vm-1 -- ls -l`"),
        (("exec", "vm-1", "--gpus", "1", "ls"), "exec --gpus vm-1 -- …`"),
        (("remove", "--older-than", "long"), "a time is expected"),
        (("remove", "--older-than", "1d", "--status", "running"), "only jobs that have ended"),
        (
            ("logs", "job-none", "--tail", str(MAX_LINES + 1)),
            f"less than or equal to {MAX_LINES}",
        ),
        (add, "NAME as `ssh NAME` has it"),
        ((*add, "--host", "h h"), "is not a name of a host"),
        ((*add, "--host", "h", "--from-ssh-config", "y"), "contradict"),
        ((*add, "--host", "h", "--trust", "MD5:1"), "is SHA256: and 43 characters"),
        ((*add, "--slots", "2"), "name it, as --engine slurm"),
        (("vm", "mark-lost", "vm-1"), "say --yes"),
        (("project", "set", "p", "--weight", "0"), "weight: must be a number"),
        (("key", "new", "train"), "there are read, act, admin"),
        (("up", "--host", "0.0.0.0"), "needs --port"),
        (("up", "--port", "99999"), "less than or equal to 65535"),
        (("sumbit",), "submit"),
    )
    for words, told in refused:
        code, out, err = still(*words)
        assert (code, out, told in err) == (2, "", True), (words, err)
    code, out, _ = still("show", "job-none", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "unknown_job")


def test_older_spellings_of_options_and_commands_work(seen: Command) -> None:
    options = ("--gpu", "0", "--cpu", "2", "--ram", "2GB", "--artefact", "out")
    code, out, err = seen("submit", *options, "--artefact-files", "7", "--", "true")
    assert code == 0, err
    found = json.loads(seen("show", out.strip(), "--json")[1])
    assert (found["resources"]["cpus"], found["resources"]["ram_mb"]) == (2, 2000)
    assert found["request"]["artefacts"] == ["out"]
    assert seen("cancel", out.strip())[0] == seen("retry", out.strip())[0] == seen("jobs")[0] == 0
    assert seen("prune", "--older-than", "0s")[0] == 0
    shown = (seen("submit", "--help")[1] + seen("--help")[1]).split()
    assert not {"--cpu", "--ram", "--artefact", "cancel", "retry", "prune"} & {*shown}
