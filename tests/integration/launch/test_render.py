"""`groupwise launch render` as a user types it."""

import pytest
from ruamel.yaml import YAML

from tests.integration.launch.person import Person

pytestmark = pytest.mark.launch


def test_a_manifest_is_printed_and_no_value_of_a_secret(person: Person) -> None:
    canary = "canary-51c7de"
    (person.project / "keys.env").write_text(f"TOKEN={canary}\n")
    words = (
        "--image",
        "me/groupwise:1",
        "--gpus",
        "8",
        "--machines",
        "2",
        "--env-file",
        "keys.env",
        "--env",
        "MODE=a b",
    )
    of_job = ("rl", "--config", "C.yaml", "a 'b'\n", "--x")
    typed = person.types("render", *words, "--name", "sums", "--", *of_job)
    _, job = YAML(typ="safe").load_all(typed.out)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-6:] == ["groupwise", *of_job]
    assert (
        "kubectl create secret generic sums-env --from-env-file=keys.env --from-literal='MODE=a b'"
        in typed.err
    )
    assert {"TOKEN", "MODE"} <= {each["name"] for each in container["env"]}
    assert canary not in typed.out + typed.err
    for engine, key in (("skypilot", "secrets"), ("dstack", "env")):
        own = ("--format", engine, "--gpu-model", "H100", "--spot", *words)
        typed = person.types("render", *own, "--name", "sums", "--", *of_job)
        task = YAML(typ="safe").load(typed.out)
        assert (set(task[key]), task["name"]) == ({"TOKEN", "MODE"}, "sums")
        assert typed.out.startswith("# ")
        assert canary not in typed.out + typed.err
        assert "--secret s" in person.types("render", *own, "--secret", "s", "--", "rl", code=2).err
    typed = person.types("render", *words, "--", "rl", f"--config={canary}", code=2)
    assert "value of TOKEN" in typed.err
    assert canary not in typed.err
