"""`schema`: JSON Schemas for editors."""

from __future__ import annotations

import json

from pydantic import BaseModel

from bench.cli.answer import Answer
from bench.cli.verbs.check import SchemaRequest
from bench.resolve.presets import PRESETS
from bench.spec import RunSpec
from sweeps.schema import SweepFile

_DOCUMENTS: dict[str, type[BaseModel]] = {"sweep": SweepFile, "run": RunSpec}


def show_schema(asked: SchemaRequest) -> Answer:
    """The JSON Schema of what is asked for, which is JSON in either form."""
    document = _DOCUMENTS[asked.what].model_json_schema()
    document["$defs"]["ModelSpec"]["properties"]["preset"]["enum"] = list(PRESETS)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return Answer(lambda: document, lambda: json.dumps(document, indent=2))
