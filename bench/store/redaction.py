"""Keeps secrets out of records: nothing that looks like one is written to disk.

Two signs: the name of a variable (TOKEN, KEY, PASSWORD ... as a word of the name), or the form of a
value (well-known token prefixes, a password inside a URL). Better one redaction too many: a record
is meant to be shared.
"""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"

_SECRET_WORD = re.compile(
    r"(?:^|[_.-])(?:\w*TOKENS?|\w*KEY|\w*SECRETS?|PASS|PASSWD|\w*PASSWORD|PASSPHRASE"
    r"|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE|PAT)(?:$|[_.-])",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[opsur]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
    r"|sk-[A-Za-z0-9_-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{12,}|nvapi-[\w-]{8,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|Bearer\s+\S{8,})"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def looks_secret(name: str) -> bool:
    """True if a variable of this name is expected to hold a secret."""
    return _SECRET_WORD.search(name) is not None


def redact_text(text: str) -> str:
    """`text` without anything that has the form of a token or of a password in a URL."""
    return _URL_PASSWORD.sub(REDACTED, _SECRET_VALUE.sub(REDACTED, text))


def redact(document: Any) -> Any:
    """A copy of plain JSON data in which secret-looking entries are replaced by `REDACTED`."""
    if isinstance(document, dict):
        return {
            key: REDACTED if isinstance(value, str) and looks_secret(str(key)) else redact(value)
            for key, value in document.items()
        }
    if isinstance(document, list | tuple):
        return [redact(item) for item in document]
    return redact_text(document) if isinstance(document, str) else document
