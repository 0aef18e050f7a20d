"""`groupwise launch local` as a user types it: from the command to the results, with faults of the watcher and of the job."""

import json
import os
import shlex
import signal
from pathlib import Path

from tests.integration.launch.person import Person
from tests.integration.launch.stopping import WAITS, ctrl_c_ends_it
from tests.integration.toy_run import what_must_be_equal

TRAINS = (
    *("rl", "--task-module", "task.py", "model.name=tiny", "lora.r=4", "lora.alpha=8"),
    *("sampler.max_completion_length=6", "sampler.max_num_seqs=8", "training.prompts_per_step=2"),
    *("training.num_generations=4", "training.learning_rate=0.01", "training.seed=3"),
    # A long time limit, because Person.held_at makes the rewards of all trainings of a test wait.
    *("rewards.in_process=true", "rewards.time_limit=300", "run.name=toy"),
    *("run.save_steps=2", "run.threads=1"),
)
REPORT_PROGRAM = """\
import json, os, sys
os.makedirs("outputs")
with open("outputs/told.json", "w") as file:
    json.dump([sys.argv[1:], sorted(os.listdir("."))], file)
"""


def script(person: Person, text: str) -> None:
    (person.project / "job.py").write_text(text)


def test_a_launched_training_returns_its_record_and_resumes_bit_for_bit_after_a_kill(
    person: Person,
) -> None:
    hides_nothing = person.project / "queue.py"
    hides_nothing.write_text("raise RuntimeError('it hides none of Python')\n")
    words = (*TRAINS, "training.max_steps=4")
    typed = person.types("local", "--name", "whole", "--", *words)
    hides_nothing.unlink()
    assert "tried here: Task task" in typed.err
    assert "step 4/4" in typed.out
    assert "whole succeeded" in typed.err
    found = person.result("whole")
    assert (found["state"], found["exit_code"], found["attempt"]) == ("succeeded", 0, 1)
    [run] = found["runs"]
    assert (run["run"], run["folder"], run["summary"]["steps"]) == ("toy", "runs/toy", 4)
    assert (person.project / "launches" / ".gitignore").read_text() == "*\n"
    listed = person.types("list").out.splitlines()[1:]
    assert [line.split()[:3] for line in listed] == [["whole", "local", "succeeded"]]

    with person.held_at(3):
        watching = person.begins("local", "--name", "killed", "--no-preflight", "--", *words)
        person.sees("step 2/4")
        person.finds("groupwise-launch/attempts/killed.1/work/runs/toy/checkpoints/step-2")
        [pid] = pids_of("attempts/killed.1/work")
        os.kill(pid, signal.SIGKILL)
    assert watching.wait(240) == 128 + signal.SIGKILL
    assert person.result("killed")["state"] == "failed"
    typed = person.types("resume", "killed")
    assert "resuming from" in typed.out
    assert "resumed after 2 steps" in typed.out
    found = person.result("killed")
    assert (found["state"], found["attempt"]) == ("succeeded", 2)
    folders = [person.project / "launches" / each / "runs/toy" for each in ("whole", "killed")]
    whole, again = (what_must_be_equal(folder) for folder in folders)
    assert whole["files"]
    assert whole == again


def test_words_arrive_as_they_are_and_earlier_results_are_set_aside(person: Person) -> None:
    script(person, REPORT_PROGRAM)
    (person.project / ".env").write_text("TOKEN='canary'\n")
    odd = ["--flag", "", "a b", "it's", "$(touch x)", "two\nlines", "--", "-v", "é→"]
    words = ("local", "--name", "odd", "--env-file", ".env", "--script", "job.py")
    assert ".env is not sent: credentials" in person.types(*words, *odd).err
    told = (person.project / "launches/odd/outputs/told.json").read_text()
    arrived, here = json.loads(told)
    assert (arrived, ".env" in here) == (odd, False)
    person.types("remove", "odd")
    typed = person.types(*words[:-2], "--detach", *words[-2:])
    assert "launches/odd/earlier/job" in typed.err
    assert (person.project / "launches/odd/earlier/job/outputs/told.json").read_text() == told
    assert not (person.project / "launches/odd/outputs").exists()
    assert "not all here" in person.types("remove", "odd", code=2).err
    person.types("logs", "-f", "odd", "--to", "there")
    assert (person.project / "there/outputs/told.json").is_file()
    person.types("remove", "odd")
    assert person.types("list").out == ""


def test_ctrl_c_ends_it_in_order_and_fetches(person: Person) -> None:
    ctrl_c_ends_it(person, "local")


def test_a_job_survives_its_watcher_and_is_found_from_another_machine(person: Person) -> None:
    script(person, WAITS)
    watching = person.begins("local", "--name", "waits", "--script", "job.py")
    person.sees("it waits")
    watching.send_signal(signal.SIGKILL)
    watching.wait(240)
    other = Person(person.project, person.home, state="another")
    assert other.types("logs", "waits", code=2).err.startswith("groupwise: waits: no job")
    assert other.types("logs", "waits", "--at", "local").out == "it waits\n"
    other.types("stop", "waits", "--at", "local")
    typed = other.types("logs", "-f", "waits", "--at", "local", "--to", "there", code=130)
    assert "waits cancelled" in typed.err
    assert (person.project / "there/outputs/ended").is_file()


def pids_of(folder: str) -> list[int]:
    """Trainings that run in a folder of that name."""
    found: list[int] = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                inside = str((each / "cwd").readlink()).endswith(folder)
                words = (each / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if inside and b"rl" in words:
                found.append(int(each.name))
    return found


def test_a_wrong_command_and_a_dry_run_change_nothing(person: Person) -> None:
    words = ["rl", "--task-module", "task.py", "model.name=tiny", "training.max_stepz=3"]
    typed = person.types("local", "--name", "wrong", "--", *words, code=2)
    assert f"`groupwise {shlex.join(words)}` would fail" in typed.err
    assert "training.max_steps" in typed.err
    script(person, REPORT_PROGRAM)
    typed = person.types("local", "--dry-run", "--name", "planned", "--script", "job.py", "a b")
    assert "python job.py 'a b'" in typed.out
    for wrong in (
        ("local", "--name", "a b", "--script", "job.py"),
        ("fetch", "../evil", "--at", "local"),
    ):
        assert "not a name of a job" in person.types(*wrong, code=2).err
    person.types("fetch", "nobody", "--at", "local", code=1)
    assert person.types("list").out == ""
    assert not (person.project / "launches").exists()
    assert not list((person.home / "groupwise-launch").glob("attempts/*"))


def test_a_project_that_stands_elsewhere_is_named_and_so_are_files_of_it(person: Person) -> None:
    elsewhere = person.project.parent / "elsewhere"
    for name in ("job.py", "data/x.bin", "data/y.bin", "big.ckpt"):
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(name)
    (elsewhere / ".gitignore").write_text("data\n")
    words = ("local", "--dry-run", "--json", "--project-dir", "../elsewhere")
    sent = ("--file", "../elsewhere/data/x.bin", "--exclude", "*.ckpt", "--script", "job.py")
    planned = json.loads(person.types(*words, *sent).out)["project"]
    assert (planned["files"], [*planned["left_out"]]) == (3, ["big.ckpt"])
    script(person, REPORT_PROGRAM)
    for wrong, told in (
        ((*words, "--file", "job.py", "--script", "job.py"), "outside of the project"),
        ((*words, "--script", "other.py"), "no such file in"),
        (("local", "--project-dir", "nowhere", "--", "rl"), "is not a folder"),
    ):
        assert told in person.types(*wrong, code=2).err


def test_one_name_is_one_job_however_often_it_is_submitted(person: Person) -> None:
    script(person, "print('once', flush=True); raise SystemExit(7)")
    words = ("local", "--name", "one", "--detach", "--script", "job.py")
    typists = [person.begins(*words) for _ in range(2)]
    assert [each.wait(240) for each in typists] == [0, 0]
    assert person.types("logs", "-f", "one", code=7).out == "once\n"
    typed = person.types("local", "--name", "one", "--json", "--script", "job.py", code=7)
    found = json.loads(typed.out)
    assert (found["state"], found["failure"], found["exit_code"]) == ("failed", "crashed", 7)
    assert "one was there already" in typed.err
    assert "launch resume one" in typed.err
    script(person, "print('other')")
    assert "another job" in person.types(*words, code=1).err
    person.types("remove", "one")
    typed = person.types(*words)
    assert typed.out == "one\n"
    assert "was there already" not in typed.err
