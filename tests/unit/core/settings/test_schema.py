"""The schema as a list of keys."""

import json

from groupwise.core.settings.schema import leaves
from groupwise.core.settings.wording import key_rows
from tests.unit.core.settings.shapes import Root


def test_leaves_carry_path_kind_and_class() -> None:
    found = {(".".join(leaf.path), leaf.kind): leaf.on_resume for leaf in leaves(Root)}
    assert found["rate", ""] == "free"
    assert found["engine.slots", "Engine"] == "warn"
    assert found["shape.radius", "circle"] == "fixed"
    assert found["spare", ""] == "fixed"
    assert ("engine", "") not in found


def test_the_table_of_a_config_has_every_key() -> None:
    lines = list(key_rows(Root).values())
    told = r"| `rate` | a number (above 0, at most 1) | `1e-05` | Step size \| peak. | free |"
    assert told in lines
    assert any(
        line.startswith("| `shape.radius` |") and "Only for circle" in line for line in lines
    )
    assert len({line.split("|")[1] for line in lines}) == len(lines)


def test_json_schema_has_descriptions_and_resume_classes() -> None:
    schema = json.loads(json.dumps(Root.model_json_schema()))
    assert schema["properties"]["rate"]["description"] == "Step size | peak."
    assert schema["properties"]["rate"]["on_resume"] == "free"
    assert schema["additionalProperties"] is False
