"""Documents of older versions as today's code reads them. What lies on disk is never changed.

Version 1 is still the version of a results folder: all that came later can be left out.

    came later                         a document without it
    engine.fine_grained_gather         every unit was gathered whole
    dtypes.reduce                      as the transport of its backend added up; `former_sums`
    names of runs by what differs      `config_hash` in a plan is made again from `resolved`
    status.json: files, checksum       nothing says whether files were changed since
    `seal` became `checksum`           the same under its former name
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from bench.spec import ResolvedRun
from bench.spec.former_name import former_sums


def upgraded_spec(document: Any) -> Any:
    """`spec.json` of any version, as `ResolvedRun` reads it."""
    if not isinstance(document, dict) or not isinstance(engine := document.get("engine"), dict):
        return document
    dtypes = document.get("dtypes")
    if isinstance(dtypes, dict) and "reduce" not in dtypes and "grad_comm" in dtypes:
        document = document | {"dtypes": dtypes | {"reduce": former_sums(document)}}
    if engine.get("name") != "mfsdp":
        return document
    return document | {"engine": {"fine_grained_gather": False} | engine}


def upgraded_status(document: dict[str, Any]) -> dict[str, Any]:
    """`status.json` of any version."""
    if "seal" not in document:
        return document
    return {name: value for name, value in document.items() if name != "seal"} | {
        "checksum": document["seal"]
    }


def upgraded_plan(document: dict[str, Any]) -> dict[str, Any]:
    """`plan.json` of any version: its runs are named as the records of today are."""
    cells = document.get("cells")
    if not isinstance(cells, list):
        return document
    return document | {"cells": [_renamed_cell(cell) for cell in cells]}


def _renamed_cell(cell: Any) -> Any:
    if not isinstance(cell, dict):
        return cell
    by_arm = cell.get("by_arm")
    renamed = _renamed(cell)
    if isinstance(by_arm, dict):
        renamed["by_arm"] = {arm: _renamed(run) for arm, run in by_arm.items()}
    return renamed


def _renamed(run: Any) -> Any:
    """With the hash, and the resolved settings, that the run has today; as it is if damaged."""
    if not isinstance(run, dict) or not isinstance(run.get("resolved"), dict):
        return run
    resolved = upgraded_spec(run["resolved"])
    try:
        named = ResolvedRun.model_validate(resolved).config_hash
    except ValidationError:
        return run
    return run | {"resolved": resolved, "config_hash": named}
