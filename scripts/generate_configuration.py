"""Generate the pages on configuration and commands, and the JSON schemas: `.venv/bin/python scripts/generate_configuration.py`."""

from pathlib import Path

from groupwise.cli import main
from groupwise.training import config, sft_config

DOCS = Path(__file__).resolve().parent.parent / "docs"

if __name__ == "__main__":
    schemas = {
        "schemas/rl.json": config.json_schema(),
        "schemas/sft.json": sft_config.sft_schema(),
    }
    pages = {**config.documentation(), **sft_config.documentation(), **main.documentation()}
    for name, text in {**pages, **schemas}.items():
        (DOCS / name).write_text(text, encoding="utf-8")
