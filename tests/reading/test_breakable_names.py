"""Long names in tables may be broken at their joints, so that a page of 1200 px needs no scroll."""

from __future__ import annotations

import pytest

from reports.renderers.html import _breakable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mfsdp-optim_grads", "mfsdp-<wbr>optim_<wbr>grads"),
        ("plain", "plain"),
        ("-12.0 %", "-<wbr>12.0 %"),
        ("end-", "end-"),
        ("<script>a-b</script>", "&lt;script&gt;a-<wbr>b&lt;/script&gt;"),
        ("a&lt;-b", "a&amp;lt;-<wbr>b"),
    ],
)
def test_a_name_may_be_broken_at_its_joints_and_stays_escaped(text: str, shown: str) -> None:
    assert str(_breakable(text)) == shown
