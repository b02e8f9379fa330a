"""Ranges of a step: parts one at a time, units and collectives of an engine that tells of them."""

from __future__ import annotations

from contextlib import contextmanager

import nvtx

from bench.meters.ranges import Ranges


def calls_of_nvtx(monkeypatch):
    """What the real package is asked, which is asked."""
    calls = []
    start, end = nvtx.start_range, nvtx.end_range

    def started(message, domain):
        calls.append((message, domain))
        return message, start(message=message, domain=domain)

    def ended(handle):
        calls.append(("end", handle[0]))
        end(handle[1])

    monkeypatch.setattr(nvtx, "start_range", started)
    monkeypatch.setattr(nvtx, "end_range", ended)
    return calls


def test_ranges_follow_one_another_in_nvtx_too(monkeypatch):
    calls = calls_of_nvtx(monkeypatch)
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
    calls = calls_of_nvtx(monkeypatch)
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
