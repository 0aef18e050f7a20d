"""The table of all keys."""

from groupwise.settings.documentation import document
from tests.unit.settings.shapes import Root


def test_document_tells_every_key() -> None:
    lines = document(Root).splitlines()
    assert lines[0] == "| key | value | default | meaning | on resume |"
    assert (
        "| `title` | text (of length at least 1) | `required` | What it is called. | fixed |"
        in lines
    )
    assert (
        r"| `rate` | a number (above 0, at most 1) | `1e-05` | Step size \| peak. | free |" in lines
    )
    assert "| `shape.type` | one of circle, square | `circle` | The shape. | fixed |" in lines
    assert (
        "| `shape.radius` | a number (above 0) | `1.0` | In metres. Only for circle. | fixed |"
        in lines
    )
    assert len({line.split("|")[1] for line in lines}) == len(lines)
