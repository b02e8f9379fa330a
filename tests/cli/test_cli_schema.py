"""The JSON Schemas that editors read: every field is described, with what it may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.cli.schema import SchemaVerb
from bench.spec import RunSpec

_BOUNDS = {"minimum", "exclusiveMinimum", "maxLength", "pattern", "enum"}
#: Names, paths and seeds: whatever there is of that type.
_FREE = {"path", "seed", "linear_recipe", "config", "factory"}


def fields(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for title, model in {"": document, **document["$defs"]}.items():
        for name, field in model.get("properties", {}).items():
            yield f"{title}.{name}", field


@pytest.fixture(scope="module")
def run_schema() -> dict[str, Any]:
    """What may stand below `base` of a sweep."""
    known = SchemaVerb().run().data["$defs"]
    return known["RunSpec"] | {
        "$defs": {one: known[one] for one in RunSpec.model_json_schema()["$defs"]}
    }


def test_every_setting_is_described(run_schema):
    assert [name for name, field in fields(run_schema) if not field.get("description")] == []


def test_every_setting_says_what_it_may_be(run_schema):
    without = []
    for name, field in fields(run_schema):
        ways = field.get("anyOf", [field])
        bound = all(
            _BOUNDS & set(way) or way.get("type") in ("boolean", "null", "object") or "$ref" in way
            for way in ways
        )
        if not bound and name.partition(".")[2] not in _FREE:
            without.append(name)
    assert without == []


def test_every_default_is_an_allowed_value(run_schema):
    for name, field in fields(run_schema):
        if "enum" in field:
            assert field["default"] in field["enum"], name
