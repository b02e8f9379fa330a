"""`schema`: the JSON Schema of a sweep file, for editors."""

from __future__ import annotations

import json

from bench.cli.answer import Answer
from bench.cli.verbs.check import SchemaRequest
from bench.resolve.presets import PRESETS
from sweeps.schema import SweepFile


def show_schema(_asked: SchemaRequest) -> Answer:
    """JSON in either form."""
    document = SweepFile.model_json_schema()
    document["$defs"]["ModelSpec"]["properties"]["preset"]["enum"] = list(PRESETS)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return Answer(lambda: document, lambda: json.dumps(document, indent=2))
