"""`hosts.json` in the results folder: where the first host is met, or how it has ended.

All hosts share the folder. Only their user can read the file: it holds the key of the meeting.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

MEETING = "hosts.json"


@dataclass(frozen=True)
class Meeting:
    """key: hexadecimal; both sides of a connection prove that they know it."""

    address: str
    port: int
    key: str


@dataclass(frozen=True)
class Ended:
    """The first host has left at `ended_seconds` (Unix time). why: "" where there is no error."""

    exit_code: int
    why: str
    ended_seconds: float


_FOUND: TypeAdapter[Meeting | Ended] = TypeAdapter(Meeting | Ended)


def write_meeting(results: Path, found: Meeting | Ended) -> None:
    """Replace what is there as one step.

    Raises:
        OSError: it cannot be written.
    """
    draft = results / f".{MEETING}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(asdict(found), stream)
    draft.replace(results / MEETING)


def read_meeting(results: Path) -> Meeting | Ended | None:
    """None if no first host has been there, or what is there cannot be read."""
    try:
        return _FOUND.validate_json((results / MEETING).read_bytes())
    except (OSError, ValueError):
        return None
