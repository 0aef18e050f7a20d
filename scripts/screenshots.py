"""`make screenshots`: pictures of the dashboard for README and docs, in docs/images/dashboard-*.png.

They show two runs of configs/quickstart.yaml, which are trained first if the folder does not have them, or other runs that you name.
Those of a fleet and of a training server are taken only of one that you name (`ARGS="--fleet F --job J --server URL"`). The browser is
Debian's Chromium.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import FloatRect, Page, ViewportSize, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
QUICKSTART = IMAGES.parents[1] / "configs" / "quickstart.yaml"
TASK = IMAGES.parents[1] / "examples" / "01_first_task" / "task.py"
DESK: ViewportSize = {"width": 1180, "height": 820}
PHONE: ViewportSize = {"width": 390, "height": 760}
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@contextmanager
def dashboard(runs: Path, *words: str) -> Generator[str]:
    """Its address."""
    environment = {name: value for name, value in os.environ.items() if name != "GROUPWISE_API_KEY"}
    command = [sys.executable, "-m", "groupwise", "web", "--port", "0", "--dir", str(runs), *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as served:
        try:
            assert served.stdout is not None
            found = next(filter(None, map(ADDRESS.search, served.stdout)))
            yield found[0]
        finally:
            served.terminate()


class Album:
    """Takes pictures of pages."""

    def __init__(self, page: Page, address: str) -> None:
        self._page, self._address = page, address

    def take(self, name: str, path: str, *, click: str = "", below: str = "") -> None:
        """`click`: what is chosen before, by its label. `below`: the picture begins at this element."""
        page = self._page
        page.goto(self._address + path)
        page.wait_for_load_state("load")
        if click:
            page.get_by_label(click).check()
        if below:
            page.locator(below).first.evaluate("each => each.scrollIntoView()")
        page.wait_for_timeout(800)  # plots are drawn as they come into sight
        size = page.viewport_size or DESK
        end = page.locator("main").evaluate("main => main.getBoundingClientRect().bottom")
        height = min(size["height"], end)
        clip: FloatRect = {"x": 0, "y": 0, "width": size["width"], "height": height}
        page.screenshot(path=IMAGES / f"dashboard-{name}.png", clip=clip)
        print(f"docs/images/dashboard-{name}.png  {path}")


def of_runs(album: Album, run: str, other: str, group: int) -> None:
    """The list, a run, its rollouts, and two runs beside each other."""
    album.take("runs", "/runs")
    album.take("run", f"/runs/{quote(run)}")
    album.take("rollouts", f"/runs/{quote(run)}/rollouts?text=is&order=best")
    album.take("group", f"/runs/{quote(run)}/groups/{group}")
    album.take("tokens", f"/runs/{quote(run)}/rollouts/{group}.3", click="log-probability")
    album.take("compare", f"/compare?run={quote(run)}&run={quote(other)}")
    album.take("answers", f"/rollouts/compare?a={quote(other)}&b={quote(run)}")
    album.take("evaluations", "/evaluations")
    album.take("evaluation", f"/evaluations/compare?a={quote(other)}&b={quote(run)}")


def train_missing(runs: Path, *names: str) -> None:
    """Train the quickstart under each of these names that has no folder, each with a seed of its own."""
    for seed, name in enumerate(names):
        if not (runs / name).exists():
            command = [sys.executable, "-m", "groupwise", "rl", "--config", QUICKSTART]
            values = (f"run.dir={runs}", f"run.name={name}", f"training.seed={seed}")
            subprocess.run([*command, "--task-module", TASK, *values], check=True)


def group_with_signal(run: Path) -> int:
    """The newest group of which about half the rollouts are good."""
    order = "ORDER BY abs(advantage - 0.5), step DESC LIMIT 1"
    with closing(sqlite3.connect(run / "run.db")) as record:
        return record.execute(f"SELECT draw + 1 FROM rollouts {order}").fetchone()[0]


def key_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Headers with the key of a training server, where it has one."""
    key = environment.get("GROUPWISE_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def main() -> None:
    """Take all pictures for which there is something to show."""
    parser = argparse.ArgumentParser(description="Take pictures of the dashboard.")
    parser.add_argument("--runs", type=Path, default=Path("build/screenshots"))
    parser.add_argument("--run", default="quickstart")
    parser.add_argument("--other", default="quickstart-2", help="the run to compare with")
    parser.add_argument("--fleet", help="folder or address")
    parser.add_argument("--job", help="of the fleet")
    parser.add_argument(
        "--server", help="address of a training server; its key in GROUPWISE_API_KEY"
    )
    given = parser.parse_args()
    train_missing(given.runs, given.run, given.other)
    beside = ("--fleet", given.fleet) if given.fleet else ()
    with dashboard(given.runs, *beside) as address, sync_playwright() as player:
        browser = player.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        desk = Album(browser.new_page(viewport=DESK), address)
        of_runs(desk, given.run, given.other, group_with_signal(given.runs / given.run))
        if given.fleet:
            desk.take("fleet", "/fleet")
            desk.take("job", f"/fleet/jobs/{quote(given.job)}")
        if given.server:
            of_server = browser.new_page(viewport=DESK, extra_http_headers=key_of(os.environ))
            Album(of_server, f"{given.server}/dashboard").take("server", "/server")
        dark = browser.new_page(viewport=PHONE, color_scheme="dark", device_scale_factor=2)
        Album(dark, address).take("phone", f"/runs/{quote(given.run)}")
        browser.close()


if __name__ == "__main__":
    main()
