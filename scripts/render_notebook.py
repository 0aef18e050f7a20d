"""Run a notebook from start to end and write it as a page with all that it shows: `python scripts/render_notebook.py quickstart`.

The page stands in docs/notebooks; it is made anew when a notebook or what it shows changes. It needs nothing from elsewhere: what is shown
is HTML and pictures, so the scripts that nbconvert would load (widgets, formulas, diagrams) have nothing to do.

Of the quickstart, what stands below the cell that trains is drawn by Chromium for the docs as well (docs/images/notebook-training.png).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from nbclient import NotebookClient
from nbconvert import HTMLExporter

ROOT = Path(__file__).parents[1]
TEMPLATE = """\
{%- extends "index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_css -%}{{ super() }}<style>:root { color-scheme: light }</style>{%- endblock -%}
"""
"""nbconvert's own, without the blocks that load scripts. It is always light, so its charts must not be dark in a dark browser."""
TRAINING = "trainer_state = train_grpo("
"""In the cell of the quickstart whose output is drawn."""


def main() -> None:
    """Render the notebook that is named."""
    name = sys.argv[1]
    formats: Any = nbformat
    notebook: Any = formats.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=3600, resources=resources).execute()
    made = page(notebook, name)
    target = ROOT / "docs" / "notebooks" / f"{name}.html"
    target.parent.mkdir(exist_ok=True)
    target.write_text(made)
    print(f"{target.relative_to(ROOT)}: {len(made) / 1000:.0f} kB")
    if name == "quickstart":
        picture = ROOT / "docs" / "images" / "notebook-training.png"
        draw(output_of(made, TRAINING), picture, (1180, 700))


def page(notebook: Any, name: str) -> str:
    """An executed notebook as a page that stands alone."""
    exporter = HTMLExporter(template_name="classic", raw_template=TEMPLATE)
    text, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    return text.replace('href="../docs/', 'href="../')  # the page itself is in docs/notebooks/


def output_of(page: str, code: str) -> str:
    """The HTML of a page that stands below the cell with this code."""
    cells = BeautifulSoup(page, "html.parser").select(".code_cell")
    [cell] = [each for each in cells if code in each.select(".input_area")[0].get_text()]
    return "".join(each.decode_contents() for each in cell.select(".output_html"))


def draw(html: str, target: Path, size: tuple[int, int]) -> None:
    """A picture of it, as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder, "shown.html")
        shown.write_text(f'<meta charset="utf-8"><body style="margin: 16px">{html}</body>')
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}"]
        window = f"--window-size={size[0]},{size[1]}"
        command = ["chromium", *options, window, f"--screenshot={target}", shown.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
