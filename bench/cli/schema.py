"""`schema`: the JSON Schema of a sweep file."""

from __future__ import annotations

import json

from bench.cli.verb import Answer, Verb


class SchemaVerb(Verb, name="schema"):
    """Print the JSON Schema of a sweep file.

    Examples:
        schema > sweep.schema.json
    """

    def run(self) -> Answer:
        """JSON in either form."""
        from bench.resolve.presets import PRESETS
        from sweeps.schema import SweepFile

        document = SweepFile.model_json_schema()
        document["$defs"]["ModelSpec"]["properties"]["preset"]["enum"] = list(PRESETS)
        document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return Answer(json.dumps(document, indent=2), document)
