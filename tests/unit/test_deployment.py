"""The files in deploy/: images, compose files, the systemd unit, the proxy.

1. The Containerfile: a user who is not root, nothing copied that is not there or not needed, no secret.
2. Every setting that a file gives is one, and has room for what it promises: state in the volume, time for a clean end.
3. systemd accepts the units, that of the server and that of the fleet.
4. The image's command runs with the image's environment, as a user who owns nothing but the volume; its health check passes as
   long as it does, and fails afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ruamel.yaml import YAML

from groupwise.api.schemas.keys import Role, new_key
from groupwise.api.schemas.training import MAX_WAIT
from groupwise.core.errors import UsageError
from groupwise.server.settings import ENVIRONMENT, ServerConfig, read_settings
from tests.processes import TIMEOUT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
STATE = "/var/lib/groupwise"
PREFIX = "/opt/groupwise"
NOBODY = 65534


# Reading


@dataclass
class Stage:
    """A part of a Containerfile: what it begins with, and its instructions."""

    image: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def all(self, word: str) -> list[str]:
        return [rest for given, rest in self.instructions if given == word]

    def one(self, word: str) -> str:
        (found,) = self.all(word)
        return found

    def environment(self) -> dict[str, str]:
        pairs = [pair for line in self.all("ENV") for pair in shlex.split(line)]
        return dict(pair.split("=", 1) for pair in pairs)


def stages() -> dict[str, Stage]:
    text = (DEPLOY / "Containerfile").read_text()
    plain = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, plain.splitlines())):
        word, rest = line.split(None, 1)
        if word == "FROM":
            image, _, name = rest.split()
            found[name] = Stage(image, name)
        elif found:
            list(found.values())[-1].instructions.append((word, " ".join(rest.split())))
    return found


SHIPPED = ("server", "client")
STAGES = stages()


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return YAML(typ="safe").load(DEPLOY / name)


def unit(name: str = "groupwise-serve.service") -> dict[str, list[str]]:
    """The keys of a unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def settings(environment: Mapping[str, str]) -> ServerConfig:
    return read_settings(None, environment, {}, ())


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# The Containerfile


def test_images_run_as_a_numbered_user_who_is_not_root_and_hold_no_secret() -> None:
    secret = re.compile(r"(?i)(api_key|token|secret|password|credential|key_file)\b")
    for name in SHIPPED:
        words = [word for word, _ in STAGES[name].instructions]
        user, _, group = STAGES[name].one("USER").partition(":")
        assert (int(user) > 0, int(group) > 0) == (True, True)
        assert "RUN" not in words[words.index("USER") :]
    for stage in STAGES.values():
        layers = [line for word in ("ARG", "ENV", "LABEL") for line in stage.all(word)]
        assert not [line for line in layers if secret.search(line)]
        assert not [line for line in stage.all("COPY") if re.search(r"keys|\.pem|\.env", line)]


def test_files_that_the_image_copies_exist_and_are_not_ignored() -> None:
    lines = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert next(line for line in lines if not line.startswith(("#", "!"))) == "*"
    assert not any(fnmatch("deploy/keys", each) for each in kept)
    copied: list[str] = []
    for stage in STAGES.values():
        assert not stage.all("ADD")
        for line in stage.all("COPY"):
            first, *sources, _ = line.split()
            if first.startswith("--from="):
                assert first.removeprefix("--from=") in STAGES
            else:
                copied += [first, *sources]
    assert set(copied) <= set(kept)
    assert all((ROOT / each).exists() for each in (*kept, *copied))


def _health_check() -> list[str]:
    _, _, command = STAGES["server"].one("HEALTHCHECK").partition("CMD ")
    return json.loads(command)


def test_the_settings_of_the_image_keep_everything_in_the_volume() -> None:
    stage = STAGES["server"]
    environment = stage.environment()
    config = settings(environment)
    assert stage.one("VOLUME") == stage.one("WORKDIR") == STATE
    for place in (
        config.output_dir,
        config.model_dir,
        *(environment[name] for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")),
    ):
        assert Path(place).is_relative_to(STATE)
    assert int(stage.one("EXPOSE")) == config.port


# The compose files


def test_the_server_in_compose() -> None:
    server, image = compose()["services"]["server"], STAGES["server"]
    config = settings({**image.environment(), **server["environment"]})
    assert config.key_file == f"/run/secrets/{server['secrets'][0]}"
    assert seconds(server["stop_grace_period"]) > config.shutdown_seconds
    assert server["volumes"] == [f"state:{STATE}"]
    assert server["healthcheck"]["test"] == ["CMD", *_health_check()]
    options = dict(re.findall(r"--([\w-]+)=(\S+)", image.one("HEALTHCHECK")))
    same = ("interval", "timeout", "start-period", "retries")
    assert [options[key] for key in same] == [
        str(server["healthcheck"][key.replace("-", "_")]) for key in same
    ]
    [port] = server["ports"]
    assert port == f"127.0.0.1:{config.port}:{config.port}"


def test_services_have_no_more_rights_than_they_need_and_no_key() -> None:
    file = compose()
    for service in file["services"].values():
        rights = {name: service.get(name) for name in ("read_only", "cap_drop", "security_opt")}
        assert rights == {
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
        }
        assert not {"privileged", "user"} & service.keys()
    assert file["services"]["task"]["environment"]["GROUPWISE_API_KEY"] == "${GROUPWISE_API_KEY:-}"
    assert file["secrets"]["groupwise_keys"] == {"file": "${GROUPWISE_KEYS:-./keys}"}
    assert "keys" in (DEPLOY / ".gitignore").read_text().splitlines()


# The unit of systemd


def test_the_unit_gives_settings_that_there_are() -> None:
    folders = {"%S": "/var/lib", "%C": "/var/cache", "%d": "/run/credentials"}
    given = dict(line.split("=", 1) for line in unit()["Environment"])
    config = settings({name: folders.get(v[:2], v[:2]) + v[2:] for name, v in given.items()})
    for place in (config.output_dir, config.model_dir):
        assert Path(place).is_relative_to(STATE)
    [credential] = unit()["LoadCredential"]
    assert config.key_file == f"/run/credentials/{credential.partition(':')[0]}"
    assert unit()["StateDirectory"] == ["groupwise"]
    assert seconds(unit()["TimeoutStopSec"][0]) > config.shutdown_seconds
    assert not any("API_KEY" in name for name in given)


@pytest.mark.parametrize("name", ["groupwise-serve.service", "groupwise-fleet@.service"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    """With a program that exists here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze, which comes with systemd")
    text = (DEPLOY / name).read_text()
    assert f"RestartPreventExitStatus={UsageError.exit_code}" in text
    place = tmp_path / name
    place.write_text(text.replace(f"{PREFIX}/bin/groupwise", sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", str(place)], capture_output=True, text=True, check=False
    )
    about_it = [line for line in found.stderr.splitlines() if name.partition(".")[0] in line]
    assert (about_it, found.returncode) == ([], 0)


def test_jobs_of_this_machine_outlive_a_restart_and_reach_its_gpus() -> None:
    """A private /tmp is removed when its service ends. Before systemd 253 `ProtectClock` allows only the clock."""
    fleet = unit("groupwise-fleet@.service")
    assert fleet["KillMode"] == ["process"]
    limits = {"PrivateTmp", "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    assert not limits & fleet.keys()
    assert fleet["CapabilityBoundingSet"] == [""], "nobody there can set the clock"


# The proxy


def test_the_proxy_lets_through_what_the_server_takes() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    found = dict(re.findall(r"^\s+(\w+)\s+([^;{]+);", text, re.MULTILINE))
    config = settings({f"{ENVIRONMENT}OUTPUT_DIR": "served"})
    assert found["client_max_body_size"] == f"{config.max_body_bytes >> 20}m"
    longest = max(MAX_WAIT, config.sampling_time_limit, config.start_time_limit)
    assert seconds(found["proxy_read_timeout"]) > longest
    assert found["proxy_buffering"] == "off"
    assert found["proxy_pass"] == f"http://{config.host}:{config.port}"


# The command of the image, outside a container


def as_nobody() -> list[str]:
    """Words before a command that make it run as a user who owns nothing, where that is possible here."""
    words = [
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--no-new-privs",
    ]
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        return []
    tried = subprocess.run(
        [*words, sys.executable, "-c", "import groupwise"],
        cwd="/",
        capture_output=True,
        check=False,
    )
    return words if tried.returncode == 0 else []


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder of that user. Not below pytest's own, which only its owner may enter."""
    with tempfile.TemporaryDirectory(prefix="volume-") as name:
        place = Path(name)
        if as_nobody():
            os.chown(place, NOBODY, NOBODY)
        yield place


def outside(words: list[str]) -> list[str]:
    """A command of the image with the program and the files of this checkout."""
    here = {
        f"{PREFIX}/bin/python": sys.executable,
        f"{PREFIX}/bin/groupwise": str(Path(sys.executable).with_name("groupwise")),
        f"{PREFIX}/share/healthcheck.py": str(DEPLOY / "healthcheck.py"),
    }
    return [*as_nobody(), *(here.get(word, word) for word in words)]


@contextmanager
def begun(
    environment: Mapping[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The image's command, and the URL that it prints."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            outside(json.loads(STAGES["server"].one("ENTRYPOINT"))),
            env=dict(environment),
            cwd=environment["HOME"],
            stderr=out,
        )
    try:

        def urls() -> list[str]:
            assert process.poll() is None, log.read_text()
            return re.findall(r"https?://127\.0\.0\.1:\d+", log.read_text())

        yield process, wait_until(urls, "the URL", details=log.read_text)[0]
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


@pytest.mark.soak(suite="server")
def test_the_command_of_the_image_serves_and_its_health_check_sees_it(
    volume: Path, tmp_path: Path
) -> None:
    made = new_key(Role.ADMIN)
    keys = volume / "keys"
    keys.write_text(made.line + "\n")
    keys.chmod(0o444)
    environment = {
        name: value.replace(STATE, str(volume))
        .replace(f"{PREFIX}/bin", "/usr/bin")
        .replace("$PATH", "/bin")
        for name, value in STAGES["server"].environment().items()
    }
    given = compose()["services"]["server"]["environment"]
    environment |= {**given, f"{ENVIRONMENT}KEY_FILE": str(keys), f"{ENVIRONMENT}PORT": "0"}
    with begun(environment, tmp_path / "log") as (process, url):
        environment[f"{ENVIRONMENT}PORT"] = url.rpartition(":")[2]
        checked = subprocess.run(outside(_health_check()), env=environment, check=False)
        assert checked.returncode == 0
        refused = httpx2.get(f"{url}/status")
        answer = httpx2.get(f"{url}/status", headers={"Authorization": f"Bearer {made.key}"})
        assert (refused.status_code, answer.json()["phase"]) == (401, "idle")
        if as_nobody():
            owner = (volume / "output/server.db").stat()
            assert (owner.st_uid, owner.st_gid) == (NOBODY, NOBODY)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    gone = subprocess.run(
        outside(_health_check()), env=environment, capture_output=True, text=True, check=False
    )
    assert gone.returncode == 1
    assert "/healthz" in gone.stderr
    for line in (tmp_path / "log").read_text().splitlines():
        assert line.startswith(("{", "Groupwise serves", "  "))
