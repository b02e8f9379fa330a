"""How many lines a room may hold: its number is lowered in the commit that shrinks the room.

A number rises only in a commit that names the feature that an issue asks for, and its lines.
"""

from __future__ import annotations

import pytest

from tracked import ROOT, text_of, tracked

SLACK = 60
"""Lines by which a number may stand above its room, so that a small change need not touch it."""

ROOMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "mfsdp_core": (15779, ("mfsdp_core/",)),
    "bench: spec, resolve": (3395, ("bench/spec/", "bench/resolve/")),
    "bench: record, store, derive, errors": (4273, (
        "bench/store/", "bench/derive/", "bench/plan.py", "bench/record.py", "bench/workload.py",
        "bench/verdict.py", "bench/errors.py", "bench/redaction.py", "bench/removed.py",
        "bench/known_failures.py", "bench/__init__.py",
    )),
    "bench: models, data": (1803, ("bench/models/", "bench/data/")),
    "bench: engines": (2286, ("bench/engines/",)),
    "bench: meters, worker, loop": (2631, ("bench/meters/", "bench/worker/", "bench/loop.py")),
    "bench: launch": (3571, ("bench/launch/",)),
    "bench: validate, testing, plug-in": (7288, (
        "bench/validate/", "bench/testing/", "bench/testing_plugin.py",
    )),
    "bench: fit": (1452, ("bench/fit/",)),
    "bench: importers": (1812, ("bench/importers/",)),
    "bench: cli": (3973, ("bench/cli/", "bench/__main__.py")),
    "bench: doctor": (232, ("bench/doctor/",)),
    "sweeps": (2981, ("sweeps/",)),
    "reports: nccl": (3569, ("reports/nccl/",)),
    "reports: compare": (5966, (
        "reports/compare/", "reports/views/", "reports/frames.py", "reports/findings.py",
    )),
    "reports: report": (4409, (
        "reports/__init__.py", "reports/build.py", "reports/exports.py",
        "reports/plots/", "reports/posts/", "reports/renderers/", "reports/sections/",
    )),
    "examples/engines": (930, ("examples/",)),
    "tools": (1373, ("tools/",)),
    "tests": (46959, ("tests/",)),
}  # fmt: skip
"""Lines of *.py that a room may hold, and what begins the paths of its files."""

SOURCES = ("mfsdp_core/", "bench/", "sweeps/", "reports/", "tools/", "examples/", "tests/")


def lines_of_python() -> dict[str, int]:
    """Path below the root and number of lines of every Python file of the rooms."""
    paths = [path for path in tracked() if path.suffix == ".py"]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {
        name: len(text_of(path).splitlines())
        for name, path in named.items()
        if name.startswith(SOURCES)
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_holds_no_more_lines_than_its_number(room: str) -> None:
    most, prefixes = ROOMS[room]
    held = sum(lines for name, lines in lines_of_python().items() if name.startswith(prefixes))
    assert held <= most, f"{room}: {held:,} lines of *.py, {most:,} allowed: take out as many"
    assert held >= most - SLACK, f"{room}: {held:,} lines of *.py: lower its number from {most:,}"


def test_every_file_lies_in_one_room() -> None:
    homes = {
        name: [room for room, (_, prefixes) in ROOMS.items() if name.startswith(prefixes)]
        for name in lines_of_python()
    }
    assert {name: rooms for name, rooms in homes.items() if len(rooms) != 1} == {}
