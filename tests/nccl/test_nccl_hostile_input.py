"""Input that is damaged or hostile ends with a message, in bounded memory."""

from __future__ import annotations

import gzip
import os
import threading
import tracemalloc

import pytest
import zstandard

from nccl_lines import audit, coll, info, init, reg, ring
from reports.nccl import reader, timeline
from reports.nccl.audit import audit_paths
from reports.nccl.presentation import to_data, to_junit
from reports.nccl.verdicts import judge, parse_requirements, profile

LINE = b"n1:1:2 [0] NCCL INFO AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n"


def test_a_named_pipe_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(LINE * 3))
    writer.start()
    job = audit_paths([pipe]).job
    writer.join()
    assert job.lines == 3


def test_compressed_overlong_and_unknown_lines_of_a_folder_are_one_job(tmp_path):
    (tmp_path / "log.zst").write_bytes(zstandard.compress(LINE) + zstandard.compress(LINE))
    (tmp_path / "long.log").write_bytes(b"x" * (3 << 20) + b"\n" + LINE.replace(b"n1:1:", b"n1:2:"))
    (tmp_path / "log").write_bytes(b"n1:1:2 [0] NCCL INFO Frobnicating 17 widgets\n" * 4)
    job = audit_paths([tmp_path]).job
    assert (job.lines, len(job.processes)) == (7, 2)
    assert (job.unread.overlong, job.unread.unknown.total()) == (1, 4)
    assert "Frobnicating 17 widgets" in job.unread.examples.values()


def test_a_cut_gzip_keeps_what_was_read(tmp_path):
    noise = os.urandom(200_000).hex().encode()
    (tmp_path / "log.gz").write_bytes(gzip.compress(LINE * 5 + noise)[:-200])
    job = audit_paths([tmp_path / "log.gz"]).job
    assert job.lines == 5
    assert "cut off" in " ".join(job.remarks)


def test_junit_tells_missing_evidence_from_a_requirement_not_met(tmp_path):
    (tmp_path / "log").write_bytes(LINE)
    wanted = (*parse_requirements("AR=sym"), *profile("fsdp"))
    text = to_junit(judge(audit_paths([tmp_path]), wanted))
    assert 'type="RequirementNotMet"' in text
    assert text.count('type="NoEvidence"') == 2


def test_a_copy_of_a_log_is_counted_once_and_its_continuation_too(tmp_path):
    (tmp_path / "1.log").write_bytes(LINE * 3)
    (tmp_path / "copy.log").write_bytes(LINE * 3)
    (tmp_path / "more.log").write_bytes(LINE * 2)
    job = audit_paths([tmp_path]).job
    assert (job.lines, len(job.processes)) == (5, 1)
    assert "was counted once" in " ".join(job.remarks)


def test_a_repeated_line_is_no_longer_alone_once_a_call_or_a_registration_came(tmp_path):
    line = info(ring("AllGather"))
    call = info(coll("AllGather"))
    before = [*map(info, init(0)), line, line, line, call, line]
    after = [info(reg()), line, line, call, line]
    rows = {row.phase: row for row in audit(tmp_path, *before, *after).rows}
    assert {phase: row.lines for phase, row in rows.items()} == {"before": 4, "after": 3}
    assert not any("without a line" in text for row in rows.values() for text in row.remarks)


@pytest.fixture
def low_limits(monkeypatch):
    for name in ("MOST_ITEMS", "MOST_OBSERVATIONS"):
        monkeypatch.setattr(timeline, name, 200)
    monkeypatch.setattr(reader, "_MOST_KNOWN", 200)


@pytest.mark.usefixtures("low_limits")
def test_memory_does_not_grow_with_distinct_lines_beyond_the_limits():
    stream = reader.StreamReader("log", reader.Unread())
    tracemalloc.start()
    try:
        held = []
        for number in range(1, 8001):
            stream.feed(info(ring("AllReduce", number)).encode() + b"\n")
            if number in (6000, 8000):
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] < 50_000


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize("called", [False, True])
def test_lines_beyond_the_limits_are_counted_though_not_kept(tmp_path, called):
    lines = []
    for number in range(1, 301):
        lines += [info(coll("AllReduce", count=number))] * called
        lines.append(info(ring("AllReduce", 2 * number)))
    job = audit(tmp_path, *lines).job
    assert job.lines == len(lines)
    lost = f"{100 + 100 * called} state changes, TUNING and COLL lines beyond the limits"
    assert lost in " ".join(job.remarks)


@pytest.mark.parametrize("version", ["2.27.7+cuda12.9", "2.29.2+cuda13.0"])
def test_ever_new_groups_of_the_same_calls_count_as_without_limits(tmp_path, version, request):
    lines = [info(f"NCCL version {version}"), *map(info, init(0))]
    for number in range(1600):
        sizes = [1024 * (1 + number % 40), 1024 * (1 + number // 40)]
        lines += [info(coll("AllReduce", count=size // 2), tid=7 + number % 3) for size in sizes]
        lines += [info(ring("AllReduce", size), tid=7 + number % 3) for size in sizes]
    whole = to_data(audit(tmp_path, *lines))
    request.getfixturevalue("low_limits")
    assert to_data(audit(tmp_path, *lines)) == whole


def test_a_quoted_line_stood_in_the_log(tmp_path):
    first = coll("AllGather").replace("0x5566", "0x55")
    second = coll("AllGather", send="0x2000").replace("0x5566", "0x77")
    messages = [first, ring("AllGather"), second, second, ring("AllGather")]
    log = [f'{{"log":"{info(one)}","time":"{100 + i}"}}' for i, one in enumerate(messages)]
    (one,) = audit(tmp_path, *log).job.processes.values()
    quotes = [seen.call_line for seen in one.observations()]
    assert len(quotes) == 2
    assert all(any(line.endswith(quote) for line in log) for quote in quotes)
