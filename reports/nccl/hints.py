"""What the lines suggest beyond what they prove: observations for a reader, never for a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.nccl.cells import Replay
from reports.nccl.verdicts import Row, Verdict
from reports.nccl.version import Versions

_MOST_RATIO = 64
_SMALLEST_COMPARED_BYTES = 4096
_MOST_HINTS = 8


def hints(made: Replay, rows: Sequence[Row]) -> list[str]:
    """Sentences, each with the observation that it rests on."""
    unknown = [row for row in rows if not row.communicator.attributed]
    if not unknown:
        return []
    found = [
        *_version(made, unknown),
        *_brackets(unknown),
        *_roots(unknown),
        *_cascades(unknown),
        *_no_multicast(unknown),
    ]
    return found[:_MOST_HINTS]


def _version(made: Replay, rows: Sequence[Row]) -> Iterator[str]:
    stated = any(process.version_line for process in made.job.processes.values())
    versions = {process.versions for process in made.job.processes.values()}
    if stated or len(versions) != 1 or versions == {Versions()} or not rows:
        return
    yield f"No line states the version; the forms of the lines are those of {versions.pop()}."


def _brackets(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield (
            "The number in brackets is the local CUDA device, not a rank, and without COLL lines no"
            " line says which communicator it is about."
        )
    if any(row.at_least for row in rows):
        yield (
            "Symmetric lines of 2.27 are printed by every rank, all others by rank 0 of the"
            " communicator alone: that a process prints only symmetric lines says nothing about its"
            " other collectives, and which processes print none proves nothing."
        )


def _roots(rows: Sequence[Row]) -> Iterator[str]:
    """The same regular line from two processes comes from two communicators."""
    for row in rows:
        if row.verdict is Verdict.REGULAR and len(row.processes) > 1:
            shown = ", ".join(row.processes[:4])
            yield (
                f"{shown} each print {row.operation} of {row.size_bytes:,} bytes as rank 0 of a"
                f" communicator: there are at least {len(row.processes)} of them."
            )
            return


def _cascades(rows: Sequence[Row]) -> Iterator[str]:
    """Sizes that are an exact multiple of another process's, as in a reduction over two axes."""
    scatters = [
        row
        for row in rows
        if row.operation == "ReduceScatter" and row.size_bytes > _SMALLEST_COMPARED_BYTES
    ]
    for large in scatters:
        for small in scatters:
            ratio = large.size_bytes // small.size_bytes
            apart = not set(large.processes) & set(small.processes)
            if apart and large.size_bytes == ratio * small.size_bytes and 1 < ratio <= _MOST_RATIO:
                printing = ", ".join(large.processes[:2])
                yield (
                    f"ReduceScatter of {large.size_bytes:,} bytes ({printing})"
                    f" is exactly {ratio} x the {small.size_bytes:,} bytes of"
                    f" {', '.join(small.processes[:4])}: this looks like a reduction over an inner"
                    f" axis, then over an outer one of {ratio} ranks."
                )
                return


def _no_multicast(rows: Sequence[Row]) -> Iterator[str]:
    kernels = {k for row in rows if row.verdict is Verdict.SYMMETRIC for k in row.kernels}
    plain = sorted(k for k in kernels if "MC" not in k and not k.startswith(("AllGather_Rail",)))
    if plain and len(plain) == len(kernels):
        yield (
            f"{', '.join(plain)} uses no multicast (no MC in its name): its communicator has no"
            " NVLS, which needs more than two local ranks."
        )
