"""Ranges of a step: parts one at a time, units and collectives of an engine that tells of them."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

from bench.meters.ranges import Ranges, nvtx_calls


def twin_of_nvtx(monkeypatch):
    calls = []
    twin = types.SimpleNamespace(
        start_range=lambda message, domain: calls.append((message, domain)) or message,
        end_range=lambda handle: calls.append(("end", handle)),
    )
    twin.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "nvtx", twin)
    return calls


def test_ranges_follow_one_another_in_nvtx_too(monkeypatch):
    calls = twin_of_nvtx(monkeypatch)
    ranges = Ranges()
    ranges.end()
    ranges.mark("microbatch 1")
    ranges.mark("update")
    ranges.close()
    assert calls == [
        ("microbatch 1", "mfsdp-bench"),
        ("end", "microbatch 1"),
        ("update", "mfsdp-bench"),
        ("end", "update"),
    ]


def test_an_engine_that_tells_of_its_units_is_listened_to_until_the_end(monkeypatch):
    calls = twin_of_nvtx(monkeypatch)
    heard = []

    class Engine:
        @contextmanager
        def annotated(self, begin, end):
            end(begin("forward layers.0"))
            end(begin("all_gather of layers.0/0"))
            yield
            heard.append("over")

    ranges = Ranges(Engine())
    ranges.begin()
    assert [name for name, _ in calls] == [
        "forward layers.0",
        "end",
        "all_gather of layers.0/0",
        "end",
    ]
    ranges.close()
    assert heard == ["over"]


def test_without_nvtx_and_without_a_device_ranges_do_nothing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    start, stop = nvtx_calls()
    assert start("a") is None
    assert stop(None) is None
