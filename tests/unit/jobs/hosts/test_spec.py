"""What a job may specify: a list of arguments, variables that do not affect the machine, and paths within its folder."""

import json

import pytest

from groupwise.jobs.hosts.spec import (
    LONGEST_ARGUMENT,
    MAX_ARGUMENTS,
    FileEntry,
    JobSpec,
    Limits,
    as_json,
    from_json,
    problems,
    spec_hash,
)

RIGHT = JobSpec(
    ("python", "train.py", "--name", "a b;c"),
    environment={"SEED": "1", "WANDB_MODE": "offline"},
    files={"train.py": FileEntry("0" * 64, 0o644, 3)},
    secrets=("HF_TOKEN",),
    checkpoints=("outputs/checkpoints",),
    limits=Limits(time_seconds=60.0),
)


RESERVED = [
    "PATH", "HOME", "SHELL", "BASH_ENV", "PYTHONPATH", "PYTHONSTARTUP", "PERL5OPT", "NODE_OPTIONS",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "BASH_FUNC_ls%%", "GIT_SSH_COMMAND",
    "SSH_AUTH_SOCK", "GROUPWISE_ATTEMPT", "GROUPWISE_RUNNER_FOLDER", "CUDA_VISIBLE_DEVICES",
    "RESUME_FROM", "ATTEMPT", "MASTER_ADDR", "LUA_INIT", "LUA_INIT_5_4", "LUA_CPATH", "PERL5DB",
    "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH", "PYTHON_PRESITE", "GEM_PATH", "R_PROFILE_USER",
    "JULIA_LOAD_PATH", "DOTNET_STARTUP_HOOKS", "NVTX_INJECTION64_PATH", "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE", "UCX_MODULE_DIR", "GROUPWISE_OUTPUT",
    "GROUPWISE_RENDEZVOUS",
]  # fmt: skip


@pytest.mark.parametrize("name", RESERVED)
def test_variables_that_are_not_for_jobs_to_set(name: str) -> None:
    (plain,) = problems(JobSpec(("true",), environment={name: "x"}))
    (secret,) = problems(JobSpec(("true",), secrets=(name,)))
    assert plain.removeprefix("environment ") == secret.removeprefix("secret ")
    assert name in plain


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b"])
def test_paths_that_leave_the_folder(path: str) -> None:
    for where in ("files", "artefacts", "checkpoints"):
        given = {path: ["0" * 64, 0o644, 3]} if where == "files" else [path]
        (problem,) = problems(from_json(as_json(JobSpec(("true",))) | {where: given}))
        assert "relative to the" in problem


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        *[
            (JobSpec(("true",), environment={name: "x"}), "is not a name")
            for name in ("", "1ST", "A B", "A=B", "A\0", "Ä", "a-b", "A" * 129)
        ],
        (JobSpec(()), "no command"),
        (JobSpec(("",)), "no command"),
        (JobSpec(("echo", "a\0b")), "argument 1"),
        (JobSpec(("echo",) * (MAX_ARGUMENTS + 1)), "at most"),
        (JobSpec(("echo", "x" * (LONGEST_ARGUMENT + 1))), "a file"),
        (JobSpec(("true",), environment={"A": "a\0b"}), "NUL"),
        (JobSpec(("true",), environment={"A": "x" * LONGEST_ARGUMENT}), "its value into a file"),
        (JobSpec(("echo", *["x" * 100_000] * 30)), "3,000,004 bytes"),
        (JobSpec(("python train.py --lr 1",)), "`-- python train.py --lr 1`"),
        (JobSpec(("echo $USER; it's 1",)), """`-- sh -c 'echo $USER; it'"'"'s 1'`"""),
        (JobSpec(("my run.sh",), files={"my run.sh": FileEntry("0" * 64, 0o755, 3)}), "apart"),
        (JobSpec(("./run.sh",)), "--file run.sh"),
        (JobSpec(("bin/run", "a"), files={"run": FileEntry("0" * 64, 0o755, 3)}), "--file bin/run"),
        (JobSpec(("./run.sh",), files={"run.sh": FileEntry("0" * 64, 0o644, 3)}), "chmod +x"),
        (JobSpec(("true",), environment={"A": "1"}, secrets=("A",)), "one of the two"),
    ],
)
def test_invalid_job_specs_have_one_problem_each(spec: JobSpec, word: str) -> None:
    (problem,) = problems(spec)
    assert word in problem


def test_a_valid_spec_has_no_problems_and_keeps_its_hash_through_json() -> None:
    assert problems(RIGHT) == []
    again = from_json(json.loads(json.dumps(as_json(RIGHT))))
    assert (again, spec_hash(again)) == (RIGHT, spec_hash(RIGHT))
    other = from_json(as_json(RIGHT) | {"arguments": ["python"]})
    assert spec_hash(other) != spec_hash(RIGHT)


def test_programs_that_only_the_machine_knows() -> None:
    script = {"my run.sh": FileEntry("0" * 64, 0o755, 3)}
    for arguments in (
        ("/opt/run",),
        ("../x/run",),
        ("nvidia-smi",),
        ("./my run.sh",),
    ):
        assert problems(JobSpec(arguments, files=script)) == []
