from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from groupwise.core.settings.field_errors import FieldError, field_errors


class Limits(BaseModel):
    count: int | str | None = None
    sizes: list[int] = []


def refused(given: Any, kind: Any = Limits) -> list[FieldError]:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given, strict=True, extra="forbid")
    return field_errors(caught.value, kind, document_name="it")


def test_pydantics_labels_of_a_union_are_no_keys() -> None:
    [wrong] = refused({"count": 1.5})
    assert str(wrong) == "count: must be a whole number or text or null"
    assert wrong.given == 1.5


def test_items_unknown_keys_and_the_whole() -> None:
    assert [str(each) for each in refused({"sizes": [1, "2"], "size": 1})] == [
        "sizes.1: must be a whole number", "size: is not a field; did you mean sizes?"
    ]  # fmt: skip
    assert [str(each) for each in refused("x", int)] == ["it must be a whole number"]


def test_a_million_wrong_fields_do_not_make_a_large_answer() -> None:
    found = field_errors({"loc": (i,), "msg": "m" * 9999, "type": "x"} for i in range(10**6))
    assert len(found) == 50
    assert len(found[0].message) == 500
