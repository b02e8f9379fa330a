"""Keeps secrets out of records: nothing that looks like one is written to disk or printed.

Three signs: the name of a variable (TOKEN, KEY, PASSWORD, CRED ... as a word of the name), such a
name before an equals sign in a text, or the form of a value (well-known token prefixes, a password
inside a URL). Better one redaction too many: a record is meant to be shared.
"""

from __future__ import annotations

import re
from typing import Any

REDACTED = "<redacted>"

_WORDS = (
    r"\w*TOKENS?|\w*KEY|\w*SECRETS?|PASS|PASSWD|\w*PASSWORDS?|PWD|PASSPHRASE"
    r"|\w*CREDS?|\w*CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE|PAT"
)
_SECRET_WORD = re.compile(rf"(?:^|[_.-])(?:{_WORDS})(?:$|[_.-])", re.IGNORECASE)
# Capitals only: `key=value` in a sentence is not an environment variable.
_ASSIGNMENT = re.compile(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)=([^\s,;'\"]+)")
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[opsur]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
    r"|sk-[A-Za-z0-9_-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{12,}|nvapi-[\w-]{8,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|Bearer\s+\S{8,})"
)
# In a path a URL has one slash.
_URL_PASSWORD = re.compile(r"(?:(?<=://)|(?<=:/)(?!/))[^/\s:@]*:[^/\s@]+(?=@)")


def looks_secret(name: str) -> bool:
    """True if a variable of this name is expected to hold a secret."""
    return _SECRET_WORD.search(name) is not None


def redact_text(text: str) -> str:
    """`text` without tokens, passwords in URLs, and values of variables with a secret's name."""
    text = _ASSIGNMENT.sub(_without_value, text) if "=" in text else text
    return _URL_PASSWORD.sub(REDACTED, _SECRET_VALUE.sub(REDACTED, text))


def _without_value(match: re.Match[str]) -> str:
    name = match.group(1)
    return f"{name}={REDACTED}" if looks_secret(name) else match.group(0)


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
