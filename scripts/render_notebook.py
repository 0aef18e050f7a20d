"""Run a notebook from start to end and write it as a page with all that it shows: `python scripts/render_notebook.py quickstart`.

The page stands in docs/notebooks; it is made anew when a notebook or what it shows changes.
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


def main() -> None:
    """Render the notebook that is named."""
    name = sys.argv[1]
    formats: Any = nbformat
    notebook: Any = formats.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=3600, resources=resources).execute()
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(notebook)
    target = ROOT / "docs" / "notebooks" / f"{name}.html"
    target.parent.mkdir(exist_ok=True)
    target.write_text(page)
    print(f"{target.relative_to(ROOT)}: {len(page) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
