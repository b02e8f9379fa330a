"""What documents share is said once, and nothing of any is lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from reports.sections.appendix import shared_and_own

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers())
DOCUMENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.recursive(
        LEAVES, lambda inner: st.dictionaries(st.text("abc", max_size=2), inner), max_leaves=8
    ),
)


def merged(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = dict(shared)
    for key, value in own.items():
        nested = isinstance(value, dict) and isinstance(shared.get(key), dict)
        both[key] = merged(shared[key], value) if nested else value
    return both


@settings(max_examples=40)
@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_shared_and_own_together_give_every_document_back(documents):
    shared, own = shared_and_own(documents)
    assert [merged(shared, mine) for mine in own] == documents


def test_only_what_differs_is_told_of_each():
    torch = {"machine": {"cpu": "x", "load": 1}, "python": "3.11"}
    other = {"machine": {"cpu": "x", "load": 2}, "python": "3.11", "cuda": "13"}
    shared, own = shared_and_own([torch, other])
    assert shared == {"machine": {"cpu": "x"}, "python": "3.11"}
    assert own == [{"machine": {"load": 1}}, {"machine": {"load": 2}, "cuda": "13"}]
