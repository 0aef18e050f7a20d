"""The pages that scripts/render_notebook.py makes of notebooks: as the notebooks are, and standing alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbconvert.filters import markdown2html

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/notebooks").glob("*.html"))
CELLS = ".input_area, .text_cell_render"
"""What the page has of a cell, but for its outputs."""
REMOTE_URL = re.compile(r"(?:https?:)?//", re.IGNORECASE)
OF_A_MACHINE = re.compile(r"(?<![\w+/.])/(?:tmp|root|home|work)\b")
"""The beginning of an absolute path; letters before it are those of a picture, or of a web address."""


def read(name: str) -> Any:
    formats: Any = nbformat
    return formats.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def squeezed(text: str) -> str:
    return "".join(text.replace("¶", "").split())


def visible_text(html: str) -> str:
    return squeezed(BeautifulSoup(html, "html.parser").get_text())


def loaded(page: str) -> list[str]:
    """What a browser would fetch from elsewhere to show it."""
    soup = BeautifulSoup(page, "html.parser")
    named = [tag.get(key) for key in ("src", "href") for tag in soup.select(f":not(a)[{key}]")]
    styles = re.findall(r"(?:@import|url\()\s*['\"]?([^'\")]*)", " ".join(texts(soup, "style")))
    imports = re.findall(r"['\"](.*?)['\"]", " ".join(texts(soup, "script")))
    return [each for each in map(str, [*named, *styles, *imports]) if REMOTE_URL.match(each)]


def texts(soup: BeautifulSoup, tag: str) -> list[str]:
    return [found.get_text() for found in soup.select(tag)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_cells_of_its_notebook(page: Path) -> None:
    expected = [
        visible_text(markdown2html(cell.source))
        if cell.cell_type == "markdown"
        else squeezed(cell.source)
        for cell in read(page.stem).cells
    ]
    soup = BeautifulSoup(page.read_text(), "html.parser")
    assert [squeezed(cell.get_text()) for cell in soup.select(CELLS)] == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_loads_nothing_and_names_no_folder_of_its_machine(page: Path) -> None:
    assert loaded(page.read_text()) == []
    assert OF_A_MACHINE.findall(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [str(a["href"]) for a in BeautifulSoup(page.read_text(), "html.parser").select("a")]
    files = [each for each in links if not each.startswith("#") and not REMOTE_URL.match(each)]
    assert [each for each in files if not (page.parent / each).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_light_so_that_a_dark_browser_shows_no_dark_charts(page: Path) -> None:
    styles = " ".join(texts(BeautifulSoup(page.read_text(), "html.parser"), "style"))
    assert ":root { color-scheme: light }" in styles
