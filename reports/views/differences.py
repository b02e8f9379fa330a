"""What documents of one shape have in common, said once, and what each has of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT = object()


def shared_and_own(
    documents: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Entries equal in all documents, and per document those that are not.

    Mappings are compared entry by entry, at every depth; lists as a whole. Putting a document's own
    entries back on top of the shared ones gives the document.
    """
    shared: dict[str, Any] = {}
    own: list[dict[str, Any]] = [{} for _ in documents]
    keys = dict.fromkeys(key for document in documents for key in document)
    for key in keys:
        values = [document.get(key, _ABSENT) for document in documents]
        if all(isinstance(value, Mapping) and value for value in values):
            inner, rests = shared_and_own(values)
            if inner:
                shared[key] = inner
            for rest, mine in zip(rests, own, strict=True):
                if rest:
                    mine[key] = rest
        elif all(value == values[0] and type(value) is type(values[0]) for value in values):
            shared[key] = values[0]
        else:
            for value, mine in zip(values, own, strict=True):
                if value is not _ABSENT:
                    mine[key] = value
    return shared, own
