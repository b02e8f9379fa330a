"""`schema`: JSON Schemas for editors."""

from __future__ import annotations

from pydantic import BaseModel

from bench.cli import console, exit_codes
from bench.errors import UsageError
from bench.resolve.presets import PRESETS
from bench.spec import ResolvedRun, RunSpec
from sweeps.schema import SweepFile
from sweeps.suggest import did_you_mean

_DOCUMENTS: dict[str, type[BaseModel]] = {
    "sweep": SweepFile,
    "run": RunSpec,
    "resolved": ResolvedRun,
}


def show_schema(what: str) -> int:
    """Print the JSON Schema of `what`.

    Raises:
        UsageError: there is no such document.
    """
    if what not in _DOCUMENTS:
        known = ", ".join(_DOCUMENTS)
        raise UsageError(f"expected one of {known}, found {what!r}{did_you_mean(what, _DOCUMENTS)}")
    document = _DOCUMENTS[what].model_json_schema()
    if "ModelSpec" in document["$defs"]:
        document["$defs"]["ModelSpec"]["properties"]["preset"]["enum"] = list(PRESETS)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    console.data_json(document)
    return exit_codes.OK
