"""Run a notebook from start to end and write it as a page with all that it shows: `python scripts/render_notebook.py quickstart`.

The page stands in docs/notebooks; it is made anew when a notebook or what it shows changes. It needs nothing from elsewhere: what is shown
is HTML and pictures, so the scripts that nbconvert would load (widgets, formulas, diagrams) have nothing to do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

ROOT = Path(__file__).parents[1]
TEMPLATE = """\
{%- extends "index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
"""
"""nbconvert's own, without the blocks that load scripts."""


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


def page(notebook: Any, name: str) -> str:
    """An executed notebook as a page that stands alone."""
    exporter = HTMLExporter(template_name="classic", raw_template=TEMPLATE)
    text, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    return text


if __name__ == "__main__":
    main()
