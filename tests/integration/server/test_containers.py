"""The images of deploy/, built and run for real, without a registry, docker or a daemon: by buildah, with chroot's isolation.

The base image that the Containerfile names is made of Debian's packages by debootstrap, under the name that the Containerfile gives it.
Inside, the server runs as the image's user, from a read-only file system but for its volume, `/tmp` and `/dev/shm`. The proxy's
configuration is read by nginx itself. About fifteen minutes, nearly all of them the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from groupwise.api.schemas.keys import Role, new_key
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import require_programs, root_needed

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
STATE = "/var/lib/groupwise"
USER = 10001
DEBIAN = "http://deb.debian.org/debian"
TRUSTED = Path("/etc/ssl/certs/ca-certificates.crt")
pytestmark = [pytest.mark.soak(suite="containers"), pytest.mark.timeout(3000)]


@dataclass(frozen=True)
class Builder:
    """buildah with a store of its own, which goes with its folder."""

    folder: Path

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["buildah", *words],
            env=self.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """A builder whose store holds the base image."""
    require_programs(
        *("buildah", "debootstrap", "fuse-overlayfs"),
        install="buildah debootstrap fuse-overlayfs",
    )
    root_needed()
    folder = tmp_path_factory.mktemp("containers")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/store"\n'
        '[storage.options.overlay]\nmount_program = "/usr/bin/fuse-overlayfs"\n'
    )
    made = Builder(folder)
    base = folder / "base"
    packages = "python3,python3-venv,python3-dev,python-is-python3,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", base, DEBIAN],
        capture_output=True,
        check=True,
    )
    shutil.copy(TRUSTED, base / TRUSTED.relative_to("/"))  # authorities of this machine's proxy
    container = made.run("from", "scratch").stdout.strip()
    made.run("add", "-q", container, str(base), "/")
    made.run("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    made.run("commit", "-q", "--rm", container, _base_image())
    shutil.rmtree(base)
    yield made
    made.run("rm", "--all")
    made.run("rmi", "--all", "--force")


def _base_image() -> str:
    text = (DEPLOY / "Containerfile").read_text()
    [version] = re.findall(r"^ARG PYTHON=(\S+)", text, re.MULTILINE)
    return f"docker.io/library/python:{version}"


@pytest.fixture(scope="module")
def images(builder: Builder) -> Builder:
    """The images `server` and `client`, as the Containerfile's first lines build them."""
    wheels = builder.folder / "wheels"
    [torch] = re.findall(r"TORCH_VERSION=(\S+)", (DEPLOY / "Containerfile").read_text())
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"torch=={torch}"),
            *("--dest", wheels),
        ],
        check=True,
    )
    for target in ("server", "client"):
        builder.run(
            *("build", "-f", "deploy/Containerfile", "--target", target, "--layers"),
            *("--ignorefile", "deploy/Containerfile.dockerignore", "-t", f"groupwise-{target}"),
            *("--build-arg", "TORCH_INDEX=https://pypi.org/simple"),
            *("--env", "PIP_FIND_LINKS=/wheels", "--volume", f"{wheels}:/wheels:ro", "."),
        )
    return builder


@contextmanager
def running(
    images: Builder, image: str, words: list[str], log: Path, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a new container of the image. It is killed with all its processes at the end of the context.

    The container stays until the store goes.
    """
    container = images.run("from", image).stdout.strip()
    # The image's own volume would be mounted at the same path, before ours or after it.
    images.run("config", "--volume", f"{STATE}-", container, check=False)
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["buildah", "run", *options, container, "--", *words],
            env=images.environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)


def entrypoint(images: Builder, image: str) -> list[str]:
    """What the image runs without further words."""
    config = json.loads(images.run("inspect", "--type", "image", image).stdout)["OCIv1"]["config"]
    return [*config["Entrypoint"], *config.get("Cmd", [])]


def server_process() -> int:
    """Id of the server inside the container: the first Python process of the image's user."""
    processes: dict[int, tuple[int, bytes]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == USER:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                program = (folder / "cmdline").read_bytes().partition(b"\0")[0]
                processes[int(folder.name)] = (parent, program)
        except (FileNotFoundError, ProcessLookupError):
            continue
    python = {pid for pid, (_, program) in processes.items() if program.endswith(b"python")}
    [first] = [pid for pid in python if processes[pid][0] not in python]
    return first


def test_the_image_trains_stops_cleanly_and_continues_with_the_same_volume(
    images: Builder, tmp_path: Path
) -> None:
    state, keys = tmp_path / "state", tmp_path / "keys"
    state.mkdir()
    os.chown(state, USER, USER)
    made = new_key(Role.ADMIN)
    keys.write_text(made.line + "\n")
    for folder in (tmp_path, *tmp_path.parents[:3]):  # the container's user has to reach the volume
        folder.chmod(folder.stat().st_mode | 0o011)
    options = (
        *("--volume", f"{state}:{STATE}", "--volume", f"{keys}:/run/secrets/groupwise_keys:ro"),
        *("--env", "GROUPWISE_SERVE_KEY_FILE=/run/secrets/groupwise_keys"),
        *("--env", "GROUPWISE_SERVE_HOST=127.0.0.1", "--env", "GROUPWISE_SERVE_PORT=0"),
    )
    steps = 0
    for attempt in range(2):
        log = tmp_path / f"server-{attempt}.log"
        words = entrypoint(images, "groupwise-server")
        with running(images, "groupwise-server", words, log, *options) as server:
            url = _url(server, log)
            client = tmp_path / f"client-{attempt}.log"
            with running(
                *(images, "groupwise-client", _three_steps(), client),
                *("--env", f"GROUPWISE_URL={url}", "--env", f"GROUPWISE_API_KEY={made.key}"),
            ) as task:
                assert task.wait(TIMEOUT_S * 4) == 0, client.read_text() + log.read_text()
            headers = {"Authorization": f"Bearer {made.key}"}
            status = httpx2.get(f"{url}/status", headers=headers).json()
            assert (status["phase"], status["step"]) == ("running", steps + 3), status
            steps = status["step"]
            os.kill(server_process(), signal.SIGTERM)
            assert server.wait(TIMEOUT_S) == 0, log.read_text()
    owners = {path.stat().st_uid for path in state.rglob("*")}
    assert owners == {USER}


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that the server prints once it listens."""

    def urls() -> list[str]:
        assert server.poll() is None, log.read_text()
        return re.findall(r"https?://127\.0\.0\.1:\d+", log.read_text())

    return wait_until(urls, "the server's URL", details=log.read_text)[0]


def _three_steps() -> list[str]:
    """A client that trains three steps, of a run that it starts unless there is one."""
    program = (
        "from groupwise.api.client import TrainingClient, train\n"
        "def reward(completions, **_): return [len(set(text)) for text in completions]\n"
        "with TrainingClient() as client:\n"
        "    if client.status().phase == 'idle':\n"
        "        client.start(max_completion_length=8, groups_per_step=2, max_steps=100)\n"
        "    train(client, [{'prompt': 'a'}], reward, steps=3, progress=False)\n"
    )
    return ["/opt/groupwise/bin/python", "-c", program]


def test_nginx_accepts_the_proxy_configuration(tmp_path: Path) -> None:
    nginx = require_programs("nginx", "openssl", install="nginx-light openssl")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=training.example"),
            *("-out", certificate, "-keyout", key),
        ],
        capture_output=True,
        check=True,
    )
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"(ssl_certificate) .*;", rf"\1 {certificate};", text)
    text = re.sub(r"(ssl_certificate_key) .*;", rf"\1 {key};", text)
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{text}}}\n")
    done = subprocess.run(
        [nginx, "-t", "-c", whole, "-e", tmp_path / "errors"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "warn" in line]) == (
        0,
        [],
    ), done.stderr
