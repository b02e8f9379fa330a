"""Ranges of a step: one at a time, in NVTX where there is one."""

from __future__ import annotations

import sys
import types

from bench.meters.ranges import Ranges, nvtx_calls


def test_ranges_follow_one_another_in_nvtx_too(monkeypatch):
    calls = []
    twin = types.SimpleNamespace(
        push_range=lambda message, domain: calls.append((message, domain)),
        pop_range=lambda domain: calls.append(("pop", domain)),
    )
    twin.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "nvtx", twin)
    ranges = Ranges()
    ranges.end()
    ranges.mark("microbatch 1")
    ranges.mark("update")
    ranges.end()
    assert [name for name, _ in calls] == ["microbatch 1", "pop", "update", "pop"]


def test_without_nvtx_and_without_a_device_ranges_do_nothing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    push, pop = nvtx_calls()
    assert push("a") is None
    assert pop() is None
